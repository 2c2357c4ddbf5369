"""A campaign whose jobs are submitted to fakes of Slurm's commands."""

from pathlib import Path

import pytest

from hpcrl.campaign import submission
from hpcrl.campaign.request import CampaignRequest
from hpcrl.campaign_dir.paths import CampaignDir
from hpcrl.system.files import make_private_dir


@pytest.fixture
def campaign(home: Path, tmp_path: Path, asked: CampaignRequest) -> CampaignDir:
    """A campaign with a first job, as a module's fixture `asked` describes it."""
    made = CampaignDir(make_private_dir(tmp_path / "c"))
    submission.write_description(made, asked)
    submission.claim_job(made, 0)
    return made
