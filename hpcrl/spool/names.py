"""The names of segments: who wrote one, its place in the order, and how many trajectories it holds.

Light on purpose: the monitor counts the trajectories of a spool from names alone, without h5py or numpy.
"""

import os
import re
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from hpcrl.errors import SpoolError

_NAME = re.compile(r"(?P<producer>.+)-(?P<number>\d{8,})-(?P<count>\d+)-(?P<nonce>[0-9a-f]{8})\.h5", re.DOTALL)
_LEFTOVER_AGE_S = 3600.0
_SETTLED_NS = 100_000_000
"""Two changes within one tick of the file system's clock leave the same time behind."""
_LIST_AGAIN_S = 5.0


@dataclass(frozen=True, kw_only=True)
class SegmentName:
    """`PRODUCER-NUMBER-COUNT-NONCE.h5`: sorts by producer, then in the order of writing."""

    producer: str
    number: int
    count: int
    """How many trajectories it holds."""
    nonce: str
    """Eight random hex digits: two processes that believe to be one producer cannot overwrite each other."""

    def __str__(self) -> str:
        return f"{self.producer}-{self.number:08d}-{self.count}-{self.nonce}.h5"


def parse(name: str) -> SegmentName | None:
    """What a file name says, or None if it is not a segment's."""
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    return SegmentName(
        producer=match["producer"], number=int(match["number"]), count=int(match["count"]), nonce=match["nonce"]
    )


def check_producer(producer: str) -> str:
    """Refuse a producer that cannot begin a file name."""
    if not producer or producer.startswith(".") or "/" in producer or "\0" in producer:
        raise SpoolError(f"producer {producer!r} cannot begin a file name: no '/', no leading '.', not empty")
    if len(os.fsencode(producer)) > 160:
        raise SpoolError(f"producer {producer!r} is too long for a file name: at most 160 bytes")
    return producer


def listed(directory: Path) -> list[str]:
    """Every file that shows itself as a segment, sorted; temporary files do not. No directory yet: none."""
    try:
        with os.scandir(directory) as entries:
            return sorted(entry.name for entry in entries if entry.name.endswith(".h5") and entry.name[0] != ".")
    except FileNotFoundError:
        return []


class Listing:
    """The segments of a directory, asked many times a second: it is listed again only when it may have changed."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._names: list[str] = []
        self._changed_ns = -1
        self._listed_at = float("-inf")

    def names(self) -> list[str]:
        """As `listed`. A file server's clock and its cache of times are not trusted for long."""
        try:
            changed_ns = self.directory.stat().st_mtime_ns
        except FileNotFoundError:
            changed_ns = -1
        settled = changed_ns == self._changed_ns and time.time_ns() - changed_ns > _SETTLED_NS
        if not settled or time.monotonic() - self._listed_at > _LIST_AGAIN_S:
            self._changed_ns, self._listed_at = changed_ns, time.monotonic()
            self._names = listed(self.directory)
        return self._names


def num_trajectories(directory: Path) -> int:
    """How many trajectories a spool holds, by the names of its segments."""
    return counted(listed(directory))


def counted(names: Iterable[str]) -> int:
    """How many trajectories segments of these names hold."""
    return sum(name.count for name in map(parse, names) if name is not None)


def next_number(directory: Path, producer: str) -> int:
    """One more than the highest number that `producer` ever used here."""
    names = map(parse, listed(directory))
    return max((name.number + 1 for name in names if name is not None and name.producer == producer), default=0)


def sweep_leftovers(directory: Path, *, older_than_s: float = _LEFTOVER_AGE_S) -> list[str]:
    """Remove temporary files of killed writers; returns their names.

    No write takes an hour. Should one be alive all the same, its rename fails and its batch is written again.
    """
    removed = []
    for path in directory.glob(".*.h5.*.tmp"):
        try:
            if time.time() - path.stat().st_mtime > older_than_s:
                path.unlink()
                removed.append(path.name)
        except FileNotFoundError:  # published or swept by another in the meantime
            continue
    return removed
