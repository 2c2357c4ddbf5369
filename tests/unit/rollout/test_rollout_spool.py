"""The spool "rollouts" of an env worker: what is counted until it is durable, and what a disk that fails changes."""

import asyncio
import threading

from hpcrl.campaign_dir.events import FaultReported
from hpcrl.errors import SpoolError
from hpcrl.rollout.rollout_spool import RolloutSpool, SealedCount, open_rollout_spool
from hpcrl.spool.listing import SegmentListing, SegmentName, announce_changes
from hpcrl.spool.record import pack_trajectory
from hpcrl.spool.writer import BatchLimits, BatchWriter
from tests.support.plans import make_recipe
from tests.support.trajectories import make_lake_trajectory


def open_spool(draft, emitted=(), **limits):
    writer = BatchWriter(draft, batching=BatchLimits(max_age_s=0.0, **limits), clock=lambda: 1.0)
    return RolloutSpool(writer, count_sealed=dict, emit=lambda event: emitted.append(event))


def test_trajectories_that_are_released_while_a_batch_is_written_stay_counted():
    writing, written = threading.Event(), threading.Event()

    def draft(batch):
        writing.set()
        assert written.wait(60)
        return lambda: None

    async def run():
        spool = open_spool(draft)
        spool.release([make_lake_trajectory(0, 0), make_lake_trajectory(0, 1)])
        closing = asyncio.create_task(spool.close())
        await asyncio.to_thread(writing.wait, 60)
        spool.num_unsealed += 8  # a writer that closes accepts none, so they are only counted here
        written.set()
        return await closing, spool.num_unsealed

    assert asyncio.run(run()) == (["lake/0/0", "lake/0/1"], 8)


def test_trajectories_that_cannot_be_written_stay_unsealed_and_are_reported():
    emitted, is_full = [], [True]

    def draft(batch):
        if is_full[0]:
            raise SpoolError("no space is left in /scratch")
        return lambda: None

    async def run():
        spool = open_spool(draft, emitted)
        spool.release([make_lake_trajectory()])
        assert await spool.seal_due() == []
        counts = [spool.num_unsealed]
        is_full[0] = False
        assert await spool.close() == ["lake/0/0"]
        return [*counts, spool.num_unsealed]

    assert asyncio.run(run()) == [1, 0]
    assert emitted == [FaultReported(what="spool", detail="no space is left in /scratch")]


def test_an_episode_waits_while_memory_is_full_and_the_disk_slow():
    one = make_lake_trajectory()

    async def run():
        spool = open_spool(lambda batch: lambda: None, max_bytes=pack_trajectory(one).num_bytes // 2)
        await spool.wait_for_room()
        spool.release([one])
        waiting = asyncio.create_task(spool.wait_for_room())
        await asyncio.sleep(0)
        was_waiting = not waiting.done()
        await spool.close()
        await waiting
        return was_waiting

    assert asyncio.run(run())


def test_trajectories_of_all_producers_are_counted(tmp_path):
    async def run():
        recipe = make_recipe()
        spools = [
            open_rollout_spool(tmp_path, recipe=recipe, producer=f"000-env-{index}", emit=print) for index in range(2)
        ]
        spools[0].release([make_lake_trajectory(0, 0), make_lake_trajectory(0, 1)])
        spools[1].release([make_lake_trajectory(1, 0)])
        before = dict(spools[0].count_sealed())
        for spool in spools:
            await spool.close()
        return before, [dict(spool.count_sealed()) for spool in spools]

    counts = {"env-0": 2, "env-1": 1}
    assert asyncio.run(run()) == ({}, [counts, counts])


def test_durable_trajectories_are_counted_as_segments_come_and_go(tmp_path):
    names = [str(SegmentName(producer="000-env-0", number=n, count=n + 1, nonce="0" * 8)) for n in range(3)]
    sealed = SealedCount(SegmentListing(tmp_path))
    for name in names:
        (tmp_path / name).touch()
    announce_changes(tmp_path, added=names)
    assert sealed.count() == {"env-0": 6}
    (tmp_path / names[1]).unlink()
    announce_changes(tmp_path, removed=[names[1]])
    assert sealed.count() == {"env-0": 4}
