"""The components of the job, as requested from Slurm, and the reward jobs beside it. Pure.

make_component            the het group of one role
make_shared_components    the shares of the roles in one allocation
make_colocated_component  nodes that each have all roles
make_local_component      all roles on one machine
plan_reward_jobs          separate jobs for rewards
make_slurm_flags          the sbatch flags of one of them
make_memory_flags         the one for memory
list_job_flags            those of a whole job
find_account              the account that a partition is charged to
JobComponent, PerNode, RewardJobPlan    the results
EXCLUDE_FLAG, WHOLE_MEMORY  flags
FLAG_KEYS                 the keys that flags are made of, which no site may give as further flags
"""

import re
from collections.abc import Sequence
from math import ceil
from typing import NamedTuple

import msgspec

from hpcrl.config.recipe import Recipe, RoleName
from hpcrl.config.site import Site, SitePartition
from hpcrl.errors import PlanError
from hpcrl.plan.demand import PartitionChoice, compute_node_needs, count_dealt_gpus, sum_node_needs

EXCLUDE_FLAG = "--exclude="
WHOLE_MEMORY = "--mem=0"
"""The flag that asks for all memory of a node, or in a step for all that the job has there."""
_KEYS_WITH_FLAGS = {
    "resources.ROLE.num_workers": "--nodes -N --ntasks -n --ntasks-per-node",
    "resources.ROLE.cpus_per_worker": "--cpus-per-task -c",
    "resources.ROLE.mem_gib_per_worker": "--mem --mem-per-cpu --mem-per-gpu",
    "gpus_per_node": "--gpus -G --gpus-per-node --gpus-per-task",
    "gres_type": "--gres",
    "slurm_partition": "--partition -p",
    "constraint": "--constraint -C",
    "qos": "--qos -q",
    "account": "--account -A",
    "reservation": "--reservation",
    "exclusive": "--exclusive",
    "exclude": "--exclude -x",
    "network.srun_network": "--network",
    "licenses": "--licenses -L",
    "job.walltime_min": "--time -t",
    "job.drain_s": "--signal",
    "job.num_jobs": "--dependency -d --requeue --no-requeue",
    "exports": "--export",
    "campaigns_dir": "--output -o --open-mode",
    "the name of the campaign": "--job-name -J --comment",
    "its batch script": "--array -a --wrap --chdir -D --uid --gid --input -i --error -e --test-only --wait -W",
}
FLAG_KEYS = {flag: key for key, flags in _KEYS_WITH_FLAGS.items() for flag in flags.split()}
"""The key of a recipe or site, or what else hpcrl makes a flag of, by the long or short form of the flag."""
MIN_ABBREVIATION = 5
"""The least length of an abbreviation, with its dashes."""
_SCRIPT_FLAGS = ("--time", "--signal", "--no-requeue", "--export", "--output", "--job-name", EXCLUDE_FLAG, "--wrap")
"""Flags that batch scripts have besides those of components, or may have."""


class PerNode(NamedTuple):
    """The resources requested on every node."""

    cpus: int
    mem_gib: int
    gpus: int


class JobComponent(msgspec.Struct, frozen=True, kw_only=True):
    """A het group of the job, as requested from Slurm, or a share of the nodes of a single allocation."""

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
    """All sbatch flags of this component; of the whole allocation where components share one."""

    @property
    def num_gpus(self) -> int:
        """The GPUs of all its nodes, which are charged whether roles use them or not."""
        return self.nodes * self.gpus_per_node


class RewardJobPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The separate jobs for rewards, of one node each."""

    partition: str
    """The site's name for it."""
    max_jobs: int
    workers_per_job: int
    walltime_min: int
    slurm_flags: list[str] = []


def find_account(site: Site, partition: SitePartition) -> str | None:
    """Return the account that is charged on a partition; None if none is given, or an empty one."""
    if own := (partition.account or "").strip():
        return own
    return shared + partition.account_suffix if (shared := (site.account or "").strip()) else None


def make_component(
    index: int,
    role: RoleName,
    choice: PartitionChoice,
    recipe: Recipe,
    site: Site,
    *,
    account: str | None,
    is_job: bool = False,
) -> JobComponent:
    """Make the het group of one role, or a separate job, which has the flags of every job."""
    per_node = _per_node([(role, choice)], recipe, site)
    return _build_component(
        index, role, choice, site, per_node=per_node, nodes=choice.nodes, account=account, is_job=is_job
    )


