"""Tasks in SWE-bench's form: repositories with their tests, in images whose program is a stand-in for apptainer."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hpcrl.envs.agent import AgentProgram
from hpcrl.envs.software import find_test_files, read_statuses, score_task
from hpcrl.errors import ConfigError
from hpcrl.models.chat_template import ChatTemplate
from tests.support.programs import needs_bubblewrap, play

FAKE = Path(__file__).parents[2] / "support" / "fakes" / "apptainer_exec"
JUDGE = ["python", "-m", "hpcrl.envs.software"]
MODULE = "def add(a, b):\n    return a - b\n"
OLD_TEST = "from adder import add\n\n\ndef test_zero():\n    assert add(3, 0) == 3\n"
NEW_TEST = f"{OLD_TEST}\n\ndef test_sum():\n    assert add(1, 2) == 3\n"
REPAIR = "open('adder.py', 'w').write('def add(a, b):\\n    return a + b\\n')\n"


def git(repository: Path, *words: str) -> str:
    own = ("-c", "user.name=a", "-c", "user.email=a@b")
    return subprocess.run(["git", *own, *words], cwd=repository, check=True, capture_output=True, text=True).stdout


@pytest.fixture
def task(tmp_path: Path) -> dict[str, Any]:
    """A task whose image has a repository with a bug, and an environment with pytest."""
    repository = tmp_path / "image.sif" / "testbed"
    (repository / "tests").mkdir(parents=True)
    (repository / "adder.py").write_text(MODULE)
    (repository / "tests" / "test_adder.py").write_text(OLD_TEST)
    (repository / "conftest.py").write_text("")  # so that the tests find the module
    git(repository, "init", "-q")
    git(repository, "add", ".")
    git(repository, "commit", "-q", "-m", "start")
    (repository / "tests" / "test_adder.py").write_text(NEW_TEST)
    patch = git(repository, "diff")
    git(repository, "checkout", "-q", ".")
    programs = repository / ".venv" / "bin"
    programs.mkdir(parents=True)
    (programs / "pytest").write_text(f'#!/bin/sh\nexec {sys.executable} -m pytest "$@"\n')
    (programs / "pytest").chmod(0o755)
    (repository / ".git" / "info" / "exclude").write_text(".venv\n")
    return {
        "problem_statement": 'It prints {"1 + 2": -1}; why?',
        "base_commit": git(repository, "rev-parse", "HEAD").strip(),
        "test_patch": patch,
        "FAIL_TO_PASS": ["tests/test_adder.py::test_sum"],
        "PASS_TO_PASS": json.dumps(["tests/test_adder.py::test_zero"]),
    }


@pytest.fixture
def repository(task: dict[str, Any], tmp_path: Path) -> Path:
    """A copy of the task's repository, as a program has left it."""
    return Path(shutil.copytree(tmp_path / "image.sif" / "testbed", tmp_path / "left"))


def test_a_repaired_repository_has_the_reward(task: dict[str, Any], repository: Path) -> None:
    assert score_task(task, repository) == 0
    (repository / "adder.py").write_text(MODULE.replace("-", "+"))
    assert score_task(task, repository) == 1


@pytest.mark.parametrize(
    "change",
    [
        lambda tests: (tests / "test_adder.py").write_text(
            "def test_zero():\n    pass\n\n\ndef test_sum():\n    pass\n"
        ),
        lambda tests: (tests / "test_adder.py").unlink(),
        lambda tests: shutil.rmtree(tests),
        lambda tests: (tests.parent / ".git" / "hooks" / "post-checkout").write_text("#!/bin/sh\nexit 1\n"),
    ],
)
def test_tests_that_the_program_has_changed_are_put_back(
    task: dict[str, Any], repository: Path, change: Callable[[Path], object]
) -> None:
    change(repository / "tests")
    assert score_task(task, repository) == 0
    (repository / "adder.py").write_text(MODULE.replace("-", "+"))
    change(repository / "tests") if (repository / "tests").exists() else None
    assert score_task(task, repository) == 1


def test_a_test_that_passed_before_must_still_pass(task: dict[str, Any], repository: Path) -> None:
    (repository / "adder.py").write_text("def add(a, b):\n    return 3 if b == 2 else 0\n")
    assert score_task(task, repository) == 0


def test_a_test_file_that_is_new_is_added(task: dict[str, Any], repository: Path) -> None:
    git(repository, "rm", "-q", "tests/test_adder.py")
    git(repository, "commit", "-q", "-m", "without tests")
    (repository / "tests").mkdir(exist_ok=True)
    (repository / "tests" / "test_new.py").write_text(NEW_TEST.replace("sum", "new"))
    git(repository, "add", ".")
    task |= {"test_patch": git(repository, "diff", "--cached"), "base_commit": "HEAD"}
    task |= {"FAIL_TO_PASS": ["tests/test_new.py::test_new"], "PASS_TO_PASS": []}
    git(repository, "reset", "-q", "--hard")
    (repository / "adder.py").write_text(MODULE.replace("-", "+"))
    assert score_task(task, repository) == 1


