"""An agent program as an environment: real processes, in a sandbox where there is one, against a scripted model."""

import asyncio
import os
import sys
import time

import pytest

from hpcrl.engines.base import Completion
from hpcrl.envs.agent import AgentProgram, find_reward
from hpcrl.envs.base import is_program, make_program
from hpcrl.envs.isolation.sandbox import SandboxSpec, choose_sandbox, wrap_command
from hpcrl.errors import ConfigError, EngineError, EnvFault
from hpcrl.models.chat_layout import load_chat_template
from hpcrl.rollout.agents.program import run_program
from hpcrl.rollout.agents.server import ModelProxy
from hpcrl.rollout.episode import EpisodeLimits
from hpcrl.rollout.tasks import AgentTask
from hpcrl.system.processes import is_alive, read_start_ticks

TASK = AgentTask(domain="sums", number=1, seed=5)
ASK = """
import json, os, sys, urllib.request
task = json.loads(sys.stdin.read())
def post(path, body):
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
    url = os.environ["OPENAI_BASE_URL"] + path
    with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers)) as answer:
        return json.load(answer)
def ask(text):
    messages = [{"role": "user", "content": text}]
    return post("/chat/completions", {"model": os.environ["OPENAI_MODEL"], "messages": messages})
"""


def bubblewrap_works() -> bool:
    try:
        return choose_sandbox("bubblewrap", image=None) == "bubblewrap"
    except EnvFault:
        return False


needs_bubblewrap = pytest.mark.skipif(not bubblewrap_works(), reason="needs bubblewrap and user namespaces")


class OneWordModel:
    """A model that always generates the same word, or fails."""

    def __init__(self, template, word="=2<eos>", *, error=None):
        self.template, self.word, self.error = template, word, error

    async def generate(self, request):
        if self.error is not None:
            raise self.error
        ids = self.template.encode(self.word)
        return Completion(token_ids=ids, logprobs=[-1.0] * len(ids), versions=[0] * len(ids), finish_reason="stop")


@pytest.fixture
def template(tiny_model_dir):
    return load_chat_template(tiny_model_dir)


def play(template, code, *, sandbox="none", newest=lambda: 0, error=None, retries=0, limits=None, **options):
    """Run a program made of `code` and return its trajectory."""
    command = ["python", "-c", ASK + code]
    bounds = {"max_turns": 4, "max_new_tokens": 8, "context_length": 64, "max_lag": 1, "env_retries": retries}

    async def run():
        async with asyncio.timeout(240), ModelProxy(OneWordModel(template, error=error), template=template) as proxy:
            return await run_program(
                TASK,
                index=0,
                make_program=lambda: AgentProgram(command=command, sandbox=sandbox, **options),
                proxy=proxy,
                limits=EpisodeLimits(**(bounds | {"first_pause_s": 0.001} | (limits or {}))),
                newest_version=newest,
                producer="000-env-0",
            )

    return asyncio.run(run())


@pytest.mark.parametrize("sandbox", ["none", pytest.param("bubblewrap", marks=needs_bubblewrap)])
def test_a_program_is_an_episode(template, sandbox):
    code = "assert task == {'seed': 5, 'level': 3}\nask('1+1=?')\nprint('thinking')\nprint(json.dumps({'reward': 0.5}))"
    trajectory = play(template, code, sandbox=sandbox, task={"level": 3})
    assert (trajectory.status, trajectory.extra) == ("done", {})
    assert "".join(map(template.decode_token, trajectory.token_ids.tolist())) == "<user>1+1=?<agent>=2<eos>"
    assert [turn.reward for turn in trajectory.turns] == [0.5]
    assert (trajectory.id, trajectory.group, trajectory.seed) == ("sums/1/0", "sums/1", 5)


def test_a_reward_can_be_posted(template):
    trajectory = play(template, "ask('a')\npost('/hpcrl/reward', {'reward': 0.25})\nprint('bye')")
    assert (trajectory.status, trajectory.turns[-1].reward) == ("done", 0.25)


