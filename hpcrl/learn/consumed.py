"""Which groups have been trained on: the other half of "exactly once".

A step trains on whole groups, so a group is consumed or it is not, and a late episode of a consumed group counts
as consumed. Groups are numbered `domain/number` and consumed nearly in order, so runs of numbers are kept instead
of ids: a million trajectories without gaps take a few bytes, and the cost grows with the gaps alone (measured at
about 14 bytes of JSON each). Ids of another form are kept as they are.
"""

import re
from bisect import bisect_right
from collections.abc import Iterable

import msgspec

_NUMBERED = re.compile(r"(?P<domain>.+)/(?P<number>0|[1-9][0-9]*)/[0-9]+")


class _Record(msgspec.Struct, frozen=True, kw_only=True):
    """The stored form."""

    runs: dict[str, list[tuple[int, int]]]
    """Per domain, the first number of each run and the one after its last."""
    others: list[str]


class Consumed:
    """A set of trajectory ids, exact to the group."""

    def __init__(self) -> None:
        self._runs: dict[str, _Runs] = {}
        self._others: set[str] = set()

    def __contains__(self, trajectory_id: object) -> bool:
        if not isinstance(trajectory_id, str):
            return False
        match = _NUMBERED.fullmatch(trajectory_id)
        if match is None:
            return trajectory_id in self._others
        runs = self._runs.get(match["domain"])
        return runs is not None and int(match["number"]) in runs

    def add(self, trajectory_id: str) -> None:
        """Its group counts as consumed from now on."""
        match = _NUMBERED.fullmatch(trajectory_id)
        if match is None:
            self._others.add(trajectory_id)
        else:
            self._runs.setdefault(match["domain"], _Runs()).add(int(match["number"]))

    def update(self, trajectory_ids: Iterable[str]) -> None:
        for trajectory_id in trajectory_ids:
            self.add(trajectory_id)

    def encode(self) -> bytes:
        """As JSON; equal sets give equal bytes."""
        runs = {domain: self._runs[domain].pairs() for domain in sorted(self._runs)}
        return msgspec.json.encode(_Record(runs=runs, others=sorted(self._others)))

    @classmethod
    def decode(cls, data: bytes) -> "Consumed":
        record = msgspec.json.decode(data, type=_Record)
        consumed = cls()
        consumed._runs = {domain: _Runs(pairs) for domain, pairs in record.runs.items()}
        consumed._others = set(record.others)
        return consumed


class _Runs:
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
