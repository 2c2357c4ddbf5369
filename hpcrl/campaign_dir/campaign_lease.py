"""The lease of a campaign: the right of one driver to run it.

LeaseHolder    the record of a driver
CampaignLease  a lease that this process holds
take_lease     take the lease, unless its holder is alive

Each lease is a file with the next number, made by a link, which only one process can make: two jobs with one number,
as after an sbatch that timed out although the job was queued, cannot both run.
"""

import contextlib
import functools
import os
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from hpcrl.campaign_dir.paths import CampaignDir
from hpcrl.system.file_watch import NameWatch
from hpcrl.system.files import make_private_dir, publish_file


class LeaseHolder(msgspec.Struct, frozen=True, kw_only=True):
    """A driver that holds, or held, the lease."""

    job: int
    """The number of its job in the campaign."""
    scheduler_id: str | None = None
    """Slurm's id of its job; None on a machine without a scheduler."""
    node: str
    pid: int
    start_ticks: int
    """Start time of the process, by the clock of its node."""
    time: float = 0.0

    def describe(self) -> str:
        where = f"as process {self.pid} on {self.node}" if self.scheduler_id is None else f"as job {self.scheduler_id}"
        return f"job {self.job} of this campaign runs already, {where}"


@dataclass(frozen=True)
class CampaignLease:
    """A lease, by the number of its file."""

    directory: Path
    number: int

    @functools.cached_property
    def _names(self) -> NameWatch:
        return NameWatch(self.directory)

    def is_lost(self) -> bool:
        """Return whether another driver has taken the lease, which took this one for dead."""
        return _lease_path(self.directory, self.number + 1).name in self._names.names()


def take_lease(
    campaign: CampaignDir, holder: LeaseHolder, *, is_alive: Callable[[LeaseHolder], bool]
) -> CampaignLease | LeaseHolder:
    """Take the lease for `holder`; if another one is alive, return that one instead."""
    directory = make_private_dir(campaign.leases)
    while True:
        newest = max((int(path.name) for path in directory.iterdir() if path.name.isdecimal()), default=-1)
        if newest >= 0:
            last = msgspec.json.decode(_lease_path(directory, newest).read_bytes(), type=LeaseHolder)
            is_same_job = last.scheduler_id is not None and last.scheduler_id == holder.scheduler_id
            if not is_same_job and is_alive(last):  # the same job runs again where an administrator requeued it
                return last
        draft = directory / f"draft-{uuid.uuid4().hex}"
        publish_file(draft, msgspec.json.encode(msgspec.structs.replace(holder, time=time.time())))
        try:
            with contextlib.suppress(FileExistsError):  # another driver was faster: look again
                os.link(draft, _lease_path(directory, newest + 1))
                return CampaignLease(directory, newest + 1)
        finally:
            draft.unlink()


def _lease_path(directory: Path, number: int) -> Path:
    return directory / f"{number:06d}"
