"""How a job drains: what SIGTERM and Slurm's answers make of its time, and a file system that refuses the request."""

import dataclasses
import errno
import os
import time
from datetime import datetime

import pytest

from hpcrl.campaign_dir.job_end import DrainTime, is_sigterm_answered, read_term_answer
from hpcrl.campaign_dir.paths import CampaignDir
from hpcrl.config.recipe import LimitsConfig
from hpcrl.job import job_drain
from hpcrl.job.job_drain import DrainLimits, JobDrain
from hpcrl.job.supervision import CampaignUse, DrainMargin, DrainRequest, LookInterval, UsedHours
from hpcrl.slurm.allocation import JobAllocation, SeparateJob
from hpcrl.system.files import make_private_dir
from tests.support.campaigns import until

ALLOCATION = JobAllocation(job_id="7", end_time=1e12, nodes=[["n"]])


@pytest.fixture
def job(tmp_path):
    make_private_dir(CampaignDir(tmp_path).job(0).logs)
    return CampaignDir(tmp_path).job(0)


@pytest.fixture
def drain(job):
    use = CampaignUse(LimitsConfig(), list, past=UsedHours(), num_nodes=1, num_gpus=0)
    return JobDrain(job, margin=DrainMargin(list, least_s=60.0), use=use, emit=[].append)


def test_a_second_request_keeps_the_first_reason_and_shortens_the_time():
    first = DrainLimits().tighten(DrainRequest(reason="a", grace_s=900.0, cause="walltime", kill_time=50.0))
    second = first.tighten(DrainRequest(reason="b", grace_s=1.0, cause="preemption", kill_time=90.0))
    assert (second.reason, second.cause, second.kill_time) == ("a", "walltime", 50.0)
    assert second.deadline < first.deadline - 800


def fake_squeue(tmp_path, monkeypatch, answer):
    """Put a squeue on PATH that notes whether the job was asked to drain before, and then answers."""
    programs = make_private_dir(tmp_path / "bin")
    script = f"#!/bin/sh\nif [ -f {tmp_path}/jobs/000/drain ]; then echo drained >> {tmp_path}/order; fi\n{answer}\n"
    (programs / "squeue").write_text(script)
    (programs / "squeue").chmod(0o700)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")


def test_a_job_with_sigterm_drains_though_slurm_is_silent_and_a_later_answer_gives_more_time(
    drain, job, tmp_path, monkeypatch
):
    fake_squeue(tmp_path, monkeypatch, "exit 1")
    drain.requests.is_terminated = True
    drain.check_requests(ALLOCATION)
    assert job.drain.exists()
    assert (drain.limits.cause, drain.has_schedule) == ("cancellation", False)
    short = drain.limits.deadline - time.monotonic()
    assert short < ALLOCATION.kill_wait_s
    assert short - 5 < DrainTime(job).read_left() < short + 5
    later = datetime.fromtimestamp(time.time() + 600).isoformat(timespec="seconds")
    fake_squeue(tmp_path, monkeypatch, f'echo "RUNNING {later} {later}"')
    drain.schedule_looks = LookInterval(0.0)
    drain.check_requests(ALLOCATION)
    assert (drain.limits.cause, drain.has_schedule) == ("preemption", True)
    assert drain.limits.deadline - time.monotonic() > short + 10
    assert DrainTime(job).read_left() > short + 10, "the workers know of it"
    assert drain.limits.kill_time > time.time() + 500
    drain.check_requests(ALLOCATION)
    assert (tmp_path / "order").read_text() == "drained\n", "it was asked once more, and an answer is enough"


def test_the_time_after_sigterm_passes_while_slurm_is_silent(drain, job, tmp_path, monkeypatch):
    fake_squeue(tmp_path, monkeypatch, "exit 1")
    drain.requests.is_terminated = True
    drain.check_requests(ALLOCATION)
    first, now, left = drain.limits, time.monotonic(), DrainTime(job)
    assert 10 < left.read_left() < 20
    drain.schedule_looks = LookInterval(0.0)
    monkeypatch.setattr(time, "monotonic", lambda: now + 12.0)
    drain.check_requests(ALLOCATION)
    assert drain.limits == first
    assert left.read_left() < 10
    fake_squeue(tmp_path, monkeypatch, 'echo "COMPLETING N/A N/A"')
    drain.check_requests(ALLOCATION)
    assert abs(drain.limits.deadline - first.deadline) < 1, "the end is that of the first SIGTERM"
    monkeypatch.setattr(time, "monotonic", lambda: now + 20.0)
    assert drain.is_overdue, "before Slurm kills what is left"


