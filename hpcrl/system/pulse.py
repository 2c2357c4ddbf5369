"""The pulse of a worker: the process that started it, on the same node, ends it when it stands still or does not work.

    start_pulse      give this process a pulse
    expect_work      name what this process is to do, and how long it may do nothing of that
    note_work        note that it has done some
    PulseWatch       the look of a parent at the pulses of its children
    SilentProcess    its result
    end_silent       let a process write its stacks, then kill it
    PULSE_PREFIX, PULSE_BEAT_INTERVAL_S, PULSE_WATCH_INTERVAL_S, STACKS_GRACE_S   constants

A pulse is a small file on the node's own disk that both have mapped: no shared file system is asked, and a process that
is stopped, or hangs with all its threads, cannot hide it.
"""

import atexit
import contextlib
import faulthandler
import math
import mmap
import os
import signal
import struct
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

PULSE_PREFIX = "hpcrl-pulse-"
PULSE_BEAT_INTERVAL_S = 0.5
PULSE_WATCH_INTERVAL_S = 2.0
STACKS_GRACE_S = 5.0
"""The time to write stacks before the end; workers look for a request to do so every 2 s."""
_PULSE = struct.Struct("<ddddi60s")


class PulseRecord(NamedTuple):
    """The pulse of a process, as it shows it; times are those of the node's monotonic clock."""

    beat: float
    """The time at which a thread of it last ran."""
    work: float
    """The time at which it last did what it is to do."""
    silence_s: float
    """The longest time that it may stand still."""
    limit_s: float
    """The longest time that it may do nothing of its work."""
    rank: int
    what: bytes
    """Its work, in words."""

    def describe_silence(self, *, now: float, since: float) -> str | None:
        """Return what is wrong with the process since a time; None while it works."""
        if now - max(self.beat, since) > self.silence_s:
            return f"it has stood still for {self.silence_s:g} s (job.silence_timeout_s)"
        if now - max(self.work, since) > self.limit_s:
            return f"it has {self.what.rstrip(bytes(1)).decode(errors='replace')} for {self.limit_s:g} s"
        return None


class OwnPulse:
    """The pulse of this process."""

    def __init__(self, path: Path, *, rank: int, silence_s: float) -> None:
        self.path = path
        path.write_bytes(bytes(_PULSE.size))
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), _PULSE.size)
        now = time.monotonic()
        self._record = PulseRecord(now, now, silence_s, math.inf, rank, b"")
        self._lock = threading.Lock()
        self.change()

    def change(self, **fields: float | bytes) -> None:
        """Change what is shown."""
        with self._lock:
            self._record = self._record._replace(**fields)  # type: ignore[arg-type]
            self._memory[:] = _PULSE.pack(*self._record)

    def run(self) -> None:
        """Beat, until the process ends."""
        while True:
            self.change(beat=time.monotonic())
            time.sleep(PULSE_BEAT_INTERVAL_S)


_own: OwnPulse | None = None


def start_pulse(*, rank: int, silence_s: float) -> None:
    """Give this process a pulse; `rank` is its number among the children of its parent. SIGQUIT writes its stacks."""
    global _own
    faulthandler.register(signal.SIGQUIT, file=2, all_threads=True)
    _own = OwnPulse(Path(tempfile.gettempdir()) / f"{PULSE_PREFIX}{os.getpid()}", rank=rank, silence_s=silence_s)
    atexit.register(_own.path.unlink, missing_ok=True)
    threading.Thread(target=_own.run, name="pulse", daemon=True).start()


def expect_work(what: str, limit_s: float) -> None:
    """Count this process as hung once it has done nothing for so long; `what` follows on "it has"."""
    if _own is not None:
        _own.change(work=time.monotonic(), limit_s=limit_s, what=what.encode()[:60])


def expect_nothing() -> None:
    """Let this process wait for as long as it takes."""
    expect_work("", math.inf)


def note_work() -> None:
    """Note that this process has just done a part of its work."""
    if _own is not None:
        _own.change(work=time.monotonic())


class SilentProcess(NamedTuple):
    """A child that stands still or does not work."""

    pid: int
    rank: int
    reason: str


class PulseWatch:
    """The look of a process at the pulses of its children."""

    def __init__(self, directory: Path | None = None, *, clock: Callable[[], float] = time.monotonic) -> None:
        """Take the directory of temporary files, which the children share."""
        self._directory = directory or Path(tempfile.gettempdir())
        self._clock = clock
        self._looked_at = self._since = clock()

    def look(self) -> list[SilentProcess]:
        """Return the children that are to be ended; call it every few seconds."""
        now = self._clock()
        if now - self._looked_at > 5 * PULSE_WATCH_INTERVAL_S:  # the whole node stood still, or this process did
            self._since = now
        self._looked_at = now
        found = []
        for path in self._directory.glob(f"{PULSE_PREFIX}*"):
            pid = int(path.name.removeprefix(PULSE_PREFIX))
            if not _is_below(pid, os.getpid()):
                path.unlink(missing_ok=True)
                continue
            with contextlib.suppress(OSError, struct.error):  # it is being made
                record = PulseRecord(*_PULSE.unpack(path.read_bytes()))
                if record.beat and (reason := record.describe_silence(now=now, since=self._since)):
                    found.append(SilentProcess(pid, record.rank, reason))
        return found


def _is_below(pid: int, ancestor: int) -> bool:
    """Return whether a process is a child of another one, or was forked by one of its children."""
    parent = _read_parent(pid)
    return parent is not None and ancestor in (parent, _read_parent(parent))


def _read_parent(pid: int) -> int | None:
    """Return the parent of a process; None if it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] == "Z" else int(fields[1])


def end_silent(pid: int) -> None:
    """Let a child write its stacks, then kill it; a process that was stopped has to continue for that."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGQUIT)
        os.kill(pid, signal.SIGCONT)
        time.sleep(STACKS_GRACE_S)
        os.kill(pid, signal.SIGKILL)
