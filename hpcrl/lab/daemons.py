"""The lab's processes: started with a token, recorded at once, found again, ended without touching anybody else's.

Daemon, Record   who was started, as kept in lab.json
spawn            a daemon in its own session, its output in a file
find             every living process of a lab, recorded or not
end              KILL until none is left
"""

import contextlib
import os
import shutil
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hpcrl.errors import LabError
from hpcrl.system.processes import is_alive, read_start_ticks

TOKEN_VARIABLE = "HPCRL_LAB_TOKEN"
END_TIMEOUT_S = 30.0


@dataclass(frozen=True, kw_only=True)
class LabDaemon:
    """A process that the lab started; the start time tells it from a later owner of its pid."""

    name: str
    pid: int
    ticks: int

    def is_alive(self) -> bool:
        reap_child(self.pid)
        return is_alive(self.pid, self.ticks)


@dataclass(frozen=True, kw_only=True)
class ProcessMarks:
    """What the environment of a lab's process holds, as /proc shows it.

    Daemons and slurmstepd carry the token. What runs in jobs carries the lab's SLURM_CONF and a node's name: the
    first alone would also be a user's shell that was pointed at the lab.
    """

    token: str
    conf: Path

    def are_carried_by(self, environ: bytes) -> bool:
        entries = environ.split(b"\0")
        if f"{TOKEN_VARIABLE}={self.token}".encode() in entries:
            return True
        in_job = any(entry.startswith(b"SLURMD_NODENAME=") for entry in entries)
        return in_job and f"SLURM_CONF={self.conf}".encode() in entries


def spawn_daemon(command: list[str], *, name: str, environment: Mapping[str, str], cwd: Path, log: Path) -> LabDaemon:
    """Start a daemon in its own session, with default signals, and say who it is."""
    pid = os.posix_spawn(
        find_program("env"),
        ["env", "-C", str(cwd), *command],
        environment,
        file_actions=[
            (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
            (os.POSIX_SPAWN_OPEN, 1, str(log), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600),
            (os.POSIX_SPAWN_DUP2, 1, 2),
        ],
        setsid=True,
        setsigmask=[],
        setsigdef=set(signal.valid_signals()) - {signal.SIGKILL, signal.SIGSTOP},
    )
    ticks = read_start_ticks(pid)
    assert ticks is not None, "our own child, not yet reaped"
    return LabDaemon(name=name, pid=pid, ticks=ticks)


def find_program(name: str) -> str:
    """The full path of a command; daemons may lie where a user's PATH does not look."""
    path = shutil.which(name, path=make_search_path())
    if path is None:
        raise LabError(f"{name}: not found in {make_search_path()}: install it")
    return path


def make_search_path() -> str:
    """The caller's PATH, and where distributions put daemons."""
    return ":".join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin", "/usr/bin", "/bin", "/usr/libexec"])


def find_processes(marks: ProcessMarks) -> dict[int, int]:
    """Pid and start time of every living process that bears the marks, and of all below those; never ourselves."""
    parents: dict[int, int] = {}
    found: set[int] = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
                if state != "Z":
                    parents[int(entry.name)] = int(parent)
                    if marks.are_carried_by((entry / "environ").read_bytes()):
                        found.add(int(entry.name))
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    ticks = {pid: read_start_ticks(pid) for pid in found - {os.getpid()}}
    return {pid: started for pid, started in ticks.items() if started is not None}


def end_daemons(daemons: list[LabDaemon], *, marks: ProcessMarks) -> None:
    """KILL the recorded daemons and all that bears the marks, again and again until none is left."""
    deadline = time.monotonic() + END_TIMEOUT_S
    while True:
        left = {daemon.pid: daemon.ticks for daemon in daemons if daemon.is_alive()} | find_processes(marks)
        if not left:
            return
        if time.monotonic() > deadline:
            raise LabError(f"processes {sorted(left)} do not end: hung in the kernel? see ps -o pid,stat,wchan")
        keepers = {daemon.pid for daemon in daemons}
        for pid in sorted(left, key=keepers.__contains__):  # those last: they hold what has no other mark
            _kill_process(pid, ticks=left[pid])
        time.sleep(0.02)


def reap_child(pid: int) -> None:
    """Collect an ended child of ours; others are collected by their own parents."""
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, os.WNOHANG)


def _kill_process(pid: int, *, ticks: int) -> None:
    """Through a pidfd: between the look at the start time and the signal, the pid cannot become another process."""
    with contextlib.suppress(ProcessLookupError):
        fd = os.pidfd_open(pid)
        try:
            if read_start_ticks(pid) == ticks:
                signal.pidfd_send_signal(fd, signal.SIGKILL)
        finally:
            os.close(fd)
