"""The nodes of the pipeline that every rank runs, the same for every trainer: from a rank's rows to other weights.

    StepWork                            the state of a step that they share, beside their inputs
    read_rows                           rows: what this rank trains in each minibatch
    make_batches                        batches: the rows as tensors, the same number of micro-batches on every rank
    compute_logprobs                    reference, proximal, and the user's nodes with a model
    subtract_costs, estimate_values     costs and values: batches with other advantages
    compute_gradient                    loss: hpcrl's or the user's, over the micro-batches of a minibatch
    update_policy, update_critic        update, update-critic
    RANK_NODES                          those that run once in a step, as the graph orders them
    reduce_totals                       the counts of each minibatch over all ranks
    find_skip_reason                    why a step cannot train, from its input alone
    compute_learning_rate               the learning rate of a step

`learn_rows` in step.py calls them, those of RANK_NODES through `hpcrl/learn/pipeline.py`, since nodes of the user's may
come between. Trainers differ in the methods of `RankTrainer`.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from hpcrl.config.recipe import TrainConfig
from hpcrl.learn.advantage import STEP_ESTIMATORS
from hpcrl.learn.batch import MicroBatch, TrainingRow, make_micro_batches, make_packed_batches
from hpcrl.learn.loss import LossSums, PolicyLoss
from hpcrl.learn.pipeline import NodeFunction, NodeWork
from hpcrl.trainers.base import Minibatch, RankTrainer, StepAbandonedError, TokenColumns, nothing_to_check
from hpcrl.trainers.critic import estimate_advantages
from hpcrl.trainers.micro_batch_loss import (
    MinibatchTotals,
    PriorLogprobs,
    normalize_advantages,
    subtract_kl_costs,
)
from hpcrl.trainers.step_metrics import LearnResult
from hpcrl.trainers.world import World


@dataclass(kw_only=True)
class StepWork(NodeWork):
    """A rank's part of a training step."""

    trainer: RankTrainer
    step: int
    version: int
    """The weights that it starts from."""
    read_share: Callable[[], list[list[TrainingRow]]]
    """A function that returns this rank's rows of each minibatch."""
    must_abandon: Callable[[], bool]
    result: LearnResult
    policy_loss: PolicyLoss
    totals: list[MinibatchTotals] = field(default_factory=list)
    """The counts of each minibatch."""

    def check_time(self) -> None:
        """Raise StepAbandonedError on all ranks if rank 0 has no time for the rest of the step."""
        if self.trainer.world.any(self.must_abandon()):
            raise StepAbandonedError(f"step {self.step} was abandoned: the job ends before it would be made and saved")


def read_rows(work: StepWork, _deal: None) -> list[list[TrainingRow]]:
    """Read the rows of this rank's share, which only `read_share` reads."""
    return work.read_share()


def make_batches(work: StepWork, minibatch_rows: list[list[TrainingRow]]) -> list[Minibatch]:
    """Make micro-batches of this rank's rows of each minibatch; every rank has the same number of minibatches."""
    train, trainer, result = work.train, work.trainer, work.result
    make = make_packed_batches if train.rows == "packed" else make_micro_batches
    minibatches = [
        make(rows, tokens_per_micro_batch=train.micro_batch_tokens, version=work.version) for rows in minibatch_rows
    ]
    num_copies = trainer.world.size / trainer.num_shares
    work.totals = reduce_totals(minibatches, world=trainer.world, num_copies=num_copies)
    result.num_tokens = int(sum(each.num_tokens for each in work.totals))
    result.num_padded_tokens = int(sum(each.num_padded_tokens for each in work.totals))
    work.skipped = find_skip_reason(work.totals)
    if work.skipped is not None:
        return minibatches
    batches = trainer.place_batches(minibatches)
    largest = max((micro.num_padded_tokens for minibatch in batches for micro in minibatch), default=0)
    result.largest_batch = trainer.world.max(largest)
    return batches


def compute_logprobs(work: StepWork, minibatches: list[Minibatch]) -> list[TokenColumns]:
    """Compute the log-probs of all tokens before the first optimizer step, under the node's model or the policy.

    Those of a teacher's engine are in the batches. Those of a policy that does not change before they are used are
    the current ones: then there is nothing to compute.
    """
    if work.name in work.trainer.spread_models:
        return work.trainer.spread_models[work.name].compute_logprobs(minibatches)
    if work.name == "reference" and work.trainer.has_scored_reference:
        return [[_find_taught(micro, work.trainer) for micro in minibatch] for minibatch in minibatches]
    is_policy = work.node.role == "policy"
    is_current = len(minibatches) * work.train.epochs == 1 and not work.train.has_kl_reward
    if is_policy and is_current and not work.executor.takes_column(work.name):
        return [[None] * len(minibatch) for minibatch in minibatches]
    return work.trainer.compute_logprobs(minibatches, model=None if is_policy else work.name)


