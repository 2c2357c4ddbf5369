"""Rewards that env workers give themselves: of which functions, and what is left to reward workers."""

from pathlib import Path

import msgspec
import pytest

from hpcrl.rollout.quick_rewards import QuickScorer
from tests.support.campaign_spools import unscored
from tests.support.plans import make_recipe
from tests.support.trajectories import make_lake_trajectory

ENV = "tests.support.quick_code:QuickEnv"
QUICK = "tests.support.quick_code:count_turns"


def score(*settings, **changed):
    recipe = make_recipe(f"domains.lake.env={ENV}", *settings)
    trajectory = msgspec.structs.replace(unscored(make_lake_trajectory()), **changed)
    (scored,) = QuickScorer(recipe, model=Path("/model")).score([trajectory])
    return scored.reward


def test_a_marked_function_beside_its_environment_is_called():
    assert score(f"domains.lake.reward={QUICK}") == 2.0


def test_the_sum_of_the_environments_rewards_is_quick():
    assert score("domains.lake.reward=hpcrl.envs.base:env_reward") == 0.75


@pytest.mark.parametrize(
    "setting",
    [
        "domains.lake.reward=tests.support.quick_code:not_marked",
        "domains.lake.reward=tests.support.quick_code:count_in_list",
        "domains.lake.reward=tests.support.quick_code:count_later",
        "domains.lake.reward=tests.support.quick_code:read_text",
        "domains.lake.reward=tests.support.quick_code:fail",
        "domains.lake.reward=tests.support.many_rewards:index",
        "domains.lake.isolation=process",
        "rollout.curriculum=tests.support.curricula:favour",
    ],
)
def test_everything_else_is_left_to_reward_workers(setting):
    assert score(f"domains.lake.reward={QUICK}", setting) is None


def test_what_the_settings_of_a_domain_score_is_not_asked_of_its_function():
    reward = "domains.lake.reward=tests.support.quick_code:count_turns"
    assert score(reward, "domains.lake.on_timeout=-0.5", outcome="timeout", status="truncated") == -0.5


def test_a_fault_has_no_reward():
    assert score(f"domains.lake.reward={QUICK}", status="env-fault") is None
