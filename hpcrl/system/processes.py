"""Manage the processes that this one started: identify them by pid and start time, end them with all descendants.

do_nothing and return_false are the callbacks of a process that has none.
"""

import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

MIN_RESTART_INTERVAL_S = 3.0
"""A process that ends earlier is restarted only once this much time has passed since its start.

The cause may be temporary, and restarting at once would only repeat the failure.
"""

MAX_RESTARTS = 3
"""The most restarts in a job of one worker, or another process or task of a job, that fails again and again."""
MAX_KILL_S = 30.0
"""The time after SIGKILL after which a process is left behind: in a call on a file system that hangs it cannot end.

It runs none of its code any more.
"""
OOM_SCORE_ADJUSTMENT = 500
"""The addition to the score by which the kernel chooses the process that it ends when memory is short."""
PR_SET_PDEATHSIG = 1
PR_SET_DUMPABLE = 4
PR_SET_CHILD_SUBREAPER = 36


def read_start_ticks(pid: int) -> int | None:
    """Return when a process started, in clock ticks since boot; None for an unknown pid."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    return int(stat.rpartition(")")[2].split()[19])


def is_alive(pid: int | None, ticks: int | None) -> bool:
    """Return whether this very process is still running; a reused pid is another process."""
    return pid is not None and ticks is not None and read_start_ticks(pid) == ticks and not is_zombie(pid)


def adopt_orphans() -> None:
    """Make descendants whose parent ends children of this process, so that none escapes."""
    _prctl(PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent(sig: signal.Signals = signal.SIGTERM) -> None:
    """Ask the kernel to signal this process when its parent ends."""
    _prctl(PR_SET_PDEATHSIG, sig)


def protect_memory() -> None:
    """Hide this process's memory and descriptors from other processes of the same user; not inherited by programs."""
    _prctl(PR_SET_DUMPABLE, 0)


def prefer_to_die() -> None:
    """Let the kernel end this process, and those that it starts, before its parent when memory is short."""
    with suppress(OSError):  # some sandboxes do not allow it
        Path("/proc/self/oom_score_adj").write_text(str(OOM_SCORE_ADJUSTMENT))


def list_descendants(root: int | None = None) -> list[int]:
    """List the live processes below another one, or below this one, found by walking /proc."""
    root = os.getpid() if root is None else root
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if fields[0] != "Z":
                parents[int(entry.name)] = int(fields[1])
    below = {root}
    while True:
        more = {pid for pid, parent in parents.items() if parent in below} - below
        if not more:
            return sorted(below - {root})
        below |= more


def end_group(process: "subprocess.Popen[bytes]", *, grace_s: float) -> None:
    """End a child that leads its own session, with everything in that session: TERM, then KILL.

    A child that has already ended is left alone: its pid may belong to another process by now.
    """
    end_groups([process], grace_s=grace_s)


def end_groups(processes: Sequence["subprocess.Popen[bytes]"], *, grace_s: float) -> None:
    """End several such children in the time that one takes."""
    for sig, limit_s in ((signal.SIGTERM, grace_s), (signal.SIGKILL, MAX_KILL_S)):
        left = [process for process in processes if process.poll() is None]
        for process in left:
            os.killpg(process.pid, sig)
        deadline = time.monotonic() + limit_s
        for process in left:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(deadline - time.monotonic(), 0.0))


def wait_for_descendants(*, timeout_s: float) -> None:
    """Give every descendant of this process time to end by itself."""
    deadline = time.monotonic() + timeout_s
    while (_reap_children() or list_descendants()) and time.monotonic() < deadline:
        time.sleep(0.05)


def end_descendants(*, grace_s: float) -> int:
    """End all descendants of this process, TERM then KILL; return how many there were at first.

    One that does not end MAX_KILL_S after that is left behind.
    """
    first = list_descendants()
    _signal_all(first, signal.SIGTERM)
    deadline = time.monotonic() + grace_s
    while _reap_children() or list_descendants() or _reap_children():  # one that ends in between is still to be reaped
        if time.monotonic() > deadline + MAX_KILL_S:
            break
        if time.monotonic() > deadline:
            _kill_all()
        time.sleep(0.05)
    return len(first)


def _kill_all() -> None:
    """Kill all descendants; they are stopped first, so that none starts another meanwhile."""
    stopped: set[int] = set()
    while started := set(list_descendants()) - stopped:
        _signal_all(sorted(started), signal.SIGSTOP)
        stopped |= started
    _signal_all(list_descendants(), signal.SIGKILL)


def _signal_all(pids: list[int], sig: signal.Signals) -> None:
    for pid in pids:
        with suppress(ProcessLookupError, PermissionError):  # it has ended, or has taken another user's rights
            os.kill(pid, sig)


def _reap_children() -> bool:
    """Reap all children that have ended; return False if there was none."""
    has_reaped = False
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            has_reaped = True
    return has_reaped


def is_zombie(pid: int) -> bool:
    """Return whether a process has ended, also if its parent has not asked for it yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, int(value), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl failed")


def do_nothing(*_: object) -> None:
    """Do nothing: the default of a callback."""


def return_false() -> bool:
    """Return False: the default of a callback that is asked whether something has happened."""
    return False
