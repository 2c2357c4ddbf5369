"""Advantages against slow references written from the papers."""

import math

import numpy as np
import pytest

from hpcrl.learn.advantage import ESTIMATORS, group_advantages, grpo, rloo


def slow_grpo(rewards):
    mean = sum(rewards) / len(rewards)
    std = math.sqrt(sum((reward - mean) ** 2 for reward in rewards) / len(rewards))
    return [(reward - mean) / (std + 1e-6) for reward in rewards]


def slow_rloo(rewards):
    advantages = []
    for index, reward in enumerate(rewards):
        others = rewards[:index] + rewards[index + 1 :]
        advantages.append(reward - sum(others) / len(others))
    return advantages


@pytest.mark.parametrize(("fast", "slow"), [(grpo, slow_grpo), (rloo, slow_rloo)])
@pytest.mark.parametrize("size", [2, 3, 8, 33])
def test_an_estimator_agrees_with_its_slow_reference(fast, slow, size):
    rewards = np.random.default_rng(size).normal(3, 5, size)
    np.testing.assert_allclose(fast(rewards), slow(rewards.tolist()), rtol=1e-10)


@pytest.mark.parametrize("estimator", ESTIMATORS.values(), ids=ESTIMATORS)
@pytest.mark.parametrize("rewards", [[0.1] * 7, [0.3], [0.0, 0.0]])
def test_a_group_without_differences_gets_exact_zeros(estimator, rewards):
    assert estimator(np.array(rewards)).tolist() == [0.0] * len(rewards)


def test_rewards_that_differ_by_rounding_alone_are_not_blown_up():
    almost_equal = np.array([0.3, 0.1 + 0.2, 0.3])
    assert np.abs(grpo(almost_equal)).max() < 1e-9


def test_a_reward_that_is_not_a_number_stays_visible():
    assert np.isnan(grpo(np.array([1.0, float("nan")]))).all()


def test_groups_do_not_see_each_other():
    rewards, groups = np.array([1.0, 10.0, 0.0, 10.0]), ["a", "b", "a", "b"]
    assert group_advantages(rewards, groups=groups, estimator=rloo).tolist() == [1.0, 0.0, -1.0, 0.0]
