"""Fold events into the progress of a campaign: no I/O, and constant cost per event.

CampaignProgress    all figures
JobProgress, WorkerProgress, WorkerFailure, RecentLoad, EpisodeTotals, DomainProgress, FailureRun, StepStaleness,
TokenRate           its parts
join_loads          the load of several engines
FaultCause          what reported faults are counted by
name_subject        the worker that an event of another one is about
EPISODE_COUNTERS, RATE_WINDOW_S, MAX_RECENT_REWARDS, MIN_RECENT_OUTCOMES, MAX_ENGINE_WINDOW_S, MIN_OCCUPIED_SHARE,
MIN_JUDGED_PLACES, MAX_FAULT_CAUSES    what is counted, and limits
"""

import math
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter, sub
from typing import NamedTuple

import msgspec

from hpcrl.campaign_dir.events import (
    CampaignEvent,
    CheckpointSaved,
    DrainStarted,
    EngineCounted,
    EpisodesCounted,
    EvaluationFinished,
    EventsLost,
    FaultReported,
    FlatGroupsDropped,
    JobEnded,
    JobStarted,
    LayoutChosen,
    MemoryRanOut,
    RowsSkipped,
    SegmentScored,
    SegmentsRetired,
    StaleDropped,
    StepFinished,
    TaskFailed,
    TrainingResumed,
    VersionLoaded,
    VersionPublished,
    WorkerEnded,
    WorkerFailed,
    WorkerRestarted,
    WorkerStarted,
    describe_event,
)
from hpcrl.campaign_dir.paths import drop_job, make_worker_name, parse_role
from hpcrl.monitor.notes import MonitorNote, NoteLog, make_cause
from hpcrl.spool.episode_lengths import LengthCounts, join_lengths
from hpcrl.spool.ids import parse_domain
from hpcrl.spool.outcome import (
    ABORTED,
    LOST,
    OUTCOME_FINISHED,
    OUTCOME_MAX_TURNS,
    OUTCOME_OVERFLOW,
    OUTCOME_REWARD_ERROR,
    count_failures,
)
from hpcrl.spool.status import STATUSES
from hpcrl.spool.token_fates import STALE, TOO_LONG, TRAINED

COUNTS = (EpisodesCounted, SegmentScored, EngineCounted)
"""The events that workers write all the time."""
RATE_WINDOW_S = 60.0
MAX_RECENT_REWARDS = 256
"""Trajectories in the recent mean reward of each domain."""
MAX_WORKER_FAILURES = 1000
"""The failures of a role's workers that are known one by one."""
MIN_RECENT_OUTCOMES = 128
"""The episodes of a domain whose outcomes are called recent: this number, up to twice of it."""
MAX_RECENT_LISTED = 512
"""The last steps, and the last reports of flat groups, that are listed."""
MAX_ENGINE_WINDOW_S = 300.0
"""The time over which an engine's load is called recent."""
MIN_OCCUPIED_SHARE, MIN_JUDGED_PLACES = 0.05, 100
"""Engines of this many places and more are nearly empty if a smaller share of places and of KV memory is in use."""
MAX_FAULT_CAUSES = 1000
_ENV_FAULT = "env-fault"


class FaultCause(NamedTuple):
    """The key that failures are counted by."""

    what: str
    """The subject of the fault, or the role of a worker that failed."""
    domain: str
    node: str


class WorkerFailure(NamedTuple):
    """The report of a failure: one that raised is reported by the worker itself, and by the driver as all are."""

    worker: str
    reporter: str
    time: float


class EpisodeTotals(msgspec.Struct, kw_only=True):
    """The episode counts of all env workers of all jobs."""

    done: int = 0
    truncated: int = 0
    aborted_stale: int = 0
    aborted_redundant: int = 0
    env_fault: int = 0
    policy_fault: int = 0
    num_tokens: int = 0
    remote_prefills: int = 0
    turns: int = 0

    def count_ended(self) -> dict[str, int]:
        """Return the ended episodes by status."""
        return {name: getattr(self, name) for name in _STATUS_COUNTERS}


_STATUS_COUNTERS = tuple(status.replace("-", "_") for status in STATUSES)
EPISODE_COUNTERS = EpisodeTotals.__struct_fields__
_get_counters = attrgetter(*EPISODE_COUNTERS)


