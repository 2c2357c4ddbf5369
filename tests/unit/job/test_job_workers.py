"""What a job does about workers that fail again and again, and about a trainer that has failed for good."""

import errno
import itertools
import os
import time
from collections import deque
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import ANY

import msgspec
import pytest

from hpcrl.campaign_dir.events import FaultReported, WorkerFailed, WorkerRestarted
from hpcrl.campaign_dir.job_end import JobError
from hpcrl.campaign_dir.paths import CampaignDir
from hpcrl.campaign_dir.train_progress import TrainProgress, write_train_progress
from hpcrl.config.site import load_site
from hpcrl.errors import HpcrlError
from hpcrl.job import job_workers
from hpcrl.job.job_workers import JobWorkers, LongLivedWorker
from hpcrl.job.memory_watch import TrainerMemoryWatch
from hpcrl.job.progress_watch import MAX_BEAT_AGE_S, RankBeats
from hpcrl.job.runtime import StepLog
from hpcrl.job.supervision import LookInterval, RestartBudget
from hpcrl.job.trainer_end import RankFailure, report_rank_failure
from hpcrl.plan.plan import make_plan
from hpcrl.slurm.allocation import JobAllocation
from hpcrl.system.files import make_private_dir
from hpcrl.system.memory import KILLED
from hpcrl.system.processes import MAX_RESTARTS
from tests.support.clocks import SettableClock
from tests.support.plans import make_recipe


@pytest.fixture
def events():
    return []


@pytest.fixture
def workers(tmp_path, events):
    campaign, recipe = CampaignDir(tmp_path), make_recipe()
    make_private_dir(campaign.events)
    make_private_dir(campaign.job(0).root)
    return JobWorkers(
        job=campaign.job(0),
        plan=make_plan(recipe, load_site("local")),
        quorum=recipe.job.quorum,
        budget=RestartBudget(campaign.job(0).logs),
        memory=TrainerMemoryWatch(campaign, recipe=recipe, has_gpus=False, emit=events.append),
        silence_s=120.0,
        start_timeout_s=900.0,
        emit=events.append,
    )


def test_a_trainer_that_learned_nothing_is_not_started_again(workers):
    workers._refuse_restart()
    write_train_progress(workers.job.campaign.train_progress, TrainProgress(failure="no reward was ever computed"))
    with pytest.raises(HpcrlError, match=r"^no reward was ever computed$"):
        workers._refuse_restart()


class RefusedRuntime:
    """A runtime whose file system refuses the first starts of the trainer."""

    step_log = StepLog(Path("none"))

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
    assert [type(event) for event in events] == [WorkerFailed], "none was started again"
    assert workers.restart_failed(runtime, trainer_code=code) is False
    assert workers.restart_failed(runtime, trainer_code=None) is False
    assert runtime.num_started == 1
    assert events == [WorkerFailed(of="train-0", reason=ANY), WorkerRestarted(of="train-0")]


def test_a_trainer_that_ends_while_the_disk_is_full_has_not_failed_until_there_is_room(workers, events, monkeypatch):
    workers.memory = SimpleNamespace(report_shortage=lambda code: False)
    runtime = RefusedRuntime(num_refused=0)

    def refuse(path, data):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as full:
        full.setattr(job_workers, "publish_file", refuse)
        for _ in range(MAX_RESTARTS + 2):
            with pytest.raises(OSError, match="No space left"):
                workers.restart_failed(runtime, trainer_code=1)
    assert events == []
    workers.restart_failed(runtime, trainer_code=1)
    assert events == [WorkerFailed(of="train-0", reason=ANY), WorkerRestarted(of="train-0")]


@pytest.mark.parametrize(
    ("log", "cause"),
    [
        ("OSError: [Errno 28] No space left on device", "infrastructure"),
        ("lost sys.stderr", "infrastructure"),
        ("x", "user-code"),
    ],
)
def test_a_trainer_that_fails_for_lack_of_room_does_not_count_as_the_users_code(workers, log, cause):
    workers.memory = SimpleNamespace(report_shortage=lambda code: False)
    make_private_dir(workers.job.logs)
    workers.job.log("train-0").write_text(f"{log}\n")
    for _ in range(MAX_RESTARTS):
        workers._has_trainer_failed(StartedTrainers(), 1)
    with pytest.raises(JobError) as ended:
        workers._has_trainer_failed(StartedTrainers(), 1)
    assert ended.value.cause == cause


