"""The adapters, with the real packages: the same seed is the same task, and episodes end as in the package."""

import asyncio
import importlib.util
import random

import pytest

from hpcrl.envs.base import adapt_env
from hpcrl.errors import ConfigError


def needs(package):
    missing = importlib.util.find_spec(package) is None
    return pytest.mark.skipif(missing, reason=f"needs the package {package}")


def play(env, act, *, seed=3, turns=40):
    """Return the observations and the steps of an episode whose actions are `act(observation)`."""

    async def run():
        seen, steps = [await env.reset(seed)], []
        while len(steps) < turns and not (steps and steps[-1].done):
            steps.append(await env.step(act(seen[-1])))
            seen.append(steps[-1].observation)
        await env.close()
        return seen, steps

    return asyncio.run(run())


def alone_and_beside_another(make, act):
    """Return an episode alone, and the same one interleaved with one of another seed."""

    async def run():
        one, other = make(), make()
        seen, steps = [await one.reset(3)], []
        await other.reset(4)
        while len(steps) < 40 and not (steps and steps[-1].done):
            random.random()
            steps.append(await one.step(act(seen[-1])))
            seen.append(steps[-1].observation)
        return seen, steps

    return play(make(), act), asyncio.run(run())


@needs("reasoning_gym")
class TestReasoningGym:
    def make(self, **options):
        from hpcrl.envs.reasoning_gym import ReasoningGym

        return ReasoningGym(**({"task": "basic_arithmetic"} | options))

    def test_a_right_answer_earns_one_and_ends(self):
        import reasoning_gym

        seen, steps = play(
            self.make(), lambda _: reasoning_gym.create_dataset("basic_arithmetic", size=1, seed=3)[0]["answer"]
        )
        assert seen[0].startswith("Calculate")
        assert [(step.reward, step.done) for step in steps] == [(1.0, True)]

    def test_an_answer_may_be_in_tags(self):
        from hpcrl.envs.reasoning_gym import extract_answer

        assert extract_answer("so <answer>1</answer> no, <answer> 12\n</answer>.") == "12"

    def test_nonsense_earns_less_than_the_answer(self):
        _, (step,) = play(self.make(), lambda _: "no idea")
        assert step.reward < 1

    @pytest.mark.parametrize("task", ["leg_counting", "gcd", "countdown", "mini_sudoku", "word_ladder"])
    def test_the_same_seed_is_the_same_question_and_others_differ(self, task):
        once, _ = play(self.make(task=task), lambda _: "")
        again, _ = play(self.make(task=task), lambda _: "")
        other, _ = play(self.make(task=task), lambda _: "", seed=4)
        assert once == again
        assert once[0] != other[0]

    def test_an_unknown_task_is_refused(self):
        with pytest.raises(ConfigError, match="no_such_task"):
            self.make(task="no_such_task")


@needs("textarena")
class TestTextArena:
    def make(self, **options):
        from hpcrl.envs.textarena import TextArena

        return TextArena(**({"game": "TicTacToe-v0-train", "num_players": 2} | options))

    @staticmethod
    def first_move(seen):
        from hpcrl.envs.textarena import find_moves

        return find_moves(seen)[0]

    @pytest.mark.parametrize("seat", [0, 1])
    def test_a_game_against_an_opponent_is_played_to_its_end(self, seat):
        _, steps = play(self.make(seat=seat), self.first_move)
        assert steps[-1].done
        assert steps[-1].reward in (-1.0, 0.0, 1.0)
        assert all(step.reward == 0 for step in steps[:-1])

    def test_the_same_seed_is_the_same_game_also_beside_others(self):
        alone, beside = alone_and_beside_another(self.make, self.first_move)
        assert alone == beside

    def test_random_opponents_play_other_games_for_other_seeds(self):
        games = {str(play(self.make(), self.first_move, seed=seed)) for seed in range(6)}
        assert len(games) > 1

    def test_a_move_without_brackets_can_be_given_them(self):
        _, steps = play(self.make(bracketed=True), lambda _: "4", turns=1)
        assert not steps[0].done

    def test_a_game_for_one_needs_no_opponent(self):
        _, steps = play(self.make(game="GuessTheNumber-v0-train", num_players=1), lambda _: "[7]")
        assert steps[-1].done

    def test_an_unknown_game_is_refused(self):
        with pytest.raises(ConfigError, match="NoSuchGame"):
            self.make(game="NoSuchGame-v0")

    def test_a_seat_beyond_the_players_is_refused(self):
        with pytest.raises(ConfigError, match="seat = 2"):
            self.make(seat=2)


