"""The lab: a real Slurm on one machine, with accounting, started in seconds and removed without a trace.

up, down, status        start, end and describe a lab; its state and the record of its daemons are in one directory
make_environment        the variables that a shell needs to reach it
find_missing_commands   the commands that this machine lacks
resolve_lab_dir, hold_lock, read_record   its paths, its lock, its daemons
LabStatus, DaemonStatus, NodeStatus   the state of a lab
LOCK_TIMEOUT_S, CANCEL_TIMEOUT_S, APT_PACKAGES, REQUIRED_COMMANDS   constants
"""

import contextlib
import fcntl
import json
import os
import shutil
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from hpcrl.errors import LabError
from hpcrl.lab import daemons
from hpcrl.lab.conf import DEFAULT_CLUSTER, LabCluster, LabDir, check_path
from hpcrl.lab.daemons import LabDaemon
from hpcrl.lab.node_isolation import check_isolation, remove_cgroups
from hpcrl.lab.start import LabRecord, LabStartup, encode_cluster, list_node_states, read_boot_id, run_slurm_command
from hpcrl.system import files

LOCK_TIMEOUT_S = 150.0
CANCEL_TIMEOUT_S = 2.0
APT_PACKAGES = "slurm-wlm slurmdbd munge mariadb-server libpmix-dev"
REQUIRED_COMMANDS = (
    *("munged", "mariadbd", "mariadb-install-db", "slurmdbd", "slurmctld", "slurmd"),
    *("sinfo", "squeue", "scancel", "sacctmgr"),
)


@dataclass(frozen=True, kw_only=True)
class DaemonStatus:
    """The state of one daemon of the lab."""

    name: str
    pid: int
    alive: bool


@dataclass(frozen=True, kw_only=True)
class NodeStatus:
    """The state of one node, as Slurm names it (idle, mixed, down*, ...)."""

    name: str
    state: str


@dataclass(frozen=True, kw_only=True)
class LabStatus:
    """The state of a lab; `print` shows it to a user."""

    state_dir: Path
    conf: Path
    daemons: tuple[DaemonStatus, ...] = ()
    nodes: tuple[NodeStatus, ...] = ()
    """Empty while slurmctld does not answer."""
    partitions: tuple[str, ...] = ()
    complete: bool = False
    """True if the lab started completely."""
    was_up: bool = False
    """True if `up` found it running and left it alone."""

    @property
    def is_up(self) -> bool:
        return self.complete and bool(self.daemons) and all(daemon.alive for daemon in self.daemons)

    @property
    def has_controller(self) -> bool:
        """Return whether jobs can be sent to it, also while nodes are lost."""
        return self.complete and any(daemon.name == "slurmctld" and daemon.alive for daemon in self.daemons)

    def __str__(self) -> str:
        if not self.daemons:
            return f"the lab in {self.state_dir} is down"
        dead = [daemon.name for daemon in self.daemons if not daemon.alive]
        condition = "was up already" if self.was_up else "is up" if self.is_up else "is not complete"
        if dead and self.has_controller:
            condition = "is up without some nodes"
        partitions = ", ".join(self.partitions) or "unknown (slurmctld does not answer)"
        lines = [
            f"the lab in {self.state_dir} {condition}: {len(self.daemons)} daemons, partitions {partitions}",
            "  " + "  ".join(f"{node.name}:{node.state}" for node in self.nodes),
        ]
        if dead:
            lines.append(
                f"  dead: {', '.join(dead)} (`hpcrl lab restore NODE` boots one again, `hpcrl lab down` removes all)"
            )
        return "\n".join(line for line in lines if line.strip())


def make_environment(state_dir: Path) -> dict[str, str]:
    """Return the variables to export so that every Slurm command, and `hpcrl lab` itself, uses this lab."""
    lab = resolve_lab_dir(state_dir)
    return {"SLURM_CONF": str(lab.conf), "HPCRL_LAB": str(lab.root)}


