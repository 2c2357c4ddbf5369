"""`hpcrl traj ls`: one line a trajectory, newest first."""

import heapq
import math
from collections.abc import Sequence

import msgspec
from rich.table import Table
from rich.text import Text

from hpcrl.spool.record import Trajectory
from hpcrl.system.terminal import STATUS_STYLES, ago, in_line, make_console, number, print_json, versions
from hpcrl.traj.history import History, Place, Wanted

CLOCKS_APART_S = 120.0
"""How far the clocks of nodes and file server may be apart before the newest are not found first."""


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """A line of `ls`, and an object of `ls --json`."""

    id: str
    domain: str
    group: str
    status: str
    reward: float | None
    num_turns: int
    num_tokens: int
    start_version: int
    end_version: int
    created: float
    spool: str


def row(place: Place, trajectory: Trajectory) -> Row:
    return Row(
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
        spool=place.spool,
    )


def newest(history: History, wanted: Wanted, *, limit: int) -> list[tuple[Place, Trajectory]]:
    """The newest, newest first; only as many segments are read as that takes. Limit 0: all."""
    found: list[tuple[float, str, int, Place, Trajectory]] = []

    def may_have_newer(written: float) -> bool:
        return not limit or len(found) < limit or written + CLOCKS_APART_S > found[0][0]

    for place, trajectory in history.trajectories(wanted, newest_while=may_have_newer):
        created = trajectory.created if math.isfinite(trajectory.created) else 0.0
        entry = (created, trajectory.id, len(found), place, trajectory)
        if not limit or len(found) < limit:
            heapq.heappush(found, entry)
        else:
            heapq.heappushpop(found, entry)
    return [(place, trajectory) for _, _, _, place, trajectory in sorted(found, key=lambda one: one[:2], reverse=True)]


def list_newest(history: History, wanted: Wanted, *, limit: int, as_json: bool) -> int:
    """Print them."""
    rows = [row(place, trajectory) for place, trajectory in newest(history, wanted, limit=limit)]
    if as_json:
        print_json(rows)
        return 0
    console = make_console()
    if not rows:
        console.print("no trajectories yet" if wanted == Wanted() else "no trajectory is like that", style="dim")
        return 0
    console.print(_table(rows))
    total = history.num_trajectories()
    if wanted == Wanted() and len(rows) < total:
        console.print(f"the newest {len(rows)} of {total:,}; -n 0 lists all", style="dim")
    return 0


def _table(rows: Sequence[Row]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    table.add_column("id", overflow="fold", ratio=None)
    table.add_column("domain", no_wrap=True, overflow="ellipsis", max_width=16)
    table.add_column("status", no_wrap=True)
    for heading in ("reward", "turns", "tokens", "versions"):
        table.add_column(heading, no_wrap=True, justify="right")
    table.add_column("age", no_wrap=True, justify="right")
    for one in rows:
        table.add_row(
            Text(in_line(one.id)),
            Text(in_line(one.domain)),
            Text(one.status, style=STATUS_STYLES[one.status]),
            number(one.reward),
            f"{one.num_turns:,}",
            f"{one.num_tokens:,}",
            versions(one.start_version, one.end_version),
            ago(one.created),
        )
    return table
