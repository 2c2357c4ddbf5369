"""Rewards from outside the environment: a judge behind an endpoint, a real test run."""

import asyncio
import json
import shutil
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from hpcrl.envs.judge import judge, read_score
from hpcrl.envs.repair import BROKEN_FUNCTIONS, Repair, draw_broken_function, rerun_tests, run_python
from hpcrl.errors import ConfigError, EnvFault
from tests.support.trajectories import make_lake_trajectory

needs_bubblewrap = pytest.mark.skipif(shutil.which("bwrap") is None, reason="needs bubblewrap")


@pytest.fixture
def endpoint():
    """Serve the listed answers, one after the other; None is an error of the server."""
    answers, asked = [], []

    class Endpoint(BaseHTTPRequestHandler):
        def do_POST(self):
            asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            answer = answers.pop(0)
            self.send_response(500 if answer is None else 200)
            self.end_headers()
            if answer is not None:
                self.wfile.write(json.dumps({"choices": [{"message": {"content": answer}}]}).encode())

        def log_message(self, *_):
            pass

    server = HTTPServer(("127.0.0.1", 0), Endpoint)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/v1", answers, asked
    server.shutdown()
    server.server_close()
    thread.join()


def test_a_judge_is_shown_the_conversation_and_asked_for_a_number(endpoint):
    url, answers, asked = endpoint
    answers.append("My score is 7.5")
    assert asyncio.run(judge(make_lake_trajectory(), text="hello there", url=url, model="m")) == 0.75
    assert asked[0]["model"] == "m"
    assert "hello there" in asked[0]["messages"][0]["content"]


def test_a_judge_that_fails_is_asked_again(endpoint):
    url, answers, asked = endpoint
    answers.extend([None, "no idea", "10"])
    assert asyncio.run(judge(make_lake_trajectory(), text="", url=url, model="m")) == 1.0
    assert len(asked) == 3


def test_a_judge_that_never_gives_a_score_fails_and_gives_no_zero(endpoint):
    url, answers, _ = endpoint
    answers.extend(["", "11"])
    with pytest.raises(EnvFault, match="returned no score in 2 attempts"):
        asyncio.run(judge(make_lake_trajectory(), text="", url=url, model="m", attempts=2))


def test_a_judge_without_an_address_is_refused():
    with pytest.raises(ConfigError, match="must start with http"):
        asyncio.run(judge(make_lake_trajectory(), text="", url="file:///etc/passwd", model="m"))


@pytest.mark.parametrize(("answer", "score"), [("0", 0.0), ("3 of 10: no, 4", 0.4), ("10.0", 1.0)])
def test_the_last_number_is_the_score(answer, score):
    assert read_score(answer, highest=10) == score


@needs_bubblewrap
class TestRepair:
    def play(self, *actions, seed=3):
        async def run():
            env = Repair()
            await env.reset(seed)
            return [await env.step(action) for action in actions]

        return asyncio.run(run())

    def test_code_is_really_run(self):
        (step,) = self.play("run print(6 * 7)")
        assert (step.observation, step.done) == ("42", False)

    @pytest.mark.parametrize("seed", range(3))
    def test_the_fixed_function_passes_and_the_broken_one_does_not(self, seed):
        fault = draw_broken_function(seed)
        assert [step.reward for step in self.play(f"fix {fault.right}", seed=seed)] == [1.0]
        assert [step.reward for step in self.play(f"fix {fault.broken}", seed=seed)] == [0.0]

    def test_an_unknown_tool_costs_the_turn(self):
        (step,) = self.play("rm -rf /")
        assert (step.reward, step.done) == (-0.05, False)

    def test_the_reward_function_runs_the_tests_on_the_last_submission(self):
        played = make_lake_trajectory()
        right = draw_broken_function(played.seed).right
        assert rerun_tests(played, text=f"fix nonsense<|x|> fix {right}<|end|>", sandbox="auto") == 1
        assert rerun_tests(played, text="I cannot do it", sandbox="auto") == 0

    def test_code_does_not_reach_the_network_or_our_files(self, tmp_path):
        (tmp_path / "secret").write_text("x")
        assert not run_python("import socket; socket.create_connection(('127.0.0.1', 22), 1)")[0]
        assert not run_python(f"open({str(tmp_path / 'secret')!r})")[0]

    def test_output_without_end_is_cut(self):
        ended_well, output = run_python("while True: print('x' * 1000)")
        assert not ended_well
        assert len(output) <= 400

    def test_memory_without_end_is_refused(self):
        assert "MemoryError" in run_python("x = bytearray(1 << 31)")[1]


@needs_bubblewrap
def test_every_task_of_the_repair_domain_can_be_solved_and_is_not_solved_yet():
    for fault in BROKEN_FUNCTIONS:
        assert run_python(f"{fault.right}\n{fault.tests}") == (True, "")
        assert not run_python(f"{fault.broken}\n{fault.tests}")[0]
