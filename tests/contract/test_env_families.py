"""The adapters, with the real packages: the same seed is the same task, and episodes end as in the package."""

import asyncio
import importlib.util
import json
import os
import random
from pathlib import Path

import pytest

from hpcrl.envs.base import adapt_env
from hpcrl.errors import ConfigError, EnvFault, PolicyFailure

ROOT = Path(__file__).resolve().parents[2]


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


VERIFIERS_PYTHON = os.environ.get("HPCRL_VERIFIERS_PYTHON", str(ROOT / ".venv-verifiers" / "bin" / "python"))
WORDS = """
import verifiers.v1 as vf

open(__import__("os").environ["LOADED"], "a").write("loaded;")


class Words(vf.TaskData):
    answer: str


class WordsTask(vf.Task[Words, vf.State, vf.TaskConfig]):
    @vf.reward
    async def is_right(self, trace) -> float:
        return float(trace.last_reply.strip() == self.data.answer)


class WordsTaskset(vf.Taskset[WordsTask, vf.TasksetConfig]):
    def load(self):
        shots = [vf.UserMessage(content="say up"), vf.AssistantMessage(content="up")]
        for word in ("red", "blue"):
            prompt = [*shots, vf.UserMessage(content=f"say {word}")]
            yield WordsTask(Words(prompt=prompt, system_prompt="Be brief.", answer=word), self.config.task)


__all__ = ["WordsTaskset"]
"""
SEARCH = """
import verifiers.v1 as vf


class SearchTools(vf.Toolset[vf.ToolsetConfig]):
    TOOL_PREFIX = "search"

    @vf.tool
    async def look(self, place: str) -> str:
        return f"nothing in {place}"


class SearchTask(vf.Task[vf.TaskData, vf.State, vf.TaskConfig]):
    @classmethod
    def toolsets(cls, config):
        return [SearchTools(vf.ToolsetConfig())]

    @vf.reward
    async def is_found(self, trace) -> float:
        return 1.0


class SearchTaskset(vf.Taskset[SearchTask, vf.TasksetConfig]):
    def load(self):
        yield SearchTask(vf.TaskData(prompt="find the key"), self.config.task)


__all__ = ["SearchTaskset"]
if __name__ == "__main__":
    SearchTools.run()
"""
EXITING = """
from verifiers.v1.harnesses.null.harness import NullHarness
from verifiers.v1.runtimes import ProgramResult


class ExitingHarness(NullHarness):
    async def launch(self, *args, **options):
        await super().launch(*args, **options)
        return ProgramResult(exit_code=3, stdout="", stderr="lost")


__all__ = ["ExitingHarness"]
"""
LOOK = {"name": "search_look", "arguments": '{"place": "a drawer"}'}


