"""The data path of a training step: every rank reads its own rows, beside one controller that loads and scatters.

ours         rank 0 deals ids; each rank maps its rows from the spool and pads its micro-batches
controller   rank 0 loads all rows, pads every rank's micro-batches, and scatters their bytes over gloo

Both bring the same micro-batches to the same ranks from the same spool, as many bytes for each rank however many there
are. Each way has processes of its own, and they have their turns in both orders. What is chosen for a step is known
before the clock runs: that is the same work either way. Memory is private memory, looked at in steps that are not
timed; pages of mapped files belong to the page cache.

`python -m bench.learning` has these figures too; python -m bench.data_path [--full]
"""

import math
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypedDict

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from bench import figures
from bench.figures import Figure
from hpcrl.config.recipe import TrainConfig
from hpcrl.learn.batch import MicroBatch, make_micro_batches
from hpcrl.learn.distribute import StepShares, distribute_step, load_share_rows
from hpcrl.spool.reader import DiskSpoolReader
from hpcrl.spool.record import EpisodeTurn, Trajectory
from hpcrl.spool.segment import write_segment
from hpcrl.testing import ranks
from hpcrl.trainers.leader import RankOrder, fetch_trajectories
from hpcrl.trainers.world import World

SIZES = (1, 2, 4, 8)
LENGTH = 16384
ROWS = 32
"""Trajectories of a rank in a step: about 7 MB in the spool."""
TURN = 1024
"""Tokens of a turn, half of them said by the model."""
GROUP = 8
TRAIN = TrainConfig(num_steps=9, groups_per_step=4, learning_rate=1e-3, tokens_per_micro_batch=4 * LENGTH)
NUM_TIMED = 3
NUM_WATCHED = 2
"""Steps of a process in which its memory is looked at, after the timed ones; one more, before them, warms up."""
NUM_STEPS = 1 + NUM_TIMED + NUM_WATCHED
LOOK_S = 0.001


class Said(TypedDict):
    """What one rank says of its steps."""

    seconds: list[float]
    peak: int
    """Private bytes, beyond those of the process before its first step."""


def measure(full: bool) -> list[Figure]:
    """Two turns of each way at each size; in the long run, six."""
    with tempfile.TemporaryDirectory() as spool:
        _fill(Path(spool), num=SIZES[-1] * ROWS * NUM_STEPS)
        found: dict[tuple[str, int], list[list[Said]]] = {}
        for turn in range(6 if full else 2):
            for size in SIZES:
                for way in list(WAYS)[:: 1 if turn % 2 else -1]:
                    said = ranks.run_ranks(size, "bench.data_path:work", spool, way)
                    found.setdefault((way, size), []).append(said)
    seconds = {key: statistics.median(_seconds(said) for said in turns) for key, turns in found.items()}
    peaks = {key: statistics.median(_peak(said) for said in turns) for key, turns in found.items()}
    result = []
    for size in SIZES:
        ratio = seconds["controller", size] / seconds["ours", size]
        bar = 1.0 if size == SIZES[-1] else None
        result.append(Figure(name=f"data path: throughput of {size} ranks over a controller's", value=ratio, bar=bar))
    for way in WAYS:
        growth = peaks[way, SIZES[-1]] / peaks[way, 1]
        bar = 1.5 if way == "ours" else None
        name = f"busiest process, {way}: memory of {SIZES[-1]} ranks over 1"
        result.append(Figure(name=name, value=growth, bar=bar, better="lower"))
    for way in WAYS:
        peak = peaks[way, SIZES[-1]] / 2**20
        result.append(Figure(name=f"busiest process, {way}: memory at {SIZES[-1]} ranks", value=peak, unit="MiB"))
    return result


def _seconds(said: list[Said]) -> float:
    """Of a step, which ends with its last rank."""
    return statistics.median(max(rank["seconds"][step] for rank in said) for step in range(NUM_TIMED))


def _peak(said: list[Said]) -> int:
    return max(rank["peak"] for rank in said)


def work(world: World, spool: str, way: str) -> Said:
    """One rank's part of all steps of one way."""
    torch.set_num_threads(1)
    make = WAYS[way]
    reader = DiskSpoolReader(Path(spool), on_damage=_refuse)
    seconds: list[float] = []
    peak, before = 0, _private()
    for step in range(NUM_STEPS):
        chosen = reader.take(world.size * ROWS) if world.rank == 0 else []
        world.wait()
        if step < NUM_STEPS - NUM_WATCHED:
            began = time.perf_counter()
            _made(make, world, Path(spool), chosen, step)
            seconds.append(time.perf_counter() - began)
        else:
            with _watched() as most:
                _made(make, world, Path(spool), chosen, step)
            peak = max(peak, most() - before)
    return Said(seconds=seconds[1:], peak=peak)


_Way = Callable[[World, Path, list[Trajectory], int], list[MicroBatch]]


