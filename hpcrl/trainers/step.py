"""A training step, the same for every trainer, from trajectories to metrics.

    train_step     deal -> this rank's rows -> learn -> metrics
    learn          micro-batches -> for each minibatch: gradient, clip, optimizer step

What trainers do differently are the methods of `RankTrainer`; none of them calls back.
"""

import math
from collections.abc import Callable, Sequence

import torch

from hpcrl.config.recipe import Train
from hpcrl.learn.batch import MicroBatch, Row, micro_batches, packed_batches
from hpcrl.learn.distribute import Deal, deal, rows_of
from hpcrl.learn.loss import LossSums
from hpcrl.spool.record import Trajectory
from hpcrl.trainers.base import RankTrainer, StepMetrics, check_trainable
from hpcrl.trainers.micro_batch_loss import MinibatchTotals
from hpcrl.trainers.step_metrics import Laps, Learned, step_metrics
from hpcrl.trainers.world import World

Minibatch = list[MicroBatch]


def train_step(
    trainer: RankTrainer,
    trajectories: Sequence[Trajectory],
    *,
    train: Train,
    seed: int,
    step: int,
    version: int,
    rows: Callable[[Deal], list[list[Row]]],
    segment_of: Callable[[Trajectory], str] = lambda _: "",
) -> StepMetrics:
    """Make one training step; `rows` brings this rank's rows of what was dealt."""
    laps = Laps()
    check_trainable(trajectories, vocabulary_size=trainer.vocabulary_size)
    dealt = deal(
        trajectories,
        train=train,
        num_ranks=trainer.num_shares,
        seed=seed,
        step=step,
        max_length=trainer.max_length,
        segment_of=segment_of,
    )
    laps.end("deal")
    parts = rows(dealt)
    laps.end("rows")
    learned = learn(trainer, parts, train=train, step=step, skipped=dealt.skipped)
    laps.end("learn")
    return step_metrics(trajectories, dealt=dealt, learned=learned, step=step, version=version, laps=laps)


def learn(
    trainer: RankTrainer, parts: list[list[Row]], *, train: Train, step: int, skipped: str | None = None
) -> Learned:
    """Make one optimizer step per minibatch; the first that is not finite is not taken and ends the training step.

    `parts` are this rank's rows of each minibatch; every rank calls this with the same number of them.
    """
    rate = learning_rate(step, train=train, peak=train.learning_rate)
    learned = Learned(LossSums.zero(trainer.world.device), skipped=skipped, learning_rate=rate)
    if skipped is not None:
        return learned
    make = packed_batches if train.rows == "packed" else micro_batches
    minibatches = [make(rows, tokens_per_micro_batch=train.tokens_per_micro_batch) for rows in parts]
    totals = totals_of(minibatches, world=trainer.world, times=trainer.world.size / trainer.num_shares)
    learned.num_tokens = int(sum(each.num_tokens for each in totals))
    learned.num_padded_tokens = int(sum(each.num_padded_tokens for each in totals))
    learned.skipped = reason_to_skip(totals)
    if learned.skipped is not None:
        return learned
    prepared = trainer.prepare_minibatches(minibatches)
    for number, (minibatch, each) in enumerate(zip(prepared, totals, strict=True)):
        sums = trainer.accumulate_gradient(minibatch, each)
        learned.add(sums, norm=trainer.clip_gradient())
        if learned.skipped is not None:
            trainer.discard_gradient()
            break
        trainer.apply_gradient(rate=rate)
        value_loss = trainer.train_critic(number, totals=each, step=step)
        if value_loss is not None:
            learned.value_losses.append(value_loss)
    return learned


def learning_rate(step: int, *, train: Train, peak: float) -> float:
    """For the step of this number, from 1 on; a pure function of it, so a resumed campaign goes on where it was."""
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


def rows_in_memory(
    trajectories: Sequence[Trajectory], *, share: int, train: Train, max_length: int
) -> Callable[[Deal], list[list[Row]]]:
    """For a rank that has all trajectories of the step itself."""
    by_id = {trajectory.id: trajectory for trajectory in trajectories}
    return lambda dealt: rows_of(
        dealt.shares[share],
        fetch=lambda items: [by_id[item.id] for item in items],
        train=train,
        max_length=max_length,
    )


def totals_of(minibatches: list[Minibatch], *, world: World, times: float = 1.0) -> list[MinibatchTotals]:
    """Sum over the ranks, of which this many (`times`) have the same rows."""
    counts = torch.tensor([_counts(part) for part in minibatches], dtype=torch.double)
    summed = world.sum(counts.reshape(-1, len(MinibatchTotals._fields)).to(world.device)).cpu() / times
    return [MinibatchTotals(*row) for row in summed.tolist()]


def _counts(part: Minibatch) -> MinibatchTotals:
    columns = [column for micro in part for column in (micro.behaviour_N, micro.advantages_N)]
    return MinibatchTotals(
        num_tokens=float(sum(micro.num_tokens for micro in part)),
        num_sequences=float(sum(micro.num_sequences for micro in part)),
        num_not_finite=float(sum(int((~column.isfinite()).sum()) for column in columns)),
        num_padded_tokens=float(sum(micro.num_padded_tokens for micro in part)),
    )


def reason_to_skip(totals: list[MinibatchTotals]) -> str | None:
    """What can be told from the input alone, before the first of several minibatches moves the weights."""
    if not sum(each.num_tokens for each in totals):
        return "no trainable tokens"
    if sum(each.num_not_finite for each in totals):
        return "a reward or a stored log-prob is not finite"
    return None
