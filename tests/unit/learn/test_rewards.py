"""Rewards before they are compared: punished for length, filtered, and in units of their domain."""

import math

import numpy as np
import pytest

from hpcrl.config.recipe import TrainConfig
from hpcrl.learn.pipeline import compute_credits
from hpcrl.learn.rewards import compute_length_cost, find_overlong, shape_rewards
from hpcrl.spool.record import EpisodeTurn
from tests.support.plans import make_recipe
from tests.support.trajectories import make_trajectory


def settings(**changed):
    return TrainConfig(num_steps=1, groups_per_step=1, learning_rate=1.0, **changed)


def episode(index, *, length=4, domain="math", **changed):
    turns = [EpisodeTurn(start=1, end=length + 1, reward=0.5)]
    facts = {"turns": turns, "reward": 1.0, "loss_mask": np.arange(length + 1) > 0, **changed}
    return make_trajectory(f"{domain}/0/{index}", **facts)


@pytest.mark.parametrize(("num_tokens", "cost"), [(0, 0.0), (16384, 0.0), (18432, 0.5), (20480, 1.0), (30000, 1.0)])
def test_the_soft_punishment_has_the_numbers_of_the_paper(num_tokens, cost):
    assert compute_length_cost(num_tokens, budget=20480, margin=0.2) == pytest.approx(cost)


def test_without_a_margin_what_reaches_the_budget_costs():
    assert [compute_length_cost(num, budget=4, margin=0.0) for num in (3, 4, 5)] == [0.0, 1.0, 1.0]


def test_a_long_episode_is_punished_and_an_unscored_one_left_as_it_is():
    train = settings(overlong="punish", overlong_margin=0.5, response_budget={"math": 8})
    shaped = shape_rewards([episode(0), episode(1, length=6), episode(2, length=8), episode(3, reward=None)], train)
    assert [one.reward for one in shaped] == [1.0, 0.5, 0.0, None]


def test_episodes_at_the_budget_and_truncated_ones_are_overlong():
    episodes = [episode(0, length=7), episode(1, length=8), episode(2, length=2, status="truncated")]
    assert find_overlong(episodes, settings(overlong="filter", response_budget={"math": 8})) == {1, 2}
    assert find_overlong(episodes, settings(response_budget={"math": 8})) == set()


def test_domains_of_different_scales_weigh_the_same():
    episodes = [episode(i, domain=name, reward=scale * i) for name, scale in (("a", 1), ("b", 100)) for i in range(4)]
    shaped = shape_rewards(episodes, settings(reward_scale="domain"))
    assert [one.reward for one in shaped[:4]] == pytest.approx([one.reward for one in shaped[4:]])
    assert np.std([one.reward for one in shaped[:4]]) == pytest.approx(1.0)
    assert shaped[4].turns[0].reward == pytest.approx(0.5 / np.std([0, 100, 200, 300]))


@pytest.mark.parametrize("advantage", ["dr-grpo", "rloo", "grpo", "reinforce++-baseline", "trloo"])
def test_rewards_that_differ_by_rounding_give_no_advantage(advantage):
    episodes = [episode(index, reward=reward, turns=[]) for index, reward in enumerate([0.1 + 0.2, 0.3, 0.3, 0.3])]
    credits = compute_credits(episodes, settings(advantage=advantage, reward_scale="domain"))
    assert [credit.tolist() for credit in credits] == [[0.0]] * 4


def test_a_domain_with_equal_rewards_keeps_them():
    assert [one.reward for one in shape_rewards([episode(0), episode(1)], settings(reward_scale="domain"))] == [
        1.0,
        1.0,
    ]


def test_a_reward_that_is_not_a_number_stays_visible():
    shaped = shape_rewards([episode(0), episode(1, reward=math.nan)], settings(reward_scale="domain"))
    assert any(math.isnan(one.reward) for one in shaped)


def test_the_response_budget_is_by_default_what_a_domain_may_generate():
    settings = ("domains.lake.max_turns=6", "domains.lake.max_new_tokens=50")
    assert make_recipe(*settings).train.response_budget == {"lake": 300}
    own = (*settings, "train.response_budget.lake=120")
    assert make_recipe(*own).train.response_budget == {"lake": 120}
