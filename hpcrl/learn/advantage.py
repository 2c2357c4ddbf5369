"""Advantages: how much better an episode, a turn or a token was than expected.

    compute_advantages              the advantage of every turn of every episode, by the recipe's `train.advantage`
    compute_group_advantages        the advantage of every episode within its group
    grpo, dr_grpo, rloo             estimators over the rewards of a group
    keep_rewards                    an estimator that compares nothing
    ESTIMATORS, STEP_ESTIMATORS     those estimators by the recipe's names
    AdvantageEstimator, FloatArray  their type, and the type of their arrays
    NormalizationScope              the episodes over which an estimator normalises
    trloo                           the leave-one-out estimator over turns
    gae                             the advantage of every token, from a critic's values
    compute_turn_rewards            the reward of each turn
    discount_rewards                the return from each turn
    normalize_values                values with mean 0 and variance 1
    group_indices                   the members of each group
    is_flat                         whether a group's rewards are all equal, up to rounding
    is_flat_group                   whether a group has no advantages
    STD_EPSILON                     the term added to standard deviations
    ROUNDING_SHARE                  the differences of rewards that count as rounding

Legend: B rows, G episodes of one group, N episodes of a step, K turns of an episode, T model tokens of an episode

Estimators over rewards see whole episodes and give all turns of one the same advantage; `trloo` sees the turns.
A group without a signal (one member, or all rewards equal) gets exact zeros. Rewards that are NaN or None stay
visible as NaN: the trainer skips the step and reports the reason.
"""

from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from hpcrl.config.recipe import TrainConfig
from hpcrl.spool.record import TrajectoryFacts

FloatArray = NDArray[np.float64]
AdvantageEstimator = Callable[[FloatArray], FloatArray]
NormalizationScope = Literal["step", "domain", "nothing"]

STD_EPSILON = 1e-6
"""The term added to the standard deviation, so that rewards equal up to rounding are not scaled up to size one."""
ROUNDING_SHARE = 1e-6
"""The share of the largest reward up to which a difference is rounding; float32 has seven digits."""


def grpo(rewards_G: FloatArray) -> FloatArray:
    """Return the distance from the group's mean in standard deviations of a sample (DeepSeekMath, arXiv 2402.03300)."""
    if is_flat(rewards_G):
        return np.zeros_like(rewards_G)
    return np.asarray((rewards_G - rewards_G.mean()) / (rewards_G.std(ddof=min(len(rewards_G) - 1, 1)) + STD_EPSILON))


def dr_grpo(rewards_G: FloatArray) -> FloatArray:
    """Return the distance from the group's mean, not divided by anything (Dr. GRPO, arXiv 2503.20783)."""
    if is_flat(rewards_G):
        return np.zeros_like(rewards_G)
    return np.asarray(rewards_G - rewards_G.mean())


def rloo(rewards_G: FloatArray) -> FloatArray:
    """Return the distance from the mean of the others, leave-one-out (arXiv 2402.14740)."""
    if is_flat(rewards_G):
        return np.zeros_like(rewards_G)
    num_others = len(rewards_G) - 1
    return np.asarray(rewards_G - (rewards_G.sum() - rewards_G) / num_others)


def keep_rewards(rewards_G: FloatArray) -> FloatArray:
    """Return the rewards themselves, without a baseline."""
    return rewards_G.copy()


ESTIMATORS: dict[str, AdvantageEstimator] = {"grpo": grpo, "dr-grpo": dr_grpo, "rloo": rloo}
"""The estimators that compare the episodes of one group, by their names in the recipe's `train.advantage`."""

STEP_ESTIMATORS: dict[str, AdvantageEstimator] = {"reinforce++": keep_rewards, "reinforce++-baseline": dr_grpo}
"""The estimators whose results are then normalised over all tokens of the step (REINFORCE++, arXiv 2501.03262)."""


def compute_advantages(
    episodes: Sequence[TrajectoryFacts],
    *,
    advantage: str,
    gamma: float = 1.0,
    num_tokens_N: Sequence[int] | None = None,
    normalized_over: NormalizationScope = "step",
) -> list[FloatArray]:
    """Compute the advantage of each turn of each episode; an episode without turns counts as one turn.

    `num_tokens_N` is the number of model tokens of each episode, for estimators that weigh by tokens. Those that
    normalise do so over all tokens of the step or of each domain, or leave that to the ranks ("nothing").
    """
    groups = [episode.group for episode in episodes]
    if advantage == "trloo":
        return trloo([compute_turn_rewards(episode) for episode in episodes], groups=groups, gamma=gamma)
    rewards_N = np.array([episode.reward for episode in episodes], dtype=np.float64)
    if advantage == "sft":
        return _repeat_per_turn(np.ones_like(rewards_N), episodes)
    if advantage in STEP_ESTIMATORS:
        compared_N = compute_group_advantages(rewards_N, groups=groups, estimator=STEP_ESTIMATORS[advantage])
        weights_N = np.ones_like(rewards_N) if num_tokens_N is None else np.asarray(num_tokens_N, dtype=np.float64)
        if normalized_over == "nothing":
            return _repeat_per_turn(compared_N, episodes)
        domains = [episode.domain if normalized_over == "domain" else "" for episode in episodes]
        for members in group_indices(domains).values():
            compared_N[members] = normalize_values(compared_N[members], weights_N=weights_N[members])
        return _repeat_per_turn(compared_N, episodes)
    return _repeat_per_turn(
        compute_group_advantages(rewards_N, groups=groups, estimator=ESTIMATORS[advantage]), episodes
    )


