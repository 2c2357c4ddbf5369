"""What the driver watches: requests to end a job, failures that repeat, progress."""

import errno
import os
import signal
from collections.abc import Iterator

import msgspec
import pytest

from hpcrl.campaign_dir.event_log import EventLog, EventReader
from hpcrl.campaign_dir.events import CampaignEvent, CheckpointSaved, JobStarted, StepFinished
from hpcrl.campaign_dir.job_end import JobEnd, JobError
from hpcrl.campaign_dir.paths import CampaignDir
from hpcrl.config.recipe import LimitsConfig
from hpcrl.job.guardian import CLOSE_GRACE_S
from hpcrl.job.supervision import (
    BUDGET_PERIOD_S,
    CLOSE_RESERVE_S,
    MARGIN_FACTOR,
    NUM_STEPS,
    READ_INTERVAL_S,
    SIGNAL_EARLY_S,
    CampaignUse,
    DrainMargin,
    DrainRequest,
    EndRequests,
    FileOutage,
    LookInterval,
    RestartBudget,
    UsedHours,
    find_campaign_use,
    find_quorum,
    measure_use,
    plan_termination,
)
from hpcrl.system.file_watch import PATIENCE_S
from hpcrl.system.files import make_private_dir
from hpcrl.system.processes import MAX_RESTARTS
from tests.support.plans import plan_recipe

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2)
END_TIME = 1000.0
DRAIN_S = 60.0
KILL_WAIT_S = 30.0
NOTHING_USED = UsedHours()


@pytest.fixture
def requests(tmp_path) -> Iterator[EndRequests]:
    """Requests of a job, in a process that takes their signals."""
    before = {number: signal.getsignal(number) for number in SIGNALS}
    requests = EndRequests(tmp_path / "stop", tmp_path / "terminated")
    requests.listen()
    yield requests
    for number, handler in before.items():
        signal.signal(number, handler)


def find_drain(requests: EndRequests, *, now: float = 0.0) -> DrainRequest | None:
    return requests.find_drain(now=now, end_time=END_TIME, drain_s=DRAIN_S, kill_wait_s=KILL_WAIT_S)


def test_a_job_without_requests_continues_until_there_is_just_time_to_drain(requests):
    assert find_drain(requests, now=END_TIME - 60.0) is None
    request = find_drain(requests, now=END_TIME - 59.0)
    assert request is not None
    assert (request.grace_s, request.is_at_walltime) == (59.0 - CLOSE_GRACE_S, True)
    assert request.kill_time == END_TIME + KILL_WAIT_S


def test_a_job_past_its_end_still_has_a_moment_to_drain(requests):
    request = find_drain(requests, now=END_TIME + 5.0)
    assert request is not None
    assert request.grace_s == 1.0


def test_a_signal_before_the_end_of_the_walltime_drains_the_job_for_the_next_one(requests):
    os.kill(os.getpid(), signal.SIGUSR2)
    request = find_drain(requests, now=END_TIME - 150.0)
    assert request is not None
    assert (request.grace_s, request.is_at_walltime) == (150.0 - CLOSE_GRACE_S, True)


def test_a_signal_that_slurm_has_sent_early_takes_no_time_from_the_job(requests):
    os.kill(os.getpid(), signal.SIGUSR2)
    assert find_drain(requests, now=END_TIME - DRAIN_S - SIGNAL_EARLY_S) is None
    assert find_drain(requests, now=END_TIME - DRAIN_S) is None
    request = find_drain(requests, now=END_TIME - DRAIN_S + 1.0)
    assert request is not None
    assert request.is_at_walltime


def test_sigterm_counts_whether_this_process_or_a_step_received_it(requests):
    assert not requests.has_termination()
    requests.terminated.touch()
    assert not requests.has_termination(), "it is there from the start"
    requests.terminated.write_text("n1")
    assert requests.has_termination()
    requests.terminated.unlink()
    os.kill(os.getpid(), signal.SIGTERM)
    assert requests.has_termination()


