"""The jobs of components, in the layout "multi-job".

Each holds the nodes of a component until the first job, the one with the driver, has ended. They are queued before that
one, which waits for their start, and find each other in its directory: a component's job that has started leaves a
lease there with its nodes, and the driver starts steps on them.

    queue_component_jobs    queue them all, and record their ids
    list_start_dependencies  what the driver's job waits for
    cancel_component_jobs   end them
    read_component_ids      read their ids
    ComponentLease          the record of one that has started
    read_lease, read_leases the lease of one, or of those that have one
"""

import contextlib
import time
from collections.abc import Mapping

import msgspec

from hpcrl.campaign_dir.paths import JobDir
from hpcrl.config.site import Site
from hpcrl.errors import SlurmError
from hpcrl.plan.plan import Plan
from hpcrl.slurm import commands
from hpcrl.slurm.script import list_excluded_nodes, list_separate_components, make_component_script, make_mark
from hpcrl.system.files import publish_file, read_json

CANCEL_TIMEOUT_S = 40.0
"""The time in which a job of an earlier try, that was cancelled, leaves the queue."""
LOOK_INTERVAL_S = 0.5


class ComponentLease(msgspec.Struct, frozen=True, kw_only=True):
    """The record of a component's job that has started."""

    slurm_id: str
    nodes: list[str]
    time: float


def queue_component_jobs(
    job: JobDir, *, plan: Plan, site: Site, waits_for: str | None = None, env: Mapping[str, str] | None = None
) -> None:
    """Queue the jobs of the components of `job` but the first; `waits_for` is the id of the job they wait for.

    Where one is refused, the others are cancelled.
    """
    components = list_separate_components(plan)
    if not components:
        return
    exports = read_json(job.campaign.manifest)["exports"].items()
    excluded = list_excluded_nodes(job.campaign, plan=plan, site=site, now=time.time())
    dependency = [] if waits_for is None else [f"--dependency=afterany:{waits_for}"]
    ids: list[str] = []
    try:
        for component in components:
            script = job.component_script(component.index)
            text = make_component_script(plan, component, job=job, site=site, exports=exports, excluded_nodes=excluded)
            publish_file(script, text, mode=0o700)
            mark = make_mark(job, component=component.index)
            _cancel_marked(mark, env=env)
            ids.append(commands.queue_new_script(script, *dependency, mark=mark, env=env))
            publish_file(job.component_jobs, "".join(f"{id}\n" for id in ids))
    except BaseException:
        with contextlib.suppress(SlurmError):
            commands.cancel_jobs(ids, env=env)
        raise


def _cancel_marked(mark: str, *, env: Mapping[str, str] | None) -> None:
    """Cancel the job of an earlier try, whose plan may have changed since."""
    deadline = time.monotonic() + CANCEL_TIMEOUT_S
    while (known := commands.find_marked_job(mark, env=env)) is not None:
        if time.monotonic() > deadline:
            raise SlurmError(f"job {known} of an earlier try was cancelled, and has not ended yet: try again")
        commands.cancel_jobs([known], env=env)
        time.sleep(LOOK_INTERVAL_S)


def list_start_dependencies(job: JobDir) -> list[str]:
    """Return the dependency of the driver's job on the start of the others, if there are any: its nodes would idle."""
    ids = read_component_ids(job)
    return [f"after:{':'.join(ids)}"] if ids else []


def cancel_component_jobs(job: JobDir, *, env: Mapping[str, str] | None = None) -> None:
    """End the jobs of components; raise SlurmError if Slurm does not answer."""
    commands.cancel_jobs(read_component_ids(job), env=env)


def read_component_ids(job: JobDir) -> list[str]:
    """Read the ids of the jobs of components; none in other layouts."""
    try:
        return job.component_jobs.read_text().split()
    except FileNotFoundError:
        return []


def read_lease(job: JobDir, index: int) -> ComponentLease | None:
    """Read the lease of a component; None if its job has not started, or has ended."""
    try:
        return msgspec.json.decode(job.component_lease(index).read_bytes(), type=ComponentLease)
    except FileNotFoundError:
        return None


def read_leases(job: JobDir, plan: Plan) -> dict[int, ComponentLease]:
    """Read the leases of the components whose jobs have started.

    By listing: the client of a network file system remembers for long that a file is not there.
    """
    components = list_separate_components(plan)
    present = set(job.list_leases()) if components else set()
    found = [part.index for part in components if job.component_lease(part.index) in present]
    leases = {index: read_lease(job, index) for index in found}
    return {index: lease for index, lease in leases.items() if lease is not None}
