"""The loss of one micro-batch, from its log-probs, and what changes its advantages before.

    compute_micro_batch_loss    the loss, and its sums for the metrics
    choose_temperature          the temperature of the log-probs that the loss takes
    subtract_kl_costs           micro-batches with the costs of the KL
    compare_costs               costs beside those of other rows at the same token
    normalize_advantages        micro-batches whose advantages have mean 0 and variance 1 over all ranks
    compute_mean_and_std        mean and standard deviation over all ranks
    MinibatchTotals, PriorLogprobs   what a loss needs beside them

Legend: N model tokens of a micro-batch
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from hpcrl.config.recipe import TrainConfig
from hpcrl.learn.advantage import STD_EPSILON, STEP_ESTIMATORS
from hpcrl.learn.batch import MicroBatch
from hpcrl.learn.loss import (
    LossSums,
    PolicyLoss,
    TokenInputs,
    compute_kl_costs,
    compute_token_shares,
    count_positions,
)
from hpcrl.trainers.world import World


class MinibatchTotals(NamedTuple):
    """The counts of one minibatch over all ranks."""

    num_tokens: float
    """The tokens that the model generated."""
    num_sequences: float
    num_not_finite: float
    """The rewards and log-probs that are not finite."""
    num_padded_tokens: float


class PriorLogprobs(NamedTuple):
    """The log-probs of a micro-batch's tokens, computed before the first optimizer step of a training step."""

    proximal_N: Tensor | None = None
    """None where the policy cannot have changed since: then they equal the current ones."""
    reference_N: Tensor | None = None
    others: tuple[Tensor, ...] = ()
    """The results of further nodes that the loss takes, in the order of its inputs."""


def compute_micro_batch_loss(
    micro: MicroBatch,
    logprobs_N: Tensor,
    *,
    entropy_N: Tensor,
    prior: PriorLogprobs,
    totals: MinibatchTotals,
    train: TrainConfig,
    max_length: int,
    policy_loss: PolicyLoss,
) -> tuple[Tensor, LossSums]:
    """Compute the loss to differentiate; a token's share does not depend on its micro-batch or rank."""
    proximal_N = micro.behaviour_N if train.proximal == "behaviour" else prior.proximal_N
    token_inputs = TokenInputs(
        behaviour_N=micro.behaviour_N,
        proximal_N=logprobs_N.detach() if proximal_N is None else proximal_N,
        advantages_N=micro.advantages_N,
        rows_N=micro.rows_N,
        shares_N=compute_token_shares(
            micro.rows_N,
            aggregation=train.aggregation,
            num_tokens=totals.num_tokens,
            num_sequences=totals.num_sequences,
            budget=min(max(train.response_budget.values(), default=max_length), max_length),
        ),
        reference_N=prior.reference_N,
        fresh_N=micro.fresh_N,
        others=prior.others,
    )
    loss, sums = policy_loss(logprobs_N, entropy_N=entropy_N, token_inputs=token_inputs, train=train)
    return loss, sums._replace(num_replayed=micro.count_replayed()) if train.router_replay else sums


def choose_temperature(train: TrainConfig, *, rollout: float) -> float:
    """Return the rollout's temperature, or 1 for data to imitate, which was not sampled at it."""
    return 1.0 if train.advantage == "sft" else rollout