@pytest.mark.parametrize(("state", "lost"), [("down*", ["n"]), ("mixed", []), ("draining", [])])
def test_a_job_that_slurm_ends_since_a_node_is_down_names_it(drain, tmp_path, monkeypatch, state, lost):
    fake_squeue(tmp_path, monkeypatch, 'echo "COMPLETING N/A N/A"')
    (tmp_path / "bin" / "sinfo").write_text(f"#!/bin/sh\necho n {state}\n")
    (tmp_path / "bin" / "sinfo").chmod(0o700)
    drain.requests.is_terminated = True
    drain.check_requests(ALLOCATION)
    assert drain.find_lost_nodes(ALLOCATION) == lost


def test_steps_learn_by_when_a_running_driver_has_ended_a_job_that_slurm_will_kill(drain, job, monkeypatch):
    drain.start(DrainRequest(reason="a user asked for it", grace_s=6.0, cause="user-request"))
    left, now = DrainTime(job), time.monotonic()
    assert not left.is_driver_overdue()
    monkeypatch.setattr(time, "monotonic", lambda: now + 1e6)
    assert not left.is_driver_overdue(), "nothing kills this job"
    monkeypatch.setattr(time, "monotonic", lambda: now)
    drain.start(DrainRequest(reason="SIGTERM", grace_s=5.0, cause="cancellation", kill_time=drain.read_time() + 10.0))
    assert not left.is_driver_overdue()
    monkeypatch.setattr(time, "monotonic", lambda: now + 7.0)
    assert not left.is_driver_overdue(), "it has some time for the end after the drain"
    monkeypatch.setattr(time, "monotonic", lambda: now + 8.0)
    assert left.is_driver_overdue(), "before Slurm kills the steps"


def test_a_clock_that_is_set_back_gives_a_worker_no_more_time_than_the_driver(drain, job, monkeypatch):
    drain.start(DrainRequest(reason="its walltime is nearly over", grace_s=90.0, cause="walltime"))
    left, now = DrainTime(job), time.time()
    monkeypatch.setattr(time, "time", lambda: now - 6 * 3600)
    assert 30 < left.read_left() <= 90
    monkeypatch.setattr(time, "time", lambda: now + 6 * 3600)
    assert 30 < left.read_left() <= 90, "a jump after the request was seen changes nothing"


@pytest.mark.parametrize("jump_s", [-6 * 3600, 1200])
def test_a_worker_whose_clock_is_another_has_the_time_that_the_driver_gave(drain, job, monkeypatch, jump_s):
    drain.start(DrainRequest(reason="its walltime is nearly over", grace_s=900.0, cause="walltime"))
    left, now = DrainTime(job), time.time()
    monkeypatch.setattr(time, "time", lambda: now + jump_s)
    assert 890 < left.read_left() <= 900


def test_steps_are_answered_while_the_driver_waits_for_slurm(drain, job):
    job.terminated.touch()
    drain.answer_notices(30.0)
    time.sleep(1.0)
    assert read_term_answer(job) is None
    job.terminated.write_text("n1")
    until(lambda: read_term_answer(job) is not None, what="the thread has answered")
    answer = read_term_answer(job)
    assert (answer.answers_sigterm, answer.end_s, answer.left_s) == (True, 21.0, None)
    assert not job.drain.exists(), "how long it may take is not known yet"


def test_a_worker_that_sees_the_request_late_has_less_time(drain, job, monkeypatch):
    drain.start(DrainRequest(reason="its walltime is nearly over", grace_s=90.0, cause="walltime"))
    left, now = DrainTime(job), time.time()
    monkeypatch.setattr(time, "time", lambda: now + 15)
    assert 70 < left.read_left() <= 75


def test_a_job_whose_end_has_moved_works_until_then(drain, tmp_path, monkeypatch):
    """Slurm moves the end of a job that was suspended; a site may extend a walltime."""
    ending = dataclasses.replace(ALLOCATION, end_time=time.time() - 10)
    later = datetime.fromtimestamp(time.time() + 7200).isoformat(timespec="seconds")
    fake_squeue(tmp_path, monkeypatch, f'echo "RUNNING {later} N/A"; echo >> {tmp_path}/asked')
    assert drain.check_requests(ending) is None
    assert drain.check_requests(ending) is None
    assert (tmp_path / "asked").read_text() == "\n", "an answer is enough"


