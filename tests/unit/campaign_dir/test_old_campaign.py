"""A campaign whose recipe.json has keys by their old names can still be listed, shown and exported.

`old_campaign` was written by hpcrl at commit fd23084: `hpcrl submit quickstart` with one training step. Weights,
checkpoints and logs are left out.
"""

import json
import shutil
from pathlib import Path

import pytest

from hpcrl.config.toml import RENAMED_KEYS
from tests.support.campaigns import hpcrl

STORED = Path(__file__).with_name("old_campaign")


@pytest.fixture(autouse=True)
def old(home: Path) -> Path:
    return shutil.copytree(STORED, home / "campaigns" / "old")


def test_the_stored_recipe_has_every_old_key(old: Path) -> None:
    recipe = json.loads((old / "recipe.json").read_text())
    for key in RENAMED_KEYS:
        table, name = key.split(".")
        assert name in recipe[table]


def test_an_old_campaign_is_listed() -> None:
    (listed,) = json.loads(hpcrl("ls", "--json").stdout)
    assert (listed["name"], listed["state"]) == ("old", "done")


def test_an_old_campaign_is_shown() -> None:
    shown = json.loads(hpcrl("monitor", "old", "--json").stdout)
    assert (shown["state"], shown["step"], shown["num_steps"]) == ("done", 1, 1)


def test_trajectories_of_an_old_campaign_are_listed_shown_and_counted() -> None:
    listed = json.loads(hpcrl("traj", "ls", "old", "--json").stdout)
    assert len(listed) == 4
    assert listed[0]["id"] in hpcrl("traj", "show", "old", listed[0]["id"]).stdout
    assert json.loads(hpcrl("traj", "stats", "old", "--json").stdout)
    hpcrl("traj", "verify", "old")


def test_trajectories_of_an_old_campaign_are_exported(tmp_path: Path) -> None:
    hpcrl("traj", "export", "old", str(tmp_path / "old.jsonl"))
    assert len((tmp_path / "old.jsonl").read_text().splitlines()) == 4