@pytest.mark.skipif(not os.access(VERIFIERS_PYTHON, os.X_OK), reason="needs a venv with verifiers (make test-envs)")
class TestVerifiers:
    @pytest.fixture(autouse=True)
    def words(self, tmp_path, monkeypatch):
        for name, text in (("words", WORDS), ("search", SEARCH), ("exiting", EXITING)):
            (tmp_path / f"hpcrl_{name}.py").write_text(text)
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
        monkeypatch.setenv("LOADED", str(tmp_path / "loaded"))
        monkeypatch.setenv("HOME", str(tmp_path))

    def make(self, **options):
        from hpcrl.envs.verifiers import Verifiers

        return Verifiers(**({"taskset": "hpcrl_words", "python": VERIFIERS_PYTHON} | options))

    def run(self, *calls, max_turns=9):
        """Return the results of runs side by side, and the requests that the model received."""
        from aiohttp import web

        from hpcrl.envs import verifiers
        from hpcrl.envs.base import ModelAccess

        requests = []

        async def complete(request):
            body = await request.json()
            requests.append((request.headers["Authorization"], body))
            if [key for key, _ in requests].count(requests[-1][0]) > max_turns:
                error = {"message": f"{max_turns} times at most", "type": "invalid_request_error", "code": "max_turns"}
                return web.json_response({"error": error}, status=400)
            called = {"tool_calls": [{"index": 0, "id": "1", "type": "function", "function": LOOK}]}
            message = {"role": "assistant", "content": "red", **(called if body.get("tools") else {})}
            chunk = {"id": "1", "object": "chat.completion.chunk", "created": 0, "model": body["model"]}
            choice = {"index": 0, "delta": message, "finish_reason": "stop"}
            lines = [json.dumps({**chunk, "choices": [choice]}), "[DONE]"]
            if not body.get("stream"):
                whole = {"index": 0, "message": message, "finish_reason": "stop"}
                return web.json_response({**chunk, "object": "chat.completion", "choices": [whole]})
            text = "".join(f"data: {line}\n\n" for line in lines)
            return web.Response(text=text, content_type="text/event-stream")

        async def play_all():
            app = web.Application()
            app.router.add_post("/v1/chat/completions", complete)
            runner = web.AppRunner(app)
            await runner.setup()
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            url = f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}/v1"
            try:
                runs = [
                    env.run(seed, ModelAccess(url=url, socket="", api_key=f"key-{number}", model="policy"), **task)
                    for number, (env, seed, task) in enumerate(calls)
                ]
                return await asyncio.gather(*runs, return_exceptions=True)
            finally:
                for server in [each.result() for each in verifiers._servers.values() if not each.exception()]:
                    server.process.stdin.close()
                    await server.process.wait()
                verifiers._servers.clear()
                await runner.cleanup()

        return asyncio.run(play_all()), requests

    def test_episodes_share_one_task_set_and_messages_stay_messages(self, tmp_path):
        env = self.make
        rewards, requests = self.run(
            (env(), 0, {}), (env(), 1, {}), (env(), 2, {}), (env(), 5, {"task": {"task": 0}}), (env(), 1, {"task": {}})
        )
        assert rewards[:4] == [1.0, 0.0, 1.0, 1.0]
        assert "must have the number of a task" in str(rewards[4])
        assert (tmp_path / "loaded").read_text() == "loaded;"
        assert sorted(key for key, _ in requests) == [f"Bearer key-{number}" for number in range(4)]
        shown = {json.dumps([(one["role"], one["content"]) for one in body["messages"]]) for _, body in requests}
        first = [["system", "Be brief."], ["user", "say up"], ["assistant", "up"], ["user", "say red"]]
        assert first in [json.loads(one) for one in shown]
        assert len(shown) == 2

    def test_the_task_set_is_checked_at_submission(self):
        assert self.make().check() == 2
        with pytest.raises(ConfigError, match="no_such_taskset"):
            self.make(taskset="no_such_taskset").check()

    def test_a_task_set_that_cannot_be_loaded_is_a_fault(self):
        (fault,), _ = self.run((self.make(taskset="no_such_taskset"), 0, {}))
        assert isinstance(fault, EnvFault)
        assert "no_such_taskset" in str(fault)

    def test_a_tool_loop_that_is_asked_to_end_and_a_harness_that_exits_are_failures_of_the_policy(self):
        results, requests = self.run(
            (self.make(taskset="hpcrl_search"), 0, {}),
            (self.make(harness="hpcrl_exiting", sandbox="none"), 0, {}),
            max_turns=2,
        )
        assert [(type(failure), failure.outcome) for failure in results] == [(PolicyFailure, "exit")] * 2
        assert "ProviderError: upstream 400" in str(results[0])
        assert "exited 3: lost" in str(results[1])
        looped = [body["messages"] for key, body in requests if key == "Bearer key-0"]
        found = [message["content"] for message in looped[-1] if message["role"] == "tool"]
        assert found == ["nothing in a drawer"] * 2


class TestVerifiersElsewhere:
    def test_an_interpreter_without_verifiers_is_refused(self):
        from hpcrl.envs.verifiers import Verifiers

        with pytest.raises(ConfigError, match=r"cannot be run: No such file"):
            Verifiers(taskset="words", python="/no/python").check()


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
