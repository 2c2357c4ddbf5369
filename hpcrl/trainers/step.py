"""The learning rate of a training step: a warm-up, then constant or falling to the last step.

A training step, the same for every trainer: what is dealt, what is learned, when nothing is.

    train_step     deal -> this rank's rows -> learn -> figures
    learn          for each minibatch: accumulate, clip, take the step or leave it
    scored         the loss of one micro-batch, from its logits

Legend  N model tokens of a micro-batch - V vocabulary
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from hpcrl.config.recipe import Train
from hpcrl.learn.batch import MicroBatch, Row
from hpcrl.learn.distribute import Deal, deal, rows_of
from hpcrl.learn.loss import LossSums, Said, judged, policy_loss, token_shares
from hpcrl.spool.record import Trajectory
from hpcrl.trainers.base import StepMetrics, check_trainable
from hpcrl.trainers.step_metrics import Laps, Learned, step_metrics
from hpcrl.trainers.world import World


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


Minibatch = list[MicroBatch]


class Dealt(Protocol):
    """One rank of a trainer that a step is dealt out to."""

    @property
    def num_shares(self) -> int:
        """Into how many shares a step is dealt."""

    @property
    def max_length(self) -> int:
        """Positions that the model can read."""

    @property
    def vocabulary_size(self) -> int: ...

    def learn(self, parts: list[list[Row]], *, step: int, skipped: str | None = None) -> Learned:
        """One optimizer step per minibatch; `parts` are this rank's rows of each."""


class Totals(NamedTuple):
    """What all ranks together have of one minibatch."""

    num_tokens: float
    """Model tokens."""
    num_sequences: float
    num_not_finite: float
    """Rewards and log-probs that are no numbers."""
    num_padded_tokens: float


class Before(NamedTuple):
    """Log-probs of a micro-batch's tokens, taken before the first optimizer step of a training step."""

    proximal_N: Tensor | None = None
    """None where the policy cannot have moved since: they are the current ones then."""
    reference_N: Tensor | None = None


class Optimizing(Protocol):
    """One rank of a trainer, as far as trainers differ. All ranks make every call together."""

    def together(self, parts: list[list[Row]]) -> tuple[list[Minibatch], list[Totals]]:
        """Micro-batches, as many of each minibatch on every rank, and what all ranks have of them."""

    def gradients(self, minibatches: list[Minibatch]) -> "list[Callable[[Totals], LossSums]]":
        """For each minibatch what adds its gradient; whatever must be known of all is taken now."""

    def clip(self) -> float:
        """The norm of the gradient, before it was clipped."""

    def take(self, number: int, *, rate: float | None, totals: Totals, step: int) -> float | None:
        """The optimizer step of minibatch `number`, or with no rate none; the gradient is gone afterwards.

        The critic's loss, if there is a critic.
        """


def train_step(
    mine: Dealt,
    trajectories: Sequence[Trajectory],
    *,
    train: Train,
    seed: int,
    step: int,
    version: int,
    rows: Callable[[Deal], list[list[Row]]],
    segment_of: Callable[[Trajectory], str] = lambda _: "",
) -> StepMetrics:
    """`rows` brings this rank's rows of what was dealt."""
    laps = Laps()
    check_trainable(trajectories, vocabulary_size=mine.vocabulary_size)
    dealt = deal(
        trajectories,
        train=train,
        num_ranks=mine.num_shares,
        seed=seed,
        step=step,
        max_length=mine.max_length,
        segment_of=segment_of,
    )
    laps.end("deal")
    parts = rows(dealt)
    laps.end("rows")
    learned = mine.learn(parts, step=step, skipped=dealt.skipped)
    laps.end("learn")
    return step_metrics(trajectories, dealt=dealt, learned=learned, step=step, version=version, laps=laps)


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


def learn(
    mine: Optimizing, parts: list[list[Row]], *, train: Train, world: World, step: int, skipped: str | None
) -> Learned:
    """One optimizer step per minibatch; the first that is not finite is not taken and ends the training step."""
    rate = learning_rate(step, train=train, peak=train.learning_rate)
    learned = Learned(LossSums.zero(world.device), skipped=skipped, learning_rate=rate)
    if skipped is not None:
        return learned
    minibatches, totals = mine.together(parts)
    learned.num_tokens = int(sum(each.num_tokens for each in totals))
    learned.num_padded_tokens = int(sum(each.num_padded_tokens for each in totals))
    learned.skipped = reason_to_skip(totals)
    if learned.skipped is not None:
        return learned
    for number, (gradient, each) in enumerate(zip(mine.gradients(minibatches), totals, strict=True)):
        learned.add(gradient(each), norm=mine.clip())
        taken = learned.skipped is None
        value_loss = mine.take(number, rate=rate if taken else None, totals=each, step=step)
        if value_loss is not None:
            learned.value_losses.append(value_loss)
        if not taken:
            break
    return learned


def totals_of(minibatches: list[Minibatch], *, world: World, times: float = 1.0) -> list[Totals]:
    """Summed over the ranks, of which so many `times` have the same rows."""
    counts = torch.tensor([_counts(part) for part in minibatches], dtype=torch.double).reshape(-1, len(Totals._fields))
    summed = world.sum(counts.to(world.device)).cpu() / times
    return [Totals(*row) for row in summed.tolist()]


def _counts(part: Minibatch) -> Totals:
    columns = [column for micro in part for column in (micro.behaviour_N, micro.advantages_N)]
    return Totals(
        num_tokens=float(sum(micro.num_tokens for micro in part)),
        num_sequences=float(sum(micro.num_sequences for micro in part)),
        num_not_finite=float(sum(int((~column.isfinite()).sum()) for column in columns)),
        num_padded_tokens=float(sum(micro.num_padded_tokens for micro in part)),
    )


def reason_to_skip(totals: list[Totals]) -> str | None:
    """What can be told from the input alone, before the first of several minibatches moves the weights."""
    if not sum(each.num_tokens for each in totals):
        return "no trainable tokens"
    if sum(each.num_not_finite for each in totals):
        return "a reward or a stored log-prob is not finite"
    return None


def scored(
    micro: MicroBatch,
    logits_NV: Tensor,
    *,
    before: Before,
    totals: Totals,
    train: Train,
    temperature: float,
    max_length: int,
) -> tuple[Tensor, LossSums]:
    """The loss to differentiate, every token weighing its share whatever its micro-batch and rank."""
    logprobs_N, entropy_N = judged(logits_NV, micro.targets_N, temperature=temperature, train=train)
    proximal_N = micro.behaviour_N if train.proximal == "behaviour" else before.proximal_N
    said = Said(
        behaviour_N=micro.behaviour_N,
        proximal_N=logprobs_N.detach() if proximal_N is None else proximal_N,
        advantages_N=micro.advantages_N,
        rows_N=micro.rows_N,
        shares_N=token_shares(
            micro.rows_N,
            aggregation=train.aggregation,
            num_tokens=totals.num_tokens,
            num_sequences=totals.num_sequences,
            max_length=max_length,
        ),
        reference_N=before.reference_N,
    )
    return policy_loss(logprobs_N, entropy_N=entropy_N, said=said, train=train)