@pytest.mark.parametrize(
    ("running_end", "grace_s", "kill_time"),
    [
        (None, KILL_WAIT_S - CLOSE_RESERVE_S, 100.0 + KILL_WAIT_S),
        (90.0, KILL_WAIT_S - CLOSE_RESERVE_S, 100.0 + KILL_WAIT_S),
        (145.0, 45.0 - CLOSE_RESERVE_S, 145.0),
        (400.0, DRAIN_S - CLOSE_RESERVE_S, 400.0),
    ],
    ids=["it is ending", "its end has passed", "preempted with a grace time", "its end is far"],
)
def test_a_job_with_sigterm_drains_in_the_time_that_slurm_leaves(running_end, grace_s, kill_time):
    request = plan_termination(running_end, now=100.0, drain_s=DRAIN_S, kill_wait_s=KILL_WAIT_S, cause="preemption")
    assert (request.grace_s, request.kill_time, request.cause) == (grace_s, kill_time, "preemption")
    assert "preemption" in request.reason


def test_most_of_a_short_kill_wait_is_left_for_the_checkpoint():
    request = plan_termination(None, now=0.0, drain_s=DRAIN_S, kill_wait_s=10.0, cause="cancellation")
    assert request.grace_s == pytest.approx(6.0)


def test_a_stop_of_a_user_counts_before_the_end_of_the_walltime(requests):
    requests.stop.touch()
    os.kill(os.getpid(), signal.SIGUSR2)
    request = find_drain(requests)
    assert request is not None
    assert (request.grace_s, request.is_at_walltime) == (60.0, False)
    assert "hpcrl stop" in request.reason


def test_a_cancelled_job_does_not_drain(requests):
    os.kill(os.getpid(), signal.SIGINT)
    assert requests.is_cancelled
    assert find_drain(requests) is None


def test_each_name_has_separate_restarts(tmp_path):
    budget = RestartBudget(tmp_path / "logs")
    for _ in range(MAX_RESTARTS):
        assert not budget.is_used_up("env-0")
        budget.count_failure("env-0", "exit code 1")
    budget.count_failure("env-1", "exit code 2")
    assert budget.is_used_up("env-0")
    with pytest.raises(JobError, match=rf"env-0 failed {MAX_RESTARTS + 1} times.*exit code 9; .*{tmp_path}/logs"):
        budget.count_failure("env-0", "exit code 9")


def test_failures_of_hours_ago_do_not_count(tmp_path):
    now = 0.0
    budget = RestartBudget(tmp_path / "logs", clock=lambda: now)
    for hour in range(3 * MAX_RESTARTS):
        now = hour * BUDGET_PERIOD_S / 2
        budget.note_node("env", "n1")
        assert budget.note_failure("env-0"), f"hour {hour / 2}"
    assert len(budget.list_records()) == 2
    assert [budget.note_failure("env-0") for _ in range(MAX_RESTARTS)] == [True, False, False]
    now += BUDGET_PERIOD_S
    assert not budget.is_used_up("env-0"), "it may be restarted again"


@pytest.mark.parametrize(("num", "share", "quorum"), [(1, 0.1, 1), (2, 0.5, 1), (3, 0.5, 2), (8, 1.0, 8)])
def test_a_role_needs_a_share_of_its_workers_and_at_least_one(num, share, quorum):
    assert find_quorum(num, share=share) == quorum


def test_a_file_is_looked_at_once_in_an_interval():
    times = iter((0.0, 4.0, 10.0, 11.0))
    looks = LookInterval(10.0, clock=lambda: next(times))
    assert [looks.is_due() for _ in range(4)] == [True, False, True, False]


LEAST_S = 60.0


def make_margin(*batches: list[CampaignEvent]) -> DrainMargin:
    """Return a margin that reads one batch of events after the other, each time it is asked."""
    times = iter(range(0, 10_000, int(READ_INTERVAL_S)))
    left = iter(batches)
    return DrainMargin(lambda: next(left, []), least_s=LEAST_S, clock=lambda: float(next(times)))


def test_a_job_without_steps_keeps_the_time_of_its_recipe():
    assert make_margin().find_seconds() == LEAST_S


def test_a_long_step_its_publishing_and_a_checkpoint_are_kept():
    events = [StepFinished(step=1, step_s=800.0, times={"publish": 20.0}), CheckpointSaved(step=1, wall_s=180.0)]
    assert make_margin(events).find_seconds() == MARGIN_FACTOR * 1000.0


def test_a_checkpoint_that_takes_longer_than_a_step_is_kept_twice_as_one_may_be_being_written():
    events = [StepFinished(step=1, step_s=60.0), CheckpointSaved(step=1, wall_s=300.0)]
    assert make_margin(events).find_seconds() == MARGIN_FACTOR * 600.0


