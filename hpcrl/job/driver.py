"""The driver of one job: `python -m hpcrl.job.driver CAMPAIGN JOB` starts, supervises and ends the workers.

    main               start the guardian with the driver as its child
    JobDriver          supervise one job: allocation -> runtime -> supervise until the trainer is done -> outcome
    LongLivedWorker    a worker that runs until the job ends
    LONG_LIVED_ROLES, CLOCK_SKEW_S, LIMIT_OUTCOMES   constants
    POLL_INTERVAL_S, LOOK_INTERVAL_S, END_QUERY_TIMEOUT_S, LEASE_INTERVAL_S, LIMITS_INTERVAL_S, NOTICE_INTERVAL_S,
    MIN_CLOSE_GRACE_S   times

No data passes through the driver.
"""

import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from hpcrl.campaign_dir.driver_lease import DriverLease, LeaseHolder
from hpcrl.campaign_dir.endpoints import list_endpoints, withdraw_all
from hpcrl.campaign_dir.event_log import EventLog, EventReader, find_worker_node
from hpcrl.campaign_dir.events import (
    DrainStarted,
    FaultReported,
    JobEnded,
    JobOutcome,
    JobStarted,
    LayoutChosen,
    WorkerFailed,
    WorkerRestarted,
)
from hpcrl.campaign_dir.job_end import EndCause, JobEnd, JobError
from hpcrl.campaign_dir.paths import CampaignDir
from hpcrl.campaign_dir.train_progress import read_train_progress
from hpcrl.campaign_dir.workers import WorkerPlace
from hpcrl.config.recipe import Recipe, RoleName
from hpcrl.config.site import Site
from hpcrl.errors import EngineError, HpcrlError, SlurmError, WeightsError
from hpcrl.job.campaign_lease import take_campaign_lease
from hpcrl.job.courier_step import WeightPlane
from hpcrl.job.guardian import CLOSE_GRACE_S, DriverPulse, cancel_reward_jobs, run_guarded, send_outcome
from hpcrl.job.memory_watch import KILLED, TrainerMemoryWatch
from hpcrl.job.metrics_process import MetricsProcess
from hpcrl.job.progress_watch import ProgressWatch, count_activity
from hpcrl.job.reward_tasks import RewardScoring
from hpcrl.job.supervision import (
    CampaignUse,
    DrainMargin,
    DrainRequest,
    EndRequests,
    LookInterval,
    RestartBudget,
    find_quorum,
    measure_hours,
    plan_termination,
)
from hpcrl.plan.plan import Plan
from hpcrl.plan.records import read_plan, read_recipe, read_site
from hpcrl.slurm import next_job
from hpcrl.slurm.allocation import JobAllocation, query_schedule, read_allocation, scrub_environment
from hpcrl.slurm.end_policy import find_bad_nodes
from hpcrl.slurm.status import query_failed_nodes
from hpcrl.system.exit_codes import EXIT_DONE, EXIT_DRAINED, EXIT_FAILED, EXIT_OUT_OF_MEMORY
from hpcrl.system.file_watch import WatchedValue
from hpcrl.system.files import make_private_dir, publish_file, read_last_line, remove_path
from hpcrl.system.network import current_node, find_bind_address
from hpcrl.weights import versions

if TYPE_CHECKING:
    from hpcrl.job.runtime import JobRuntime


LONG_LIVED_ROLES: tuple[RoleName, ...] = ("prefill", "decode", "env")
POLL_INTERVAL_S = 0.1
LOOK_INTERVAL_S = 1.0
"""The longest time between two looks at the trainer's progress, while nothing changes."""
END_QUERY_TIMEOUT_S = 3.0
"""Time for Slurm to answer when a job that is about to end will end: there is little of it."""
LIMIT_OUTCOMES: dict[EndCause, JobOutcome] = {"goal-reached": "done", "budget-used": "stopped"}
"""The outcome of a job that drained for a limit of the campaign."""
LEASE_INTERVAL_S = 10.0
LIMITS_INTERVAL_S = 5.0
NOTICE_INTERVAL_S = 0.5
MIN_CLOSE_GRACE_S = 0.5
CLOCK_SKEW_S = 5.0
"""The most by which the clocks of nodes differ."""


