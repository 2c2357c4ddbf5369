"""Reward tasks of the driver: one for each shard that has unscored segments, and the number of reward jobs.

    RewardScoring      the reward tasks of one job
    RewardJobScaler    when reward jobs start and end, and when work stops waiting for them (pure)
    RewardWorkers      the interface that runs tasks
    is_lost_worker     whether a task failed since its worker ended
    SEGMENTS_PER_JOB   waiting segments for each reward job
    SCALE_INTERVAL_S   the time between two decisions on the number of reward jobs
    OUTAGE_PAUSE_S     the time without a new task after one that met a file system without room, or away

A task may run twice (a preempted job, a wait that was cancelled): the twin has one name, so nothing is scored twice.
"""

import time
from collections.abc import Callable, Set
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Protocol

from hpcrl.campaign_dir.events import CampaignEvent, FaultReported, RewardJobsScaled
from hpcrl.campaign_dir.paths import CampaignDir
from hpcrl.config.recipe import RewardConfig
from hpcrl.spool.listing import SegmentListing, find_shard
from hpcrl.system.file_watch import PATIENCE_S, PollPace, is_outage

SEGMENTS_PER_JOB = 16
"""Segments that wait for each reward job before another job is started."""
SCALE_INTERVAL_S = 1.0
"""The time between two decisions on the number of reward jobs."""
OUTAGE_PAUSE_S = 2.0


class RewardWorkers(Protocol):
    """The interface that runs the tasks; the job's runtime implements it."""

    def score(self, segments: list[str], *, shard: int, num_shards: int, elastic: bool) -> "Future[None]": ...

    def num_reward_jobs(self) -> int: ...

    def start_reward_job(self) -> None: ...

    def end_reward_jobs(self) -> None: ...


