"""Both sides of the meeting of a campaign's jobs in the layout "multi-job".

`python -m hpcrl.job.component_holder CAMPAIGN JOB COMPONENT` is the program of a component's job: it leaves a lease
with its nodes, on which the driver starts steps, and holds them until the driver's job has ended. SIGTERM becomes a
notice for the driver, as in a step. A job that starts long before the driver's waits in the queue again: its nodes
would idle.

    await_components    the driver's side: wait until every component has its nodes
    ComponentHolder     the other side
    MAX_WAIT_SHARE, LOOK_INTERVAL_S, POLL_INTERVAL_S   limits
"""

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

from hpcrl.campaign_dir.job_end import JobEnd
from hpcrl.campaign_dir.paths import CampaignDir, JobDir
from hpcrl.errors import HpcrlError
from hpcrl.job.batch_log import note_in_log
from hpcrl.job.driver_pulse import FORWARDED_SIGNALS
from hpcrl.job.supervision import EndRequests, LookInterval
from hpcrl.plan.plan import Plan
from hpcrl.plan.records import read_plan, read_record
from hpcrl.slurm import commands
from hpcrl.slurm.component_jobs import ComponentLease, read_component_ids, read_leases
from hpcrl.slurm.next_job import SUBMISSION_TIMEOUT_S
from hpcrl.slurm.script import list_separate_components
from hpcrl.slurm.status import ENDED, WAITING, JobStatus, query_job_states
from hpcrl.slurm.submit import SubmittedJob
from hpcrl.system.file_watch import NameWatch, is_there, retry_passing
from hpcrl.system.files import publish_file, remove_path
from hpcrl.system.network import current_node

MAX_WAIT_SHARE = 0.25
"""The share of the walltime for which the jobs that have started wait for the others."""
LOOK_INTERVAL_S = 30.0
"""The time between two questions to Slurm about jobs that are waited for."""
POLL_INTERVAL_S = 1.0


def await_components(
    job: JobDir, plan: Plan, *, requests: EndRequests, note_turn: Callable[[], object]
) -> JobEnd | None:
    """Wait until the jobs of all components have started; return how this job ends if one of them does not."""
    components = {part.index: part for part in list_separate_components(plan)}
    looks, limit_s = LookInterval(LOOK_INTERVAL_S), MAX_WAIT_SHARE * plan.cost.walltime_min * 60
    deadline = time.monotonic() + limit_s
    while missing := [components[index] for index in _list_missing(job, plan)]:
        note_turn()
        names = ", ".join(f"{'+'.join(part.roles)} (partition {part.partition})" for part in missing)
        if requests.is_cancelled or is_there(job.campaign.stop):
            return JobEnd(outcome="stopped", reason="a user asked for it (hpcrl stop)", cause="user-request")
        if requests.has_termination():
            reason = f"it received SIGTERM while it waited for the jobs of {names}"
            return JobEnd(outcome="cut", reason=reason, cause="cancellation")
        if looks.is_due():
            states = _query_components(job)
            ended = [part for part in missing if _has_ended(states[part.index])]
            if ended:
                names = ", ".join(f"{'+'.join(part.roles)} ({states[part.index].state})" for part in ended)
                reason = f"the jobs of {names} ended before this one had all its nodes"
                return JobEnd(outcome="failed", reason=reason, cause="not-started")
            why = "; ".join(filter(None, dict.fromkeys(states[part.index].reason for part in missing)))
            note_in_log(f"hpcrl: waiting for the jobs of {names}" + (f": {why}" if why else ""))
        if time.monotonic() > deadline:
            reason = (
                f"the jobs of {names} did not start within {limit_s / 60:.0f} min, a quarter of the walltime: ask for "
                "fewer nodes there, or raise job.walltime_min"
            )
            return JobEnd(outcome="failed", reason=reason, cause="not-started")
        time.sleep(POLL_INTERVAL_S)
    return None


