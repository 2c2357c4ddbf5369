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
