"""One bring-up of the lab: its daemons in their order, each recorded at once and waited for.

Record        lab.json: who was started, and as what
Start         the bring-up
ask, sinfo    what the lab's Slurm says
"""

import contextlib
import json
import os
import pwd
import secrets
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hpcrl.errors import LabError
from hpcrl.lab import daemons, keeper
from hpcrl.lab.conf import Cluster, LabDir, reserved_ports, write_conf
from hpcrl.lab.daemons import TOKEN, Daemon, Marks
from hpcrl.slurm.commands import run_slurm
from hpcrl.system import files

START_TIMEOUT_S = 120.0


@dataclass(frozen=True, kw_only=True)
class Record:
    """lab.json: enough for another process to end everything, published after every step of the bring-up."""

    token: str
    host: str
    boot: str
    cluster: dict[str, Any]
    complete: bool = False
    daemons: tuple[Daemon, ...] = ()

    def marks(self, lab: LabDir) -> Marks:
        return Marks(token=self.token, conf=lab.conf)


class Start:
    """One bring-up. Every daemon is recorded as soon as it is started, so that `down` finds it whatever happens."""

    def __init__(self, lab: LabDir, *, cluster: Cluster) -> None:
        self.lab = lab
        self.cluster = cluster
        self.deadline = time.monotonic() + START_TIMEOUT_S
        self.record = Record(
            token=secrets.token_hex(16), host=socket.gethostname(), boot=boot_id(), cluster=as_json(cluster)
        )

    def run(self) -> None:
        user = pwd.getpwuid(os.getuid()).pw_name
        self._publish()
        with reserved_ports(2 + len(self.cluster.node_names())) as ports:
            write_conf(self.lab, cluster=self.cluster, ports=ports, user=user)
            self._start_munge()
            self._start_database(user)
            self._start("slurmdbd", "slurmdbd", "-D")
            self._until_listens("slurmdbd", (socket.AF_INET, ("127.0.0.1", ports[1])))
            self._start("slurmctld", "slurmctld", "-D")
            for node in self.cluster.node_names():
                slurmd = [daemons.program("slurmd"), "-D", "-N", node]
                self._start(f"slurmd-{node}", sys.executable, "-IS", keeper.__file__, *slurmd)
            self._until_listens("slurmctld", (socket.AF_INET, ("127.0.0.1", ports[0])))
            self._until("slurmctld", "every node idle", lambda: _all_idle(self.lab, self.cluster))
            self._until("slurmdbd", "the cluster in the accounts", lambda: _is_accounted(self.lab, self.cluster))
        self._publish(complete=True)

    def _start_munge(self) -> None:
        """With --force, for munged wants its socket where other users could reach it, and this one is private."""
        home = self.lab.root / "munge"
        options = {"key": self.lab.munge_key, "socket": self.lab.munge_socket, "pid": home / "pid"}
        options |= {"log": home / "log", "seed": home / "seed"}
        flags = [f"--{name}{'' if name == 'socket' else '-file'}={path}" for name, path in options.items()]
        self._start("munged", "munged", "--foreground", "--force", *flags)
        self._until_listens("munged", (socket.AF_UNIX, str(self.lab.munge_socket)))

    def _start_database(self, user: str) -> None:
        defaults = f"--defaults-file={self.lab.root / 'my.cnf'}"
        owner = ["--auth-root-authentication-method=socket", f"--auth-root-socket-user={user}"]
        self._run("mariadb-install-db", defaults, "--skip-test-db", "--skip-name-resolve", f"--user={user}", *owner)
        self._start("mariadbd", "mariadbd", defaults)
        self._until_listens("mariadbd", (socket.AF_UNIX, str(self.lab.db_socket)))

    def _start(self, name: str, command: str, *arguments: str) -> Daemon:
        daemon = daemons.spawn(
            [daemons.program(command), *arguments],
            name=name,
            environment=_environment(self.lab) | {TOKEN: self.record.token, "MYSQL_UNIX_PORT": str(self.lab.db_socket)},
            cwd=self.lab.root / "log",
            log=self.lab.log(name),
        )
        self._publish(daemons=(*self.record.daemons, daemon))
        return daemon

    def _run(self, command: str, *arguments: str) -> None:
        """A daemon that ends: recorded like the others meanwhile, and it must end well."""
        before = self.record.daemons
        helper = self._start(command, command, *arguments)
        while True:
            pid, wait_status = os.waitpid(helper.pid, os.WNOHANG)
            if pid:
                break
            if time.monotonic() > self.deadline:
                raise LabError(f"{command} did not end in {START_TIMEOUT_S:.0f} s; {self._tail(command)}")
            time.sleep(0.02)
        if code := os.waitstatus_to_exitcode(wait_status):
            raise LabError(f"{command} ended with {code}; {self._tail(command)}")
        self._publish(daemons=before)

    def _until_listens(self, name: str, address: tuple[int, Any]) -> None:
        def listens() -> bool:
            with socket.socket(address[0]) as probe:
                return probe.connect_ex(address[1]) == 0

        self._until(name, "listening", listens)

    def _until(self, name: str, what: str, check: Callable[[], bool]) -> None:
        """Poll `check`; every daemon must live meanwhile, and `name` is whom to blame when time runs out."""
        while not check():
            for daemon in self.record.daemons:
                if not daemon.is_alive():
                    raise LabError(f"{daemon.name} ended while the lab was starting; {self._tail(daemon.name)}")
            if time.monotonic() > self.deadline:
                raise LabError(f"{name}: not {what} after {START_TIMEOUT_S:.0f} s; {self._tail(name)}")
            time.sleep(0.05)

    def _tail(self, name: str) -> str:
        with contextlib.suppress(OSError):
            lines = self.lab.log(name).read_text(errors="replace").splitlines()[-12:]
            return "the last it said:\n  " + "\n  ".join(lines)
        return "it said nothing"

    def _publish(self, *, daemons: tuple[Daemon, ...] | None = None, complete: bool = False) -> None:
        values = vars(self.record) | {"complete": complete}
        self.record = Record(**(values if daemons is None else values | {"daemons": daemons}))
        files.publish_json(self.lab.record, asdict(self.record))