@dataclass
class RecentLoad:
    """The load of an engine in the last minutes: sums over time, in which what was long ago counts less and less."""

    window_s: float = 0.0
    """The time that its load is known for."""
    busy_s: float = 0.0
    """The part of it in which at least one request ran."""
    running_s: float = 0.0
    """Requests that ran, times seconds."""
    places_s: float = 0.0
    """The most requests that it could have run, times seconds; 0 where it is not reported."""
    kv_s: float = 0.0
    """The share of KV memory in use, times seconds; 0 where it is not reported."""

    def add(self, load: EngineCounted) -> None:
        """Add the load of a time."""
        if self.window_s > MAX_ENGINE_WINDOW_S:
            self.window_s, self.busy_s, self.running_s = self.window_s / 2, self.busy_s / 2, self.running_s / 2
            self.places_s, self.kv_s = self.places_s / 2, self.kv_s / 2
        self.window_s += load.window_s
        self.busy_s += load.window_s * load.busy_share
        self.running_s += load.window_s * load.running
        self.places_s += load.window_s * (load.num_places or 0)
        self.kv_s += load.window_s * (load.kv_share or 0.0)

    @property
    def busy_share(self) -> float:
        return self.busy_s / max(self.window_s, 1e-9)

    @property
    def running(self) -> float:
        """Return the mean number of requests."""
        return self.running_s / max(self.window_s, 1e-9)

    @property
    def num_places(self) -> float:
        """Return the mean number of places; 0 where it is not reported."""
        return self.places_s / max(self.window_s, 1e-9)

    @property
    def kv_share(self) -> float:
        return self.kv_s / max(self.window_s, 1e-9)

    @property
    def is_nearly_empty(self) -> bool:
        """Return whether engines of many places use few of them, and little KV memory; they may have some always."""
        is_judged = self.num_places >= MIN_JUDGED_PLACES
        return is_judged and max(self.running / self.num_places, self.kv_share) < MIN_OCCUPIED_SHARE


def join_loads(loads: Iterable[RecentLoad]) -> RecentLoad:
    """Return the load of several engines; its means are those of one of them."""
    joined = RecentLoad()
    for load in loads:
        for name in ("window_s", "busy_s", "running_s", "places_s", "kv_s"):
            setattr(joined, name, getattr(joined, name) + getattr(load, name))
    return joined


@dataclass
class WorkerProgress:
    """A worker, from its events."""

    name: str
    role: str
    node: str = ""
    partition: str = ""
    is_up: bool = False
    """It has emitted an event, and no event reports its end."""
    version: int | None = None
    """Version of the weights that it serves."""
    episodes: EpisodesCounted | None = None
    """The newest counts of an env worker."""
    engine: EngineCounted | None = None
    """The newest load of an engine worker."""
    recent_load: RecentLoad = field(default_factory=RecentLoad)

    def add_load(self, load: EngineCounted) -> None:
        """Add the load of an engine."""
        self.recent_load.add(load)
        self.engine, self.version = load, load.version


@dataclass
class JobProgress:
    """A job, from its events."""

    started_at: float | None = None
    node: str = ""
    """Node of its driver."""
    end_time: float | None = None
    nodes: list[list[str]] = field(default_factory=list)
    """Nodes of each component."""
    drain_reason: str | None = None
    end_event: JobEnded | None = None
    first_event_time: float = 0.0
    last_event_time: float = 0.0
    last_step: int = 0
    """The newest step that it made."""
    workers: dict[str, WorkerProgress] = field(default_factory=dict)


@dataclass
class FailureRun:
    """Results of one kind, and how many have failed since the last good one."""

    num_good: int = 0
    num_failed_in_row: int = 0

    def add(self, *, num_good: int, num_failed: int) -> None:
        """Add results; of failures that are counted with good results it is not known which was last."""
        self.num_good += num_good
        self.num_failed_in_row = 0 if num_good else self.num_failed_in_row + num_failed


