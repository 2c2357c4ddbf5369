"""The walltime that a campaign needs, by what its jobs have recorded.

refuse_short_walltime   refuse a job that could hold no step and checkpoint
JobNeeds                the times of one job
NUM_TIMES               the last steps and checkpoints that count
"""

import math
from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

from hpcrl.campaign_dir.event_log import EVENT_SUFFIX, EventReader
from hpcrl.campaign_dir.events import CheckpointSaved, JobStarted, StepFinished
from hpcrl.campaign_dir.paths import CampaignDir
from hpcrl.errors import CampaignError

NUM_TIMES = 20


class JobNeeds(NamedTuple):
    """The times that one job takes, in seconds: to start, for a step, and for a checkpoint."""

    start_s: float
    step_s: float
    save_s: float

    @property
    def total_s(self) -> float:
        return self.start_s + self.step_s + self.save_s


def refuse_short_walltime(campaign: CampaignDir, *, walltime_min: float) -> None:
    """Raise CampaignError if a job would end before it has made a step and a checkpoint: it would gain nothing."""
    needs = _measure_needs(campaign)
    if needs is None or walltime_min * 60 >= needs.total_s:
        return
    least = math.ceil(needs.total_s * 1.3 / 60)
    raise CampaignError(
        f"job.walltime_min = {walltime_min:g} cannot hold a step and its checkpoint: by the events of this campaign a "
        f"job takes {needs.start_s:.0f} s until its first step, {needs.step_s:.0f} s for a step and "
        f"{needs.save_s:.0f} s for a checkpoint. Resume it with -s job.walltime_min={least}, or lower "
        "train.groups_per_step"
    )


def _measure_needs(campaign: CampaignDir) -> JobNeeds | None:
    """Return what jobs have needed, by their events; None if no step was made."""
    started = {
        event.job: event.time
        for event in EventReader(campaign.events, pattern=f"*-driver{EVENT_SUFFIX}").poll()
        if isinstance(event, JobStarted)
    }
    steps: list[StepFinished] = []
    save_times: list[float] = []
    for event in EventReader.for_role(campaign.events, "train").poll():
        if isinstance(event, StepFinished):
            steps.append(event)
        elif isinstance(event, CheckpointSaved) and event.wall_s is not None:
            save_times.append(event.wall_s)
    if not steps:
        return None
    firsts = {step.job: step for step in reversed(steps)}
    starts = [step.time - _measure_step(step) - started[job] for job, step in firsts.items() if job in started]
    step_times = [_measure_step(step) for step in steps]
    return JobNeeds(max(min(starts, default=0.0), 0.0), _find_median(step_times), _find_median(save_times))


def _measure_step(step: StepFinished) -> float:
    """Return the time from one step to the next."""
    return (step.wait_s or 0.0) + (step.step_s or 0.0) + step.times.get("publish", 0.0)


def _find_median(times: Sequence[float]) -> float:
    return median(times[-NUM_TIMES:]) if times else 0.0
