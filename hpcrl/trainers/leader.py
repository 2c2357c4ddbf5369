"""Rank 0 leads: to its role the ranks of a trainer look like one. It tells the others ids, never tokens.

    Leader    rank 0's end: a Trainer that makes every call on all ranks
    follow    what the other ranks do until they are told to end

Every rank maps its own rows from the spool; an order is a few kB of JSON.

A rank's rows of the next step, read while the present one is learned from.

Rank 0 guesses what the next step will train on, from what waits already; each rank reads its part of the guess. If the
step turns out so, its rows are there, else they are read then: what is trained on, and in which order, is never
changed by a guess. Two steps' rows are in memory at most: those that are learned from and those that come next.
"""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np
from torch import Tensor

from hpcrl.campaign_dir.paths import JobDir
from hpcrl.config.recipe import Train
from hpcrl.errors import TrainError, WeightsError
from hpcrl.learn.batch import Row
from hpcrl.learn.distribute import Deal, Item, Share, deal, rows_of
from hpcrl.spool.record import Trajectory
from hpcrl.spool.segment import read_segment
from hpcrl.system.files import discard
from hpcrl.trainers.base import RankTrainer, StepMetrics, Writable
from hpcrl.trainers.publishing import Orders, boxes, shard_store
from hpcrl.trainers.step import learn, train_step
from hpcrl.weights import part_files
from hpcrl.weights.layout import Shard
from hpcrl.weights.sharded_store import ShardStore
from hpcrl.weights.versions import WeightVersion
from hpcrl.weights.window.file import Key

Parts = list[list[Row]]
"""Rows of each minibatch."""


class Ahead:
    """One rank's reading; `read` brings the rows of a share."""

    def __init__(self, read: Callable[[Share], Parts]) -> None:
        self._read = read
        self._thread = ThreadPoolExecutor(1, "ahead")
        self._guess: Share | None = None
        self._coming: Future[Parts] | None = None

    def begin(self, guess: Share) -> None:
        """Read this in the background; whatever was begun before is let go."""
        self._let_go()
        if any(guess):
            self._guess, self._coming = guess, self._thread.submit(self._loaded, guess)

    def rows(self, share: Share) -> Parts:
        """The rows of this share, however they come."""
        if self._coming is None or share != self._guess:
            self._let_go()
            return self._read(share)
        try:
            return self._coming.result()
        finally:
            self._guess = self._coming = None

    def close(self) -> None:
        self._let_go()
        self._thread.shutdown()

    def _let_go(self) -> None:
        if self._coming is not None:
            self._coming.cancel()  # if it has begun already its result, and what went wrong with it, is nobody's
        self._guess = self._coming = None

    def _loaded(self, share: Share) -> Parts:
        """Not views of mapped files: the file system is waited for here."""
        return [[_copied(row) for row in rows] for rows in self._read(share)]


def _copied(row: Row) -> Row:
    return Row(
        inputs=np.array(row.inputs),
        mask=np.array(row.mask),
        targets=row.targets,
        behaviour=row.behaviour,
        credit=row.credit,
    )


WAIT_EVERY_S = 10.0


