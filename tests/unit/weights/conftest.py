"""What the tests of weights share."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from hpcrl.campaign_dir.paths import CampaignDir
from hpcrl.weights.window.file import unlink_recorded_windows


@pytest.fixture
def campaign(tmp_path: Path) -> Iterator[CampaignDir]:
    """A campaign whose windows are in the real shared memory; none is left behind."""
    campaign = CampaignDir(tmp_path / "campaign")
    campaign.events.mkdir(parents=True)
    campaign.weights.mkdir()
    yield campaign
    for number in (0, 1):
        unlink_recorded_windows(campaign.job(number))
