"""The walltime of a job that continues a campaign."""

from pathlib import Path

import pytest

from hpcrl.campaign.continuation import refuse_short_walltime
from hpcrl.campaign_dir.event_log import EventLog
from hpcrl.campaign_dir.events import CheckpointSaved, JobStarted, StepFinished
from hpcrl.campaign_dir.paths import CampaignDir
from hpcrl.errors import CampaignError
from hpcrl.system.files import make_private_dir


@pytest.fixture
def campaign(tmp_path: Path) -> CampaignDir:
    campaign = CampaignDir(tmp_path)
    make_private_dir(campaign.events)
    return campaign


def record_job(campaign: CampaignDir, monkeypatch: pytest.MonkeyPatch, *, step_s: float) -> None:
    """Record a job that took 100 s until its first step and 20 s for a checkpoint."""
    now = [1000.0]
    monkeypatch.setattr("hpcrl.campaign_dir.event_log.time.time", lambda: now[0])
    EventLog.open(campaign, "driver", job=0, role="driver").emit(JobStarted(slurm_id="7"))
    trainer = EventLog.open(campaign, "train", 0, job=0, role="train")
    for step in range(1, 4):
        now[0] += step_s + (100.0 if step == 1 else 0.0)
        trainer.emit(StepFinished(step=step, step_s=step_s - 30.0, wait_s=20.0, times={"publish": 10.0}))
    trainer.emit(CheckpointSaved(step=3, wall_s=20.0))


def test_a_walltime_that_holds_no_step_and_checkpoint_is_refused(campaign, monkeypatch):
    record_job(campaign, monkeypatch, step_s=480.0)
    with pytest.raises(CampaignError) as refusal:
        refuse_short_walltime(campaign, walltime_min=9)
    assert str(refusal.value) == (
        "job.walltime_min = 9 cannot hold a step and its checkpoint: by the events of this campaign a job takes 100 s "
        "until its first step, 480 s for a step and 20 s for a checkpoint. Resume it with -s job.walltime_min=13, or "
        "lower train.groups_per_step"
    )


def test_a_walltime_that_holds_them_is_taken(campaign, monkeypatch):
    record_job(campaign, monkeypatch, step_s=480.0)
    refuse_short_walltime(campaign, walltime_min=10)


def test_a_campaign_without_a_step_is_continued_with_any_walltime(campaign):
    refuse_short_walltime(campaign, walltime_min=1)
