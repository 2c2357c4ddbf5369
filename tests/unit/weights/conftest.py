"""What the tests of weights share."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from hpcrl.campaign_dir.paths import CampaignDir
from hpcrl.weights.window.file import unlink_recorded_windows


@pytest.fixture
def run(tmp_path: Path) -> Iterator[CampaignDir]:
    """A campaign whose windows are in the real shared memory; none is left behind."""
    run = CampaignDir(tmp_path / "campaign")
    run.events.mkdir(parents=True)
    run.weights.mkdir()
    yield run
    for number in (0, 1):
        unlink_recorded_windows(run.job(number))
