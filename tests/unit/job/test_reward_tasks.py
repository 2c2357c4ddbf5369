"""Reward tasks, and when reward jobs start and end."""

import errno
import os
import time
from concurrent.futures import Future

import pytest

from hpcrl.campaign_dir.events import FaultReported, RewardJobsScaled
from hpcrl.campaign_dir.paths import CampaignDir
from hpcrl.config.recipe import RewardConfig
from hpcrl.job.reward_tasks import OUTAGE_PAUSE_S, SEGMENTS_PER_JOB, RewardJobScaler, RewardScoring
from hpcrl.slurm.script import make_reward_script
from hpcrl.spool.listing import find_shard
from hpcrl.system.file_watch import PATIENCE_S
from tests.support.plans import plan_recipe


def scale(**changed):
    return RewardJobScaler(**({"max_jobs": 2, "idle_s": 20.0, "patience_s": 60.0} | changed))


def test_work_starts_a_job_and_much_work_starts_more_up_to_the_limit():
    assert scale().decide(waiting=1, jobs=0, now=0) == "start"
    assert scale().decide(waiting=SEGMENTS_PER_JOB, jobs=1, now=0) is None
    assert scale().decide(waiting=SEGMENTS_PER_JOB + 1, jobs=1, now=0) == "start"
    assert scale().decide(waiting=1000, jobs=2, now=0) is None


def test_jobs_end_after_they_have_been_idle_and_not_before():
    rule = scale()
    assert rule.decide(waiting=0, jobs=1, now=100) is None
    assert rule.decide(waiting=0, jobs=1, now=119) is None
    assert rule.decide(waiting=0, jobs=1, now=120) == "end"


def test_work_in_between_counts_as_not_idle():
    rule = scale()
    rule.decide(waiting=0, jobs=1, now=100)
    rule.decide(waiting=3, jobs=1, now=110)
    assert rule.decide(waiting=0, jobs=1, now=121) is None


def test_without_jobs_there_is_nothing_to_end():
    rule = scale()
    rule.decide(waiting=0, jobs=0, now=0)
    assert rule.decide(waiting=0, jobs=0, now=1000) is None


class ManagerLost(Exception):
    """The error of a lost worker, with Parsl's name for it."""


class Workers:
    """Reward workers that do nothing until a test asks them to."""

    def __init__(self):
        self.tasks = []
        self.jobs = 0
        self.are_jobs_refused = False

    def score(self, segments, *, shard, num_shards, elastic):
        assert all(find_shard(segment, num_shards=num_shards) == shard for segment in segments)
        self.tasks.append((*segments, elastic, Future()))
        return self.tasks[-1][2]

    def num_reward_jobs(self):
        return self.jobs

    def start_reward_job(self):
        self.jobs += not self.are_jobs_refused

    def end_reward_jobs(self):
        self.jobs = 0


SEGMENT = "000-env-0-00000000-8-0123abcd.h5"


@pytest.fixture
def campaign(tmp_path):
    campaign = CampaignDir(tmp_path)
    for name in ("rollouts", "scored"):
        campaign.spool(name).mkdir(parents=True)
    (campaign.spool("rollouts") / SEGMENT).touch()
    return campaign


@pytest.fixture
def spent():
    return []


@pytest.fixture
def events():
    return []


@pytest.fixture
def make(campaign, spent, events):
    def scoring(*, elastic=True, **reward):
        return RewardScoring(
            campaign=campaign,
            reward=RewardConfig(**reward),
            elastic=elastic,
            emit=events.append,
            count_failure=lambda what, why: spent.append(what),
        )

    return scoring


def test_a_sealed_segment_becomes_one_task(make):
    workers, scoring = Workers(), make()
    scoring.poll(workers)
    scoring.poll(workers)
    assert [(segment, elastic) for segment, elastic, _ in workers.tasks] == [(SEGMENT, True)]
    assert workers.jobs == 1


