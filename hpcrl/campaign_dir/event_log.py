"""The event files of a campaign: append-only JSON lines, one file a process, of hpcrl.campaign_dir.events.

EventLog     append events
EventReader  read new events
find_worker_node   the node on which a worker has last run
LineChooser    a function that leaves out lines that a reader does not need
choose_kinds   one that leaves out all but some kinds of events
LookSchedule   when a sparing reader looks at each file
EVENT_SUFFIX, BEAT_INTERVAL_S, MAX_PENDING_LINES, TAIL_BYTES, BLOCK_BYTES    constants
MAX_LOOK_INTERVAL_S, NUM_FREE_LOOKS, MAX_LOOKS_PER_S    how often it does

A line is written by one write(2) on an O_APPEND descriptor, so a killed process tears at most its own last line.
Work never ends for an event: on a full or unreachable file system lines wait in memory, the oldest are dropped where
they are too many, and what was dropped is counted and reported when writing succeeds again.
Every line has `time` (seconds since the epoch), `event`, and its writer: `job`, `role`, `worker`, `node`.
"""

import contextlib
import errno
import fnmatch
import heapq
import itertools
import json
import os
import re
import stat
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from hpcrl.campaign_dir.events import CampaignEvent, EventsLost, build_line, is_known_event, parse_event
from hpcrl.campaign_dir.paths import CampaignDir, make_worker_name
from hpcrl.system import file_watch
from hpcrl.system.file_watch import NameWatch, is_full
from hpcrl.system.files import parse_json_lines

EVENT_SUFFIX = ".jsonl"
TAIL_BYTES = 1 << 16
BLOCK_BYTES = 1 << 16
"""The bytes of a file that are read at once; fewer where very many files are merged."""
_MAX_MERGED_BYTES, _MIN_BLOCK_BYTES = 1 << 26, 1 << 12
"""The bytes of all files of a job that a merge has in memory, but at least a few lines of each."""
_CHOSEN_FACTOR = 4
"""The factor by which more is read at once where most lines are left out."""
LineChooser = Callable[[bytes, float], bytes]
"""A function that returns some of the lines of a block, given the time when their file was last written or touched."""
_JOB_PREFIX = re.compile(r"(\d+)-", re.ASCII)
BEAT_INTERVAL_S = 10.0
"""The time between heartbeats: a third of the age at which a process counts as ended."""
MAX_PENDING_LINES = 1000
"""The most lines that wait for a file system to accept them."""
NUM_FREE_LOOKS, MAX_LOOKS_PER_S = 100, 400
"""The files at which a sparing reader always looks, and how many of the others it looks at in a second."""
MAX_LOOK_INTERVAL_S = 5.0
"""The longest that a sparing reader leaves a file alone; well below the age of a heartbeat that counts."""


def choose_kinds(kinds: Collection[str]) -> LineChooser:
    """Return a chooser of the lines of these kinds of events: others cost no parsing."""
    wanted = re.compile(rb'"event": "(?:%s)"' % b"|".join(re.escape(kind).encode() for kind in kinds))

    def choose(data: bytes, touched: float) -> bytes:
        del touched
        return b"\n".join(line for line in data.split(b"\n") if wanted.search(line))

    return choose