def status(state_dir: Path) -> LabStatus:
    """Return which daemons are alive and the node states from slurmctld; change nothing and wait for no lock."""
    lab = resolve_lab_dir(state_dir)
    record = read_record(lab)
    if record is None:
        return LabStatus(state_dir=lab.root, conf=lab.conf)
    daemons = tuple(DaemonStatus(name=d.name, pid=d.pid, alive=d.is_alive()) for d in record.daemons)
    answers = any(daemon.name == "slurmctld" and daemon.alive for daemon in daemons)
    states = list_node_states(lab) if answers else []
    return LabStatus(
        state_dir=lab.root,
        conf=lab.conf,
        daemons=daemons,
        nodes=tuple(NodeStatus(name=name, state=state) for name, state in sorted({(n, s) for n, _, s in states})),
        partitions=tuple(sorted({partition for _, partition, _ in states})),
        complete=record.complete,
    )


def up(state_dir: Path, *, cluster: LabCluster = DEFAULT_CLUSTER) -> LabStatus:
    """Start the lab and wait until every node is idle; a lab that is up already is left alone."""
    lab = resolve_lab_dir(state_dir)
    _refuse_inside(lab)
    check_path(lab.root, cluster=cluster)
    _require_commands()
    if cluster.is_strict:
        check_isolation()
    _claim_directory(lab)
    with hold_lock(lab):
        record = read_record(lab)
        if record is not None:
            now = status(lab.root)
            if now.is_up:
                return _check_same_cluster(now, record=record, cluster=cluster)
            _end_processes(lab, record=record)
        _clear_directory(lab)
        start = LabStartup(lab, cluster=cluster)
        try:
            start.run()
        except BaseException:
            _end_processes(lab, record=start.record)
            _remove_directory(lab)
            raise
        return status(lab.root)


def down(state_dir: Path) -> bool:
    """Cancel the jobs, end every process of the lab and remove its directory; return False without a lab."""
    lab = resolve_lab_dir(state_dir)
    _refuse_inside(lab)
    if not (lab.record.exists() or lab.lock.exists()):
        return False
    with hold_lock(lab):
        record = read_record(lab)
        if record is not None:
            _cancel_jobs(lab, record=record)
            _end_processes(lab, record=record)
        _remove_directory(lab)
        return record is not None


def find_missing_commands() -> list[str]:
    """Return the commands that the lab needs and this machine lacks."""
    return [name for name in REQUIRED_COMMANDS if shutil.which(name, path=daemons.make_search_path()) is None]


def _require_commands() -> None:
    if missing := find_missing_commands():
        raise LabError(f"not installed: {', '.join(missing)}: apt-get install --no-install-recommends {APT_PACKAGES}")


def resolve_lab_dir(state_dir: Path) -> LabDir:
    """Return the paths of the lab in a directory."""
    return LabDir(Path(os.path.abspath(state_dir.expanduser())))  # noqa: PTH100 - must not follow links


def _claim_directory(lab: LabDir) -> None:
    """Make the directory, or use one that is empty or a lab's; anything else may be a user's files."""
    try:
        lab.root.mkdir(mode=0o700, parents=True)
    except FileExistsError:
        pass
    except OSError as error:
        raise LabError(f"state directory {lab.root}: {error.strerror}: set HPCRL_LAB to another") from error
    with contextlib.suppress(FileNotFoundError):
        if lab.root.is_symlink() or not lab.root.is_dir() or lab.root.stat().st_uid != os.getuid():
            raise LabError(f"state directory {lab.root}: not a directory of yours: remove it or set HPCRL_LAB")
        names = {path.name for path in lab.root.iterdir()}
        if names and not names & {lab.lock.name, lab.record.name}:
            raise LabError(f"state directory {lab.root} holds other files ({min(names)}, ...): set HPCRL_LAB")
        lab.root.chmod(0o700)