@dataclass
class RewardJobScaler:
    """The rule that decides how many reward jobs there should be."""

    max_jobs: int
    idle_s: float
    patience_s: float
    idle_since: float | None = None
    waiting_since: float | None = None

    def decide(self, *, waiting: int, jobs: int, now: float) -> str | None:
        """Return "start" (one more job), "end" (all jobs) or None; `waiting` counts segments not yet scored."""
        if waiting:
            self.idle_since = None
            return "start" if jobs < min(self.max_jobs, -(-waiting // SEGMENTS_PER_JOB)) else None
        if self.idle_since is None:
            self.idle_since = now
        if not jobs or now - self.idle_since < self.idle_s:
            return None
        self.idle_since = now  # jobs take a moment to end: do not ask again at once
        return "end"

    def has_waited_too_long(self, *, since: float, now: float) -> bool:
        """Return whether a segment that has waited since then should run on spare cores as well."""
        return now - since > self.patience_s


@dataclass
class _ScoringTask:
    """The scoring of one shard."""

    future: "Future[None]"
    since: float
    """The time at which it started, or at which one of its segments was last scored."""
    pending: set[str]
    """The segments of the shard that are not scored."""
    elastic: bool


@dataclass
class RewardScoring:
    """The reward tasks of one job."""

    campaign: CampaignDir
    reward: RewardConfig
    elastic: bool
    """True if reward jobs can be started; otherwise all segments are scored on spare cores."""
    emit: Callable[[CampaignEvent], None]
    count_failure: Callable[[str, str], None]
    """Called with what failed and why; raises once it has failed too often."""
    num_shards: int = 1
    """The parts into which segments are divided: one for each reward worker that there may be."""
    tasks: dict[int, _ScoringTask] = field(default_factory=dict)
    """The task of each shard."""
    scaled_at: float = 0.0
    paused_until: float = 0.0
    outage_since: float | None = None
    """The time when the file system failed for the first time since a task worked."""

    def __post_init__(self) -> None:
        self.rollouts = SegmentListing(self.campaign.spool("rollouts"))
        self.scored = SegmentListing(self.campaign.spool("scored"))
        self._pace = PollPace(longest_s=SCALE_INTERVAL_S)
        self._num_seen = (0, 0)
        self.scale = RewardJobScaler(
            max_jobs=self.reward.max_jobs, idle_s=self.reward.idle_s, patience_s=self.reward.patience_s
        )

    def poll(self, workers: RewardWorkers) -> None:
        """Collect tasks that have ended, start new ones, and start or end reward jobs."""
        now = time.monotonic()
        if now < self.paused_until:
            return
        ended = [shard for shard, task in self.tasks.items() if task.future.done()]
        for shard in ended:
            self._collect(self.tasks.pop(shard), now=now)
        if now < self.paused_until:
            return
        if not ended and not self._pace.is_due():
            return
        scored = self.scored.name_set()  # first: a segment is retired from "rollouts" before it is from "scored"
        pending = self.rollouts.name_set() - scored
        if (len(self.rollouts.name_set()), len(scored)) != self._num_seen:
            self._num_seen = len(self.rollouts.name_set()), len(scored)
            self._pace.note_change()
        for shard, segments in self._divide(pending).items():
            task = self.tasks.get(shard)
            if task is None and segments:
                self._start_task(workers, shard, segments, elastic=self.elastic, now=now)
            elif task is not None:
                task.since = now if task.pending - segments else task.since
                task.pending = segments
        if self.elastic and now - self.scaled_at >= SCALE_INTERVAL_S:
            self.scaled_at = now
            self._use_spare_cores(workers, now=now)
            self._rescale(workers, now=now)

    def num_segments(self) -> tuple[int, int]:
        """Return the numbers of played and scored segments; if both stay the same for long, the job has stalled."""
        return self._num_seen

    def _divide(self, pending: Set[str]) -> dict[int, set[str]]:
        """Return the pending segments of each shard."""
        shards: dict[int, set[str]] = {shard: set() for shard in range(self.num_shards)}
        for segment in pending:
            shards[find_shard(segment, num_shards=self.num_shards)].add(segment)
        return shards

    def _start_task(self, workers: RewardWorkers, shard: int, segments: set[str], *, elastic: bool, now: float) -> None:
        future = workers.score(sorted(segments), shard=shard, num_shards=self.num_shards, elastic=elastic)
        self.tasks[shard] = _ScoringTask(future=future, since=now, pending=segments, elastic=elastic)

    def _collect(self, task: _ScoringTask, *, now: float) -> None:
        error = task.future.exception()
        if error is None:
            self.outage_since = None
            return
        self.emit(FaultReported(what="reward", detail=f"{', '.join(sorted(task.pending)[:3])}: {error}"))
        if isinstance(error, OSError) and is_outage(error):
            self.paused_until = now + OUTAGE_PAUSE_S
            self.outage_since = self.outage_since or now
            if now - self.outage_since <= PATIENCE_S:
                return
        if not is_lost_worker(error):  # a preempted job is not the fault of segments: they are scored again
            self.count_failure(f"the scoring of {min(task.pending, default='segments')}", str(error))

    def _use_spare_cores(self, workers: RewardWorkers, *, now: float) -> None:
        for shard, task in list(self.tasks.items()):
            if not task.elastic or task.future.done() or not task.pending:
                continue
            if self.scale.has_waited_too_long(since=task.since, now=now):
                names = ", ".join(sorted(task.pending)[:3])
                why = f"no reward job scored any for {self.scale.patience_s:g} s: they now run on spare cores"
                self.emit(FaultReported(what="reward", detail=f"{names} ({len(task.pending)} segments): {why}"))
                self._start_task(workers, shard, task.pending, elastic=False, now=now)

    def _rescale(self, workers: RewardWorkers, *, now: float) -> None:
        waiting = sum(len(task.pending) for task in self.tasks.values() if task.elastic)
        jobs = workers.num_reward_jobs()
        match self.scale.decide(waiting=waiting, jobs=jobs, now=now):
            case "start":
                workers.start_reward_job()
                if (num := workers.num_reward_jobs()) > jobs:  # else Slurm has refused it
                    self.emit(RewardJobsScaled(num=num, waiting=waiting))
            case "end":
                workers.end_reward_jobs()
                self.emit(RewardJobsScaled(num=0, waiting=0))


def is_lost_worker(error: Any) -> bool:
    """Return whether the task ended with its worker pool, by the name of its error: only the runtime imports Parsl."""
    return type(error).__name__ in ("ManagerLost", "WorkerLost")