def test_a_disk_that_was_full_uses_up_no_restart_of_a_trainer_that_was_killed_before(workers):
    workers.memory = SimpleNamespace(report_shortage=lambda code: False)
    make_private_dir(workers.job.logs)
    for log in ["x"] * MAX_RESTARTS + ["lost sys.stderr"] * MAX_RESTARTS:
        workers.job.log("train-0").write_text(f"{log}\n")
        assert workers._has_trainer_failed(StartedTrainers(), 1)


def fail_worker(workers, worker, times=MAX_RESTARTS + 1, reason="exit code 1"):
    for _ in range(times):
        workers._count_worker_failure(worker, reason)


def test_a_worker_that_a_disk_has_ended_uses_up_no_restart_of_one_that_was_killed(workers):
    workers.long_lived = [LongLivedWorker("env", index, Future()) for index in range(1)]
    worker = workers.long_lived[0]
    make_private_dir(workers.job.logs)
    fail_worker(workers, worker, MAX_RESTARTS, "loss of worker 0 (ended by SIGKILL)")
    workers.job.log("env-0").write_text("object repr: OSError(5, 'Input/output error')\nlost sys.stderr\n")
    fail_worker(workers, worker, MAX_RESTARTS, "loss of worker 0 (ended with exit code 1)")
    assert not worker.is_resting
    with pytest.raises(JobError) as ended:
        fail_worker(workers, worker, 1, "OSError: [Errno 28] No space left on device")
    assert ended.value.cause == "infrastructure"


def test_a_job_continues_without_a_worker_whose_own_disk_is_full(workers, events, monkeypatch):
    workers.long_lived = [LongLivedWorker("env", index, Future()) for index in range(300)]
    monkeypatch.setattr(job_workers, "find_worker_node", lambda *_: "n7")
    fail_worker(workers, workers.long_lived[3], reason="OSError: [Errno 28] No space left on device: '/tmp/sandbox'")
    assert [worker.name for worker in workers.long_lived if worker.is_resting] == ["env-3"]
    assert {record.node for record in workers.budget.list_records()} == {"n7"}
    (fault,) = [event for event in events if isinstance(event, FaultReported)]
    assert fault.detail.startswith("the disk of env-3 failed 4 times in an hour")


def test_a_worker_that_ends_while_the_campaigns_disk_is_full_has_not_failed_until_there_is_room(
    workers, events, monkeypatch
):
    workers.long_lived = [LongLivedWorker("env", 0, Future())]

    def refuse(path, data):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(job_workers, "publish_file", refuse)
    with pytest.raises(OSError, match="No space left"):
        fail_worker(workers, workers.long_lived[0], reason="OSError: [Errno 28] No space left on device")
    assert not events
    assert not workers.budget.is_used_up("the disk of env-0")


def test_a_worker_that_is_killed_after_a_disk_had_ended_it_has_failed(workers):
    workers.long_lived = [LongLivedWorker("env", index, Future()) for index in range(3)]
    make_private_dir(workers.job.logs)
    workers.job.log("env-0").write_text("lost sys.stderr\n")
    fail_worker(workers, workers.long_lived[0], reason="loss of worker 0 (ended by SIGKILL)")
    assert workers.long_lived[0].is_resting


def test_a_job_continues_without_a_worker_that_fails_again_and_again(workers, events):
    workers.long_lived = [LongLivedWorker("env", index, Future()) for index in range(3)]
    fail_worker(workers, workers.long_lived[0])
    assert [worker.is_resting for worker in workers.long_lived] == [True, False, False]
    (fault,) = [event for event in events if isinstance(event, FaultReported)]
    assert (fault.what, fault.detail.endswith("env continues with 2 of 3 workers")) == ("quorum", True)
    with pytest.raises(JobError, match=r"^env-1 failed 4 times in an hour, the last time with: exit code 1; ") as ended:
        fail_worker(workers, workers.long_lived[1])
    assert str(ended.value).endswith(f"its log is {workers.job.log('env-1')}")
    assert ended.value.cause == "user-code"


