"""Advantages, compared with slow references written from the papers."""

import math

import msgspec
import numpy as np
import pytest

from hpcrl.learn.advantage import (
    ESTIMATORS,
    compute_advantages,
    compute_group_advantages,
    compute_turn_rewards,
    dr_grpo,
    gae,
    grpo,
    rloo,
)
from hpcrl.spool.record import EpisodeTurn, TrajectoryFacts


def slow_grpo(rewards):
    mean = sum(rewards) / len(rewards)
    std = math.sqrt(sum((reward - mean) ** 2 for reward in rewards) / (len(rewards) - 1))
    return [(reward - mean) / (std + 1e-6) for reward in rewards]


def slow_dr_grpo(rewards):
    return [reward - sum(rewards) / len(rewards) for reward in rewards]


def slow_rloo(rewards):
    advantages = []
    for index, reward in enumerate(rewards):
        others = rewards[:index] + rewards[index + 1 :]
        advantages.append(reward - sum(others) / len(others))
    return advantages


def slow_normalised(values, counts):
    """List every token of the step, then normalise by the definitions of mean and standard deviation."""
    tokens = [value for value, count in zip(values, counts, strict=True) for _ in range(count)]
    mean = sum(tokens) / len(tokens)
    std = math.sqrt(sum((token - mean) ** 2 for token in tokens) / len(tokens))
    return [(value - mean) / (std + 1e-6) for value in values]


def slow_trloo(rewards_by_episode, gamma):
    """Return for each turn its discounted return minus the mean of the others' at the same turn."""

    def earned(rewards, turn):
        return sum(gamma ** (later - turn) * rewards[later] for later in range(turn, len(rewards)))

    advantages = []
    for mine in rewards_by_episode:
        row = []
        for turn in range(len(mine)):
            others = [earned(r, turn) for r in rewards_by_episode if r is not mine and len(r) > turn]
            row.append(earned(mine, turn) - sum(others) / len(others) if others else 0.0)
        advantages.append(row)
    return advantages


def slow_gae(values, rewards, gamma, lam):
    """Return the sum of discounted surprises, as the paper writes it."""
    surprises = [
        rewards[t] + gamma * (values[t + 1] if t + 1 < len(values) else 0.0) - values[t] for t in range(len(values))
    ]
    return [
        sum((gamma * lam) ** (later - t) * surprises[later] for later in range(t, len(values)))
        for t in range(len(values))
    ]


def episode(group="math/0", index=0, *, reward=1.0, turns=()):
    return TrajectoryFacts(
        id=f"{group}/{index}",
        group=group,
        domain="math",
        seed=0,
        status="done",
        producer="000-env-0",
        created=0.0,
        start_version=0,
        end_version=0,
        turns=[EpisodeTurn(start=2 * number, end=2 * number + 1, reward=value) for number, value in enumerate(turns)],
        reward=reward,
    )