class EventLog:
    """The event file of one process."""

    def __init__(self, path: Path, **origin: Any) -> None:
        self.path = path
        self.num_lost = 0
        """Events that were dropped and not reported yet."""
        self._origin = origin
        self._pending: deque[bytes] = deque()
        self._error = ""
        """The reason why lines wait."""
        self._is_torn = False
        """True if the last line in the file is incomplete."""
        self._lock = threading.Lock()
        self._next_beat = float("-inf")
        self._fd = -1
        with contextlib.suppress(OSError):  # it is opened again with the first event
            self._open_file()

    @classmethod
    def open(cls, campaign: CampaignDir, *name: str | int, job: int, role: str, **origin: Any) -> "EventLog":
        """Open the log of one worker of a job; `name` is its role and its index or node."""
        worker = make_worker_name(job, *name)
        return cls(campaign.events / f"{worker}{EVENT_SUFFIX}", job=job, role=role, worker=worker, **origin)

    def emit(self, event: CampaignEvent) -> None:
        """Append one event; if that is not possible now, it waits."""
        with self._lock:
            self._add_line(event)
            self._write_pending()

    def beat(self) -> None:
        """Touch the file, as a heartbeat, if that is due, and write what waits."""
        now = time.monotonic()
        with self._lock:
            self._write_pending()
            if now < self._next_beat:
                return
            self._next_beat = now + BEAT_INTERVAL_S
            with contextlib.suppress(OSError):
                os.utime(self._fd if self._fd >= 0 else self.path)

    def close(self) -> None:
        """Close the file, after a last attempt to write what waits."""
        with self._lock:
            self._write_pending()
            if self._fd >= 0:
                os.close(self._fd)
                self._fd = -1

    def _add_line(self, event: CampaignEvent) -> None:
        line = build_line(event, time=round(time.time(), 3), origin=self._origin)
        self._pending.append(json.dumps(line).encode() + b"\n")
        if len(self._pending) > MAX_PENDING_LINES:
            self._pending.popleft()
            self.num_lost += 1

    def _write_pending(self) -> None:
        try:
            while self._pending:
                self._write_line(self._pending[0])
                self._pending.popleft()
                if not self._pending and self.num_lost:
                    lost, self.num_lost = EventsLost(num=self.num_lost, reason=self._error), 0
                    self._add_line(lost)
        except OSError as error:
            self._error = error.strerror or str(error)
            if not is_full(error):  # the descriptor may be stale
                self._close_file()

    def _write_line(self, line: bytes) -> None:
        if self._fd < 0:
            self._open_file()
        data = b"\n" + line if self._is_torn else line
        written = os.write(self._fd, data)
        self._is_torn = written != len(data)
        if self._is_torn:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))

    def _open_file(self) -> None:
        self._fd = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def _close_file(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            with contextlib.suppress(OSError):
                os.close(fd)


@dataclass
class EventReader:
    """A reader of a directory of event files; each call continues where the last one ended."""

    directory: Path
    pattern: str = f"*{EVENT_SUFFIX}"
    """Pattern of the files to read."""
    touched: dict[str, float] = field(default_factory=dict)
    """Time when each file (by its name without .jsonl) was last written or touched, as of the last call."""
    unreadable: dict[str, str] = field(default_factory=dict)
    """Files that could not be read when they were looked at last, with the reason."""
    damaged: Counter[str] = field(default_factory=Counter)
    """The number of lines of each file that were skipped: no JSON objects, or not what their event has."""
    offsets: dict[str, int] = field(default_factory=dict)
    """Bytes read of each file; another process can continue with them."""
    is_sparing: bool = False
    """True: look ever more rarely at the directory, and at each file, while nothing changes."""
    choose_lines: LineChooser | None = None
    """Leaves out lines before they are parsed; None: all are returned."""
    ended_jobs: frozenset[int] = frozenset()
    """Jobs whose files are not looked at, since they were read to their end."""
    _names: NameWatch | None = None
    _schedule: "LookSchedule" = field(default_factory=lambda: LookSchedule())

    @classmethod
    def for_role(cls, directory: Path, role: str, *, job: int | None = None) -> "EventReader":
        """Return a reader of the workers of one role, in one job or in all."""
        number = "*" if job is None else make_worker_name(job)
        return cls(directory, pattern=f"{number}-{role}-*{EVENT_SUFFIX}", is_sparing=True)

    def skip_to_tails(self) -> None:
        """Leave out all but the last lines of each file."""
        for name in self._list_names():
            with contextlib.suppress(OSError):  # the next call names it
                self.offsets[name] = max((self.directory / name).stat().st_size - TAIL_BYTES, 0)
        self.expect_change()

    def expect_change(self) -> None:
        """Look at everything at the next call."""
        self._names = None
        self._schedule = LookSchedule()

    def poll(self) -> Iterator[CampaignEvent]:
        """Return new events, file by file; incomplete lines wait for the next call, unknown ones are skipped."""
        for name in self._list_names():
            if self._has_grown(name):
                yield from self._iter_events(name, BLOCK_BYTES)

    def poll_merged(self) -> Iterator[CampaignEvent]:
        """Yield new events in the order of jobs and time, with a block of each file of one job in memory."""
        names_by_job: dict[int | None, list[str]] = {}
        for name in self._list_names():
            if self._has_grown(name):
                names_by_job.setdefault(_parse_job(name), []).append(name)
        foreign = names_by_job.pop(None, [])  # files whose names have no job
        jobs = [names for _, names in sorted(names_by_job.items())]
        in_order = itertools.chain.from_iterable(self._merge_files(names) for names in jobs)
        return heapq.merge(in_order, self._merge_files(foreign), key=_get_place) if foreign else in_order

    def _merge_files(self, names: Sequence[str]) -> Iterator[CampaignEvent]:
        num_bytes = min(BLOCK_BYTES, max(_MIN_BLOCK_BYTES, _MAX_MERGED_BYTES // len(names)))
        return heapq.merge(*(self._iter_events(name, num_bytes) for name in names), key=_get_place)

    def poll_lines(self) -> Iterator[dict[str, Any]]:
        """Yield new lines of every kind as dicts."""
        for name in self._list_names():
            if self._has_grown(name):
                yield from self._iter_lines(name)

    def _iter_events(self, name: str, num_bytes: int) -> Iterator[CampaignEvent]:
        for line in self._iter_lines(name, num_bytes):
            event = parse_event(line)
            if event is not None:
                yield event
            elif is_known_event(line.get("event")):
                self._count_damaged(name)

    def _iter_lines(self, name: str, num_bytes: int = BLOCK_BYTES) -> Iterator[dict[str, Any]]:
        """Yield the new lines of one file, block by block; it is closed in between, as there may be thousands."""
        if self.choose_lines is not None:
            num_bytes *= _CHOSEN_FACTOR
        wanted_bytes = num_bytes
        while True:
            try:
                data, is_last = self._read_block(name, wanted_bytes)
            except OSError as error:  # one unreadable file must not hide the others
                self.unreadable[name] = error.strerror or str(error)
                return
            wanted_bytes = num_bytes if data else 2 * wanted_bytes  # a line that is longer than a block
            if self.choose_lines is not None:
                data = self.choose_lines(data, self.touched[name.removesuffix(EVENT_SUFFIX)])
            yield from parse_json_lines(data, note_damage=partial(self._count_damaged, name))
            if is_last:
                return

    def describe_damage(self) -> list[str]:
        """Return a sentence for each file with damaged lines."""
        return [
            f"{num:,} line{'s' * (num > 1)} of {self.directory.name}/{name} {'are' if num > 1 else 'is'} damaged"
            for name, num in sorted(self.damaged.items())
        ]

    def _count_damaged(self, name: str) -> None:
        self.damaged[name] += 1

    def _has_grown(self, name: str) -> bool:
        """Return whether a file has bytes that were not read."""
        self.unreadable.pop(name, None)
        try:
            facts = os.stat(f"{self.directory}/{name}")  # noqa: PTH116 - thousands of files, several times a second
        except OSError as error:
            self.unreadable[name] = error.strerror or str(error)
            return False
        self.touched[name.removesuffix(EVENT_SUFFIX)] = facts.st_mtime
        if facts.st_size <= self.offsets.get(name, 0) or not stat.S_ISREG(facts.st_mode):
            return False
        self._schedule.note_change(name)
        return True

    def _read_block(self, name: str, num_bytes: int) -> tuple[bytes, bool]:
        """Return some of the complete lines that were added to one file, and whether these are all."""
        offset = self.offsets.get(name, 0)
        fd = os.open(f"{self.directory}/{name}", os.O_RDONLY | os.O_CLOEXEC)
        try:
            data = os.pread(fd, num_bytes, offset)
        finally:
            os.close(fd)
        end = data.rfind(b"\n") + 1
        self.offsets[name] = offset + end
        return data[:end], len(data) < num_bytes

    def _list_names(self) -> list[str]:
        """Return the files to look at now; those known so far, while the directory cannot be listed."""
        if not self.is_sparing:
            found = sorted(path.name for path in self.directory.glob(self.pattern))
            self._forget_unreadable(found)
            return found
        if self._names is None:
            self._names = NameWatch(self.directory)
        with contextlib.suppress(OSError):
            listed = (self._names.names(), self.ended_jobs)
            if listed != self._schedule.listed:
                ended = tuple(f"{make_worker_name(job)}-" for job in self.ended_jobs)
                wanted = [name for name in fnmatch.filter(listed[0], self.pattern) if not name.startswith(ended)]
                self._schedule.follow(wanted, listed=listed)
                self._forget_unreadable(wanted)
        return self._schedule.take_due()

    def _forget_unreadable(self, names: Iterable[str]) -> None:
        """Leave out the problems of files that are not looked at any more."""
        for name in self.unreadable.keys() - set(names):
            del self.unreadable[name]


class LookSchedule:
    """The times at which a sparing reader looks at each file: ever more rarely while it does not change.

    A file that changes rarely is also looked at rarely after a change. Of very many files each is looked at rarely,
    as every look costs the server of the file system a call.
    """

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.listed: Hashable = None
        """The names and the ended jobs by which files were chosen."""
        self._clock = clock
        self._changed_at: dict[str, float] = {}
        self._quiet_s: dict[str, float] = {}
        """The time between the last two changes of each file."""
        self._due: list[tuple[float, str]] = []
        """A heap of the files that are not being looked at."""
        self._taken: list[str] = []
        self._taken_at = 0.0

    def follow(self, names: Iterable[str], *, listed: Hashable) -> None:
        """Look at these files, at new ones first of all."""
        self.listed = listed
        now, known = self._clock(), self._changed_at
        self._changed_at = {name: known.get(name, now) for name in names}
        self._quiet_s = {name: self._quiet_s.get(name, 0.0) for name in self._changed_at}
        for name in self._changed_at.keys() - known.keys():
            heapq.heappush(self._due, (float("-inf"), name))

    def note_change(self, name: str) -> None:
        """Note that a file has changed: if it does so often, the next look at it comes soon."""
        if name in self._changed_at:
            now = self._clock()
            self._quiet_s[name], self._changed_at[name] = now - self._changed_at[name], now

    def take_due(self) -> list[str]:
        """Return the files to look at now, sorted."""
        shortest_s = max(0.0, (len(self._changed_at) - NUM_FREE_LOOKS) / MAX_LOOKS_PER_S)
        for name in self._taken:
            if (changed_at := self._changed_at.get(name)) is not None:
                quiet_s = max(self._taken_at - changed_at, self._quiet_s[name])
                pause_s = max(file_watch.PAUSE_SHARE * quiet_s, shortest_s)
                heapq.heappush(self._due, (self._taken_at + min(pause_s, MAX_LOOK_INTERVAL_S), name))
        now, taken = self._clock(), set[str]()
        while self._due and self._due[0][0] <= now:
            _, name = heapq.heappop(self._due)
            if name in self._changed_at:
                taken.add(name)
        self._taken, self._taken_at = sorted(taken), now
        return self._taken


def _parse_job(name: str) -> int | None:
    """Return the job in the name of an event file; None if it has none."""
    found = _JOB_PREFIX.match(name)
    return int(found[1]) if found else None


def _get_place(event: CampaignEvent) -> tuple[int, float]:
    """Return what events are ordered by."""
    return event.job, event.time


def find_worker_node(campaign: CampaignDir, job: int, role: str, index: int) -> str | None:
    """Return the node on which a worker has last run, by its newest event; None without one."""
    path = campaign.events / f"{make_worker_name(job, role, index)}{EVENT_SUFFIX}"
    try:
        with path.open("rb") as file:
            file.seek(max(path.stat().st_size - TAIL_BYTES, 0))
            lines = list(parse_json_lines(file.read()))
    except OSError:
        return None
    return next((str(line["node"]) for line in reversed(lines) if line.get("node")), None)
