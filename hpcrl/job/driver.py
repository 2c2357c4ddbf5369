"""The driver of one job: `python -m hpcrl.job.driver CAMPAIGN JOB` starts, supervises and ends the workers.

    main               start the guardian with the driver as its child
    JobDriver          supervise one job: allocation -> runtime -> supervise until the trainer is done -> outcome
    LIMIT_OUTCOMES, DRIVER_ROUND_INTERVAL_S, LEASE_INTERVAL_S   constants

No data passes through the driver.
"""

import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from hpcrl.campaign_dir.campaign_lease import CampaignLease, LeaseHolder
from hpcrl.campaign_dir.endpoints import withdraw_all
from hpcrl.campaign_dir.event_log import EventLog, EventReader
from hpcrl.campaign_dir.events import (
    FaultReported,
    JobEnded,
    JobOutcome,
    JobStarted,
    LayoutChosen,
    StepFinished,
)
from hpcrl.campaign_dir.job_end import REASON_DONE, EndCause, JobEnd, JobError
from hpcrl.campaign_dir.paths import CampaignDir
from hpcrl.campaign_dir.workers import WorkerPlace
from hpcrl.config.program import reserves_place
from hpcrl.config.recipe import Recipe
from hpcrl.config.site import Site
from hpcrl.errors import EngineError, HpcrlError, SlurmError, WeightsError
from hpcrl.job.batch_log import note_exception, note_in_log
from hpcrl.job.component_holder import await_components
from hpcrl.job.courier_step import WeightPlane
from hpcrl.job.domain_watch import DomainWatch, add_untrained, watch_domains
from hpcrl.job.driver_pulse import DriverPulse
from hpcrl.job.guardian import CLOSE_GRACE_S, cancel_components, cancel_reward_jobs, run_guarded, send_outcome
from hpcrl.job.job_drain import JobDrain
from hpcrl.job.job_notices import JobNotices
from hpcrl.job.job_workers import JobWorkers
from hpcrl.job.memory_watch import TrainerMemoryWatch
from hpcrl.job.metrics_process import MetricsProcess
from hpcrl.job.next_job_queue import NextJobQueue
from hpcrl.job.own_lease import take_campaign_lease
from hpcrl.job.progress_watch import ProgressWatch, watch_campaign
from hpcrl.job.record_watch import RecordWatch
from hpcrl.job.reward_tasks import RewardScoring
from hpcrl.job.runtime import JobRuntime
from hpcrl.job.supervision import (
    MAX_DRAIN_SHARE,
    DrainMargin,
    FileOutage,
    LastStepWatch,
    LookInterval,
    RestartBudget,
    find_campaign_use,
)
from hpcrl.plan.job_time import estimate_save_s
from hpcrl.plan.plan import Plan
from hpcrl.plan.records import read_plan, read_recipe, read_site
from hpcrl.slurm import next_job
from hpcrl.slurm.allocation import JobAllocation, find_own_id, read_allocation, scrub_environment
from hpcrl.slurm.submit import SubmittedJob, record_submission
from hpcrl.system.exit_codes import EXIT_DONE, EXIT_DRAINED, EXIT_FAILED
from hpcrl.system.file_watch import is_outage, is_there, retry_passing
from hpcrl.system.files import make_private_dir, publish_file, remove_path
from hpcrl.system.network import current_node, find_bind_address
from hpcrl.system.processes import do_nothing
from hpcrl.system.variables import KILL_WAIT_VARIABLE

DRIVER_ROUND_INTERVAL_S = 0.1
LIMIT_OUTCOMES: dict[EndCause, JobOutcome] = {"goal-reached": "done", "budget-used": "stopped"}
"""The outcome of a job that drained for a limit of the campaign."""
LEASE_INTERVAL_S = 10.0
FOLLOW_INTERVAL_S = 300.0
"""The time after which a next job that Slurm has refused is tried again."""
START_PATIENCE_S = 40.0
"""The time for which a job waits at its start for a file system that is away or full: its nodes are idle meanwhile."""
MAX_TURN_GAP_S = 30.0
"""The job need not make progress in a longer turn: it was suspended, or Slurm or the files were away."""
_STOPPED_AT_ONCE = JobEnd(
    outcome="stopped", reason="a user asked it to end at once (hpcrl stop --now)", cause="user-request"
)


