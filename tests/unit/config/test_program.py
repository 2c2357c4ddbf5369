"""Relative paths in options are absolute in the campaign: beside the recipe, else in the current directory."""

from pathlib import Path
from typing import Any

import pytest

from hpcrl.campaign.request import load_request
from hpcrl.config.program import AGENT_PROGRAM, resolve_options


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A current directory with `only-here`, and beside it `recipes`, with a program and a directory of repositories."""
    (tmp_path / "cwd").mkdir()
    (tmp_path / "cwd" / "only-here").write_text("")
    (tmp_path / "recipes" / "repositories").mkdir(parents=True)
    (tmp_path / "recipes" / "agent.py").write_text("")
    monkeypatch.chdir(tmp_path / "cwd")
    return tmp_path


def resolve(here: Path, **options: Any) -> dict[str, Any]:
    return resolve_options(AGENT_PROGRAM, options, find_folder=lambda _: here / "recipes")


def test_paths_are_looked_for_beside_the_recipe_first(here: Path) -> None:
    found = resolve(here, readable=["agent.py", "only-here", "none"], directory="repositories/{name}")
    assert found["readable"] == [f"{here}/recipes/agent.py", f"{here}/cwd/only-here", f"{here}/cwd/none"]
    assert found["directory"] == f"{here}/recipes/repositories/{{name}}"


@pytest.mark.parametrize("path", ["/a/b", "~/b", "$CODE/b", "docker://alpine:3", "{path}"])
def test_paths_that_are_not_relative_stay(here: Path, path: str) -> None:
    assert resolve(here, image=path, readable=[path]) == {"image": path, "readable": [path]}


def test_a_program_and_a_script_beside_the_recipe_are_found(here: Path) -> None:
    agent = f"{here}/recipes/agent.py"
    assert resolve(here, command=["./agent.py", "agent.py"])["command"] == [agent, "agent.py"]
    assert resolve(here, command=["python", "agent.py"])["command"] == ["python", agent]
    assert resolve(here, command=["python", "none.py"])["command"] == ["python", "none.py"]
    assert resolve(here, command=["agent.py"])["command"] == ["agent.py"]


def test_a_command_finds_its_files_in_the_directory_of_the_episode_and_a_judge_does_not(here: Path) -> None:
    options = {"directory": "repositories", "command": ["python", "agent.py"], "judge": ["python", "agent.py"]}
    found = resolve(here, **options)
    assert found["command"] == ["python", "agent.py"]
    assert found["judge"] == ["python", f"{here}/recipes/agent.py"]


def test_values_of_a_wrong_type_and_other_environments_stay(here: Path) -> None:
    options: dict[str, Any] = {"readable": 5, "command": "agent.py", "judge": [], "image": ["a"]}
    assert resolve(here, **options) == {**options, "image": [f"{here}/cwd/a"]}
    assert resolve_options("m:E", {"readable": ["x"]}, find_folder=lambda _: here) == {"readable": ["x"]}


def test_a_loaded_recipe_has_absolute_paths_for_training_and_evaluation(here: Path, home: Path) -> None:
    (here / "recipes" / "mine.toml").write_text(
        'name = "mine"\nextends = "agent"\n[domains.sums.options]\nreadable = ["agent.py"]\n'
        '[evaluation.options.sums]\nreadable = ["only-here"]\n'
    )
    recipe = load_request(str(here / "recipes" / "mine.toml"), site="local").recipe
    assert recipe.domains["sums"].options["readable"] == [f"{here}/recipes/agent.py"]
    assert recipe.evaluation.options["sums"]["readable"] == [f"{here}/cwd/only-here"]


def test_the_interpreter_of_a_domain_is_absolute_but_for_a_name(here: Path, home: Path) -> None:
    for given, kept in (("venv/bin/python", f"{here}/cwd/venv/bin/python"), ("python3.12", "python3.12")):
        settings = (f"domains.lake.python='{given}'", 'domains.lake.isolation="process"')
        recipe = load_request("quickstart", site="local", settings=settings).recipe
        assert recipe.domains["lake"].python == kept