def subtract_kl_costs(
    minibatches: Sequence[Sequence[MicroBatch]],
    priors: Sequence[Sequence[PriorLogprobs]],
    *,
    train: TrainConfig,
    world: World,
    num_shares: int,
    counts: bool = True,
) -> list[list[MicroBatch]]:
    """Subtract what the KL costs each token from its advantage, or from its reward where a critic follows.

    A rank that has no log-probs, as the first stages of Megatron, needs no advantages either. Estimators that normalise
    over the step have their baseline there, a critic is one; for others it is the mean cost of other rows.
    """
    columns = [
        (micro, _compute_own_costs(micro, prior, train=train))
        for each in zip(minibatches, priors, strict=True)
        for micro, prior in zip(*each, strict=True)
    ]
    costs = iter([costs_N for _, costs_N in columns])
    if train.advantage != "gae" and train.advantage not in STEP_ESTIMATORS:
        known = [(micro.rows_N, costs_N) for micro, costs_N in columns]
        costs = iter(compare_costs(known, world=world, num_shares=num_shares, counts=counts))
    return [
        [
            micro if (costs_N := next(costs)) is None else replace(micro, advantages_N=micro.advantages_N - costs_N)
            for micro in minibatch
        ]
        for minibatch in minibatches
    ]


def _compute_own_costs(micro: MicroBatch, prior: PriorLogprobs, *, train: TrainConfig) -> Tensor | None:
    if prior.reference_N is None:
        return None
    started_N = micro.behaviour_N if prior.proximal_N is None else prior.proximal_N
    return compute_kl_costs(started_N, prior.reference_N, micro.rows_N, train=train)


def compare_costs(
    columns: Sequence[tuple[Tensor, Tensor | None]], *, world: World, num_shares: int, counts: bool = True
) -> list[Tensor | None]:
    """Return the costs less the mean cost of all other rows of the step at the same token, over all ranks.

    Rows of other episodes were sampled independently, so that they leave the expected gradient as it is; where episodes
    have several rows, the others of the same episode bias it. A token that no other row reaches keeps its cost. The
    columns are the rows of the tokens and their costs, None on a rank that does not count; those that count have
    `num_shares` different shares of the rows, each the same number of times.
    """
    found = [(count_positions(rows_N), costs_N) for rows_N, costs_N in columns if costs_N is not None]
    longest = world.max(max([int(places_N.max()) + 1 for places_N, _ in found if len(places_N)], default=0))
    sums = torch.zeros(2, longest, dtype=torch.double, device=world.device)
    for places_N, costs_N in found:
        sums[0].index_add_(0, places_N, costs_N.double())
        sums[1].index_add_(0, places_N, torch.ones_like(costs_N, dtype=torch.double))
    num_same = world.sum(torch.tensor(float(counts), device=world.device)) / num_shares  # ranks that have the same rows
    totals_T, nums_T = (world.sum(sums) / num_same).unbind()

    def compare(places_N: Tensor, costs_N: Tensor) -> Tensor:
        others_N = nums_T[places_N].round() - 1
        mean_N = (totals_T[places_N] - costs_N) / others_N.clamp(min=1)
        return (costs_N - mean_N.where(others_N > 0, 0.0)).to(costs_N.dtype)

    return [None if costs_N is None else compare(count_positions(rows_N), costs_N) for rows_N, costs_N in columns]


def normalize_advantages(
    minibatches: list[list[MicroBatch]], *, world: World, counts: bool = True
) -> list[list[MicroBatch]]:
    """Normalise advantages to mean 0 and variance 1 over all tokens of the ranks that count."""
    columns = [micro.advantages_N for minibatch in minibatches for micro in minibatch] if counts else []
    mean, std = compute_mean_and_std(columns, world=world)
    return [
        [replace(micro, advantages_N=(micro.advantages_N - mean) / (std + STD_EPSILON)) for micro in minibatch]
        for minibatch in minibatches
    ]


def compute_mean_and_std(columns: Sequence[Tensor], *, world: World) -> tuple[Tensor, Tensor]:
    """Compute mean and standard deviation over all values of all ranks."""
    all_N = torch.cat([torch.zeros(0, device=world.device), *columns]).double()
    count = torch.tensor(float(len(all_N)), dtype=torch.double, device=all_N.device)
    num, total = world.sum(torch.stack([count, all_N.sum()])).unbind()
    mean = total / num
    squared_error = world.sum((all_N - mean).square().sum())
    return mean.float(), (squared_error / num).sqrt().float()
