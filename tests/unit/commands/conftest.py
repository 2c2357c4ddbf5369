"""Campaigns with complete records and without processes."""

from collections.abc import Callable
from pathlib import Path

import pytest

from hpcrl.campaign.request import load_request
from hpcrl.campaign.submission import write_description
from hpcrl.campaign_dir.event_log import EventLog
from hpcrl.campaign_dir.events import CheckpointSaved, FaultReported, StepFinished
from hpcrl.campaign_dir.paths import CampaignDir
from hpcrl.system.files import make_private_dir, publish_json

CampaignMaker = Callable[..., CampaignDir]


@pytest.fixture
def make_campaign(home: Path) -> CampaignMaker:
    """Make a campaign that has ended after four steps."""

    def make(name: str, *settings: str, reward: float = 0.5) -> CampaignDir:
        campaign = CampaignDir(home / "campaigns" / name)
        make_private_dir(campaign.root)
        write_description(campaign, load_request("quickstart", site="local", settings=settings))
        job = campaign.job(0)
        make_private_dir(job.root)
        make_private_dir(job.logs)
        publish_json(job.submission, {"id": "local-1", "scheduler": "local", "pid": 1, "start_ticks": 1, "time": 1.0})
        publish_json(job.outcome, {"outcome": "done", "reason": "every training step was made", "time": 2.0})
        trainer = EventLog.open(campaign, "train", 0, job=0, role="train")
        for step in range(1, 5):
            trainer.emit(StepFinished(step=step, version=step, reward_mean=reward * step / 4, loss=0.1))
        trainer.emit(CheckpointSaved(step=4, version=4))
        env = EventLog.open(campaign, "env", 0, job=0, role="env")
        env.emit(FaultReported(what="env-fault", detail="lake/3/0: step 0: \x1b[31mRuntimeError\x1b[0m: broken"))
        for log in (trainer, env):
            log.close()
        return campaign

    return make
