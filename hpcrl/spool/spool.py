"""Spools: where trajectories become durable, and where they are found.

    SpoolWriter    append, flush_due, flush, close     DiskSpoolWriter   MemorySpoolWriter
    SpoolReader    poll                                DiskSpoolReader   MemorySpoolReader
    derive         one segment made from another, such as scored from rollouts

A disk spool is a directory of segments. Every producer appends segments of its own, so no process waits for
another and nothing is locked. A trajectory is acknowledged when the segment that holds it is durable; what was
not acknowledged may be durable all the same (a crash between the rename and the answer), so a producer may send
an episode twice, and readers drop what they have seen.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Container, Sequence
from pathlib import Path
from secrets import token_hex
from typing import Protocol

import msgspec

from hpcrl.errors import SpoolError
from hpcrl.files import private_dir
from hpcrl.spool.names import Listing, SegmentName, check_producer, next_number, parse, sweep_leftovers
from hpcrl.spool.record import TRAINABLE, Packed, Trajectory, pack, parse_facts, with_columns
from hpcrl.spool.segment import read_segment, write_packed, write_segment


class SpoolWriter(Protocol):
    """One producer's way into a spool. Every method may be called from any thread."""

    def append(self, trajectory: Trajectory) -> None:
        """Take a trajectory into memory. An error means that it was not taken."""

    def flush_due(self) -> list[str]:
        """`flush` if the batch is full or old, else nothing; call it now and then."""

    def flush(self) -> list[str]:
        """Make all that was taken durable and acknowledge it: its ids. An error loses nothing; call again."""

    def close(self) -> list[str]:
        """`flush`, then take no more."""


class SpoolReader(Protocol):
    """One consumer's way out of a spool."""

    def poll(self) -> list[Trajectory]:
        """Trajectories that became durable since the last call, each once."""

    @property
    def num_duplicates(self) -> int:
        """How many were dropped because their episode had been delivered."""


class Batching(msgspec.Struct, frozen=True, kw_only=True):
    """When a writer's batch is due. Up to twice `max_bytes` are held while a flush runs or fails."""

    max_bytes: int = 64 << 20
    max_count: int = 256
    max_age_s: float = 2.0


class _BatchWriter:
    """Keeps what it took until `store` has made it durable."""

    def __init__(
        self, store: Callable[[Sequence[Packed]], None], *, batching: Batching, clock: Callable[[], float]
    ) -> None:
        self._store = store
        self._batching = batching
        self._clock = clock
        self._held: deque[tuple[float, Packed]] = deque()
        self._num_bytes = 0
        self._closed = False
        self._holding = threading.Lock()
        self._flushing = threading.Lock()

    def append(self, trajectory: Trajectory) -> None:
        packed = pack(trajectory)
        with self._holding:
            self._check_room(packed)
            self._held.append((self._clock(), packed))
            self._num_bytes += packed.num_bytes

    def flush_due(self) -> list[str]:
        return self.flush() if self._is_due() else []

    def flush(self) -> list[str]:
        with self._flushing:
            with self._holding:
                batch = [packed for _, packed in self._held]
            if not batch:
                return []
            self._store(batch)
            with self._holding:
                for packed in batch:
                    self._held.popleft()
                    self._num_bytes -= packed.num_bytes
            return [packed.id for packed in batch]

    def close(self) -> list[str]:
        with self._holding:
            self._closed = True
        return self.flush()

    def _is_due(self) -> bool:
        with self._holding:
            if not self._held:
                return False
            full = self._num_bytes >= self._batching.max_bytes or len(self._held) >= self._batching.max_count
            return full or self._clock() - self._held[0][0] >= self._batching.max_age_s

    def _check_room(self, packed: Packed) -> None:
        if self._closed:
            raise SpoolError(f"trajectory {packed.id!r} comes after the writer was closed: it was not taken")
        if self._held and self._num_bytes + packed.num_bytes > 2 * self._batching.max_bytes:
            raise SpoolError(
                f"trajectory {packed.id!r} was not taken: {len(self._held)} others ({self._num_bytes >> 20} MiB) "
                "wait to be written: flush before appending more"
            )


