"""What a job does about workers that fail again and again, and about a trainer that has failed for good."""

import errno
import os
from concurrent.futures import Future
from types import SimpleNamespace

import pytest

from hpcrl.campaign_dir.events import FaultReported, WorkerFailed
from hpcrl.campaign_dir.job_end import JobError
from hpcrl.campaign_dir.paths import CampaignDir
from hpcrl.campaign_dir.train_progress import TrainProgress, write_train_progress
from hpcrl.config.site import load_site
from hpcrl.errors import HpcrlError
from hpcrl.job.job_workers import JobWorkers, LongLivedWorker
from hpcrl.job.memory_watch import TrainerMemoryWatch
from hpcrl.job.supervision import RestartBudget
from hpcrl.plan.plan import make_plan
from hpcrl.system.files import make_private_dir
from hpcrl.system.processes import MAX_RESTARTS
from tests.support.plans import make_recipe


@pytest.fixture
def events():
    return []


@pytest.fixture
def workers(tmp_path, events):
    campaign, recipe = CampaignDir(tmp_path), make_recipe()
    make_private_dir(campaign.events)
    return JobWorkers(
        job=campaign.job(0),
        plan=make_plan(recipe, load_site("local")),
        quorum=recipe.job.quorum,
        budget=RestartBudget(campaign.job(0).logs),
        memory=TrainerMemoryWatch(campaign, recipe=recipe, has_gpus=False, emit=events.append),
        emit=events.append,
    )


def test_a_trainer_that_learned_nothing_is_not_started_again(workers):
    workers._refuse_restart()
    write_train_progress(workers.job.campaign.train_progress, TrainProgress(failure="no reward was ever computed"))
    with pytest.raises(HpcrlError, match=r"^no reward was ever computed$"):
        workers._refuse_restart()


class RefusedRuntime:
    """A runtime whose file system refuses the first starts of the trainer."""

    def __init__(self, num_refused: int) -> None:
        self.num_refused = num_refused
        self.num_started = 0

    def start_trainer(self):
        if self.num_refused:
            self.num_refused -= 1
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.num_started += 1

    def replace_lost_blocks(self):
        return []


def test_a_trainer_whose_start_is_refused_by_a_full_file_system_has_failed_once_and_is_started_later(workers, events):
    runtime = RefusedRuntime(num_refused=MAX_RESTARTS + 2)
    workers.memory = SimpleNamespace(report_shortage=lambda code: False)
    code = 1
    while runtime.num_refused:
        with pytest.raises(OSError, match="No space left"):
            workers.restart_failed(runtime, trainer_code=code)
        code = None  # none runs
    assert workers.restart_failed(runtime, trainer_code=code) is False
    assert workers.restart_failed(runtime, trainer_code=None) is False
    assert runtime.num_started == 1
    assert [event.of for event in events if isinstance(event, WorkerFailed)] == ["train-0"]


def fail_worker(workers, worker, times=MAX_RESTARTS + 1):
    for _ in range(times):
        workers._count_worker_failure(worker, "exit code 1")


def test_a_job_continues_without_a_worker_that_fails_again_and_again(workers, events):
    workers.long_lived = [LongLivedWorker("env", index, Future()) for index in range(3)]
    fail_worker(workers, workers.long_lived[0])
    assert [worker.is_resting for worker in workers.long_lived] == [True, False, False]
    (fault,) = [event for event in events if isinstance(event, FaultReported)]
    assert (fault.what, fault.detail.endswith("env continues with 2 of 3 workers")) == ("quorum", True)
    with pytest.raises(JobError, match=r"^env-1 failed 4 times in an hour, the last time with: exit code 1") as ended:
        fail_worker(workers, workers.long_lived[1])
    assert ended.value.cause == "user-code"


def test_engines_that_fail_everywhere_are_not_the_fault_of_a_recipe(workers):
    workers.long_lived = [LongLivedWorker("decode", 0, Future())]
    with pytest.raises(JobError) as ended:
        fail_worker(workers, workers.long_lived[0])
    assert ended.value.cause == "infrastructure"
