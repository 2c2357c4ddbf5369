"""The pipeline nodes of the tests, as a user would write them."""

import functools
from collections.abc import Sequence
from dataclasses import replace

import msgspec
import numpy as np
import torch

from hpcrl.learn.batch import TrainingRow
from hpcrl.spool.record import Trajectory


def shaped(trajectories: Sequence[Trajectory], *, per_token: float = 0.01) -> list[Trajectory]:
    """Shape rewards: every token has a small cost."""
    return [
        msgspec.structs.replace(one, reward=(one.reward or 0.0) - per_token * int(one.loss_mask.sum()))
        for one in trajectories
    ]


def against_the_best(trajectories: Sequence[Trajectory]) -> list[float]:
    """Return a custom advantage: the reward of an episode minus the best of its group."""
    best: dict[str, float] = {}
    for one in trajectories:
        best[one.group] = max(best.get(one.group, -np.inf), one.reward or 0.0)
    return [(one.reward or 0.0) - best[one.group] for one in trajectories]


def doubled(advantages: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Double the advantages: a node after them."""
    return [2 * each for each in advantages]


def first_tokens_only(rows: Sequence[TrainingRow], *, keep: int = 4) -> list[TrainingRow]:
    """Learn only from the first tokens of each trajectory: a node on rows."""
    return [replace(row, credit=np.where(np.arange(len(row.credit)) < keep, row.credit, 0.0)) for row in rows]


def too_few(trajectories: Sequence[Trajectory]) -> list[Trajectory]:
    return list(trajectories)[:-1]


def nothing(rows: Sequence[TrainingRow]) -> None:
    """Return nothing: a node with a forgotten return."""


def broken(trajectories: Sequence[Trajectory]) -> list[float]:
    raise KeyError("weight")


def wrong_turns(trajectories: Sequence[Trajectory]) -> list[list[float]]:
    return [[1.0] * (len(one.turns) + 1) for one in trajectories]


def plain_loss(logprobs, behaviour, advantages, mask):
    """Return PPO's loss without a clip: a loss of the user's own, on both trainers."""
    ratio = (logprobs - behaviour).exp()
    return -ratio * advantages


def mean_loss(logprobs, behaviour, advantages, mask):
    """Return the same as one number."""
    return plain_loss(logprobs, behaviour, advantages, mask)[mask].mean()


def row_loss(logprobs, behaviour, advantages, mask):
    """Return the same as a number for each row."""
    return plain_loss(logprobs, behaviour, advantages, mask).sum(1) / mask.sum(1)


def distilled_loss(logprobs, behaviour, advantages, mask, teacher, *, weight=1.0):
    """Pull towards a teacher: the inputs of the node beside the batches follow the mask."""
    return weight * (logprobs.exp() * (logprobs.detach() - teacher))


def constant_loss(logprobs, behaviour, advantages, mask):
    return advantages


def lost_loss(logprobs, behaviour, advantages, mask):
    return logprobs[:, :1]


def zero_values(micro):
    """Value every state as a new critic does."""
    return torch.zeros_like(micro.advantages_N)


def token_values(micro):
    """Value a state by the token that follows it."""
    return micro.targets_N / 32


def few_values(micro):
    return micro.advantages_N[:1]


def infinite_values(micro):
    return torch.full_like(micro.advantages_N, torch.inf)


def own_reference(micro, *, directory):
    """Return the log-probs of the tokens under a model that the node loads itself."""
    with torch.no_grad():
        logits_BTV = _load_model(directory)(micro.inputs_BT).logits
    logprobs_NV = torch.log_softmax(logits_BTV[micro.mask_BT], -1)
    return logprobs_NV.gather(-1, micro.targets_N[:, None])[:, 0]


@functools.cache
def _load_model(directory):
    from transformers import AutoModelForCausalLM  # slow to import

    return AutoModelForCausalLM.from_pretrained(directory).eval()


def passed_on(micro, column, *, factor=1.0):
    """Return what another node found for the tokens."""
    return factor * column


def adam_update(weight, gradient, state, rate):
    """Make Adam's step, as its paper has it."""
    first, second, step = state["exp_avg"], state["exp_avg_sq"], float(state["step"])
    first.mul_(0.9).add_(0.1 * gradient)
    second.mul_(0.999).add_(0.001 * gradient * gradient)
    weight.sub_(rate * (first / (1 - 0.9**step)) / ((second / (1 - 0.999**step)).sqrt() + 1e-8))


def new_weight(weight, gradient, state, rate):
    return weight - rate * gradient


def more_state(weight, gradient, state, rate):
    state["norm"] = gradient.norm()
