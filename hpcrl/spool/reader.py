"""Read a spool as a consumer: with its own cursor, each episode once, damaged segments quarantined.

SpoolCursor       delivers new rows; the common part of the readers of disk and memory
DiskSpoolReader   the cursor over a directory of segments
list_last_groups  the groups in the last segments of one worker
"""

import contextlib
from collections import Counter, deque
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hpcrl.errors import SpoolError
from hpcrl.spool.listing import (
    SegmentListing,
    find_segment_worker,
    list_segments,
    parse_segment_name,
    quarantine_segment,
)
from hpcrl.spool.record import TRAINABLE, Trajectory, TrajectoryFacts
from hpcrl.spool.segment import is_out_of_reach, read_segment

_DeliveryKey = tuple[str, bool]


class SpoolCursor:
    """The cursor of one consumer: it delivers every episode once.

    An episode that failed and was retried has one id and two records; the one that can be trained on is delivered too.
    """

    def __init__(self, *, consumed: Container[str]) -> None:
        self.num_duplicates = 0
        """The number of trajectories dropped because their episode had been delivered."""
        self._consumed = consumed
        self._delivered: dict[_DeliveryKey, str] = {}

    def poll(self) -> list[Trajectory]:
        """Return the trajectories that became durable since the last call, each once."""
        return [
            trajectory
            for source, trajectories in self._read_new_sources()
            for trajectory in trajectories
            if self._is_new(trajectory, source) and trajectory.id not in self._consumed
        ]

    def _read_new_sources(self) -> Iterator[tuple[str, Sequence[Trajectory]]]:
        """Yield every source that is new, with its rows."""
        raise NotImplementedError

    def _note_row(self, source: str, key: _DeliveryKey | None) -> None:
        """Note that a row of `source` was delivered or skipped; `key` is set if it was the first of its episode."""

    def _is_new(self, trajectory: Trajectory, source: str) -> bool:
        key = (trajectory.id, trajectory.status in TRAINABLE)
        is_new = key not in self._delivered
        if is_new:
            self._delivered[key] = source
        self._note_row(source, key if is_new else None)
        self.num_duplicates += not is_new
        return is_new


@dataclass
class _ReadSegment:
    """The notes on a segment that was read."""

    num_rows: int
    worker: str
    """The worker that wrote it, without its job."""
    num_passed: int = 0
    keys: list[_DeliveryKey] = field(default_factory=list)


