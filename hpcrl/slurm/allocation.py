"""Facts inside a job: which nodes each component got, when it ends, and how a step is started on a node."""

import os
import subprocess
import time
from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from hpcrl.components import Component
from hpcrl.endpoints import this_node
from hpcrl.errors import SlurmError
from hpcrl.plan import Plan

KEPT = ("SLURM_CONF", "SLURM_JOB_ID", "SLURM_JOBID", "SLURM_HET_SIZE", "SLURM_CLUSTER_NAME", "SLURMD_NODENAME")
"""Of Slurm's variables, those that mean the same in every component."""


DEVICES = ("CUDA_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL", "ROCR_VISIBLE_DEVICES")
"""Set by Slurm for each step that has GPUs, and left as they were for one that has none."""


@dataclass(frozen=True, kw_only=True)
class Allocation:
    """What Slurm gave (or, on one machine, what there is)."""

    job_id: str | None
    """None on a machine without a scheduler."""
    end_time: float
    nodes: list[list[str]]
    """Node names of each component."""

    def step(self, component: Component, node: str, *, cpus: int, mem_gib: float, gpus: int) -> list[str]:
        """What stands before a command so that it runs on `node`: everything is said, nothing is inherited."""
        if self.job_id is None:
            return []
        size = [f"--cpus-per-task={cpus}"]
        if any(flag.startswith("--mem") for flag in component.slurm_flags):
            size.append(f"--mem={int(mem_gib * 1024)}M")
        size.append(f"--gres=gpu:{gpus}" if gpus else "--gres=none")
        place = [f"--het-group={component.index}", "--nodes=1", "--ntasks=1", f"--nodelist={node}"]
        return ["srun", *place, *size, "--overlap", "--mpi=none", "--unbuffered"]

    def joined_step(self, components: Sequence[Component], *, mpi: str) -> list[str]:
        """What stands before a command so that it runs once on every node of `components`, as one MPI world.

        If one of its ranks ends, the step ends. It has no devices, and may use what memory the job has on a node.
        """
        size = ["--ntasks-per-node=1", "--cpus-per-task=1", "--gres=none"]
        if all(any(flag.startswith("--mem") for flag in component.slurm_flags) for component in components):
            size.append("--mem=0")
        groups = ",".join(str(component.index) for component in components)
        return [
            "srun",
            f"--het-group={groups}",
            *size,
            "--overlap",
            "--kill-on-bad-exit=1",
            f"--mpi={mpi}",
            "--unbuffered",
        ]


def read_allocation(plan: Plan) -> Allocation:
    """Ask the environment and Slurm; on a machine without a scheduler, the machine itself."""
    if plan.layout == "local":
        end_time = time.time() + plan.cost.walltime_min * 60
        return Allocation(job_id=None, end_time=end_time, nodes=[[this_node()] for _ in plan.components])
    job_id = os.environ.get("SLURM_JOB_ID")
    if job_id is None:
        raise SlurmError("the driver runs inside a Slurm job, and SLURM_JOB_ID is not set: use `hpcrl submit`")
    nodes = [_hostnames(_component_nodes(component.index)) for component in plan.components]
    for component, names in zip(plan.components, nodes, strict=True):
        if len(names) != component.nodes:
            raise SlurmError(f"component {component.index} has {len(names)} nodes, and the plan has {component.nodes}")
    return Allocation(job_id=job_id, end_time=_end_time(job_id), nodes=nodes)


def scrub(environ: MutableMapping[str, str]) -> None:
    """Remove what Slurm says of component 0, so that it does not leak into steps of the others."""
    for name in list(environ):
        kept = name in KEPT or "_HET_GROUP_" in name
        if name in DEVICES or (name.startswith(("SLURM_", "SBATCH_", "SRUN_")) and not kept):
            del environ[name]


def _component_nodes(index: int) -> str:
    names = os.environ.get(f"SLURM_JOB_NODELIST_HET_GROUP_{index}")
    if names is None and index == 0:  # a job of one component is no heterogeneous job
        names = os.environ.get("SLURM_JOB_NODELIST")
    if names is None:
        raise SlurmError(f"SLURM_JOB_NODELIST_HET_GROUP_{index} is not set: the job has fewer components than the plan")
    return names


def _hostnames(nodelist: str) -> list[str]:
    return _ask(["scontrol", "show", "hostnames", nodelist]).split()


def _end_time(job_id: str) -> float:
    """Slurm's clock for the end of the job: SLURM_JOB_END_TIME is not set everywhere."""
    return datetime.fromisoformat(_ask(["squeue", "-h", "-j", job_id, "-o", "%e"]).split()[0]).timestamp()


def _ask(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    except (OSError, subprocess.SubprocessError) as error:
        raise SlurmError(f"{' '.join(command)} failed inside the job: {error}") from error
    return done.stdout
