"""Choose the layout of a job, and a partition for every role. Pure.

place_roles       choose both for a recipe on a site
JobPlacement      the result
find_engine_gpus  the GPUs of its engines
JobLayout         one of:

"hetjob"      a heterogeneous job: a component for each role, on the kind of node that fits it; the first choice
"hetstep"     one allocation on one partition, its nodes split among the roles: for sites without heterogeneous
              jobs, and for an MPI that cannot span components
"local"       one machine without a scheduler
"""

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

from hpcrl.config.recipe import Recipe, RoleName, name_role_resources
from hpcrl.config.site import Site
from hpcrl.errors import PlanError
from hpcrl.hardware import memory_model
from hpcrl.hardware.gpus import GPU_CATALOGUE
from hpcrl.plan.components import list_placed_roles
from hpcrl.plan.demand import (
    compute_node_needs,
    compute_role_demand,
    compute_window_gib,
    estimate_trainer_node,
    list_memory_needs,
)
from hpcrl.plan.partitions import PartitionChoice, choose_partition, evaluate_partition
from hpcrl.plan.sizing import WorkerNumbers, find_worker_numbers, with_single_workers
from hpcrl.plan.trainer_memory import explain_trainer_refusal

JobLayout = Literal["hetjob", "hetstep", "local"]


@dataclass(frozen=True, kw_only=True)
class JobPlacement:
    """The layout and partitions for a recipe, and the reasons."""

    layout: JobLayout
    reason: str
    recipe: Recipe
    """The recipe with all numbers of workers filled in."""
    sizes: list[str]
    choices: dict[RoleName, PartitionChoice]
    warnings: list[str]

    def fallbacks(self) -> list[str]:
        """Return the compromises, role by role."""
        return [choice.fallback for choice in self.choices.values() if choice.fallback]


def place_roles(recipe: Recipe, site: Site) -> JobPlacement:
    """Choose the layout that the site and the recipe allow, and a partition for every role."""
    layout, reason = _choose_layout(recipe, site)
    if layout == "hetstep" and recipe.has_rollouts:
        return _one_partition_for_all(recipe, site, reason=reason)
    placement = _best_partition_each(recipe, site, layout=layout, reason=reason)
    return replace(placement, warnings=_find_warnings(recipe, site)) if layout == "hetjob" else placement


def _choose_layout(recipe: Recipe, site: Site) -> tuple[JobLayout, str]:
    if site.scheduler == "local":
        return "local", f"site {site.name} has no scheduler: every role is a process of this machine"
    if not recipe.has_rollouts:
        return "hetstep", "nothing is played: the trainer is the only component, in a plain allocation"
    match recipe.job.layout, site.het_jobs:
        case "hetstep", _:
            return "hetstep", 'the recipe asks for one allocation (job.layout = "hetstep")'
        case "hetjob", "no":
            raise PlanError(
                f'job.layout = "hetjob", and site {site.name!r} runs no heterogeneous jobs (het_jobs = "no"): '
                'set job.layout = "auto", or choose another site'
            )
        case _, "no":
            return "hetstep", f'site {site.name} runs no heterogeneous jobs (het_jobs = "no"): one allocation for all'
        case _, "unknown":
            return "hetjob", "the first choice wherever it is not known to be refused"
        case _, "yes":
            return "hetjob", f"site {site.name} runs heterogeneous jobs: one component per kind of node"


def _find_warnings(recipe: Recipe, site: Site) -> list[str]:
    """Return what may fail in a heterogeneous job, or would work better in one allocation."""
    found = []
    if site.het_jobs == "unknown":
        found.append(
            f"it is not confirmed that {site.name} runs heterogeneous jobs: try `hpcrl submit --dry-run` first"
        )
    mpi = site.mpi
    carries = mpi.couriers and mpi.flavour != "none"
    if (
        carries
        and mpi.world_over_components == "no"
        and recipe.job.layout == "auto"
        and _fits_one_partition(recipe, site)
    ):
        found.append(
            f"MPI does not span the components of a heterogeneous job on {site.name}, so weights go by TCP: with "
            'job.layout = "hetstep" they go by MPI, in one allocation on one partition'
        )
    return found