class DiskSpoolReader(SpoolCursor):
    """A consumer's view of a directory of segments; it opens only names that it has not seen.

    A damaged segment is moved to the spool's quarantine, listed in `damaged`, and reported once to `on_damage`. One
    that cannot be reached (permission, an I/O error) stays, is reported once too, and is tried again with every poll.
    A segment that was removed is forgotten, and its rows count as new if they appear again: the process that removes
    segments keeps its own record of what was consumed.
    """

    def __init__(
        self, directory: Path, *, on_damage: Callable[[Path, str], None], consumed: Container[str] = ()
    ) -> None:
        """Start with nothing delivered; the ids in `consumed`, such as those of a checkpoint, never are."""
        super().__init__(consumed=consumed)
        self.damaged: dict[str, str] = {}
        self.passed: Counter[str] = Counter()
        """The rows delivered or skipped, in segments that still exist, by the worker that wrote them."""
        self._directory = directory
        self._listing = SegmentListing(directory)
        self._on_damage = on_damage
        self._known: dict[str, _ReadSegment] = {}
        self._unread: deque[str] = deque()
        self._unreachable: set[str] = set()
        """The names of segments out of reach, tried again with the next call."""

    def finished_segments(self, waiting: Iterable[Trajectory]) -> list[str]:
        """Return the segments whose rows were all delivered or skipped, and of which none is in `waiting`."""
        still_open = {self._delivered.get((one.id, one.status in TRAINABLE)) for one in waiting}
        return [
            name
            for name, read in self._known.items()
            if read.num_rows and read.num_passed == read.num_rows and name not in still_open
        ]

    def count_by_worker(self, trajectories: Iterable[TrajectoryFacts]) -> Counter[str]:
        """Count trajectories that were delivered by the worker that wrote them."""
        segments = (self._delivered.get((one.id, one.status in TRAINABLE)) for one in trajectories)
        return Counter(self._known[name].worker for name in segments if name is not None and name in self._known)

    def segment_of(self, trajectory: TrajectoryFacts) -> str | None:
        """Return the segment that a trajectory was delivered from; None if it is forgotten."""
        return self._delivered.get((trajectory.id, trajectory.status in TRAINABLE))

    def forget(self, names: Iterable[str]) -> None:
        """Forget the rows of segments that are about to be removed, and never read them again."""
        for name in names:
            if name in self._known:
                self._drop_rows(self._known[name])

    def _discover_names(self) -> None:
        added, removed = self._check_changes()
        for name in removed:
            if name in added and name in self._known and self._known[name].num_rows:
                continue  # the whole directory was away for a while
            if name in self._known:
                self._drop_rows(self._known.pop(name))
        if self._unreachable:
            added = added.union(self._listing.name_set() & self._unreachable)
            self._unreachable.clear()
        self._unread.extend(sorted(name for name in added if name not in self._known))

    def _check_changes(self) -> tuple[set[str], set[str]]:
        """Return the names added and removed. A directory that is gone is an error: its contents are not forgotten."""
        try:
            present = self._listing.name_set()
        except OSError as error:
            raise SpoolError(f"cannot list spool {str(self._directory)!r}: {error.strerror}") from error
        if not present and self._known and not self._directory.is_dir():
            raise SpoolError(f"spool {str(self._directory)!r} had {len(self._known)} segments and is gone: restore it")
        return self._listing.changes()

    def _read_new_sources(self) -> Iterator[tuple[str, Sequence[Trajectory]]]:
        self._discover_names()
        while self._unread:
            name = self._unread.popleft()
            trajectories = self._read_trajectories(name)
            if trajectories is not None:
                self._known[name] = _ReadSegment(num_rows=len(trajectories), worker=find_segment_worker(name))
                yield name, trajectories

    def _read_trajectories(self, name: str) -> list[Trajectory] | None:
        path = self._directory / name
        try:
            if parse_segment_name(name) is None:
                raise SpoolError(f"cannot read segment {str(path)!r}: its name is not that of a segment")
            trajectories = list(read_segment(path))
        except SpoolError as error:
            self._handle_unreadable(path, error)
            return None
        self.damaged.pop(name, None)
        return trajectories

    def _handle_unreadable(self, path: Path, error: SpoolError) -> None:
        name, is_reported = path.name, path.name in self.damaged
        if is_out_of_reach(error):
            self._unreachable.add(name)
            if isinstance(error.__cause__, FileNotFoundError) and not path.is_symlink():
                return  # removed since it was listed, or announced and not visible on this node yet
            self.damaged[name] = str(error)
        else:
            is_reported = False
            self.damaged[name] = quarantine_segment(path, str(error))
            self._known[name] = _ReadSegment(num_rows=0, worker="")
        if not is_reported:
            self._on_damage(path, self.damaged[name])

    def _note_row(self, source: str, key: _DeliveryKey | None) -> None:
        read = self._known[source]
        read.num_passed += 1
        self.passed[read.worker] += 1
        if key is not None:
            read.keys.append(key)

    def _drop_rows(self, read: _ReadSegment) -> None:
        for key in read.keys:
            self._delivered.pop(key, None)
        read.keys.clear()
        self.passed[read.worker] -= read.num_passed
        read.num_passed = read.num_rows = 0


def list_last_groups(directory: Path, *, worker: str) -> set[str]:
    """Return the groups in the last two segments that a worker (such as env-0) wrote, in whichever job.

    A writer starts no third before the first of them is acknowledged, so these are the ones that a killed writer may
    have written without knowing it.
    """
    names = [name for name in map(parse_segment_name, list_segments(directory)) if name is not None]
    own = [name for name in names if name.producer.partition("-")[2] == worker]
    groups: set[str] = set()
    for name in own[-2:]:
        with contextlib.suppress(SpoolError):  # a damaged segment holds nothing that is durable
            groups.update(facts.group for facts in read_segment(directory / str(name)).facts)
    return groups
