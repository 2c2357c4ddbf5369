"""Fixtures of the unit tests."""

import pytest

from hpcrl.system import file_watch


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look at shared files each time: tests change them at once, or in virtual time."""
    monkeypatch.setattr(file_watch, "PAUSE_SHARE", 0.0)
