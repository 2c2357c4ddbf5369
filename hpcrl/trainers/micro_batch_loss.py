"""The loss of one micro-batch, from its log-probs, and what changes its advantages before.

    compute_micro_batch_loss    the loss, and its sums for the metrics
    choose_temperature          the temperature of the log-probs that the loss takes
    subtract_kl_costs           a micro-batch with the costs of the KL
    normalize_advantages        micro-batches whose advantages have mean 0 and variance 1 over all ranks
    compute_mean_and_std        mean and standard deviation over all ranks
    MinibatchTotals, PriorLogprobs   what a loss needs to know beside them

Legend: N model tokens of a micro-batch
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from hpcrl.config.recipe import TrainConfig
from hpcrl.learn.advantage import STD_EPSILON
from hpcrl.learn.batch import MicroBatch
from hpcrl.learn.loss import (
    LossSums,
    PolicyLoss,
    TokenInputs,
    compute_kl_costs,
    compute_token_shares,
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
        others=prior.others,
    )
    return policy_loss(logprobs_N, entropy_N=entropy_N, token_inputs=token_inputs, train=train)


def choose_temperature(train: TrainConfig, *, rollout: float) -> float:
    """Return the rollout's temperature, or 1 for data to imitate, which was not sampled at it."""
    return 1.0 if train.advantage == "sft" else rollout


def subtract_kl_costs(micro: MicroBatch, prior: PriorLogprobs, *, train: TrainConfig) -> MicroBatch:
    """Subtract what the KL costs each token from its advantage, or from its reward where a critic follows.

    A rank that has no log-probs, as the first stages of Megatron, needs no advantages either.
    """
    if prior.reference_N is None:
        return micro
    started_N = micro.behaviour_N if prior.proximal_N is None else prior.proximal_N
    costs_N = compute_kl_costs(started_N, prior.reference_N, micro.rows_N, train=train)
    return replace(micro, advantages_N=micro.advantages_N - costs_N)


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
