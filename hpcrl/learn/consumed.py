"""The groups that were trained on, so that each is trained on exactly once.

    ConsumedTrajectories  the set that the trainer keeps and a checkpoint stores
    ConsumedGroups        the groups that the newest checkpoint lists
    read_consumed_groups  read those
    sort_group_numbers    groups as sorted numbers by domain

A step trains on whole groups, so a group is consumed or not, and a late episode of a consumed group counts as
consumed. Groups are numbered `domain/number` and consumed nearly in order, so runs of numbers are stored instead of
ids: a million trajectories without gaps take a few bytes, and only gaps add to it (measured: about 14 bytes of JSON
each). Ids of another form are stored as they are.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import xxhash

from hpcrl.campaign_dir.checkpoints import MANIFEST_FILE, decode_manifest
from hpcrl.spool.ids import parse_episode_id, parse_group_id


class _StoredConsumed(msgspec.Struct, frozen=True, kw_only=True):
    """The stored form."""

    runs: dict[str, list[tuple[int, int]]]
    """The runs of each domain: the first number and the one after the last."""
    others: list[str]


class ConsumedTrajectories:
    """A set of trajectory ids, exact to the group."""

    def __init__(self) -> None:
        self._runs: dict[str, _NumberRuns] = {}
        self._others: set[str] = set()

    def __contains__(self, trajectory_id: object) -> bool:
        if not isinstance(trajectory_id, str):
            return False
        task = _parse_task(trajectory_id)
        if task is None:
            return trajectory_id in self._others
        domain, number = task
        runs = self._runs.get(domain)
        return runs is not None and number in runs

    def add(self, trajectory_id: str) -> None:
        """Mark the group of a trajectory as consumed."""
        task = _parse_task(trajectory_id)
        if task is None:
            self._others.add(trajectory_id)
        else:
            domain, number = task
            self._runs.setdefault(domain, _NumberRuns()).add(number)

    def update(self, trajectory_ids: Iterable[str]) -> None:
        for trajectory_id in trajectory_ids:
            self.add(trajectory_id)

    def encode(self) -> bytes:
        """Encode as JSON; equal sets give equal bytes."""
        runs = {domain: self._runs[domain].pairs() for domain in sorted(self._runs)}
        return msgspec.json.encode(_StoredConsumed(runs=runs, others=sorted(self._others)))

    @classmethod
    def decode(cls, data: bytes) -> "ConsumedTrajectories":
        record = msgspec.json.decode(data, type=_StoredConsumed)
        consumed = cls()
        consumed._runs = {domain: _NumberRuns(pairs) for domain, pairs in record.runs.items()}
        consumed._others = set(record.others)
        return consumed


def _parse_task(trajectory_id: str) -> tuple[str, int] | None:
    """Return the domain and the number of the group that a trajectory belongs to; None for an id of another form."""
    episode = parse_episode_id(trajectory_id)
    return parse_group_id(episode[0]) if episode else None


class _NumberRuns:
    """A set of integers as disjoint runs, in order and never touching."""

    def __init__(self, pairs: Iterable[tuple[int, int]] = ()) -> None:
        ordered = sorted(pairs)
        self._starts = [start for start, _ in ordered]
        self._stops = [stop for _, stop in ordered]

    def __contains__(self, number: int) -> bool:
        index = bisect_right(self._starts, number) - 1
        return index >= 0 and number < self._stops[index]

    def add(self, number: int) -> None:
        if number in self:
            return
        after = bisect_right(self._starts, number)
        touches_before = after > 0 and self._stops[after - 1] == number
        touches_after = after < len(self._starts) and self._starts[after] == number + 1
        if touches_before and touches_after:
            self._stops[after - 1] = self._stops.pop(after)
            del self._starts[after]
        elif touches_before:
            self._stops[after - 1] = number + 1
        elif touches_after:
            self._starts[after] = number
        else:
            self._starts.insert(after, number)
            self._stops.insert(after, number + 1)

    def pairs(self) -> list[tuple[int, int]]:
        return list(zip(self._starts, self._stops, strict=True))


class _StoredGroups(msgspec.Struct, frozen=True, kw_only=True):
    """The same form, as `read_consumed_groups` decodes it."""

    runs: dict[str, list[tuple[int, int]]]
    others: list[str]


@dataclass(frozen=True)
class ConsumedGroups:
    """The consumed groups as runs of numbers per domain; files that could not be read are in `problems`."""

    checkpoint: str = ""
    number_ranges: Mapping[str, Sequence[tuple[int, int]]] = field(default_factory=dict)
    problems: Sequence[tuple[Path, str]] = ()

    @property
    def num_groups(self) -> int:
        return sum(stop - start for runs in self.number_ranges.values() for start, stop in runs)

    def __contains__(self, group: object) -> bool:
        known = parse_group_id(group) if isinstance(group, str) else None
        if known is None:
            return False
        domain, number = known
        return any(start <= number < stop for start, stop in self.number_ranges.get(domain, ()))

    def missing_groups(self, present: Mapping[str, Sequence[int]]) -> Iterator[tuple[str, int, int]]:
        """Yield, for each domain with missing groups: how many the sorted numbers `present` lack, and the first."""
        for domain, number_ranges in self.number_ranges.items():
            numbers = present.get(domain, ())
            gaps = [
                (num, first)
                for start, stop in number_ranges
                for num, first in [_count_missing(numbers, start, stop)]
                if num
            ]
            if gaps:
                yield domain, sum(num for num, _ in gaps), gaps[0][1]


def _count_missing(numbers: Sequence[int], start: int, stop: int) -> tuple[int, int]:
    """Count those of start, ..., stop - 1 that are not in `numbers`, and return the first of them too."""
    low, high = bisect_left(numbers, start), bisect_left(numbers, stop)
    first = start
    for index in range(low, high):
        if numbers[index] != first:
            break
        first += 1
    return stop - start - (high - low), first


def read_consumed_groups(checkpoints: Path) -> ConsumedGroups:
    """Read the groups from the newest checkpoint whose list is intact."""
    problems: list[tuple[Path, str]] = []
    for path in sorted(checkpoints.glob("*-step-*/consumed.json"), key=lambda path: path.parent.name, reverse=True):
        try:
            return ConsumedGroups(path.parent.name, _read_number_ranges(path), problems)
        except FileNotFoundError:  # an old checkpoint may have been removed meanwhile
            continue
        except (OSError, ValueError) as error:
            problems.append((path, str(error)))
    return ConsumedGroups(problems=problems)


def _read_number_ranges(path: Path) -> dict[str, list[tuple[int, int]]]:
    data = path.read_bytes()
    try:
        content = decode_manifest(path.with_name(MANIFEST_FILE).read_bytes()).files.get(path.name)
    except ValueError as error:
        raise ValueError(f"{MANIFEST_FILE}, which has its checksum, cannot be read: {error}") from error
    if content is None or xxhash.xxh3_128_hexdigest(data) != content.xxh3:
        raise ValueError(f"does not match the checksum in its {MANIFEST_FILE}")
    return msgspec.json.decode(data, type=_StoredGroups).runs


def sort_group_numbers(groups: Iterable[str]) -> dict[str, list[int]]:
    """Return the numbers of the groups `domain/number`, sorted, by domain."""
    numbers: dict[str, list[int]] = {}
    for group in groups:
        if parsed := parse_group_id(group):
            domain, number = parsed
            numbers.setdefault(domain, []).append(number)
    return {domain: sorted(set(found)) for domain, found in numbers.items()}
