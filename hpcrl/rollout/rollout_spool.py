"""The spool "rollouts" as an env worker uses it: whole groups go in, and are counted until they are durable.

RolloutSpool        one worker's writer, with its count of unsealed trajectories
SealedCount         the durable trajectories of each env worker
open_rollout_spool  opens it on disk
ROOM_INTERVAL_S     the interval at which an ended episode looks for room
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from hpcrl.campaign_dir.events import CampaignEvent, FaultReported, SegmentScored, make_segment_scored
from hpcrl.config.recipe import Recipe
from hpcrl.errors import SpoolError
from hpcrl.spool.ids import get_domain
from hpcrl.spool.listing import SegmentListing, count_by_worker
from hpcrl.spool.record import PackedTrajectory, Trajectory
from hpcrl.spool.writer import BatchLimits, BatchWriter, DiskSpoolWriter
from hpcrl.system.file_watch import PollPace
from hpcrl.system.processes import do_nothing

ROOM_INTERVAL_S = 0.1


class RolloutSpool:
    """The spool "rollouts", written in threads by one env worker."""

    def __init__(
        self,
        writer: BatchWriter,
        *,
        count_sealed: Callable[[], Mapping[str, int]],
        emit: Callable[[CampaignEvent], None],
        expect_change: Callable[[], object] = do_nothing,
    ) -> None:
        """Write with `writer`; `count_sealed` counts the durable trajectories of each env worker.

        `expect_change` is called when it should look again, since something may have changed.
        """
        self._writer = writer
        self.expect_change = expect_change
        self._emit = emit
        self.count_sealed = count_sealed
        self.num_unsealed = 0
        """Released trajectories of this worker that are not durable yet."""

    def release(self, trajectories: Sequence[Trajectory]) -> None:
        """Add the trajectories of a full group, which get into one segment."""
        self._writer.append(*trajectories)
        self.num_unsealed += len(trajectories)

    async def wait_for_room(self) -> None:
        """Wait while the disk is so slow, or so full, that no more may be held in memory."""
        while not self._writer.has_room:
            await asyncio.sleep(ROOM_INTERVAL_S)

    @property
    def num_open(self) -> int:
        """Released trajectories that are in no segment yet, not even in one that is being written."""
        return self._writer.num_open

    async def seal_due(self) -> list[str]:
        """Make durable what is due; return the episodes that are durable now."""
        return await self._seal(self._writer.flush_due) if self._writer.needs_flush else []

    async def seal_early(self) -> list[str]:
        """Make all durable that is open; return the episodes that are durable now."""
        return await self._seal(self._writer.flush_early)

    async def close(self) -> list[str]:
        """Make everything durable; return the episodes that are durable now."""
        return await self._seal(self._writer.close)

    async def _seal(self, flush: Callable[[], list[str]]) -> list[str]:
        """Flush in a thread. On a full disk nothing is lost; writes are retried ever less often."""
        try:
            sealed = await asyncio.to_thread(flush)
        except SpoolError as error:
            self._emit(FaultReported(what="spool", detail=str(error)))
            return []
        if sealed:
            self.expect_change()
        self.num_unsealed -= len(sealed)  # a separate statement after the await: meanwhile, ending episodes add to it
        return sealed


class SealedCount:
    """The durable trajectories in a spool by the worker that wrote them, kept up to date by what comes and goes."""

    def __init__(self, listing: SegmentListing, *, pace: PollPace | None = None) -> None:
        self._listing = listing
        self._pace = pace or PollPace()
        self._nums: Counter[str] = Counter()

    def expect_change(self) -> None:
        """Look at the next call."""
        self._pace.note_change()

    def count(self) -> Mapping[str, int]:
        """Return the numbers as of the last look, which comes ever more rarely while nothing changes."""
        if self._pace.is_due():
            added, removed = self._listing.changes()
            if added or removed:
                self._pace.note_change()
                self._nums.update(count_by_worker(added))
                self._nums.subtract(count_by_worker(removed))
        return self._nums


def open_rollout_spool(
    directory: Path,
    *,
    recipe: Recipe,
    producer: str,
    emit: Callable[[CampaignEvent], None],
    scored: Path | None = None,
    on_sealed: Callable[[], object] = do_nothing,
) -> RolloutSpool:
    """Open the spool on disk for one producer.

    What has rewards already gets a twin in `scored`; `on_sealed` is called in a thread when a segment is durable.
    """
    spool = recipe.spool
    batching = BatchLimits(
        max_bytes=spool.max_segment_mib << 20, max_count=recipe.rollout.group_size * 64, max_age_s=spool.seal_after_s
    )
    listing = SegmentListing(directory)

    def report_sealed(name: str, twin: Sequence[PackedTrajectory]) -> None:
        if twin:
            emit(_summarise_twin(name, twin))
        on_sealed()

    writer = DiskSpoolWriter(
        directory,
        producer=producer,
        batching=batching,
        compression=spool.compression,
        scored=scored,
        on_sealed=report_sealed,
    )
    sealed = SealedCount(listing)
    return RolloutSpool(writer, count_sealed=sealed.count, emit=emit, expect_change=sealed.expect_change)


def _summarise_twin(name: str, twin: Sequence[PackedTrajectory]) -> SegmentScored:
    rewards: dict[str, list[float]] = {}
    for packed in twin:
        rewards.setdefault(get_domain(packed.id), []).append(packed.reward or 0.0)
    return make_segment_scored(name, rewards)
