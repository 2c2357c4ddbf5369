"""Write trajectories to a spool in batches: held in memory at first, acknowledged when durable.

    BatchLimits      when a batch is due
    BatchWriter      holds trajectories until they are durable
    BatchDrafter     the function of a BatchWriter that writes a batch
    SealedHook       the function that is called after that
    DiskSpoolWriter  writes the segments of one producer
    derive_segment   makes one segment from another, such as scored from rollouts
    link_segment     makes one that is the same file

A disk spool is a directory of segments. Every producer appends its own segments, so no process waits for another and
nothing is locked. A trajectory is acknowledged when its segment is durable. One that was not acknowledged may be
durable all the same (after a crash between the rename and the acknowledgement), so a producer may write an episode
twice, and readers drop the second.

Making a batch durable takes longer than writing it, and waiting needs no CPU. So the caller writes, a thread waits,
and the next batch is filled and written in the meantime.
"""

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from secrets import token_hex

import msgspec

from hpcrl.config.recipe import Compression
from hpcrl.errors import SpoolError
from hpcrl.spool.listing import SegmentName, announce_changes, check_producer, find_next_number, sweep_leftovers
from hpcrl.spool.record import PackedTrajectory, Trajectory, pack_trajectory
from hpcrl.spool.segment import draft_packed, read_segment, write_segment
from hpcrl.system.files import make_private_dir, sync_directory

MIN_WRITE_PAUSE_S = 0.5
MAX_WRITE_PAUSE_S = 5.0
"""The longest pause on a full disk: an attempt fails with its first write, and work continues soon after the room."""


class BatchLimits(msgspec.Struct, frozen=True, kw_only=True):
    """The limits of a batch. Twice `max_bytes`, and one whole group, may be held while a batch cannot be written."""

    max_bytes: int = 64 << 20
    max_count: int = 256
    max_age_s: float = 2.0


PublishBatch = Callable[[], Callable[[], object] | None]
BatchDrafter = Callable[[Sequence[PackedTrajectory]], PublishBatch]
"""A function that writes a batch and returns the function that makes it durable and visible.

Both may raise SpoolError, and leave nothing then. The second may return a function, to be called once the
writer acknowledges the batch.
"""

SealedHook = Callable[[str, Sequence[PackedTrajectory]], object]
"""A function that is called with the name of a segment, and what is in its scored twin if that was made too."""