def test_a_worker_that_the_kernel_killed_for_its_memory_ends_a_job_for_that_cause(workers, events):
    workers.long_lived = [LongLivedWorker("decode", 0, Future())]
    with pytest.raises(JobError, match=r"raise resources\.decode\.mem_gib_per_worker") as ended:
        fail_worker(workers, workers.long_lived[0], reason=f"loss of worker 0 ({KILLED}) on host n")
    assert ended.value.cause == "out-of-memory"
    assert events[0].reason == f"loss of worker 0 ({KILLED}) on host n: raise resources.decode.mem_gib_per_worker"


def test_a_lost_env_worker_names_the_environments_that_run_inside_it(workers, events):
    from parsl.executors.high_throughput.errors import WorkerLost  # noqa: TID251

    runtime = SimpleNamespace(replace_lost_blocks=list, start_worker=lambda role, index: Future())
    workers.inner_domains = ("lake", "taxi")
    for role, error in (("env", WorkerLost(0, "n")), ("env", OSError("disk")), ("decode", WorkerLost(0, "n"))):
        workers.long_lived = [LongLivedWorker(role, 0, Future())]
        workers.long_lived[0].future.set_exception(error)
        workers.restart_failed(runtime, trainer_code=None)
    lost, other, engine = [event.reason for event in events if isinstance(event, WorkerFailed)]
    assert lost.startswith("Task failure due to loss of worker 0 on host n: the environments of lake, taxi run in its ")
    assert 'domains.NAME.isolation = "process"' in lost
    assert (other, engine) == ("disk", "Task failure due to loss of worker 0 on host n")


def test_engines_that_fail_everywhere_are_not_the_fault_of_a_recipe(workers):
    workers.long_lived = [LongLivedWorker("decode", 0, Future())]
    with pytest.raises(JobError) as ended:
        fail_worker(workers, workers.long_lived[0])
    assert ended.value.cause == "infrastructure"


@pytest.fixture
def clock():
    return SettableClock(1000.0)


@pytest.fixture
def lost(workers, clock, monkeypatch):
    """The workers of a job on Slurm whose trainer has shown a heartbeat for the last time; and Slurm's answers."""
    file = workers.job.campaign.events / "000-train-0.jsonl"
    file.write_text("")
    workers.allocation = JobAllocation(job_id="7", end_time=1e12, nodes=[["t1"] for _ in workers.plan.components])
    workers.beats, workers.beat_looks = RankBeats([file], clock=clock), LookInterval(0.0)
    workers.trainer_started_at = time.time()
    answers = SimpleNamespace(lost=[], restarted=[])
    monkeypatch.setattr(job_workers, "query_lost_nodes", lambda nodes, **_: answers.lost)
    monkeypatch.setattr(job_workers, "query_restarted_nodes", lambda nodes, **_: answers.restarted)
    for number in range(2):
        file.write_text(f"{number}")
        workers.beats.find_silent(max_age_s=1.0, max_start_s=1.0)
    clock.now += MAX_BEAT_AGE_S + 1
    return answers


class StartedTrainers:
    """A runtime that counts how often the trainer is started."""

    step_log = StepLog(Path("none"))

    def __init__(self, *, has_spare=False):
        self.num = 0
        self.has_spare = has_spare

    def start_trainer(self):
        self.num += 1

    def replace_lost_blocks(self):
        return []

    def drop_trainer_node(self, node):
        return self.has_spare


def test_a_trainer_whose_node_was_booted_again_is_started_again(workers, lost, events):
    runtime = StartedTrainers()
    workers.restart_failed(runtime, trainer_code=None)
    assert runtime.num == 0, "Slurm knows of nothing: it may be a file server that is away"
    lost.restarted = ["t1"]
    workers.restart_failed(runtime, trainer_code=None)
    assert runtime.num == 1
    assert [event.reason for event in events if isinstance(event, WorkerFailed)] == [
        "t1 was started again, and the trainer's processes there are gone"
    ]
    workers.restart_failed(runtime, trainer_code=None)
    assert runtime.num == 1, "the new start has its time"