@dataclass
class DomainProgress:
    """The rewards of the trajectories of one domain, and what became of their tokens."""

    num: int = 0
    total: float = 0.0
    recent: deque[float] = field(default_factory=lambda: deque(maxlen=MAX_RECENT_REWARDS))
    least: float = math.inf
    """The least reward of all."""
    greatest: float = -math.inf
    """The greatest reward of all."""
    token_fates: Counter[str] = field(default_factory=Counter)
    """The fate of the tokens of ended episodes, as far as reported by env workers; some are dropped later."""
    outcomes: Counter[str] = field(default_factory=Counter)
    """Ended episodes by outcome."""
    reward_errors: int = 0
    """Played episodes whose reward function failed; `outcomes` has them as they were played."""
    replaced_outcomes: Counter[str] = field(default_factory=Counter)
    """These by that outcome, as far as it was reported."""
    stale_tokens: int = 0
    """The tokens that were dropped because they had become too old."""
    reward_faults: Counter[str] = field(default_factory=Counter)
    """Played episodes that got no reward, since its function failed, by the outcome as played."""
    recent_outcomes: dict[str, float] = field(default_factory=dict)
    """The last MIN_RECENT_OUTCOMES episodes, up to twice of that, by outcome: older ones count less and less."""
    recent_env_faults: float = 0.0
    """The part of them whose environment failed, also if it was tried again."""
    num_ended: int = 0
    """Episodes that training did not abort."""
    played: FailureRun = field(default_factory=FailureRun)
    """Episodes by whether they failed while they were played."""
    scored: FailureRun = field(default_factory=FailureRun)
    """Rewards by whether their function failed."""

    def add_outcomes(self, counts: Mapping[str, int]) -> None:
        """Count episodes that have ended."""
        _add_counts(self.outcomes, counts)
        counted = {name: num for name, num in counts.items() if num > 0 and name not in ABORTED}
        num = sum(counted.values())
        num_failed = count_failures(counted)
        self.num_ended += num
        self.played.add(num_good=num - num_failed, num_failed=num_failed)
        self._add_recent(counted)

    def add_scored(self, event: SegmentScored, domain: str) -> None:
        """Count the rewards of a segment, and those that could not be computed."""
        rewards, num_errors = event.rewards.get(domain, []), event.reward_errors.get(domain, 0)
        replaced, faults = event.replaced_outcomes.get(domain, {}), event.reward_faults.get(domain, {})
        self.add(rewards)
        self.reward_errors += num_errors
        self.replaced_outcomes.update(replaced)
        self.reward_faults.update(faults)
        num_faults = sum(faults.values())
        self.scored.add(num_good=len(rewards) - num_errors, num_failed=num_errors + num_faults)
        moved = Counter(replaced) + Counter(faults)
        self._add_recent(
            {OUTCOME_REWARD_ERROR: num_errors, _ENV_FAULT: num_faults} | {name: -num for name, num in moved.items()}
        )

    def _add_recent(self, counts: Mapping[str, float]) -> None:
        recent = self.recent_outcomes
        # A long report is added in parts, so that its first episodes age as if they were reported earlier.
        num_parts = max(1, math.ceil(sum(counts.values()) / MIN_RECENT_OUTCOMES * 4))
        for _ in range(num_parts):
            for name, num in counts.items():
                if num:
                    recent[name] = recent.get(name, 0.0) + num / num_parts
            if sum(recent.values()) > 2 * MIN_RECENT_OUTCOMES:
                for name in recent:
                    recent[name] /= 2
                self.recent_env_faults /= 2

    def add(self, rewards: Sequence[float]) -> None:
        self.num += len(rewards)
        self.total += sum(rewards)
        self.recent.extend(rewards)
        self.least = min([self.least, *rewards])
        self.greatest = max([self.greatest, *rewards])

    def count_failed(self) -> int:
        """Return the ended episodes that failed while they were played or scored."""
        return count_failures(self.settle_outcomes())

    def settle_outcomes(self) -> Counter[str]:
        """Return each ended episode under one outcome: that of its reward, if that could not be computed."""
        settled = self.outcomes.copy()
        settled[OUTCOME_REWARD_ERROR] += self.reward_errors
        settled[_ENV_FAULT] += self.reward_faults.total()
        settled -= self.replaced_outcomes + self.reward_faults  # zero until an env worker has reported these too
        num_left = self.reward_errors - self.replaced_outcomes.total()  # an older campaign did not report theirs
        for name in (OUTCOME_FINISHED, OUTCOME_MAX_TURNS, OUTCOME_OVERFLOW, "truncated"):  # what is scored
            num_moved = min(num_left, settled[name])
            settled[name] -= num_moved
            num_left -= num_moved
        return +settled


@dataclass
class StepStaleness:
    """The episodes that ended after one step and before the next."""

    step: int
    num_ended: int = 0
    num_stale: int = 0
    """The number that were aborted or dropped by the trainer, as they had become too old."""