def main() -> int:
    """Turn the batch script's process into the guardian and run the driver in a child."""
    campaign, number = CampaignDir(Path(sys.argv[1])), int(sys.argv[2])
    place = WorkerPlace(campaign.job(number), current_node())
    lease = take_campaign_lease(place, has_scheduler=read_plan(campaign).layout != "local")
    if isinstance(lease, LeaseHolder):  # nothing is touched, not even the outcome: the other job may have this number
        print(f"hpcrl: {lease.describe()}: this one ends", file=sys.stderr, flush=True)  # noqa: T201 - the batch log
        return EXIT_FAILED
    return run_guarded(lambda outcome_fd, pulse: _drive_job(place, lease, pulse, outcome_fd=outcome_fd), place)


def _drive_job(place: WorkerPlace, lease: DriverLease, pulse: DriverPulse, *, outcome_fd: int) -> int:
    """Drive the job and send its outcome to the guardian, whatever happens; only a kill prevents that."""
    driver: JobDriver | None = None
    try:
        driver = JobDriver.load(place, lease, note_turn=pulse.note_turn)
        end = driver.drive()
    except BaseException as error:  # noqa: BLE001 - whatever failed, the guardian must receive the reason
        if isinstance(error, HpcrlError):
            print(f"hpcrl: {error}", file=sys.stderr, flush=True)  # noqa: T201 - the batch log is where people look
        else:
            sys.excepthook(*sys.exc_info())  # os._exit follows, so nothing else prints it
        end = _describe_failure(error, is_supervising=driver is not None and driver.is_supervising)
    if driver is not None:
        end = msgspec.structs.replace(end, nodes=sorted({*end.nodes, *driver.list_bad_nodes()}))
    send_outcome(end, outcome_fd=outcome_fd, job=place.job)
    return 1 if end.outcome == "failed" else 0


def _describe_failure(error: BaseException, *, is_supervising: bool) -> JobEnd:
    """Return the end of a job that failed: an error of the recipe or its code would come again, others may not."""
    reason = str(error) if isinstance(error, HpcrlError) else f"the driver failed: {type(error).__name__}: {error}"
    if isinstance(error, JobError):
        return JobEnd(outcome="failed", reason=reason, cause=error.cause, nodes=error.nodes)
    is_users = isinstance(error, HpcrlError) and not isinstance(error, SlurmError | WeightsError | EngineError)
    cause: EndCause = "user-code" if is_users else "infrastructure"
    return JobEnd(outcome="failed", reason=reason, cause=cause if is_supervising else "not-started")


@dataclass
class LongLivedWorker:
    """The current process of a long-lived worker."""

    role: RoleName
    index: int
    future: "Future[None]"
    is_resting: bool = False
    """True while it is not restarted, since it has failed too often."""

    @property
    def name(self) -> str:
        return f"{self.role}-{self.index}"


