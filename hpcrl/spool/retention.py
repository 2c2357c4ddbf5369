"""Retire segments that the trainer no longer needs: merge them into the archive, or remove them.

    SpoolDirs            the three directories of a campaign's trajectories
    SettledSegments      the segments that may be retired: pure bookkeeping
    choose_retirable     how many of them to retire now
    retire_segments      archives and removes them
    recover_retirement   completes a retirement that a crash interrupted
    prune_archive        removes segments that the archive need not keep
    RetireIntent         the retirement under way, as stored on disk

A segment may be retired when every trajectory in it was consumed or dropped according to the oldest kept checkpoint:
training may have to resume from that one. The order of the steps ensures that a crash between any two of them loses
nothing and trains on nothing twice:

    1  the intent is stored (archive/.retiring.json)
    2  the archive's copy is durable
    3  the trainer's count of settled trajectories is lowered: until step 4, env workers see too many waiting
    4  the segment in "rollouts" is removed, and only then
    5  the one in "scored": a segment in "rollouts" alone would be scored and delivered again
    6  the intent is removed

All steps can be repeated from the first.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import xxhash

from hpcrl.config.recipe import Compression
from hpcrl.errors import SpoolError
from hpcrl.spool.listing import (
    SegmentName,
    announce_changes,
    count_trajectories,
    find_next_number,
    list_segments,
    parse_segment_name,
    quarantine_segment,
)
from hpcrl.spool.record import PackedTrajectory
from hpcrl.spool.segment import Segment, is_out_of_reach, read_segment, write_packed
from hpcrl.system.files import make_private_dir, publish_file, sync_directory

INTENT_FILE = ".retiring.json"
MAX_MERGED_SEGMENTS = 64
"""This many segments are merged however small they are."""
REMOVAL_GRACE_S = 300.0
"""The time between a segment's last use and its removal: readers on other nodes may have it mapped."""


@dataclass(frozen=True, kw_only=True)
class SpoolDirs:
    """The directories that hold a campaign's trajectories."""

    rollouts: Path
    scored: Path
    archive: Path


class RetireIntent(msgspec.Struct, frozen=True, kw_only=True):
    """The segments that are being retired."""

    segments: list[str]
    archive: str | None
    """The name of their merged segment in the archive; None if they are not kept."""


@dataclass
class SettledSegments:
    """The segments whose trajectories are all settled, and the first checkpoint that records it."""

    grace_s: float = REMOVAL_GRACE_S
    clock: Callable[[], float] = time.monotonic
    _since: dict[str, float] = field(default_factory=dict)
    _covered_by: dict[str, int] = field(default_factory=dict)

    def note(self, segments: Iterable[str]) -> None:
        """Note segments whose trajectories are all settled."""
        for name in segments:
            self._since.setdefault(name, self.clock())

    def cover(self, checkpoint: int) -> None:
        """Note that a saved checkpoint records all segments noted so far as settled."""
        for name in self._since:
            self._covered_by.setdefault(name, checkpoint)

    def due(self, *, oldest_checkpoint: int) -> list[str]:
        """Return the segments that every checkpoint records and whose grace period is over, oldest first."""
        latest = self.clock() - self.grace_s
        return [
            name
            for name, since in self._since.items()
            if since <= latest and self._covered_by.get(name, oldest_checkpoint + 1) <= oldest_checkpoint
        ]

    def drop(self, segments: Iterable[str]) -> None:
        """Forget segments that are gone."""
        for name in segments:
            self._since.pop(name, None)
            self._covered_by.pop(name, None)


def choose_retirable(segments: Sequence[str], scored: Path, *, max_bytes: int) -> list[str]:
    """Choose enough segments to fill one segment of the archive; none while there are too few."""
    chosen: list[str] = []
    num_bytes = 0
    for name in segments:
        try:
            num_bytes += (scored / name).stat().st_size
        except FileNotFoundError:
            continue
        chosen.append(name)
        if num_bytes >= max_bytes or len(chosen) == MAX_MERGED_SEGMENTS:
            return chosen
    return []


