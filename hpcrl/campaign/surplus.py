"""Files of a campaign that it does not need any more: found, then removed when the user has seen them.

    find_surplus      the files of a campaign that may go
    remove_surplus    remove them
    SurplusPart       files of one kind
    MIN_AGE_S         what is more recent may be in use

Nothing that a resume needs is ever among it: no checkpoint, no segment outside the archive, not the newest version of
the weights, no record, log or event. While a job may run, only what earlier jobs have left for their own processes
goes.
"""

import contextlib
import os
import re
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from hpcrl.campaign import directory
from hpcrl.campaign.running_jobs import find_job_states, find_orphaned_job
from hpcrl.campaign_dir.paths import CampaignDir, JobDir
from hpcrl.plan.records import read_site
from hpcrl.spool.listing import list_segments
from hpcrl.system.files import remove_path
from hpcrl.weights.versions import list_versions, version_dir

MIN_AGE_S = 3600.0
_UNFINISHED = re.compile(r"\..+\.(?:[0-9a-f]{12}|pruned)\.tmp")
"""The names under which files and directories are written before they are renamed."""
_MEETING_PATTERNS = ("parsl", "meetings", "engine-groups", "couriers-*.json", "ranks-*.json")
"""The files that processes of one job leave for each other."""


@dataclass(frozen=True, kw_only=True)
class SurplusPart:
    """Files of one kind that a campaign does not need."""

    campaign: CampaignDir
    kind: str
    paths: tuple[Path, ...]
    num_bytes: int


def find_surplus(campaign: CampaignDir, *, with_archive: bool = False) -> list[SurplusPart]:
    """Return what may be removed; with the archive, also the trajectories that training is done with."""
    directory.refuse_newer_format(campaign)
    jobs = directory.list_jobs(campaign)
    site = read_site(campaign, skips_unknown=True)
    states = find_job_states([job for job in jobs if job.submission.exists()], site)
    over = [job for job in jobs if job.outcome.exists() or states.get(job) == "gone"]
    # A job without a record may be submitted just now.
    is_quiet = len(over) == len(jobs) and find_orphaned_job(campaign) is None
    found = {"files of ended jobs for their own processes": _list_meetings(over)}
    if is_quiet:
        found["unfinished files of writers that were killed"] = _list_unfinished(campaign)
        found["old versions of the weights"] = _list_old_versions(campaign)
    if with_archive:
        archive = campaign.spool("archive")
        found["trajectories in the archive"] = [archive / name for name in list_segments(archive)]
    return [
        SurplusPart(campaign=campaign, kind=kind, paths=tuple(paths), num_bytes=sum(map(_measure, paths)))
        for kind, paths in found.items()
        if paths
    ]


def remove_surplus(parts: Sequence[SurplusPart]) -> list[str]:
    """Remove what was found; return what could not be removed, and why."""
    failed = []
    for path in (path for part in parts for path in part.paths):
        try:
            remove_path(path)
        except OSError as error:
            failed.append(f"{path}: {error.strerror}")
    return failed


def _list_meetings(jobs: Iterable[JobDir]) -> list[Path]:
    return sorted(path for job in jobs for pattern in _MEETING_PATTERNS for path in job.root.glob(pattern))


def _list_unfinished(campaign: CampaignDir) -> list[Path]:
    """List what was never renamed and is so old that no command of a user still writes it."""
    latest = time.time() - MIN_AGE_S
    found = []
    for folder, directories, names in os.walk(campaign.root):
        unfinished = [name for name in (*directories, *names) if _UNFINISHED.fullmatch(name)]
        directories[:] = [name for name in directories if name not in unfinished]
        found += [Path(folder) / name for name in unfinished]
    return sorted(path for path in found if _read_change_time(path) < latest)


def _list_old_versions(campaign: CampaignDir) -> list[Path]:
    return [version_dir(campaign.weights, version) for version in list_versions(campaign.weights)[:-1]]


def _measure(path: Path) -> int:
    """Return the bytes of a file, or of all files of a directory; what is gone counts nothing."""
    return sum(_read_size(one) for one in _walk_files(path))


def _walk_files(path: Path) -> Iterator[Path]:
    if path.is_dir() and not path.is_symlink():
        for folder, _, names in os.walk(path):
            yield from (Path(folder) / name for name in names)
    else:
        yield path


def _read_size(path: Path) -> int:
    with contextlib.suppress(OSError):
        return path.lstat().st_size
    return 0


def _read_change_time(path: Path) -> float:
    with contextlib.suppress(OSError):
        return path.lstat().st_mtime
    return float("inf")
