"""What a check finds in the files of agent programs: refused where nodes lack them too, else noted."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from hpcrl.config.recipe import DomainConfig, PipelineNode, TrainConfig
from hpcrl.envs import check
from hpcrl.envs.agent import AgentProgram
from hpcrl.envs.program_files import ProblemJudge
from hpcrl.errors import ConfigError
from tests.support.plans import make_recipe

HERE, NODES = ProblemJudge(is_local=True), ProblemJudge(campaigns="/proc")
"""A judge of this machine, and one of nodes that share no file system with it."""


def find_notes(judge: ProblemJudge, *, tasks: Path | None = None, **options: Any) -> list[str]:
    options = {"command": ["python", "-c", ""], "sandbox": "none", **options}
    table = {"env": "hpcrl.envs.agent:AgentProgram", "options": options, "tasks": tasks and str(tasks)}
    domain = msgspec.convert(table, DomainConfig)
    env = AgentProgram(**options)
    return list(check._check_program_files(env, domain, name="a", what="domains.a.env", judge=judge))


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    """Rows of three tasks, of which only the first has its directory."""
    (tmp_path / "0").mkdir()
    (tmp_path / "rows.jsonl").write_text("".join(f'{{"n": {number}}}\n' for number in range(3)))
    return tmp_path / "rows.jsonl"


def test_a_file_of_a_row_that_is_missing_is_refused_with_its_line(rows: Path) -> None:
    with pytest.raises(ConfigError, match=r"rows\.jsonl', line 2: domains\.a\.options\.directory = .*/1': no such"):
        find_notes(HERE, tasks=rows, directory=f"{rows.parent}/{{n}}")


def test_files_of_rows_that_nodes_may_have_are_one_note(rows: Path) -> None:
    (note,) = find_notes(NODES, tasks=rows, directory=f"{rows.parent}/{{n}}")
    assert note.startswith(f"domains.a.options.directory = '{rows.parent}/1': no such directory (here, and perhaps")


def test_of_many_tasks_the_first_are_looked_for(rows: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "MAX_CHECKED_TASKS", 1)
    (note,) = find_notes(HERE, tasks=rows, directory=f"{rows.parent}/{{n}}")
    assert note == "domains.a.options: of 3 tasks the files of the first 1 were looked for"


def test_a_field_that_no_task_has_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"directory = '/x/\{n\}': the task has no field 'n'; it has seed"):
        find_notes(NODES, directory="/x/{n}")


def test_a_program_that_nodes_may_have_is_a_note() -> None:
    (note,) = find_notes(NODES, command=["/none/agent"])
    assert note.startswith("domains.a.options.command = ['/none/agent', ...]: no such file or directory (here; a node")
    with pytest.raises(ConfigError, match=r"domains\.a\.options\.command = \['/none/agent', \.\.\.\]"):
        find_notes(HERE, command=["/none/agent"])


CODE = """
import functools

class Plain:
    def reset(self, seed): return ""
    def step(self, action): return None
    def close(self): pass

class NoSeed(Plain):
    def reset(self): return ""

class OnlyRows(Plain):
    def reset(self, seed, task): return ""

class TwoActions(Plain):
    def step(self, action, more): return None

class LateClose(Plain):
    def close(self, seconds): pass

class AnyArguments(Plain):
    def reset(self, *args, **kwargs): return ""
    def step(self, *args): return None

class Partial(Plain):
    def __init__(self):
        self.reset = functools.partial(OnlyRows().reset, task={})
        self.step = len

class NoSeedProgram:
    sampling, trains = "recipe", "all"
    async def run(self, access): return 1.0

class BadRow(OnlyRows):
    def check_task(self, task):
        if task["n"] == 2: raise ValueError("n is even")

def no_trajectory(): return 0.0
def scored(trajectory, scale=1.0, *, judges, text): return scale
async def scored_later(*args, **kwargs): return 0.0
scored_by_part = functools.partial(scored, scale=2.0)
class Scorer:
    def __call__(self, trajectory): return 0.0
scorer = Scorer()
class Stepwise:
    def __call__(self, trajectory): yield 0.0
stepwise = Stepwise()
class Later:
    async def __call__(self, *args, **kwargs): return 0.0
later = Later()
def several(trajectory): yield 0.0
async def several_later(trajectory): yield 0.0
class Taker:
    def __init__(self, trajectory): pass
