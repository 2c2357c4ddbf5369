"""How the driver ends a job: one in which nothing happens, one that failed, one that is complete."""

import dataclasses
import errno
import os
import subprocess
import sys
import threading
import time
import types

import msgspec
import pytest

from hpcrl.campaign_dir.campaign_lease import CampaignLease
from hpcrl.campaign_dir.event_log import EventLog, EventReader
from hpcrl.campaign_dir.events import EpisodesCounted, FaultReported, StepFinished
from hpcrl.campaign_dir.job_end import JobError
from hpcrl.campaign_dir.paths import SPOOLS, CampaignDir
from hpcrl.campaign_dir.train_progress import MIN_DROPPED_GROUPS, TrainProgress, write_train_progress
from hpcrl.campaign_dir.workers import WorkerPlace
from hpcrl.config.recipe import LimitsConfig
from hpcrl.config.site import load_site
from hpcrl.errors import HpcrlError, SlurmError, TrainError
from hpcrl.job.courier_step import WeightPlane
from hpcrl.job.driver import JobDriver, _describe_failure
from hpcrl.job.progress_watch import watch_campaign
from hpcrl.job.supervision import CampaignUse, DrainRequest, UsedHours
from hpcrl.plan.plan import make_plan
from hpcrl.slurm.allocation import JobAllocation
from hpcrl.system.exit_codes import EXIT_DONE, EXIT_DRAINED, EXIT_FAILED
from hpcrl.system.files import make_private_dir, remove_path
from hpcrl.system.processes import do_nothing
from tests.support.plans import make_recipe


@pytest.fixture
def driver(tmp_path):
    campaign = CampaignDir(tmp_path)
    for directory in (campaign.events, campaign.job(0).logs, *map(campaign.spool, SPOOLS)):
        make_private_dir(directory)
    recipe, site = make_recipe("train.groups_per_step=4", 'train.flat_groups="drop"'), load_site("local")
    events = EventLog(campaign.events / "driver.jsonl", job=0, role="driver", worker="driver", node="n")
    place = WorkerPlace(campaign.job(0), "n")
    lease = CampaignLease(campaign.leases, 0)
    return JobDriver(place=place, lease=lease, plan=make_plan(recipe, site), recipe=recipe, site=site, events=events)


def make_watch(driver, times):
    campaign, num_segments = driver.campaign, driver.scoring.num_segments
    watch = watch_campaign(campaign, recipe=driver.recipe, count_segments=num_segments)
    return dataclasses.replace(watch, clock=lambda: next(times))


def test_a_hang_ends_the_job_after_the_stacks_of_its_workers_are_wanted(driver, monkeypatch):
    monkeypatch.setattr("hpcrl.job.driver.CLOSE_GRACE_S", 0.0)
    times = iter((0.0, 1e6))
    watch = make_watch(driver, times)
    driver._check_progress(watch)
    with pytest.raises(HpcrlError, match=r"no progress for 15 min .*: the stacks of every worker are at the end"):
        driver._check_progress(watch)
    assert driver.job.dump_stacks.exists()


def test_a_job_that_only_drops_flat_groups_is_reported(driver):
    times = iter((0.0, 1e6))
    watch = make_watch(driver, times)
    for num in (MIN_DROPPED_GROUPS, 99):
        write_train_progress(driver.campaign.train_progress, TrainProgress(num_flat_groups=num))
        driver._check_progress(watch)
    (fault,) = [event for event in EventReader(driver.campaign.events).poll() if isinstance(event, FaultReported)]
    assert "99 groups were dropped since the last step, 99 as all their rewards are equal" in fault.detail


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


