"""Which groups the newest checkpoint says were trained on."""

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import xxhash


class _Stored(msgspec.Struct, frozen=True, kw_only=True):
    """As hpcrl.learn.consumed stores it."""

    runs: dict[str, list[tuple[int, int]]]
    others: list[str]


@dataclass(frozen=True)
class ConsumedGroups:
    """Per domain the runs of numbers of groups; what could not be read is told in `problems`."""

    checkpoint: str = ""
    runs: Mapping[str, Sequence[tuple[int, int]]] = field(default_factory=dict)
    problems: Sequence[tuple[Path, str]] = ()

    @property
    def num_groups(self) -> int:
        return sum(stop - start for runs in self.runs.values() for start, stop in runs)

    def missing(self, present: Mapping[str, Sequence[int]]) -> Iterator[tuple[str, int, int]]:
        """Per domain that lacks any: how many are not among the sorted numbers that are present, and one of them."""
        for domain, runs in self.runs.items():
            numbers = present.get(domain, ())
            gaps = [(num, first) for start, stop in runs for num, first in [_gap(numbers, start, stop)] if num]
            if gaps:
                yield domain, sum(num for num, _ in gaps), gaps[0][1]


def _gap(numbers: Sequence[int], start: int, stop: int) -> tuple[int, int]:
    """How many of start, ..., stop - 1 are not in `numbers`, and the first of them."""
    low, high = bisect_left(numbers, start), bisect_left(numbers, stop)
    first = start
    for index in range(low, high):
        if numbers[index] != first:
            break
        first += 1
    return stop - start - (high - low), first


def read_consumed(checkpoints: Path) -> ConsumedGroups:
    """From the newest checkpoint whose list of them is whole."""
    problems: list[tuple[Path, str]] = []
    for path in sorted(checkpoints.glob("*-step-*/consumed.json"), key=lambda path: path.parent.name, reverse=True):
        try:
            return ConsumedGroups(path.parent.name, _runs(path), problems)
        except FileNotFoundError:  # an old checkpoint may be removed meanwhile
            continue
        except (OSError, ValueError, KeyError, TypeError) as error:
            problems.append((path, str(error)))
    return ConsumedGroups(problems=problems)


def _runs(path: Path) -> dict[str, list[tuple[int, int]]]:
    data = path.read_bytes()
    manifest = msgspec.json.decode(path.with_name("checkpoint.json").read_bytes())
    if xxhash.xxh3_128_hexdigest(data) != manifest["files"][path.name]["xxh3"]:
        raise ValueError("does not match the checksum in its checkpoint.json")
    return msgspec.json.decode(data, type=_Stored).runs


def sorted_numbers(groups: Iterable[str]) -> dict[str, list[int]]:
    """Groups `domain/number` as sorted numbers by domain."""
    numbers: dict[str, list[int]] = {}
    for group in groups:
        domain, _, number = group.rpartition("/")
        if number.isascii() and number.isdigit():
            numbers.setdefault(domain, []).append(int(number[:18]))
    return {domain: sorted(set(found)) for domain, found in numbers.items()}
