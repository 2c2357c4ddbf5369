"""Spools: where trajectories become durable, and where they are found.

    SpoolWriter    append, flush_due, flush, close     DiskSpoolWriter   MemorySpoolWriter
    SpoolReader    poll, take                          DiskSpoolReader   MemorySpoolReader
    derive         one segment made from another, such as scored from rollouts

A disk spool is a directory of segments. Every producer appends segments of its own, so no process waits for
another and nothing is locked. A trajectory is acknowledged when the segment that holds it is durable; what was
not acknowledged may be durable all the same (a crash between the rename and the answer), so a producer may send
an episode twice, and readers drop what they have seen.
"""

import contextlib
import time
from collections.abc import Callable, Container, Iterator, Sequence
from functools import partial
from pathlib import Path
from secrets import token_hex
from typing import Protocol

from hpcrl.errors import SpoolError
from hpcrl.files import private_dir
from hpcrl.spool.batching import Batching, BatchWriter
from hpcrl.spool.hdf5 import Compression
from hpcrl.spool.names import SegmentName, announce, check_producer, next_number, sweep_leftovers
from hpcrl.spool.reader import EVERYTHING, Cursor, DiskSpoolReader, Where
from hpcrl.spool.record import Packed, Trajectory, parse_facts, with_columns
from hpcrl.spool.segment import draft_packed, read_segment, write_segment

__all__ = [
    "EVERYTHING",
    "Batching",
    "DiskSpoolReader",
    "DiskSpoolWriter",
    "MemorySpool",
    "MemorySpoolReader",
    "MemorySpoolWriter",
    "SpoolReader",
    "SpoolWriter",
    "Where",
    "derive",
]


class SpoolWriter(Protocol):
    """One producer's way into a spool. Every method may be called from any thread."""

    def append(self, trajectory: Trajectory) -> None:
        """Take a trajectory into memory. An error means that it was not taken."""

    def flush_due(self) -> list[str]:
        """Begin to write the batch if it is full or old; call it now and then.

        Returns the ids that became durable and were not told yet. It waits only for a batch that is still being
        written when the next is due. An error is that of an earlier batch, which is kept and tried again later.
        """

    def flush(self) -> list[str]:
        """Make all that was taken durable; returns every id not told yet. An error loses nothing; call again."""

    def close(self) -> list[str]:
        """`flush`, then take no more."""


class SpoolReader(Protocol):
    """One consumer's way out of a spool. What `where` does not admit is passed over for good."""

    def poll(self, where: Where = EVERYTHING) -> list[Trajectory]:
        """Trajectories that became durable since the last call, each once."""

    def take(self, num: int, where: Where = EVERYTHING) -> list[Trajectory]:
        """The next `num` of them, or as many as there are; the others wait for the next call."""

    @property
    def num_duplicates(self) -> int:
        """How many were dropped because their episode had been delivered."""


class DiskSpoolWriter(BatchWriter):
    """A producer's segments in a directory that may be on any filesystem with atomic renames."""

    def __init__(
        self,
        directory: Path,
        *,
        producer: str,
        batching: Batching = Batching(),  # noqa: B008 - frozen
        compression: Compression = "none",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`producer` is in use by one process at a time, so it names the job too."""
        super().__init__(self._draft_segment, batching=batching, clock=clock)
        self._directory = directory
        self._producer = check_producer(producer)
        self._compression = compression
        self._number: int | None = None

    def _draft_segment(self, batch: Sequence[Packed]) -> Callable[[], None]:
        with self._told(len(batch)):
            if self._number is None:
                self._number = self._first_number()
            name = SegmentName(producer=self._producer, number=self._number, count=len(batch), nonce=token_hex(4))
            publish_draft = draft_packed(self._directory / str(name), batch, compression=self._compression)
            self._number += 1

        def publish() -> None:
            with self._told(len(batch)):
                publish_draft()
            announce(self._directory, came=[str(name)])

        return publish

    @contextlib.contextmanager
    def _told(self, num: int) -> Iterator[None]:
        """Say with an error what is kept and what to do."""
        try:
            yield
        except (OSError, SpoolError) as error:
            raise SpoolError(
                f"{error}: {num} trajectories of {self._producer!r} are kept in memory; "
                f"mend spool {str(self._directory)!r} (space, quota, permission) and flush again"
            ) from error

    def _first_number(self) -> int:
        private_dir(self._directory)
        sweep_leftovers(self._directory)
        return next_number(self._directory, self._producer)


def derive(
    source: Path,
    target_dir: Path,
    transform: Callable[[Trajectory], Trajectory],
    *,
    compression: Compression = "none",
) -> Path:
    """Make the segment of the same name in `target_dir`, trajectory by trajectory; done already: nothing happens.

    Two processes may derive one segment at once: both end well, and one complete file remains.
    """
    target = target_dir / source.name
    if not target.exists():
        derived = [transform(trajectory) for trajectory in read_segment(source)]
        private_dir(target_dir)
        write_segment(target, derived, compression=compression)
        announce(target_dir, came=[target.name])
    return target


class MemorySpool:
    """A spool that lives as long as the process: for tests and simulation."""

    def __init__(self) -> None:
        self.durable: list[Packed] = []


class MemorySpoolWriter(BatchWriter):
    """A producer's way into a spool in memory."""

    def __init__(
        self,
        spool: MemorySpool,
        *,
        batching: Batching = Batching(),  # noqa: B008 - frozen
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(lambda batch: partial(spool.durable.extend, batch), batching=batching, clock=clock)


class MemorySpoolReader(Cursor):
    """A consumer's cursor in a spool in memory."""

    def __init__(self, spool: MemorySpool, *, consumed: Container[str] = ()) -> None:
        super().__init__(consumed=consumed)
        self._spool = spool
        self._next = 0

    def _fill(self) -> bool:
        if self._next == len(self._spool.durable):
            return False
        packed = self._spool.durable[self._next]
        self._ready.append((str(self._next), with_columns(parse_facts(packed.facts), packed.columns)))
        self._next += 1
        return True