@pytest.mark.parametrize(("fast", "slow"), [(grpo, slow_grpo), (dr_grpo, slow_dr_grpo), (rloo, slow_rloo)])
@pytest.mark.parametrize("size", [2, 3, 8, 33])
def test_an_estimator_agrees_with_its_slow_reference(fast, slow, size):
    rewards = np.random.default_rng(size).normal(3, 5, size)
    np.testing.assert_allclose(fast(rewards), slow(rewards.tolist()), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("estimator", ESTIMATORS.values(), ids=ESTIMATORS)
@pytest.mark.parametrize("rewards", [[0.1] * 7, [0.3], [0.0, 0.0]])
def test_a_group_without_differences_gets_exact_zeros(estimator, rewards):
    assert estimator(np.array(rewards)).tolist() == [0.0] * len(rewards)


def test_rewards_that_differ_by_rounding_alone_are_not_scaled_up():
    almost_equal = np.array([0.3, 0.1 + 0.2, 0.3])
    assert np.abs(grpo(almost_equal)).max() < 1e-9


def test_a_reward_that_is_not_a_number_stays_visible():
    assert np.isnan(grpo(np.array([1.0, float("nan")]))).all()


def test_groups_do_not_see_each_other():
    rewards, groups = np.array([1.0, 10.0, 0.0, 10.0]), ["a", "b", "a", "b"]
    assert compute_group_advantages(rewards, groups=groups, estimator=rloo).tolist() == [1.0, 0.0, -1.0, 0.0]


@pytest.mark.parametrize("seed", range(4))
def test_reinforce_pp_is_normalised_over_every_token_of_the_step(seed):
    rng = np.random.default_rng(seed)
    rewards, counts = rng.normal(2, 3, 12), rng.integers(1, 20, 12).tolist()
    episodes = [episode(f"math/{index // 4}", index, reward=float(value)) for index, value in enumerate(rewards)]
    found = compute_advantages(episodes, advantage="reinforce++", num_tokens_N=counts)
    np.testing.assert_allclose([row[0] for row in found], slow_normalised(rewards.tolist(), counts), rtol=1e-9)


@pytest.mark.parametrize("seed", range(4))
def test_reinforce_pp_with_a_baseline_subtracts_the_groups_mean_first(seed):
    rng = np.random.default_rng(seed)
    rewards, counts = rng.normal(2, 3, 12), rng.integers(1, 20, 12).tolist()
    episodes = [episode(f"math/{index // 4}", index, reward=float(value)) for index, value in enumerate(rewards)]
    compared = [value for start in (0, 4, 8) for value in slow_dr_grpo(rewards[start : start + 4].tolist())]
    found = compute_advantages(episodes, advantage="reinforce++-baseline", num_tokens_N=counts)
    np.testing.assert_allclose([row[0] for row in found], slow_normalised(compared, counts), rtol=1e-9)


@pytest.mark.parametrize("gamma", [1.0, 0.7, 0.0])
@pytest.mark.parametrize("seed", range(4))
def test_trloo_compares_each_turn_with_the_same_turn_of_the_others(seed, gamma):
    rng = np.random.default_rng(seed)
    played = [rng.normal(0, 1, rng.integers(1, 6)).tolist() for _ in range(6)]
    episodes = [episode(index=index, reward=sum(turns), turns=turns) for index, turns in enumerate(played)]
    for mine, slow in zip(
        compute_advantages(episodes, advantage="trloo", gamma=gamma), slow_trloo(played, gamma), strict=True
    ):
        np.testing.assert_allclose(mine, slow, atol=1e-12)


def test_a_turn_that_no_other_episode_reached_has_no_advantage():
    long, short = episode(index=0, reward=3.0, turns=(0.0, 3.0)), episode(index=1, reward=1.0, turns=(1.0,))
    assert [row.tolist() for row in compute_advantages([long, short], advantage="trloo")] == [[2.0, 0.0], [-2.0]]


def test_the_score_is_added_to_the_last_turn():
    assert compute_turn_rewards(episode(reward=5.0, turns=(1.0, 2.0))).tolist() == [1.0, 4.0]


@pytest.mark.parametrize("gamma", [1.0, 0.9])
@pytest.mark.parametrize("lam", [1.0, 0.95, 0.0])
def test_gae_agrees_with_the_sum_of_surprises(gamma, lam):
    rng = np.random.default_rng(3)
    lengths = [1, 7, 4, 10]
    values, rewards = rng.normal(size=(4, 10)), rng.normal(size=(4, 10))
    for row, length in enumerate(lengths):
        rewards[row, length:] = 0.0
    found = gae(values, rewards_BT=rewards, lengths_B=lengths, gamma=gamma, lam=lam)
    for row, length in enumerate(lengths):
        slow = slow_gae(values[row, :length].tolist(), rewards[row, :length].tolist(), gamma, lam)
        np.testing.assert_allclose(found[row, :length], slow, atol=1e-12)
        assert not found[row, length:].any()


@pytest.mark.parametrize("advantage", [*ESTIMATORS, "reinforce++-baseline", "trloo"])
@pytest.mark.parametrize("rewards", [[1.0], [0.5, 0.5, 0.5]], ids=["one member", "no variance"])
def test_a_group_without_a_signal_has_zero_advantages(advantage, rewards):
    episodes = [episode(index=index, reward=reward) for index, reward in enumerate(rewards)]
    assert all(row.tolist() == [0.0] for row in compute_advantages(episodes, advantage=advantage))


@pytest.mark.parametrize("advantage", ["grpo", "rloo", "dr-grpo", "trloo", "reinforce++"])
def test_a_score_that_is_not_a_number_stays_visible_in_its_group(advantage):
    episodes = [episode(index=0, reward=1.0), episode(index=1, reward=float("nan"))]
    assert any(np.isnan(row).any() for row in compute_advantages(episodes, advantage=advantage))


def test_examples_to_imitate_all_count_the_same():
    episodes = [msgspec.structs.replace(episode(index=index, turns=(0.0, 1.0)), reward=index) for index in range(3)]
    assert [row.tolist() for row in compute_advantages(episodes, advantage="sft")] == [[1.0, 1.0]] * 3
