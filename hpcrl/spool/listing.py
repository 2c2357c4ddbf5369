"""The names of segments, and how a change in a directory of them is noticed for the price of one stat.

    SegmentName       who wrote it, its place in the order, and how many trajectories it holds
    list_segments     every segment, by listing the directory
    SegmentListing    the same, asked many times a second
    announce_changes  tell every Listing what came or went

Listing a directory costs as much as it has entries, and more on a parallel file system, where it is also other
people's metadata server. So whoever adds or removes a segment appends a line to the directory's `.news`, and a
Listing reads what is new there. The news is a hint and the directory is the truth: what was not announced (its writer
was killed just then, two machines appended at once) is found when the directory is listed again.

Light on purpose: the monitor counts the trajectories of a spool from names alone, without h5py or numpy.

Damaged segments, put aside: out of every reader's sight, and with the reason beside them.

SPOOL/quarantine/NAME          the segment as it was found
SPOOL/quarantine/NAME.reason   why, in words

Nothing is deleted. A scored segment that is put aside is scored again from its twin in "rollouts".
"""

import contextlib
import os
import re
import time
from collections.abc import Iterable, Set
from dataclasses import dataclass
from pathlib import Path

from hpcrl.errors import SpoolError
from hpcrl.system.files import make_private_dir, publish_file

NEWS_FILE = ".news"
_NAME_PATTERN = re.compile(r"(?P<producer>.+)-(?P<number>\d{8,})-(?P<count>\d+)-(?P<nonce>[0-9a-f]{8})\.h5", re.DOTALL)
_MIN_LEFTOVER_AGE_S = 3600.0
_MAX_LISTING_SHARE = 1 / 20_000
"""Of its time that a Listing spends on listing the directory."""
_RELIST_INTERVALS_S = (0.25, 30.0)
"""It does so at most, and at least, so often."""


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


def parse_segment_name(name: str) -> SegmentName | None:
    """What a file name says, or None if it is not a segment's."""
    match = _NAME_PATTERN.fullmatch(name)
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


def list_segments(directory: Path) -> list[str]:
    """Every file that shows itself as a segment, sorted; temporary files do not. No directory yet: none."""
    try:
        return sorted(name for name in os.listdir(directory) if _is_segment_file(name))
    except FileNotFoundError:
        return []


def announce_changes(directory: Path, *, added: Iterable[str] = (), removed: Iterable[str] = ()) -> None:
    """Tell every Listing of this directory; if that fails they find out by themselves, a little later."""
    lines = [*(f"+{name}" for name in added), *(f"-{name}" for name in removed)]
    news = "".join(f"{line}\n" for line in lines if "\n" not in line)
    with contextlib.suppress(OSError):
        fd = os.open(directory / NEWS_FILE, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.write(fd, os.fsencode(news))
        finally:
            os.close(fd)


class SegmentListing:
    """The segments of a directory, asked many times a second."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._news = os.fspath(directory / NEWS_FILE)
        self._offset = 0
        self._present: set[str] = set()
        self._added: set[str] = set()
        self._removed: set[str] = set()
        self._sorted: list[str] | None = None
        self._relist_at = float("-inf")

    def names(self) -> list[str]:
        """As `list_segments`."""
        present = self.name_set()
        if self._sorted is None:
            self._sorted = sorted(present)
        return self._sorted

    def name_set(self) -> Set[str]:
        """The same in no order."""
        size = self._read_news_size()
        if size < self._offset or time.monotonic() >= self._relist_at:
            self._offset = size  # first: what comes while the directory is listed is news
            self._list_directory()
        elif size > self._offset:
            self._read_news()
        return self._present

    def changes(self) -> tuple[set[str], set[str]]:
        """What came and what went since the last call; what went and came back is in both."""
        self.name_set()
        added, removed, self._added, self._removed = self._added, self._removed, set(), set()
        return added, removed

    def _list_directory(self) -> None:
        started = time.monotonic()
        found = set(list_segments(self.directory))
        for name in self._present - found:
            self._remove(name)
        for name in found - self._present:
            self._add(name)
        ended = time.monotonic()
        least, most = _RELIST_INTERVALS_S
        self._relist_at = ended + min(max((ended - started) / _MAX_LISTING_SHARE, least), most)

    def _read_news(self) -> None:
        """Take in whole lines; one that is being written waits."""
        with open(self._news, "rb") as file:
            file.seek(self._offset)
            lines, _, _ = file.read().rpartition(b"\n")
        self._offset += len(lines) + 1 if lines else 0
        for line in map(os.fsdecode, lines.split(b"\n")):
            if line.startswith("+") and parse_segment_name(line[1:]):
                self._add(line[1:])
            elif line.startswith("-"):
                self._remove(line[1:])

    def _add(self, name: str) -> None:
        if name not in self._present:
            self._present.add(name)
            self._added.add(name)
            self._sorted = None

    def _remove(self, name: str) -> None:
        if name in self._present:
            self._present.remove(name)
            self._added.discard(name)
            self._removed.add(name)
            self._sorted = None

    def _read_news_size(self) -> int:
        try:
            return os.stat(self._news).st_size
        except FileNotFoundError:
            return 0


def count_spool_trajectories(directory: Path) -> int:
    """How many trajectories a spool holds, by the names of its segments."""
    return count_trajectories(list_segments(directory))


def count_trajectories(names: Iterable[str]) -> int:
    """How many trajectories segments of these names hold."""
    return sum(name.count for name in map(parse_segment_name, names) if name is not None)


def find_next_number(directory: Path, producer: str) -> int:
    """One more than the highest number that `producer` ever used here."""
    names = map(parse_segment_name, list_segments(directory))
    return max((name.number + 1 for name in names if name is not None and name.producer == producer), default=0)


def sweep_leftovers(directory: Path, *, older_than_s: float = _MIN_LEFTOVER_AGE_S) -> list[str]:
    """Remove temporary files of killed writers; returns their names.

    No write takes an hour. Should one be alive all the same (or a clock have jumped), its rename fails and its batch
    is written again.
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


def _is_segment_file(name: str) -> bool:
    return name.endswith(".h5") and name[0] != "."


QUARANTINE_DIRECTORY = "quarantine"


def quarantine_segment(path: Path, reason: str) -> str:
    """Move a segment aside; returns the reason with what became of it. What cannot be moved stays where it is."""
    place = make_quarantine_path(path)
    try:
        make_private_dir(place.parent)
        publish_file(place.with_name(f"{place.name}.reason"), reason + "\n")
        os.rename(path, place)
    except FileNotFoundError:
        return f"{reason}: somebody else put it aside"
    except OSError as error:
        return f"{reason}: it could not be put aside ({error.strerror}) and is passed over"
    announce_changes(path.parent, removed=[path.name])
    return f"{reason}: it was moved to {str(place)!r}"


def make_quarantine_path(path: Path) -> Path:
    """Where a segment lies once it is put aside."""
    return path.parent / QUARANTINE_DIRECTORY / path.name