def _made(make: _Way, world: World, spool: Path, chosen: list[Trajectory], step: int) -> None:
    """Every rank has its micro-batches when this returns."""
    made = make(world, spool, chosen, step)
    assert sum(micro.num_sequences for micro in made) == ROWS
    world.wait()


def _ours(world: World, spool: Path, chosen: list[Trajectory], step: int) -> list[MicroBatch]:
    order = RankOrder(do="learn", step=step, shares=_dealt(world, chosen, step).shares if world.rank == 0 else [])
    heard = msgspec.json.decode(world.broadcast(msgspec.json.encode(order)), type=RankOrder)
    parts = load_share_rows(
        heard.shares[world.rank],
        fetch=lambda items: fetch_trajectories(items, spool=spool),
        train=TRAIN,
        max_length=LENGTH,
    )
    return make_micro_batches(parts[0], tokens_per_micro_batch=TRAIN.tokens_per_micro_batch)


def _controller(world: World, _: Path, chosen: list[Trajectory], step: int) -> list[MicroBatch]:
    if world.rank:
        return _unpacked(_scattered(world, []))
    by_id = {trajectory.id: trajectory for trajectory in chosen}
    packed = []
    for share in _dealt(world, chosen, step).shares:
        parts = load_share_rows(
            share, fetch=lambda items: [by_id[item.id] for item in items], train=TRAIN, max_length=LENGTH
        )
        micros = make_micro_batches(parts[0], tokens_per_micro_batch=TRAIN.tokens_per_micro_batch)
        if world.size == 1:
            return micros
        packed.append(_packed(micros))
    return _unpacked(_scattered(world, packed))


WAYS: dict[str, _Way] = {"ours": _ours, "controller": _controller}

Kinds = list[list[tuple[str, list[int]]]]
"""For each micro-batch: the type and shape of each of its tensors, in their order."""


def _packed(micros: list[MicroBatch]) -> tuple[Kinds, Tensor]:
    """What tells how to read the bytes, and the bytes: no pickle, so that the controller is as fast as it can be."""
    kinds = [
        [(str(tensor.dtype).removeprefix("torch."), list(tensor.shape)) for tensor in _tensors(micro)]
        for micro in micros
    ]
    flat = [tensor.reshape(-1).view(torch.uint8) for micro in micros for tensor in _tensors(micro)]
    return kinds, torch.cat(flat)


def _scattered(world: World, packed: list[tuple[Kinds, Tensor]]) -> tuple[Kinds, Tensor]:
    """Each rank gets its own; gloo wants them of one size."""
    heard = world.broadcast(msgspec.json.encode([kinds for kinds, _ in packed]))
    kinds = msgspec.json.decode(heard, type=list[Kinds])
    sizes = [sum(_num_bytes(*kind) for micro in rank for kind in micro) for rank in kinds]
    mine = torch.empty(max(sizes), dtype=torch.uint8)
    parts = [torch.nn.functional.pad(part, (0, max(sizes) - len(part))) for _, part in packed]
    packed.clear()
    dist.scatter(mine, parts or None, src=0)
    return kinds[world.rank], mine


def _unpacked(got: tuple[Kinds, Tensor]) -> list[MicroBatch]:
    kinds, data = got
    micros, at = [], 0
    for kind in kinds:
        tensors = []
        for dtype, shape in kind:
            size = _num_bytes(dtype, shape)
            tensors.append(data[at : at + size].clone().view(getattr(torch, dtype)).reshape(shape))
            at += size
        micros.append(MicroBatch(*tensors))
    return micros


def _tensors(micro: MicroBatch) -> list[Tensor]:
    """Padded rows need no positions, which are the last."""
    return [tensor for tensor in vars(micro).values() if tensor is not None]


def _num_bytes(dtype: str, shape: list[int]) -> int:
    size: int = getattr(torch, dtype).itemsize
    return math.prod(shape) * size


def _dealt(world: World, chosen: list[Trajectory], step: int) -> StepShares:
    name = {trajectory.id: _segment(int(trajectory.group.rpartition("/")[2])) for trajectory in chosen}
    return distribute_step(
        chosen,
        train=TRAIN,
        num_ranks=world.size,
        seed=0,
        step=step,
        max_length=LENGTH,
        segment_of=lambda trajectory: name[trajectory.id],
    )


@contextmanager
def _watched() -> Iterator[Callable[[], int]]:
    """The most private memory that this process has in the block."""
    most, over = _private(), threading.Event()

    def look() -> None:
        nonlocal most
        while not over.wait(LOOK_S):
            most = max(most, _private())

    watch = threading.Thread(target=look)
    watch.start()
    try:
        yield lambda: most
    finally:
        most = max(most, _private())
        over.set()
        watch.join()


def _private() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith(("RssAnon", "RssShmem")))


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
        turns=[EpisodeTurn(start=start, end=min(start + TURN // 2, length)) for start in starts],
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