def compute_group_advantages(
    rewards_N: FloatArray, *, groups: Sequence[str], estimator: AdvantageEstimator
) -> FloatArray:
    """Compute the advantage of every episode within its group; `groups` names the group of each."""
    advantages_N = np.zeros_like(rewards_N)
    for members in group_indices(groups).values():
        advantages_N[members] = estimator(rewards_N[members])
    return advantages_N


def normalize_values(values_N: FloatArray, *, weights_N: FloatArray) -> FloatArray:
    """Normalise to mean 0 and variance 1 under the weights; zeros if all values are equal."""
    if not weights_N.sum() or is_flat(values_N):
        return np.zeros_like(values_N)
    mean = np.average(values_N, weights=weights_N)
    std = np.sqrt(np.average((values_N - mean) ** 2, weights=weights_N))
    return np.asarray((values_N - mean) / (std + STD_EPSILON))


def trloo(rewards_NK: Sequence[FloatArray], *, groups: Sequence[str], gamma: float) -> list[FloatArray]:
    """Apply leave-one-out turn by turn (TRLOO, Dr. Kernel, arXiv 2602.05885).

    The advantage is the return of a turn minus the mean return of the same turn in the group's other episodes that
    reached it; zero where none did.
    """
    returns_NK = [discount_rewards(rewards_K, gamma=gamma) for rewards_K in rewards_NK]
    advantages_NK = [np.zeros_like(returns_K) for returns_K in returns_NK]
    for members in group_indices(groups).values():
        for turn in range(max(len(returns_NK[index]) for index in members)):
            present = [index for index in members if len(returns_NK[index]) > turn]
            compared = rloo(np.array([returns_NK[index][turn] for index in present]))
            for index, value in zip(present, compared, strict=True):
                advantages_NK[index][turn] = value
    return advantages_NK


def compute_turn_rewards(episode: TrajectoryFacts) -> FloatArray:
    """Return the reward of each turn; what the score adds to the environment's own goes to the last that is trained."""
    rewards_K = np.array([turn.reward for turn in episode.turns] or [0.0], dtype=np.float64)
    total = np.nan if episode.reward is None else episode.reward
    trained = [number for number, turn in enumerate(episode.turns) if not turn.masked]
    rewards_K[trained[-1] if trained else -1] += total - rewards_K.sum()
    return rewards_K


def discount_rewards(rewards_K: FloatArray, *, gamma: float) -> FloatArray:
    """Return the sum of rewards from each turn on, each later turn discounted by another `gamma`."""
    returns_K = rewards_K.copy()
    for turn in range(len(rewards_K) - 2, -1, -1):
        returns_K[turn] += gamma * returns_K[turn + 1]
    return returns_K


def gae(
    values_BT: FloatArray, *, rewards_BT: FloatArray, lengths_B: Sequence[int], gamma: float, lam: float
) -> FloatArray:
    """Compute generalised advantages over model tokens (arXiv 1506.02438); the value after the last token is zero."""
    advantages_BT = np.zeros_like(values_BT)
    inside_BT = np.arange(values_BT.shape[1]) < np.asarray(lengths_B)[:, None]
    values_BT = np.where(inside_BT, values_BT, 0.0)
    next_value_B = np.zeros(len(values_BT))
    next_advantage_B = np.zeros(len(values_BT))
    for t in range(values_BT.shape[1] - 1, -1, -1):
        surprise_B = rewards_BT[:, t] + gamma * next_value_B - values_BT[:, t]
        next_advantage_B = np.where(inside_BT[:, t], surprise_B + gamma * lam * next_advantage_B, 0.0)
        advantages_BT[:, t], next_value_B = next_advantage_B, values_BT[:, t]
    return advantages_BT


def is_flat(rewards_G: FloatArray) -> bool:
    """Return True for a group in which no episode was better than another by more than rounding."""
    return bool(np.ptp(rewards_G) <= ROUNDING_SHARE * np.abs(rewards_G).max())


def is_flat_group(episodes: Sequence[TrajectoryFacts], train: TrainConfig) -> bool:
    """Return whether no turn of a group was better than what it is compared with."""
    if train.advantage != "trloo":
        return is_flat(np.array([episode.reward for episode in episodes], dtype=np.float64))
    credits = compute_advantages(episodes, advantage=train.advantage, gamma=train.gamma)
    return not any(credit_K.any() for credit_K in credits)


def group_indices(groups: Sequence[str]) -> dict[str, list[int]]:
    """Return the indices of each group's members; groups in order of first appearance."""
    found: dict[str, list[int]] = {}
    for index, group in enumerate(groups):
        found.setdefault(group, []).append(index)
    return found


def _repeat_per_turn(advantages_N: FloatArray, episodes: Sequence[TrajectoryFacts]) -> list[FloatArray]:
    return [np.full(max(len(episode.turns), 1), value) for value, episode in zip(advantages_N, episodes, strict=True)]
