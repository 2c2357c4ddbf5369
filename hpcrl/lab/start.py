"""Start the lab: its daemons in order, each recorded at once and waited for.

LabRecord           lab.json: the daemons and the cluster that were started
LabStartup          one start of the lab
run_slurm_command   run a command of the lab's Slurm
list_node_states    the states of the nodes
encode_cluster      the nodes as recorded in lab.json
read_boot_id        the id of this boot of the machine
START_TIMEOUT_S     how long a start may take
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
from hpcrl.lab.conf import LabCluster, LabDir, reserve_ports, write_conf
from hpcrl.lab.daemons import TOKEN_VARIABLE, LabDaemon, ProcessMarks
from hpcrl.lab.node_isolation import find_shared_dirs, isolate_command, name_cgroup
from hpcrl.slurm.commands import run_slurm
from hpcrl.system import files

START_TIMEOUT_S = 120.0


@dataclass(frozen=True, kw_only=True)
class LabRecord:
    """The record in lab.json: enough for another process to end everything, published after every step of a start."""

    token: str
    host: str
    boot: str
    cluster: dict[str, Any]
    complete: bool = False
    daemons: tuple[LabDaemon, ...] = ()

    def make_marks(self, lab: LabDir) -> ProcessMarks:
        return ProcessMarks(token=self.token, conf=lab.conf)


class LabStartup:
    """The start of a lab. Every daemon is recorded as soon as it is started, so that `down` always finds it."""

    def __init__(self, lab: LabDir, *, cluster: LabCluster, record: LabRecord | None = None) -> None:
        """Take the record of a lab that is up, of which a part is to be started again."""
        self.lab = lab
        self.cluster = cluster
        self.deadline = time.monotonic() + START_TIMEOUT_S
        self.record = record or LabRecord(
            token=secrets.token_hex(16), host=socket.gethostname(), boot=read_boot_id(), cluster=encode_cluster(cluster)
        )

    def run(self) -> None:
        user = pwd.getpwuid(os.getuid()).pw_name
        self._publish()
        with reserve_ports(2 + len(self.cluster.node_names())) as ports:
            write_conf(self.lab, cluster=self.cluster, ports=ports, user=user)
            self._start_munge()
            self._start_database(user)
            self._start_daemon("slurmdbd", "slurmdbd", "-D")
            self._wait_until_listening("slurmdbd", (socket.AF_INET, ("127.0.0.1", ports[1])))
            self._start_daemon("slurmctld", "slurmctld", "-D")
            for node in self.cluster.node_names():
                self._start_node(node)
            self._wait_until_listening("slurmctld", (socket.AF_INET, ("127.0.0.1", ports[0])))
            self._wait_until("slurmctld", "every node idle", lambda: _is_every_node_idle(self.lab, self.cluster))
            self._wait_until("slurmdbd", "the cluster in the accounts", lambda: _is_accounted(self.lab, self.cluster))
            self._add_qos()
        self._publish(complete=True)

    def restart_node(self, node: str) -> None:
        """Start the slurmd of a node that has ended, in a lab that is up; it reports that the node was booted."""
        name = f"slurmd-{node}"
        self._publish(daemons=tuple(daemon for daemon in self.record.daemons if daemon.name != name), complete=True)
        self._start_node(node, "-b")
        self._publish(complete=True)

    def _start_node(self, node: str, *flags: str) -> None:
        slurmd = [daemons.find_program("slurmd"), "-D", *flags, "-N", node]
        if self.cluster.is_strict:
            shared = find_shared_dirs(self.lab.root, shared=self.cluster.shared)
            slurmd = isolate_command(
                slurmd, root=self.lab.root, node=node, cgroup=name_cgroup(self.record.token), shared=shared
            )
        self._start_daemon(f"slurmd-{node}", sys.executable, "-IS", keeper.__file__, *slurmd)

    def _start_munge(self) -> None:
        """Start munged, with --force: it requires that other users can reach its socket, and this one is private."""
        home = self.lab.root / "munge"
        options = {"key": self.lab.munge_key, "socket": self.lab.munge_socket, "pid": home / "pid"}
        options |= {"log": home / "log", "seed": home / "seed"}
        flags = [f"--{name}{'' if name == 'socket' else '-file'}={path}" for name, path in options.items()]
        self._start_daemon("munged", "munged", "--foreground", "--force", *flags)
        self._wait_until_listening("munged", (socket.AF_UNIX, str(self.lab.munge_socket)))

    def _start_database(self, user: str) -> None:
        defaults = f"--defaults-file={self.lab.root / 'my.cnf'}"
        owner = ["--auth-root-authentication-method=socket", f"--auth-root-socket-user={user}"]
        self._run_helper(
            "mariadb-install-db", defaults, "--skip-test-db", "--skip-name-resolve", f"--user={user}", *owner
        )
        self._start_daemon("mariadbd", "mariadbd", defaults)
        self._wait_until_listening("mariadbd", (socket.AF_UNIX, str(self.lab.db_socket)))

    def _add_qos(self) -> None:
        """Make the cluster's QOS known; slurmctld learns of them from slurmdbd."""
        for name in self.cluster.qos:
            run_slurm_command(self.lab, "sacctmgr", "--immediate", "add", "qos", name)

    def _start_daemon(self, name: str, command: str, *arguments: str) -> LabDaemon:
        daemon = daemons.spawn_daemon(
            [daemons.find_program(command), *arguments],
            name=name,
            environment=_make_slurm_environment(self.lab)
            | {TOKEN_VARIABLE: self.record.token, "MYSQL_UNIX_PORT": str(self.lab.db_socket)},
            cwd=self.lab.root / "log",
            log=self.lab.log(name),
        )
        self._publish(daemons=(*self.record.daemons, daemon))
        return daemon

    def _run_helper(self, command: str, *arguments: str) -> None:
        """Run a command to its end, recorded like a daemon meanwhile; raise LabError if it fails."""
        before = self.record.daemons
        helper = self._start_daemon(command, command, *arguments)
        while True:
            pid, wait_status = os.waitpid(helper.pid, os.WNOHANG)
            if pid:
                break
            if time.monotonic() > self.deadline:
                raise LabError(f"{command} did not end in {START_TIMEOUT_S:.0f} s; {self._describe_log_tail(command)}")
            time.sleep(0.02)
        if code := os.waitstatus_to_exitcode(wait_status):
            raise LabError(f"{command} ended with {code}; {self._describe_log_tail(command)}")
        self._publish(daemons=before)

    def _wait_until_listening(self, name: str, address: tuple[int, Any]) -> None:
        def is_listening() -> bool:
            with socket.socket(address[0]) as probe:
                return probe.connect_ex(address[1]) == 0

        self._wait_until(name, "listening", is_listening)

    def _wait_until(self, name: str, what: str, check: Callable[[], bool]) -> None:
        """Poll `check` while every daemon is alive; at the timeout raise LabError with the log of `name`."""
        while not check():
            for daemon in self.record.daemons:
                if not daemon.is_alive():
                    raise LabError(
                        f"{daemon.name} ended while the lab was starting; {self._describe_log_tail(daemon.name)}"
                    )
            if time.monotonic() > self.deadline:
                raise LabError(f"{name}: not {what} after {START_TIMEOUT_S:.0f} s; {self._describe_log_tail(name)}")
            time.sleep(0.05)

    def _describe_log_tail(self, name: str) -> str:
        with contextlib.suppress(OSError):
            lines = self.lab.log(name).read_text(errors="replace").splitlines()[-12:]
            return "the end of its log:\n  " + "\n  ".join(lines)
        return "it has no log"

    def _publish(self, *, daemons: tuple[LabDaemon, ...] | None = None, complete: bool = False) -> None:
        values = vars(self.record) | {"complete": complete}
        self.record = LabRecord(**(values if daemons is None else values | {"daemons": daemons}))
        files.publish_json(self.lab.record, asdict(self.record))


