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
from hpcrl.campaign_dir.paths import RunDir
from hpcrl.config.recipe import Reward
from hpcrl.spool.listing import Listing

SEGMENTS_PER_JOB = 16
"""Segments that wait for each reward job before another one is begun."""
LOOK_S = 1.0
"""How often the number of reward jobs is looked at."""


class Workers(Protocol):
    """Who runs the tasks: the job's runtime."""

    def score(self, segment: str, *, elastic: bool) -> "Future[None]": ...

    def num_reward_jobs(self) -> int: ...

    def begin_reward_job(self) -> None: ...

    def end_reward_jobs(self) -> None: ...


@dataclass
class Scale:
    """How many reward jobs there should be."""

    max_jobs: int
    idle_s: float
    patience_s: float
    idle_since: float | None = None
    waiting_since: float | None = None

    def look(self, *, waiting: int, jobs: int, now: float) -> str | None:
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

    def gives_up(self, *, since: float, now: float) -> bool:
        """Whether a segment that has waited since then goes to spare cores as well."""
        return now - since > self.patience_s


@dataclass
class _Work:
    """The scoring of one segment."""

    future: "Future[None]"
    since: float
    elastic: bool


@dataclass
class Scoring:
    """The reward tasks of one job."""

    run: RunDir
    reward: Reward
    elastic: bool
    """Whether reward jobs can be begun; without them all is scored on spare cores."""
    emit: Callable[[CampaignEvent], None]
    spend: Callable[[str, str], None]
    """Called with what failed and why; it raises once that has happened too often."""
    work: dict[str, _Work] = field(default_factory=dict)
    looked: float = 0.0

    def __post_init__(self) -> None:
        self.rollouts = Listing(self.run.spool("rollouts"))
        self.scored = Listing(self.run.spool("scored"))
        self.scale = Scale(max_jobs=self.reward.max_jobs, idle_s=self.reward.idle_s, patience_s=self.reward.patience_s)

    def tend(self, workers: Workers) -> None:
        """Collect what has ended, begin what is new, and begin or end reward jobs."""
        now = time.monotonic()
        for segment in [name for name, work in self.work.items() if work.future.done()]:
            self._collect(segment, self.work.pop(segment).future)
        scored = self.scored.present()  # first: a segment is retired from "rollouts" before it is from "scored"
        pending = self.rollouts.present() - scored
        for segment in sorted(pending - self.work.keys()):
            self._begin(workers, segment, elastic=self.elastic, now=now)
        if self.elastic and now - self.looked >= LOOK_S:
            self.looked = now
            self._give_up_waiting(workers, now=now)
            self._rescale(workers, now=now)

    def num_seen(self) -> tuple[int, int]:
        """Segments played and scored: what has not changed for long has stalled."""
        return len(self.rollouts.names()), len(self.scored.names())

    def _begin(self, workers: Workers, segment: str, *, elastic: bool, now: float) -> None:
        self.work[segment] = _Work(future=workers.score(segment, elastic=elastic), since=now, elastic=elastic)

    def _collect(self, segment: str, future: "Future[None]") -> None:
        error = future.exception()
        if error is None:
            return
        self.emit(FaultReported(what="reward", detail=f"{segment}: {error}"))
        if not _is_lost(error):  # a preempted job says nothing about the segment: it is simply scored again
            self.spend(f"the scoring of {segment}", str(error))

    def _give_up_waiting(self, workers: Workers, *, now: float) -> None:
        for segment, work in list(self.work.items()):
            if work.elastic and not work.future.done() and self.scale.gives_up(since=work.since, now=now):
                why = f"no reward job took it for {self.scale.patience_s:g} s: spare cores do"
                self.emit(FaultReported(what="reward", detail=f"{segment}: {why}"))
                self._begin(workers, segment, elastic=False, now=now)

    def _rescale(self, workers: Workers, *, now: float) -> None:
        waiting = sum(work.elastic for work in self.work.values())
        jobs = workers.num_reward_jobs()
        match self.scale.look(waiting=waiting, jobs=jobs, now=now):
            case "begin":
                workers.begin_reward_job()
                self.emit(RewardJobsScaled(num=jobs + 1, waiting=waiting))
            case "end":
                workers.end_reward_jobs()
                self.emit(RewardJobsScaled(num=0, waiting=0))


def _is_lost(error: Any) -> bool:
    """The worker pool went, and the task with it; by name, since only the runtime imports Parsl."""
    return type(error).__name__ in ("ManagerLost", "WorkerLost")
