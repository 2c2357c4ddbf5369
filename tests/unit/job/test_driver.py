"""What the driver does about a job in which nothing happens, and about a trainer that has failed for good."""

import dataclasses
import errno
import os
import time
from concurrent.futures import Future
from datetime import datetime

import pytest

from hpcrl.campaign_dir.driver_lease import DriverLease
from hpcrl.campaign_dir.event_log import EventLog, EventReader
from hpcrl.campaign_dir.events import FaultReported
from hpcrl.campaign_dir.job_end import JobError
from hpcrl.campaign_dir.paths import SPOOLS, CampaignDir
from hpcrl.campaign_dir.train_progress import MIN_DROPPED_GROUPS, TrainProgress, write_train_progress
from hpcrl.campaign_dir.workers import WorkerPlace
from hpcrl.config.recipe import LimitsConfig
from hpcrl.config.site import load_site
from hpcrl.errors import HpcrlError, SlurmError, TrainError
from hpcrl.job import driver as driver_module
from hpcrl.job.driver import JobDriver, LongLivedWorker, _describe_failure
from hpcrl.job.supervision import CampaignUse, DrainRequest, LookInterval
from hpcrl.plan.plan import make_plan
from hpcrl.slurm.allocation import JobAllocation
from hpcrl.system.files import make_private_dir
from hpcrl.system.processes import MAX_RESTARTS
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


def fail_worker(driver, worker, times=MAX_RESTARTS + 1):
    for _ in range(times):
        driver._count_worker_failure(worker, "exit code 1")


def test_a_job_continues_without_a_worker_that_fails_again_and_again(driver):
    driver.workers = [LongLivedWorker("env", index, Future()) for index in range(3)]
    fail_worker(driver, driver.workers[0])
    assert [worker.is_resting for worker in driver.workers] == [True, False, False]
    (fault,) = [event for event in EventReader(driver.campaign.events).poll() if isinstance(event, FaultReported)]
    assert (fault.what, fault.detail.endswith("env continues with 2 of 3 workers")) == ("quorum", True)
    with pytest.raises(JobError, match=r"^env-1 failed 4 times in an hour, the last time with: exit code 1") as ended:
        fail_worker(driver, driver.workers[1])
    assert ended.value.cause == "user-code"


def test_engines_that_fail_everywhere_are_not_the_fault_of_a_recipe(driver):
    driver.workers = [LongLivedWorker("decode", 0, Future())]
    with pytest.raises(JobError) as ended:
        fail_worker(driver, driver.workers[0])
    assert ended.value.cause == "infrastructure"


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (JobError("x", cause="memory-limits"), "memory-limits"),
        (TrainError("x"), "user-code"),
        (SlurmError("x"), "infrastructure"),
        (OSError(116, "Stale file handle"), "infrastructure"),
        (ZeroDivisionError("a fault of the driver"), "infrastructure"),
    ],
)
def test_the_end_of_a_job_names_the_cause_of_its_failure(error, cause):
    end = _describe_failure(error, is_supervising=True)
    assert (end.outcome, end.cause, end.reason.endswith(str(error))) == ("failed", cause, True)
    if not isinstance(error, JobError):
        assert _describe_failure(error, is_supervising=False).cause == "not-started"


def test_a_campaign_that_has_reached_a_limit_starts_nothing(driver):
    assert driver._find_campaign_end() is None
    driver.use = CampaignUse(LimitsConfig(node_hours=1.0), list, past_hours=1.0, num_nodes=1, num_gpus=0)
    end = driver._find_campaign_end()
    assert (end.outcome, end.cause) == ("stopped", "budget-used")
    assert "limits.node_hours" in end.reason


ALLOCATION = JobAllocation(job_id="7", end_time=1e12, nodes=[["n"]])


def fake_squeue(tmp_path, monkeypatch, answer):
    """Put a squeue on PATH that notes whether the job was asked to drain before, and then answers."""
    programs = make_private_dir(tmp_path / "bin")
    script = f"#!/bin/sh\nif [ -f {tmp_path}/jobs/000/drain ]; then echo drained >> {tmp_path}/order; fi\n{answer}\n"
    (programs / "squeue").write_text(script)
    (programs / "squeue").chmod(0o700)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")


def test_a_job_with_sigterm_drains_though_slurm_is_silent_and_a_later_answer_gives_more_time(
    driver, tmp_path, monkeypatch
):
    fake_squeue(tmp_path, monkeypatch, "exit 1")
    driver.end_requests.is_terminated = True
    driver._check_end_requests(ALLOCATION)
    assert driver.job.drain.exists()
    assert (driver.drain_cause, driver.has_schedule) == ("cancellation", False)
    short = driver.drain_deadline - time.monotonic()
    assert short < ALLOCATION.kill_wait_s
    later = datetime.fromtimestamp(time.time() + 600).isoformat(timespec="seconds")
    fake_squeue(tmp_path, monkeypatch, f'echo "RUNNING {later} {later}"')
    driver.schedule_looks = LookInterval(0.0)
    driver._check_end_requests(ALLOCATION)
    assert (driver.drain_cause, driver.has_schedule) == ("preemption", True)
    assert driver.drain_deadline - time.monotonic() > short + 10
    assert driver.kill_time > time.time() + 500
    driver._check_end_requests(ALLOCATION)
    assert (tmp_path / "order").read_text() == "drained\n", "it was asked once more, and an answer is enough"


def test_a_job_that_makes_its_last_step_while_it_drains_is_complete(driver):
    driver._drain(DrainRequest(reason="its walltime is nearly over", grace_s=1.0, cause="walltime"))
    end = driver._finish("done", "every training step was made")
    assert (end.outcome, end.cause) == ("done", "complete")


def test_a_drain_that_the_file_system_refuses_is_asked_for_again(driver, monkeypatch):
    publish, refused = driver_module.publish_file, []

    def refuse_once(path, data):
        if not refused:
            refused.append(path)
            raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))
        publish(path, data)

    monkeypatch.setattr(driver_module, "publish_file", refuse_once)
    driver._drain(DrainRequest(reason="a user asked for it", grace_s=1.0, cause="user-request"))
    assert not driver.job.drain.exists()
    driver._check_end_requests(ALLOCATION)
    assert driver.job.drain.read_text() == "a user asked for it"
