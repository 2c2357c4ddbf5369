"""What a sandbox shows of the user's files."""

import os
from pathlib import Path

import pytest

from hpcrl.envs.isolation.sandbox import list_readable_paths


def test_the_home_directory_is_not_shown_by_pythonpath(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = tmp_path / "me" / "code"
    code.mkdir(parents=True)
    monkeypatch.setenv("HOME", str(tmp_path / "me"))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path / "me"), str(tmp_path), str(code)]))
    shown = list_readable_paths()
    assert str(code) in shown
    assert not {str(tmp_path), str(tmp_path / "me")} & set(shown)


def test_an_environment_that_is_a_link_in_a_directory_of_the_path_is_readable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The directory hides what is bound in it, and the link then leads out of it."""
    project, elsewhere = tmp_path / "project", tmp_path / "disk" / "venv"
    project.mkdir(), elsewhere.mkdir(parents=True)
    (project / ".venv").symlink_to(elsewhere)
    monkeypatch.setenv("PYTHONPATH", str(project))
    monkeypatch.setattr("sys.prefix", str(project / ".venv"))
    assert {str(project), str(elsewhere)} <= set(list_readable_paths())
