"""Both sides of the meeting of a campaign's jobs in the layout "multi-job".

`python -m hpcrl.job.component_holder CAMPAIGN JOB COMPONENT` is the program of a component's job: it leaves a lease
with its nodes, on which the driver starts steps, and holds them until the driver's job has ended. SIGTERM becomes a
notice for the driver, as in a step. The driver's job starts when all others have started; a job that has waited long
for that goes back into the queue, held, and the driver releases it: meanwhile its nodes would idle.

    await_components    the driver's side: wait until every component has its nodes
    ComponentHolder     the other side
    MAX_WAIT_SHARE, LOOK_INTERVAL_S, POLL_INTERVAL_S, LEASE_PATIENCE_S, NUM_ABSENT   limits
"""

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Literal

import msgspec

from hpcrl.campaign_dir.job_end import JobEnd
from hpcrl.campaign_dir.paths import CampaignDir, JobDir
from hpcrl.errors import HpcrlError
from hpcrl.job.batch_log import note_in_log
from hpcrl.job.driver_pulse import FORWARDED_SIGNALS
from hpcrl.job.supervision import EndRequests, LookInterval
from hpcrl.plan.components import JobComponent
from hpcrl.plan.plan import Plan
from hpcrl.plan.records import read_plan, read_record
from hpcrl.slurm import commands
from hpcrl.slurm.component_jobs import ComponentLease, read_component_ids, read_leases
from hpcrl.slurm.next_job import SUBMISSION_TIMEOUT_S
from hpcrl.slurm.script import list_separate_components
from hpcrl.slurm.status import ACTIVE, ENDED, NOT_LISTED, WAITING, JobStatus, query_job_states
from hpcrl.slurm.submit import SubmittedJob
from hpcrl.system.file_watch import NameWatch, is_outage, retry_passing
from hpcrl.system.files import publish_file, remove_path
from hpcrl.system.network import current_node

MAX_WAIT_SHARE = 0.25
"""The share of the walltime for which a job that has started waits for others."""
LOOK_INTERVAL_S = 30.0
"""The time between two questions to Slurm about jobs that are waited for."""
POLL_INTERVAL_S = 1.0
LEASE_PATIENCE_S = 40.0
"""The time for which a full or unreachable file system may keep a lease from being written."""
NUM_ABSENT = 3
"""The answers in a row without the driver's job after which it is gone: a Slurm that starts again may list none."""
DriverState = Literal["missing", "removed", "queued", "running", "gone", "unknown"]


def await_components(
    job: JobDir, plan: Plan, *, requests: EndRequests, note_turn: Callable[[], object]
) -> JobEnd | None:
    """Wait until the jobs of all components have started; return how this job ends if one of them does not."""
    components = list_separate_components(plan)
    if not components:
        return None
    looks, limit_s = LookInterval(LOOK_INTERVAL_S), MAX_WAIT_SHARE * plan.cost.walltime_min * 60
    deadline = time.monotonic() + limit_s
    missing, seen = components, 0
    while True:
        note_turn()
        leases = read_leases(job, plan)
        if looks.is_due() or seen < len(leases) == len(components):
            seen, states = len(leases), _query_components(job)
            missing = [part for part in components if not _has_nodes(leases.get(part.index), states.get(part.index))]
            if not missing:
                return None
            if ended := [part for part in missing if _has_ended(states.get(part.index))]:
                names = ", ".join(f"{'+'.join(part.roles)} ({states[part.index].state})" for part in ended)
                return _describe_missing(f"the jobs of {names} ended before this one had all its nodes")
            _release(missing, states)
        names = _name_components(missing)
        if requests.is_cancelled or requests.has_stop_request():
            return JobEnd(outcome="stopped", reason="a user asked for it (hpcrl stop)", cause="user-request")
        if requests.has_termination():
            reason = f"it received SIGTERM while it waited for the jobs of {names}"
            return JobEnd(outcome="cut", reason=reason, cause="cancellation")
        if time.monotonic() > deadline:
            return _describe_missing(
                f"the jobs of {names} did not start within {limit_s / 60:.0f} min, a quarter of the walltime: ask for "
                "fewer nodes there, or raise job.walltime_min"
            )
        time.sleep(POLL_INTERVAL_S)


def _describe_missing(reason: str) -> JobEnd:
    return JobEnd(outcome="failed", reason=reason, cause="missing-nodes")


def _query_components(job: JobDir) -> Mapping[int, JobStatus]:
    ids = read_component_ids(job)
    found = query_job_states(ids, env=os.environ)
    return {index: found[id] for index, id in enumerate(ids, 1)}


