"""Fixtures of the suites that run whole campaigns on this machine."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.campaigns import end_campaigns


@pytest.fixture
def campaigns(home: Path) -> Iterator[Path]:
    """The directory of campaigns; at the end no process may be left of any."""
    yield home / "campaigns"
    end_campaigns(home)


@pytest.fixture
def own_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the tests' rewards, curricula and nodes importable in campaigns."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
