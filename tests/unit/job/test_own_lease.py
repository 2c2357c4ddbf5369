"""A driver asks Slurm, this node, or the heartbeats of the other job whether its campaign runs already."""

import os
import threading
from pathlib import Path

import pytest

from hpcrl.campaign_dir.campaign_lease import CampaignLease, LeaseHolder, take_lease
from hpcrl.campaign_dir.paths import CampaignDir, make_worker_name
from hpcrl.campaign_dir.workers import WorkerPlace
from hpcrl.job import own_lease
from hpcrl.job.own_lease import take_campaign_lease
from hpcrl.monitor import job_state
from hpcrl.system.network import current_node
from hpcrl.system.processes import read_start_ticks


@pytest.fixture
def campaign(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CampaignDir:
    monkeypatch.setattr(own_lease, "ALIVE_WITHIN_S", 1.0)
    monkeypatch.setattr(job_state, "BEAT_LOOK_INTERVAL_S", 0.05)
    (tmp_path / "events").mkdir()
    return CampaignDir(tmp_path)


def hold(campaign: CampaignDir, *, scheduler_id: str | None, node: str, pid: int = 1, ticks: int = 7) -> None:
    """Let another driver, that of job 0, hold the lease."""
    holder = LeaseHolder(job=0, scheduler_id=scheduler_id, node=node, pid=pid, start_ticks=ticks)
    take_lease(campaign, holder, is_alive=lambda _: False)


def is_refused(campaign: CampaignDir, *, has_scheduler: bool) -> bool:
    lease = take_campaign_lease(WorkerPlace(campaign.job(1), current_node()), has_scheduler=has_scheduler)
    assert isinstance(lease, CampaignLease | LeaseHolder)
    return isinstance(lease, LeaseHolder)


@pytest.fixture
def squeue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Fakes of squeue, which prints a file, and of a sacct that knows nothing."""
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "squeue").write_text(f"#!/bin/sh\ncat {folder}/queue\n")
    (folder / "sacct").write_text("#!/bin/sh\nexit 1\n")
    for name in ("squeue", "sacct"):
        (folder / name).chmod(0o700)
    (folder / "queue").touch()
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_JOB_ID", "12")
    return folder


def test_a_local_driver_that_is_alive_keeps_its_campaign(campaign: CampaignDir) -> None:
    ticks = read_start_ticks(os.getppid())
    assert ticks is not None
    hold(campaign, scheduler_id=None, node=current_node(), pid=os.getppid(), ticks=ticks)
    assert is_refused(campaign, has_scheduler=False)


def test_a_local_driver_that_was_killed_leaves_its_campaign(campaign: CampaignDir) -> None:
    hold(campaign, scheduler_id=None, node=current_node())
    assert not is_refused(campaign, has_scheduler=False)


def test_a_job_that_slurm_does_not_know_is_alive_if_its_workers_are(campaign: CampaignDir, squeue: Path) -> None:
    (squeue / "squeue").write_text("#!/bin/sh\nexit 1\n")
    hold(campaign, scheduler_id="11", node="elsewhere")
    beat = campaign.events / f"{make_worker_name(0)}-env-0.jsonl"
    beat.touch()
    timer = threading.Timer(0.3, lambda: os.utime(beat, (2e9, 2e9)))
    timer.start()
    assert is_refused(campaign, has_scheduler=True)
    timer.join()
    assert not is_refused(campaign, has_scheduler=True), "it is silent"
