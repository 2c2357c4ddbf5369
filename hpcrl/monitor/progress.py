"""Events folded into what a campaign has done: no I/O, and each event costs the same however long the history."""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import msgspec

from hpcrl.campaign_dir.events import (
    CampaignEvent,
    DrainStarted,
    EpisodesCounted,
    EvaluationFinished,
    FaultReported,
    JobEnded,
    JobStarted,
    LayoutChosen,
    SegmentScored,
    StepFinished,
    TrainingResumed,
    VersionLoaded,
    VersionPublished,
    WorkerEnded,
    WorkerFailed,
    WorkerRestarted,
    WorkerStarted,
    plain,
)

RATE_WINDOW_S = 60.0
KEPT_NOTES = 50
KEPT_REWARDS = 256
"""Of each domain: what its mean of late is of."""


class Note(msgspec.Struct, frozen=True, kw_only=True):
    """One line for a person."""

    time: float
    text: str
    bad: bool = False


class Totals(msgspec.Struct, kw_only=True):
    """Episode counts of all env workers of all jobs."""

    done: int = 0
    truncated: int = 0
    aborted_stale: int = 0
    aborted_redundant: int = 0
    env_fault: int = 0
    policy_fault: int = 0
    num_tokens: int = 0
    remote_prefills: int = 0
    turns: int = 0


COUNTERS = Totals.__struct_fields__


@dataclass
class Worker:
    """One worker, as its events tell."""

    name: str
    role: str
    node: str = ""
    partition: str = ""
    up: bool = False
    """It has said something and nobody has said that it ended."""
    version: int | None = None
    """Version of the weights that it serves."""
    episodes: EpisodesCounted | None = None
    """The newest counts of an env worker."""


@dataclass
class Job:
    """One job, as its events tell."""

    started: float | None = None
    node: str = ""
    """Where its driver runs."""
    end_time: float | None = None
    nodes: list[list[str]] = field(default_factory=list)
    """Of each component."""
    draining: str | None = None
    ended: JobEnded | None = None
    first: float = 0.0
    last: float = 0.0
    workers: dict[str, Worker] = field(default_factory=dict)


@dataclass
class Rewards:
    """What the trajectories of one domain have earned."""

    num: int = 0
    total: float = 0.0
    recent: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT_REWARDS))

    def add(self, rewards: Sequence[float]) -> None:
        self.num += len(rewards)
        self.total += sum(rewards)
        self.recent.extend(rewards)


@dataclass
class TokenRate:
    """Generated tokens by second, over the window only."""

    by_second: dict[int, int] = field(default_factory=dict)
    first: float | None = None

    def add(self, time: float, num_tokens: int) -> None:
        second = int(time)
        self.first = time if self.first is None else min(self.first, time)
        self.by_second[second] = self.by_second.get(second, 0) + num_tokens

    def keep(self, *, since: float, until: float) -> None:
        self.by_second = {second: num for second, num in self.by_second.items() if since < second <= until}

    def per_second(self, now: float) -> float:
        """Over the window, or over what has passed since its first token if that is shorter."""
        self.keep(since=now - RATE_WINDOW_S, until=now + RATE_WINDOW_S)  # clocks differ a little
        if self.first is None:
            return 0.0
        covered = min(max(now - self.first, 1.0), RATE_WINDOW_S)
        return sum(self.by_second.values()) / covered