def test_the_command_of_a_task_is_used(task: dict[str, Any], repository: Path) -> None:
    (repository / "adder.py").write_text(MODULE.replace("-", "+"))
    for command in ("pytest -rA -k zero", ["true", "pytest -rA -k zero"]):
        assert score_task(task | {"install_config": {"test_cmd": command}}, repository) == 0
    assert score_task(task | {"install_config": {"test_cmd": ["cd .", "pytest -rA"]}}, repository) == 1


def test_a_task_without_tests_to_pass_is_an_error(task: dict[str, Any], repository: Path) -> None:
    with pytest.raises(ValueError, match="names no test"):
        score_task(task | {"FAIL_TO_PASS": [], "PASS_TO_PASS": "[]"}, repository)


def test_a_patch_that_does_not_apply_is_an_error(task: dict[str, Any], repository: Path) -> None:
    with pytest.raises(RuntimeError, match="does not apply"):
        score_task(task | {"test_patch": task["test_patch"].replace("add(3, 0)", "add(9, 9)")}, repository)


def test_files_of_a_patch_have_the_names_that_they_get() -> None:
    patch = "diff --git a/tests/a.py b/tests/b c.py\nsimilarity index 90%\ndiff --git a/d.txt b/d.txt\n"
    assert find_test_files(patch) == ["tests/b c.py", "d.txt"]


def test_what_pytest_prints_is_read_with_colours_and_reasons() -> None:
    text = (
        "\x1b[32mPASSED\x1b[0m t.py::test_a\nXFAIL t.py::test_b - known\nFAILED t.py::test_c - assert 1 == 2\n"
        "ERROR t.py\nPASSED t.py::test_d[a b]\n1 passed\n  PASSED not.py::a_test\n"
    )
    assert read_statuses(text) == ({"t.py::test_a", "t.py::test_b", "t.py::test_d[a"}, {"t.py::test_c", "t.py"})


@pytest.fixture
def options(task: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The options of a domain whose programs work in the images of their tasks."""
    programs = tmp_path / "programs"
    programs.mkdir()
    shutil.copy(FAKE, programs / "apptainer")
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    secrets = ["test_patch", "FAIL_TO_PASS", "PASS_TO_PASS"]
    return {
        "sandbox": "apptainer",
        "image": str(tmp_path / "{image}"),
        "image_directory": "/testbed",
        "judge": JUDGE,
        "judge_fields": secrets,
        "readable": [sys.prefix, sys.base_prefix],
        "task": task | {"image": "image.sif"},
    }


@needs_bubblewrap
def test_a_program_repairs_the_repository_of_its_image_and_leaves_the_image_as_it_was(
    template: ChatTemplate, options: dict[str, Any], tmp_path: Path
) -> None:
    look = "assert os.getcwd() == os.environ['HPCRL_WORKDIR'] == '/testbed'\nassert 'test_patch' not in task\n"
    repaired = play(template, f"ask('a')\n{look}{REPAIR}", **options)
    assert (repaired.status, repaired.extra, repaired.turns[-1].reward) == ("done", {}, 1.0)
    untouched = play(template, "ask('a')\n", **options)
    assert (untouched.status, untouched.turns[-1].reward) == ("done", 0.0)
    assert (tmp_path / "image.sif" / "testbed" / "adder.py").read_text() == MODULE


@needs_bubblewrap
def test_an_image_without_the_directory_is_a_fault_of_the_episode(
    template: ChatTemplate, options: dict[str, Any]
) -> None:
    trajectory = play(template, "ask('a')\n", **options | {"image_directory": "/nowhere"})
    assert trajectory.status == "env-fault"
    assert "image_directory = '/nowhere' could not be copied: cp: cannot stat '/nowhere/.'" in trajectory.extra["fault"]


@needs_bubblewrap
def test_fields_of_the_task_are_put_into_arguments_and_other_braces_are_kept(
    template: ChatTemplate, options: dict[str, Any]
) -> None:
    code = (
        "ask('a')\nshown = '''{problem_statement}'''\nassert shown == task['problem_statement'], shown\n"
        "assert '''{FAIL_TO_PASS}''' == '{FAIL' + '_TO_PASS}', 'only the judge is given it'\nassert {1: 2}[1] == 2\n"
    )
    trajectory = play(template, code + REPAIR, **options)
    assert (trajectory.status, trajectory.extra, trajectory.turns[-1].reward) == ("done", {}, 1.0)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"image": None}, "image_directory = '/testbed' needs an `image`"),
        ({"sandbox": "bubblewrap"}, "needs an `image`, with sandbox = "),
        ({"directory": "/data"}, "remove the other"),
        ({"image_directory": "testbed"}, "give the whole path"),
        ({"image_directory": "/a/../b"}, "give the whole path"),
        ({"image_directory": "/"}, "give the whole path"),
        ({"image_directory": "/tmp/work"}, "give the whole path"),
        ({"image_directory": 3}, "image_directory = 3: give a string"),
    ],
)
def test_a_directory_of_an_image_that_cannot_be_right_is_refused(changes: dict[str, Any], why: str) -> None:
    options = {"command": ["true"], "image": "a.sif", "image_directory": "/testbed"} | changes
    with pytest.raises(ConfigError, match=why):
        AgentProgram(**options)