def encode_cluster(cluster: LabCluster) -> dict[str, Any]:
    plain: dict[str, Any] = json.loads(json.dumps(asdict(cluster)))
    return plain


def read_boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def run_slurm_command(lab: LabDir, command: str, *arguments: str, timeout_s: float = 5.0) -> str:
    """Return the output of a Slurm command; empty if it fails or does not answer."""
    done = run_slurm([daemons.find_program(command), *arguments], env=_make_slurm_environment(lab), timeout_s=timeout_s)
    return done.stdout.strip() if done.returncode == 0 else ""


def list_node_states(lab: LabDir) -> list[tuple[str, str, str]]:
    """Return node, partition and state, as slurmctld reports them."""
    lines = run_slurm_command(lab, "sinfo", "--noheader", "--Node", "--format=%N|%R|%T").splitlines()
    return [(name, partition, state) for name, partition, state in (line.split("|") for line in lines)]


def _make_slurm_environment(lab: LabDir) -> dict[str, str]:
    """Make a small environment: the caller's SLURM_*, SINFO_* and locale must not change the output."""
    kept = {name: os.environ[name] for name in ("HOME", "TZ") if name in os.environ}
    return kept | {"PATH": daemons.make_search_path(), "LANG": "C.UTF-8", "SLURM_CONF": str(lab.conf)}


def _is_every_node_idle(lab: LabDir, cluster: LabCluster) -> bool:
    states = {name: state for name, _, state in list_node_states(lab)}
    return states == dict.fromkeys(cluster.node_names(), "idle")


def _is_accounted(lab: LabDir, cluster: LabCluster) -> bool:
    """Return whether slurmctld has registered the cluster in the accounts; sacct answers nothing before that."""
    table = run_slurm_command(
        lab, "sacctmgr", "--noheader", "--parsable2", "list", "cluster", "format=Cluster,ControlHost"
    )
    return f"{cluster.name}|127.0.0.1" in table.splitlines()
