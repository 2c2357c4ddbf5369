"""Rewards as the driver sees them: one task per sealed segment without a scored twin, and where it runs.

Scoring     the tasks of one job
Scale       when reward jobs begin and end, and when work stops waiting for them. Pure

A task may run twice (a preempted job, a wait that was given up): the twin has one name, so nothing is scored twice.
"""

import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Protocol

from hpcrl.campaign_dir.events import CampaignEvent, FaultReported, RewardJobsScaled
from hpcrl.campaign_dir.paths import CampaignDir
from hpcrl.config.recipe import RewardConfig
from hpcrl.spool.listing import SegmentListing

SEGMENTS_PER_JOB = 16
"""Segments that wait for each reward job before another one is begun."""
POLL_INTERVAL_S = 1.0
"""How often the number of reward jobs is looked at."""


class RewardWorkers(Protocol):
    """Who runs the tasks: the job's runtime."""

    def score(self, segment: str, *, elastic: bool) -> "Future[None]": ...

    def num_reward_jobs(self) -> int: ...

    def start_reward_job(self) -> None: ...

    def end_reward_jobs(self) -> None: ...


@dataclass
class RewardJobScaler:
    """How many reward jobs there should be."""

    max_jobs: int
    idle_s: float
    patience_s: float
    idle_since: float | None = None
    waiting_since: float | None = None

    def decide(self, *, waiting: int, jobs: int, now: float) -> str | None:
        """ "begin" another job, "end" them all, or nothing; `waiting` are segments whose task has not ended."""
        if waiting:
            self.idle_since = None
            return "begin" if jobs < min(self.max_jobs, -(-waiting // SEGMENTS_PER_JOB)) else None
        if self.idle_since is None:
            self.idle_since = now
        if not jobs or now - self.idle_since < self.idle_s:
            return None
        self.idle_since = now  # they take a moment to end: not asked again at once
        return "end"

    def has_waited_too_long(self, *, since: float, now: float) -> bool:
        """Whether a segment that has waited since then goes to spare cores as well."""
        return now - since > self.patience_s


@dataclass
class _ScoringTask:
    """The scoring of one segment."""

    future: "Future[None]"
    since: float
    elastic: bool


@dataclass
class RewardScoring:
    """The reward tasks of one job."""

    campaign: CampaignDir
    reward: RewardConfig
    elastic: bool
    """Whether reward jobs can be begun; without them all is scored on spare cores."""
    emit: Callable[[CampaignEvent], None]
    count_failure: Callable[[str, str], None]
    """Called with what failed and why; it raises once that has happened too often."""
    tasks: dict[str, _ScoringTask] = field(default_factory=dict)
    scaled_at: float = 0.0

    def __post_init__(self) -> None:
        self.rollouts = SegmentListing(self.campaign.spool("rollouts"))
        self.scored = SegmentListing(self.campaign.spool("scored"))
        self.scale = RewardJobScaler(
            max_jobs=self.reward.max_jobs, idle_s=self.reward.idle_s, patience_s=self.reward.patience_s
        )

    def poll(self, workers: RewardWorkers) -> None:
        """Collect what has ended, begin what is new, and begin or end reward jobs."""
        now = time.monotonic()
        for segment in [name for name, task in self.tasks.items() if task.future.done()]:
            self._collect(segment, self.tasks.pop(segment).future)
        scored = self.scored.name_set()  # first: a segment is retired from "rollouts" before it is from "scored"
        pending = self.rollouts.name_set() - scored
        for segment in sorted(pending - self.tasks.keys()):
            self._start_task(workers, segment, elastic=self.elastic, now=now)
        if self.elastic and now - self.scaled_at >= POLL_INTERVAL_S:
            self.scaled_at = now
            self._use_spare_cores(workers, now=now)
            self._rescale(workers, now=now)

    def num_segments(self) -> tuple[int, int]:
        """Segments played and scored: what has not changed for long has stalled."""
        return len(self.rollouts.names()), len(self.scored.names())

    def _start_task(self, workers: RewardWorkers, segment: str, *, elastic: bool, now: float) -> None:
        self.tasks[segment] = _ScoringTask(future=workers.score(segment, elastic=elastic), since=now, elastic=elastic)

    def _collect(self, segment: str, future: "Future[None]") -> None:
        error = future.exception()
        if error is None:
            return
        self.emit(FaultReported(what="reward", detail=f"{segment}: {error}"))
        if not _is_lost_worker(error):  # a preempted job says nothing about the segment: it is simply scored again
            self.count_failure(f"the scoring of {segment}", str(error))

    def _use_spare_cores(self, workers: RewardWorkers, *, now: float) -> None:
        for segment, task in list(self.tasks.items()):
            if task.elastic and not task.future.done() and self.scale.has_waited_too_long(since=task.since, now=now):
                why = f"no reward job took it for {self.scale.patience_s:g} s: spare cores do"
                self.emit(FaultReported(what="reward", detail=f"{segment}: {why}"))
                self._start_task(workers, segment, elastic=False, now=now)

    def _rescale(self, workers: RewardWorkers, *, now: float) -> None:
        waiting = sum(task.elastic for task in self.tasks.values())
        jobs = workers.num_reward_jobs()
        match self.scale.decide(waiting=waiting, jobs=jobs, now=now):
            case "begin":
                workers.start_reward_job()
                self.emit(RewardJobsScaled(num=jobs + 1, waiting=waiting))
            case "end":
                workers.end_reward_jobs()
                self.emit(RewardJobsScaled(num=0, waiting=0))


def _is_lost_worker(error: Any) -> bool:
    """The worker pool went, and the task with it; by name, since only the runtime imports Parsl."""
    return type(error).__name__ in ("ManagerLost", "WorkerLost")
