"""What Slurm is asked for: the components of the job, one for each kind of node, and the jobs beside it. Pure.

component_of     the het group of one role
local_component  all roles on one machine
reward_jobs_of   the jobs that rewards may have beside this one
"""

import msgspec

from hpcrl import cost
from hpcrl.affinity import Choice, Demand
from hpcrl.recipe import Recipe, RoleName
from hpcrl.site import Partition, Site

DRIVER_CPUS = 1
DRIVER_MEM_GIB = 2.0
PLACED: tuple[RoleName, ...] = ("env", "prefill", "decode", "train")
"""Roles with a component of their own, in the order of the components; rewards use spare cores of env's."""


class Component(msgspec.Struct, frozen=True, kw_only=True):
    """One het group of the job, as Slurm is asked for it."""

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
    """Everything that sbatch is told about this component."""


class RewardJobs(msgspec.Struct, frozen=True, kw_only=True):
    """Jobs of one node that rewards may have beside this one."""

    partition: str
    """The site's name for it."""
    max_jobs: int
    workers_per_job: int
    walltime_min: int
    slurm_flags: list[str] = []


def demand_of(role: RoleName, recipe: Recipe, *, one_machine: bool) -> Demand:
    """What a node of a role must hold, beside what runs there anyway."""
    reward = recipe.resources.reward
    beside = role == "env"  # the driver and the rewards run on env's nodes
    return Demand(
        role=role,
        resources=getattr(recipe.resources, role),
        reserved_cpus=DRIVER_CPUS + reward.num_workers * reward.cpus_per_worker if beside else 0,
        reserved_mem_gib=DRIVER_MEM_GIB + reward.num_workers * reward.mem_gib_per_worker if beside else 0.0,
        min_nodes=2 if recipe.job.survive_node_loss and not one_machine else 1,
    )


def account_of(site: Site, partition: Partition) -> str | None:
    """Who is charged on a partition."""
    if partition.account is not None:
        return partition.account
    return site.account + partition.account_suffix if site.account is not None else None


def component_of(
    index: int, role: RoleName, choice: Choice, recipe: Recipe, site: Site, *, account: str | None
) -> Component:
    """The het group of one role."""
    partition = site.partitions[choice.partition]
    cpus, mem_gib = node_needs(role, choice, recipe)
    gpus = choice.gpus_per_worker * choice.workers_per_node
    if partition.exclusive:
        cpus, mem_gib, gpus = partition.cores_per_node, int(partition.mem_gib_per_node), partition.gpus_per_node
    return Component(
        index=index,
        partition=choice.partition,
        roles=["env", "reward"] if role == "env" else [role],
        nodes=choice.nodes,
        cpus_per_node=cpus,
        mem_gib_per_node=mem_gib,
        gpus_per_node=gpus,
        gpu=partition.gpu if gpus else None,
        slurm_flags=_slurm_flags(choice.nodes, cpus, mem_gib, gpus, partition, account=account, site=site),
    )


def local_component(recipe: Recipe, site: Site, choices: dict[RoleName, Choice]) -> Component:
    """One machine holds all roles; its partition bounds each of them, not their sum (roles idle in turns)."""
    needs = [node_needs(role, choices[role], recipe) for role in PLACED]
    return Component(
        index=0,
        partition=choices["env"].partition,
        roles=[*PLACED, "reward"],
        nodes=1,
        cpus_per_node=sum(cpus for cpus, _ in needs),
        mem_gib_per_node=sum(mem for _, mem in needs),
    )


def node_needs(role: RoleName, choice: Choice, recipe: Recipe) -> tuple[int, int]:
    """Cores and GiB that one node of a role's component must give."""
    demand = demand_of(role, recipe, one_machine=False)
    cpus = demand.reserved_cpus + choice.workers_per_node * demand.resources.cpus_per_worker
    window_gib = 0.0 if role == "env" else cost.window_memory_gib(recipe.model.num_params or 0)
    mem_gib = demand.reserved_mem_gib + window_gib + choice.workers_per_node * demand.resources.mem_gib_per_worker
    return cpus, int(-(-mem_gib // 1))


def reward_jobs_of(recipe: Recipe, site: Site) -> tuple[RewardJobs | None, list[str]]:
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
        account = account_of(site, partition)
        if workers == 0 or (site.account_required and account is None):
            continue
        cpus, mem_gib = workers * resources.cpus_per_worker, -int(-workers * resources.mem_gib_per_worker // 1)
        jobs = RewardJobs(
            partition=label,
            max_jobs=recipe.reward.max_jobs,
            workers_per_job=workers,
            walltime_min=min(recipe.job.walltime_min, partition.max_walltime_min),
            slurm_flags=[] if local else _slurm_flags(1, cpus, mem_gib, 0, partition, account=account, site=site),
        )
        return jobs, []
    why = f"site {site.name} has no preemptible CPU partition that holds one of their workers"
    return None, [f"rewards wanted jobs of their own, got spare cores: {why}"]


def _slurm_flags(
    nodes: int, cpus: int, mem_gib: int, gpus: int, partition: Partition, *, account: str | None, site: Site
) -> list[str]:
    """Nothing of these propagates between components, so each says all of it."""
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
