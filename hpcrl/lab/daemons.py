"""The processes of the lab: start them with a token, find them again, and end them without touching any others.

LabDaemon           a started process, as recorded in lab.json
ProcessMarks        the marks by which a process of a lab is known
spawn_daemon        start a daemon in its own session, with its output in a file
find_processes      every live process of a lab, recorded or not
end_daemons         send KILL until none is left
reap_child          collect an ended child
kill_process        send KILL to a process that was found before
find_program, make_search_path   where daemons are installed
TOKEN_VARIABLE, END_TIMEOUT_S    constants
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
    """A process that the lab started; the start time distinguishes it from a later owner of its pid."""

    name: str
    pid: int
    ticks: int

    def is_alive(self) -> bool:
        reap_child(self.pid)
        return is_alive(self.pid, self.ticks)


@dataclass(frozen=True, kw_only=True)
class ProcessMarks:
    """The marks of a lab's process in its environment, as /proc shows it.

    Daemons and slurmstepd have the token. Processes of jobs have the lab's SLURM_CONF and the name of a node:
    SLURM_CONF alone could also be set in a user's shell.
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
    """Start a daemon in its own session, with default signals, and return its record."""
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
    """Return the full path of a command; daemons may be installed outside a user's PATH."""
    path = shutil.which(name, path=make_search_path())
    if path is None:
        raise LabError(f"{name}: not found in {make_search_path()}: install it")
    return path


def make_search_path() -> str:
    """Return the caller's PATH with the directories in which distributions install daemons."""
    return ":".join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin", "/usr/bin", "/bin", "/usr/libexec"])


def find_processes(marks: ProcessMarks) -> dict[int, int]:
    """Return pid and start time of every live process with the marks and of its descendants, except this process."""
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
    """Send KILL to the recorded daemons and all processes with the marks, until none is left."""
    deadline = time.monotonic() + END_TIMEOUT_S
    while True:
        left = {daemon.pid: daemon.ticks for daemon in daemons if daemon.is_alive()} | find_processes(marks)
        if not left:
            return
        if time.monotonic() > deadline:
            raise LabError(
                f"processes {sorted(left)} do not end; they may hang in the kernel: see ps -o pid,stat,wchan"
            )
        keepers = {daemon.pid for daemon in daemons}
        for pid in sorted(left, key=keepers.__contains__):  # keepers last: their children may have no other mark
            kill_process(pid, ticks=left[pid])
        time.sleep(0.02)


def reap_child(pid: int) -> None:
    """Collect a child of this process if it has ended; other processes are collected by their parents."""
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, os.WNOHANG)


def kill_process(pid: int, *, ticks: int) -> None:
    """Send KILL through a pidfd: the pid cannot be reused between the check of its start time and the signal."""
    with contextlib.suppress(ProcessLookupError):
        fd = os.pidfd_open(pid)
        try:
            if read_start_ticks(pid) == ticks:
                signal.pidfd_send_signal(fd, signal.SIGKILL)
        finally:
            os.close(fd)