def main() -> int:
    """Turn the batch script's process into the guardian and run the driver in a child."""
    campaign, number = CampaignDir(Path(sys.argv[1])), int(sys.argv[2])
    place = WorkerPlace(campaign.job(number), current_node())
    try:
        plan = read_plan(campaign)
        has_scheduler = plan.layout != "local"
        lease = retry_passing(
            lambda: take_campaign_lease(place, has_scheduler=has_scheduler),
            timeout_s=START_PATIENCE_S,
            passes=is_outage,
        )
    except OSError as error:  # no outcome either: the files of the campaign are away, or take no changes
        note_in_log(f"hpcrl: job {number} cannot start: {error}")
        return EXIT_FAILED
    if isinstance(lease, LeaseHolder):  # nothing is touched, not even the outcome: the other job may have this number
        note_in_log(f"hpcrl: {lease.describe()}: this one ends")
        return EXIT_FAILED
    return run_guarded(
        lambda outcome_fd, pulse: _drive_job(place, lease, pulse, outcome_fd=outcome_fd), place, plan=plan
    )


def _drive_job(place: WorkerPlace, lease: CampaignLease, pulse: DriverPulse, *, outcome_fd: int) -> int:
    """Drive the job and send its outcome to the guardian, whatever happens; only a kill prevents that."""
    driver: JobDriver | None = None
    try:
        driver = JobDriver.load(place, lease, note_turn=pulse.note_turn, note_start=pulse.note_start)
        end = driver.drive()
    except BaseException as error:  # noqa: BLE001 - whatever failed, the guardian must receive the reason
        if isinstance(error, HpcrlError):
            note_in_log(f"hpcrl: {error}")
        else:
            note_exception()  # os._exit follows, so nothing else prints it
        end = _describe_failure(error, is_supervising=driver is not None and driver.is_supervising)
    if driver is not None:
        end = msgspec.structs.replace(end, nodes=sorted({*end.nodes, *driver.workers.list_bad_nodes()}))
    send_outcome(end, outcome_fd=outcome_fd, job=place.job)
    return 1 if end.outcome == "failed" else 0


def _describe_failure(error: BaseException, *, is_supervising: bool) -> JobEnd:
    """Return the end of a job that failed: one by the recipe or its code recurs, others may not."""
    reason = str(error) if isinstance(error, HpcrlError) else f"the driver failed: {type(error).__name__}: {error}"
    if isinstance(error, JobError):
        return JobEnd(outcome="failed", reason=reason, cause=error.cause, nodes=error.nodes)
    is_users = isinstance(error, HpcrlError) and not isinstance(error, SlurmError | WeightsError | EngineError)
    cause: EndCause = "user-code" if is_users else "infrastructure"
    return JobEnd(outcome="failed", reason=reason, cause=cause if is_supervising else "not-started")


