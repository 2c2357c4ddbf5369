"""How long a trajectory waits between two stages, by the time stamps of events, files and trajectories.

    HandoverTimes    the times of each hand-over
    measure_handovers   of a campaign that runs

A step of an idle trainer is started by the last segment that was scored before it: the time from its youngest episode
to that step is what a whole hand-over takes. A step starts at the time of its event less its parts.
"""

import bisect
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

from bench.campaigns.campaign import MeasuredCampaign
from hpcrl.campaign_dir.events import StepFinished, VersionLoaded, VersionPublished
from hpcrl.spool.listing import list_segments
from hpcrl.spool.segment import read_segment

MIN_WAIT_S = 0.002
"""A trainer that waited less for its batch was not idle."""


@dataclass
class HandoverTimes:
    """Times in seconds."""

    end_to_seal: list[float] = field(default_factory=list)
    """From the end of an episode until it is durable; it waits for its group."""
    youngest_to_seal: list[float] = field(default_factory=list)
    """The same for the last episode of each segment, which waits for none."""
    seal_to_score: list[float] = field(default_factory=list)
    score_to_step: list[float] = field(default_factory=list)
    end_to_step: list[float] = field(default_factory=list)
    """From the last token that an idle trainer waited for to the start of its step."""
    step: list[float] = field(default_factory=list)
    publish_to_load: list[float] = field(default_factory=list)
    """From the end of a step until an engine uses its version."""
    publish_to_notice: list[float] = field(default_factory=list)
    """The same until the engine starts to load it, which waits for the end of a step of the engine."""

    def add(self, other: "HandoverTimes") -> None:
        for name, times in vars(other).items():
            getattr(self, name).extend(times)


def measure_handovers(campaign: MeasuredCampaign, *, first_step: int) -> HandoverTimes:
    """Return the times of the steps from `first_step` on."""
    times = HandoverTimes()
    steps = [step for step in campaign.list_steps() if step.step >= first_step]
    if not steps:
        return times
    from_s = steps[0].time
    rollouts, scored = (campaign.directory.spool(name) for name in ("rollouts", "scored"))
    ready: list[tuple[float, float]] = []
    for name in set(list_segments(rollouts)) & set(list_segments(scored)):
        sealed_at, scored_at = ((spool / name).stat().st_ctime for spool in (rollouts, scored))
        ends = [facts.created for facts in read_segment(rollouts / name).facts]
        if sealed_at >= from_s:
            times.end_to_seal += [sealed_at - end for end in ends]
            times.youngest_to_seal.append(sealed_at - max(ends))
            times.seal_to_score.append(scored_at - sealed_at)
        ready.append((scored_at, max(ends)))
    ready.sort()
    for step in steps:
        started_at = find_start(step)
        times.step.append(step.time - started_at)
        place = bisect.bisect(ready, (started_at,)) - 1
        if place >= 0 and (step.wait_s or 0.0) >= MIN_WAIT_S:
            times.score_to_step.append(started_at - ready[place][0])
            times.end_to_step.append(started_at - ready[place][1])
    published = {event.version: event.time for event in campaign.list_events(VersionPublished)}
    for event in campaign.list_events(VersionLoaded):
        if event.time >= from_s and event.version in published:
            load_s = event.time - published[event.version]
            times.publish_to_load.append(load_s)
            times.publish_to_notice.append(load_s - (event.wall_s or 0.0))
    return times


def find_start(step: StepFinished) -> float:
    """Return the time at which a step started."""
    return step.time - (step.step_s or 0.0) - step.times.get("publish", 0.0)


def median_ms(times: Sequence[float]) -> float:
    return statistics.median(times) * 1e3 if times else float("nan")
