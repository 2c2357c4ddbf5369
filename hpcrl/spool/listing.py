"""The names of segments: parse, list, count and announce them, and quarantine damaged ones.

    SegmentName           producer, number and trajectory count of a segment
    parse_segment_name, check_producer, find_next_number    read and make names
    find_segment_worker   the worker in a name
    list_segments         every segment, by listing the directory
    SegmentListing        the same, for callers that ask many times a second
    find_shard            the part of a spool that a segment belongs to
    announce_changes      inform every SegmentListing of a change
    count_trajectories, count_by_worker   the number of trajectories, taken from the names
    describe_lost_spools  where to restore the spools, if a campaign has none any more
    sweep_leftovers       removes temporary files of killed writers
    quarantine_segment, make_quarantine_path    move a damaged segment away, and where to

Listing a directory takes time proportional to its entries, and more on a parallel file system, where it also loads a
metadata server that others share. So a process that adds or removes a segment appends a line to the directory's
`.news`, and a SegmentListing reads only the new lines: one stat finds out whether there are any. The news is a hint,
the directory is the truth: a change that was not announced (its writer was killed just then, or two machines appended
at once) is found when the directory is listed again.

This module imports neither h5py nor numpy: the monitor counts the trajectories of a spool from names alone.

Readers do not see a damaged segment in quarantine; the reason is stored beside it:

    SPOOL/quarantine/NAME          the segment as it was found
    SPOOL/quarantine/NAME.reason   one line

Nothing is deleted. A scored segment that is quarantined is scored again from its twin in "rollouts".
"""

import contextlib
import os
import re
import time
import zlib
from collections import Counter
from collections.abc import Iterable, Set
from dataclasses import dataclass
from pathlib import Path

from hpcrl.campaign_dir.paths import SPOOLS, CampaignDir, drop_job
from hpcrl.errors import SpoolError
from hpcrl.system.files import is_directory, make_private_dir, publish_file

NEWS_FILE = ".news"
_NAME_PATTERN = re.compile(r"(?P<producer>.+)-(?P<number>\d{8,})-(?P<count>\d+)-(?P<nonce>[0-9a-f]{8})\.h5", re.DOTALL)
_MIN_LEFTOVER_AGE_S = 3600.0
_MAX_LISTING_SHARE = 1 / 20_000
"""The share of its time that a SegmentListing spends on listing the directory."""
_RELIST_INTERVALS_S = (0.25, 30.0)
"""The shortest and the longest interval between two listings."""


@dataclass(frozen=True, kw_only=True)
class SegmentName:
    """The name `PRODUCER-NUMBER-COUNT-NONCE.h5`, which sorts by producer, then in the order of writing."""

    producer: str
    number: int
    count: int
    """The number of trajectories in it."""
    nonce: str
    """Eight random hex digits: two processes that use one producer name cannot overwrite each other's segments."""

    def __str__(self) -> str:
        return f"{self.producer}-{self.number:08d}-{self.count}-{self.nonce}.h5"


def parse_segment_name(name: str) -> SegmentName | None:
    """Parse a file name; None if it is not the name of a segment."""
    match = _NAME_PATTERN.fullmatch(name)
    if match is None:
        return None
    return SegmentName(
        producer=match["producer"], number=int(match["number"]), count=int(match["count"]), nonce=match["nonce"]
    )


def find_segment_worker(name: str) -> str:
    """Return the worker that wrote a segment, such as env-1, in whichever job; "" if its name is not that of one."""
    parsed = parse_segment_name(name)
    return "" if parsed is None else drop_job(parsed.producer)


def describe_lost_spools(campaign: CampaignDir) -> str | None:
    """Describe where to restore the spools; None if there is one: all are made before the first job is submitted."""
    if any(is_directory(campaign.spool(name)) for name in SPOOLS):
        return None
    return f"the spools are gone: restore {campaign.spools}"


def check_producer(producer: str) -> str:
    """Refuse a producer that cannot start a file name; return it otherwise."""
    if not producer or producer.startswith(".") or "/" in producer or "\0" in producer:
        raise SpoolError(f"producer {producer!r} cannot start a file name: no '/', no leading '.', not empty")
    if len(os.fsencode(producer)) > 160:
        raise SpoolError(f"producer {producer!r} is too long for a file name: at most 160 bytes")
    return producer


def list_segments(directory: Path) -> list[str]:
    """List the names of all segments, sorted, without temporary files; empty if the directory is missing."""
    try:
        return sorted(name for name in os.listdir(directory) if _is_segment_file(name))  # noqa: PTH208 - names
    except FileNotFoundError:
        return []


