"""The pulse of the driver, by which its guardian sees that it hangs.

DriverPulse   two times in shared memory: of the last beat of the driver, and of the last turn of its loop; and whether
              everything was started
FileProbe     whether the file system answers: a driver that waits for it does not hang
PULSE_INTERVAL_S, MAX_SILENCE_S, MAX_TURN_S, MAX_WAIT_S, SUSPICION_S, PROBE_INTERVAL_S, MAX_ANSWER_S   times
"""

import faulthandler
import mmap
import os
import signal
import struct
import threading
import time
from pathlib import Path

from hpcrl.slurm.commands import COMMAND_TIMEOUT_S

_FACTS = struct.Struct("dd?")
FORWARDED_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)
PULSE_INTERVAL_S = 0.2
MAX_SILENCE_S = 45.0
"""The driver's process was stopped, or hangs with all its threads."""
SUSPICION_S = 15.0
"""A turn of the driver's loop is long from here on: whether the file system answers is watched."""
MAX_TURN_S = max(COMMAND_TIMEOUT_S, 40.0) + 20.0
"""The longest wait from then on while it answers: at most one command of Slurm takes all its time in a turn."""
MAX_WAIT_S = 400.0
"""The longest turn while it does not, and the longest time until the first one, as all of Python is imported there."""
PROBE_INTERVAL_S = 5.0
MAX_ANSWER_S = 5.0
"""A file system that takes longer to answer is away."""


class FileProbe:
    """A thread that asks a file system for a small change: what its client has cached would hide that it is away."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._asked_at: float | None = None
        self._steady_since = time.monotonic()
        self._is_wanted = True
        threading.Thread(target=self._watch, name="probe", daemon=True).start()

    def find_steady_start(self) -> float:
        """Return since when it has answered, by the monotonic clock: since now if it does not."""
        now, asked_at = time.monotonic(), self._asked_at
        return now if asked_at is not None and now - asked_at > MAX_ANSWER_S else self._steady_since

    def end(self) -> None:
        """Ask no more, once the present answer has come."""
        self._is_wanted = False

    def _watch(self) -> None:
        while self._is_wanted:
            asked_at = self._asked_at = time.monotonic()
            try:
                os.utime(self._path)
                has_answered = True
            except OSError:
                has_answered = False
            now = time.monotonic()
            if not has_answered or now - asked_at > MAX_ANSWER_S:
                self._steady_since = now
            self._asked_at = None
            time.sleep(PROBE_INTERVAL_S)


def waits_for_storage(pid: int) -> bool:
    """Return whether the first thread of a process is in a call that no signal ends.

    The server of a directory may answer while that of a file's content is away.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:  # it has ended
        return False
    return fields[:1] == ["D"]


class DriverPulse:
    """Two times in shared memory: a thread of the driver writes one of them, its loop the other."""

    def __init__(self, directory: Path) -> None:
        """Take a directory of the file system for which the driver may wait."""
        self._directory = directory
        self._memory = mmap.mmap(-1, _FACTS.size)
        self._has_started = False
        self._last_turn = self._last_beat = self._made_at = time.monotonic()
        self._probe: FileProbe | None = None
        self._waited_at = float("-inf")
        """The time when the driver was last seen to wait for storage."""
        self._write()

    def start(self) -> None:
        """Start the thread, in the driver; its stacks are written at SIGUSR1."""
        faulthandler.register(signal.SIGUSR1, all_threads=True)
        before = signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED_SIGNALS)  # they are for the first thread
        threading.Thread(target=self._beat, name="pulse", daemon=True).start()
        signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def note_turn(self) -> None:
        """Note that the driver's loop makes another turn, or the next part of one."""
        self._last_turn = time.monotonic()

    def note_start(self) -> None:
        """Note, in the driver, that everything was started, and is supervised from now on."""
        self._has_started = True
        self._write()

    @property
    def is_supervising(self) -> bool:
        """Return whether the driver has noted that."""
        return bool(_FACTS.unpack(self._memory[:])[2])

    def describe_hang(self, driver: int, *, since: float) -> str | None:
        """Return why the driver with this pid counts as hung since that time; None while it works."""
        last_turn, last_beat, _ = _FACTS.unpack(self._memory[:])
        turn, beat, now = max(last_turn, since), max(last_beat, since), time.monotonic()
        if now - beat > MAX_SILENCE_S:
            return f"the driver has stood still for {MAX_SILENCE_S:g} s"
        if now - turn > MAX_WAIT_S or (last_turn > self._made_at and self._is_turn_too_long(driver, turn, now=now)):
            return f"the driver has waited for one thing for {now - turn:.0f} s"
        return None

    def _is_turn_too_long(self, driver: int, turn: float, *, now: float) -> bool:
        if now - turn < SUSPICION_S:
            if self._probe is not None:
                self._probe.end()
                self._probe = None
            return False
        if self._probe is None:
            self._probe = FileProbe(self._directory)
        if waits_for_storage(driver):
            self._waited_at = now
        return now - max(self._probe.find_steady_start(), self._waited_at) > MAX_TURN_S

    def _beat(self) -> None:
        while True:
            self._last_beat = time.monotonic()
            self._write()
            time.sleep(PULSE_INTERVAL_S)

    def _write(self) -> None:
        self._memory[:] = _FACTS.pack(self._last_turn, self._last_beat, self._has_started)
