"""A training step, the same for every trainer, from trajectories to metrics.

    train_step             distribute -> this rank's rows -> learn -> metrics
    learn_minibatches      micro-batches -> for each minibatch: gradient, clip, optimizer step
    compute_learning_rate  the learning rate of a step
    make_row_reader        rows for a rank that has all trajectories itself
    reduce_totals          the counts of each minibatch over all ranks
    find_skip_reason       why a step cannot train, from its input alone
    Minibatch              the micro-batches of one optimizer step

Trainers differ in the methods of `RankTrainer`; none of these calls back.
"""

import math
from collections.abc import Callable, Sequence

import torch

from hpcrl.config.recipe import TrainConfig
from hpcrl.learn.batch import MicroBatch, TrainingRow, make_micro_batches, make_packed_batches
from hpcrl.learn.distribute import StepShares, distribute_step, load_share_rows
from hpcrl.learn.loss import LossSums
from hpcrl.spool.record import Trajectory
from hpcrl.trainers.base import RankTrainer, StepMetrics, check_trainable
from hpcrl.trainers.micro_batch_loss import MinibatchTotals
from hpcrl.trainers.step_metrics import LearnResult, Stopwatch, build_step_metrics
from hpcrl.trainers.world import World

Minibatch = list[MicroBatch]


def train_step(
    trainer: RankTrainer,
    trajectories: Sequence[Trajectory],
    *,
    train: TrainConfig,
    seed: int,
    step: int,
    version: int,
    read_rows: Callable[[StepShares], list[list[TrainingRow]]],
    segment_of: Callable[[Trajectory], str] = lambda _: "",
) -> StepMetrics:
    """Make one training step; `read_rows` returns this rank's rows of its share."""
    stopwatch = Stopwatch()
    check_trainable(trajectories, vocabulary_size=trainer.vocabulary_size)
    step_shares = distribute_step(
        trajectories,
        train=train,
        num_ranks=trainer.num_shares,
        seed=seed,
        step=step,
        max_length=trainer.max_length,
        segment_of=segment_of,
    )
    stopwatch.record_lap("deal")
    minibatch_rows = read_rows(step_shares)
    stopwatch.record_lap("rows")
    learn_result = learn_minibatches(trainer, minibatch_rows, train=train, step=step, skipped=step_shares.skipped)
    stopwatch.record_lap("learn")
    return build_step_metrics(
        trajectories,
        step_shares=step_shares,
        learn_result=learn_result,
        step=step,
        version=version,
        stopwatch=stopwatch,
    )


def learn_minibatches(
    trainer: RankTrainer,
    minibatch_rows: list[list[TrainingRow]],
    *,
    train: TrainConfig,
    step: int,
    skipped: str | None = None,
) -> LearnResult:
    """Make an optimizer step per minibatch and epoch; one that is not finite is not applied and ends the training step.

    `minibatch_rows` are this rank's rows of each minibatch; every rank passes the same number of minibatches.
    """
    trainer.use_settings(train)
    rate = compute_learning_rate(step, train=train, peak=train.learning_rate)
    result = LearnResult(LossSums.zero(trainer.world.device), skipped=skipped, learning_rate=rate)
    if skipped is not None:
        return result
    make = make_packed_batches if train.rows == "packed" else make_micro_batches
    minibatches = [make(rows, tokens_per_micro_batch=train.tokens_per_micro_batch) for rows in minibatch_rows]
    totals = reduce_totals(minibatches, world=trainer.world, num_copies=trainer.world.size / trainer.num_shares)
    result.num_tokens = int(sum(each.num_tokens for each in totals))
    result.num_padded_tokens = int(sum(each.num_padded_tokens for each in totals))
    result.skipped = find_skip_reason(totals)
    if result.skipped is not None:
        return result
    prepared = trainer.prepare_minibatches(minibatches)
    numbered = list(enumerate(zip(prepared, totals, strict=True)))
    for number, (minibatch, each) in numbered * train.epochs:
        sums = trainer.accumulate_gradient(minibatch, each)
        result.add(sums, norm=trainer.clip_gradient(), num_tokens=each.num_tokens)
        if result.skipped is not None:
            trainer.discard_gradient()
            break
        trainer.apply_gradient(rate=rate)
        value_loss = trainer.train_critic(number, totals=each, step=step)
        if value_loss is not None:
            result.value_losses.append(value_loss)
    return result


def compute_learning_rate(step: int, *, train: TrainConfig, peak: float) -> float:
    """Return the rate of a step, counted from 1; it depends on nothing else, so a resumed campaign continues it."""
    if step < train.warmup_steps:
        return peak * max(step, 1) / train.warmup_steps
    if train.schedule == "constant":
        return peak
    last = min(train.final_learning_rate, peak)
    done = (step - train.warmup_steps) / max(train.num_steps - train.warmup_steps, 1)
    left = 1 - min(done, 1.0)
    if train.schedule == "cosine":
        left = (1 + math.cos(math.pi * (1 - left))) / 2
    return last + (peak - last) * left


def make_row_reader(
    trajectories: Sequence[Trajectory], *, share: int, train: TrainConfig
) -> Callable[[StepShares], list[list[TrainingRow]]]:
    """Make a `read_rows` for a rank that has all trajectories of the step itself."""
    by_id = {trajectory.id: trajectory for trajectory in trajectories}
    return lambda dealt: load_share_rows(
        dealt.shares[share],
        fetch=lambda items: [by_id[item.id] for item in items],
        train=train,
    )


def reduce_totals(minibatches: list[Minibatch], *, world: World, num_copies: float = 1.0) -> list[MinibatchTotals]:
    """Sum the counts over the ranks; `num_copies` of them have the same rows."""
    counts = torch.tensor([_count_minibatch(minibatch) for minibatch in minibatches], dtype=torch.double)
    summed = world.sum(counts.reshape(-1, len(MinibatchTotals._fields)).to(world.device)).cpu() / num_copies
    return [MinibatchTotals(*row) for row in summed.tolist()]


def _count_minibatch(minibatch: Minibatch) -> MinibatchTotals:
    columns = [column for micro in minibatch for column in (micro.behaviour_N, micro.advantages_N)]
    return MinibatchTotals(
        num_tokens=float(sum(micro.num_tokens for micro in minibatch)),
        num_sequences=float(sum(micro.num_sequences for micro in minibatch)),
        num_not_finite=float(sum(int((~column.isfinite()).sum()) for column in columns)),
        num_padded_tokens=float(sum(micro.num_padded_tokens for micro in minibatch)),
    )


def find_skip_reason(totals: list[MinibatchTotals]) -> str | None:
    """Return why this input cannot be trained on, before the first minibatch changes the weights; else None."""
    if not sum(each.num_tokens for each in totals):
        return "no trainable tokens"
    if sum(each.num_not_finite for each in totals):
        return "a reward or a stored log-prob is not finite"
    return None