@pytest.mark.parametrize("answer", ["exit 1", "echo RUNNING 2020-01-01T00:00:00 N/A"])
def test_a_job_at_its_walltime_drains_whether_slurm_confirms_that_or_is_silent(drain, tmp_path, monkeypatch, answer):
    fake_squeue(tmp_path, monkeypatch, answer)
    request = drain.check_requests(dataclasses.replace(ALLOCATION, end_time=time.time() + 50))
    assert request.is_at_walltime


def test_sigterm_during_a_drain_is_answered_before_slurm_is_asked(drain, job, tmp_path, monkeypatch):
    drain.start(DrainRequest(reason="a user asked for it", grace_s=1.0, cause="user-request"))
    assert not is_sigterm_answered(job)
    fake_squeue(tmp_path, monkeypatch, f"grep -c '\"answers_sigterm\":true' {job.drain} > {tmp_path}/answered; exit 1")
    drain.requests.is_terminated = True
    drain.check_requests(ALLOCATION)
    assert (tmp_path / "answered").read_text() == "1\n"
    assert is_sigterm_answered(job)


def test_a_warning_of_a_preemption_gives_the_job_what_is_left_of_the_grace_time(drain, tmp_path, monkeypatch):
    end = time.time() + 40
    named = datetime.fromtimestamp(end).isoformat(timespec="seconds")
    fake_squeue(tmp_path, monkeypatch, f'echo "RUNNING {named} {named}"')
    drain.requests.is_near_end = True
    request = drain.check_requests(ALLOCATION)
    assert (request.cause, request.reason) == ("preemption", "it is preempted")
    assert request.grace_s <= 40 - 9
    assert request.kill_time <= end


def test_a_warning_near_the_end_of_the_walltime_needs_no_answer_of_slurm(drain, tmp_path, monkeypatch):
    fake_squeue(tmp_path, monkeypatch, "exit 1")
    drain.requests.is_near_end = True
    assert drain.check_requests(dataclasses.replace(ALLOCATION, end_time=time.time() + 100)) is None, "it came early"
    request = drain.check_requests(dataclasses.replace(ALLOCATION, end_time=time.time() + 59))
    assert request.is_at_walltime
    assert 45 < request.grace_s < 50


def test_a_warning_that_slurm_explains_late_drains_at_once_and_then_until_slurm_ends_it(
    drain, job, tmp_path, monkeypatch
):
    fake_squeue(tmp_path, monkeypatch, "exit 1")
    drain.schedule_looks = LookInterval(0.0)
    drain.requests.is_near_end = True
    request = drain.check_requests(dataclasses.replace(ALLOCATION, end_time=time.time() + 3600))
    assert request.reason == "Slurm has warned that it will end, and does not answer when"
    assert 55 < DrainTime(job).read_left() <= 60, "the time that a drain takes, not that of the walltime"
    drain.check_requests(ALLOCATION)
    assert drain.limits.cause == "unknown", "Slurm is still silent"
    named = datetime.fromtimestamp(time.time() + 40).isoformat(timespec="seconds")
    fake_squeue(tmp_path, monkeypatch, f'echo "RUNNING {named} {named}"')
    drain.check_requests(ALLOCATION)
    assert (drain.limits.cause, drain.limits.reason) == ("preemption", "it is preempted")
    assert 20 < DrainTime(job).read_left() <= 30
    drain.check_requests(ALLOCATION)
    assert (tmp_path / "order").read_text() == "drained\ndrained\n", "an answer is enough"


def test_a_stop_after_a_warning_of_slurm_needs_no_answer_of_slurm(drain, job, tmp_path, monkeypatch):
    fake_squeue(tmp_path, monkeypatch, "exit 1")
    drain.requests.is_near_end = True
    job.campaign.stop.touch()
    request = drain.check_requests(dataclasses.replace(ALLOCATION, end_time=time.time() + 3600))
    assert request.cause == "user-request"


def test_a_drain_that_the_file_system_refuses_is_asked_for_again(drain, job, monkeypatch):
    publish, refused = job_drain.publish_file, []

    def refuse_once(path, data):
        if not refused:
            refused.append(path)
            raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))
        publish(path, data)

    monkeypatch.setattr(job_drain, "publish_file", refuse_once)
    drain.start(DrainRequest(reason="a user asked for it", grace_s=1.0, cause="user-request"))
    assert not job.drain.exists()
    drain.check_requests(ALLOCATION)
    assert b"a user asked for it" in job.drain.read_bytes()