@pytest.mark.parametrize(
    ("code", "why"),
    [
        ("ask('a')\nprint('{\"reward\": 1}')\nraise SystemExit(3)", "code 3"),
        ("ask('a')\nraise ValueError('lost')", "ValueError: lost"),
        ("ask('a')\nprint('done')", "neither printed nor posted a reward"),
        ("ask('a')\nprint('{\"reward\": NaN}')", "finite number"),
        ("print(1.0)", "never called the model"),
        ("ask('a')\nos.kill(os.getpid(), 11)", "SIGSEGV"),
    ],
)
def test_a_program_that_fails_is_a_fault_and_never_scored(template, code, why):
    trajectory = play(template, code)
    assert trajectory.status == "env-fault"
    assert why in trajectory.extra["fault"]
    assert trajectory.reward is None


def test_a_program_that_cannot_be_found_is_a_fault(template):
    async def run():
        program = AgentProgram(command=["no-such-program"], sandbox="none")
        async with ModelProxy(OneWordModel(template), template=template) as proxy:
            await program.run(1, proxy.model_access("t"))

    with pytest.raises(EnvFault, match="no-such-program"):
        asyncio.run(run())


def test_a_program_that_hangs_is_ended_with_all_its_children(template, tmp_path):
    mark = tmp_path / "pids"
    code = (
        "ask('a')\nimport subprocess, time\n"
        "child = subprocess.Popen(['sleep', '600'], start_new_session=True)\n"
        f"open({str(mark)!r}, 'w').write(f'{{child.pid}} {{os.getpid()}}')\ntime.sleep(600)"
    )
    trajectory = play(template, code, timeout_s=20.0)
    assert trajectory.status == "env-fault"
    assert "timeout_s = 20 s" in trajectory.extra["fault"]
    for pid in map(int, mark.read_text().split()):
        assert not is_alive(pid, read_start_ticks(pid))


def test_children_left_behind_are_ended(template, tmp_path):
    mark = tmp_path / "pid"
    code = (
        "ask('a')\nimport subprocess\nchild = subprocess.Popen(['sleep', '600'], start_new_session=True)\n"
        f"open({str(mark)!r}, 'w').write(str(child.pid))\nprint(1)"
    )
    assert play(template, code).status == "done"
    assert not is_alive(int(mark.read_text()), read_start_ticks(int(mark.read_text())))


def test_a_gigabyte_of_output_does_no_harm(template):
    code = "ask('a')\nfor _ in range(1024): sys.stdout.write('x' * (1 << 20))\nprint()\nprint(1)"
    trajectory = play(template, code)
    assert (trajectory.status, trajectory.turns[-1].reward) == ("done", 1.0)


def test_memory_is_limited(template):
    trajectory = play(template, "ask('a')\nhoard = bytearray(1 << 30)\nprint(1)", memory_gib=0.25)
    assert trajectory.status == "env-fault"
    assert "MemoryError" in trajectory.extra["fault"]


def test_an_engine_that_fails_a_program_is_a_policy_fault(template):
    trajectory = play(template, "ask('a')\nprint(1)", error=EngineError("no decode worker"))
    assert (trajectory.status, trajectory.extra["fault"]) == ("policy-fault", "no decode worker")


def test_a_stale_episode_ends_its_program(template):
    asked = iter([0, 0, 2])
    started_s = time.monotonic()
    trajectory = play(template, "ask('a')\nimport time\ntime.sleep(600)", newest=lambda: next(asked, 2))
    assert trajectory.status == "aborted-stale"
    assert len(trajectory.turns) == 1
    assert time.monotonic() - started_s < 200


def test_a_program_that_used_up_its_turns_is_truncated(template):
    code = "ask('a')\ntry:\n    ask('b')\nexcept Exception:\n    print(0.5)"
    assert play(template, code, limits={"max_turns": 1}).status == "truncated"


def test_a_fault_restarts_the_program(template, tmp_path):
    mark = tmp_path / "been"
    first = f"if not os.path.exists({str(mark)!r}):\n    open({str(mark)!r}, 'w')\n    raise SystemExit(1)\n"
    code = f"ask('a')\n{first}print(1)"
    trajectory = play(template, code, retries=1)
    assert (trajectory.status, trajectory.extra["attempts"], len(trajectory.turns)) == ("done", 2, 1)