def test_short_steps_do_not_lower_the_time_of_the_recipe():
    assert make_margin([StepFinished(step=1, step_s=0.2)]).find_seconds() == LEAST_S


def test_a_long_step_is_forgotten_after_many_short_ones():
    margin = make_margin([StepFinished(step=1, step_s=800.0)], [StepFinished(step=2, step_s=100.0)] * NUM_STEPS)
    assert margin.find_seconds() == MARGIN_FACTOR * 800.0
    assert margin.find_seconds() == MARGIN_FACTOR * 100.0


def make_use(*events: CampaignEvent, past: UsedHours = NOTHING_USED, **limits: object) -> CampaignUse:
    config = msgspec.convert(limits, LimitsConfig)
    return CampaignUse(config, lambda: events, past=past, num_nodes=4, num_gpus=16)


def make_used_step(step: int, *, num_tokens: int = 10, reward: float | None = None) -> StepFinished:
    return StepFinished(step=step, num_tokens=num_tokens, reward_mean=reward)


@pytest.mark.parametrize(
    ("limits", "reached"),
    [
        ({}, None),
        ({"tokens": 30}, "goal-reached"),
        ({"tokens": 31}, None),
        ({"reward": 0.5, "reward_steps": 2}, "goal-reached"),
        ({"reward": 0.5, "reward_steps": 3}, None),
        ({"reward": 0.51, "reward_steps": 2}, None),
        ({"node_hours": 12.1}, "budget-used"),
        ({"node_hours": 12.3}, None),
        ({"gpu_hours": 48.1}, "budget-used"),
        ({"gpu_hours": 49.0}, None),
        ({"until": "1970-01-03"}, "budget-used"),
        ({"until": "1970-01-08T12:00"}, None),
    ],
)
def test_a_campaign_ends_at_the_first_of_its_limits(limits, reached):
    again = make_used_step(2, reward=0.4)  # made twice: the first one was lost with a job
    steps = (
        make_used_step(1),
        make_used_step(2, num_tokens=99, reward=9.0),
        again,
        make_used_step(3, reward=0.6),
    )
    use = make_use(*steps, past=UsedHours(8.0, 32.0), **limits)
    now = 5 * 86400.0
    request = use.find_drain(now=now, job_start=now - 3600.0, drain_s=180.0)
    assert (request.cause if request else None) == reached
    if request:
        assert next(iter(limits)) in request.reason


def test_only_the_steps_of_the_policy_as_it_is_reach_a_goal():
    """Neither steps that no checkpoint covers count, nor those behind one that is made again."""
    earlier = [StepFinished(step=step, job=0, reward_mean=0.9) for step in range(1, 6)]
    config = msgspec.convert({"reward": 0.5, "reward_steps": 3}, LimitsConfig)

    def is_reached(*events: StepFinished, saved_step: int) -> bool:
        facts = {"past": NOTHING_USED, "num_nodes": 1, "num_gpus": 0, "job": 1, "saved_step": saved_step}
        use = CampaignUse(config, lambda: [*earlier, *events], **facts)
        return use.find_drain(now=0.0, job_start=0.0, drain_s=0.0) is not None

    assert is_reached(saved_step=3)
    assert not is_reached(saved_step=2)
    assert not is_reached(saved_step=0)
    assert not is_reached(StepFinished(step=2, job=1, reward_mean=0.1), saved_step=5), "a checkpoint was damaged"


def test_steps_whose_file_could_not_be_read_at_first_undo_none_of_later_jobs():
    late, batches = [StepFinished(step=step, job=0, num_tokens=10) for step in range(1, 6)], []
    batches.append([StepFinished(step=step, job=1, num_tokens=10) for step in range(6, 11)])
    batches.append(late)
    left = iter(batches)
    use = CampaignUse(
        msgspec.convert({"tokens": 100}, LimitsConfig),
        lambda: next(left, []),
        past=UsedHours(),
        num_nodes=1,
        num_gpus=0,
    )
    assert use.find_drain(now=0.0, job_start=0.0, drain_s=0.0) is None
    assert use.find_drain(now=0.0, job_start=0.0, drain_s=0.0) is not None