def _fits_one_partition(recipe: Recipe, site: Site) -> bool:
    try:
        _one_partition_for_all(recipe, site, reason="")
    except PlanError:
        return False
    return True


def _best_partition_each(recipe: Recipe, site: Site, *, layout: JobLayout, reason: str) -> JobPlacement:
    """Place every role on the partition that suits it best; roles choose in the order of `list_placed_roles`."""
    on_one_machine = layout == "local"
    gpus = find_engine_gpus(_choose_partitions(with_single_workers(recipe), site, one_machine=on_one_machine), site)

    def keeps_gpus(smaller: Recipe) -> bool:
        try:
            return find_engine_gpus(_choose_partitions(smaller, site, one_machine=on_one_machine), site) == gpus
        except PlanError:
            return False

    recipe, sizes = _find_most_workers(find_worker_numbers(recipe, gpus=gpus), keeps_gpus)
    choices = _choose_partitions(recipe, site, one_machine=on_one_machine)
    return JobPlacement(layout=layout, reason=reason, recipe=recipe, sizes=sizes, choices=choices, warnings=[])


def _find_most_workers(numbers: WorkerNumbers, fits: Callable[[Recipe], bool]) -> tuple[Recipe, list[str]]:
    """Fill in the most workers that fit, by bisection: fewer fit wherever more do; else one of each."""
    downwards = range(numbers.largest, 1, -1)
    tried = bisect_left(downwards, True, key=lambda most: fits(numbers.limit(most)[0]))
    return numbers.limit(numbers.largest - tried)


def _choose_partitions(recipe: Recipe, site: Site, *, one_machine: bool) -> dict[RoleName, PartitionChoice]:
    """Choose the best partition for each role that has the memory, and still has room after the earlier roles."""
    choices: dict[RoleName, PartitionChoice] = {}
    taken: dict[str, int] = {}
    for role in list_placed_roles(recipe):
        choice = choices[role] = choose_partition(
            compute_role_demand(role, recipe, one_machine=one_machine),
            site,
            taken=taken,
            check_memory=partial(_explain_memory_refusal, role, recipe, site=site),
        )
        if not one_machine:
            taken[choice.partition] = taken.get(choice.partition, 0) + choice.nodes
    return choices


def _one_partition_for_all(recipe: Recipe, site: Site, *, reason: str) -> JobPlacement:
    """Place all roles on the partition with the fewest compromises; among equals the site's order decides."""
    found: list[JobPlacement] = []
    refusals: list[str] = []
    for label, partition in site.partitions.items():
        if not partition.preemptible:
            placed = _place_all_in(label, recipe, site, reason=reason)
            if isinstance(placed, JobPlacement):
                found.append(placed)
            else:
                refusals.append(placed)
    if not found:
        raise PlanError(
            f"{reason}, and no partition of {site.name} can hold them: {'; '.join(refusals)}. "
            "Lower what is refused, or choose another site"
        )
    return min(found, key=lambda placement: len(placement.fallbacks()))


def _place_all_in(label: str, recipe: Recipe, site: Site, *, reason: str) -> JobPlacement | str:
    """Place all roles on one partition, or return why it cannot hold them."""
    longest = site.partitions[label].max_walltime_min
    if recipe.job.walltime_min > longest:
        return f"{label} allows {longest} min, and job.walltime_min = {recipe.job.walltime_min}"

    one_each = _choose_nodes_in(label, with_single_workers(recipe), site)
    if isinstance(one_each, str):
        return one_each

    def keeps_gpus(smaller: Recipe) -> bool:
        return not isinstance(_choose_nodes_in(label, smaller, site), str)

    try:
        numbers = find_worker_numbers(recipe, gpus=find_engine_gpus(one_each, site))
    except PlanError as error:  # only about this partition: another may fit
        return f"{label}: {error}"
    recipe, sizes = _find_most_workers(numbers, keeps_gpus)
    choices = _choose_nodes_in(label, recipe, site)
    if isinstance(choices, str):
        return choices
    trainer_first = sorted(choices, key=lambda role: role != "train")
    refusals = (_explain_memory_refusal(role, recipe, choices[role], site=site) for role in trainer_first)
    if (refusal := next(filter(None, refusals), None)) is not None:
        return refusal
    return JobPlacement(layout="hetstep", reason=reason, recipe=recipe, sizes=sizes, choices=choices, warnings=[])