@dataclass
class Progress:
    """What a campaign has done so far."""

    version: int = 0
    steps: dict[int, StepFinished] = field(default_factory=dict)
    """One per step, in order of steps; those that a resume went back behind are gone."""
    evaluations: dict[int, EvaluationFinished] = field(default_factory=dict)
    """By number, in the order in which they were told."""
    totals: Totals = field(default_factory=Totals)
    domains: dict[str, Rewards] = field(default_factory=dict)
    """Rewards by domain, also of what was not trained on; a segment that was scored twice counts twice."""
    rate: TokenRate = field(default_factory=TokenRate)
    jobs: dict[int, Job] = field(default_factory=dict)
    notes: deque[Note] = field(default_factory=lambda: deque(maxlen=KEPT_NOTES))
    num_notes: int = 0

    def add(self, event: CampaignEvent) -> None:
        """Take in one event."""
        job = self._job(event)
        match event:
            case EpisodesCounted() | SegmentScored():  # first, and without a note: nearly all lines are these
                self._count(event)
                return
            case EvaluationFinished(number=number) if self.evaluations.setdefault(number, event) is not event:
                return  # told again by a worker that died right after it had told it
            case JobStarted() | LayoutChosen() | DrainStarted() | JobEnded():
                self._about_job(job, event)
            case VersionPublished():
                self.version = max(self.version, event.version)
            case StepFinished():
                self._go_back_before(event.step)
                self.steps[event.step] = event
                self.version = max(self.version, event.version)
            case TrainingResumed():
                self._go_back_before(event.step + 1)
            case WorkerStarted() | WorkerRestarted() | WorkerEnded() | WorkerFailed() | VersionLoaded():
                self._about_worker(event)
        self._note(event)

    def add_all(self, events: Iterable[CampaignEvent]) -> None:
        """Take in what several files hold, in order of jobs and time."""
        for event in sorted(events, key=lambda event: (event.job, event.time)):
            self.add(event)

    def mean_tokens_per_s(self) -> float:
        """Over all the time that jobs have run."""
        return self.totals.num_tokens / max(sum(job.last - job.first for job in self.jobs.values()), 1.0)

    def _job(self, event: CampaignEvent) -> Job:
        job = self.jobs.setdefault(event.job, Job(first=event.time, last=event.time))
        job.first, job.last = min(job.first, event.time), max(job.last, event.time)
        return job

    @staticmethod
    def _about_job(job: Job, event: JobStarted | LayoutChosen | DrainStarted | JobEnded) -> None:
        match event:
            case JobStarted():
                job.started, job.end_time, job.node = event.time, event.end_time, event.node or ""
                job.ended = job.draining = None  # a requeued job starts again under its old number
            case LayoutChosen():
                job.nodes = event.nodes
            case DrainStarted():
                job.draining = event.reason
            case JobEnded():
                job.ended = event

    def _worker(self, event: CampaignEvent) -> Worker:
        of = getattr(event, "of", None)
        if of:
            about = of.removeprefix(f"{event.job:03d}-")
            name, role = f"{event.job:03d}-{about}", about.rpartition("-")[0]
        else:
            name, role = event.worker, event.role
        workers = self.jobs[event.job].workers
        if name not in workers:
            workers[name] = Worker(name=name, role=role, up=True)
        worker = workers[name]
        if not of:  # the driver's own node says nothing about the worker's
            worker.node, worker.partition = event.node or worker.node, event.partition or worker.partition
        return worker

    def _about_worker(
        self, event: WorkerStarted | WorkerRestarted | WorkerEnded | WorkerFailed | VersionLoaded
    ) -> None:
        worker = self._worker(event)
        match event:
            case WorkerStarted() | WorkerRestarted():
                worker.up = True
            case WorkerEnded() | WorkerFailed():
                worker.up = False
            case VersionLoaded():
                worker.version = event.version

    def _note(self, event: CampaignEvent) -> None:
        text = plain(event)
        if text:
            has_failed = isinstance(event, JobEnded) and event.outcome == "failed"
            bad = has_failed or isinstance(event, WorkerFailed | FaultReported)
            self.num_notes += 1
            self.notes.append(Note(time=event.time, text=" ".join(text.split()), bad=bad))

    def _count(self, event: EpisodesCounted | SegmentScored) -> None:
        worker = self._worker(event)
        if isinstance(event, EpisodesCounted):
            self._count_episodes(worker, event)
            return
        for domain, rewards in event.rewards.items():
            self.domains.setdefault(domain, Rewards()).add(rewards)

    def _count_episodes(self, worker: Worker, now: EpisodesCounted) -> None:
        before = worker.episodes or EpisodesCounted(time=now.time)
        added = [getattr(now, name) - getattr(before, name) for name in COUNTERS]
        if min(added) < 0:  # a new process of this worker counts from zero
            before = EpisodesCounted(time=now.time)
            added = [getattr(now, name) for name in COUNTERS]
        for name, more in zip(COUNTERS, added, strict=True):
            if more:
                setattr(self.totals, name, getattr(self.totals, name) + more)
        self.rate.add(now.time, now.num_tokens - before.num_tokens)
        worker.episodes = now

    def _go_back_before(self, step: int) -> None:
        """What was learned from `step` on is lost and done again; nothing to do in the usual run of steps."""
        if step <= next(reversed(self.steps), -1):
            self.steps = {number: old for number, old in self.steps.items() if number < step}