def test_what_is_learned_as_the_time_to_drain_leaves_some_of_the_walltime_for_steps():
    slow = [CheckpointSaved(step=1, wall_s=1500.0)]
    margin = DrainMargin(lambda: slow, least_s=60.0, most_s=1800.0)
    assert margin.find_seconds() == 1800.0
    assert DrainMargin(lambda: slow, least_s=2000.0, most_s=1800.0).find_seconds() == 2000.0, "as the recipe asks"


def test_the_time_of_an_earlier_job_is_counted_from_its_start_to_its_end(tmp_path):
    campaign = CampaignDir(tmp_path)
    make_private_dir(campaign.events)
    job = campaign.job(0)
    make_private_dir(job.root)

    def measure_hours(job):
        return measure_use(job, plan=plan_recipe(site="local")).node_hours

    assert measure_hours(job) == 0.0, "it never started"
    EventLog.open(campaign, "driver", job=0, role="driver").emit(JobStarted(slurm_id="1", end_time=9e9))
    assert 0.0 <= measure_hours(job) < 1.0, "it was killed: until its last heartbeat"
    (start,) = EventReader(campaign.events).poll()
    job.outcome.write_bytes(JobEnd(outcome="drained", time=start.time + 7200.0).encode())
    assert measure_hours(job) == pytest.approx(2.0)
    job.outcome.write_bytes(JobEnd(outcome="drained", time=start.time - 9e4, run_s=5400.0).encode())
    assert measure_hours(job) == pytest.approx(1.5), "the clock was set back meanwhile"


def test_an_earlier_job_counts_with_the_nodes_that_it_had(tmp_path):
    campaign, plan = CampaignDir(tmp_path), plan_recipe(site="perlmutter")
    for number, sizes in ((0, {"num_nodes": 16, "num_gpus": 64}), (1, {})):
        make_private_dir(campaign.job(number).root)
        campaign.job(number).outcome.write_bytes(JobEnd(outcome="drained", run_s=7200.0, **sizes).encode())
    assert measure_use(campaign.job(0), plan=plan) == (32.0, 128.0)
    assert measure_use(campaign.job(1), plan=plan) == (2 * plan.num_nodes, 2 * plan.num_gpus), "of an older version"
    limits = msgspec.convert({"node_hours": 33.0 + 2 * plan.num_nodes}, LimitsConfig)
    use = find_campaign_use(campaign.job(2), limits=limits, plan=plan)
    assert use.find_drain(now=0.0, job_start=0.0, drain_s=0.0) is None
    assert use.find_drain(now=3600.0, job_start=0.0, drain_s=0.0) is not None


def test_an_error_of_the_file_system_requests_and_ends_nothing(tmp_path, monkeypatch):
    def fail(_path):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    watched = EndRequests(tmp_path / "stop", tmp_path / "terminated")
    monkeypatch.setattr(type(tmp_path), "exists", fail)
    assert not watched.has_termination()
    assert watched.find_drain(now=0.0, end_time=END_TIME, drain_s=DRAIN_S, kill_wait_s=KILL_WAIT_S) is None


@pytest.mark.parametrize("first", [errno.ESTALE, errno.ENOSPC, errno.EDQUOT, errno.EROFS])
def test_an_outage_of_the_file_system_ends_a_job_only_when_it_lasts(first: int) -> None:
    now = [0.0]
    outage = FileOutage(clock=lambda: now[0])
    outage.note(OSError(first, os.strerror(first)))
    outage.end()
    now[0] = PATIENCE_S + 1.0
    outage.note(OSError(errno.EIO, "again"))
    now[0] += PATIENCE_S + 1.0
    with pytest.raises(OSError, match="again"):
        outage.note(OSError(errno.EIO, "again"))


def test_an_error_that_does_not_pass_ends_a_job_at_once() -> None:
    with pytest.raises(PermissionError):
        FileOutage().note(PermissionError(errno.EACCES, "denied"))


def test_a_job_counts_the_size_of_its_first_checkpoint():
    margin = DrainMargin(list, least_s=60.0, assumed_save_s=300.0)
    assert margin.find_seconds() == pytest.approx(MARGIN_FACTOR * 600.0)
    margin = DrainMargin(lambda: [CheckpointSaved(step=1, wall_s=50.0)], least_s=60.0, assumed_save_s=300.0)
    assert margin.find_seconds() == pytest.approx(MARGIN_FACTOR * 100.0)
