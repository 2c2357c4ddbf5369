"""Read the trajectories of a campaign, each once, while segments are added and removed.

    TrajectorySelection   the filters of a command
    selection_from_arguments    makes them from a command line
    TrajectoryHistory     every trajectory of a campaign, segment by segment
    SegmentLocation       the spool and the path of a segment
    SeenIds               a compact set of trajectory ids

A trajectory is stored in up to three spools: "rollouts", its scored twin in "scored", then "archive". It moves only in
this order, so listing the spools in this order misses none. They are read in the opposite order, so that of two
records of one episode the one with a reward comes first.
"""

import difflib
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from hpcrl.campaign_dir.paths import SPOOLS, CampaignDir
from hpcrl.errors import SpoolError
from hpcrl.spool.ids import get_group, parse_episode_id, parse_group_id
from hpcrl.spool.listing import count_trajectories, list_segments
from hpcrl.spool.record import TRAINABLE, Trajectory, TrajectoryFacts
from hpcrl.spool.segment import Segment, read_segment
from hpcrl.traj.conversation import restore_rows


class TrajectorySelection(msgspec.Struct, frozen=True, kw_only=True):
    """The filters of a command; an empty one admits everything."""

    domains: frozenset[str] = frozenset()
    group: str | None = None
    statuses: frozenset[str] = frozenset()
    min_version: int | None = None
    """The oldest version that the episode may have started with; staleness counts from there."""
    max_version: int | None = None

    def admits(self, facts: TrajectoryFacts) -> bool:
        return (
            (not self.domains or facts.domain in self.domains)
            and (self.group is None or facts.group == self.group)
            and (not self.statuses or facts.status in self.statuses)
            and (self.min_version is None or facts.start_version >= self.min_version)
            and (self.max_version is None or facts.start_version <= self.max_version)
        )


def selection_from_arguments(arguments: Any, *, known_domains: Collection[str]) -> TrajectorySelection:
    """Return the filters of a command line; refuse a domain that the recipe does not have, and what names no group."""
    for domain in arguments.domain or ():
        if known_domains and domain not in known_domains:
            near = difflib.get_close_matches(domain, known_domains, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"it has {', '.join(sorted(known_domains))}"
            raise SpoolError(f"--domain {domain!r} is not a domain of the campaign's recipe: {hint}")
    if arguments.group is not None and parse_group_id(arguments.group) is None:
        example = f"{next(iter(known_domains), 'lake')}/17"
        raise SpoolError(f"--group {arguments.group!r} is not DOMAIN/NUMBER, such as {example}")
    low, high = arguments.min_version, arguments.max_version
    if low is not None and high is not None and low > high:
        raise SpoolError(f"--min-version {low} is above --max-version {high}: no version is in between")
    return TrajectorySelection(
        domains=frozenset(arguments.domain or ()),
        group=arguments.group,
        statuses=frozenset(arguments.status or ()),
        min_version=low,
        max_version=high,
    )


_MAX_EPISODE_BITS = 4096


@dataclass(frozen=True)
class SegmentLocation:
    """The spool and the path of a segment."""

    spool: str
    path: Path


class SeenIds:
    """A compact set of trajectory ids: a number per group with a bit per episode."""

    def __init__(self) -> None:
        self._episodes: dict[str, int] = {}
        self._others: set[str] = set()

    def add(self, trajectory_id: str) -> bool:
        """Add an id; return whether it is new."""
        parsed = parse_episode_id(trajectory_id)
        if parsed is None or parsed[1] >= _MAX_EPISODE_BITS:
            new = trajectory_id not in self._others
            self._others.add(trajectory_id)
            return new
        group, index = parsed
        bit, seen = 1 << index, self._episodes.get(group, 0)
        self._episodes[group] = seen | bit
        return not seen & bit

    def groups(self) -> Iterable[str]:
        """Yield the groups of the ids."""
        yield from self._episodes
        yield from (get_group(other) for other in self._others)


@dataclass
class TrajectoryHistory:
    """The segments of a campaign. What could not be read is collected in `problems`."""

    campaign: CampaignDir
    spools: Sequence[str] = SPOOLS
    problems: dict[Path, str] = field(default_factory=dict)

    def segment_locations(self) -> list[SegmentLocation]:
        """Return the segments that exist now, without those of "rollouts" that have a scored twin."""
        names = {spool: self._list_spool(spool) for spool in self.spools}
        scored = set(names.get("scored", ()))
        return [
            SegmentLocation(spool, self.campaign.spool(spool) / name)
            for spool in reversed(self.spools)
            for name in names[spool]
            if not (spool == "rollouts" and name in scored)
        ]

    def num_trajectories(self) -> int:
        """Return the number of trajectories, counted by the names of the segments."""
        return count_trajectories(location.path.name for location in self.segment_locations())

    def trajectories(
        self,
        selection: TrajectorySelection,
        *,
        verify: bool = False,
        newest_while: Callable[[float], bool] | None = None,
    ) -> Iterator[tuple[SegmentLocation, Trajectory]]:
        """Yield the selected trajectories, with one segment in memory at a time.

        With `newest_while` the newest segments come first, until it returns False for the write time of one.
        """
        seen = {True: SeenIds(), False: SeenIds()}
        for location, segment in self._iter_segments(verify=verify, newest_while=newest_while):
            for trajectory in self._iter_trajectories(location, segment):
                # A failed episode that was run again has one id and two records.
                if seen[trajectory.status in TRAINABLE].add(trajectory.id) and selection.admits(trajectory):
                    yield location, trajectory

    def _iter_segments(
        self, *, verify: bool, newest_while: Callable[[float], bool] | None
    ) -> Iterator[tuple[SegmentLocation, Segment]]:
        known: set[SegmentLocation] = set()
        some_vanished = True
        while some_vanished:  # what was retired meanwhile is in a later spool
            some_vanished = False
            locations = [location for location in self.segment_locations() if location not in known]
            known.update(locations)
            for location in self._newest_first(locations, newest_while) if newest_while else locations:
                segment = self._read_segment(location, verify=verify)
                if segment is not None:
                    yield location, segment
                else:
                    some_vanished = some_vanished or location.path not in self.problems

    def _newest_first(
        self, locations: Sequence[SegmentLocation], newest_while: Callable[[float], bool]
    ) -> Iterator[SegmentLocation]:
        written_at = {location: _written_time(location.path) for location in locations}
        for location in sorted(locations, key=lambda location: -written_at[location]):
            if not newest_while(written_at[location]):
                return
            yield location

    def _read_segment(self, location: SegmentLocation, *, verify: bool) -> Segment | None:
        """Read a segment; None if it is gone, or damaged and noted in `problems`."""
        try:
            return read_segment(location.path, verify=verify)
        except SpoolError as error:
            if not isinstance(error.__cause__, FileNotFoundError):
                self.problems[location.path] = str(error)
            return None

    def _iter_trajectories(self, location: SegmentLocation, segment: Segment) -> Iterator[Trajectory]:
        for index in range(len(segment)):
            try:
                yield restore_rows(segment[index])
            except SpoolError as error:  # facts are parsed one by one; the others may be intact
                self.problems[location.path] = str(error)

    def _list_spool(self, spool: str) -> list[str]:
        directory = self.campaign.spool(spool)
        try:
            return list_segments(directory)
        except OSError as error:
            self.problems[directory] = f"cannot list spool {str(directory)!r}: {error.strerror}"
            return []


def _written_time(path: Path) -> float:
    """Return when a segment was written, after its trajectories ended; infinity if unknown, so it is read first."""
    try:
        return path.stat().st_mtime
    except OSError:
        return float("inf")
