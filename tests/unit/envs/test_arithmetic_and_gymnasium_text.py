"""The tasks and rewards of the shipped environments."""

import asyncio
import threading
from typing import ClassVar

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcrl.config.user_code import load_code
from hpcrl.envs.arithmetic import Arithmetic, correct, evaluate_expression
from hpcrl.envs.base import OwnThread, Step, adapt_env, construct_env, env_reward, make_env_in_thread
from hpcrl.envs.gymnasium_text import INVALID_COST, FrozenLake, Taxi, goal_and_way, success
from hpcrl.errors import ConfigError
from hpcrl.spool.record import EpisodeTurn
from tests.support.episodes import play
from tests.support.trajectories import make_trajectory

SMALL = {"map": ["SFF", "FHF", "FFG"], "show": "position"}


def recorded(steps):
    turns = [EpisodeTurn(start=i, end=i + 1, reward=step.reward) for i, step in enumerate(steps)]
    return make_trajectory("lake/0/0", len(steps), turns=turns)


class TestFrozenLake:
    def test_the_shortest_way_earns_one(self):
        first, steps = play(FrozenLake(**SMALL), "DDRR")
        assert first == "a1"
        assert [step.observation for step in steps] == ["a2", "a3", "b3", "c3"]
        assert steps[-1].done
        assert env_reward(recorded(steps)) == pytest.approx(1)
        assert success(recorded(steps)) == 1
        assert goal_and_way(recorded(steps)) == {"goal": 0.5, "way": pytest.approx(0.5)}

    def test_a_detour_earns_the_same(self):
        _, steps = play(FrozenLake(**SMALL), "RLDUDDRR")
        assert env_reward(recorded(steps)) == pytest.approx(1)

    def test_half_the_way_earns_half_of_its_share(self):
        _, steps = play(FrozenLake(**SMALL), "DD")
        assert env_reward(recorded(steps)) == pytest.approx(0.25)
        assert success(recorded(steps)) == 0

    def test_a_hole_takes_back_the_way(self):
        _, steps = play(FrozenLake(**SMALL), "DR")
        assert steps[-1].done
        assert env_reward(recorded(steps)) == pytest.approx(0)
        assert success(recorded(steps)) == 0

    def test_text_without_an_action_costs_the_turn_and_leaves_the_state(self):
        _, (step,) = play(FrozenLake(**SMALL), ["7 ?"])
        assert step == Step(observation="?a1", reward=-INVALID_COST, done=False)

    def test_the_first_valid_letter_counts_in_either_case(self):
        _, (step,) = play(FrozenLake(**SMALL), ["go right"])
        assert step.observation == "b1"

    def test_the_lake_is_shown_once(self):
        first, (step,) = play(FrozenLake(map="4x4"), "R")
        assert first == "FFFF/FHFH/FFFH/HFFG a1"
        assert step.observation == "b1"

    def test_the_same_seed_is_the_same_task_and_others_differ(self):
        env = FrozenLake(map="random", size=5)
        lakes = [play(env, "", seed=seed)[0] for seed in (1, 2, 3, 1)]
        assert lakes[0] == lakes[3]
        assert len(set(lakes)) == 3

    def test_random_starts_are_on_ice_from_which_the_goal_can_be_reached(self):
        cut_off = FrozenLake(map=["SFG", "HHH", "FFF"], start="random", show="position")
        assert {play(cut_off, "", seed=seed)[0] for seed in range(30)} == {"a1", "b1"}

    def test_slippery_ice_follows_the_seed(self):
        def steps(seed):
            return play(FrozenLake(map="8x8", slippery=True), "RDRDRDRDRD", seed=seed)[1]

        assert steps(1) == steps(1)
        assert any(steps(1) != steps(seed) for seed in range(2, 6))

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"map": "5x5"}, "4x4, 8x8, random"),
            ({"map": ["SF", "FFG"]}, "rows must have one length"),
            ({"map": []}, "rows must have one length"),
            ({"map": ["SX", "FG"]}, "letters F H G"),
            ({"map": ["SS", "FG"]}, "exactly once"),
            ({"map": ["SH", "HG"]}, "no G can be reached"),
            ({"size": 1, "map": "random"}, "2 to 20"),
            ({"start": "anywhere"}, "'fixed' or 'random'"),
            ({"show": "all"}, "'lake' or 'position'"),
        ],
    )
    def test_bad_options_are_refused_with_a_hint(self, options, message):
        with pytest.raises(ConfigError, match=message):
            FrozenLake(**options)