def test_signals_that_came_before_the_driver_listens_are_requests(driver):
    """The guardian forks it with signals blocked: by default SIGTERM would end it without an outcome."""
    program = (
        "import os, signal, sys\n"
        "from pathlib import Path\n"
        "from hpcrl.job.driver_pulse import FORWARDED_SIGNALS\n"
        "from hpcrl.job.supervision import EndRequests\n"
        "signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED_SIGNALS)\n"
        "for sig in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2): os.kill(os.getpid(), sig)\n"
        "requests = EndRequests(Path('stop'), Path('terminated'))\n"
        "requests.listen()\n"
        "print(requests.is_terminated, requests.is_cancelled, requests.is_near_end)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "True True True\n"


def test_a_job_that_is_stopped_before_it_starts_anything_queues_nothing(driver, monkeypatch):
    monkeypatch.setattr(driver.drain.requests, "listen", lambda: None)
    monkeypatch.setattr("hpcrl.slurm.next_job.try_queue_next_jobs", lambda *_, **__: pytest.fail("no job follows"))
    driver.drain.requests.is_cancelled = True
    assert driver.drive().outcome == "stopped"


def test_a_campaign_that_has_reached_a_limit_starts_nothing(driver):
    assert driver._find_campaign_end() is None
    driver.use = CampaignUse(LimitsConfig(node_hours=1.0), list, past=UsedHours(1.0), num_nodes=1, num_gpus=0)
    end = driver._find_campaign_end()
    assert (end.outcome, end.cause) == ("stopped", "budget-used")
    assert "limits.node_hours" in end.reason


def test_a_job_that_was_suspended_does_not_hang_and_has_lost_no_rank(driver):
    watch = make_watch(driver, iter((0.0, 1e6, 1e6, 1e6)))
    driver._check_progress(watch)
    beats = driver.workers.beats
    beats._changed_at = [time.monotonic() - 1e6]
    driver._note_gap(watch)
    assert beats.find_silent(max_age_s=60.0, max_start_s=60.0) == [0], "a turn of the usual length changes nothing"
    driver.turned_at -= 1e6
    driver._note_gap(watch)
    driver._check_progress(watch)
    assert not driver.job.dump_stacks.exists()
    assert beats.find_silent(max_age_s=60.0, max_start_s=60.0) == []


def test_a_trainer_is_done_only_with_the_checkpoint_of_its_last_step(driver):
    assert driver.last_step.confirm_done(EXIT_DONE) is None, "srun ends with 0 too if its node was lost"
    assert driver.last_step.confirm_done(EXIT_DRAINED) == EXIT_DRAINED
    assert driver.last_step.confirm_done(None) is None
    make_private_dir(driver.campaign.checkpoints / f"000001-step-{driver.recipe.train.num_steps:06d}")
    assert driver.last_step.confirm_done(EXIT_DONE) == EXIT_DONE


def test_a_trainer_that_seems_done_without_that_checkpoint_has_failed(driver, monkeypatch):
    monkeypatch.setattr("hpcrl.job.supervision.CONFIRM_TIMEOUT_S", 0.0)
    make_private_dir(driver.campaign.checkpoints / "000001-step-000001")
    assert driver.last_step.confirm_done(EXIT_DONE) is None
    assert driver.last_step.confirm_done(EXIT_DONE) == EXIT_FAILED


def test_a_job_that_makes_its_last_step_while_it_drains_is_complete(driver):
    driver.drain.start(DrainRequest(reason="its walltime is nearly over", grace_s=1.0, cause="walltime"))
    end = driver._finish("done", "every training step was made")
    assert (end.outcome, end.cause) == ("done", "complete")


@pytest.mark.parametrize(
    ("saved", "expected"),
    [
        (None, "the time was too short for a checkpoint"),
        (17, "the time was too short for a checkpoint"),
        (18, "the trainer had not ended in time, but there is a checkpoint of its last step, 18"),
    ],
)
def test_a_job_that_was_cut_lacks_a_checkpoint_only_if_its_last_step_has_none(driver, saved, expected):
    trainer = EventLog.open(driver.campaign, "train", 0, job=0, role="train")
    for step in (17, 18):
        trainer.emit(StepFinished(step=step))
    if saved is not None:
        make_private_dir(driver.campaign.checkpoints / f"000004-step-{saved:06d}")
    driver.drain.start(DrainRequest(reason="it received SIGTERM", grace_s=-1.0, cause="cancellation"))
    end = driver._find_end(types.SimpleNamespace(), None)
    assert (end.outcome, end.reason) == ("cut", f"it received SIGTERM, and {expected}")


def test_a_job_whose_last_step_is_made_names_the_domains_that_were_not_trained(driver):
    log = EventLog.open(driver.campaign, "env", 0, job=0, role="env")
    for num in range(1, 1000):  # its file is longer than what is read of it
        good = {"finished": 10 * num, "exit": num}
        log.emit(EpisodesCounted(done=11 * num, outcomes={"lake": good, "sums": {"env-fault": num}}))
    end = driver._find_end(types.SimpleNamespace(), EXIT_DONE)
    assert (end.outcome, end.cause, end.is_partial) == ("done", "complete", True)
    assert end.reason.endswith("not everything was trained: domain sums: all 999 episodes failed, so it trains nothing")


def test_a_job_that_trained_every_domain_is_done(driver):
    log = EventLog.open(driver.campaign, "env", 0, job=0, role="env")
    for num in range(1, 1000):
        log.emit(EpisodesCounted(done=11 * num, outcomes={"lake": {"finished": 10 * num, "exit": num}}))
    end = driver._find_end(types.SimpleNamespace(), EXIT_DONE)
    assert (end.reason, end.is_partial) == ("every training step was made", False)


def test_a_job_drains_as_early_as_the_steps_of_earlier_jobs_need(driver):
    trainer = EventLog.open(driver.campaign, "train", 0, job=0, role="train")
    trainer.emit(StepFinished(step=1, step_s=400.0))
    place = WorkerPlace(driver.campaign.job(1), "n")
    later = dataclasses.replace(driver, place=place)
    assert later.drain._margin.find_seconds() > 400.0


def test_what_fails_at_the_end_of_a_job_keeps_nothing_else_from_being_ended(driver, tmp_path):
    closed = []
    driver.weight_plane = WeightPlane(driver.place, plan=driver.plan, find_commands=list, emit=driver.events.emit)
    driver.weight_plane._couriers = object()  # it would be closed after the request that cannot be written
    runtime = types.SimpleNamespace(close=lambda grace_s, note_turn: closed.append(grace_s))
    driver.job.root.rename(tmp_path / "away")
    driver._close(runtime)
    assert len(closed) == 1


def test_a_slow_slurm_does_not_hold_the_driver_when_the_next_job_is_queued(driver, monkeypatch):
    answer, asked = threading.Event(), []

    def follow_slowly(*_: object, **__: object) -> None:
        asked.append(1)
        answer.wait(60)

    monkeypatch.setattr("hpcrl.slurm.next_job.try_queue_next_jobs", follow_slowly)
    for _ in range(2):  # at the start, and again at the walltime
        driver.next_job_queue.start()
    answer.set()
    driver.next_job_queue.wait(60)
    assert asked == [1]


ALLOCATION = JobAllocation(job_id="7", nodes=[["n"]], het=False, end_time=0.0, kill_wait_s=30.0)


def test_the_next_job_is_queued_before_what_may_fail_at_the_start(driver, monkeypatch):
    """It is queued though Slurm is slower than the failure."""
    followed = []

    def follow(*_: object, env, **__: object) -> None:
        time.sleep(0.5)
        followed.append(env)

    monkeypatch.setattr("hpcrl.slurm.next_job.try_queue_next_jobs", follow)
    monkeypatch.setattr(driver, "_run_job", lambda: raise_refusal())
    monkeypatch.setattr("hpcrl.job.next_job_queue.find_own_id", lambda _: "4711")
    monkeypatch.setattr(driver.drain.requests, "listen", lambda: None)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    with pytest.raises(SlurmError, match="fewer components"):
        driver.drive()
    assert [environ.get("CUDA_VISIBLE_DEVICES") for environ in followed] == [None]
    assert not driver.is_supervising


def raise_refusal():
    raise SlurmError("the job has fewer components than the plan")


def test_a_next_job_that_slurm_refuses_is_tried_again_and_reported_once(driver, monkeypatch):
    """Until the job ends in whatever way, and not at the walltime alone."""
    answers = [*["nothing was queued"] * 3, "Socket timed out", ""]

    def follow(*_: object, emit, **__: object) -> None:
        if answer := answers.pop(0):
            emit(FaultReported(what="chain", detail=answer))

    def end_trainer() -> int | None:
        driver.next_job_queue.wait(60)
        return None if answers else EXIT_DRAINED

    monkeypatch.setattr("hpcrl.slurm.next_job.try_queue_next_jobs", follow)
    monkeypatch.setattr("hpcrl.job.driver.FOLLOW_INTERVAL_S", 0.0)
    driver = dataclasses.replace(driver)
    driver.workers.allocation = ALLOCATION
    monkeypatch.setattr(driver, "_watch_workers", lambda *_, **__: None)
    driver._supervise(types.SimpleNamespace(trainer_exit_code=end_trainer), ALLOCATION)
    assert answers == []
    faults = [event.detail for event in EventReader(driver.campaign.events).poll() if isinstance(event, FaultReported)]
    assert faults == ["nothing was queued", "Socket timed out"]


def test_a_driver_that_cannot_list_the_checkpoints_asks_again(driver, monkeypatch):
    errors = [OSError(errno.ESTALE, os.strerror(errno.ESTALE))] * 2

    def confirm(code: int | None) -> int | None:
        if errors:
            raise errors.pop()
        return code

    monkeypatch.setattr("hpcrl.slurm.next_job.try_queue_next_jobs", lambda *_, **__: None)
    monkeypatch.setattr(driver.last_step, "confirm_done", confirm)
    ended = types.SimpleNamespace(trainer_exit_code=lambda: EXIT_DONE)
    assert driver._supervise(ended, ALLOCATION).outcome == "done"
    assert errors == []


def test_a_job_makes_a_directory_of_events_that_is_gone_and_reports_it_once(driver):
    campaign, place = driver.campaign, WorkerPlace(driver.campaign.job(0), "n")
    for path, record in ((campaign.recipe, driver.recipe), (campaign.site, driver.site), (campaign.plan, driver.plan)):
        path.write_bytes(msgspec.json.encode(record))
    remove_path(campaign.events)
    for _ in range(2):
        JobDriver.load(place, driver.lease, note_turn=do_nothing, note_start=do_nothing)
    (fault,) = EventReader(campaign.events).poll()
    assert fault.detail.startswith(f"{campaign.events} was gone")