@dataclass
class TokenRate:
    """The generated tokens by second, over the window only."""

    by_second: dict[int, int] = field(default_factory=dict)
    first: float | None = None

    def add(self, time: float, num_tokens: int) -> None:
        second = int(time)
        self.first = time if self.first is None else min(self.first, time)
        self.by_second[second] = self.by_second.get(second, 0) + num_tokens

    def drop_outside(self, *, since: float, until: float) -> None:
        self.by_second = {second: num for second, num in self.by_second.items() if since < second <= until}

    def per_second(self, now: float) -> float:
        """Return the rate over the window, or over the time since the first token if that is shorter."""
        self.drop_outside(since=now - RATE_WINDOW_S, until=now + RATE_WINDOW_S)  # clocks differ a little
        if self.first is None:
            return 0.0
        covered = min(max(now - self.first, 1.0), RATE_WINDOW_S)
        return sum(self.by_second.values()) / covered


@dataclass
class CampaignProgress:
    """The progress of a campaign so far."""

    version: int = 0
    steps: dict[int, StepFinished] = field(default_factory=dict)
    """One per step, in order; steps that a resume rolled back are removed."""
    highest_step: int = 0
    """The highest step that was made, also if a resume has rolled it back."""
    evaluations: dict[int, EvaluationFinished] = field(default_factory=dict)
    """Evaluations by number, in the order in which they were reported."""
    totals: EpisodeTotals = field(default_factory=EpisodeTotals)
    domains: dict[str, DomainProgress] = field(default_factory=dict)
    """Rewards by domain, also of trajectories not trained on; a segment that was scored twice counts twice."""
    scoring_roles: set[str] = field(default_factory=set)
    """The roles whose workers have scored: env workers write the rewards that environments return."""
    token_rate: TokenRate = field(default_factory=TokenRate)
    jobs: dict[int, JobProgress] = field(default_factory=dict)
    lengths: dict[str, Counter[str]] = field(default_factory=dict)
    """The lengths of ended episodes by status."""
    failed_tasks: dict[str, TaskFailed] = field(default_factory=dict)
    """The tasks that were abandoned, by group."""
    shortage: MemoryRanOut | None = None
    """The last time that the trainer ran out of memory."""
    skipped_rows: dict[int, RowsSkipped] = field(default_factory=dict)
    """The rows that were too long for the trainer, by step."""
    checkpoint_times: list[float] = field(default_factory=list)
    recent_staleness: deque[StepStaleness] = field(default_factory=lambda: deque(maxlen=MAX_RECENT_LISTED))
    """The episodes that ended after each of the last steps, the newest last."""
    resumed_step: int = -1
    """The step after which training was resumed last; what lost steps generated becomes too old then."""
    flat_dropped: deque[tuple[int, FlatGroupsDropped]] = field(default_factory=lambda: deque(maxlen=MAX_RECENT_LISTED))
    """The step after which flat groups were dropped, and the event about them."""
    worker_failures: Counter[tuple[int, str]] = field(default_factory=Counter)
    """Workers that failed, by job and role."""
    last_worker_failures: dict[tuple[int, str], deque[WorkerFailure]] = field(default_factory=dict)
    """The last reports of them."""
    worker_failure_reasons: dict[str, str] = field(default_factory=dict)
    """The newest reason by role."""
    faults: Counter[FaultCause] = field(default_factory=Counter)
    """Faults and failed workers; of faults of which only some are reported, the number that reports name."""
    repeated_faults: set[FaultCause] = field(default_factory=set)
    """The faults of which only some are reported: there may be more."""
    _fault_nums: dict[tuple[str, ...], int] = field(default_factory=dict)
    """The newest number of faults of one kind that a worker has named."""
    newest_faults: dict[FaultCause, MonitorNote] = field(default_factory=dict)
    notes: NoteLog = field(default_factory=NoteLog)

    def add(self, event: CampaignEvent) -> None:
        """Add one event; they come in the order of jobs and time."""
        job = self._update_job(event)
        match event:
            case EpisodesCounted() | SegmentScored() | EngineCounted():  # COUNTS: nearly all events; none has a note
                self._count_event(event)
                return
            case EvaluationFinished(number=number) if self.evaluations.setdefault(number, event) is not event:
                return  # emitted again by a worker that was killed right after the first time
            case JobStarted() | LayoutChosen() | DrainStarted() | JobEnded():
                self._apply_job_event(job, event)
            case VersionPublished():
                self.version = max(self.version, event.version)
            case StepFinished():
                self._drop_steps_from(event.step)
                self.steps[event.step] = event
                job.last_step = event.step
                self.highest_step = max(self.highest_step, event.step)
                self.version = max(self.version, event.version)
            case CheckpointSaved():
                self.checkpoint_times.append(event.time)
            case TrainingResumed():
                self._drop_steps_from(event.step + 1)
                self.recent_staleness.clear()
                self.resumed_step = event.step
            case WorkerStarted() | WorkerRestarted() | WorkerEnded() | WorkerFailed() | VersionLoaded():
                self._apply_worker_event(event)
            case _:
                self._count_loss(event)
        self._add_note(event)

    def settle_totals(self) -> EpisodeTotals:
        """Return the totals with the episodes that got no reward among the faults, as their records have them.

        Those whose rewards failed before an env worker has counted their end are counted, as outcomes count them.
        """
        faults = sum((domain.reward_faults for domain in self.domains.values()), Counter[str]())
        num_done = min(faults[OUTCOME_FINISHED], self.totals.done)
        num_truncated = min(faults.total() - num_done, self.totals.truncated)
        settled = msgspec.structs.replace(
            self.totals,
            done=self.totals.done - num_done,
            truncated=self.totals.truncated - num_truncated,
            env_fault=self.totals.env_fault + faults.total(),
        )
        outcomes = sum((domain.settle_outcomes() for domain in self.domains.values()), Counter[str]())
        num_known = sum(num for name, num in outcomes.items() if name not in ABORTED)
        num_counted = settled.done + settled.truncated + settled.env_fault + settled.policy_fault
        return msgspec.structs.replace(settled, done=settled.done + max(num_known - num_counted, 0))

    def count_failed(self) -> int:
        """Return the ended episodes that failed; in older campaigns, whose events have no outcomes, those lost."""
        totals = self.settle_totals()
        num_lost = totals.env_fault + totals.policy_fault
        outcomes = [domain.settle_outcomes() for domain in self.domains.values()]
        return num_lost + sum(
            count_failures({name: num for name, num in one.items() if name not in LOST}) for one in outcomes
        )

    def mean_tokens_per_s(self) -> float:
        """Return the mean over all the time that jobs have run."""
        return self.totals.num_tokens / max(
            sum(job.last_event_time - job.first_event_time for job in self.jobs.values()), 1.0
        )

    def _update_job(self, event: CampaignEvent) -> JobProgress:
        job = self.jobs.setdefault(event.job, JobProgress(first_event_time=event.time, last_event_time=event.time))
        job.first_event_time, job.last_event_time = (
            min(job.first_event_time, event.time),
            max(job.last_event_time, event.time),
        )
        return job

    @staticmethod
    def _apply_job_event(job: JobProgress, event: JobStarted | LayoutChosen | DrainStarted | JobEnded) -> None:
        match event:
            case JobStarted():
                job.started_at, job.end_time, job.node = event.time, event.end_time, event.node or ""
                job.end_event = job.drain_reason = None  # a requeued job starts again under its old number
            case LayoutChosen():
                job.nodes = event.nodes
            case DrainStarted():
                job.drain_reason = event.reason
            case JobEnded():
                job.end_event = event

    def _find_worker(self, event: CampaignEvent) -> WorkerProgress:
        subject = name_subject(event)
        name, role = (subject, parse_role(subject)) if subject else (event.worker, event.role)
        workers = self.jobs[event.job].workers
        if name not in workers:
            workers[name] = WorkerProgress(name=name, role=role, is_up=True)
        worker = workers[name]
        if not subject:  # an event of the driver about a worker has the driver's node
            worker.node, worker.partition = event.node or worker.node, event.partition or worker.partition
        return worker

    def _apply_worker_event(
        self, event: WorkerStarted | WorkerRestarted | WorkerEnded | WorkerFailed | VersionLoaded
    ) -> None:
        worker = self._find_worker(event)
        match event:
            case WorkerStarted() | WorkerRestarted():
                worker.is_up = True
            case WorkerEnded():
                worker.is_up = False
            case WorkerFailed():
                worker.is_up = False
                self.worker_failures[event.job, worker.role] += 1
                failures = self.last_worker_failures.setdefault(
                    (event.job, worker.role), deque(maxlen=MAX_WORKER_FAILURES)
                )
                failures.append(WorkerFailure(worker.name, event.worker, event.time))
                self.worker_failure_reasons[worker.role] = event.reason
                what = f"worker {worker.role}" if worker.role else drop_job(worker.name)
                self._count_fault(FaultCause(what, "", worker.node), event.reason, event)
            case VersionLoaded():
                worker.version = event.version

    def _count_fault(self, cause: FaultCause, text: str, event: CampaignEvent) -> None:
        if cause not in self.faults and len(self.faults) >= MAX_FAULT_CAUSES:
            cause = FaultCause(cause.what, "", "")
        self.faults[cause] += self._count_new(event)
        if isinstance(event, FaultReported) and event.num:
            self.repeated_faults.add(cause)
        self.newest_faults[cause] = MonitorNote(time=event.time, text=text, bad=True)

    def _count_new(self, event: CampaignEvent) -> int:
        """Return how many faults an event adds: it may name the number of those like it so far."""
        if not isinstance(event, FaultReported) or not event.num:
            return 1
        kind = (event.worker, event.what, *make_cause(event.domain or "", event.detail))
        before = self._fault_nums.get(kind, 0)
        if kind in self._fault_nums or len(self._fault_nums) < MAX_FAULT_CAUSES:
            self._fault_nums[kind] = event.num
        return event.num - before if event.num > before else 1  # a worker that was started again counts from one

    def _count_loss(self, event: CampaignEvent) -> None:
        match event:
            case FaultReported():
                self._count_fault(FaultCause(event.what, event.domain or "", event.node or ""), event.detail, event)
                if event.what == _ENV_FAULT and event.domain:
                    self._find_domain(event.domain).recent_env_faults += 1
            case FlatGroupsDropped():
                self.flat_dropped.append((next(reversed(self.steps), 0), event))
            case StaleDropped(token_counts=counts):
                self._find_staleness().num_stale += event.num
                for domain, num in counts.items():
                    self._find_domain(domain).stale_tokens += num
            case TaskFailed(id=group):
                self.failed_tasks[group] = event
            case MemoryRanOut():
                self.shortage = event
            case RowsSkipped(step=step):
                self.skipped_rows[step] = event

    def _add_note(self, event: CampaignEvent) -> None:
        # The reason of a layout is in the plan and in the event: it is the same each time.
        text = f"layout {event.layout}" if isinstance(event, LayoutChosen) else describe_event(event)
        if text:
            has_failed = isinstance(event, JobEnded) and event.outcome == "failed"
            bad = has_failed or isinstance(event, WorkerFailed | FaultReported | MemoryRanOut | EventsLost)
            cause, num = _find_cause(event)
            self.notes.add(
                time=event.time,
                text=" ".join(text.split()),
                bad=bad,
                cause=cause,
                num=num,
                prints_all=isinstance(event, CheckpointSaved | SegmentsRetired),
            )

    def _count_event(self, event: EpisodesCounted | SegmentScored | EngineCounted) -> None:
        worker = self._find_worker(event)
        match event:
            case EpisodesCounted():
                self._count_episodes(worker, event)
            case EngineCounted():
                worker.add_load(event)
            case SegmentScored():
                self.scoring_roles.add(event.role)
                for domain in event.rewards.keys() | event.reward_errors.keys() | event.reward_faults.keys():
                    self._find_domain(domain).add_scored(event, domain)

    def _count_episodes(self, worker: WorkerProgress, counts: EpisodesCounted) -> None:
        previous = worker.episodes or EpisodesCounted(time=counts.time)
        added = list(map(sub, _get_counters(counts), _get_counters(previous)))
        if min(added) < 0:  # a new process of this worker counts from zero
            previous = EpisodesCounted(time=counts.time)
            added = list(_get_counters(counts))
        increments = dict(zip(EPISODE_COUNTERS, added, strict=True))
        for name, increment in increments.items():
            if increment:
                setattr(self.totals, name, getattr(self.totals, name) + increment)
        staleness = self._find_staleness()
        staleness.num_ended += sum(increments[name] for name in _STATUS_COUNTERS)
        staleness.num_stale += increments["aborted_stale"]
        for domain, fates in counts.token_fates.items():
            _add_counts(self._find_domain(domain).token_fates, _subtract(fates, previous.token_fates.get(domain, {})))
        for domain, outcomes in counts.outcomes.items():
            if new := _subtract(outcomes, previous.outcomes.get(domain, {})):
                self._find_domain(domain).add_outcomes(new)
        for status, lengths in counts.lengths.items():
            if new := _subtract(lengths, previous.lengths.get(status, {})):
                _add_counts(self.lengths.setdefault(status, Counter()), new)
        self.token_rate.add(counts.time, counts.num_tokens - previous.num_tokens)
        worker.episodes = counts

    def describe_memory(self) -> str:
        """Describe what the trainer does for lack of memory, and the rows that it leaves out; empty if all is well."""
        parts = []
        if self.shortage is not None and self.shortage.tokens_per_micro_batch is not None:
            parts.append(f"memory ran out: micro-batches of {self.shortage.tokens_per_micro_batch:,} tokens")
        if skipped := list(self.skipped_rows.values()):
            num_tokens = sum(event.num_tokens for event in skipped)
            num_trained = sum(step.num_tokens or 0 for step in self.steps.values())
            share = num_tokens / max(num_tokens + num_trained, 1)
            rows = f"{sum(event.num for event in skipped):,} rows over {skipped[-1].limit:,} tokens left out"
            parts.append(f"{rows}, {share:.1%} of tokens")
        return "   ".join(parts)

    def join_lengths(self) -> dict[str, LengthCounts]:
        """Return the lengths of the episodes that were started, that finished, and that were trained on."""
        trained = Counter[str]()
        for step in self.steps.values():
            trained.update(step.lengths)
        return {**join_lengths(self.lengths), "trained": dict(trained)}

    def token_fates(self, domain: str) -> dict[str, int]:
        """Return what became of the tokens of a domain: those that the trainer dropped are not trained."""
        progress = self._find_domain(domain)
        dropped = {
            STALE: progress.stale_tokens,
            TOO_LONG: sum(step.too_long_tokens.get(domain, 0) for step in self.steps.values()),
        }
        fates = {**progress.token_fates}
        fates[TRAINED] = max(0, fates.get(TRAINED, 0) - sum(dropped.values()))
        return {name: num for name, num in {**fates, **dropped}.items() if num}

    def _find_staleness(self) -> StepStaleness:
        """Return the counts after the newest step."""
        step = next(reversed(self.steps), 0)
        if not self.recent_staleness or self.recent_staleness[-1].step != step:
            self.recent_staleness.append(StepStaleness(step=step))
        return self.recent_staleness[-1]

    def _find_domain(self, domain: str) -> DomainProgress:
        found = self.domains.get(domain)
        if found is None:
            found = self.domains[domain] = DomainProgress()
        return found

    def _drop_steps_from(self, first_dropped: int) -> None:
        """Remove the steps from `first_dropped` on, which a resume repeats; usually there are none."""
        if first_dropped <= next(reversed(self.steps), -1):
            self.steps = {number: old for number, old in self.steps.items() if number < first_dropped}
            kept = {number: old for number, old in self.skipped_rows.items() if number < first_dropped}
            self.skipped_rows = kept


