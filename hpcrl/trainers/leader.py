"""Rank 0 leads the ranks of a trainer: to the train role they look like one.

    RankLeader          rank 0's trainer, which makes every call on all ranks
    RankOrder           an order of rank 0: a few kB of JSON with ids, never tokens
    follow_orders       the loop of the other ranks, until the order to end
    RowPrefetcher       a rank's rows of the next step, read during the current one
    MinibatchRows       rows by minibatch
    Together            the state of all ranks, written in the background
    leave_state         write one rank's part of a checkpoint
    fetch_trajectories  trajectories of the spool by their ids
    WarmupSource        what ranks need of the steps that do not train on the spool

Every rank maps its own rows from the spool. Rank 0 predicts what the next step will train on from the trajectories
that already wait, and each rank reads its part of the prediction. If it was right the rows are ready, else they are
read then: a prediction never changes what is trained on, nor in which order. At most two steps' rows are in memory.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal, Protocol

import msgspec
import numpy as np
from torch import Tensor

from hpcrl.campaign_dir.paths import JobDir
from hpcrl.config.recipe import TrainConfig
from hpcrl.errors import TrainError, WeightsError
from hpcrl.learn.batch import TrainingRow
from hpcrl.learn.distribute import RankShare, ShareItem, StepShares, distribute_step, load_share_rows
from hpcrl.spool.record import Trajectory
from hpcrl.spool.segment import read_segment
from hpcrl.system.files import remove_path
from hpcrl.system.gpu_shifts import ShiftLocks
from hpcrl.system.processes import return_false
from hpcrl.trainers.base import RankTrainer, StepAbandonedError, StepMetrics, WritableState
from hpcrl.trainers.publishing import WindowOrders, open_shard_store
from hpcrl.trainers.step import learn_rows, train_step
from hpcrl.trainers.step_metrics import Stopwatch
from hpcrl.weights.layout import TensorLayout
from hpcrl.weights.stores import part_files
from hpcrl.weights.stores.sharded_store import LocalShards, ShardStore
from hpcrl.weights.versions import WeightVersion
from hpcrl.weights.window.file import WindowKey

MinibatchRows = list[list[TrainingRow]]
"""The rows of each minibatch."""


class WarmupSource(Protocol):
    """The data of steps that do not train on the spool: every rank reads its own (`hpcrl.roles.warmup`)."""

    train: TrainConfig
    """The settings of these steps."""

    def covers(self, step: int) -> bool:
        """Return whether a step is one of them."""

    def fetch(self, items: Sequence[ShareItem]) -> list[Trajectory]:
        """Return the trajectories of a share's items."""


class RowPrefetcher:
    """A background reader of one rank's predicted share; `read` returns the rows of a share."""

    def __init__(self, read: Callable[[RankShare], MinibatchRows]) -> None:
        self._read = read
        self._thread = ThreadPoolExecutor(1, "ahead")
        self._guess: RankShare | None = None
        self._pending_rows: Future[MinibatchRows] | None = None

    def start(self, guess: RankShare) -> None:
        """Read this share in the background; an earlier prediction is dropped."""
        self._discard_guess()
        if any(guess):
            self._guess, self._pending_rows = guess, self._thread.submit(self._load_copies, guess)

    def rows(self, share: RankShare) -> MinibatchRows:
        """Return the rows of this share, prefetched or read now."""
        if self._pending_rows is None or share != self._guess:
            self._discard_guess()
            return self._read(share)
        try:
            return self._pending_rows.result()
        finally:
            self._guess = self._pending_rows = None

    def close(self) -> None:
        self._discard_guess()
        self._thread.shutdown()

    def _discard_guess(self) -> None:
        if self._pending_rows is not None:
            self._pending_rows.cancel()  # if it runs already, its result or error is ignored
        self._guess = self._pending_rows = None

    def _load_copies(self, share: RankShare) -> MinibatchRows:
        """Copy the rows out of the mapped files, so that this thread waits for the file system."""
        return [[_copy_row(row) for row in rows] for rows in self._read(share)]


def _copy_row(row: TrainingRow) -> TrainingRow:
    return replace(row, inputs=np.array(row.inputs), mask=np.array(row.mask))  # the other columns are copies already


KEEPALIVE_INTERVAL_S = 10.0