class BatchWriter:
    """A writer that fills batches and writes them with `draft`. Every method may be called from any thread."""

    def __init__(self, draft: BatchDrafter, *, batching: BatchLimits, clock: Callable[[], float]) -> None:
        self._draft = draft
        self._batching = batching
        self._clock = clock
        self._open: deque[tuple[float, PackedTrajectory]] = deque()
        self._pending: _PendingBatch | None = None
        self._num_bytes = 0
        """The bytes of open and of pending trajectories."""
        self._acknowledged: list[str] = []
        self._closed = False
        self._pause_s = 0.0
        self._pause_ends = 0.0
        self._state_lock = threading.Lock()
        self._flush_lock = threading.Lock()

    @property
    def has_room(self) -> bool:
        """Return False while as much is held as is allowed: callers that can wait should, until it is written."""
        return self._num_bytes < 2 * self._batching.max_bytes

    @property
    def num_open(self) -> int:
        """The trajectories that no batch has yet."""
        return len(self._open)

    @property
    def needs_flush(self) -> bool:
        """Return whether `flush_due` has anything to do now."""
        pending = self._pending
        return (pending is not None and pending.is_finished) or bool(self._acknowledged) or self._is_due()

    def append(self, *trajectories: Trajectory) -> None:
        """Hold trajectories in memory; they get into one segment. After an error none is held."""
        packed = [pack_trajectory(trajectory) for trajectory in trajectories]
        with self._state_lock:
            if packed:  # there is room for all or for none: a group that has ended must not be divided
                self._check_room(packed[0])
            self._open.extend((self._clock(), one) for one in packed)
            self._num_bytes += sum(one.num_bytes for one in packed)

    def flush_due(self) -> list[str]:
        """Start to write the batch if it is full or old; to be called regularly.

        Returns the ids that became durable and were not returned yet. It waits only for a batch that is still being
        written when the next is due. An error is that of an earlier batch, which is kept and tried again later.
        """
        return self._flush_if(self._is_due)

    def flush_early(self) -> list[str]:
        """Do the same with a batch that is neither full nor old, unless the disk has just failed."""
        return self._flush_if(self._may_write)

    def _flush_if(self, should_write: Callable[[], bool]) -> list[str]:
        with self._flush_lock:
            if self._pending is not None and self._pending.is_finished:
                self._await_pending()
            if should_write():
                self._write_open()
            return self._take_acknowledged()

    def flush(self) -> list[str]:
        """Make all that is held durable; returns every id not returned yet. An error loses nothing; call again."""
        with self._flush_lock:
            with contextlib.suppress(SpoolError):  # what could not be written is open again and is tried now
                self._await_pending()
            self._write_open()
            self._await_pending()
            return self._take_acknowledged()

    def close(self) -> list[str]:
        """Refuse further trajectories, then `flush`."""
        with self._state_lock:
            self._closed = True
        return self.flush()

    def _write_open(self) -> None:
        """Write what is open; a pending batch becomes durable first."""
        with self._state_lock:
            batch = list(self._open)
            self._open.clear()
        if not batch:
            return
        try:
            publish = self._draft([packed for _, packed in batch])
        except BaseException:
            self._reopen(batch)
            raise
        try:
            self._await_pending()
        finally:
            self._pending = _PendingBatch(batch, publish)

    def _await_pending(self) -> None:
        """Wait until the pending batch is durable; if that fails it is open again."""
        if self._pending is None:
            return
        pending, self._pending = self._pending, None
        error = pending.wait()
        if error is not None:
            self._reopen(pending.batch)
            raise error
        with self._state_lock:
            self._num_bytes -= pending.num_bytes
        self._pause_s = 0.0
        self._acknowledged += [packed.id for _, packed in pending.batch]

    def _reopen(self, batch: list[tuple[float, PackedTrajectory]]) -> None:
        """Make a batch open again that could not be written. A disk that keeps failing is tried less and less often."""
        with self._state_lock:
            self._open.extendleft(reversed(batch))
        self._pause_s = min(max(2 * self._pause_s, MIN_WRITE_PAUSE_S), MAX_WRITE_PAUSE_S)
        self._pause_ends = self._clock() + self._pause_s

    def _take_acknowledged(self) -> list[str]:
        """Return the ids that became durable and were not returned yet."""
        acknowledged, self._acknowledged = self._acknowledged, []
        return acknowledged

    def _may_write(self) -> bool:
        return bool(self._open) and not (self._pause_s and self._clock() < self._pause_ends)

    def _is_due(self) -> bool:
        with self._state_lock:
            if not self._may_write():
                return False
            pending_bytes = self._pending.num_bytes if self._pending else 0
            is_full = (
                self._num_bytes - pending_bytes >= self._batching.max_bytes
                or len(self._open) >= self._batching.max_count
            )
            return is_full or self._clock() - self._open[0][0] >= self._batching.max_age_s

    def _check_room(self, packed: PackedTrajectory) -> None:
        if self._closed:
            raise SpoolError(f"trajectory {packed.id!r} comes after the writer was closed: it was refused")
        if self._num_bytes and self._num_bytes + packed.num_bytes > 2 * self._batching.max_bytes:
            raise SpoolError(
                f"trajectory {packed.id!r} was refused: others ({self._num_bytes >> 20} MiB) "
                "wait to be written: flush before appending more"
            )


