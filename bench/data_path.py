"""The data path of a training step: every rank reads its own rows, beside one controller that loads and scatters.

ours         rank 0 deals ids; each rank maps its rows from the spool and pads its micro-batches
controller   rank 0 loads all rows, pads every rank's micro-batches, and scatters them (pickled, over gloo)

Both bring the same micro-batches to the same ranks from the same spool, as many bytes for each rank however many there
are. Memory is private memory: pages of mapped files belong to the page cache.

python -m bench.data_path [--full]
"""

import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
import torch.distributed as dist

from bench import figures
from bench.figures import Figure
from hpcrl.learn.batch import MicroBatch, micro_batches
from hpcrl.learn.deal import Deal, deal, rows_of
from hpcrl.recipe import Train
from hpcrl.spool.reader import DiskSpoolReader
from hpcrl.spool.record import Trajectory, Turn
from hpcrl.spool.segment import write_segment
from hpcrl.trainers.lead import Order, fetch
from hpcrl.trainers.world import World
from tests import ranks

SIZES = (1, 2, 4, 8)
LENGTH = 16384
ROWS = 32
"""Trajectories of a rank in a step: about 7 MB in the spool."""
TURN = 1024
"""Tokens of a turn, half of them said by the model."""
GROUP = 8
TRAIN = Train(num_steps=9, groups_per_step=4, learning_rate=1e-3, tokens_per_micro_batch=4 * LENGTH)
WAYS = ("ours", "controller")
LOOK_S = 0.002


def measure(full: bool) -> list[Figure]:
    found = {size: _both(size, num_steps=8 if full else 3) for size in SIZES}
    result = []
    for size, ways in found.items():
        ratio = ways["controller"]["seconds"] / ways["ours"]["seconds"]
        bar = 1.0 if size == SIZES[-1] else None
        result.append(Figure(name=f"throughput of {size} ranks over a controller's", value=ratio, bar=bar))
    for way in WAYS:
        growth = found[SIZES[-1]][way]["peak"] / found[1][way]["peak"]
        bar = 1.5 if way == "ours" else None
        name = f"busiest process, {way}: memory at {SIZES[-1]} ranks over 1"
        result.append(Figure(name=name, value=growth, bar=bar, better="lower"))
    for way in WAYS:
        peak = found[SIZES[-1]][way]["peak"] / 2**20
        result.append(Figure(name=f"busiest process, {way}: memory at {SIZES[-1]} ranks", value=peak, unit="MiB"))
    return result


def _both(size: int, *, num_steps: int) -> dict[str, dict[str, float]]:
    """Seconds of a step (median) and the peak of the busiest rank's memory, for both ways."""
    with tempfile.TemporaryDirectory() as spool:
        _fill(Path(spool), num=size * ROWS * (num_steps + 1))
        said = ranks.run(size, "bench.data_path:work", spool, num_steps)
    return {
        way: {
            "seconds": statistics.median(max(rank[way]["seconds"][step] for rank in said) for step in range(num_steps)),
            "peak": max(rank[way]["peak"] for rank in said),
        }
        for way in WAYS
    }


def work(world: World, spool: str, num_steps: int) -> dict[str, Any]:
    """One rank's part, the two ways in turn so that both have the same machine; the first step warms up."""
    torch.set_num_threads(1)
    ways: dict[str, Callable[[World, Path, list[Trajectory], int], list[MicroBatch]]]
    ways = {"ours": _ours, "controller": _controller}
    reader = DiskSpoolReader(Path(spool), on_damage=_refuse)
    result: dict[str, Any] = {way: {"seconds": [], "peak": 0} for way in ways}
    for step in range(num_steps + 1):
        chosen = reader.take(world.size * ROWS) if world.rank == 0 else []
        for way, make in ways.items():
            world.wait()
            with _peak() as peak:
                began = time.perf_counter()
                made = make(world, Path(spool), chosen, step)
                world.wait()
                seconds = time.perf_counter() - began
            assert sum(micro.num_sequences for micro in made) == ROWS
            del made
            if step:
                result[way]["seconds"].append(seconds)
                result[way]["peak"] = max(result[way]["peak"], peak())
    return result