class DiskSpoolWriter(_BatchWriter):
    """A producer's segments in a directory that may be on any filesystem with atomic renames."""

    def __init__(
        self,
        directory: Path,
        *,
        producer: str,
        batching: Batching = Batching(),  # noqa: B008 - frozen
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`producer` is in use by one process at a time, so it names the job too."""
        super().__init__(self._add_segment, batching=batching, clock=clock)
        self._directory = directory
        self._producer = check_producer(producer)
        self._number: int | None = None

    def _add_segment(self, batch: Sequence[Packed]) -> None:
        try:
            if self._number is None:
                self._number = self._first_number()
            name = SegmentName(producer=self._producer, number=self._number, count=len(batch), nonce=token_hex(4))
            write_packed(self._directory / str(name), batch)
        except (OSError, SpoolError) as error:
            raise SpoolError(
                f"{error}: {len(batch)} trajectories of {self._producer!r} are kept in memory; "
                f"mend spool {str(self._directory)!r} (space, quota, permission) and flush again"
            ) from error
        self._number += 1

    def _first_number(self) -> int:
        private_dir(self._directory)
        sweep_leftovers(self._directory)
        return next_number(self._directory, self._producer)


class _Once:
    """Lets every episode through once.

    An episode that failed and was retried has one id and two records: the one that can be trained on counts anew.
    """

    def __init__(self, consumed: Container[str]) -> None:
        self._consumed = consumed
        self._delivered: set[tuple[str, bool]] = set()
        self.num_duplicates = 0

    def admits(self, trajectory: Trajectory) -> bool:
        key = (trajectory.id, trajectory.status in TRAINABLE)
        if key in self._delivered:
            self.num_duplicates += 1
            return False
        self._delivered.add(key)
        return trajectory.id not in self._consumed


class DiskSpoolReader:
    """A consumer's view of a directory of segments; only names that it has not seen are opened.

    A damaged segment is told once to `on_damage`, listed in `damaged`, and left where it lies. One that cannot be
    reached (permission, an I/O error) is told once too, and tried again with every poll.
    """

    def __init__(
        self, directory: Path, *, on_damage: Callable[[Path, str], None], consumed: Container[str] = ()
    ) -> None:
        """`consumed`: ids that are never delivered, such as those in the trainer's checkpoint."""
        self.damaged: dict[str, str] = {}
        self._directory = directory
        self._listing = Listing(directory)
        self._on_damage = on_damage
        self._seen: set[str] = set()
        self._once = _Once(consumed)

    @property
    def num_duplicates(self) -> int:
        return self._once.num_duplicates

    def poll(self) -> list[Trajectory]:
        fresh = []
        for name in self._names():
            if name not in self._seen:
                fresh += [trajectory for trajectory in self._read(name) if self._once.admits(trajectory)]
        return fresh

    def _names(self) -> list[str]:
        try:
            names = self._listing.names()
        except OSError as error:
            raise SpoolError(f"cannot list spool {str(self._directory)!r}: {error.strerror}") from error
        if not names and self._seen and not self._directory.is_dir():
            raise SpoolError(
                f"spool {str(self._directory)!r} had {len(self._seen)} segments and is gone: bring it back"
            )
        return names

    def _read(self, name: str) -> list[Trajectory]:
        path = self._directory / name
        try:
            if parse(name) is None:
                raise SpoolError(f"cannot read segment {str(path)!r}: its name is not a segment's")
            trajectories = list(read_segment(path))
        except SpoolError as error:
            cause = error.__cause__
            if not (isinstance(cause, OSError) and cause.errno):
                self._seen.add(name)
            self._tell(path, str(error))
            return []
        self._seen.add(name)
        self.damaged.pop(name, None)
        return trajectories

    def _tell(self, path: Path, reason: str) -> None:
        if path.name not in self.damaged:
            self.damaged[path.name] = reason
            self._on_damage(path, reason)


def derive(source: Path, target_dir: Path, transform: Callable[[Trajectory], Trajectory]) -> Path:
    """Make the segment of the same name in `target_dir`, trajectory by trajectory; done already: nothing happens.

    Two processes may derive one segment at once: both end well, and one complete file remains.
    """
    target = target_dir / source.name
    if not target.exists():
        derived = [transform(trajectory) for trajectory in read_segment(source)]
        private_dir(target_dir)
        write_segment(target, derived)
    return target


class MemorySpool:
    """A spool that lives as long as the process: for tests and simulation."""

    def __init__(self) -> None:
        self.durable: list[Packed] = []


class MemorySpoolWriter(_BatchWriter):
    """A producer's way into a spool in memory."""

    def __init__(
        self,
        spool: MemorySpool,
        *,
        batching: Batching = Batching(),  # noqa: B008 - frozen
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(spool.durable.extend, batching=batching, clock=clock)


class MemorySpoolReader:
    """A consumer's cursor in a spool in memory."""

    def __init__(self, spool: MemorySpool, *, consumed: Container[str] = ()) -> None:
        self._spool = spool
        self._next = 0
        self._once = _Once(consumed)

    @property
    def num_duplicates(self) -> int:
        return self._once.num_duplicates

    def poll(self) -> list[Trajectory]:
        new = self._spool.durable[self._next :]
        self._next += len(new)
        found = [with_columns(parse_facts(msgspec.json.decode(packed.facts)), packed.columns) for packed in new]
        return [trajectory for trajectory in found if self._once.admits(trajectory)]
