"""How much better an episode was than its group expected.

Legend  G episodes of one group - N episodes of a step

An estimator takes the rewards of one group and gives one advantage per episode; every one of them sums to zero
over the group. A group that says nothing (one member, or all rewards equal) gets exact zeros.
"""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

Rewards = NDArray[np.float64]
Estimator = Callable[[Rewards], Rewards]

SMALLEST_STD = 1e-6
"""Added to the standard deviation, so that rewards equal up to rounding are not blown up to size one."""


def grpo(rewards_G: Rewards) -> Rewards:
    """Distance from the group's mean in standard deviations (DeepSeekMath, arXiv 2402.03300)."""
    if is_flat(rewards_G):
        return np.zeros_like(rewards_G)
    return np.asarray((rewards_G - rewards_G.mean()) / (rewards_G.std() + SMALLEST_STD))


def rloo(rewards_G: Rewards) -> Rewards:
    """Distance from the mean of the others, leave-one-out (arXiv 2402.14740)."""
    if is_flat(rewards_G):
        return np.zeros_like(rewards_G)
    num_others = len(rewards_G) - 1
    return np.asarray(rewards_G - (rewards_G.sum() - rewards_G) / num_others)


ESTIMATORS: dict[str, Estimator] = {"grpo": grpo, "rloo": rloo}
"""By the name that the recipe's `train.advantage` uses."""


def is_flat(rewards_G: Rewards) -> bool:
    """True for a group in which no episode was better than another."""
    return bool(np.all(rewards_G == rewards_G[0]))


def group_advantages(rewards_N: Rewards, *, groups: Sequence[str], estimator: Estimator) -> Rewards:
    """The advantage of every episode within its group; `groups` names the group of each."""
    advantages_N = np.zeros_like(rewards_N)
    for members in indices_by_group(groups).values():
        advantages_N[members] = estimator(rewards_N[members])
    return advantages_N


def indices_by_group(groups: Sequence[str]) -> dict[str, list[int]]:
    """Where the members of each group stand, in order of first appearance."""
    found: dict[str, list[int]] = {}
    for index, group in enumerate(groups):
        found.setdefault(group, []).append(index)
    return found
