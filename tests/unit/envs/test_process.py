"""Environments in separate processes, good ones and bad ones."""

import asyncio
import math
import os
import shutil
import subprocess
import sys
import time
import venv
from pathlib import Path

import msgspec
import pytest

from hpcrl.config.recipe import DomainConfig
from hpcrl.envs.base import Step
from hpcrl.envs.check import _check_environment
from hpcrl.envs.process import ProcessEnv, ProcessLimits
from hpcrl.envs.program_files import ProblemJudge
from hpcrl.errors import ConfigError, EnvFault, PlanError
from hpcrl.plan.checks import check_recipe
from tests.support.plans import make_recipe

LONG_S = 60.0
SMALL = ProcessLimits(memory_bytes=512 << 20)


async def started(name="Echo", limits=SMALL, **options):
    return await ProcessEnv.start(f"tests.support.bad_envs:{name}", options, limits=limits)


def played(make, *calls):
    """Return the results of the calls; the environment is closed in any case."""

    async def run():
        env = await make
        try:
            return [await asyncio.wait_for(call(env), LONG_S) for call in calls]
        finally:
            await env.close()

    return asyncio.run(run())


def fault(make, *calls):
    with pytest.raises(EnvFault) as caught:
        played(make, *calls)
    return str(caught.value)


def is_gone(pid):
    """Return whether a process has ended; a zombie that has not been reaped has ended too."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def wait_until(condition):
    deadline = time.monotonic() + LONG_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def reset(env):
    return env.reset(5)


def step(env):
    return env.step("hi")


@pytest.mark.parametrize("name", ["Echo", "AsyncEcho"])
def test_an_environment_plays_as_it_would_here(name):
    done = Step(observation="done", reward=1.0, done=True)
    assert played(started(name), reset, step, lambda env: env.step("done")) == [
        "s5",
        Step(observation="hi", reward=1.0),
        done,
    ]


def test_closing_ends_the_process_group():
    async def run():
        env = await started()
        await env.close()
        return env.pid

    assert is_gone(asyncio.run(run()))


@pytest.mark.parametrize("where", ["reset", "step"])
@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("raises", "ZeroDivisionError: the world ended"),
        ("wrong_type", "returned int"),
        ("leaves", "SystemExit: 3"),
        ("dies", "ended with code 7, its last output: I cannot go on"),
        ("shouts", "printed more than 4 MiB"),
        ("grows", "MemoryError"),
    ],
)
def test_a_failure_of_an_environment_is_a_fault_with_its_name(where, how, message):
    seen = fault(started("Bad", where=where, how=how), reset, step)
    assert seen.startswith("tests.support.bad_envs:Bad: ")
    assert message in seen


def test_a_reward_that_is_not_a_number_arrives_as_nan_which_the_episode_reports():
    [answer] = played(started("Bad", where="step", how="wrong_reward"), step)
    assert math.isnan(answer.reward)


def test_an_endless_observation_is_refused():
    assert "cannot be sent" in fault(started("Bad", where="step", how="endless"), step)


def test_an_environment_that_spins_is_ended_by_its_cpu_limit():
    limits = ProcessLimits(memory_bytes=512 << 20, cpu_s=2)
    assert "SIGXCPU" in fault(started("Bad", limits, where="step", how="spins"), step)


def test_an_environment_that_cannot_be_made_is_a_fault():
    assert "importing no_such_module failed" in fault(ProcessEnv.start("no_such_module:Env", {}, limits=SMALL))


def test_a_hung_environment_is_killed_with_all_that_it_started(tmp_path):
    async def run():
        env = await started("Bad", where="step", how="forks", note=str(tmp_path))
        call = asyncio.create_task(env.step(""))
        while not (tmp_path / "hanging").exists():
            await asyncio.sleep(0.02)
        call.cancel()  # as an episode does at its deadline
        await asyncio.gather(call, return_exceptions=True)
        await env.close()
        return env.pid

    assert is_gone(asyncio.run(run()))
    pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
    assert [pid for pid in pids if not is_gone(pid)] == []


def test_an_environment_does_not_outlive_its_env_worker(tmp_path):
    host = os.fork()
    if host == 0:

        async def live():
            env = await started("Bad", where="step", how="hangs", note=str(tmp_path))
            (tmp_path / "keeper").write_text(str(env.pid))
            await env.step("")

        asyncio.run(live())
        os._exit(0)
    notes = [tmp_path / name for name in ("hanging", "keeper")]
    wait_until(lambda: all(note.exists() and note.read_text() for note in notes))
    pids = [int(note.read_text()) for note in notes]
    os.kill(host, 9)
    os.waitpid(host, 0)
    wait_until(lambda: all(is_gone(pid) for pid in pids))


@pytest.mark.skipif(shutil.which("bwrap") is None, reason="needs bubblewrap")
def test_an_environment_in_a_sandbox_plays_as_it_would_outside():
    make = ProcessEnv.start("hpcrl.envs.arithmetic:Arithmetic", {}, limits=SMALL, sandbox="bubblewrap")
    first, answered = played(make, reset, lambda env: env.step("calc 2*3"))
    assert first.endswith("=?")
    assert answered.observation == "6"


@pytest.mark.parametrize("module", ["hpcrl.envs.process_child", "hpcrl.envs.repair", "hpcrl.envs.arithmetic"])
def test_a_process_of_an_environment_imports_no_heavy_packages(module):
    """They start with every episode; a class of a recipe alone takes a third of the time that they need."""
    heavy = "{'numpy', 'torch', 'aiohttp', 'h5py', 'transformers', 'parsl', 'hpcrl.config.recipe', 'hpcrl.config.toml'}"
    code = f"import sys, {module}; print(sorted({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=LONG_S)
    assert done.stdout.strip() == "[]"


ELSEWHERE = """
import sys