def test_a_reward_job_that_is_refused_is_not_reported_as_started(make, events, monkeypatch):
    workers, scoring, now = Workers(), make(), 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    workers.are_jobs_refused = True
    scoring.poll(workers)
    assert not [event for event in events if isinstance(event, RewardJobsScaled)]
    now, workers.are_jobs_refused = 200.0, False
    scoring.poll(workers)
    assert [event.num for event in events if isinstance(event, RewardJobsScaled)] == [1]


def test_without_reward_jobs_every_segment_is_scored_on_spare_cores(make):
    workers = Workers()
    make(elastic=False).poll(workers)
    assert [(segment, elastic) for segment, elastic, _ in workers.tasks] == [(SEGMENT, False)]
    assert workers.jobs == 0


def test_a_segment_of_a_preempted_job_is_scored_again_and_costs_no_attempt(make, spent, events):
    workers, scoring = Workers(), make()
    scoring.poll(workers)
    workers.tasks[0][2].set_exception(ManagerLost("gone"))
    scoring.poll(workers)
    assert len(workers.tasks) == 2
    assert spent == []
    assert isinstance(events[-1], FaultReported)


def test_a_task_that_fails_costs_an_attempt(make, spent):
    workers, scoring = Workers(), make()
    scoring.poll(workers)
    workers.tasks[0][2].set_exception(RuntimeError("no"))
    scoring.poll(workers)
    assert spent == [f"the scoring of {SEGMENT}"]


def test_a_task_on_a_disk_that_takes_no_file_costs_no_attempt_until_patience_ends(make, spent, monkeypatch):
    workers, scoring, now = Workers(), make(), 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    scoring.poll(workers)
    for number in range(200):
        assert (len(workers.tasks), spent) == (number + 1, [])
        workers.tasks[-1][2].set_exception(OSError(errno.EROFS, os.strerror(errno.EROFS)))
        scoring.poll(workers)
        assert len(workers.tasks) == number + 1, "not again at once"
        if spent:
            break
        now += OUTAGE_PAUSE_S
        scoring.poll(workers)
    assert PATIENCE_S < now - 100.0 < PATIENCE_S + 2 * OUTAGE_PAUSE_S
    assert spent == [f"the scoring of {SEGMENT}"]


def test_a_segment_that_no_reward_job_takes_goes_to_spare_cores(make):
    workers, scoring = Workers(), make(patience_s=1e-9)
    scoring.poll(workers)
    scoring.scaled_at = 0.0
    scoring.poll(workers)
    assert [elastic for _, elastic, _ in workers.tasks] == [True, False]


def test_reward_jobs_end_without_work(make, campaign):
    (campaign.spool("scored") / SEGMENT).touch()
    workers, scoring = Workers(), make(idle_s=1e-9)
    workers.jobs = 1
    scoring.poll(workers)
    scoring.scaled_at = 0.0
    scoring.poll(workers)
    assert (workers.tasks, workers.jobs) == ([], 0)


ELASTIC = ("reward.placement=elastic",)


def test_reward_jobs_go_to_the_preemptible_partition():
    plan = plan_recipe(*ELASTIC)
    assert plan.reward_jobs.partition == "preempt"
    assert "--partition=preempt" in plan.reward_jobs.slurm_flags


def test_a_site_without_one_falls_back_to_spare_cores_and_reports_it():
    plan = plan_recipe(*ELASTIC, site="perlmutter")
    assert plan.reward_jobs is None
    assert any("no preemptible CPU partition" in fallback for fallback in plan.fallbacks)


def test_a_reward_job_is_one_node_and_is_not_requeued(tmp_path):
    plan = plan_recipe(*ELASTIC)
    text = make_reward_script(plan, job=CampaignDir(tmp_path / "c").job(0), name="r", command=["python", "-m", "a b"])
    assert "#SBATCH --no-requeue\n" in text
    assert "#SBATCH --nodes=1\n" in text
    assert text.endswith("exec python -m 'a b'\n")