class _PendingBatch:
    """A batch that is written and not durable yet."""

    def __init__(self, batch: list[tuple[float, PackedTrajectory]], publish: PublishBatch) -> None:
        self.batch = batch
        self.num_bytes = sum(packed.num_bytes for _, packed in batch)
        self._error: BaseException | None = None
        self.is_finished = False
        """True once it is durable, or has failed."""
        # Not a daemon: a process that ends normally ends after its writes.
        self._thread = threading.Thread(target=self._run, args=(publish,), name="spool")
        self._thread.start()

    def wait(self) -> BaseException | None:
        """Wait until the batch is durable or has failed; return the error or None."""
        self._thread.join()
        return self._error

    def _run(self, publish: PublishBatch) -> None:
        announce: Callable[[], object] | None = None
        try:
            announce = publish()
        except BaseException as error:  # noqa: BLE001 - raised again where the caller waits
            self._error = error
        self.is_finished = True  # before it is announced: whoever is woken asks the writer at once
        if announce is not None:
            announce()


class DiskSpoolWriter(BatchWriter):
    """The writer of one producer's segments, in a directory on any file system with atomic renames."""

    def __init__(
        self,
        directory: Path,
        *,
        producer: str,
        batching: BatchLimits = BatchLimits(),  # noqa: B008 - frozen
        compression: Compression = "none",
        clock: Callable[[], float] = time.monotonic,
        scored: Path | None = None,
        on_sealed: SealedHook = lambda name, batch: None,
    ) -> None:
        """Write as `producer`: a name that one process at a time uses, so it includes the job.

        A segment whose trajectories all have rewards gets its twin in `scored` at once, if that is given. `on_sealed`
        is called in a thread when a segment is durable, with what its twin has, if that exists too.
        """
        super().__init__(self._draft_segment, batching=batching, clock=clock)
        self._directory = directory
        self._producer = check_producer(producer)
        self._compression = compression
        self._scored = scored
        self._on_sealed = on_sealed
        self._number: int | None = None

    def _draft_segment(self, batch: Sequence[PackedTrajectory]) -> PublishBatch:
        with self._explain_errors(len(batch)):
            if self._number is None:
                self._number = self._first_number()
            name = SegmentName(producer=self._producer, number=self._number, count=len(batch), nonce=token_hex(4))
            publish_draft = draft_packed(self._directory / str(name), batch, compression=self._compression)
            self._number += 1

        def publish() -> Callable[[], object]:
            with self._explain_errors(len(batch)):
                publish_draft()
            has_twin = self._link_twin(str(name), batch)
            announce_changes(self._directory, added=[str(name)])
            return partial(self._on_sealed, str(name), batch if has_twin else ())

        return publish

    def _link_twin(self, name: str, batch: Sequence[PackedTrajectory]) -> bool:
        if self._scored is None or any(packed.reward is None for packed in batch):
            return False
        return link_segment(self._directory / name, self._scored)

    @contextlib.contextmanager
    def _explain_errors(self, num: int) -> Iterator[None]:
        """Add to an error what is kept and how to fix the cause."""
        try:
            yield
        except (OSError, SpoolError) as error:
            raise SpoolError(
                f"{error}: {num} trajectories of {self._producer!r} are kept in memory; "
                f"fix spool {str(self._directory)!r} (space, quota, permission) and flush again"
            ) from error

    def _first_number(self) -> int:
        make_private_dir(self._directory)
        sweep_leftovers(self._directory)
        return find_next_number(self._directory, self._producer)


def derive_segment(
    source: Path,
    target_dir: Path,
    transform: Callable[[Trajectory], Trajectory],
    *,
    compression: Compression = "none",
) -> Path:
    """Make the segment of the same name in `target_dir`, trajectory by trajectory, unless it exists.

    Two processes may derive one segment at once: both succeed, and one complete file is left.
    """
    target = target_dir / source.name
    if not target.exists():
        derived = [transform(trajectory) for trajectory in read_segment(source)]
        make_private_dir(target_dir)
        write_segment(target, derived, compression=compression)
        announce_changes(target_dir, added=[target.name])
    return target


def link_segment(source: Path, target_dir: Path) -> bool:
    """Make the segment of the same name in `target_dir` the same file; return False where that is not possible.

    Then it is made by `derive_segment`, as after a crash before the link.
    """
    target = target_dir / source.name
    try:
        make_private_dir(target_dir)
        target.hardlink_to(source)
        sync_directory(target_dir)
    except OSError:
        return False
    announce_changes(target_dir, added=[target.name])
    return True
