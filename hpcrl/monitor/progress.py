"""Fold events into the progress of a campaign: no I/O, and constant cost per event.

CampaignProgress    all figures
JobProgress, WorkerProgress, EpisodeTotals, DomainProgress, TokenRate    its parts
MonitorNote         a line for a person
EPISODE_COUNTERS, RATE_WINDOW_S, MAX_NOTES, MAX_RECENT_REWARDS    what is counted, and limits
"""

from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from hpcrl.campaign_dir.events import (
    CampaignEvent,
    DrainStarted,
    EpisodesCounted,
    EvaluationFinished,
    EventsLost,
    FaultReported,
    JobEnded,
    JobStarted,
    LayoutChosen,
    MemoryRanOut,
    RowsSkipped,
    SegmentScored,
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
from hpcrl.campaign_dir.paths import make_worker_name
from hpcrl.spool.episode_lengths import LengthCounts, join_lengths
from hpcrl.spool.outcome import OUTCOME_FINISHED, OUTCOME_MAX_TURNS, OUTCOME_OVERFLOW, OUTCOME_REWARD_ERROR
from hpcrl.spool.token_fates import STALE, TOO_LONG, TRAINED

RATE_WINDOW_S = 60.0
MAX_NOTES = 50
MAX_RECENT_REWARDS = 256
"""Trajectories in the recent mean reward of each domain."""


class MonitorNote(msgspec.Struct, frozen=True, kw_only=True):
    """A line for a person."""

    time: float
    text: str
    bad: bool = False


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


EPISODE_COUNTERS = EpisodeTotals.__struct_fields__


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
    workers: dict[str, WorkerProgress] = field(default_factory=dict)


@dataclass
class DomainProgress:
    """The rewards of the trajectories of one domain, and what became of their tokens."""

    num: int = 0
    total: float = 0.0
    recent: deque[float] = field(default_factory=lambda: deque(maxlen=MAX_RECENT_REWARDS))
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

    def add(self, rewards: Sequence[float]) -> None:
        self.num += len(rewards)
        self.total += sum(rewards)
        self.recent.extend(rewards)

    def settle_outcomes(self) -> Counter[str]:
        """Return each ended episode under one outcome: that of its reward, if that could not be computed."""
        settled = self.outcomes.copy()
        settled[OUTCOME_REWARD_ERROR] += self.reward_errors
        settled -= self.replaced_outcomes  # stays at zero until an env worker has reported these too
        num_left = self.reward_errors - self.replaced_outcomes.total()  # an older campaign did not report theirs
        for name in (OUTCOME_FINISHED, OUTCOME_MAX_TURNS, OUTCOME_OVERFLOW, "truncated"):  # what is scored
            num_moved = min(num_left, settled[name])
            settled[name] -= num_moved
            num_left -= num_moved
        return +settled


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
    evaluations: dict[int, EvaluationFinished] = field(default_factory=dict)
    """Evaluations by number, in the order in which they were reported."""
    totals: EpisodeTotals = field(default_factory=EpisodeTotals)
    domains: dict[str, DomainProgress] = field(default_factory=dict)
    """Rewards by domain, also of trajectories not trained on; a segment that was scored twice counts twice."""
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
    notes: deque[MonitorNote] = field(default_factory=lambda: deque(maxlen=MAX_NOTES))
    num_notes: int = 0

    def add(self, event: CampaignEvent) -> None:
        """Add one event."""
        job = self._update_job(event)
        match event:
            case EpisodesCounted() | SegmentScored():  # first, and without a note: nearly all events are of these kinds
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
                self.version = max(self.version, event.version)
            case StaleDropped() | TaskFailed() | MemoryRanOut() | RowsSkipped():
                self._count_loss(event)
            case TrainingResumed():
                self._drop_steps_from(event.step + 1)
            case WorkerStarted() | WorkerRestarted() | WorkerEnded() | WorkerFailed() | VersionLoaded():
                self._apply_worker_event(event)
        self._add_note(event)

    def add_all(self, events: Iterable[CampaignEvent]) -> None:
        """Add the events of several files, in order of jobs and time."""
        for event in sorted(events, key=lambda event: (event.job, event.time)):
            self.add(event)

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
        subject = getattr(event, "of", None)
        if subject:
            short_name = subject.removeprefix(make_worker_name(event.job) + "-")
            name, role = make_worker_name(event.job, short_name), short_name.rpartition("-")[0]
        else:
            name, role = event.worker, event.role
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
            case WorkerEnded() | WorkerFailed():
                worker.is_up = False
            case VersionLoaded():
                worker.version = event.version

    def _count_loss(self, event: StaleDropped | TaskFailed | MemoryRanOut | RowsSkipped) -> None:
        match event:
            case StaleDropped(token_counts=counts):
                for domain, num in counts.items():
                    self._find_domain(domain).stale_tokens += num
            case TaskFailed(id=group):
                self.failed_tasks[group] = event
            case MemoryRanOut():
                self.shortage = event
            case RowsSkipped(step=step):
                self.skipped_rows[step] = event

    def _add_note(self, event: CampaignEvent) -> None:
        text = describe_event(event)
        if text:
            has_failed = isinstance(event, JobEnded) and event.outcome == "failed"
            bad = has_failed or isinstance(event, WorkerFailed | FaultReported | MemoryRanOut | EventsLost)
            self.num_notes += 1
            self.notes.append(MonitorNote(time=event.time, text=" ".join(text.split()), bad=bad))

    def _count_event(self, event: EpisodesCounted | SegmentScored) -> None:
        worker = self._find_worker(event)
        if isinstance(event, EpisodesCounted):
            self._count_episodes(worker, event)
            return
        for domain, rewards in event.rewards.items():
            self._find_domain(domain).add(rewards)
        for domain, num in event.reward_errors.items():
            self._find_domain(domain).reward_errors += num
        for domain, replaced in event.replaced_outcomes.items():
            self._find_domain(domain).replaced_outcomes.update(replaced)

    def _count_episodes(self, worker: WorkerProgress, counts: EpisodesCounted) -> None:
        previous = worker.episodes or EpisodesCounted(time=counts.time)
        added = [getattr(counts, name) - getattr(previous, name) for name in EPISODE_COUNTERS]
        if min(added) < 0:  # a new process of this worker counts from zero
            previous = EpisodesCounted(time=counts.time)
            added = [getattr(counts, name) for name in EPISODE_COUNTERS]
        for name, increment in zip(EPISODE_COUNTERS, added, strict=True):
            if increment:
                setattr(self.totals, name, getattr(self.totals, name) + increment)
        for domain, fates in counts.token_fates.items():
            self._find_domain(domain).token_fates.update(_subtract(fates, previous.token_fates.get(domain, {})))
        for domain, outcomes in counts.outcomes.items():
            self._find_domain(domain).outcomes.update(_subtract(outcomes, previous.outcomes.get(domain, {})))
        for status, lengths in counts.lengths.items():
            self.lengths.setdefault(status, Counter()).update(_subtract(lengths, previous.lengths.get(status, {})))
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

    def _find_domain(self, domain: str) -> DomainProgress:
        return self.domains.setdefault(domain, DomainProgress())

    def _drop_steps_from(self, first_dropped: int) -> None:
        """Remove the steps from `first_dropped` on, which a resume repeats; usually there are none."""
        if first_dropped <= next(reversed(self.steps), -1):
            self.steps = {number: old for number, old in self.steps.items() if number < first_dropped}
            kept = {number: old for number, old in self.skipped_rows.items() if number < first_dropped}
            self.skipped_rows = kept


def _subtract(counts: Mapping[str, int], before: Mapping[str, int]) -> dict[str, int]:
    return {name: max(0, num - before.get(name, 0)) for name, num in counts.items()}