import package_of_the_venv
from hpcrl.envs.base import Step


class Where:
    def reset(self, seed):
        try:
            import numpy
        except ImportError:
            return f"{package_of_the_venv.NAME} in {sys.prefix}"
        return "it sees the packages of the other interpreter"

    def step(self, action):
        return Step(observation="", done=True)

    def close(self): ...
"""


@pytest.fixture
def other_python(tmp_path, monkeypatch):
    """Return the interpreter of a virtual environment that has msgspec, and a package that is not installed here."""
    venv.create(tmp_path / "venv")
    (packages,) = (tmp_path / "venv").glob("lib/python*/site-packages")
    (packages / "msgspec").symlink_to(Path(msgspec.__file__).parent)
    (packages / "package_of_the_venv.py").write_text("NAME = 'the other one'")
    (tmp_path / "where.py").write_text(ELSEWHERE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return str(tmp_path / "venv" / "bin" / "python")


@pytest.mark.parametrize("sandbox", ["none", "bubblewrap"])
def test_an_environment_runs_in_the_interpreter_of_its_domain(other_python, sandbox):
    if sandbox == "bubblewrap" and shutil.which("bwrap") is None:
        pytest.skip("needs bubblewrap")
    making = ProcessEnv.start("where:Where", {}, limits=SMALL, sandbox=sandbox, python=other_python)
    assert played(making, reset) == [f"the other one in {Path(other_python).parents[1]}"]


def test_the_interpreter_of_a_domain_is_used_when_a_recipe_is_checked(other_python, capfd):
    table = {"env": "where:Where", "isolation": "process", "python": other_python}

    def check(**changed):
        domain = msgspec.convert(table | changed, DomainConfig)
        _check_environment(domain, name="a", what="domains.a.env", judge=ProblemJudge())

    check()
    with pytest.raises(ConfigError, match=r"domains\.a\.env, with python = .*/none.*: No such file"):
        check(python="/none")
    with pytest.raises(ConfigError, match=r"': nowhere:Env: importing nowhere failed .*No module named 'nowhere'"):
        check(env="nowhere:Env")


def test_an_interpreter_without_msgspec_is_named(other_python):
    for found in Path(other_python).parents[1].glob("lib/python*/site-packages/msgspec"):
        found.unlink()
    message = fault(ProcessEnv.start("where:Where", {}, limits=SMALL, python=other_python), reset)
    assert "No module named 'msgspec'" in message


def test_an_interpreter_needs_a_process():
    settings = ("domains.lake.python='/usr/bin/python3'",)
    with pytest.raises(PlanError, match="needs isolation"):
        check_recipe(make_recipe(*settings))