def _find_taught(micro: MicroBatch, trainer: RankTrainer) -> Tensor | None:
    """Return the log-probs by the teacher's engine; a micro-batch without model tokens has none."""
    if not trainer.has_logprobs:
        return None
    if not micro.num_tokens:
        return micro.behaviour_N
    assert micro.teacher_N is not None, "check_trainable refuses trajectories without"
    return micro.teacher_N


def subtract_costs(work: StepWork, minibatches: list[Minibatch], *columns: list[TokenColumns]) -> list[Minibatch]:
    """Subtract what the KL costs from advantages, or from rewards where a critic follows."""
    trainer = work.trainer
    names = work.node.inputs[1:]
    priors = [_list_priors(names, minibatch, columns, number) for number, minibatch in enumerate(minibatches)]
    changed = subtract_kl_costs(
        minibatches,
        priors,
        train=work.train,
        world=trainer.world,
        num_shares=trainer.num_shares,
        counts=trainer.has_logprobs,
    )
    if work.train.advantage in STEP_ESTIMATORS:
        return normalize_advantages(changed, world=trainer.world, counts=trainer.has_logprobs)
    return changed


def estimate_values(work: StepWork, minibatches: list[Minibatch], *columns: list[TokenColumns]) -> list[Minibatch]:
    """Turn rewards into advantages, with the values of the critic or of the user's function."""
    if work.executor.is_users(work.name):
        if work.trainer.has_logprobs:  # else it has no advantages that count either
            values = work.executor.compute_columns(work.name, minibatches, *columns)
            minibatches = estimate_advantages(minibatches, values, train=work.train)
        return normalize_advantages(minibatches, world=work.trainer.world, counts=work.trainer.has_logprobs)
    assert work.trainer.critic is not None, "a pipeline with values has a critic"
    return work.trainer.critic.add_advantages(minibatches)


RANK_NODES: dict[str, NodeFunction] = {
    "rows": read_rows,
    "batches": make_batches,
    "reference": compute_logprobs,
    "proximal": compute_logprobs,
    "costs": subtract_costs,
    "values": estimate_values,
}
"""The functions of hpcrl that every rank runs once in a step, by node; nodes of the user's may come between."""


def compute_gradient(
    work: StepWork, number: int, minibatches: list[Minibatch], *columns: list[TokenColumns]
) -> LossSums:
    """Add the gradient of the loss of minibatch `number`, over all ranks; the rest are the inputs of the node `loss`.

    A step may be abandoned before its first update: the weights are those of the last step then.
    """
    minibatch = minibatches[number]
    priors = _list_priors(work.executor.nodes["loss"].inputs[1:], minibatch, columns, number)
    try:
        return work.trainer.accumulate_gradient(
            minibatch,
            priors,
            totals=work.totals[number],
            policy_loss=work.policy_loss,
            check=nothing_to_check if work.result.norms else work.check_time,
        )
    except StepAbandonedError:
        work.trainer.discard_gradient()
        raise


def update_policy(work: StepWork, number: int, sums: LossSums) -> None:
    """Clip the gradient and make an optimizer step; one that is not finite is not applied and ends the step."""
    trainer, result = work.trainer, work.result
    result.add(sums, norm=trainer.clip_gradient(), num_tokens=work.totals[number].num_tokens)
    work.skipped = result.skipped
    if work.skipped is not None:
        trainer.discard_gradient()
    else:
        trainer.apply_gradient(rate=result.learning_rate)


def update_critic(work: StepWork, number: int) -> None:
    """Make the critic's optimizer step on the same minibatch."""
    assert work.trainer.critic is not None, "a pipeline with values has a critic"
    rate = compute_learning_rate(work.step, train=work.train, peak=work.train.critic_learning_rate)
    num_tokens = work.totals[number].num_tokens
    work.result.value_losses.append(work.trainer.critic.learn(number, num_tokens=num_tokens, rate=rate))


def _list_priors(
    names: Sequence[str], minibatch: Minibatch, columns: tuple[list[TokenColumns], ...], number: int
) -> list[PriorLogprobs]:
    """Name the columns that a node takes beside the batches, for each micro-batch of a minibatch."""
    if not names:
        return [PriorLogprobs() for _ in minibatch]
    found = []
    for each in zip(*(column[number] for column in columns), strict=True):
        by_name = dict(zip(names, each, strict=True))
        others: tuple[Tensor, ...] = tuple(column_N for column_N in each if column_N is not None)
        found.append(PriorLogprobs(by_name.get("proximal"), by_name.get("reference"), others))
    return found


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