def _has_nodes(lease: ComponentLease | None, status: JobStatus | None) -> bool:
    """Return whether a component's job has the nodes of its lease: Slurm may have queued it again since."""
    if lease is None or (status is not None and (status.state in WAITING or status.state in ENDED)):
        return False
    named = [node for part in status.components for node in commands.expand_nodes(part.nodes)] if status else []
    return not named or named == lease.nodes


def _has_ended(status: JobStatus | None) -> bool:
    return status is not None and status.state in ENDED


def _release(missing: list[JobComponent], states: Mapping[int, JobStatus]) -> None:
    """Let the jobs start that hold themselves back until the driver is there, and note what is waited for."""
    waiting = [index for part in missing if (index := part.index) in states and states[index].state in WAITING]
    for id in (states[index].id for index in waiting):
        commands.try_slurm(["scontrol", "release", id])
    why = "; ".join(filter(None, dict.fromkeys(states[index].reason for index in waiting)))
    note_in_log(f"hpcrl: waiting for the jobs of {_name_components(missing)}" + (f": {why}" if why else ""))


def _name_components(components: list[JobComponent]) -> str:
    return ", ".join(f"{'+'.join(part.roles)} (partition {part.partition})" for part in components)


class ComponentHolder:
    """The process that holds the nodes of a component."""

    def __init__(self, job: JobDir, index: int) -> None:
        self._job, self._lease = job, job.component_lease(index)
        self._slurm_id = os.environ["SLURM_JOB_ID"]
        self._names = NameWatch(job.root, longest_s=POLL_INTERVAL_S)
        self._looks = LookInterval(LOOK_INTERVAL_S)
        self._started_at = time.monotonic()
        self._driver_id: str | None = None
        self._has_driver = False
        """True once the driver's job was seen to run."""
        self._num_absent = 0
        self._is_terminated = False

    def listen(self) -> None:
        """Take SIGTERM, and the warnings before it, as a notice: Slurm ends this process if there is more to it."""
        for number in FORWARDED_SIGNALS:
            signal.signal(number, self._on_term)

    def hold(self, *, max_wait_s: float) -> str:
        """Publish the lease and hold the nodes until they are not needed; return why."""
        nodes = commands.expand_nodes(os.environ["SLURM_JOB_NODELIST"])
        lease = msgspec.json.encode(ComponentLease(slurm_id=self._slurm_id, nodes=nodes, time=time.time()))
        retry_passing(lambda: publish_file(self._lease, lease), timeout_s=LEASE_PATIENCE_S, passes=is_outage)
        while (why := self._find_end(max_wait_s)) is None:
            time.sleep(POLL_INTERVAL_S)
        return why

    def _find_end(self, max_wait_s: float) -> str | None:
        with contextlib.suppress(OSError):  # a file system that is away ends nothing
            names = self._names.names()
            if self._job.outcome.name in names:
                return "the driver's job has ended"
            if self._is_terminated:
                if not self._has_driver and self._job.parsl.name not in names:
                    return "it received SIGTERM before the driver has started"
                publish_file(self._job.terminated, current_node())
                self._is_terminated = False
        if not self._looks.is_due():
            return None
        waited_s, state = time.monotonic() - self._started_at, self._find_driver_state()
        self._has_driver |= state == "running"
        self._num_absent = self._num_absent + 1 if state == "gone" else 0
        if state == "removed":
            return "its campaign was removed"
        if self._num_absent >= NUM_ABSENT:
            return "the driver's job is gone"
        if state == "missing" and waited_s > SUBMISSION_TIMEOUT_S:
            return "no driver's job was submitted"
        if state == "queued" and not self._has_driver and waited_s > max_wait_s:
            return self._wait_in_queue(waited_s)
        return None

    def _find_driver_state(self) -> DriverState:
        """Ask Slurm for the driver's job; without an answer, or a file system that gives one, it is unknown."""
        if self._driver_id is None:
            try:
                if not self._job.submission.exists():
                    return "missing" if self._job.root.exists() else "removed"
                self._driver_id = read_record(self._job.submission, SubmittedJob).id
            except (HpcrlError, OSError):
                return "unknown"
        status = query_job_states([self._driver_id], env=os.environ)[self._driver_id]
        if status.state in ENDED or status.reason == NOT_LISTED:
            return "gone"
        return "queued" if status.state in WAITING else "running" if status.state in ACTIVE else "unknown"

    def _wait_in_queue(self, waited_s: float) -> str:
        """Ask Slurm to queue this job again, held until the driver releases it; that ends this process."""
        remove_path(self._lease)
        done = commands.try_slurm(["scontrol", "requeuehold", self._slurm_id])
        refused = f", and Slurm does not queue this one again: {done.stderr.strip()}" if done.returncode else ""
        return f"the driver's job has not started within {waited_s / 60:.0f} min{refused}"

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