def test_a_trainer_whose_node_is_lost_ends_the_job_and_the_next_one_avoids_the_node(workers, lost):
    lost.lost = ["t1"]
    with pytest.raises(JobError, match=r"^t1 of the trainer failed, and it has no other node in this job$") as ended:
        workers.restart_failed(StartedTrainers(), trainer_code=None)
    assert (ended.value.cause, ended.value.nodes) == ("node-failure", ["t1"])
    workers.job.campaign.recipe.write_text("{}")
    with pytest.raises(JobError, match="t1 of the trainer failed"):
        workers.restart_failed(StartedTrainers(), trainer_code=1)


def test_a_trainer_whose_node_is_lost_continues_on_a_spare_one(workers, lost, events):
    lost.lost, runtime = ["t1"], StartedTrainers(has_spare=True)
    assert workers.restart_failed(runtime, trainer_code=None), "the couriers go around it"
    assert runtime.num == 1
    assert not any("t1" in names for names in workers.allocation.nodes)
    assert "train continues without t1" in [event.detail for event in events if isinstance(event, FaultReported)]


def test_a_trainer_without_a_heartbeat_for_long_is_started_again_whatever_slurm_reports(workers, lost, clock):
    runtime = StartedTrainers()
    clock.now += workers.silence_s + 300
    workers.restart_failed(runtime, trainer_code=None)
    assert runtime.num == 1


def test_a_trainer_that_has_just_started_has_longer_for_its_first_heartbeat(clock, tmp_path):
    file = tmp_path / "beats"
    beats = RankBeats([file], clock=clock)
    clock.now += 50
    assert beats.find_silent(max_age_s=10.0, max_start_s=60.0) == []
    clock.now += 11
    assert beats.find_silent(max_age_s=10.0, max_start_s=60.0) == [0]


class SteplessTrainers(StartedTrainers):
    """A runtime whose srun reports that it cannot start the steps of the trainer."""

    def __init__(self, log, line, *, num_lines=1_000):
        super().__init__()
        self.log, self.lines, self.step_log = log, [line] * num_lines, StepLog(log)

    def start_trainer(self):
        super().start_trainer()
        self.step_log.note_start()
        with self.log.open("a") as log:
            log.write(f"{self.lines.pop() if self.lines else 'srun: error: n1: task 0: Exited with exit code 1'}\n")


def fail_until_ended(workers, runtime, clock):
    """Let the trainer end as soon as it was started, until the job ends; return when it was started again."""
    workers.memory = SimpleNamespace(report_shortage=lambda code: False)
    workers.start_trainer(runtime)
    starts = []
    while True:
        clock.now += 1.0
        num = runtime.num
        workers.restart_failed(runtime, trainer_code=1)
        starts += [clock.now] * (runtime.num - num)
        yield starts


def test_a_trainer_that_slurm_cannot_start_is_not_blamed_on_the_users_code_and_waits_before_each_start(
    workers, lost, monkeypatch
):
    clock = SettableClock(1000.0)
    monkeypatch.setattr("hpcrl.job.job_workers.time.monotonic", clock)
    make_private_dir(workers.job.logs)
    workers.job.log("train-0").write_text("step 812: loss 0.31\n")
    line = "srun: error: Unable to create step for job 7: Unable to contact slurm controller"
    turns = fail_until_ended(workers, SteplessTrainers(workers.job.log("train-step"), line), clock)
    starts = next(turns)
    with pytest.raises(JobError, match=r"a step of train-0 failed 4 times .*Unable to contact slurm") as found:
        deque(turns, maxlen=0)
    assert found.value.cause == "infrastructure"
    assert [later - start for start, later in itertools.pairwise(starts)] == [31.0, 61.0]


def test_a_node_on_which_steps_of_the_trainer_cannot_start_is_named(workers, lost, monkeypatch):
    clock = SettableClock(1000.0)
    monkeypatch.setattr("hpcrl.job.job_workers.time.monotonic", clock)
    make_private_dir(workers.job.logs)
    workers.allocation = JobAllocation(job_id="7", end_time=1e12, nodes=[["t1", "t2", "t3"]])
    line = "srun: error: Task launch for StepId=7.3 failed on node t2: Communication connection failure"
    with pytest.raises(JobError) as found:
        deque(fail_until_ended(workers, SteplessTrainers(workers.job.log("train-step"), line), clock), maxlen=0)
    assert found.value.cause == "node-failure"
    assert workers.list_bad_nodes() == ["t2"]