@dataclass
class JobDriver:
    """The supervisor of one job."""

    place: WorkerPlace
    lease: DriverLease
    plan: Plan
    recipe: Recipe
    site: Site
    events: EventLog
    note_turn: Callable[[], object] = int
    """Called in each turn of the loop: the guardian ends a driver that hangs."""
    workers: list[LongLivedWorker] = field(default_factory=list)
    slurm_id: str | None = None
    """None on a machine without a scheduler."""
    allocation: JobAllocation | None = None
    is_supervising: bool = False
    """True once everything was started."""
    drain_reason: str | None = None
    drain_cause: EndCause = "unknown"
    drain_deadline: float = float("inf")
    kill_time: float = float("inf")
    """When Slurm kills what is left, in seconds since the epoch, if it will."""
    is_terminating: bool = False
    """True once SIGTERM was taken into account."""
    has_schedule: bool = False
    """True once Slurm has named the end after SIGTERM."""
    has_published_drain: bool = False
    limits_before: tuple[str | None, EndCause, float, float] = (None, "unknown", float("inf"), float("inf"))
    """The reason, the cause, the deadline and the kill time of a drain before SIGTERM."""

    def __post_init__(self) -> None:
        self.campaign, self.job = self.place.campaign, self.place.job
        self.end_requests = EndRequests(self.campaign.stop, self.job.terminated)
        trainer_events = EventReader.for_role(self.campaign.events, "train", job=self.job.number)
        self.margin = DrainMargin(trainer_events.poll, least_s=self.recipe.job.drain_s)
        self.budget = RestartBudget(self.job.logs)
        self.started_at = time.time()
        self.use = CampaignUse(
            self.recipe.limits,
            EventReader.for_role(self.campaign.events, "train").poll,
            past_hours=sum(map(measure_hours, map(self.campaign.job, range(self.job.number)))),
            num_nodes=sum(part.nodes for part in self.plan.components),
            num_gpus=sum(part.nodes * part.gpus_per_node for part in self.plan.components),
        )
        self.limit_looks = LookInterval(LIMITS_INTERVAL_S)
        self.lease_looks, self.notice_looks = LookInterval(LEASE_INTERVAL_S), LookInterval(NOTICE_INTERVAL_S)
        self.schedule_looks = LookInterval(END_QUERY_TIMEOUT_S)
        self.memory = TrainerMemoryWatch(
            self.campaign,
            recipe=self.recipe,
            has_gpus=bool(self.plan.role("train").gpus_per_worker),
            emit=self.events.emit,
        )
        self.reporter = MetricsProcess(self.place, metrics=self.recipe.metrics, emit=self.events.emit)
        self.scoring = RewardScoring(
            campaign=self.campaign,
            reward=self.recipe.reward,
            elastic=self.plan.reward_jobs is not None,
            num_shards=self.plan.num_reward_shards,
            emit=self.events.emit,
            count_failure=self.budget.count_failure,
        )

    @classmethod
    def load(cls, place: WorkerPlace, lease: DriverLease, *, note_turn: Callable[[], None]) -> "JobDriver":
        """Read what was submitted; remove requests left by an earlier, requeued run of this job."""
        campaign, job = place.campaign, place.job
        make_private_dir(job.parsl)
        for path in (*job.list_messages(), campaign.train_progress):
            remove_path(path)
        recipe = read_recipe(campaign)
        for directory in (campaign.endpoints, *(campaign.judge(name).endpoints for name in recipe.judge)):
            withdraw_all(directory)
        events = EventLog.open(campaign, "driver", job=job.number, role="driver", node=place.node)
        return cls(
            place=place,
            lease=lease,
            plan=read_plan(campaign),
            recipe=recipe,
            site=read_site(campaign),
            events=events,
            note_turn=note_turn,
        )

    def drive(self) -> JobEnd:
        """Start everything, supervise, end everything; return how the job ended."""
        from hpcrl.job.runtime import JobRuntime  # it imports parsl: only here, and late

        if (known_end := self._find_campaign_end()) is not None:
            return known_end
        self.end_requests.listen()
        self.allocation = allocation = read_allocation(self.plan)
        self.slurm_id = allocation.job_id
        self.events.emit(JobStarted(slurm_id=allocation.job_id, end_time=allocation.end_time))
        self.events.emit(LayoutChosen(layout=self.plan.layout, reason=self.plan.layout_reason, nodes=allocation.nodes))
        if allocation.job_id is not None:
            scrub_environment(os.environ)
        for number in self.campaign.job_numbers():  # if a whole node was lost, no process was left to end them
            cancel_reward_jobs(self.campaign.job(number))
        runtime = JobRuntime(
            self.plan,
            place=self.place,
            allocation=allocation,
            address=find_bind_address(self.site.interfaces),
        )
        self.weight_plane = WeightPlane(
            self.place,
            plan=self.plan,
            ways=lambda transports: runtime.courier_commands(self.site, transports),
            emit=self.events.emit,
        )
        try:
            self.memory.note_limits()
            runtime.start_trainer()  # first: all others wait for its weights
            if self.plan.has_role("decode"):
                self.weight_plane.start(self.site.mpi)
            runtime.start()
            self._start_workers(runtime)
            self.note_turn()  # a Slurm that is silent may have cost most of a turn, and may again
            self._queue_next()
            self.is_supervising = True
            end = self._supervise(runtime, allocation)
        finally:
            self.weight_plane.close()
            runtime.close(grace_s=self._choose_grace())
            self.reporter.close()
        self.events.emit(JobEnded(outcome=end.outcome, reason=end.reason))
        return end

    def _find_campaign_end(self) -> JobEnd | None:
        """Return the end of a campaign that has reached a limit, or that the job before this one has ended."""
        now = time.time()
        if request := self.use.find_drain(now=now, job_start=now, drain_s=0.0):
            outcome = LIMIT_OUTCOMES[request.cause]
            return JobEnd(outcome=outcome, reason=request.reason, cause=request.cause)
        if not self.job.chain_marker.exists():
            return None
        last = self.campaign.job(self.job.number - 1)
        known = next_job.campaign_outcome(last, state=next_job.query_end_state(last))
        return None if known is None else JobEnd(outcome=known[0], reason=known[1])

    def list_bad_nodes(self) -> list[str]:
        """Return the nodes on which more fails than on others."""
        if self.allocation is None or self.allocation.job_id is None:
            return []
        nodes = {plan.role: self.allocation.nodes[plan.component] for plan in self.plan.roles}
        return find_bad_nodes(self.budget.list_records(), nodes)

    def _queue_next(self) -> None:
        next_job.try_follow(self.place, plan=self.plan, site=self.site, slurm_id=self.slurm_id, emit=self.events.emit)

    def _start_workers(self, runtime: "JobRuntime") -> None:
        for role in filter(self.plan.has_role, (*LONG_LIVED_ROLES, *self.plan.judge_roles)):
            for index in range(self.plan.role(role).num_workers):
                self.workers.append(LongLivedWorker(role=role, index=index, future=runtime.start_worker(role, index)))

    def _supervise(self, runtime: "JobRuntime", allocation: JobAllocation) -> JobEnd:
        watch = self._watch_progress()
        while True:
            self.note_turn()
            if self.end_requests.is_cancelled:
                reason = "a user asked it to end at once (hpcrl stop --now)"
                return JobEnd(outcome="stopped", reason=reason, cause="user-request")
            self._check_end_requests(allocation)
            code = runtime.trainer_exit_code()
            if code == EXIT_DONE:
                return self._finish("done", "every training step was made")
            if code == EXIT_DRAINED:
                return self._finish("drained", self.drain_reason or "the trainer was drained")
            if code is not None and self.drain_reason:
                return self._finish("cut", f"{self.drain_reason}, and the trainer failed: {self._describe_end(code)}")
            if time.monotonic() > self.drain_deadline:
                return self._finish("cut", f"{self.drain_reason}, and the time was too short for a checkpoint")
            if self.lease_looks.is_due() and self.lease.is_lost():
                reason = "another job runs this campaign: Slurm took this one for ended"
                return JobEnd(outcome="failed", reason=reason, cause="infrastructure")
            if not self.drain_reason:
                self._restart_failed(runtime, trainer_code=code)
                self.scoring.poll(runtime)
                self._check_progress(watch)
            time.sleep(POLL_INTERVAL_S)

    def _restart_failed(self, runtime: "JobRuntime", *, trainer_code: int | None) -> None:
        """Restart what ended too early; each has its own limit of restarts."""
        self.weight_plane.tend()
        self.reporter.keep_running()
        if trainer_code is not None:
            self._refuse_restart()
            if not self.memory.report_shortage(trainer_code):
                self._count_trainer_failure(trainer_code)
            runtime.start_trainer()
        for role, node in runtime.replace_lost_blocks():
            self._count_lost_pool(runtime, role, node)
        for worker in self.workers:
            if worker.is_resting:
                if not self.budget.is_used_up(worker.name):
                    worker.is_resting, worker.future = False, runtime.start_worker(worker.role, worker.index)
                    self.events.emit(WorkerRestarted(of=worker.name))
            elif worker.future.done():
                error = worker.future.exception()
                self._count_worker_failure(worker, str(error) if error else "it ended by itself")
                if not worker.is_resting:
                    worker.future = runtime.start_worker(worker.role, worker.index)

    def _count_trainer_failure(self, code: int) -> None:
        reason = self._describe_end(code)
        self.events.emit(WorkerFailed(of="train-0", reason=reason))
        cause: EndCause = "out-of-memory" if code == EXIT_OUT_OF_MEMORY else "user-code"
        self.budget.count_failure("train-0", reason, cause=cause)
        self.events.emit(WorkerRestarted(of="train-0"))

    def _count_lost_pool(self, runtime: "JobRuntime", role: RoleName, node: str) -> None:
        """Count that a worker pool has ended; after too many ends, continue without the node if enough are left."""
        self.events.emit(FaultReported(what="worker-pool", detail=f"{role} on {node} ended and was started again"))
        self.budget.note_node(role, node)
        pool = f"the worker pool of {role} on {node}"
        if self.budget.note_failure(pool):
            return
        quorum = find_quorum(self.plan.components[self.plan.role(role).component].nodes, share=self.recipe.job.quorum)
        if runtime.num_nodes(role) > quorum and runtime.drop_node(role, node):
            self.events.emit(FaultReported(what="node", detail=f"{role} continues without {node}"))
            self.weight_plane.go_around()
            return
        failed = query_failed_nodes([node], env=os.environ) if self.slurm_id is not None else []
        reason = self.budget.describe(pool, f"see parsl.{role}.block-*.log")
        cause: EndCause = "node-failure" if failed or node in self.list_bad_nodes() else "infrastructure"
        raise JobError(reason, cause=cause, nodes=failed)

    def _count_worker_failure(self, worker: LongLivedWorker, reason: str) -> None:
        """Count that a worker has ended; after too many ends, continue without it if enough are left."""
        self.events.emit(WorkerFailed(of=worker.name, reason=reason))
        if node := find_worker_node(self.campaign, self.job.number, worker.role, worker.index):
            self.budget.note_node(worker.role, node)
        if self.budget.note_failure(worker.name):
            self.events.emit(WorkerRestarted(of=worker.name))
            return
        worker.is_resting = True
        alike = [other for other in self.workers if other.role == worker.role]
        num_left = sum(not other.is_resting for other in alike)
        reason = self.budget.describe(worker.name, reason)
        if num_left < find_quorum(len(alike), share=self.recipe.job.quorum):
            by_default: EndCause = "user-code" if worker.role == "env" else "infrastructure"
            raise JobError(reason, cause="node-failure" if self.list_bad_nodes() else by_default)
        left = f"{worker.role} continues with {num_left} of {len(alike)} workers"
        self.events.emit(FaultReported(what="quorum", detail=f"{reason}; {left}"))

    def _describe_end(self, trainer_code: int) -> str:
        """Return why the trainer ended."""
        if trainer_code == EXIT_OUT_OF_MEMORY:
            return f"{KILLED}: raise resources.train.mem_gib_per_worker"
        return f"exit code {trainer_code}: {read_last_line(self.job.log('train-0'))}"

    def _refuse_restart(self) -> None:
        """Raise what ended the trainer if it would only fail again."""
        if failure := read_train_progress(self.campaign.train_progress).failure:
            raise JobError(failure, cause="user-code")

    def _check_end_requests(self, allocation: JobAllocation) -> None:
        """Drain the job if a user, Slurm or the clock asks for it; SIGTERM may also shorten the time of a drain."""
        if not self.is_terminating and self.notice_looks.is_due() and self.end_requests.has_termination():
            self.is_terminating = True
            self.limits_before = self.drain_reason, self.drain_cause, self.drain_deadline, self.kill_time
            self._terminate(allocation)
        elif self.is_terminating and not self.has_schedule and self.schedule_looks.is_due():
            self._terminate(allocation)
        if self.drain_reason:
            self._publish_drain()
            return
        request = self._find_drain(allocation)
        if request is None:
            return
        self._drain(request)
        if request.is_at_walltime:
            self._queue_next()  # Slurm may have refused it before; steps end without a drain, so this comes after it

    def _terminate(self, allocation: JobAllocation) -> None:
        """Drain after SIGTERM in the time that Slurm names, which may answer only when it is asked again."""
        request = self._plan_termination(allocation)
        self.drain_reason, self.drain_cause, self.drain_deadline, self.kill_time = self.limits_before
        self._drain(request)

    def _find_drain(self, allocation: JobAllocation) -> DrainRequest | None:
        if self.limit_looks.is_due():
            limit = self.use.find_drain(now=time.time(), job_start=self.started_at, drain_s=self.margin.find_seconds())
            if limit is not None:
                return limit
        return self.end_requests.find_drain(
            now=time.time(),
            end_time=allocation.end_time,
            drain_s=self.margin.find_seconds(),
            kill_wait_s=allocation.kill_wait_s,
        )

    def _plan_termination(self, allocation: JobAllocation) -> DrainRequest:
        """Return how to drain after SIGTERM; on a machine without a scheduler no SIGKILL follows."""
        now, end = time.time(), allocation.end_time
        kill_wait_s, drain_s = allocation.kill_wait_s, self.margin.find_seconds()
        cause: EndCause = "walltime" if now >= end - CLOCK_SKEW_S else "cancellation"
        self.has_schedule = allocation.job_id is None
        if allocation.job_id is not None:
            schedule = query_schedule(allocation.job_id, timeout_s=min(END_QUERY_TIMEOUT_S, kill_wait_s / 3))
            self.has_schedule = schedule is not None
            end = (schedule.running_end if schedule is not None else None) or now
            if schedule is not None and schedule.is_preempted:
                cause = "preemption"
        return plan_termination(end, now=now, drain_s=drain_s, kill_wait_s=kill_wait_s, cause=cause)

    def _drain(self, request: DrainRequest) -> None:
        if self.drain_reason is None:
            self.drain_reason, self.drain_cause = request.reason, request.cause
        self.drain_deadline = min(self.drain_deadline, time.monotonic() + request.grace_s)
        self.kill_time = min(self.kill_time, request.kill_time)
        self._publish_drain()
        self.events.emit(DrainStarted(reason=request.reason, grace_s=request.grace_s))

    def _publish_drain(self) -> None:
        """Ask all workers to drain; where the file system refuses that now, the next turn tries again."""
        if self.has_published_drain:
            return
        try:
            publish_file(self.job.drain, self.drain_reason or "")
        except OSError as error:
            print(f"hpcrl: {error}", file=sys.stderr, flush=True)  # noqa: T201 - the batch log is where people look
        else:
            self.has_published_drain = True

    def _choose_grace(self) -> float:
        """Return how long one part of the end may take: all of it must be over when Slurm kills the job."""
        return min(CLOSE_GRACE_S, max((self.kill_time - time.time()) / 4, MIN_CLOSE_GRACE_S))

    def _finish(self, outcome: JobOutcome, reason: str) -> JobEnd:
        """Let the workers seal what they hold before they are ended; a user's request to stop ends the campaign."""
        cause: EndCause = "complete" if outcome == "done" or self.drain_reason is None else self.drain_cause
        if outcome in ("drained", "cut") and self.campaign.stop.exists():
            outcome = "stopped"
        elif outcome == "drained":
            outcome = LIMIT_OUTCOMES.get(self.drain_cause, outcome)
        self.drain_reason = self.drain_reason or reason
        self._publish_drain()
        deadline = time.monotonic() + self._choose_grace()
        while any(not worker.future.done() for worker in self.workers) and time.monotonic() < deadline:
            time.sleep(POLL_INTERVAL_S)
        return JobEnd(outcome=outcome, reason=reason, cause="user-request" if self.campaign.stop.exists() else cause)

    def _watch_progress(self) -> ProgressWatch:
        """Return the look at the figures of this job."""
        campaign, recipe = self.campaign, self.recipe
        progress = WatchedValue(
            campaign.train_progress, lambda: read_train_progress(campaign.train_progress), longest_s=LOOK_INTERVAL_S
        )
        version = WatchedValue(
            campaign.weights, lambda: versions.find_newest_version(campaign.weights), longest_s=LOOK_INTERVAL_S
        )
        return ProgressWatch(
            timeout_s=recipe.job.stall_timeout_min * 60,
            start_timeout_s=recipe.engine.start_timeout_s if recipe.has_rollouts else 0.0,
            groups_per_step=recipe.train.groups_per_step,
            read_progress=progress.poll,
            count_segments=self.scoring.num_segments,
            find_version=version.poll,
            count_activity=lambda: count_activity(list_endpoints(campaign.endpoints)),
        )

    def _check_progress(self, watch: ProgressWatch) -> None:
        """Report or end a job in which nothing happens; for a hang, dump all stacks to the logs."""
        stall = watch.look()
        if stall is None:
            return
        if not stall.is_final:
            self.events.emit(FaultReported(what="groups", detail=stall.reason))
            return
        if not stall.is_hang:
            raise JobError(stall.reason, cause="user-code")
        publish_file(self.job.dump_stacks, "")
        time.sleep(CLOSE_GRACE_S)
        where = f"the stacks of every worker are at the end of its log in {self.job.logs}"
        raise JobError(f"{stall.reason}: {where}", cause="infrastructure")


if __name__ == "__main__":
    sys.exit(main())