@pytest.mark.parametrize("jump_s", [86_400.0, -86_400.0])
def test_a_clock_that_jumps_does_not_end_a_job(drain, job, monkeypatch, jump_s):
    now = time.time()
    monkeypatch.setattr(job_drain.time, "time", lambda: now + jump_s)
    assert drain.check_requests(dataclasses.replace(ALLOCATION, end_time=now + 3600)) is None
    assert not job.drain.exists()
    request = drain.check_requests(dataclasses.replace(ALLOCATION, end_time=now + 30))
    assert request is not None
    assert request.is_at_walltime


@pytest.mark.parametrize("goal", [False, True])
def test_a_job_that_nothing_kills_waits_for_a_checkpoint_that_takes_longer_than_expected(
    job, tmp_path, monkeypatch, goal
):
    limits = LimitsConfig(until="2020-01-01T00:00:00+00:00") if goal else LimitsConfig()
    use = CampaignUse(limits, list, past=UsedHours(), num_nodes=1, num_gpus=0)
    drain = JobDrain(job, margin=DrainMargin(list, least_s=60.0), use=use, emit=[].append)
    fake_squeue(tmp_path, monkeypatch, "exit 1")
    if not goal:
        job.campaign.stop.touch()
    now = time.monotonic()
    request = drain.check_requests(dataclasses.replace(ALLOCATION, end_time=time.time() + 3600.0))
    assert request.cause == ("budget-used" if goal else "user-request")
    assert 55 < DrainTime(job).read_left() < 61, "the trainer starts nothing that takes longer"
    monkeypatch.setattr(time, "monotonic", lambda: now + 3000.0)
    assert not drain.is_overdue
    monkeypatch.setattr(time, "monotonic", lambda: now + 3599.0)
    assert drain.is_overdue


@pytest.mark.parametrize("with_sigterm", [False, True])
def test_a_job_drains_though_no_program_of_slurm_can_be_started(drain, job, monkeypatch, with_sigterm):
    monkeypatch.setenv("PATH", "/nonexistent")
    drain.requests.is_terminated = with_sigterm
    drain.check_requests(dataclasses.replace(ALLOCATION, end_time=time.time() + 30.0))
    assert job.drain.exists()
    drain.limits = dataclasses.replace(drain.limits, cause="cancellation")
    assert drain.find_lost_nodes(ALLOCATION) == []


SEPARATE = JobAllocation(
    job_id="7",
    end_time=1e12,
    nodes=[["n"], ["g1"], ["t1"]],
    separate_jobs=[SeparateJob("7", "env+reward"), SeparateJob("8", "decode", 0.0), SeparateJob("9", "train", 0.0)],
)


@pytest.mark.parametrize(
    ("state", "down", "cause"),
    [
        ("PREEMPTED", "", "preemption"),
        ("PENDING", "", "preemption"),
        ("PENDING", "t1", "node-failure"),
        ("NODE_FAIL", "", "node-failure"),
        ("COMPLETING", "", "cancellation"),
        ("FAILED", "", "cancellation"),
        ("TIMEOUT", "", "walltime"),
    ],
)
def test_a_job_drains_when_that_of_a_component_has_ended(drain, tmp_path, monkeypatch, state, down, cause):
    running = "RUNNING 2030-01-01T00:00:00 N/A"
    fake_squeue(tmp_path, monkeypatch, f"echo '{running} 7'; echo '{running} 8'; echo '{state} N/A N/A 9'")
    (tmp_path / "bin" / "sinfo").write_text(f"#!/bin/sh\necho {down or 'none'} down\n")
    (tmp_path / "bin" / "sinfo").chmod(0o700)
    request = drain.check_requests(SEPARATE)
    assert (request.cause, request.reason) == (cause, f"the job of train has ended ({state.lower()})")
    assert drain.limits.kill_time < time.time() + 60 + SEPARATE.kill_wait_s + 5, "a lost trainer is not waited for"


def test_a_component_that_is_suspended_or_unknown_ends_nothing(drain, tmp_path, monkeypatch):
    running = "RUNNING 2030-01-01T00:00:00 N/A"
    fake_squeue(tmp_path, monkeypatch, f"echo '{running} 7'; echo '{running} 8'; echo 'SUSPENDED N/A N/A 9'")
    assert drain.check_requests(SEPARATE) is None
    fake_squeue(tmp_path, monkeypatch, "exit 1")
    drain._component_looks = LookInterval(0.0)
    assert drain.check_requests(SEPARATE) is None


def test_sigterm_to_a_component_is_named(drain, job, tmp_path, monkeypatch):
    fake_squeue(tmp_path, monkeypatch, "exit 1")
    job.terminated.write_text("g1")
    drain.check_requests(SEPARATE)
    assert drain.limits.reason == "the job of decode received SIGTERM (cancellation)"