def test_what_srun_reports_of_an_earlier_start_is_not_the_reason_of_this_end(workers, lost, events):
    make_private_dir(workers.job.logs)
    workers.job.log("train-0").write_text("ZeroDivisionError: of the recipe\n")
    workers.memory = SimpleNamespace(report_shortage=lambda code: False)
    line = "srun: error: Unable to contact slurm controller (connect failure)"
    runtime = SteplessTrainers(workers.job.log("train-step"), line, num_lines=1)
    workers.start_trainer(runtime)
    workers.start_trainer(runtime)
    workers.restart_failed(runtime, trainer_code=1)
    (failed,) = [event for event in events if isinstance(event, WorkerFailed)]
    assert "ZeroDivisionError" in failed.reason


ECC_ERROR = """Traceback (most recent call last):
  File "train.py", line 1, in <module>
RuntimeError: AcceleratorError: CUDA error: uncorrectable ECC error encountered
Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.
"""
LOST_ERROR = "RuntimeError: [gloo/transport/tcp/pair.cc:537] Connection closed by peer [10.0.0.7]:1\n"


@pytest.fixture
def on_four_nodes(workers, lost):
    """The workers of a trainer with a rank on each of four nodes."""
    trainer = msgspec.structs.replace(workers.plan.role("train"), num_workers=4, workers_per_node=1)
    roles = [trainer if role.role == "train" else role for role in workers.plan.roles]
    workers.plan = msgspec.structs.replace(workers.plan, roles=roles)
    workers.memory = SimpleNamespace(report_shortage=lambda code: False)
    workers.allocation = JobAllocation(job_id="7", end_time=1e12, nodes=[["t0", "t1", "t2", "t3"]])
    make_private_dir(workers.job.logs)
    for rank in (0, 1, 3):
        workers.job.log(f"train-{rank}").write_text(LOST_ERROR)
    return workers


def write_failures(workers, *ranks):
    lines = [report_rank_failure(RankFailure(rank, 1)) for rank in ranks]
    workers.job.log("train-step").write_text("\n".join([*lines, ""]))
    runtime = StartedTrainers()
    runtime.step_log = StepLog(workers.job.log("train-step"))
    return runtime


def fail_trainer(workers, runtime, *, times):
    for _ in range(times):
        workers.restart_failed(runtime, trainer_code=1)


def test_a_bad_gpu_ends_the_job_and_not_the_campaign_and_its_node_is_named(on_four_nodes, events):
    workers = on_four_nodes
    workers.job.log("train-2").write_text(ECC_ERROR)
    runtime = write_failures(workers, 0, 2, 1)
    with pytest.raises(JobError, match=r"a GPU of t2 failed 4 times .*of rank 2: .*uncorrectable ECC") as found:
        fail_trainer(workers, runtime, times=MAX_RESTARTS + 1)
    assert (found.value.cause, found.value.nodes) == ("node-failure", ["t2"])
    assert {event.of for event in events if isinstance(event, WorkerFailed)} == {"train-2"}


def test_a_trainer_with_a_bad_gpu_continues_on_a_spare_node(on_four_nodes, events):
    workers = on_four_nodes
    workers.job.log("train-2").write_text(ECC_ERROR)
    runtime = write_failures(workers, 2)
    runtime.has_spare = True
    assert workers.restart_failed(runtime, trainer_code=1), "the couriers go around it"
    assert workers.allocation.nodes == [["t0", "t1", "t3"]]


def test_the_error_of_the_rank_that_failed_is_reported_and_not_that_of_the_first(on_four_nodes):
    workers = on_four_nodes
    workers.job.log("train-2").write_text("Traceback (most recent call last):\nValueError: a bad reward\n")
    reason = workers.describe_trainer_end(write_failures(workers, 0, 2), 1)
    assert reason == "exit code 1 of rank 2: ValueError: a bad reward"


def test_ranks_that_have_all_lost_each_other_are_not_blamed_on_the_users_code(on_four_nodes):
    workers = on_four_nodes
    workers.job.log("train-2").write_text(LOST_ERROR)
    with pytest.raises(JobError, match=r"Connection closed by peer .*; its log is .*/train-\d\.log$") as found:
        fail_trainer(workers, write_failures(workers, 0, 2), times=MAX_RESTARTS + 1)
    assert found.value.cause == "infrastructure"
