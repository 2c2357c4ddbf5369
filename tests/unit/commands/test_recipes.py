"""`hpcrl recipe ls`, `show` and `new`."""

from pathlib import Path

import pytest

from hpcrl.cli import main
from hpcrl.config.recipe import make_recipe
from hpcrl.config.toml import load_table


def test_every_known_recipe_is_listed_with_its_description(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipe", "ls"]) == 0
    listed = capsys.readouterr().out
    assert "qwen3-8b-math" in listed
    assert make_recipe(load_table("recipes", "quickstart")).description in listed
    assert "cannot be used" not in listed


def test_a_recipe_is_shown_with_those_that_it_extends(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipe", "show", "qwen3-32b"]) == 0
    shown = capsys.readouterr().out
    assert shown.index("qwen3-32b.toml") < shown.index("qwen3-8b-math.toml")
    assert "openai/gsm8k" in shown


def test_a_new_recipe_extends_another_and_is_never_overwritten(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["recipe", "new", "mine", "--from", "arithmetic"]) == 0
    path = tmp_path / "config" / "hpcrl" / "recipes" / "mine.toml"
    assert str(path) in capsys.readouterr().out
    made, parent = (make_recipe(load_table("recipes", name)) for name in ("mine", "arithmetic"))
    assert made.name == "mine"
    assert made.train == parent.train
    uncommented = path.read_text().replace("# group_size", "group_size")
    path.write_text(uncommented)
    assert make_recipe(load_table("recipes", "mine")).rollout == parent.rollout
    assert main(["recipe", "new", "mine"]) == 2
    assert path.read_text() == uncommented


@pytest.mark.parametrize(("name", "why"), [("a b", "cannot be the name"), ("quickstart", "extend itself")])
def test_a_name_that_cannot_be_a_recipe_is_refused(
    home: Path, capsys: pytest.CaptureFixture[str], name: str, why: str
) -> None:
    assert main(["recipe", "new", name]) == 2
    assert why in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "text", "fault"),
    [
        (["recipe", "show"], 'extends = "quickstart"\nrouter.reluctance = 1', "'router.reluctance' is now called"),
        (["site", "show"], 'extends = "local"\nscheduler = "pbs"', "unknown value 'pbs'"),
    ],
    ids=["recipe", "site"],
)
def test_a_file_that_cannot_be_used_is_shown_with_the_reason(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], text: str, fault: str
) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(text)
    assert main([*words, str(path)]) == 0
    shown = capsys.readouterr()
    assert text in shown.out
    assert shown.err.startswith("hpcrl: note: it cannot be used: ")
    assert fault in shown.err