def name_subject(event: CampaignEvent) -> str:
    """Return the full name of the worker that an event of another one is about; "" if it is about its own."""
    subject = getattr(event, "of", None)
    if not isinstance(subject, str) or not subject:
        return ""
    return make_worker_name(event.job, subject.removeprefix(make_worker_name(event.job) + "-"))


def _find_cause(event: CampaignEvent) -> tuple[tuple[str, ...] | None, int | None]:
    """Return what an event has in common with others of its kind, and their number if it names that."""
    match event:
        case FaultReported():
            domain = event.domain or parse_domain(event.id or "")
            return ("fault", event.what, domain, *make_cause(event.detail)), event.num or None
        case WorkerFailed() | EventsLost():
            return (type(event).__name__, *make_cause(getattr(event, "of", None) or event.worker, event.reason)), None
        case CheckpointSaved() | SegmentsRetired():
            return (type(event).__name__,), None
        case TaskFailed():
            return ("task", event.domain, *make_cause(event.reason)), None
    return None, None


def _subtract(counts: Mapping[str, int], before: Mapping[str, int]) -> dict[str, int]:
    """Return what has been added to counts; an env worker adds little to few of them each second."""
    added = {}
    for name, num in counts.items():
        if (increment := num - before.get(name, 0)) > 0:
            added[name] = increment
    return added


def _add_counts(totals: Counter[str], counts: Mapping[str, int]) -> None:
    """Add a few counts; `Counter.update` takes several times as long for them."""
    for name, num in counts.items():
        totals[name] += num
