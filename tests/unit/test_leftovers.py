"""The check that a test session leaves nothing behind."""

from pathlib import Path

import pytest

from tests.support.leftovers import LeftoverCheck


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "shm"
    made.mkdir()
    (made / "psm_before").touch()
    return made


def start(folder: Path) -> LeftoverCheck:
    return LeftoverCheck((folder,), lock=folder.parent / "lock")


def test_what_a_session_leaves_is_named_and_what_was_there_is_not(folder: Path) -> None:
    check = start(folder)
    for name in ("sem.mp-1", "hpcrl-0-ledger-1", "of-another-program"):
        (folder / name).touch()
    assert check.end() == [str(folder / "hpcrl-0-ledger-1"), str(folder / "sem.mp-1")]


def test_sessions_that_overlap_do_not_blame_each_other_and_the_last_finds_what_they_left(folder: Path) -> None:
    first, second = start(folder), start(folder)
    (folder / "psm_in_use").touch()
    assert first.end() == []
    (folder / "psm_in_use").unlink()
    (folder / "psm_left").touch()
    assert second.end() == [str(folder / "psm_left")]


def test_a_session_that_starts_later_takes_what_is_there_for_given(folder: Path) -> None:
    first = start(folder)
    (folder / "psm_left").touch()
    assert first.end() == [str(folder / "psm_left")]
    assert start(folder).end() == []