class TestTaxi:
    def test_an_observation_shows_place_errand_and_open_ways(self):
        first, _ = play(Taxi(), "", seed=4)
        assert first == "d5 Y>R RU"

    def test_setting_the_passenger_down_at_the_destination_is_success(self):
        _, steps = play(Taxi(), "UULLL" + "DDP" + "UUUU" + "X", seed=4)
        assert steps[-1].done
        assert success(recorded(steps)) == 1
        assert env_reward(recorded(steps)) == pytest.approx(1)

    def test_a_passenger_in_the_taxi_is_shown_by_a_star(self):
        _, steps = play(Taxi(), "UULLLDDP", seed=4)
        assert steps[-1].observation == "a5 *>R U"

    def test_picking_up_without_a_passenger_changes_nothing(self):
        first, (step,) = play(Taxi(), "P", seed=4)
        assert step == Step(observation=first, reward=0.0, done=False)

    def test_text_without_an_action_costs_the_turn(self):
        first, (step,) = play(Taxi(), ["?"], seed=4)
        assert step == Step(observation=f"?{first}", reward=-INVALID_COST, done=False)


class TestArithmetic:
    def test_a_right_answer_earns_one_and_ends(self):
        asked, _ = play(Arithmetic(), "", seed=3)
        value = evaluate_expression(asked.removesuffix("=?"))
        _, (step,) = play(Arithmetic(), [f"= {value}"], seed=3)
        assert step == Step(observation="right", reward=1.0, done=True)
        assert correct(recorded([step])) == 1

    def test_a_wrong_answer_earns_the_format_credit(self):
        _, (step,) = play(Arithmetic(format_credit=0.2), ["=99999"])
        assert step == Step(observation="wrong", reward=0.2, done=True)
        assert correct(recorded([step])) == 0

    def test_the_calculator_answers_and_the_episode_continues(self):
        _, (step,) = play(Arithmetic(), ["calc (2+3)*4"])
        assert step == Step(observation="20", reward=0.0, done=False)

    def test_without_a_calculator_a_call_is_not_an_answer(self):
        _, (step,) = play(Arithmetic(calculator=False), ["calc 1+1"])
        assert step == Step(observation="say =3", reward=-0.05, done=False)

    @pytest.mark.parametrize("action", ["", "hello", "5*3", "1.5", "calc 1/0", "calc", "=--3"])
    def test_text_that_is_neither_call_nor_answer_costs_the_turn(self, action):
        _, (step,) = play(Arithmetic(), [action])
        assert step.reward == -0.05
        assert not step.done

    @pytest.mark.parametrize(
        "options",
        [
            {"num_terms": 1},
            {"max_operand": 0},
            {"operators": "/"},
            {"operators": ""},
            {"format_credit": 1},
            {"invalid_cost": -1},
        ],
    )
    def test_bad_options_are_refused(self, options):
        with pytest.raises(ConfigError, match=next(iter(options))):
            Arithmetic(**options)

    @given(
        st.recursive(
            st.integers(0, 99).map(str),
            lambda inner: st.tuples(inner, st.sampled_from("+-*"), inner).map("".join) | inner.map("({})".format),
            max_leaves=12,
        )
    )
    def test_the_calculator_agrees_with_python(self, expression):
        if len(expression) <= 64:
            python = eval(expression)  # digits, + - * and brackets made above
            assert evaluate_expression(expression) == python

    @given(st.text(max_size=80) | st.text(alphabet="0123456789+-*() ", max_size=80))
    def test_the_calculator_answers_anything_with_a_number_or_a_reason(self, expression):
        try:
            answer = str(evaluate_expression(expression))
        except ValueError as error:
            answer = str(error)
        assert answer.removeprefix("-").isdecimal() or answer in ("too long", "only digits + - * ( )", "not a sum")


