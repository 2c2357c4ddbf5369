"""Rewards of turns and tokens: what a function may return for them, where they go, and what is refused in one line."""

import math

import numpy as np
import pytest

from hpcrl.config.recipe import DomainConfig
from hpcrl.errors import SpoolError
from hpcrl.learn.advantage import compute_turn_rewards
from hpcrl.rollout.rewards import RewardCaller, apply_score
from hpcrl.spool.record import EpisodeTurn, attach_columns, pack_trajectory, parse_facts
from tests.support.trajectories import make_trajectory

NUM_TOKENS = 6


def episode():
    """Make an episode of two turns: the model generated tokens 1 and 2, then 4 and 5."""
    turns = [EpisodeTurn(start=1, end=3, reward=0.5), EpisodeTurn(start=4, end=6, reward=0.25)]
    return make_trajectory(loss_mask=[False, True, True, False, True, True], turns=turns)


def score(value, unit, *, takes_list=False):
    caller = RewardCaller(function=lambda given: value, takes_list=takes_list, is_async=False, unit=unit)
    (found,) = caller.read_scores(value, [episode()])
    return found


def scored(value, unit):
    domain = DomainConfig(env="package.module:Env", reward="package.module:score", reward_unit=unit)
    return apply_score(episode(), domain, score(value, unit))


@pytest.mark.parametrize("value", [[1.0, -2], (1, -2.0), np.array([1.0, -2.0])])
def test_rewards_of_turns_take_the_place_of_the_environments(value):
    found = scored(value, "turn")
    assert ([turn.reward for turn in found.turns], found.reward) == ([1.0, -2.0], -1.0)
    assert compute_turn_rewards(found).tolist() == [1.0, -2.0]
    assert found.reward_parts == {"reward": -1.0}


def test_rewards_of_tokens_belong_to_the_tokens_of_their_turn():
    found = scored([0, 1.0, 0.5, 0, 0, 0], "token")
    assert [turn.token_rewards for turn in found.turns] == [[1.0, 0.5], []]
    assert ([turn.reward for turn in found.turns], found.reward) == ([1.5, 0.0], 1.5)


def test_rewards_of_tokens_are_stored():
    found = scored([0, 1.0, 0.5, 0, 0, 0.25], "token")
    packed = pack_trajectory(found)
    again = attach_columns(parse_facts(packed.facts), packed.columns)
    assert again.turns == found.turns


def test_rewards_of_more_tokens_than_a_turn_has_are_not_stored():
    turns = [EpisodeTurn(start=1, end=3, token_rewards=[1.0])]
    with pytest.raises(SpoolError, match="a turn from 1 to 3 has 1 token_rewards"):
        pack_trajectory(make_trajectory(num_tokens=6, turns=turns))


@pytest.mark.parametrize(
    ("value", "complaint"),
    [
        (1.0, "it returned 1.0: reward_unit = "),
        (None, "it returned None: "),
        ("1.0, 2.0", "it returned '1.0, 2.0': "),
        ({"a": 1.0}, "it returned {'a': 1.0}: "),
        ([], "it returned 0 numbers: "),
        ([1.0] * 1000, "it returned 1000 numbers: "),
        ([math.nan] * 6, "it returned nan for "),
        ([0.0, math.inf, 0, 0, 0, 0], "inf for "),
        (["1"] * 6, "it returned '1' for "),
        ([None] * 6, "it returned None for "),
        ([[1.0]] * 6, "it returned [1.0] for "),
        ([10**400] * 6, " for "),
        ([0, 6e5, 6e5, 0, 0, 0], "whose sum is 1.2e+06"),
        ([0, 1e39, 0, 0, 0, 0], "it returned 1e+39 for "),
    ],
)
@pytest.mark.parametrize("unit", ["turn", "token"])
def test_what_is_not_a_reward_for_each_is_named_in_one_line(unit, value, complaint):
    if unit == "turn" and isinstance(value, list) and len(value) == NUM_TOKENS:
        value = [item for item in value if item != 0][:2]
        value += value[: 2 - len(value)]
    found = score(value, unit)
    assert complaint in found.error
    assert f'reward_unit = "{unit}" is a list of {2 if unit == "turn" else 6} numbers' in found.error
    assert "\n" not in found.error
    assert len(found.error) < 500
    assert found.each == []


def test_a_token_that_the_model_did_not_generate_has_no_reward():
    assert "token 3, which no turn generated: return 0 there" in score([0, 0, 0, 2.0, 0, 1.0], "token").error


@pytest.mark.parametrize("value", [math.nan, 1e39, "1", [1.0, 2.0], None, {}, {"a": 1e39, "b": -1e39}])
def test_what_is_not_a_reward_of_an_episode_is_named_in_one_line(value):
    assert score(value, "episode").error.startswith(f"it returned {value!r}: a reward is a finite number")


def test_one_bad_value_of_a_list_costs_its_trajectory_only():
    caller = RewardCaller(function=list, takes_list=True, is_async=False, unit="turn")
    good, bad = caller.read_scores([[1.0, 2.0], [1.0]], [episode(), episode()])
    assert (good.each, good.error) == ([1.0, 2.0], "")
    assert "it returned 1 numbers" in bad.error