def _list_missing(job: JobDir, plan: Plan) -> list[int]:
    """Return the components whose jobs have not started, or wait again: Slurm may have queued one after a failure."""
    leases = read_leases(job, plan)
    if missing := [part.index for part in list_separate_components(plan) if part.index not in leases]:
        return missing
    return [index for index, status in _query_components(job).items() if status.state in WAITING or _has_ended(status)]


def _query_components(job: JobDir) -> Mapping[int, JobStatus]:
    ids = read_component_ids(job)
    found = query_job_states(ids, env=os.environ)
    return {index: found[id] for index, id in enumerate(ids, 1)}


def _has_ended(status: JobStatus) -> bool:
    return status.state in ENDED


class ComponentHolder:
    """The process that holds the nodes of a component."""

    def __init__(self, job: JobDir, index: int) -> None:
        self._job, self._lease = job, job.component_lease(index)
        self._slurm_id = os.environ["SLURM_JOB_ID"]
        self._names = NameWatch(job.root, longest_s=POLL_INTERVAL_S)
        self._looks = LookInterval(LOOK_INTERVAL_S)
        self._started_at = time.monotonic()
        self._is_terminated = False

    def listen(self) -> None:
        """Take SIGTERM, and the warnings before it, as a notice: Slurm ends this process if there is more to it."""
        for number in FORWARDED_SIGNALS:
            signal.signal(number, self._on_term)

    def hold(self, *, max_wait_s: float) -> str:
        """Publish the lease and hold the nodes until they are not needed; return why."""
        nodes = commands.expand_nodes(os.environ["SLURM_JOB_NODELIST"])
        lease = ComponentLease(slurm_id=self._slurm_id, nodes=nodes, time=time.time())
        retry_passing(lambda: publish_file(self._lease, msgspec.json.encode(lease)))
        while (why := self._find_end(max_wait_s)) is None:
            time.sleep(POLL_INTERVAL_S)
        return why

    def _find_end(self, max_wait_s: float) -> str | None:
        with contextlib.suppress(OSError):  # a file system that is away ends nothing
            if self._job.outcome.name in self._names.names():
                return "the driver's job has ended"
            if self._is_terminated:
                publish_file(self._job.terminated, current_node())
                self._is_terminated = False
        waited_s = time.monotonic() - self._started_at
        if not self._looks.is_due():
            return None
        match self._find_driver_state():
            case "gone":
                return "the driver's job is gone"
            case "removed":
                return "its campaign was removed"
            case "missing" if waited_s > SUBMISSION_TIMEOUT_S:
                return "no driver's job was submitted"
            case "queued" if waited_s > max_wait_s:
                return self._wait_in_queue(waited_s)
        return None

    def _find_driver_state(self) -> str:
        """Ask Slurm for the driver's job: missing, queued, running, gone, removed; unknown without an answer."""
        try:
            id = read_record(self._job.submission, SubmittedJob).id
        except (HpcrlError, OSError):
            return "missing" if self._job.root.exists() else "removed"
        live = commands.query_live_jobs([id])
        if live is None:
            return "unknown"
        return {None: "gone", False: "queued", True: "running"}[live.get(id)]

    def _wait_in_queue(self, waited_s: float) -> str:
        """Ask Slurm to queue this job again, which ends this process."""
        remove_path(self._lease)
        commands.try_slurm(["scontrol", "requeue", self._slurm_id])
        return f"the driver's job has not started within {waited_s / 60:.0f} min"

    def release(self) -> None:
        """Remove the lease."""
        with contextlib.suppress(OSError):
            remove_path(self._lease)

    def _on_term(self, *_: object) -> None:
        self._is_terminated = True


def main(campaign: CampaignDir, number: int, index: int) -> int:
    """Hold the nodes of a component."""
    job = campaign.job(number)
    holder = ComponentHolder(job, index)
    holder.listen()
    try:
        why = holder.hold(max_wait_s=MAX_WAIT_SHARE * read_plan(campaign).cost.walltime_min * 60)
    finally:
        holder.release()
    note_in_log(f"hpcrl: component {index} of job {number} ends: {why}")
    return 0


if __name__ == "__main__":
    sys.exit(main(CampaignDir(Path(sys.argv[1])), int(sys.argv[2]), int(sys.argv[3])))