class RankOrder(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An order of rank 0 to all ranks."""

    do: Literal["learn", "tensors", "stage", "leave", "snapshot", "load", "restart", "sleep", "wake", "wait", "end"]
    step: int = 0
    version: int = 0
    skipped: str | None = None
    shares: list[RankShare] = []
    ahead: list[RankShare] = []
    """The predicted shares of the next step, if any."""
    directory: str = ""


@dataclass(frozen=True)
class Together:
    """The state of all ranks, written in the background while they continue to train."""

    own: WritableState
    directory: Path
    """The directory that the other ranks write their parts to."""
    size: int

    def write(self, directory: Path) -> None:
        """Write rank 0's part, then move the other ranks' parts beside it."""
        self.own.write(directory)
        for rank in range(1, self.size):
            part_files.await_part(self.directory, rank)
            for path in part_files.part_directory(self.directory, rank).iterdir():
                path.rename(directory / path.name)
        remove_path(self.directory)


def leave_state(state: WritableState, directory: Path, *, rank: int) -> None:
    """Write a rank's part of a checkpoint into the parts directory."""

    def write(own: Path) -> dict[str, str]:
        state.write(own)
        return {}

    part_files.write_part(write, directory, rank=rank)


class RankLeader:
    """The trainer of rank 0, which acts for all ranks."""

    def __init__(
        self,
        trainer: RankTrainer,
        *,
        train: TrainConfig,
        seed: int,
        spool: Path,
        checkpoints: Path,
        segment_of: Callable[[Trajectory], str],
        upcoming: Callable[[int], Sequence[Trajectory]],
        warmup: WarmupSource | None = None,
    ) -> None:
        """Prepare to lead; `segment_of` returns the segment of the spool that holds a trajectory.

        `upcoming` predicts what the step that starts from a version will train on; all ranks prefetch it. All ranks
        have the same `warmup`.
        """
        self._warmup = warmup
        self._segment_of = segment_of
        self._upcoming = upcoming
        self._trainer = trainer
        self._train = train
        self._seed = seed
        self._spool = spool
        self._checkpoints = checkpoints
        self._last_order_s = time.monotonic()
        self._prefetcher = _make_prefetcher(trainer, train=train, spool=spool)

    def train_step(
        self,
        trajectories: Sequence[Trajectory],
        *,
        step: int,
        version: int,
        train: TrainConfig | None = None,
        must_abandon: Callable[[], bool] = return_false,
    ) -> StepMetrics:
        source = _choose_source(self._warmup, step)
        return train_step(
            self._trainer,
            trajectories,
            train=train or self._train,
            seed=self._seed,
            step=step,
            version=version,
            read_share=lambda dealt: self._distribute_rows(dealt, step=step, version=version),
            segment_of=self._segment_of if source is None else lambda _: "",
            must_abandon=must_abandon,
        )

    def _distribute_rows(self, step_shares: StepShares, *, step: int, version: int) -> list[list[TrainingRow]]:
        """Send every rank its share and the prediction for the next step; return rank 0's own rows."""
        source = _choose_source(self._warmup, step)
        next_shares = self._predict_shares(step=step + 1, version=version + 1) if source is None else []
        self._send_order(
            RankOrder(
                do="learn",
                step=step,
                version=version,
                skipped=step_shares.skipped,
                shares=step_shares.shares,
                ahead=next_shares,
            )
        )
        return _take_rows(self._prefetcher, step_shares.shares, next_shares, share=self._trainer.share, source=source)

    def _predict_shares(self, *, step: int, version: int) -> list[RankShare]:
        """Predict the shares of the next step; empty without waiting trajectories or after the last step.

        Empty too with a user's pipeline: its nodes may see only what is really trained on.
        """
        can_guess = step <= self._train.num_steps and not self._train.pipeline
        trajectories = self._upcoming(version) if can_guess else ()
        if not trajectories:
            return []
        guess = distribute_step(
            trajectories,
            train=self._train,
            num_ranks=self._trainer.num_shares,
            seed=self._seed,
            step=step,
            max_length=self._trainer.max_length,
            segment_of=self._segment_of,
        )
        return guess.shares

    def tensors(self) -> Mapping[str, Tensor]:
        self._send_order(RankOrder(do="tensors"))
        return self._trainer.tensors()

    def window(self, key: WindowKey, *, job: JobDir, layout: TensorLayout) -> ShardStore:
        """Open the stores that all ranks publish through, each its part. Called once, at the start."""
        orders = WindowOrders(
            stage=lambda made: self._send_order(RankOrder(do="stage", version=made.version, step=made.step)),
            write_parts=lambda version, path: self._send_order(
                RankOrder(do="leave", version=version, directory=str(path))
            ),
        )
        return open_shard_store(self._trainer, key, job=job, layout=layout, orders=orders)

    def weight_shards(self) -> LocalShards:
        """Return rank 0's shards for that window, while the other ranks do the same: `stage` calls this."""
        return self._trainer.shards()

    def snapshot(self) -> WritableState:
        """Copy every rank's part in memory; the ranks write in the background, and writing the result waits for all."""
        directory = part_files.make_parts_directory(self._checkpoints)
        self._send_order(RankOrder(do="snapshot", directory=str(directory)))
        return Together(self._trainer.snapshot(), directory, self._trainer.world.size)

    def load(self, directory: Path) -> None:
        self._send_order(RankOrder(do="load", directory=str(directory)))
        self._trainer.load(directory)

    def restart_optimizer(self) -> None:
        self._send_order(RankOrder(do="restart"))
        self._trainer.restart_optimizer()

    def sleep(self) -> None:
        """Return when the state of all ranks is in host memory."""
        self._send_order(RankOrder(do="sleep"))
        self._trainer.sleep()
        self._trainer.world.any(False)

    def wake(self) -> None:
        self._send_order(RankOrder(do="wake"))
        self._trainer.wake()

    def keep_ranks_alive(self) -> None:
        """Send a keep-alive now and then while there is nothing to train on: a rank without orders would time out."""
        if time.monotonic() - self._last_order_s > KEEPALIVE_INTERVAL_S:
            self._send_order(RankOrder(do="wait"))

    def close(self) -> None:
        """Release the other ranks."""
        self._send_order(RankOrder(do="end"))
        self._prefetcher.close()

    def _send_order(self, order: RankOrder) -> None:
        self._trainer.world.broadcast(msgspec.json.encode(order))
        self._last_order_s = time.monotonic()


def follow_orders(
    trainer: RankTrainer,
    *,
    train: TrainConfig,
    spool: Path,
    store: ShardStore | None = None,
    warmup: WarmupSource | None = None,
    shift_locks: ShiftLocks | None = None,
) -> None:
    """Follow the orders of rank 0 until the end; `store` is this rank's shard store, where there is one.

    `shift_locks` are those of GPUs that engines have too.
    """
    executor, pending_write = ThreadPoolExecutor(1, "checkpoint"), None
    prefetcher = _make_prefetcher(trainer, train=train, spool=spool)
    while True:
        order = msgspec.json.decode(trainer.world.broadcast(b""), type=RankOrder)
        match order.do:
            case "learn":
                _learn_share(
                    trainer, order, train=train, prefetcher=prefetcher, source=_choose_source(warmup, order.step)
                )
            case "stage" | "leave":
                assert store is not None, "all ranks have a store, or none"
                _publish_part(trainer, order, store=store)
            case "snapshot":
                if pending_write is not None:
                    pending_write.result()
                pending_write = executor.submit(
                    leave_state, trainer.snapshot(), Path(order.directory), rank=trainer.world.rank
                )
            case "tensors" | "load" | "restart":
                _follow_trainer_order(trainer, order)
            case "sleep" | "wake":
                _follow_shift(trainer, order, locks=shift_locks)
            case "end":
                executor.shutdown()
                prefetcher.close()
                if store is not None:
                    store.unlink()
                    store.close()
                return


def _learn_share(
    trainer: RankTrainer,
    order: RankOrder,
    *,
    train: TrainConfig,
    prefetcher: RowPrefetcher,
    source: WarmupSource | None,
) -> None:
    """Make this rank's part of a step, unless all ranks abandon it."""
    with suppress(StepAbandonedError):  # rank 0 orders what comes instead
        learn_rows(
            trainer,
            train=train if source is None else source.train,
            step=order.step,
            version=order.version,
            read_share=partial(_take_rows, prefetcher, order.shares, order.ahead, share=trainer.share, source=source),
            skipped=order.skipped,
            stopwatch=Stopwatch(),
        )


def _follow_trainer_order(trainer: RankTrainer, order: RankOrder) -> None:
    """Make the call that rank 0 makes on its own trainer too."""
    match order.do:
        case "tensors":
            trainer.tensors()
        case "load":
            trainer.load(Path(order.directory))
        case "restart":
            trainer.restart_optimizer()


def _follow_shift(trainer: RankTrainer, order: RankOrder, *, locks: ShiftLocks | None) -> None:
    """Move the state to host memory or back, under the lock of ranks that are on GPUs."""
    if order.do == "wake":
        if locks is not None:
            locks.enter_rank()
        trainer.wake()
        return
    trainer.sleep()
    if locks is not None:
        locks.leave_rank()
    trainer.world.any(False)


def _publish_part(trainer: RankTrainer, order: RankOrder, *, store: ShardStore) -> None:
    """Stage this rank's part of a version, or write it to files, as rank 0 ordered."""
    if order.do == "leave":
        store.write_part(order.version, Path(order.directory))
        return
    with suppress(WeightsError):  # rank 0 meets the same error and falls back to another way of publishing
        store.stage(trainer.shards(), WeightVersion(version=order.version, step=order.step))


def _make_prefetcher(trainer: RankTrainer, *, train: TrainConfig, spool: Path) -> RowPrefetcher:
    """Make the prefetcher that reads this rank's shares."""

    def read(share: RankShare) -> list[list[TrainingRow]]:
        return load_share_rows(
            share,
            fetch=lambda items: fetch_trajectories(items, spool=spool),
            train=train,
        )

    return RowPrefetcher(read)


def _choose_source(warmup: WarmupSource | None, step: int) -> WarmupSource | None:
    """Return the warm-up if the step is part of it."""
    return warmup if warmup is not None and warmup.covers(step) else None


def _take_rows(
    prefetcher: RowPrefetcher,
    shares: list[RankShare],
    next_shares: list[RankShare],
    *,
    share: int,
    source: WarmupSource | None,
) -> MinibatchRows:
    """Return a rank's rows of this step, from the source if there is one, and start to read those of the next."""
    if source is not None:
        return load_share_rows(shares[share], fetch=source.fetch, train=source.train)
    rows = prefetcher.rows(shares[share])
    prefetcher.start(next_shares[share] if next_shares else [])
    return rows


def fetch_trajectories(items: Sequence[ShareItem], *, spool: Path) -> list[Trajectory]:
    """Map the trajectories of these items from the spool; rank 0's reader has verified the segments."""
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