def test_cancelling_ends_the_program(template, tmp_path):
    mark = tmp_path / "pid"
    code = f"open({str(mark)!r}, 'w').write(str(os.getpid()))\nimport time\ntime.sleep(600)"

    async def run():
        async with ModelProxy(OneWordModel(template), template=template) as proxy:
            program = AgentProgram(command=["python", "-c", ASK + code], sandbox="none")
            running = asyncio.create_task(program.run(1, proxy.model_access("t")))
            async with asyncio.timeout(120):
                while not mark.exists() or not mark.read_text():
                    await asyncio.sleep(0.05)
            running.cancel()
            with pytest.raises(asyncio.CancelledError):
                await running

    asyncio.run(run())
    assert not is_alive(int(mark.read_text()), read_start_ticks(int(mark.read_text())))


@needs_bubblewrap
def test_a_sandbox_hides_files_processes_network_and_environment(template, tmp_path, monkeypatch):
    secret = tmp_path / "secret"
    secret.write_text("x")
    monkeypatch.setenv("MY_SECRET", "x")
    code = (
        "import socket\nask('a')\n"
        f"seen = [os.path.exists({str(secret)!r}), os.path.exists('/proc/{os.getpid()}/cmdline') and "
        f"b'pytest' in open('/proc/{os.getpid()}/cmdline', 'rb').read(), 'MY_SECRET' in os.environ,\n"
        "    [name for _, name in socket.if_nameindex()] != ['lo']]\n"
        "try:\n    open('/usr/x', 'w')\nexcept OSError:\n    pass\nelse:\n    seen.append(True)\n"
        "open('here', 'w').write('own')\nprint(float(any(seen)))"
    )
    trajectory = play(template, code, sandbox="bubblewrap")
    assert (trajectory.status, trajectory.extra) == ("done", {})
    assert trajectory.turns[-1].reward == 0.0


def test_code_without_a_sandbox_runs_only_if_that_is_allowed(monkeypatch):
    monkeypatch.setattr("shutil.which", lambda name: None)
    monkeypatch.setattr("hpcrl.envs.isolation.sandbox._find_bubblewrap_problem", lambda: "bwrap is not installed")
    with pytest.raises(EnvFault, match='sandbox = "none"'):
        choose_sandbox("auto", image=None)
    assert choose_sandbox("none", image=None) == "none"


def test_apptainer_is_preferred_where_there_is_an_image(monkeypatch):
    monkeypatch.setattr("shutil.which", lambda name: f"/usr/bin/{name}")
    assert choose_sandbox("auto", image="agent.sif") == "apptainer"
    command = wrap_command(["x"], SandboxSpec(kind="apptainer", workdir="/w", readable=("/r",), image="agent.sif"))
    assert command[-2:] == ["agent.sif", "x"]
    assert "/r:/r:ro" in command
    assert "--containall" in command


@pytest.mark.parametrize(
    ("output", "reward"),
    [
        ("1\n", 1.0),
        ('x\n{"reward": -0.5}\nbye\n', -0.5),
        ("true\n", None),
        ("", None),
        ("{}\n[1]\n", None),
        ("2\n1", 1.0),
    ],
)
def test_the_reward_is_the_last_line_that_is_one(output, reward):
    assert find_reward(output) == reward


@pytest.mark.parametrize(
    "options",
    [
        {"command": "agent.py"},
        {"command": []},
        {"command": ["x"], "sandbox": "jail"},
        {"command": ["x"], "timeout_s": 0},
    ],
)
def test_bad_options_are_refused(options):
    with pytest.raises(ConfigError):
        make_program("hpcrl.envs.agent:AgentProgram", options, what="domains.x.env")


def test_a_program_is_distinguished_from_other_environments():
    assert is_program("hpcrl.envs.agent:AgentProgram")
    assert not is_program("hpcrl.envs.arithmetic:Arithmetic")
    assert not is_program("no.such:Thing")


def test_the_interpreter_is_ours():
    program = AgentProgram(command=["python", "x.py"])
    assert program._command == [sys.executable, "x.py"]
