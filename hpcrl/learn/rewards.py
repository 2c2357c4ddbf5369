"""Rewards as training sees them: punished for length, and in units of their domain, before they are compared.

shape_rewards         the trajectories of a step, with the rewards that their advantages are computed from
find_overlong         the trajectories that the loss leaves out for their length
compute_length_cost   the soft punishment of DAPO
"""

from collections.abc import Sequence

import msgspec
import numpy as np

from hpcrl.config.recipe import TrainConfig
from hpcrl.learn.advantage import group_indices, is_flat
from hpcrl.learn.batch import count_row_tokens
from hpcrl.spool.record import Trajectory


def shape_rewards(trajectories: Sequence[Trajectory], train: TrainConfig) -> Sequence[Trajectory]:
    """Return the trajectories with the rewards that advantages are computed from; None and NaN stay as they are."""
    if train.overlong == "punish":
        trajectories = [_punish_length(trajectory, train) for trajectory in trajectories]
    return _scale_by_domain(trajectories) if train.reward_scale == "domain" else trajectories


def find_overlong(trajectories: Sequence[Trajectory], train: TrainConfig) -> set[int]:
    """Return the indices of those that ended for lack of room, if the recipe filters them (DAPO, arXiv 2503.14476)."""
    if train.overlong != "filter":
        return set()
    return {index for index, trajectory in enumerate(trajectories) if _is_overlong(trajectory, train)}


def compute_length_cost(num_tokens: int, *, budget: int, margin: float) -> float:
    """Compute the soft punishment of DAPO: 0 up to the margin before the budget, 1 from the budget on, linear between.

    `margin` is a share of the budget (L_cache / L_max in the paper).
    """
    room = margin * budget
    if room <= 0:
        return float(num_tokens >= budget)
    return min(max((num_tokens - (budget - room)) / room, 0.0), 1.0)


def _is_overlong(trajectory: Trajectory, train: TrainConfig) -> bool:
    budget = train.response_budget.get(trajectory.domain)
    return trajectory.status == "truncated" or (budget is not None and _count_tokens(trajectory) >= budget)


def _punish_length(trajectory: Trajectory, train: TrainConfig) -> Trajectory:
    budget = train.response_budget.get(trajectory.domain)
    if budget is None or trajectory.reward is None:
        return trajectory
    cost = compute_length_cost(_count_tokens(trajectory), budget=budget, margin=train.overlong_margin)
    return msgspec.structs.replace(trajectory, reward=trajectory.reward - cost) if cost else trajectory


def _count_tokens(trajectory: Trajectory) -> int:
    return sum(count_row_tokens(trajectory))


def _scale_by_domain(trajectories: Sequence[Trajectory]) -> list[Trajectory]:
    """Divide rewards by the standard deviation of their domain's in this step, so that no domain outweighs another."""
    scales: dict[str, float] = {}
    for domain, indices in group_indices([trajectory.domain for trajectory in trajectories]).items():
        rewards = np.array([trajectories[index].reward for index in indices], dtype=np.float64)
        scales[domain] = 1.0 if is_flat(rewards) else 1.0 / float(rewards.std())
    return [_scale_reward(trajectory, scales[trajectory.domain]) for trajectory in trajectories]


def _scale_reward(trajectory: Trajectory, scale: float) -> Trajectory:
    if trajectory.reward is None or scale == 1.0:
        return trajectory
    turns = [msgspec.structs.replace(turn, reward=turn.reward * scale) for turn in trajectory.turns]
    return msgspec.structs.replace(trajectory, reward=trajectory.reward * scale, turns=turns)