def _choose_nodes_in(label: str, recipe: Recipe, site: Site) -> dict[RoleName, PartitionChoice] | str:
    """Choose nodes of one partition for each role, or return why they are too few."""
    choices: dict[RoleName, PartitionChoice] = {}
    for role in list_placed_roles(recipe):
        taken = {label: sum(choice.nodes for choice in choices.values())}
        choice = evaluate_partition(label, compute_role_demand(role, recipe, one_machine=False), site, taken=taken)
        if isinstance(choice, str):
            return choice
        choices[role] = choice
    return choices


def find_engine_gpus(choices: dict[RoleName, PartitionChoice], site: Site) -> dict[RoleName, str | None]:
    """Return the GPU type that workers of prefill and decode get."""
    engines: tuple[RoleName, ...] = ("prefill", "decode")
    return {
        role: site.partitions[choices[role].partition].gpu if choices[role].gpus_per_worker else None
        for role in engines
        if role in choices
    }


def _explain_memory_refusal(role: RoleName, recipe: Recipe, choice: PartitionChoice, *, site: Site) -> str | None:
    """Return why the models of a role and their KV do not fit into a worker or node; None if they do, or may."""
    if role == "train" and (refusal := explain_trainer_refusal(recipe, choice, site)) is not None:
        return refusal
    resources, table = recipe.role_resources(role), name_role_resources(role)
    gpu, num_gpus = site.partitions[choice.partition].gpu, choice.gpus_per_worker * choice.nodes_per_engine
    limit = GPU_CATALOGUE[gpu].memory_gib * num_gpus if gpu and num_gpus else resources.mem_gib_per_worker
    for need in list_memory_needs(recipe):
        if need.role == role and need.gib > limit:
            advice = f"raise {table}.mem_gib_per_worker"
            if gpu and num_gpus:
                advice = need.advice or f"raise {table}.gpus_per_worker"
            return (
                f"a {role} worker needs {need.gib:.0f} GiB for {need.what} and has {limit:.0f} GiB "
                f"({choice.partition}): {advice}"
            )
    return _explain_node_refusal(role, recipe, choice, site)


def _explain_node_refusal(role: RoleName, recipe: Recipe, choice: PartitionChoice, site: Site) -> str | None:
    """Return why the workers of a role need more memory than a node has; None if they do not."""
    _, needs_gib = compute_node_needs(
        role, recipe, workers_per_node=choice.workers_per_node, has_couriers=site.mpi.couriers
    )
    node_gib, table = site.partitions[choice.partition].mem_gib_per_node, name_role_resources(role)
    if needs_gib <= node_gib or recipe.model.num_weights is None:
        return None
    needs, has = f"a {role} node needs {needs_gib} GiB", f"has {node_gib:.0f} GiB ({choice.partition})"
    held = estimate_trainer_node(recipe, num_ranks=choice.workers_per_node) if role == "train" else None
    if held is None:
        window_gib = compute_window_gib(recipe)
        advice = f"lower {table}.mem_gib_per_worker"
        if window_gib > node_gib:
            advice = "choose a partition whose nodes have more memory"
        return f"{needs}, {window_gib:.0f} of them shared memory for two versions of the weights, and {has}: {advice}"
    if held.total < node_gib * memory_model.GIB:
        advice = f"lower {table}.mem_gib_per_worker"
    elif recipe.train.sharding == "full":
        advice = f"raise {table}.num_workers"
    else:
        advice = f'set train.sharding = "full" and raise {table}.num_workers'
    return (
        f"{needs}, {held.window / memory_model.GIB:.0f} of them shared memory for two versions of the weights and "
        f"{held.snapshot / memory_model.GIB:.0f} for the snapshot of a checkpoint, and {has}: {advice}"
    )
