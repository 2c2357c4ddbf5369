"""The allocation of the current job: the nodes of each component, its end time, and the commands that start steps."""

import contextlib
import math
import os
import re
import time
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from itertools import accumulate
from typing import NamedTuple

from hpcrl.campaign_dir.paths import JobDir
from hpcrl.config.site import STEP_DEVICE_VARIABLES
from hpcrl.errors import SlurmError
from hpcrl.plan.components import WHOLE_MEMORY, JobComponent
from hpcrl.plan.plan import Plan
from hpcrl.slurm.commands import COMMAND_TIMEOUT_S, expand_nodes, run_slurm, try_slurm
from hpcrl.slurm.component_jobs import ComponentLease, read_leases
from hpcrl.slurm.status import ACTIVE
from hpcrl.system.network import current_node

KEPT_VARIABLES = (
    "SLURM_CONF",
    "SLURM_JOB_ID",
    "SLURM_JOBID",
    "SLURM_HET_SIZE",
    "SLURM_CLUSTER_NAME",
    "SLURMD_NODENAME",
)
"""Slurm's variables that have the same meaning in every component."""


DEFAULT_KILL_WAIT_S = 30.0
"""Slurm's default."""
RUNNING_STATES = ACTIVE - {"completing"}
"""The states of a job whose nodes it has, and keeps for now."""
_SCHEDULE_FORMAT = "State:30,EndTime:30,PreemptTime:30"


class SeparateJob(NamedTuple):
    """The job of one component."""

    id: str
    roles: str
    """The roles, for messages."""
    started_at: float | None = None
    """None for the driver's, whose end Slurm names."""


@dataclass(frozen=True, kw_only=True)
class JobAllocation:
    """The nodes and the time that Slurm allocated; without a scheduler, this machine."""

    job_id: str | None
    """None on a machine without a scheduler."""
    end_time: float
    nodes: list[list[str]]
    """Node names of each component."""
    het: bool = False
    """True if components are het groups; otherwise they share the nodes of one plain job."""
    separate_jobs: list["SeparateJob"] = field(default_factory=list)
    """The job of each component, where each has one; the driver's is the first."""
    kill_wait_s: float = DEFAULT_KILL_WAIT_S
    """Time between SIGTERM and SIGKILL at the end of a job."""

    def step_prefix(
        self, component: JobComponent, nodes: Sequence[str], *, cpus: int, mem_gib: float, gpus: int
    ) -> list[str]:
        """Return the srun words that run a command on each of `nodes`: every size is explicit, nothing is inherited.

        Where it runs on several, the loss of one node, or an end there, ends nothing on the others.
        """
        if self.job_id is None:
            return []
        size = [f"--cpus-per-task={cpus}"]
        if WHOLE_MEMORY in component.slurm_flags:
            size.append(WHOLE_MEMORY)
        elif any(flag.startswith("--mem") for flag in component.slurm_flags):
            size.append(f"--mem={int(mem_gib * 1024)}M")
        size.append(f"--gres=gpu:{gpus}" if gpus else "--gres=none")
        place = _format_node_flags(nodes)
        if len(nodes) > 1:
            place += ["--ntasks-per-node=1", "--no-kill", "--kill-on-bad-exit=0", "--wait=0"]
        return ["srun", *self._choose_group(component.index), *place, *size, "--overlap", "--mpi=none", "--unbuffered"]

    def query_schedule(self, *, timeout_s: float = COMMAND_TIMEOUT_S) -> "JobSchedule | None":
        """Ask Slurm when the job ends: where each component has a job, with the first of them that does."""
        assert self.job_id is not None
        if not self.separate_jobs:
            return query_schedule(self.job_id, timeout_s=timeout_s)
        ids = [one.id for one in self.separate_jobs]
        found = query_component_schedules(ids, timeout_s=timeout_s)
        return join_schedules([found.get(id) for id in ids]) if found else None

    def name_separate_job(self, node: str) -> str | None:
        """Return the roles of the separate job that has a node; None for the driver's, and where there is only one."""
        parts = zip(self.separate_jobs[1:], self.nodes[1:], strict=False)
        return next((one.roles for one, nodes in parts if node in nodes), None)

    def find_ended_component(self, *, timeout_s: float = COMMAND_TIMEOUT_S) -> tuple[int, str] | None:
        """Ask Slurm whether the job of a component has ended; return the first one, and its state."""
        found = query_component_schedules([one.id for one in self.separate_jobs], timeout_s=timeout_s)
        if self.job_id not in found:  # no answer
            return None
        for index, (id, *_) in enumerate(self.separate_jobs[1:], 1):
            state = found[id].state.lower() if id in found else ""
            if state not in RUNNING_STATES:
                return index, "preempted" if id in found and found[id].is_preempted else state or "no longer listed"
        return None

    def without_node(self, node: str) -> "JobAllocation":
        """Return the allocation that is left when a node is lost."""
        return replace(self, nodes=[[name for name in names if name != node] for names in self.nodes])

    def list_distinct_nodes(self, components: Sequence[JobComponent]) -> dict[int, list[str]]:
        """Return the nodes of components, each in the first that has it: Slurm may place several on one node."""
        found: dict[int, list[str]] = {}
        for component in components:
            taken = {name for names in found.values() for name in names}
            found[component.index] = [name for name in self.nodes[component.index] if name not in taken]
        return found

    def _choose_group(self, index: int) -> list[str]:
        """Return the words that name the part of the allocation with a component."""
        if self.separate_jobs:
            return [f"--jobid={self.separate_jobs[index].id}"]
        return [f"--het-group={index}"] if self.het else []

    def node_step_commands(
        self, components: Sequence[JobComponent], make_command: Callable[[JobComponent], Sequence[str]], *, mpi: str
    ) -> list[list[str]]:
        """Return what runs a component's command once on every node of it: one step, which is one MPI world.

        Where components are separate jobs, it is a step in each of them. `make_command` returns the flags of srun and
        the command of a component. A step ends if one of its ranks fails. It gets no devices, and may use all memory
        that the job has on a node, and all cores: with a number of them it would get the first ones, on which other
        steps run.
        """
        shape = ["--ntasks-per-node=1", "--cpu-bind=none", "--gres=none"]
        if all(any(flag.startswith("--mem") for flag in component.slurm_flags) for component in components):
            shape.append(WHOLE_MEMORY)
        shape += ["--overlap", "--kill-on-bad-exit=1", f"--mpi={mpi}", "--unbuffered"]
        commands = {component.index: list(make_command(component)) for component in components}
        is_alike = len({tuple(command) for command in commands.values()}) == 1
        groups = [
            [*node_flags, *shape, *commands[index]]
            for index, node_flags in self._make_node_flags(components, is_alike=is_alike)
        ]
        if self.separate_jobs:
            return [["srun", *group] for group in groups]
        return [["srun", *groups[0], *(word for group in groups[1:] for word in (":", *group))]]

    def _make_node_flags(self, components: Sequence[JobComponent], *, is_alike: bool) -> list[tuple[int, list[str]]]:
        """Return srun's node flags, with the first component that they are of.

        They are one group for all components where srun can express that, else one for each.
        """
        nodes = self.list_distinct_nodes(components)
        if not self.het and not self.separate_jobs:
            return [(components[0].index, _format_node_flags([name for names in nodes.values() for name in names]))]
        if self.het and is_alike and all(len(nodes[component.index]) == component.nodes for component in components):
            return [(components[0].index, [f"--het-group={','.join(map(str, nodes))}"])]
        return [
            (index, [*self._choose_group(index), *_format_node_flags(names)]) for index, names in nodes.items() if names
        ]


