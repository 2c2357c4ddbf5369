"""Rank 0 leads: to its role the ranks of a trainer look like one. It tells the others ids, never tokens.

    Leader    rank 0's end: a Trainer that makes every call on all ranks
    follow    what the other ranks do until they are told to end

Every rank maps its own rows from the spool; an order is a few kB of JSON.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

import msgspec
from torch import Tensor

from hpcrl.errors import TrainError
from hpcrl.learn.batch import Row
from hpcrl.learn.deal import Item, Share, deal, rows_of
from hpcrl.recipe import Train
from hpcrl.spool.record import Trajectory
from hpcrl.spool.segment import read_segment
from hpcrl.trainers.base import StepMetrics, Writable, check_trainable
from hpcrl.trainers.figures import Learned, step_metrics
from hpcrl.trainers.world import World

WAIT_EVERY_S = 10.0


class Ranked(Protocol):
    """One rank's end of a trainer."""

    world: World

    @property
    def num_shares(self) -> int: ...
    @property
    def share(self) -> int: ...
    @property
    def max_length(self) -> int: ...
    @property
    def vocabulary_size(self) -> int: ...
    def learn(self, parts: list[list[Row]], *, step: int, skipped: str | None = None) -> Learned: ...
    def tensors(self) -> dict[str, Tensor]: ...
    def snapshot(self) -> Writable: ...
    def load(self, directory: Path) -> None: ...


class Order(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What rank 0 wants all ranks to do now."""

    do: Literal["learn", "tensors", "write", "load", "wait", "end"]
    step: int = 0
    skipped: str | None = None
    shares: list[Share] = []
    directory: str = ""


class Leader:
    """Rank 0's trainer, on behalf of all ranks."""

    def __init__(self, mine: Ranked, *, train: Train, seed: int, spool: Path) -> None:
        self.segment_of: Callable[[Trajectory], str] = lambda _: ""
        """Where a trajectory of the spool lies; known once there is a reader."""
        self._mine = mine
        self._train = train
        self._seed = seed
        self._spool = spool
        self._told = time.monotonic()

    def train_step(self, trajectories: Sequence[Trajectory], *, step: int, version: int) -> StepMetrics:
        began = time.perf_counter()
        check_trainable(trajectories, vocabulary_size=self._mine.vocabulary_size)
        dealt = deal(
            trajectories,
            train=self._train,
            num_ranks=self._mine.num_shares,
            seed=self._seed,
            step=step,
            max_length=self._mine.max_length,
            segment_of=self.segment_of,
        )
        order = Order(do="learn", step=step, skipped=dealt.skipped, shares=dealt.shares)
        self._tell(order)
        learned = _learned(self._mine, order, train=self._train, spool=self._spool)
        step_s = time.perf_counter() - began
        return step_metrics(trajectories, dealt=dealt, learned=learned, step=step, version=version, step_s=step_s)

    def tensors(self) -> dict[str, Tensor]:
        self._tell(Order(do="tensors"))
        return self._mine.tensors()

    def snapshot(self) -> Writable:
        return _Together(self)

    def load(self, directory: Path) -> None:
        self._tell(Order(do="load", directory=str(directory)))
        self._mine.load(directory)

    def write(self, directory: Path) -> None:
        """All ranks write; whoever calls this holds up training until they have."""
        self._tell(Order(do="write", directory=str(directory)))
        self._mine.snapshot().write(directory)
        self._mine.world.wait()

    def tend(self) -> None:
        """Now and then while there is nothing to train on: a rank that hears nothing for long gives up."""
        if time.monotonic() - self._told > WAIT_EVERY_S:
            self._tell(Order(do="wait"))

    def close(self) -> None:
        """The others may go."""
        self._tell(Order(do="end"))

    def _tell(self, order: Order) -> None:
        self._mine.world.hear(msgspec.json.encode(order))
        self._told = time.monotonic()


@dataclass(frozen=True)
class _Together:
    """The state of all ranks, written by all of them."""

    leader: Leader

    def write(self, directory: Path) -> None:
        self.leader.write(directory)


def follow(mine: Ranked, *, train: Train, spool: Path) -> None:
    """Do what rank 0 orders until the end."""
    while True:
        order = msgspec.json.decode(mine.world.hear(b""), type=Order)
        match order.do:
            case "learn":
                _learned(mine, order, train=train, spool=spool)
            case "tensors":
                mine.tensors()
            case "write":
                mine.snapshot().write(Path(order.directory))
                mine.world.wait()
            case "load":
                mine.load(Path(order.directory))
            case "end":
                return


def _learned(mine: Ranked, order: Order, *, train: Train, spool: Path) -> Learned:
    share = order.shares[mine.share]
    parts = rows_of(share, fetch=lambda items: fetch(items, spool=spool), train=train, max_length=mine.max_length)
    return mine.learn(parts, step=order.step, skipped=order.skipped)


def fetch(items: Sequence[Item], *, spool: Path) -> list[Trajectory]:
    """The trajectories of these items, mapped from the spool; rank 0's reader has verified the segments."""
    found: dict[str, Trajectory] = {}
    wanted = {item.id for item in items}
    for name in sorted({item.segment for item in items}):
        segment = read_segment(spool / name, verify=False)
        for index, facts in enumerate(segment.facts):
            if facts.id in wanted:
                found.setdefault(facts.id, segment[index])
    if missing := sorted(wanted - found.keys()):
        raise TrainError(
            f"trajectory {missing[0]!r} (and {len(missing) - 1} more) is not where rank 0 found it in {spool}: "
            "do all nodes of the trainer see the same file system?"
        )
    return [found[item.id] for item in items]