def make_shared_components(
    choices: dict[RoleName, PartitionChoice], recipe: Recipe, site: Site, *, account: str | None
) -> list[JobComponent]:
    """Make the components of one allocation on one partition, whose nodes all have the same resources."""
    per_node = _per_node(list(choices.items()), recipe, site)
    nodes = sum(choice.nodes for choice in choices.values())
    return [
        _build_component(index, role, choices[role], site, per_node=per_node, nodes=nodes, account=account)
        for index, role in enumerate(recipe.placed_roles)
    ]


def _per_node(placed: Sequence[tuple[RoleName, PartitionChoice]], recipe: Recipe, site: Site) -> PerNode:
    """Return enough for the largest of these roles, or the whole node."""
    partition = site.partitions[placed[0][1].partition]
    if partition.exclusive:
        return PerNode(partition.cores_per_node, int(partition.mem_gib_per_node), partition.gpus_per_node)
    needs = [
        compute_node_needs(role, recipe, workers_per_node=choice.workers_per_node, has_couriers=site.mpi.couriers)
        for role, choice in placed
    ]
    gpus = max(choice.gpus_per_worker * choice.workers_per_node for _, choice in placed)
    cpus, mem_gib = max(cpus for cpus, _ in needs), max(mem_gib for _, mem_gib in needs)
    return _add_gpu_shares(PerNode(cpus, mem_gib, gpus), partition)


def _add_gpu_shares(needs: PerNode, partition: SitePartition) -> PerNode:
    """Return what is requested, with at least the cores and the memory that belong to each GPU.

    They are the site's numbers, else the GPU's share of the node, which other jobs have little use for.
    """
    if not needs.gpus:
        return needs
    cores = partition.cores_per_gpu or partition.cores_per_node / partition.gpus_per_node
    given_gib = ceil(needs.gpus * (partition.mem_gib_per_gpu or 0))
    mem_gib = given_gib or int(needs.gpus * partition.mem_gib_per_node / partition.gpus_per_node)
    return PerNode(max(needs.cpus, int(needs.gpus * cores)), max(needs.mem_gib, mem_gib), needs.gpus)


def _build_component(
    index: int,
    role: RoleName,
    choice: PartitionChoice,
    site: Site,
    *,
    per_node: PerNode,
    nodes: int,
    account: str | None,
    is_job: bool = False,
) -> JobComponent:
    """Build a component; `nodes` is the number requested from Slurm, of which this role may have only a share."""
    partition = site.partitions[choice.partition]
    flags = make_slurm_flags(nodes, per_node, choice.partition, account=account, site=site)
    if not index or is_job:
        flags += list_job_flags(site, flags)
    return JobComponent(
        index=index,
        partition=choice.partition,
        roles=["env", "reward"] if role == "env" else [role],
        nodes=choice.nodes,
        cpus_per_node=per_node.cpus,
        mem_gib_per_node=per_node.mem_gib,
        gpus_per_node=per_node.gpus,
        gpu=partition.gpu if per_node.gpus else None,
        slurm_flags=flags,
    )


def list_job_flags(site: Site, flags: Sequence[str]) -> list[str]:
    """Return the flags of a job besides those of its first component."""
    licenses = _list_license_flags(site)
    _refuse_own_flags(site.job_flags, own=[*flags, *licenses], place=f"site {site.name!r} has job_flags")
    return [*licenses, *site.job_flags]


def _refuse_own_flags(further: Sequence[str], *, own: Sequence[str], place: str) -> None:
    """Refuse further flags that contradict those of hpcrl: Slurm would take the last of them."""
    keys = {FLAG_KEYS.get(name) for flag in (*own, *_SCRIPT_FLAGS) for name in _find_flag_names(flag)}
    if "gres_type" in keys:
        keys.add("gpus_per_node")
    for flag in (one for one in further if one not in own):
        for name in map(_complete_flag, _find_flag_names(flag)):
            if (key := FLAG_KEYS.get(name)) in keys and key is not None:
                raise PlanError(f"{place} with {flag!r}, which hpcrl sets from {key}: set that, and remove the flag")


def _complete_flag(name: str) -> str:
    """Return the flag that Slurm takes an abbreviation for, such as `--time` for `--tim`."""
    if name in FLAG_KEYS or not name.startswith("--") or len(name) < MIN_ABBREVIATION:
        return name
    return next((flag for flag in FLAG_KEYS if flag.startswith(name)), name)


def _find_flag_names(text: str) -> list[str]:
    """Return the names of the flags of a text, such as `--nodes` and `-p` of `--nodes=4 -p x`."""
    return re.findall(r"(?<!\S)(?:--[\w-]+|-[A-Za-z])", text)