def wrong_text(trajectories, text): return [0.0]
def wrong_texts(trajectory, texts): return 0.0
def right_texts(trajectories, *, texts): return [0.0]
"""


@pytest.fixture
def user_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    name = f"user_code_{tmp_path.name}".replace("-", "_")
    (tmp_path / f"{name}.py").write_text(CODE)
    monkeypatch.syspath_prepend(tmp_path)
    return name


def check_domain(**table: Any) -> None:
    domain = msgspec.convert({"env": "hpcrl.envs.arithmetic:Arithmetic", **table}, DomainConfig)
    check._check_reward(domain, what="domains.a.reward")
    check._check_environment(domain, name="a", what="domains.a.env", judge=HERE)


@pytest.mark.parametrize(
    ("env", "why"),
    [
        ("NoSeed", r"NoSeed has reset\(\), which is called as reset\(seed\): change it$"),
        ("OnlyRows", r"has reset\(seed, task\), which is called as reset\(seed\): .* `tasks` for reset\(seed, task\)$"),
        ("TwoActions", r"has step\(action, more\), which is called as step\(action\)"),
        ("LateClose", r"has close\(seconds\), which is called as close\(\)"),
        ("NoSeedProgram", r"has run\(access\), which is called as run\(seed, access\)"),
    ],
)
def test_an_environment_that_cannot_be_called_is_refused(user_code: str, env: str, why: str) -> None:
    with pytest.raises(ConfigError, match=rf"^domains\.a: .*{why}"):
        check_domain(env=f"{user_code}:{env}")


@pytest.mark.parametrize("env", ["Plain", "Partial", "AnyArguments"])
def test_an_environment_that_can_be_called_is_accepted(user_code: str, env: str) -> None:
    check_domain(env=f"{user_code}:{env}")


def test_an_environment_of_rows_is_accepted_with_them(user_code: str, rows: Path) -> None:
    check_domain(env=f"{user_code}:OnlyRows", tasks=str(rows))


def test_a_check_of_a_task_that_raises_anything_is_shown_with_the_line(user_code: str, rows: Path) -> None:
    with pytest.raises(ConfigError, match=r"^domains\.a\.tasks\.path = .*rows\.jsonl', line 3: ValueError: n is even$"):
        check_domain(env=f"{user_code}:BadRow", tasks=str(rows))


@pytest.mark.parametrize(
    ("reward", "options", "why"),
    [
        ("no_trajectory", {}, r"takes \(\), and is called with \(trajectory\): change it"),
        ("scored", {"scales": 2}, r"has no option 'scales': did you mean 'scale'\? it has scale"),
        ("CODE", {}, "has no 'CODE'"),
        ("__name__", {}, "is not a function"),
        ("several", {}, "is a generator, which returns no reward"),
        ("several_later", {}, "is a generator"),
        ("stepwise", {}, "is a generator"),
        ("Taker", {}, "is a class, whose call makes an object"),
        ("wrong_text", {}, r"takes \(trajectories, text\), and is called with"),
        ("wrong_texts", {}, r"takes \(trajectory, texts\), and is called with"),
    ],
)
def test_a_reward_that_cannot_be_called_is_refused(user_code: str, reward: str, options: Any, why: str) -> None:
    with pytest.raises(ConfigError, match=rf"^domains\.a\.reward = .*{why}"):
        check_domain(reward=f"{user_code}:{reward}", reward_options=options)


def test_a_reward_that_needs_judges_in_a_domain_without_any_is_refused(user_code: str) -> None:
    with pytest.raises(ConfigError, match=r"takes judges, and domains\.a\.judges names none"):
        check_domain(reward=f"{user_code}:scored")


@pytest.mark.parametrize("reward", ["scored", "scored_later", "scored_by_part", "scorer", "right_texts"])
def test_a_reward_that_can_be_called_is_accepted(user_code: str, reward: str) -> None:
    check_domain(reward=f"{user_code}:{reward}", judges=["grader"])


def test_a_function_of_c_without_a_signature_is_accepted() -> None:
    check_domain(reward="builtins:max")


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("scored_later", "is async"),
        ("later", "is async"),
        ("several", "is a generator, which returns no result"),
        ("stepwise", "is a generator"),
        ("Taker", "is a class"),
    ],
)
def test_a_function_of_a_node_that_returns_no_result_is_refused(user_code: str, name: str, why: str) -> None:
    node = PipelineNode(function=f"{user_code}:{name}")
    train = TrainConfig(num_steps=1, groups_per_step=1, learning_rate=1.0, pipeline={"loss": node})
    with pytest.raises(ConfigError, match=r"train\.pipeline\.loss\.function = .* " + why):
        check._check_function("loss", node, train)


@pytest.mark.parametrize(
    ("setting", "package", "advice"),
    [
        ("metrics.tensorboard=true", "tensorboard", "'hpcrl[tensorboard]' there, or remove it"),
        ("spool.compression=zstd", "hdf5plugin", "'hpcrl[compress]' there, or set it to \"none\""),
        ("train.trainer=megatron", "megatron", "'megatron-core<0.17,>=0.16' there, or set it to \"torch\""),
    ],
)
def test_a_package_that_is_missing_is_refused_before_anything_is_queued(
    setting: str, package: str, advice: str, tmp_path: Path
) -> None:
    code = (
        "import sys, importlib.util as u; real = u.find_spec; "
        f"u.find_spec = lambda name, *more: None if name == '{package}' else real(name, *more); "
        "from hpcrl.envs.check import main; sys.exit(main())"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "answer")]
    done = subprocess.run(command, input=msgspec.json.encode(make_recipe(setting)), check=False)
    assert done.returncode == 2
    answer = (tmp_path / "answer").read_text()
    assert f"needs the package {package}, " in answer
    assert f"pip install {advice}" in answer
