"""What becomes of segments that the trainer is done with: merged into the archive, or removed.

    SpoolDirs        the three directories of a campaign's trajectories
    SettledSegments  which segments may go: pure bookkeeping
    retire_segments  archive and remove some of them; recover finishes what a crash cut short
    prune_archive    remove what the archive need not keep

A segment may go when every trajectory in it was consumed or dropped according to the oldest checkpoint that is kept:
an older one may have to be resumed from. It goes in this order, so that a crash between any two steps loses nothing
and feeds nothing to training twice:

    1  the intent is written down (archive/.retiring.json)
    2  the archive's copy is durable
    3  the trainer's count of settled trajectories is lowered: until step 4, env hosts see more waiting than there is
    4  the segment of "rollouts" is removed, and only then
    5  that of "scored": whatever is in "rollouts" alone would be scored and delivered again
    6  the intent is removed

All steps may be taken again from the first.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import xxhash

from hpcrl.errors import SpoolError
from hpcrl.spool.hdf5 import Compression
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
"""So many segments are worth a merge, however small they are."""
REMOVAL_GRACE_S = 300.0
"""Between a segment's last use and its removal: readers on other machines may have it mapped."""


@dataclass(frozen=True, kw_only=True)
class SpoolDirs:
    """The directories that hold a campaign's trajectories."""

    rollouts: Path
    scored: Path
    archive: Path


class RetireIntent(msgspec.Struct, frozen=True, kw_only=True):
    """What is being retired."""

    segments: list[str]
    archive: str | None
    """The archive's segment, if they are kept."""


@dataclass
class SettledSegments:
    """Segments with nothing left to use, and the first checkpoint that knows it."""

    grace_s: float = REMOVAL_GRACE_S
    clock: Callable[[], float] = time.monotonic
    _since: dict[str, float] = field(default_factory=dict)
    _covered_by: dict[str, int] = field(default_factory=dict)

    def note(self, segments: Iterable[str]) -> None:
        """These have nothing left to use."""
        for name in segments:
            self._since.setdefault(name, self.clock())

    def cover(self, checkpoint: int) -> None:
        """A checkpoint was saved that knows what became of all that was noted so far."""
        for name in self._since:
            self._covered_by.setdefault(name, checkpoint)

    def due(self, *, oldest_checkpoint: int) -> list[str]:
        """Those that every checkpoint knows and that were left alone for long enough; oldest first."""
        latest = self.clock() - self.grace_s
        return [
            name
            for name, since in self._since.items()
            if since <= latest and self._covered_by.get(name, oldest_checkpoint + 1) <= oldest_checkpoint
        ]

    def drop(self, segments: Iterable[str]) -> None:
        """These are gone."""
        for name in segments:
            self._since.pop(name, None)
            self._covered_by.pop(name, None)


def choose_retirable(segments: Sequence[str], scored: Path, *, max_bytes: int) -> list[str]:
    """As many as make one segment of the archive; none while they would make a small one."""
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
    """Take segments out of use, into the archive if they are to be kept; `lower_settled` lowers the count of settled ones.

    One that turns out to be damaged goes to quarantine instead; its twin in "rollouts" is scored again.
    """
    recover_retirement(spool_dirs, lower_settled=lower_settled, compression=compression)  # of one that failed before
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
    """Finish what a crash cut short; nothing if nothing was."""
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
    """Remove segments of the archive in which every episode began with an older version."""
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
    """Steps 2 to 6."""
    if intent.archive is not None and not (spool_dirs.archive / intent.archive).exists():
        segments = [_read_intact(spool_dirs.scored / name) for name in intent.segments]
        if None in segments:  # damaged since the intent was written; nothing was removed yet
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
    """A segment to be merged; a damaged one is put aside."""
    try:
        return read_segment(path)
    except SpoolError as error:
        if not is_out_of_reach(error):
            quarantine_segment(path, str(error))
        return None


def _pack_rows(segment: Segment) -> list[PackedTrajectory]:
    return [segment.pack_row(index) for index in range(len(segment))]


def _make_archive_name(archive: Path, segments: dict[str, Segment]) -> str:
    """`versions-OLDEST-NEWEST-NUMBER-COUNT-NONCE.h5`: what it holds can be seen without opening it."""
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