def _list_license_flags(site: Site) -> list[str]:
    return [f"--licenses={','.join(site.licenses)}"] if site.licenses else []


def make_colocated_component(
    choices: dict[RoleName, PartitionChoice], recipe: Recipe, site: Site, *, account: str | None
) -> JobComponent:
    """Make the component of a node with all roles, or of several that are alike."""
    choice = next(iter(choices.values()))
    partition = site.partitions[choice.partition]
    whole = PerNode(partition.cores_per_node, int(partition.mem_gib_per_node), partition.gpus_per_node)
    cpus, mem_gib, _ = sum_node_needs(choices, recipe)
    needs = PerNode(cpus, mem_gib, count_dealt_gpus(choices))
    per_node = whole if partition.exclusive else _add_gpu_shares(needs, partition)
    component = _build_component(0, "env", choice, site, per_node=per_node, nodes=choice.nodes, account=account)
    return msgspec.structs.replace(component, roles=recipe.planned_roles)


def make_local_component(recipe: Recipe, site: Site, choices: dict[RoleName, PartitionChoice]) -> JobComponent:
    """Make one component with all roles; its partition bounds each of them, not their sum (roles idle in turns)."""
    placed = recipe.placed_roles
    needs = [compute_node_needs(role, recipe, workers_per_node=choices[role].workers_per_node) for role in placed]
    partition = site.partitions[choices[placed[0]].partition]
    num_gpus = count_dealt_gpus(choices)
    return JobComponent(
        index=0,
        gpus_per_node=num_gpus,
        gpu=partition.gpu if num_gpus else None,
        partition=choices[placed[0]].partition,
        roles=recipe.planned_roles,
        nodes=1,
        cpus_per_node=sum(cpus for cpus, _ in needs),
        mem_gib_per_node=sum(mem for _, mem in needs),
    )


def plan_reward_jobs(recipe: Recipe, site: Site) -> tuple[RewardJobPlan | None, list[str]]:
    """Choose the preemptible partition for reward jobs, or return a fallback message where there is none."""
    if recipe.reward.placement != "elastic" or not recipe.has_rollouts:
        return None, []
    resources = recipe.resources.reward
    local = site.scheduler == "local"
    if not site.nodes_may_submit:
        return None, [f"rewards wanted separate jobs, got spare cores: nodes of site {site.name} may not submit jobs"]
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
            slurm_flags=[] if local else _make_reward_flags(per_node, label, account=account, site=site),
        )
        return jobs, []
    why = f"site {site.name} has no preemptible CPU partition that holds one of their workers"
    return None, [f"rewards wanted separate jobs, got spare cores: {why}"]


def _make_reward_flags(per_node: PerNode, label: str, *, account: str | None, site: Site) -> list[str]:
    return [*make_slurm_flags(1, per_node, label, account=account, site=site), *_list_license_flags(site)]


def make_memory_flags(partition: SitePartition, mem_gib: int) -> list[str]:
    """Return the flag for the memory of a node: without one a whole node has Slurm's default, a few GiB a core."""
    if not partition.mem_flag:
        return []
    return [WHOLE_MEMORY if partition.exclusive else f"--mem={mem_gib}G"]


def make_slurm_flags(nodes: int, per_node: PerNode, label: str, *, account: str | None, site: Site) -> list[str]:
    """Return the sbatch flags of a component on a partition; Slurm copies none to the next, so each needs all."""
    partition = site.partitions[label]
    cpus, mem_gib, gpus = per_node
    flags = [f"--nodes={nodes}", "--ntasks-per-node=1", f"--cpus-per-task={cpus * partition.threads_per_core}"]
    chosen = {
        "partition": partition.slurm_partition,
        "constraint": partition.constraint,
        "qos": partition.qos,
        "account": account,
        "reservation": partition.reservation,
    }
    flags += [f"--{name}={value}" for name, value in chosen.items() if value]
    flags += make_memory_flags(partition, mem_gib)
    if partition.exclusive:
        flags.append("--exclusive")
    if gpus:
        kind = f"{partition.gres_type}:" if partition.gres_type else ""
        flags.append(f"--gres=gpu:{kind}{gpus}" if partition.gpu_request == "gres" else f"--gpus-per-node={kind}{gpus}")
    if partition.exclude:
        flags.append(f"{EXCLUDE_FLAG}{','.join(partition.exclude)}")
    if site.network.srun_network:
        flags.append(f"--network={site.network.srun_network}")
    _refuse_own_flags(
        partition.extra_flags, own=flags, place=f"partitions.{label} of site {site.name!r} has extra_flags"
    )
    return [*flags, *partition.extra_flags]