def retire_segments(
    spool_dirs: SpoolDirs,
    segments: Sequence[str],
    *,
    keep: bool,
    lower_settled: Callable[[list[str]], None],
    compression: Compression = "none",
) -> RetireIntent:
    """Remove segments, after a merge into the archive if `keep`.

    `lower_settled` lowers the trainer's count of settled trajectories. A segment that turns out to be damaged goes to
    quarantine instead; its twin in "rollouts" is scored again.
    """
    recover_retirement(spool_dirs, lower_settled=lower_settled, compression=compression)  # if one failed before
    intact = {name: segment for name in segments if (segment := _read_intact(spool_dirs.scored / name)) is not None}
    make_private_dir(spool_dirs.archive)
    intent = RetireIntent(
        segments=list(intact), archive=_make_archive_name(spool_dirs.archive, intact) if keep and intact else None
    )
    publish_file(spool_dirs.archive / INTENT_FILE, msgspec.json.encode(intent))
    _execute_intent(intent, spool_dirs, lower_settled=lower_settled, compression=compression)
    return intent


def recover_retirement(
    spool_dirs: SpoolDirs, *, lower_settled: Callable[[list[str]], None], compression: Compression = "none"
) -> None:
    """Complete a retirement that a crash interrupted, if there is one."""
    try:
        intent = msgspec.json.decode((spool_dirs.archive / INTENT_FILE).read_bytes(), type=RetireIntent)
    except FileNotFoundError:
        return
    except msgspec.MsgspecError as error:
        raise SpoolError(
            f"cannot read {str(spool_dirs.archive / INTENT_FILE)!r}: {error}: remove it; "
            "at worst the archive holds some trajectories twice"
        ) from error
    _execute_intent(intent, spool_dirs, lower_settled=lower_settled, compression=compression)


def prune_archive(archive: Path, *, oldest_version: int) -> list[str]:
    """Remove segments of the archive in which every episode started with a version below `oldest_version`."""
    outdated = [
        name
        for name in list_segments(archive)
        if (newest := _parse_newest_version(name)) is not None and newest < oldest_version
    ]
    for name in outdated:
        (archive / name).unlink(missing_ok=True)
    return outdated


def _execute_intent(
    intent: RetireIntent, spool_dirs: SpoolDirs, *, lower_settled: Callable[[list[str]], None], compression: Compression
) -> None:
    """Run steps 2 to 6."""
    if intent.archive is not None and not (spool_dirs.archive / intent.archive).exists():
        segments = [_read_intact(spool_dirs.scored / name) for name in intent.segments]
        if None in segments:  # damaged since the intent was stored; nothing was removed yet
            (spool_dirs.archive / INTENT_FILE).unlink()
            return
        rows = [row for segment in segments if segment is not None for row in _pack_rows(segment)]
        write_packed(spool_dirs.archive / intent.archive, rows, compression=compression)
    lower_settled(intent.segments)
    for directory in (spool_dirs.rollouts, spool_dirs.scored):
        for name in intent.segments:
            (directory / name).unlink(missing_ok=True)
        sync_directory(directory)
        announce_changes(directory, removed=intent.segments)
    (spool_dirs.archive / INTENT_FILE).unlink(missing_ok=True)


def _read_intact(path: Path) -> Segment | None:
    """Read a segment; quarantine a damaged one and return None."""
    try:
        return read_segment(path)
    except SpoolError as error:
        if not is_out_of_reach(error):
            quarantine_segment(path, str(error))
        return None


def _pack_rows(segment: Segment) -> list[PackedTrajectory]:
    return [segment.pack_row(index) for index in range(len(segment))]


def _make_archive_name(archive: Path, segments: dict[str, Segment]) -> str:
    """Make `versions-OLDEST-NEWEST-NUMBER-COUNT-NONCE.h5`: a name that describes the contents."""
    versions = [facts.start_version for segment in segments.values() for facts in segment.facts]
    producer = f"versions-{min(versions):06d}-{max(versions):06d}"
    name = SegmentName(
        producer=producer,
        number=find_next_number(archive, producer),
        count=count_trajectories(segments),
        nonce=xxhash.xxh3_64_hexdigest("\n".join(segments).encode())[:8],
    )
    return str(name)


def _parse_newest_version(name: str) -> int | None:
    parts = segment.producer.split("-") if (segment := parse_segment_name(name)) else []
    return int(parts[2]) if len(parts) == 3 and parts[0] == "versions" and parts[2].isdigit() else None