def name_step(prefix: Sequence[str], name: str) -> list[str]:
    """Return the srun words with a name for the step; words without srun stay as they are."""
    return [prefix[0], f"--job-name={name}", *prefix[1:]] if prefix[:1] == ["srun"] else list(prefix)


def _format_node_flags(nodes: Sequence[str]) -> list[str]:
    return [f"--nodes={len(nodes)}", f"--ntasks={len(nodes)}", f"--nodelist={','.join(nodes)}"]


def read_allocation(plan: Plan, job: JobDir) -> JobAllocation:
    """Read the allocation from the environment and Slurm; without a scheduler it is this machine."""
    allocation = read_own_nodes(plan, job)
    if allocation.job_id is None:
        return replace(allocation, end_time=time.time() + plan.cost.walltime_min * 60)
    end_time, kill_wait_s = _find_end_time(allocation, plan), _query_kill_wait()
    return replace(allocation, end_time=end_time, kill_wait_s=kill_wait_s)


def find_own_id(plan: Plan) -> str | None:
    """Return Slurm's id of this job; None on a machine without a scheduler, and inside another job there."""
    return None if plan.layout == "local" else os.environ.get("SLURM_JOB_ID")


def read_own_nodes(plan: Plan, job: JobDir) -> JobAllocation:
    """Read the nodes of this job from the environment, those of separate components from their leases.

    Its end is left open.
    """
    if plan.layout == "local":
        return JobAllocation(job_id=None, end_time=math.inf, nodes=[[current_node()] for _ in plan.components])
    job_id = find_own_id(plan)
    if job_id is None:
        raise SlurmError("the driver runs inside a Slurm job, and SLURM_JOB_ID is not set: use `hpcrl submit`")
    het = plan.layout == "hetjob"
    leases = read_leases(job, plan)
    nodes = _read_group_nodes(plan) if het else _distribute_nodes(plan, leases)
    for component, names in zip(plan.components, nodes, strict=True):
        if len(names) != component.nodes:
            raise SlurmError(f"component {component.index} has {len(names)} nodes, and the plan has {component.nodes}")
    roles = ["+".join(part.roles) for part in plan.components]
    others = [SeparateJob(leases[index].slurm_id, roles[index], leases[index].time) for index in sorted(leases)]
    return JobAllocation(
        job_id=job_id,
        end_time=math.inf,
        nodes=nodes,
        het=het,
        separate_jobs=[SeparateJob(job_id, roles[0]), *others] if others else [],
    )