def as_json(cluster: Cluster) -> dict[str, Any]:
    plain: dict[str, Any] = json.loads(json.dumps(asdict(cluster)))
    return plain


def boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def ask(lab: LabDir, command: str, *arguments: str, timeout_s: float = 5.0) -> str:
    """What a Slurm command prints; nothing if it fails or does not answer."""
    done = run_slurm([daemons.program(command), *arguments], env=_environment(lab), timeout_s=timeout_s)
    return done.stdout.strip() if done.returncode == 0 else ""


def sinfo(lab: LabDir) -> list[tuple[str, str, str]]:
    """Node, partition and state, as slurmctld sees them."""
    lines = ask(lab, "sinfo", "--noheader", "--Node", "--format=%N|%R|%T").splitlines()
    return [(name, partition, state) for name, partition, state in (line.split("|") for line in lines)]


def _environment(lab: LabDir) -> dict[str, str]:
    """A small environment of our own: the caller's SLURM_*, SINFO_* and locale must not change what is said."""
    kept = {name: os.environ[name] for name in ("HOME", "TZ") if name in os.environ}
    return kept | {"PATH": daemons.search_path(), "LANG": "C.UTF-8", "SLURM_CONF": str(lab.conf)}


def _all_idle(lab: LabDir, cluster: Cluster) -> bool:
    states = {name: state for name, _, state in sinfo(lab)}
    return states == dict.fromkeys(cluster.node_names(), "idle")


def _is_accounted(lab: LabDir, cluster: Cluster) -> bool:
    """slurmctld enters the cluster by itself; sacct has nothing to say before that."""
    table = ask(lab, "sacctmgr", "--noheader", "--parsable2", "list", "cluster", "format=Cluster,ControlHost")
    return f"{cluster.name}|127.0.0.1" in table.splitlines()
