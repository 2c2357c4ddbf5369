"""List trajectories, newest first, one per line: `hpcrl traj ls`.

list_newest                 prints the list
describe_nothing            explains an empty one
find_newest                 finds the newest trajectories
build_list_line             makes the line of a trajectory
"""

import heapq
import math
from collections.abc import Sequence

from hpcrl.campaign_dir.event_log import EventReader
from hpcrl.campaign_dir.events import EpisodesCounted
from hpcrl.campaign_dir.paths import CampaignDir
from hpcrl.monitor.progress import CampaignProgress
from hpcrl.monitor.screen_parts import FittedTable
from hpcrl.spool.list_line import ListLine
from hpcrl.spool.listing import describe_lost_spools
from hpcrl.spool.outcome import LOST
from hpcrl.spool.record import Trajectory
from hpcrl.system.terminal import (
    STATUS_STYLES,
    format_age,
    format_number,
    format_versions,
    make_console,
    print_json,
    show_wait,
)
from hpcrl.traj.history import SegmentLocation, TrajectoryHistory, TrajectorySelection

MAX_CLOCK_SKEW_S = 120.0
"""The difference between the clocks of nodes and file server up to which the newest are found."""


def build_list_line(location: SegmentLocation, trajectory: Trajectory) -> ListLine:
    return ListLine(
        id=trajectory.id,
        domain=trajectory.domain,
        group=trajectory.group,
        status=trajectory.status,
        reward=trajectory.reward,
        num_turns=len(trajectory.turns),
        num_tokens=len(trajectory),
        start_version=trajectory.start_version,
        end_version=trajectory.end_version,
        created=trajectory.created,
        spool=location.spool,
    )


def find_newest(
    history: TrajectoryHistory, selection: TrajectorySelection, *, limit: int
) -> list[tuple[SegmentLocation, Trajectory]]:
    """Return the newest trajectories, newest first; limit 0 returns all. No more segments are read than needed."""
    found: list[tuple[float, str, int, SegmentLocation, Trajectory]] = []

    def may_have_newer(written_at: float) -> bool:
        return not limit or len(found) < limit or written_at + MAX_CLOCK_SKEW_S > found[0][0]

    for location, trajectory in history.trajectories(selection, newest_while=may_have_newer):
        created = trajectory.created if math.isfinite(trajectory.created) else 0.0
        entry = (created, trajectory.id, len(found), location, trajectory)
        if not limit or len(found) < limit:
            heapq.heappush(found, entry)
        else:
            heapq.heappushpop(found, entry)
    return [
        (location, trajectory) for _, _, _, location, trajectory in sorted(found, key=lambda one: one[:2], reverse=True)
    ]


def list_newest(history: TrajectoryHistory, selection: TrajectorySelection, *, limit: int, as_json: bool) -> int:
    """Print the newest trajectories."""
    with show_wait("the trajectories are read"):
        found = find_newest(history, selection, limit=limit)
    lines = [build_list_line(place, trajectory) for place, trajectory in found]
    if as_json:
        print_json(lines)
        return 0
    console = make_console()
    if not lines:
        console.print(describe_nothing(history.campaign, selection), style="dim", highlight=False, soft_wrap=True)
        return 0
    console.print(_build_list_table(lines))
    total = history.num_trajectories()
    if selection == TrajectorySelection() and len(lines) < total:
        console.print(f"the newest {len(lines)} of {total:,}; -n 0 lists all", style="dim")
    return 0


def describe_nothing(campaign: CampaignDir, selection: TrajectorySelection) -> str:
    """Describe why a selection is empty: an episode that is lost to a fault of an environment or engine has no record.

    Only groups that are full are written, and such an episode is in none.
    """
    if lost := describe_lost_spools(campaign):
        return lost
    text = "no trajectories yet" if selection == TrajectorySelection() else "no trajectory matches"
    num_failed = _count_lost(campaign, selection)
    if not num_failed:
        return text
    failed = "1 episode was" if num_failed == 1 else f"{num_failed:,} episodes were"
    return f"{text}: {failed} lost to a fault, which leaves no trajectory (`hpcrl events {campaign.name} --kind fault`)"


def _count_lost(campaign: CampaignDir, selection: TrajectorySelection) -> int:
    """Count the episodes of the selected domains that have no record, from the events of env workers."""
    progress = CampaignProgress()
    for event in EventReader.for_role(campaign.events, "env").poll():
        if isinstance(event, EpisodesCounted):
            progress.add(event)
    domains = [one for name, one in progress.domains.items() if not selection.domains or name in selection.domains]
    return sum(domain.settle_outcomes()[outcome] for domain in domains for outcome in LOST)


def _build_list_table(lines: Sequence[ListLine]) -> FittedTable:
    rows = [
        {
            "id": line.id,
            "domain": line.domain,
            "status": line.status,
            "reward": format_number(line.reward),
            "turns": f"{line.num_turns:,}",
            "tokens": f"{line.num_tokens:,}",
            "versions": format_versions(line.start_version, line.end_version),
            "age": format_age(line.created),
        }
        for line in lines
    ]
    return FittedTable(
        rows,
        texts=("id", "status"),
        numbers=("reward", "turns", "tokens", "versions", "age"),
        last_texts=("domain",),
        styles=[{"status": STATUS_STYLES[line.status]} for line in lines],
        long_names="wrapped",  # an id is copied into the next command
    )