@dataclass
class JobDriver:
    """The supervisor of one job."""

    place: WorkerPlace
    lease: CampaignLease
    plan: Plan
    recipe: Recipe
    site: Site
    events: EventLog
    note_turn: Callable[[], object] = do_nothing
    """Called in each part of a turn of the loop: the guardian ends a driver that hangs."""
    note_start: Callable[[], object] = do_nothing
    """Called once everything was started."""
    is_supervising: bool = False
    """True from then on."""

    def __post_init__(self) -> None:
        self.outage = FileOutage()
        self.campaign, self.job = self.place.campaign, self.place.job
        emit, recipe = self.events.emit, self.recipe
        trainer_events = EventReader.for_role(self.campaign.events, "train")  # of earlier jobs too
        most_s = MAX_DRAIN_SHARE * recipe.job.walltime_min * 60
        save_s = estimate_save_s(recipe, num_nodes=self.plan.components[self.plan.role("train").component].nodes)
        margin = DrainMargin(trainer_events.poll, least_s=recipe.job.drain_s, most_s=most_s, assumed_save_s=save_s)
        self.use = find_campaign_use(self.job, limits=recipe.limits, plan=self.plan)
        self.drain = JobDrain(self.job, margin=margin, use=self.use, emit=emit)
        self.last_step = LastStepWatch(self.campaign, num_steps=recipe.train.num_steps)
        self.lease_looks = LookInterval(LEASE_INTERVAL_S)
        self.follow_looks = LookInterval(FOLLOW_INTERVAL_S)
        self.turned_at = time.monotonic()
        self.next_job_queue = NextJobQueue(self.place, plan=self.plan, site=self.site, emit=emit)
        self.records = RecordWatch(self.campaign, emit=emit)
        has_gpus = bool(self.plan.role("train").gpus_per_worker)
        self.workers = JobWorkers(
            job=self.job,
            plan=self.plan,
            quorum=recipe.job.quorum,
            budget=RestartBudget(self.job.logs),
            memory=TrainerMemoryWatch(self.campaign, recipe=recipe, has_gpus=has_gpus, emit=emit),
            silence_s=recipe.job.silence_s,
            start_timeout_s=recipe.engine.start_timeout_s,
            emit=emit,
            inner_domains=[name for name, domain in recipe.domains.items() if not reserves_place(domain)],
        )
        self.reporter = MetricsProcess(self.place, metrics=recipe.metrics, emit=emit)
        self.scoring = RewardScoring(
            campaign=self.campaign,
            reward=recipe.reward,
            elastic=self.plan.reward_jobs is not None,
            num_shards=self.plan.num_reward_shards,
            emit=emit,
            count_failure=self.workers.budget.count_failure,
        )

    @classmethod
    def load(
        cls,
        place: WorkerPlace,
        lease: CampaignLease,
        *,
        note_turn: Callable[[], None],
        note_start: Callable[[], None],
    ) -> "JobDriver":
        """Read what was submitted; remove requests left by an earlier, requeued run of this job."""
        campaign, job = place.campaign, place.job
        make_private_dir(job.parsl)
        for path in (*job.list_messages(), campaign.train_progress):
            remove_path(path)
        for path in (job.terminated, job.term_answer):
            publish_file(path, "")
        recipe = read_recipe(campaign)
        for directory in (campaign.endpoints, *(campaign.judge(name).endpoints for name in recipe.judge)):
            withdraw_all(directory)
        has_events = campaign.events.is_dir()
        make_private_dir(campaign.events)
        events = EventLog.open(campaign, "driver", job=job.number, role="driver", node=place.node)
        if not has_events:
            lost = f"{campaign.events} was gone, and with it what earlier jobs have reported"
            events.emit(FaultReported(what="records", detail=lost))
        plan = read_plan(campaign)
        slurm_id = find_own_id(plan)
        if slurm_id is not None and not job.submission.exists():  # sbatch had no answer
            record_submission(SubmittedJob(id=slurm_id, scheduler="slurm", time=time.time()), job=job)
        return cls(
            place=place,
            lease=lease,
            plan=plan,
            recipe=recipe,
            site=read_site(campaign),
            events=events,
            note_turn=note_turn,
            note_start=note_start,
        )

    def drive(self) -> JobEnd:
        """Run the job unless there is nothing to do, with the next one queued; return how it ended."""
        self.drain.requests.listen()
        if (known_end := self._find_campaign_end()) is not None:
            return known_end
        if self.drain.requests.is_cancelled:
            return _STOPPED_AT_ONCE
        self.next_job_queue.start()  # first: whatever fails from here on, the next job continues
        try:
            return self._run_job()
        finally:
            if not self.is_supervising:
                self.next_job_queue.wait_long(self.drain, note_turn=self.note_turn)

    def _run_job(self) -> JobEnd:
        """Start everything, supervise, end everything; return how the job ended."""
        for number in self.campaign.job_numbers():  # of a job that was killed: they would keep nodes
            if number < self.job.number:
                cancel_components(self.campaign.job(number))
        if end := await_components(self.job, self.plan, requests=self.drain.requests, note_turn=self.note_turn):
            return end
        self.workers.allocation = allocation = read_allocation(self.plan, self.job)
        self.events.emit(JobStarted(slurm_id=allocation.job_id, end_time=allocation.end_time))
        note_in_log(f"hpcrl: job {self.job.number} of {self.campaign.name} has started")
        self.records.look()
        JobNotices(self.job, self.recipe.notices).report_start()
        self.events.emit(LayoutChosen(layout=self.plan.layout, reason=self.plan.layout_reason, nodes=allocation.nodes))
        self.drain.answer_notices(allocation.kill_wait_s)
        if allocation.job_id is not None:
            scrub_environment(os.environ)
            os.environ[KILL_WAIT_VARIABLE] = f"{allocation.kill_wait_s:g}"
        for number in self.campaign.job_numbers():  # if a whole node was lost, no process was left to end them
            cancel_reward_jobs(self.campaign.job(number))
        runtime = JobRuntime(
            self.plan,
            place=self.place,
            site=self.site,
            allocation=allocation,
            address=find_bind_address(self.site.list_interfaces(self.plan.components[0].partition)),
        )
        self.weight_plane = WeightPlane(
            self.place,
            plan=self.plan,
            find_commands=runtime.courier_commands,
            emit=self.events.emit,
        )
        try:
            self.workers.memory.note_limits()
            self.workers.start_trainer(runtime)  # first: all others wait for its weights
            if self.plan.has_role("decode"):
                self.weight_plane.start(self.site.mpi)
            runtime.start()
            self.workers.start(runtime)
            self.is_supervising = True
            self.note_start()
            end = self._supervise(runtime, allocation)
        finally:
            self._close(runtime)
        self.events.emit(JobEnded(outcome=end.outcome, reason=end.reason))
        note_in_log(f"hpcrl: job {self.job.number} {end.outcome}: {end.reason}")
        return end

    def _close(self, runtime: JobRuntime) -> None:
        """End everything that was started; what fails, as on a full disk, is left to the guardian."""
        for close in (
            self.weight_plane.close,
            lambda: self.next_job_queue.wait(self.drain.choose_grace()),
            lambda: runtime.close(grace_s=self.drain.choose_grace(), note_turn=self.note_turn),
            self.reporter.close,
        ):
            try:
                close()
            except (HpcrlError, OSError) as error:
                note_in_log(f"hpcrl: {error}")
            self.note_turn()

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

    def _supervise(self, runtime: JobRuntime, allocation: JobAllocation) -> JobEnd:
        watch = watch_campaign(
            self.campaign,
            recipe=self.recipe,
            count_segments=self.scoring.num_segments,
            certificate=self.campaign.certificate if self.site.network.tls else None,
        )
        domains = watch_domains(self.campaign, job=self.job.number, recipe=self.recipe)
        self.turned_at = time.monotonic()
        while True:
            self.note_turn()
            self._note_gap(watch)
            if self.drain.requests.is_cancelled:
                return _STOPPED_AT_ONCE
            request = self.drain.check_requests(allocation)
            is_look = self.follow_looks.is_due()
            if is_look:
                self.records.look()
            if (request is not None and request.is_at_walltime) or is_look:
                self.next_job_queue.start()  # Slurm may have refused it before; the steps end with the drain
            try:
                code = self.last_step.confirm_done(runtime.trainer_exit_code())
                end = self._find_end(runtime, code)
            except OSError as error:  # checkpoints, or leases, cannot be listed now
                self.outage.note(error)
                time.sleep(DRIVER_ROUND_INTERVAL_S)
                continue
            if end is not None:
                return end
            if self.drain.limits.reason is None:
                try:
                    self._watch_workers(runtime, trainer_code=code, watch=watch, domains=domains)
                except OSError as error:
                    self.outage.note(error)
                else:
                    self.outage.end()
            time.sleep(DRIVER_ROUND_INTERVAL_S)

    def _note_gap(self, watch: ProgressWatch) -> None:
        """Leave out the time since the last turn if nothing could be seen in it."""
        now = time.monotonic()
        if (gap_s := now - self.turned_at) > MAX_TURN_GAP_S:
            watch.skip(gap_s)
            self.workers.note_suspension()
        self.turned_at = now

    def _watch_workers(
        self, runtime: JobRuntime, *, trainer_code: int | None, watch: ProgressWatch, domains: DomainWatch
    ) -> None:
        """Restart what has failed, start what has work, and end a job that makes no progress."""
        self.weight_plane.poll()
        self.note_turn()  # a Slurm that is silent may take long in each part
        self.reporter.keep_running()
        if self.workers.restart_failed(runtime, trainer_code=trainer_code):
            self.weight_plane.restart_on_remaining_nodes()
        self.note_turn()
        self.scoring.poll(runtime)
        self.note_turn()
        self._check_progress(watch)
        if why := domains.find_end():
            raise JobError(why, cause="user-code")

    def _find_end(self, runtime: JobRuntime, code: int | None) -> JobEnd | None:
        """Return how the job ends, if it does now; `code` is the exit code of the trainer."""
        drain_reason = self.drain.limits.reason
        if code == EXIT_DONE:
            return add_untrained(self._finish("done", REASON_DONE), job=self.job)
        if code == EXIT_DRAINED:
            return self._finish("drained", drain_reason or "the trainer was drained")
        if code is not None and drain_reason:
            failure = self.workers.describe_trainer_end(runtime, code)
            return self._finish("cut", f"{drain_reason}, and the trainer failed: {failure}")
        if self.drain.is_overdue:
            return self._finish("cut", f"{drain_reason}, and {self._describe_cut()}")
        if self.lease_looks.is_due() and self.lease.is_lost():
            reason = "another job runs this campaign: Slurm reported that this one had ended"
            return JobEnd(outcome="failed", reason=reason, cause="infrastructure")
        return None

    def _describe_cut(self) -> str:
        """Describe for what the time was too short: the step of ranks in Slurm may end late, after all was saved."""
        reader = EventReader.for_role(self.campaign.events, "train", job=self.job.number)
        reader.skip_to_tails()
        last = max((event.step for event in reader.poll() if isinstance(event, StepFinished)), default=0)
        if next_job.has_checkpoint(self.campaign) and (saved := next_job.find_last_step(self.campaign)) >= last:
            return f"the trainer had not ended in time, but there is a checkpoint of its last step, {saved}"
        return "the time was too short for a checkpoint"

    def _finish(self, outcome: JobOutcome, reason: str) -> JobEnd:
        """Let the workers seal what they hold before they are ended; a user's request to stop ends the campaign."""
        limits = self.drain.limits
        cause: EndCause = "complete" if outcome == "done" or limits.reason is None else limits.cause
        is_stopped = is_there(self.campaign.stop)
        if outcome in ("drained", "cut") and is_stopped:
            outcome = "stopped"
        elif outcome == "drained":
            outcome = LIMIT_OUTCOMES.get(limits.cause, outcome)
        self.drain.publish(reason)
        self.workers.await_ends(timeout_s=self.drain.choose_grace())
        allocation = self.workers.allocation
        lost = self.drain.find_lost_nodes(allocation) if outcome in ("drained", "cut") and allocation else []
        if lost:
            cause, reason = "node-failure", f"{reason}: Slurm reports {', '.join(lost)} as down"
        cause = "user-request" if is_stopped else cause
        return JobEnd(outcome=outcome, reason=reason, cause=cause, nodes=lost)

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
