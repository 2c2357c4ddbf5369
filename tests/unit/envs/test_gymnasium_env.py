"""Environments of Gymnasium by their ids: what the model sees, how its text becomes an action, and what is refused."""

import asyncio

import pytest
from gymnasium import Env, spaces
from gymnasium.envs.registration import register

from hpcrl.envs.gymnasium_env import GymnasiumEnv
from hpcrl.errors import ConfigError

CLIFF = {"id": "CliffWalking-v1", "actions": ["up", "right", "down", "left"]}


class TextEnv(Env):
    """An environment whose actions are texts, and which ends when time is up."""

    action_space, observation_space = spaces.Text(4, charset="ab"), spaces.Dict({"left": spaces.Discrete(9)})

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return {"left": self.np_random.integers(9)}, {}

    def step(self, action):
        return {"left": 0}, len(action), False, True, {}


register("HpcrlText-v0", TextEnv, disable_env_checker=True)


def play(*answers, **options):
    """Return the first observation, and the steps."""

    async def run():
        env = GymnasiumEnv(**options)
        first, steps = await env.reset(3), [await env.step(answer) for answer in answers]
        await env.close()
        return first, steps

    return asyncio.run(run())


def test_an_environment_that_draws_text_is_seen_as_it_draws():
    first, steps = play("First I go up.", "RIGHT? No: left", **CLIFF)
    assert first.splitlines()[0] == "An action is one of up, right, down, left."
    assert first.splitlines()[-1] == "x  C  C  C  C  C  C  C  C  C  C  T"
    assert [step.observation.splitlines()[2][0] for step in steps] == ["x", "x"]
    assert [step.reward for step in steps] == [-1.0, -1.0]


def test_the_same_seed_is_the_same_task():
    assert play(id="CartPole-v1") == play(id="CartPole-v1")


@pytest.mark.parametrize("text", ["nothing", "", "1.5", "-1", "12"])
def test_an_answer_without_an_action_repeats_what_is_seen(text):
    first, (step,) = play(text, id="Blackjack-v1")
    assert (step.observation, step.reward, step.done) == (first, -0.05, False)


@pytest.mark.parametrize("text", ["[9]", "[]", "[NaN]", "[1, 1]", "[x]", "[1e999]", "1"])
def test_numbers_outside_the_space_give_no_action(text):
    first, (step,) = play(text, id="Pendulum-v1")
    assert first.startswith("An action is a list of 1 numbers, such as [0.0].")
    assert step.reward == -0.05


def test_numbers_inside_the_space_are_an_action():
    first, (step,) = play("I push: [0.5]", id="Pendulum-v1")
    assert step.reward < -0.05
    assert step.observation not in first


def test_a_text_may_be_the_action_and_time_that_is_up_ends_the_episode():
    _, (bad, good) = play("xyz", "ab", id="HpcrlText-v0")
    assert (bad.reward, bad.done) == (-0.05, False)
    assert (good.observation, good.reward, good.done) == ('{"left": 0}', 2.0, True)


def test_an_instruction_replaces_the_line_on_actions():
    first, _ = play(**CLIFF, instruction="Reach T.")
    assert first.startswith("Reach T.\no ")
    assert play(**CLIFF, instruction="")[0].startswith("o ")


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"id": "Nope-v0"}, "doesn't exist"),
        ({"id": "no_such_package:Nope-v0"}, "No module named 'no_such_package'"),
        ({"id": "CliffWalking-v1", "colour": 1}, "unexpected keyword argument 'colour'"),
        ({"id": "CliffWalking-v1", "actions": ["up", "down"]}, "give 4 different names"),
        ({"id": "CliffWalking-v1", "actions": ["a", "b", "c", "A"]}, "give 4 different names"),
        ({"id": "Pendulum-v1", "actions": ["push"]}, "have no names"),
    ],
)
def test_what_cannot_be_made_is_refused_with_the_reason(options, reason):
    with pytest.raises(ConfigError, match=reason):
        GymnasiumEnv(**options)