def announce_changes(directory: Path, *, added: Iterable[str] = (), removed: Iterable[str] = ()) -> None:
    """Announce a change to every SegmentListing of this directory; if this fails they find it a little later."""
    lines = [*(f"+{name}" for name in added), *(f"-{name}" for name in removed)]
    news = "".join(f"{line}\n" for line in lines if "\n" not in line)
    with contextlib.suppress(OSError):
        fd = os.open(directory / NEWS_FILE, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.write(fd, os.fsencode(news))
        finally:
            os.close(fd)


def find_shard(segment: str, *, num_shards: int) -> int:
    """Return the shard of a segment: the workers of a spool divide its segments by it."""
    return zlib.crc32(segment.encode()) % num_shards


class SegmentListing:
    """The segments of a directory, for callers that ask many times a second."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._news = os.fspath(directory / NEWS_FILE)
        self._offset = 0
        self._present: set[str] = set()
        self._added: set[str] = set()
        self._removed: set[str] = set()
        self._sorted: list[str] | None = None
        self._relist_at: float | None = None

    def names(self) -> list[str]:
        """Return the names, sorted, as `list_segments` does."""
        present = self.name_set()
        if self._sorted is None:
            self._sorted = sorted(present)
        return self._sorted

    def name_set(self) -> Set[str]:
        """Return the names in no order."""
        size = self._read_news_size()
        if self._relist_at is None or size < self._offset:
            self._offset = size  # first: a change while the directory is listed is news
            self._list_directory()
            return self._present
        if size > self._offset:
            self._read_news()  # first: a listing cannot show a segment that was removed and made again
        if time.monotonic() >= self._relist_at:
            self._list_directory()
        return self._present

    def changes(self) -> tuple[set[str], set[str]]:
        """Return the names added and removed since the last call; one that was removed and added again is in both."""
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
        """Read complete lines; one that is still being written waits."""
        with open(self._news, "rb") as file:  # noqa: PTH123 - a string: this is done many times a second
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
            self._sorted = None
            if name in self._added:  # it came and went between two calls of changes()
                self._added.remove(name)
            else:
                self._removed.add(name)

    def _read_news_size(self) -> int:
        try:
            return os.stat(self._news).st_size  # noqa: PTH116 - as above
        except FileNotFoundError:
            return 0


def count_trajectories(names: Iterable[str]) -> int:
    """Count the trajectories in segments of these names."""
    return sum(name.count for name in map(parse_segment_name, names) if name is not None)


def count_by_worker(names: Iterable[str]) -> Counter[str]:
    """Return the number of trajectories in these segments by the worker that wrote them, in whichever job."""
    counts: Counter[str] = Counter()
    for name in names:
        counts[find_segment_worker(name)] += count_trajectories([name])
    return counts


def find_next_number(directory: Path, producer: str) -> int:
    """Return one more than the highest number of a segment of `producer` here."""
    names = map(parse_segment_name, list_segments(directory))
    return max((name.number + 1 for name in names if name is not None and name.producer == producer), default=0)


def sweep_leftovers(directory: Path, *, older_than_s: float = _MIN_LEFTOVER_AGE_S) -> list[str]:
    """Remove temporary files of killed writers; returns their names.

    No write takes an hour. If a writer is still alive (or a clock has jumped), its rename fails and its batch is
    written again.
    """
    removed = []
    for path in directory.glob(".*.h5.*.tmp"):
        try:
            if time.time() - path.stat().st_mtime > older_than_s:
                path.unlink()
                removed.append(path.name)
        except FileNotFoundError:  # published, or swept by another process
            continue
    return removed


def _is_segment_file(name: str) -> bool:
    return name.endswith(".h5") and name[0] != "."


QUARANTINE_DIRECTORY = "quarantine"


def quarantine_segment(path: Path, reason: str) -> str:
    """Move a segment to the quarantine; return the reason and the outcome. One that cannot be moved stays."""
    place = make_quarantine_path(path)
    try:
        make_private_dir(place.parent)
        publish_file(place.with_name(f"{place.name}.reason"), reason + "\n")
        os.rename(path, place)  # noqa: PTH104 - a second copy replaces the first
    except FileNotFoundError:
        return f"{reason}: another process quarantined it"
    except OSError as error:
        return f"{reason}: it could not be quarantined ({error.strerror}) and is skipped"
    announce_changes(path.parent, removed=[path.name])
    return f"{reason}: it was moved to {str(place)!r}"


def make_quarantine_path(path: Path) -> Path:
    """Return the path of a segment in quarantine."""
    return path.parent / QUARANTINE_DIRECTORY / path.name
