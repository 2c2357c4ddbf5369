"""What the driver does about a job in which nothing happens, and about a trainer that has failed for good."""

import dataclasses

import pytest

from hpcrl.campaign_dir.driver_lease import DriverLease
from hpcrl.campaign_dir.event_log import EventLog, EventReader
from hpcrl.campaign_dir.events import FaultReported
from hpcrl.campaign_dir.paths import SPOOLS, CampaignDir
from hpcrl.campaign_dir.train_progress import MIN_DROPPED_GROUPS, TrainProgress, write_train_progress
from hpcrl.campaign_dir.workers import WorkerPlace
from hpcrl.config.site import load_site
from hpcrl.errors import HpcrlError
from hpcrl.job.driver import JobDriver
from hpcrl.plan.plan import make_plan
from hpcrl.system.files import make_private_dir
from tests.support.plans import make_recipe


@pytest.fixture
def driver(tmp_path):
    campaign = CampaignDir(tmp_path)
    for directory in (campaign.events, campaign.job(0).logs, *map(campaign.spool, SPOOLS)):
        make_private_dir(directory)
    recipe, site = make_recipe("train.groups_per_step=4", 'train.flat_groups="drop"'), load_site("local")
    events = EventLog(campaign.events / "driver.jsonl", job=0, role="driver", worker="driver", node="n")
    place = WorkerPlace(campaign.job(0), "n")
    lease = DriverLease(campaign.leases, 0)
    return JobDriver(place=place, lease=lease, plan=make_plan(recipe, site), recipe=recipe, site=site, events=events)


def test_a_trainer_that_learned_nothing_is_not_started_again(driver):
    driver._refuse_restart()
    write_train_progress(driver.campaign.train_progress, TrainProgress(failure="no reward was ever computed"))
    with pytest.raises(HpcrlError, match=r"^no reward was ever computed$"):
        driver._refuse_restart()


def test_a_hang_ends_the_job_after_the_stacks_of_its_workers_are_wanted(driver, monkeypatch):
    monkeypatch.setattr("hpcrl.job.driver.CLOSE_GRACE_S", 0.0)
    times = iter((0.0, 1e6))
    watch = dataclasses.replace(driver._watch_progress(), clock=lambda: next(times))
    driver._check_progress(watch)
    with pytest.raises(HpcrlError, match=r"no progress for 15 min .*: the stacks of every worker are at the end"):
        driver._check_progress(watch)
    assert driver.job.dump_stacks.exists()


def test_a_job_that_only_drops_flat_groups_is_reported(driver):
    times = iter((0.0, 1e6))
    watch = dataclasses.replace(driver._watch_progress(), clock=lambda: next(times))
    for num in (MIN_DROPPED_GROUPS, 99):
        write_train_progress(driver.campaign.train_progress, TrainProgress(num_flat_groups=num))
        driver._check_progress(watch)
    (fault,) = [event for event in EventReader(driver.campaign.events).poll() if isinstance(event, FaultReported)]
    assert "99 groups were dropped since the last step, 99 as all their rewards are equal" in fault.detail
