"""The pipeline nodes of the tests, as a user would write them."""

from collections.abc import Sequence
from dataclasses import replace

import msgspec
import numpy as np

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


NO_FUNCTION = 3