class JobSchedule(NamedTuple):
    """Slurm's present answer about the end of a job."""

    state: str
    end_time: float | None
    """The time when it will end, or has ended, in seconds since the epoch."""
    is_preempted: bool

    @property
    def running_end(self) -> float | None:
        """The time when it will end; None if it is ending already.

        A job that is preempted with a grace time still runs, and its end is that of the grace time.
        """
        return self.end_time if self.is_running else None

    @property
    def is_running(self) -> bool:
        return self.state in ("RUNNING", "SUSPENDED")


def join_schedules(schedules: Sequence[JobSchedule | None]) -> JobSchedule:
    """Return the schedule of jobs that need each other: None is one that Slurm does not list any more."""
    listed = [JobSchedule("ENDED", None, is_preempted=False) if one is None else one for one in schedules]
    first = min(listed, key=lambda one: (one.is_running, one.end_time or math.inf))
    return first._replace(is_preempted=any(one.is_preempted for one in listed))


def query_schedule(job_id: str, *, timeout_s: float = COMMAND_TIMEOUT_S) -> JobSchedule | None:
    """Ask Slurm when a job will end, which may have changed, and whether it is preempted; None without an answer."""
    done = try_slurm(["squeue", "-h", "-j", job_id, "-O", _SCHEDULE_FORMAT], timeout_s=timeout_s)
    fields = done.stdout.split("\n")[0].split() if done.returncode == 0 else []
    return _parse_schedule(fields) if len(fields) == 3 else None


def query_component_schedules(ids: Sequence[str], *, timeout_s: float = COMMAND_TIMEOUT_S) -> dict[str, JobSchedule]:
    """Ask Slurm the same for the jobs of components; those that it does not list are left out. Empty: no answer."""
    command = ["squeue", "-h", "--states=all", "-j", ",".join(ids), "-O", f"{_SCHEDULE_FORMAT},JobID:30"]
    done = try_slurm(command, timeout_s=timeout_s)
    rows = [line.split() for line in done.stdout.splitlines()] if done.returncode == 0 else []
    return {row[3]: _parse_schedule(row) for row in rows if len(row) == 4}


def _parse_schedule(fields: Sequence[str]) -> JobSchedule:
    return JobSchedule(fields[0], _parse_time(fields[1]), _parse_time(fields[2]) is not None)


def _parse_time(text: str) -> float | None:
    with contextlib.suppress(ValueError):  # "N/A"
        return datetime.fromisoformat(text).timestamp()
    return None


def scrub_environment(environ: MutableMapping[str, str]) -> None:
    """Remove the variables Slurm set for component 0, so that they do not leak into steps of other components."""
    for name in list(environ):
        kept = name in KEPT_VARIABLES or "_HET_GROUP_" in name
        if name in STEP_DEVICE_VARIABLES or (name.startswith(("SLURM_", "SBATCH_", "SRUN_")) and not kept):
            del environ[name]


def _read_group_nodes(plan: Plan) -> list[list[str]]:
    """Return the nodes of every het group."""
    found = []
    for component in plan.components:
        names = os.environ.get(f"SLURM_JOB_NODELIST_HET_GROUP_{component.index}")
        if names is None:
            raise SlurmError(
                f"SLURM_JOB_NODELIST_HET_GROUP_{component.index} is not set: the job has fewer components than the plan"
            )
        found.append(expand_nodes(names))
    return found


def _distribute_nodes(plan: Plan, leases: Mapping[int, ComponentLease]) -> list[list[str]]:
    """Distribute the nodes of a plain job to the components in order; the batch script's node comes first.

    Components that are separate jobs have their own.
    """
    nodelist = os.environ.get("SLURM_JOB_NODELIST")
    if nodelist is None:
        raise SlurmError("SLURM_JOB_NODELIST is not set, so the nodes of this job are unknown")
    here = current_node()
    names = sorted(expand_nodes(nodelist), key=lambda name: name != here)  # stable: neighbours stay together
    if plan.layout == "multi-job":
        return [names, *(leases[part.index].nodes if part.index in leases else [] for part in plan.components[1:])]
    ends = list(accumulate(component.nodes for component in plan.components))
    return [names[end - part.nodes : end] for part, end in zip(plan.components, ends, strict=True)]


def _query_kill_wait() -> float:
    """Ask Slurm how long it waits between SIGTERM and SIGKILL; its default if it does not answer."""
    done = run_slurm(["scontrol", "show", "config"])
    found = re.search(r"^KillWait\s*=\s*(\d+)", done.stdout, re.MULTILINE)
    return float(found[1]) if found else DEFAULT_KILL_WAIT_S


def _find_end_time(allocation: JobAllocation, plan: Plan) -> float:
    """Return when the job ends: by Slurm, which may not answer now, else by what was asked for."""
    schedule = allocation.query_schedule()
    walltime_s = plan.cost.walltime_min * 60
    if schedule is not None and schedule.end_time is not None:
        return schedule.end_time
    named = os.environ.get("SLURM_JOB_END_TIME", "")  # not set everywhere
    own_end = float(named) if named.isdecimal() else time.time() + walltime_s
    starts = [one.started_at for one in allocation.separate_jobs if one.started_at is not None]
    return min([own_end, *(start + walltime_s for start in starts)])
