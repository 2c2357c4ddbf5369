"""The driver's part in the lease of its campaign: who it is, and whether the last holder is alive.

take_campaign_lease   take the lease of this job's campaign, or return the driver that holds it
"""

import os

from hpcrl.campaign_dir.campaign_lease import CampaignLease, LeaseHolder, take_lease
from hpcrl.campaign_dir.paths import CampaignDir
from hpcrl.campaign_dir.workers import WorkerPlace
from hpcrl.monitor.job_state import ALIVE_WITHIN_S, await_new_beat
from hpcrl.slurm.status import ACTIVE, UNKNOWN, query_job_states
from hpcrl.system.network import current_node
from hpcrl.system.processes import is_alive, read_start_ticks


def take_campaign_lease(place: WorkerPlace, *, has_scheduler: bool) -> CampaignLease | LeaseHolder:
    """Take the lease; if the driver that holds it is alive, return that one: this process must not run the campaign."""
    holder = LeaseHolder(
        job=place.job.number,
        scheduler_id=os.environ.get("SLURM_JOB_ID") if has_scheduler else None,
        node=place.node,
        pid=os.getpid(),
        start_ticks=read_start_ticks(os.getpid()) or 0,
    )
    return take_lease(place.campaign, holder, is_alive=lambda last: _is_holder_alive(place.campaign, last))


def _is_holder_alive(campaign: CampaignDir, last: LeaseHolder) -> bool:
    """Ask Slurm, or this node, about the last holder; without an answer, wait for a heartbeat of its job."""
    if last.scheduler_id is None:
        if last.node == current_node():
            return is_alive(last.pid, last.start_ticks)
    else:
        state = query_job_states([last.scheduler_id], env=os.environ)[last.scheduler_id].state
        if state != UNKNOWN:
            return state in ACTIVE
    return await_new_beat(campaign.job(last.job), timeout_s=ALIVE_WITHIN_S)
