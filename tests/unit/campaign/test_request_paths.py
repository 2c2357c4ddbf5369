"""A relative path of a recipe is one beside the TOML file that sets it, also if another recipe extends that."""

import json
from pathlib import Path

import pytest

from hpcrl.campaign.request import load_request
from hpcrl.campaign.submission_checks import check_request
from hpcrl.config.program import AGENT_PROGRAM
from hpcrl.config.recipe import Recipe
from hpcrl.config.toml import shipped_folder
from hpcrl.errors import ConfigError
from hpcrl.hardware.model_catalogue import MODEL_CONFIGS

ROW = '{"question": "1 + 1", "answer": "2"}\n'


def load_child(folder: Path, *, extends: str, lines: str = "", settings: tuple[str, ...] = ()) -> Recipe:
    """Load a recipe in a new folder that extends another."""
    folder.mkdir(exist_ok=True)
    child = folder / "child.toml"
    child.write_text(f'name = "child"\nextends = "{extends}"\n{lines}\n')
    return load_request(str(child), site="local", settings=settings).recipe


@pytest.mark.parametrize("name", ["sft", "warmup"])
def test_a_shipped_recipe_with_a_data_file_can_be_extended(tmp_path: Path, home: Path, name: str) -> None:
    warmup = load_child(tmp_path / "mine", extends=name, lines="[train]\nlearning_rate = 1e-3").warmup
    assert warmup is not None
    assert warmup.path == str(shipped_folder("recipes") / "conversations.jsonl")


def test_the_rows_of_tasks_are_beside_the_recipe_that_names_them(tmp_path: Path, home: Path) -> None:
    tasks = load_child(tmp_path / "mine", extends="questions").domains["sums"].task_set
    assert tasks is not None
    assert tasks.path == str(shipped_folder("recipes") / "questions.jsonl")


def test_each_file_of_a_chain_finds_what_it_sets_itself(tmp_path: Path, home: Path) -> None:
    parent = tmp_path / "parent"
    parent.mkdir()
    for name in ("rows.jsonl", "later.jsonl", "agent.py", "judge.py", "shown"):
        (parent / name).write_text(ROW)
    (parent / "parent.toml").write_text(
        'name = "parent"\nextends = "quickstart"\n'
        f'[domains.lake]\nenv = "{AGENT_PROGRAM}"\n'
        'options = { command = ["python", "agent.py"], judge = ["python", "judge.py"], readable = ["shown"] }\n'
        'tasks = { path = "rows.jsonl", held_out_path = ["later.jsonl"] }\n'
        '[evaluation.options.lake]\nreadable = ["shown"]\n'
    )
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "rows.jsonl").write_text(ROW)
    (mine / "judge.py").write_text("")
    changes = '[domains.lake]\noptions.judge = ["python", "judge.py"]\ntasks.path = "rows.jsonl"'
    recipe = load_child(mine, extends=f"{parent}/parent.toml", lines=changes)
    lake = recipe.domains["lake"]
    assert lake.options["command"] == ["python", f"{parent}/agent.py"]
    assert lake.options["judge"] == ["python", f"{mine}/judge.py"]
    assert lake.options["readable"] == recipe.evaluation.options["lake"]["readable"] == [f"{parent}/shown"]
    assert lake.task_set is not None
    assert lake.task_set.path == f"{mine}/rows.jsonl"
    assert lake.task_set.held_out_path == [f"{parent}/later.jsonl"]


def test_the_path_of_a_setting_is_beside_the_recipe_or_in_the_current_directory(
    tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine, here = tmp_path / "mine", tmp_path / "here"
    for folder in (mine, here):
        folder.mkdir()
        (folder / f"{folder.name}.jsonl").write_text(ROW)
    monkeypatch.chdir(here)
    for folder in (mine, here):
        settings = (f"domains.sums.tasks.path={folder.name}.jsonl",)
        tasks = load_child(mine, extends="questions", settings=settings).domains["sums"].task_set
        assert tasks is not None
        assert tasks.path == f"{folder}/{folder.name}.jsonl"


def test_a_missing_file_is_refused_with_the_folders_that_were_searched(
    tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as caught:
        load_child(tmp_path / "mine", extends="sft", lines='[warmup]\npath = "none.jsonl"')
    beside = f"warmup.path = '{tmp_path}/mine/none.jsonl' cannot be read: No such file"
    assert str(caught.value).startswith(beside)
    assert f"then in the current directory, {tmp_path}" in str(caught.value)


def find_weights(path: str, *settings: str) -> int | None:
    words = ("site.account=m1", f"model.path={path}", *settings)
    return load_request("qwen3-8b-math", site="perlmutter", settings=words).recipe.model.num_weights


def test_the_sizes_of_a_model_that_is_here_take_precedence(tmp_path: Path, home: Path) -> None:
    fields = f"model.config={{{', '.join(f'{k} = {v!r}' for k, v in MODEL_CONFIGS['Qwen/Qwen3-8B'].items())}}}"
    assert round((find_weights(str(tmp_path), fields) or 0) / 1e9, 1) == 8.2
    (tmp_path / "config.json").write_text(json.dumps(MODEL_CONFIGS["Qwen/Qwen3-14B"]))
    assert round((find_weights(str(tmp_path), fields) or 0) / 1e9, 1) == 14.8


def test_a_model_of_the_catalogue_has_its_sizes_before_it_is_staged(home: Path) -> None:
    assert round((find_weights("Qwen/Qwen3-14B") or 0) / 1e9, 1) == 14.8
    assert find_weights("acme/other") is None


def test_a_model_directory_is_beside_the_recipe_that_names_it_or_in_the_current_one(
    tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine, here = tmp_path / "mine", tmp_path / "here"
    for folder in (mine, here):
        (folder / "models" / folder.name).mkdir(parents=True)
    monkeypatch.chdir(here)
    for folder in (mine, here):
        recipe = load_child(mine, extends="quickstart", lines=f'[model]\npath = "models/{folder.name}"')
        assert recipe.model.path == f"{folder}/models/{folder.name}"


def test_messages_name_the_file_of_a_recipe_and_not_its_parent(tmp_path: Path, home: Path) -> None:
    own = tmp_path / "own.toml"
    own.write_text('extends = "quickstart"\n[domains.lake]\nenv = "nowhere_to_be_found:Env"\n')
    with pytest.raises(ConfigError, match=f"^recipe '{own}': domains.lake.env = "):
        check_request(load_request(str(own), site="local"))