class TestMaking:
    def test_an_environment_is_made_from_its_name_and_options(self):
        env = adapt_env(construct_env("hpcrl.envs.gymnasium_text:FrozenLake", SMALL, what="domains.lake.env"))
        assert play(env, "D")[0] == "a1"

    @pytest.mark.parametrize(
        ("name", "options", "message"),
        [
            ("no_such_module:Env", {}, "importing no_such_module failed"),
            ("hpcrl.envs.arithmetic:Arithmetics", {}, "did you mean 'Arithmetic'. it defines .*Arithmetic"),
            (
                "hpcrl.envs.repair:NamedTuple_",
                {},
                "it defines BrokenFunction, Repair, draw_broken_function, rerun_tests",
            ),
            ("hpcrl.envs.repair:mended", {}, "is now called 'hpcrl.envs.repair:rerun_tests': use the new name"),
            ("hpcrl.envs.arithmetic:Arithmetic", {"terms": 3}, "has no option 'terms': did you mean 'num_terms'"),
            ("hpcrl.envs.arithmetic:Arithmetic", {"num_terms": 1}, "num_terms = 1"),
            ("builtins:dict", {}, "builtins:dict has no reset and no step and no close"),
        ],
    )
    def test_an_environment_that_cannot_be_made_is_a_config_error(self, name, options, message):
        with pytest.raises(ConfigError, match=message):
            adapt_env(construct_env(name, options, what="domains.x.env"))

    def test_plain_and_async_methods_do_not_mix(self):
        class Mixed:
            def reset(self, seed): ...
            async def step(self, action): ...
            def close(self): ...

        with pytest.raises(ConfigError, match="mixes plain and async"):
            adapt_env(Mixed())

    def test_a_named_reward_is_loaded(self):
        assert load_code("hpcrl.envs.base:env_reward", what="domains.x.reward") is env_reward


class Plain:
    """A plain environment that records the thread it runs in."""

    def __init__(self):
        self.threads = set()
        self.freed = threading.Event()
        self.closed = threading.Event()

    def reset(self, seed):
        self.threads.add(threading.current_thread())
        return str(seed)

    def step(self, action):
        self.threads.add(threading.current_thread())
        if action == "hang":
            self.freed.wait()
        if action == "leave":
            raise SystemExit(3)
        if action == "stop":
            raise StopIteration
        return Step(observation=action)

    def close(self):
        self.closed.set()


class TestPlainEnvironments:
    def test_calls_run_in_one_separate_thread(self):
        plain = Plain()
        assert play(adapt_env(plain), ["a", "b"], seed=5)[0] == "5"
        assert len(plain.threads) == 1
        assert threading.current_thread() not in plain.threads
        assert all(thread.daemon for thread in plain.threads)

    def test_the_thread_ends_with_the_environment(self):
        plain = Plain()
        play(adapt_env(plain), ["a"])
        (thread,) = plain.threads
        thread.join(10)
        assert not thread.is_alive()

    def test_it_can_be_used_again_after_closing(self):
        env = adapt_env(Plain())
        assert play(env, ["a"], seed=1)[0] == "1"
        assert play(env, ["a"], seed=2)[0] == "2"

    @pytest.mark.parametrize("action", ["leave", "stop"])
    def test_leaving_the_process_is_an_error_of_the_step(self, action):
        with pytest.raises(RuntimeError, match=r"SystemExit|StopIteration"):
            play(adapt_env(Plain()), [action])

    def test_closing_does_not_wait_for_a_step_that_hangs(self):
        plain = Plain()

        async def run():
            env = adapt_env(plain)
            await env.reset(0)
            hung = asyncio.ensure_future(env.step("hang"))
            await asyncio.sleep(0)
            await env.close()
            assert plain.closed.is_set()
            assert not hung.done()
            plain.freed.set()
            await hung

        asyncio.run(run())


class NotedEnv:
    """An async environment that notes the threads that have made one."""

    threads: ClassVar[list[threading.Thread]] = []
    barrier: ClassVar[threading.Barrier | None] = None

    def __init__(self):
        if self.barrier is not None:
            self.barrier.wait(10)
        self.threads.append(threading.current_thread())

    async def reset(self, seed):
        return str(seed)

    async def step(self, action):
        return Step(observation=action)

    async def close(self): ...


def make_noted(num, *, at_once=False):
    """Return the threads in which environments are made."""
    NotedEnv.threads, NotedEnv.barrier = [], threading.Barrier(num) if at_once else None
    name = f"{__name__}:NotedEnv"

    async def run():
        calls = [make_env_in_thread(name, {}, what="env") for _ in range(num)]
        if at_once:
            await asyncio.gather(*calls)
        else:
            for call in calls:
                await call

    asyncio.run(run())
    return NotedEnv.threads


def test_async_environments_are_made_in_one_thread_after_the_other_and_in_several_at_once():
    assert len(set(make_noted(5))) == 1
    assert len(set(make_noted(3, at_once=True))) == 3


def test_a_plain_environment_shares_its_thread_with_none_that_is_made_later():
    plain = adapt_env(Plain(), thread=OwnThread())
    first, _ = play(plain, ["a"])
    assert first
    (thread,) = plain._env.threads
    assert thread not in make_noted(3)


def test_a_step_is_plain_data():
    step = Step(observation="a", reward=0.5, done=True)
    assert msgspec.json.decode(msgspec.json.encode(step), type=Step) == step
