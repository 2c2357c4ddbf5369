"""Find out whether a job has stalled, so that nodes are never held idle.

ProgressWatch       follows the figures of a job
watch_campaign      make it for a campaign
JobStall            its result
ActivityFigures     what changes while engines work
count_activity      count them over all engines
RankBeats           the heartbeats of a trainer's ranks, which end with their node

New segments, groups, versions and steps of a warm-up are progress. Where the trainer could only drop groups, more
segments are none. Engines that generate show that the job is alive: a group counts only when its slowest episode has
ended, which may take longer than `job.stall_timeout_min`. A training step may take `STEP_FACTOR` times as long.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from hpcrl.campaign_dir.endpoints import EngineEndpoint, list_endpoints
from hpcrl.campaign_dir.paths import CampaignDir
from hpcrl.campaign_dir.train_progress import TrainProgress, read_train_progress
from hpcrl.config.recipe import Recipe
from hpcrl.errors import EngineError
from hpcrl.system.file_watch import WatchedValue
from hpcrl.weights import versions

STEP_FACTOR = 4
FIGURES_INTERVAL_S = 1.0
"""The longest time between two looks at a file, while nothing changes."""
RANK_LOOK_INTERVAL_S = 10.0
MAX_BEAT_AGE_S = 60.0
"""The age of a heartbeat at which Slurm is asked about its node; clients of a file server see one late, up to this."""


class ActivityFigures(NamedTuple):
    """The figures of engines that grow while they work."""

    workers: frozenset[str] = frozenset()
    num_tokens: int = 0


class JobStall(NamedTuple):
    """The reason why a job in which nothing happens is reported or ended."""

    reason: str
    is_final: bool
    """True if the job must end; otherwise this is reported, and the job continues."""
    is_hang: bool = False
    """True if no reason is known: the stacks of the workers are wanted."""


@dataclass(kw_only=True)
class ProgressWatch:
    """Finds that a job has stalled; the figures of the engines are read only once it seems so."""

    timeout_s: float
    start_timeout_s: float
    """The longest that an engine may take to start: before the first one is there, nothing is generated."""
    groups_per_step: int
    read_progress: Callable[[], TrainProgress]
    count_segments: Callable[[], tuple[int, int]]
    find_version: Callable[[], int | None]
    count_activity: Callable[[], ActivityFigures]
    clock: Callable[[], float] = time.monotonic
    _seen: object = None
    _since: float = field(default=float("-inf"))
    _activity: ActivityFigures | None = None
    """The activity of engines half a timeout after the last change; None before that."""
    _wasted: tuple[int, int] = (0, 0)
    """Flat and lost groups when the last period started."""

    def look(self) -> JobStall | None:
        """Return what is wrong if nothing has changed for too long."""
        progress, now = self.read_progress(), self.clock()
        is_idle = progress.is_idle(groups_per_step=self.groups_per_step)
        seen = (
            None if is_idle else self.count_segments(),
            self.find_version(),
            progress.num_warmup_steps,
            progress.num_ready_groups,
        )
        if seen != self._seen:
            self._seen = seen
            self._restart(progress, now)
            return None
        idle_s = now - self._since
        if self._activity is None and idle_s > self.timeout_s / 2:
            self._activity = self.count_activity()
        if idle_s <= self.timeout_s * (STEP_FACTOR if progress.is_training else 1):
            return None
        before, activity = self._activity or ActivityFigures(), self.count_activity()
        if not activity.workers and idle_s <= self.timeout_s + self.start_timeout_s:
            return None
        num_flat, num_lost = (
            max(now_ - then, 0)
            for now_, then in zip((progress.num_flat_groups, progress.num_lost_groups), self._wasted, strict=True)
        )
        self._restart(progress, now)
        stalled = f"no progress for {self.timeout_s / 60:g} min (job.stall_timeout_min)"
        if is_idle and (num_flat or num_lost):
            # Others than the flat groups may still come, since rewards can be computed.
            is_final = not num_flat or bool(progress.reward_error)
            return JobStall(f"{stalled}: {progress.describe_waste()}", is_final=is_final)
        if activity != before:
            return None
        return JobStall(f"{stalled}: {_describe_roles(progress, activity)}", is_final=True, is_hang=True)

    def skip(self, seconds: float) -> None:
        """Leave out a time in which nothing could happen, and give engines half of a timeout to work again."""
        self._since = max(self._since + seconds, self.clock() - self.timeout_s / 2)
        self._activity = None

    def _restart(self, progress: TrainProgress, now: float) -> None:
        self._since, self._activity = now, None
        self._wasted = (progress.num_flat_groups, progress.num_lost_groups)


def watch_campaign(
    campaign: CampaignDir,
    *,
    recipe: Recipe,
    count_segments: Callable[[], tuple[int, int]],
    certificate: Path | None = None,
) -> ProgressWatch:
    """Return the watch over the figures of a job; files that do not change are read ever more rarely."""
    progress = WatchedValue(
        campaign.train_progress,
        lambda: read_train_progress(campaign.train_progress),
        longest_s=FIGURES_INTERVAL_S,
    )
    version = WatchedValue(
        campaign.weights, lambda: versions.find_newest_version(campaign.weights), longest_s=FIGURES_INTERVAL_S
    )
    return ProgressWatch(
        timeout_s=recipe.job.stall_timeout_min * 60,
        start_timeout_s=recipe.engine.start_timeout_s if recipe.has_rollouts else 0.0,
        groups_per_step=recipe.train.groups_per_step,
        read_progress=progress.poll,
        count_segments=count_segments,
        find_version=version.poll,
        count_activity=lambda: count_activity(list_endpoints(campaign.endpoints), certificate=certificate),
    )


def _describe_roles(progress: TrainProgress, activity: ActivityFigures) -> str:
    """Return what each role was seen to do, or not to do."""
    names = ", ".join(sorted(activity.workers))
    engines = f"the engines {names} answer and generate nothing" if names else "no engine answers"
    waiting = "waits for groups" if progress.num_ready_groups == 0 else f"has {progress.num_ready_groups} groups ready"
    return f"{engines}, the trainer {'is in a step' if progress.is_training else waiting}"


def count_activity(endpoints: Iterable[EngineEndpoint], *, certificate: Path | None = None) -> ActivityFigures:
    """Ask all engines at once how much they have generated; one that does not answer counts as no engine."""
    return asyncio.run(_count_activity(list(endpoints), certificate))


async def _count_activity(endpoints: list[EngineEndpoint], certificate: Path | None) -> ActivityFigures:
    from hpcrl.engines.http import RemoteEngine, make_client_session  # a job that never seems to stall needs no HTTP

    async with make_client_session(certificate) as session:

        async def ask(endpoint: EngineEndpoint) -> tuple[str, int] | None:
            try:
                figures = await RemoteEngine(endpoint, session).load_figures()
            except EngineError:
                return None
            return endpoint.worker, figures.num_generated_tokens

        answers = [answer for answer in await asyncio.gather(*map(ask, endpoints)) if answer is not None]
    return ActivityFigures(frozenset(name for name, _ in answers), sum(num for _, num in answers))


class RankBeats:
    """The heartbeats of a trainer's ranks, seen from the driver's node.

    A rank that stands still is ended on its own node (`hpcrl/job/ranks.py`). If the node is lost, nothing there is
    left to do that, and srun may wait for it forever. Only changes count, since the clocks of nodes differ.
    """

    def __init__(self, files: Sequence[Path], *, clock: Callable[[], float] = time.monotonic) -> None:
        """Take the file that each rank touches."""
        self._files = list(files)
        self._clock = clock
        self._times: list[int | None] = [None] * len(self._files)
        self.restart()

    def restart(self) -> None:
        """Note that the ranks were started again."""
        self._changed_at = [self._clock()] * len(self._files)
        self._has_beaten = [False] * len(self._files)

    def find_silent(self, *, max_age_s: float, max_start_s: float) -> list[int]:
        """Return the ranks whose last heartbeat is too old; those that have just started have longer."""
        now = self._clock()
        self._look(now)
        limits = [max_age_s if has_beaten else max_start_s for has_beaten in self._has_beaten]
        return [
            rank
            for rank, (changed_at, limit_s) in enumerate(zip(self._changed_at, limits, strict=True))
            if now - changed_at > limit_s
        ]

    def _look(self, now: float) -> None:
        for rank, file in enumerate(self._files):
            with contextlib.suppress(OSError):  # it is not there yet, or the file system is away
                time_ns = file.stat().st_mtime_ns
                if time_ns != self._times[rank]:
                    self._has_beaten[rank] = self._times[rank] is not None or self._has_beaten[rank]
                    self._times[rank], self._changed_at[rank] = time_ns, now
