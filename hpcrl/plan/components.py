"""What Slurm is asked for: the components of the job, one for each kind of node, and the jobs beside it. Pure.

component_of     the het group of one role
shares_of        the shares that the roles have of one allocation
local_component  all roles on one machine
reward_jobs_of   the jobs that rewards may have beside this one
"""

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from hpcrl.config.recipe import Recipe, RoleName
from hpcrl.config.site import Site, SitePartition
from hpcrl.plan.demand import compute_node_needs
from hpcrl.plan.partitions import PartitionChoice

PLACED_ROLES: tuple[RoleName, ...] = ("env", "prefill", "decode", "train")
"""Roles with a component of their own, in the order of the components; rewards use spare cores of env's."""


class PerNode(NamedTuple):
    """What is asked of every node."""

    cpus: int
    mem_gib: int
    gpus: int


class JobComponent(msgspec.Struct, frozen=True, kw_only=True):
    """One het group of the job, as Slurm is asked for it, or a share of its nodes where it is one allocation."""

    index: int
    partition: str
    """The site's name for it."""
    roles: list[RoleName]
    nodes: int
    cpus_per_node: int
    mem_gib_per_node: int
    gpus_per_node: int = 0
    gpu: str | None = None
    slurm_flags: list[str] = []
    """Everything that sbatch is told about this component; about the whole allocation where components share one."""


class RewardJobPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Jobs of one node that rewards may have beside this one."""

    partition: str
    """The site's name for it."""
    max_jobs: int
    workers_per_job: int
    walltime_min: int
    slurm_flags: list[str] = []


def find_account(site: Site, partition: SitePartition) -> str | None:
    """Who is charged on a partition."""
    if partition.account is not None:
        return partition.account
    return site.account + partition.account_suffix if site.account is not None else None


def make_component(
    index: int, role: RoleName, choice: PartitionChoice, recipe: Recipe, site: Site, *, account: str | None
) -> JobComponent:
    """The het group of one role."""
    per_node = _per_node([(role, choice)], recipe, site)
    return _build_component(index, role, choice, site, per_node=per_node, nodes=choice.nodes, account=account)


def make_shared_components(
    choices: dict[RoleName, PartitionChoice], recipe: Recipe, site: Site, *, account: str | None
) -> list[JobComponent]:
    """One allocation on one partition, its nodes dealt to the roles; Slurm gives all of them the same."""
    per_node = _per_node(list(choices.items()), recipe, site)
    nodes = sum(choice.nodes for choice in choices.values())
    return [
        _build_component(index, role, choices[role], site, per_node=per_node, nodes=nodes, account=account)
        for index, role in enumerate(PLACED_ROLES)
    ]


def _per_node(placed: Sequence[tuple[RoleName, PartitionChoice]], recipe: Recipe, site: Site) -> PerNode:
    """Enough for the neediest of these roles, or the whole node."""
    partition = site.partitions[placed[0][1].partition]
    if partition.exclusive:
        return PerNode(partition.cores_per_node, int(partition.mem_gib_per_node), partition.gpus_per_node)
    needs = [compute_node_needs(role, recipe, workers_per_node=choice.workers_per_node) for role, choice in placed]
    gpus = max(choice.gpus_per_worker * choice.workers_per_node for _, choice in placed)
    return PerNode(max(cpus for cpus, _ in needs), max(mem_gib for _, mem_gib in needs), gpus)


def _build_component(
    index: int,
    role: RoleName,
    choice: PartitionChoice,
    site: Site,
    *,
    per_node: PerNode,
    nodes: int,
    account: str | None,
) -> JobComponent:
    """`nodes` is what Slurm is asked for, of which this role may have a share only."""
    partition = site.partitions[choice.partition]
    return JobComponent(
        index=index,
        partition=choice.partition,
        roles=["env", "reward"] if role == "env" else [role],
        nodes=choice.nodes,
        cpus_per_node=per_node.cpus,
        mem_gib_per_node=per_node.mem_gib,
        gpus_per_node=per_node.gpus,
        gpu=partition.gpu if per_node.gpus else None,
        slurm_flags=_make_slurm_flags(nodes, per_node, partition, account=account, site=site),
    )


def make_local_component(recipe: Recipe, site: Site, choices: dict[RoleName, PartitionChoice]) -> JobComponent:
    """One machine holds all roles; its partition bounds each of them, not their sum (roles idle in turns)."""
    needs = [compute_node_needs(role, recipe, workers_per_node=choices[role].workers_per_node) for role in PLACED_ROLES]
    return JobComponent(
        index=0,
        partition=choices["env"].partition,
        roles=[*PLACED_ROLES, "reward"],
        nodes=1,
        cpus_per_node=sum(cpus for cpus, _ in needs),
        mem_gib_per_node=sum(mem for _, mem in needs),
    )


def plan_reward_jobs(recipe: Recipe, site: Site) -> tuple[RewardJobPlan | None, list[str]]:
    """The cheap partition for jobs of rewards, or what is said where there is none."""
    if recipe.reward.placement != "elastic":
        return None, []
    resources = recipe.resources.reward
    local = site.scheduler == "local"
    for label, partition in site.partitions.items():
        if not local and (not partition.preemptible or partition.gpu):
            continue
        fits = min(
            partition.cores_per_node // resources.cpus_per_worker,
            int(partition.mem_gib_per_node // resources.mem_gib_per_worker),
        )
        workers = min(fits, resources.num_workers)
        account = find_account(site, partition)
        if workers == 0 or (site.account_required and account is None):
            continue
        mem_gib = -int(-workers * resources.mem_gib_per_worker // 1)
        per_node = PerNode(workers * resources.cpus_per_worker, mem_gib, gpus=0)
        jobs = RewardJobPlan(
            partition=label,
            max_jobs=recipe.reward.max_jobs,
            workers_per_job=workers,
            walltime_min=min(recipe.job.walltime_min, partition.max_walltime_min),
            slurm_flags=[] if local else _make_slurm_flags(1, per_node, partition, account=account, site=site),
        )
        return jobs, []
    why = f"site {site.name} has no preemptible CPU partition that holds one of their workers"
    return None, [f"rewards wanted jobs of their own, got spare cores: {why}"]


def _make_slurm_flags(
    nodes: int, per_node: PerNode, partition: SitePartition, *, account: str | None, site: Site
) -> list[str]:
    """Nothing of these propagates between components, so each says all of it."""
    cpus, mem_gib, gpus = per_node
    flags = [f"--nodes={nodes}", "--ntasks-per-node=1", f"--cpus-per-task={cpus}"]
    if partition.slurm_partition:
        flags.append(f"--partition={partition.slurm_partition}")
    if partition.constraint:
        flags.append(f"--constraint={partition.constraint}")
    if partition.qos:
        flags.append(f"--qos={partition.qos}")
    if account:
        flags.append(f"--account={account}")
    if partition.mem_flag and not partition.exclusive:
        flags.append(f"--mem={mem_gib}G")
    if partition.exclusive:
        flags.append("--exclusive")
    if gpus:
        kind = f"{partition.gres_type}:" if partition.gres_type else ""
        flags.append(f"--gres=gpu:{kind}{gpus}" if partition.gpu_request == "gres" else f"--gpus-per-node={kind}{gpus}")
    if site.network.srun_network:
        flags.append(f"--network={site.network.srun_network}")
    return [*flags, *partition.extra_flags]