def _ours(world: World, spool: Path, chosen: list[Trajectory], step: int) -> list[MicroBatch]:
    order = Order(do="learn", step=step, shares=_dealt(world, chosen, step).shares if world.rank == 0 else [])
    heard = msgspec.json.decode(world.hear(msgspec.json.encode(order)), type=Order)
    parts = rows_of(
        heard.shares[world.rank], fetch=lambda items: fetch(items, spool=spool), train=TRAIN, max_length=LENGTH
    )
    return micro_batches(parts[0], tokens_per_micro_batch=TRAIN.tokens_per_micro_batch)


def _controller(world: World, _: Path, chosen: list[Trajectory], step: int) -> list[MicroBatch]:
    everything = None
    if world.rank == 0:
        by_id = {trajectory.id: trajectory for trajectory in chosen}
        everything = []
        for share in _dealt(world, chosen, step).shares:
            parts = rows_of(
                share, fetch=lambda items: [by_id[item.id] for item in items], train=TRAIN, max_length=LENGTH
            )
            everything.append(micro_batches(parts[0], tokens_per_micro_batch=TRAIN.tokens_per_micro_batch))
    if world.size == 1:
        assert everything is not None
        return everything[0]
    mine: list[Any] = [None]
    dist.scatter_object_list(mine, everything, src=0)
    found: list[MicroBatch] = mine[0]
    return found


def _dealt(world: World, chosen: list[Trajectory], step: int) -> Deal:
    name = {trajectory.id: _segment(int(trajectory.group.rpartition("/")[2])) for trajectory in chosen}
    return deal(
        chosen,
        train=TRAIN,
        num_ranks=world.size,
        seed=0,
        step=step,
        max_length=LENGTH,
        segment_of=lambda trajectory: name[trajectory.id],
    )


@contextmanager
def _peak() -> Iterator[Callable[[], int]]:
    """How much private memory grows in the block, at most."""
    before, most, over = _private(), 0, threading.Event()

    def look() -> None:
        nonlocal most
        while not over.wait(LOOK_S):
            most = max(most, _private() - before)

    watch = threading.Thread(target=look)
    watch.start()
    try:
        yield lambda: most
    finally:
        most = max(most, _private() - before)
        over.set()
        watch.join()


def _private() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon"))


def _segment(group: int) -> str:
    return f"000-env-0-{group:08d}-{GROUP}-0123abcd.h5"


def _fill(spool: Path, *, num: int) -> None:
    rng = np.random.default_rng(0)
    for group in range(num // GROUP):
        write_segment(spool / _segment(group), [_episode(group, index, rng=rng) for index in range(GROUP)])


def _episode(group: int, index: int, *, rng: np.random.Generator) -> Trajectory:
    length = int(rng.integers(LENGTH * 3 // 4, LENGTH))
    said = np.arange(length) % TURN >= TURN // 2
    starts = range(TURN // 2, length, TURN)
    return Trajectory(
        id=f"bench/{group}/{index}",
        group=f"bench/{group}",
        domain="bench",
        seed=0,
        status="done",
        producer="000-env-0",
        created=float(group),
        start_version=0,
        end_version=0,
        turns=[Turn(start=start, end=min(start + TURN // 2, length)) for start in starts],
        reward=float(index % 2),
        token_ids=rng.integers(0, 100, length, dtype=np.int32),
        logprobs=np.where(said, -4.6, 0.0).astype(np.float32),
        versions=np.zeros(length, np.int32),
        loss_mask=said,
    )


def _refuse(path: Path, why: str) -> None:
    raise AssertionError(f"{path}: {why}")


if __name__ == "__main__":
    sys.exit(figures.main("data_path", measure))
