"""What the suites of whole campaigns on this machine share."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.campaigns import end_campaigns


@pytest.fixture
def campaigns(home: Path) -> Iterator[Path]:
    """Where campaigns are; afterwards nothing may be left of any."""
    yield home / "campaigns"
    end_campaigns(home)


@pytest.fixture
def own_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """Campaigns find the tests' own rewards, curricula and nodes."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