@contextlib.contextmanager
def hold_lock(lab: LabDir) -> Iterator[None]:
    """Lock the lab for one `up` or `down` at a time. As `down` removes the file, a lock on a removed one is retried."""
    deadline = time.monotonic() + LOCK_TIMEOUT_S
    while True:
        files.make_private_dir(lab.root)
        with contextlib.suppress(FileNotFoundError), lab.lock.open("a") as held:
            if _try_lock(held.fileno(), path=lab.lock):
                yield
                return
        if time.monotonic() > deadline:
            raise LabError(f"{lab.lock}: held by another `hpcrl lab` for {LOCK_TIMEOUT_S:.0f} s: wait or end it")
        time.sleep(0.05)


def _try_lock(fd: int, *, path: Path) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return path.exists() and os.fstat(fd).st_ino == path.stat().st_ino


def read_record(lab: LabDir) -> LabRecord | None:
    """Return what was recorded of a lab of this machine; None without a lab."""
    try:
        table = files.read_json(lab.record)
    except FileNotFoundError:
        return None
    except json.JSONDecodeError as error:
        raise LabError(f"{lab.record} is not the record of a lab ({error}): end its daemons by hand") from error
    record = LabRecord(**{**table, "daemons": tuple(LabDaemon(**entry) for entry in table["daemons"])})
    if record.host != socket.gethostname():
        raise LabError(f"the lab in {lab.root} runs on {record.host}, this is {socket.gethostname()}: go there")
    if record.boot != read_boot_id():  # none of its processes is left; their pids belong to others now
        return LabRecord(**(vars(record) | {"daemons": (), "complete": False}))
    return record


def _check_same_cluster(now: LabStatus, *, record: LabRecord, cluster: LabCluster) -> LabStatus:
    if record.cluster != encode_cluster(cluster):
        raise LabError(f"the lab in {now.state_dir} is up with other nodes: `hpcrl lab down` first, or set HPCRL_LAB")
    return LabStatus(**(vars(now) | {"was_up": True}))


def _refuse_inside(lab: LabDir) -> None:
    """Raise LabError within a job of the lab: `up` and `down` end all processes of the lab."""
    if "SLURMD_NODENAME" in os.environ and os.environ.get("SLURM_CONF") == str(lab.conf):
        raise LabError(f"this is a job of the lab in {lab.root}: leave the job first")


def _end_processes(lab: LabDir, *, record: LabRecord) -> None:
    """End every process of the lab, and remove the control groups that killed daemons leave."""
    daemons.end_daemons(list(record.daemons), marks=record.make_marks(lab))
    remove_cgroups(record.token)


def _cancel_jobs(lab: LabDir, *, record: LabRecord) -> None:
    """Cancel jobs and give them a moment to clean up; those that stay are killed with the rest."""
    if not any(daemon.name == "slurmctld" and daemon.is_alive() for daemon in record.daemons):
        return
    if not run_slurm_command(lab, "squeue", "--noheader", "--format=%A", timeout_s=CANCEL_TIMEOUT_S):
        return
    run_slurm_command(lab, "scancel", f"--user={os.getuid()}", timeout_s=CANCEL_TIMEOUT_S)
    deadline = time.monotonic() + CANCEL_TIMEOUT_S
    daemon_pids = {daemon.pid for daemon in record.daemons}
    while set(daemons.find_processes(record.make_marks(lab))) - daemon_pids and time.monotonic() < deadline:
        time.sleep(0.05)


def _clear_directory(lab: LabDir) -> None:
    """Remove everything but the lock, which this process holds."""
    for path in lab.root.iterdir():
        if path != lab.lock:
            files.remove_path(path)


def _remove_directory(lab: LabDir) -> None:
    """Remove the record late and the lock last, so that an interrupted `down` can be repeated."""
    for path in sorted(lab.root.iterdir(), key=lambda path: (path == lab.lock, path == lab.record)):
        files.remove_path(path)
    with contextlib.suppress(OSError):  # a process that waits for the lock may have made it again
        lab.root.rmdir()
