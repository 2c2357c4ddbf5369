"""The software that is recorded at submission: packages, Python, and commits of git."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpcrl.campaign import provenance
from hpcrl.campaign.provenance import describe_software
from hpcrl.campaign.request import load_request
from hpcrl.campaign.submission import write_description
from hpcrl.campaign_dir.paths import CampaignDir


@pytest.fixture(autouse=True)
def patient() -> Iterator[None]:
    """Let git take its time on a machine that is busy."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(provenance, "PROGRAM_TIMEOUT_S", 60.0)
        yield


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    """Return a recipe in a work tree with one commit."""
    path = tmp_path / "work" / "recipes" / "my.toml"
    path.parent.mkdir(parents=True)
    path.write_text('extends = "quickstart"\n')
    run_git(path.parent, "init", "--quiet")
    run_git(path.parent, "add", ".")
    run_git(path.parent, "-c", "user.name=me", "-c", "user.email=me@here", "commit", "--quiet", "-m", "first")
    return path


def run_git(directory: Path, *words: str) -> str:
    return subprocess.run(["git", "-C", str(directory), *words], check=True, capture_output=True, text=True).stdout


def test_a_campaign_records_its_packages_and_the_commit_of_its_recipe(home: Path, recipe: Path) -> None:
    campaign = CampaignDir(home / "campaigns" / "one")
    campaign.root.mkdir(parents=True)
    write_description(campaign, load_request(str(recipe), site="local"))
    software = json.loads(campaign.manifest.read_text())["software"]
    assert software["python"] == ".".join(map(str, sys.version_info[:3]))
    assert software["packages"]["msgspec"]
    commit = run_git(recipe.parent, "rev-parse", "HEAD").strip()
    assert software["git"]["recipe"] == {"directory": str(recipe.parent), "commit": commit, "changed": False}


def test_a_tree_with_a_change_is_recorded_as_such(recipe: Path) -> None:
    recipe.with_name("env.py").write_text("")
    assert describe_software(python=sys.executable, recipe=str(recipe))["git"]["recipe"]["changed"] is True


def test_the_packages_of_another_interpreter_are_those_that_it_reports(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\necho \'["3.12.1", {"torch": "9.9"}]\'\n')
    python.chmod(0o700)
    software = describe_software(python=str(python), recipe=None)
    assert (software["python"], software["packages"]) == ("3.12.1", {"torch": "9.9"})


def test_a_missing_git_and_a_missing_interpreter_are_no_errors(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    software = describe_software(python="/no/python", recipe=str(recipe))
    assert (software["packages"], software["git"]) == ({}, {})


def test_a_git_that_hangs_is_not_waited_for(recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    git = tmp_path / "git"
    git.write_text("#!/bin/sh\nexec sleep 600\n")
    git.chmod(0o700)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(provenance, "PROGRAM_TIMEOUT_S", 0.5)
    assert describe_software(python=sys.executable, recipe=str(recipe))["git"] == {}