class Order(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What rank 0 wants all ranks to do now."""

    do: Literal["learn", "tensors", "stage", "leave", "snapshot", "load", "wait", "end"]
    step: int = 0
    version: int = 0
    skipped: str | None = None
    shares: list[Share] = []
    ahead: list[Share] = []
    """Of the next step, as far as can be guessed."""
    directory: str = ""


@dataclass(frozen=True)
class Together:
    """The state of all ranks, written in the background: the ranks train on."""

    own: Writable
    directory: Path
    """Where the others leave theirs."""
    size: int

    def write(self, directory: Path) -> None:
        """Write rank 0's part, then move the others' beside it."""
        self.own.write(directory)
        for rank in range(1, self.size):
            part_files.awaited(self.directory, rank)
            for path in part_files.part_directory(self.directory, rank).iterdir():
                path.rename(directory / path.name)
        discard(self.directory)


def leave_state(state: Writable, directory: Path, *, rank: int) -> None:
    """Leave a rank's part of a checkpoint."""

    def write(own: Path) -> dict[str, str]:
        state.write(own)
        return {}

    part_files.leave(write, directory, rank=rank)


class Leader:
    """Rank 0's trainer, on behalf of all ranks."""

    def __init__(
        self,
        mine: RankTrainer,
        *,
        train: Train,
        seed: int,
        spool: Path,
        checkpoints: Path,
        segment_of: Callable[[Trajectory], str],
        upcoming: Callable[[int], Sequence[Trajectory]],
    ) -> None:
        """`segment_of` gives the segment of the spool that holds a trajectory.

        `upcoming` gives what the step that starts with a version will probably train on; all ranks read it ahead.
        """
        self._segment_of = segment_of
        self._upcoming = upcoming
        self._mine = mine
        self._train = train
        self._seed = seed
        self._spool = spool
        self._checkpoints = checkpoints
        self._told = time.monotonic()
        self._ahead = _ahead(mine, train=train, spool=spool)

    def train_step(self, trajectories: Sequence[Trajectory], *, step: int, version: int) -> StepMetrics:
        return train_step(
            self._mine,
            trajectories,
            train=self._train,
            seed=self._seed,
            step=step,
            version=version,
            rows=lambda dealt: self._shared_out(dealt, step=step, version=version),
            segment_of=self._segment_of,
        )

    def _shared_out(self, dealt: Deal, *, step: int, version: int) -> list[list[Row]]:
        """Tell every rank its share, and what the next step's will probably be; rank 0's own rows."""
        ahead = self._guessed(step=step + 1, version=version + 1)
        self._tell(Order(do="learn", step=step, skipped=dealt.skipped, shares=dealt.shares, ahead=ahead))
        return _rows(self._ahead, dealt.shares, ahead, share=self._mine.share)

    def _guessed(self, *, step: int, version: int) -> list[Share]:
        """The shares of a step that is not chosen yet; none where there is nothing to guess from, or no such step.

        Nor where dealing calls the user's nodes: they see what is trained on, and nothing else.
        """
        can_guess = step <= self._train.num_steps and not self._train.pipeline
        trajectories = self._upcoming(version) if can_guess else ()
        if not trajectories:
            return []
        guess = deal(
            trajectories,
            train=self._train,
            num_ranks=self._mine.num_shares,
            seed=self._seed,
            step=step,
            max_length=self._mine.max_length,
            segment_of=self._segment_of,
        )
        return guess.shares

    def tensors(self) -> dict[str, Tensor]:
        self._tell(Order(do="tensors"))
        return self._mine.tensors()

    def window(self, key: Key, *, job: JobDir) -> ShardStore:
        """What all ranks publish by, each its part. Called once, at the start."""
        orders = Orders(
            stage=lambda made: self._tell(Order(do="stage", version=made.version, step=made.step)),
            leave=lambda version, path: self._tell(Order(do="leave", version=version, directory=str(path))),
        )
        return shard_store(self._mine, key, job=job, orders=orders)

    def boxes(self) -> list[tuple[Shard, Tensor]]:
        """What rank 0 puts into that window."""
        return boxes(self._mine)

    def snapshot(self) -> Writable:
        """Every rank copies its part in memory and writes it behind; whoever writes this waits for them all."""
        directory = part_files.begun(self._checkpoints)
        self._tell(Order(do="snapshot", directory=str(directory)))
        return Together(self._mine.snapshot(), directory, self._mine.world.size)

    def load(self, directory: Path) -> None:
        self._tell(Order(do="load", directory=str(directory)))
        self._mine.load(directory)

    def tend(self) -> None:
        """Now and then while there is nothing to train on: a rank that hears nothing for long gives up."""
        if time.monotonic() - self._told > WAIT_EVERY_S:
            self._tell(Order(do="wait"))

    def close(self) -> None:
        """The others may go."""
        self._tell(Order(do="end"))
        self._ahead.close()

    def _tell(self, order: Order) -> None:
        self._mine.world.hear(msgspec.json.encode(order))
        self._told = time.monotonic()


def follow(mine: RankTrainer, *, train: Train, spool: Path, store: ShardStore | None = None) -> None:
    """Do what rank 0 orders until the end; `store` is this rank's end of the window, where there is one."""
    behind, writing = ThreadPoolExecutor(1, "checkpoint"), None
    ahead = _ahead(mine, train=train, spool=spool)
    while True:
        order = msgspec.json.decode(mine.world.hear(b""), type=Order)
        match order.do:
            case "learn":
                rows = _rows(ahead, order.shares, order.ahead, share=mine.share)
                learn(mine, rows, train=train, step=order.step, skipped=order.skipped)
            case "tensors":
                mine.tensors()
            case "stage" | "leave":
                assert store is not None, "all ranks have one, or none"
                _publish(mine, order, store=store)
            case "snapshot":
                if writing is not None:
                    writing.result()
                writing = behind.submit(leave_state, mine.snapshot(), Path(order.directory), rank=mine.world.rank)
            case "load":
                mine.load(Path(order.directory))
            case "end":
                behind.shutdown()
                ahead.close()
                if store is not None:
                    store.unlink()
                    store.close()
                return


def _publish(mine: RankTrainer, order: Order, *, store: ShardStore) -> None:
    """Rank 0 has staged a version, or wants one in files."""
    if order.do == "leave":
        store.leave(order.version, Path(order.directory))
        return
    with suppress(WeightsError):  # rank 0 has met it too, and publishes in another way from now on
        store.stage(boxes(mine), WeightVersion(version=order.version, step=order.step))


def _ahead(mine: RankTrainer, *, train: Train, spool: Path) -> Ahead:
    """This rank's reading of its shares."""

    def read(share: Share) -> list[list[Row]]:
        return rows_of(share, fetch=lambda items: fetch(items, spool=spool), train=train, max_length=mine.max_length)

    return Ahead(read)


def _rows(reading: Ahead, shares: list[Share], ahead: list[Share], *, share: int) -> list[list[Row]]:
    """A rank's rows of this step; those of the next are on their way when this returns."""
    rows = reading.rows(shares[share])
    reading.begin(ahead[share] if ahead else [])
    return rows


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