@needs("gem")
class TestGem:
    def make(self, **options):
        from hpcrl.envs.gem import Gem

        return Gem(**({"id": "game:GuessTheNumber-v0-easy"} | options))

    def test_a_game_is_played_to_its_end(self):
        guesses = iter(range(1, 99))
        _, steps = play(self.make(), lambda _: f"\\boxed{{{next(guesses)}}}")
        assert steps[-1].done

    def test_the_same_seed_is_the_same_game_also_beside_others(self):
        alone, beside = alone_and_beside_another(self.make, lambda _: "\\boxed{3}")
        assert alone == beside

    def test_an_unknown_id_is_refused(self):
        with pytest.raises(ConfigError, match="no:such"):
            self.make(id="no:such")


def echo_and_stop(**options):
    """Return a two-turn environment of verifiers, whose reward is 1 if the last message is the answer."""
    import verifiers
    from datasets import Dataset

    class Twice(verifiers.MultiTurnEnv):
        async def env_response(self, messages, state, **kwargs):
            return [{"role": "user", "content": f"you sent {messages[-1]['content']}; again?"}]

    def right(completion, answer, **kwargs):
        return float(completion[-1]["content"] == answer)

    rows = Dataset.from_list([{"question": f"answer {word}", "answer": word} for word in ("red", "blue")])
    return Twice(max_turns=2, dataset=rows, rubric=verifiers.Rubric(funcs=[right]), **options)


@needs("verifiers")
class TestVerifiers:
    def make(self):
        from hpcrl.envs.verifiers import Verifiers

        return Verifiers(id="tests.contract.test_env_families:echo_and_stop")

    def test_an_episode_is_scored_by_its_rubric(self):
        words = iter(["green", "blue"])
        seen, steps = play(self.make(), lambda _: next(words), seed=1)
        assert "answer blue" in seen[0]
        assert steps[0].observation == "you sent green; again?"
        assert [(step.reward, step.done) for step in steps] == [(0.0, False), (1.0, True)]

    def test_a_wrong_answer_earns_nothing(self):
        _, steps = play(self.make(), lambda _: "mauve")
        assert steps[-1].reward == 0


@needs("openenv")
class TestOpenEnv:
    @pytest.fixture
    def url(self):
        """Run a real OpenEnv server in a thread, with an environment defined here."""
        import socket
        import threading

        import uvicorn
        from openenv.core.env_server import Action, Environment, Observation, State, create_app

        class Message(Action):
            message: str

        class Text(Observation):
            text: str = ""

        class Countdown(Environment):
            def __init__(self):
                super().__init__()
                self._left = 0

            def reset(self, seed=None, **kwargs):
                self._left = 1 + (seed or 0) % 3
                return Text(text=f"{self._left} left", done=False)

            def step(self, action, **kwargs):
                self._left -= 1
                return Text(text=f"{action.message}: {self._left} left", reward=0.5, done=self._left == 0)

            @property
            def state(self):
                return State()

        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        server = uvicorn.Server(
            uvicorn.Config(create_app(Countdown, Message, Text), host="127.0.0.1", port=port, log_level="error")
        )
        thread = threading.Thread(target=server.run, daemon=True)
        thread.start()
        while not server.started:
            assert thread.is_alive()
        yield f"http://127.0.0.1:{port}"
        server.should_exit = True
        thread.join(30)

    def test_an_episode_is_played_on_a_server(self, url):
        from hpcrl.envs.openenv import OpenEnv

        seen, steps = play(adapt_env(OpenEnv(url=url, observation_field="text")), lambda _: "tick", seed=1)
        assert seen == ["2 left", "tick: 1 left", "tick: 0 left"]
        assert [(step.reward, step.done) for step in steps] == [(0.5, False), (0.5, True)]

    def test_a_field_that_the_server_does_not_send_is_named(self, url):
        from hpcrl.envs.openenv import OpenEnv

        with pytest.raises(RuntimeError, match=r"no 'words'; it has .*text"):
            play(adapt_env(OpenEnv(url=url, observation_field="words")), lambda _: "tick")
