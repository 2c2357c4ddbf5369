"""The contract of every shipped environment, plain and async alike."""

import asyncio
import math
import string

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpcrl.envs.arithmetic import Arithmetic
from hpcrl.envs.base import Step, adapt_env
from hpcrl.envs.gymnasium_text import Blackjack, FrozenLake, Taxi
from tests.support.episodes import play

MAX_OBSERVATION = 20
"""A number of characters: ten turns must fit into a tiny model's context with room to spare."""


class PlainLake:
    """A plain environment, as users write them."""

    def __init__(self):
        self._lake = FrozenLake()

    def reset(self, seed):
        return asyncio.run(self._lake.reset(seed))

    def step(self, action):
        return asyncio.run(self._lake.step(action))

    def close(self):
        asyncio.run(self._lake.close())


ENVS = {
    "lake": FrozenLake,
    "small lake": lambda: FrozenLake(map=["SFF", "FHF", "FFG"], start="random", show="position"),
    "random lake": lambda: FrozenLake(map="random", size=4, start="random"),
    "slippery lake": lambda: FrozenLake(map="8x8", slippery=True),
    "taxi": Taxi,
    "blackjack": Blackjack,
    "sums": Arithmetic,
    "sums without calculator": lambda: Arithmetic(num_terms=2, operators="+", calculator=False),
    "plain": PlainLake,
}
ACTIONS = ["L", "D", "R", "U", "P", "X", "", "?", "calc 1+2", "= 3", "\n\x00\u00e9"]


@pytest.fixture(params=ENVS, ids=lambda name: name.replace(" ", "-"))
def make(request):
    return ENVS[request.param]


def test_the_same_seed_and_actions_give_the_same_episode(make):
    assert play(adapt_env(make()), ACTIONS, seed=3) == play(adapt_env(make()), ACTIONS, seed=3)


def test_an_environment_can_be_used_again(make):
    env = adapt_env(make())
    once = play(env, ACTIONS, seed=3)
    play(env, ACTIONS, seed=4)
    assert play(env, ACTIONS, seed=3) == once


def test_two_environments_are_independent(make):
    async def run():
        one, other = adapt_env(make()), adapt_env(make())
        first = await one.reset(3)
        await other.reset(4)
        step = await one.step("R")
        await one.close()
        await other.close()
        return first, step

    first, step = asyncio.run(run())
    assert (first, [step]) == play(adapt_env(make()), ["R"], seed=3)


def test_closing_before_the_first_reset_is_allowed(make):
    asyncio.run(adapt_env(make()).close())


@given(actions=st.lists(st.sampled_from(ACTIONS) | st.text(max_size=30), max_size=12), seed=st.integers(0, 2**31 - 1))
@settings(max_examples=15, deadline=None)
@pytest.mark.parametrize("name", ENVS)
def test_any_text_of_the_model_is_an_ordinary_step(name, actions, seed):
    first, steps = play(adapt_env(ENVS[name]()), actions, seed=seed)
    assert isinstance(first, str)
    for step in steps:
        assert isinstance(step, Step)
        assert math.isfinite(step.reward)
        assert len(step.observation) <= MAX_OBSERVATION or "calc" in "".join(actions)
        assert set(step.observation) <= set(string.printable)


@given(actions=st.lists(st.sampled_from(["L", "D", "R", "U", "P", "X", "?"]), max_size=40), seed=st.integers(0, 2**31))
@settings(max_examples=30, deadline=None)
@pytest.mark.parametrize("name", ["lake", "small lake", "random lake", "slippery lake", "taxi"])
def test_an_episode_earns_at_most_one_and_only_success_earns_that(name, actions, seed):
    _, steps = play(adapt_env(ENVS[name]()), actions, seed=seed)
    earned = sum(step.reward for step in steps)
    solved = bool(steps) and steps[-1].reward > 0.5
    assert earned <= 1 + 1e-9
    assert solved == (bool(steps) and earned + 0.05 * sum(step.reward == -0.05 for step in steps) > 1 - 1e-9)
