"""Choose the layout of a job, and a partition for every role. Pure.

place_roles    choose both for a recipe on a site
choose_pools   whether prefill has separate workers
JobPlacement   the result
JobLayout      one of:

"hetjob"      a heterogeneous job: a component for each role, on the kind of node that fits it; the first choice
"hetstep"     one allocation on one partition, its nodes split among the roles: for sites without heterogeneous
              jobs, or where these are not confirmed and all roles are on one partition anyway; and for an MPI that
              cannot span components
"colocated"   nodes that each have workers of all roles, its GPUs and cores split among them: for small jobs. One node
              where that is enough; if it has too few GPUs, trainer and engines use the same ones in turns
"multi-job"   a separate job for each component, the nodes as in a heterogeneous one: for sites without these where one
              partition cannot hold all roles; what starts first waits for the others
"local"       one machine without a scheduler
"""

import contextlib
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from math import ceil
from typing import Literal

import msgspec

from hpcrl.config.recipe import Recipe, RoleName
from hpcrl.config.site import Site
from hpcrl.errors import PlanError
from hpcrl.hardware.gpus import GpuModel
from hpcrl.plan.demand import (
    PartitionChoice,
    compute_role_demand,
    count_dealt_gpus,
    deal_gpus,
    sum_node_needs,
)
from hpcrl.plan.engine_nodes import ENGINE_ROLES
from hpcrl.plan.gpu_shifts import deal_in_shifts, describe_shifts
from hpcrl.plan.partitions import choose_partition, evaluate_partition, explain_memory_refusal
from hpcrl.plan.sizing import WorkerNumbers, find_worker_numbers, warn_busy_loops, with_single_workers

JobLayout = Literal["hetjob", "hetstep", "colocated", "multi-job", "local"]
SPREAD_LAYOUTS: tuple[JobLayout, ...] = ("hetjob", "multi-job")
"""The layouts in which each component is requested from Slurm by itself."""
MIN_SPLIT_NODES = 4
"""The GPU nodes from which prefill may have separate workers: one each for it, decode and training, and a spare."""


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


RoleChooser = Callable[[str, Recipe, Site], dict[RoleName, PartitionChoice] | str]
"""Chooses the nodes of a partition that each role gets, or returns why they are too few."""


def place_roles(recipe: Recipe, site: Site) -> JobPlacement:
    """Choose the layout that the site and the recipe allow, and a partition for every role."""
    _check_lasting_partitions(site)
    _check_longest_walltime(recipe, site)
    layout, reason = _choose_layout(recipe, site)
    placement = _place_in_layout(recipe, site, layout=layout, reason=reason)
    if site.het_jobs == "unknown" and recipe.job.layout == "auto":
        placement = _avoid_unconfirmed_job(placement, site)
    warnings = _find_warnings(recipe, site) if placement.layout == "hetjob" else []
    warnings += warn_busy_loops(placement.recipe, gpus=_find_engine_gpus(placement.choices, site))
    return replace(placement, warnings=warnings)


def _place_in_layout(asked: Recipe, site: Site, *, layout: JobLayout, reason: str) -> JobPlacement:
    recipe, pools = choose_pools(asked, site, is_one_partition=layout in ("hetstep", "colocated"))
    if layout == "colocated":
        placement = _share_nodes(recipe, site, reason=reason)
    elif layout != "local" and (small := _find_small_job(recipe, site)) is not None:
        placement = small
    else:
        placement = _place_on_nodes(recipe, site, layout=layout, reason=reason, asked=asked)
    if placement.layout == "multi-job" and layout == "hetstep":  # with pools of its own
        return placement
    return replace(placement, sizes=[*pools, *placement.sizes])


def _place_apart(recipe: Recipe, site: Site) -> JobPlacement:
    """Place each role on the partition that suits it, in a separate job."""
    recipe, pools = choose_pools(recipe, site, is_one_partition=False)
    reason = f"site {site.name} runs no heterogeneous jobs, and no partition can hold all roles: a job per component"
    placement = _best_partition_each(recipe, site, layout="multi-job", reason=reason)
    return replace(placement, sizes=[*pools, *placement.sizes])


def _check_lasting_partitions(site: Site) -> None:
    """Refuse a site on which Slurm may end every job in favour of others."""
    if all(partition.preemptible for partition in site.partitions.values()):
        labels = ", ".join(site.partitions)
        raise PlanError(
            f"all partitions of site {site.name!r} are preemptible ({labels}), where only reward jobs run: describe "
            "another one, or set preemptible = false in one whose jobs may take the loss of some work; the next job of "
            "job.num_jobs continues from the last checkpoint"
        )


def _check_longest_walltime(recipe: Recipe, site: Site) -> None:
    """Refuse a walltime that no partition allows, before the nodes are looked at."""
    longest = max(p.max_walltime_min for p in site.partitions.values() if not p.preemptible)
    if recipe.job.walltime_min > longest:
        raise PlanError(
            f"job.walltime_min = {recipe.job.walltime_min}, and site {site.name!r} allows {longest} at the most: lower "
            "it (`hpcrl resume` continues the campaign)"
        )


def _place_on_nodes(recipe: Recipe, site: Site, *, layout: JobLayout, reason: str, asked: Recipe) -> JobPlacement:
    """Place each role on separate nodes; where that is refused, on nodes that roles share, if these have room for all.

    Where a site runs no heterogeneous jobs, a separate job for each role comes first; it is for the recipe as it was
    asked for, before pools were chosen for one partition.
    """
    place = partial(_best_partition_each, recipe, site, layout=layout, reason=reason)
    if layout == "hetstep" and recipe.has_rollouts:
        place = partial(_one_partition_for_all, recipe, site, reason=reason)
    if layout == "local" or recipe.job.layout != "auto" or not recipe.has_rollouts:
        return place()
    apart = [partial(_place_apart, asked, site)] if layout == "hetstep" else []
    try:
        return _place_first([place, *apart])
    except PlanError as refusal:
        if recipe.job.survive_node_loss:
            raise
        try:
            return _share_nodes(recipe, site, reason=f"site {site.name} has too few nodes for roles on separate nodes")
        except PlanError as error:
            gpu_partitions = [partition for partition in site.partitions.values() if partition.gpu]
            is_small = all(partition.max_nodes < MIN_SPLIT_NODES for partition in gpu_partitions)
            raise PlanError(f"{refusal}. Nor otherwise: {error}" if is_small else str(refusal)) from None


def _share_nodes(recipe: Recipe, site: Site, *, reason: str) -> JobPlacement:
    """Place all roles on one node, each with its own GPUs, else on the fewest nodes that hold them.

    Where all nodes have too few GPUs, roles use the same ones of a node in turns.
    """
    if recipe.job.survive_node_loss:
        raise PlanError(f"job.survive_node_loss = true needs two nodes a role, and {reason}: remove one of them")
    ways = (_one_node_for_all, _several_nodes_for_all, _one_node_in_shifts)
    return _place_first([partial(place, recipe, site, reason=reason) for place in ways])


def _place_first(ways: Sequence[Callable[[], JobPlacement]]) -> JobPlacement:
    """Return the placement of the first way that is not refused; where all are, the first refusal counts."""
    first, *others = ways
    try:
        return first()
    except PlanError as refusal:
        for place in others:
            with contextlib.suppress(PlanError):
                return place()
        raise refusal from None


def choose_pools(recipe: Recipe, site: Site, *, is_one_partition: bool) -> tuple[Recipe, list[str]]:
    """Decide whether prefill has separate workers, where the recipe leaves it open; return the reason if not."""
    router = recipe.router
    if recipe.resources.prefill.num_workers != "auto" or not recipe.has_rollouts:
        return recipe, []
    if router.switch_roles or router.sizing == "auto":  # workers of two roles are what these switch
        return recipe, []
    if (why := _explain_one_pool(recipe, site, is_one_partition=is_one_partition)) is None:
        return recipe, []
    structs = msgspec.structs
    resources = structs.replace(recipe.resources, prefill=structs.replace(recipe.resources.prefill, num_workers=0))
    return structs.replace(recipe, resources=resources), [f"one pool of engines, without prefill workers: {why}"]


def _explain_one_pool(recipe: Recipe, site: Site, *, is_one_partition: bool) -> str | None:
    """Return why separate prefill workers are not worth it; None if they are."""
    if recipe.train.router_replay and recipe.engine.backend == "vllm":
        return "engines do not hand over the experts of a prompt with its KV (train.router_replay)"
    nodes = sum(p.max_nodes for p in site.partitions.values() if p.gpu and not p.preemptible)
    if not nodes:
        return f"site {site.name} has no GPUs"
    if is_one_partition or site.scheduler == "local":
        return "one partition has one kind of GPU"
    if nodes < MIN_SPLIT_NODES:
        return f"site {site.name} has {nodes} GPU nodes, and roles on separate nodes need {MIN_SPLIT_NODES}"
    try:
        choices = _choose_partitions(with_single_workers(recipe), site, one_machine=False)
    except PlanError:  # one pool may fit; else it is refused with what it lacks
        return "both do not fit"
    kinds = [site.partitions[choices[role].partition].gpu for role in ENGINE_ROLES if choices[role].gpus_per_worker]
    if len(set(kinds)) == 2:
        return None
    return f"prefill and decode would have the same kind of GPU ({kinds[0]})" if kinds else "engines have no GPUs"


def _choose_layout(recipe: Recipe, site: Site) -> tuple[JobLayout, str]:
    if site.scheduler == "local":
        return "local", f"site {site.name} has no scheduler: every role is a process of this machine"
    if not recipe.has_rollouts:
        return "hetstep", "nothing is played: the trainer is the only component, in a plain allocation"
    match recipe.job.layout, site.het_jobs:
        case "colocated", _:
            return "colocated", 'the recipe asks for nodes that roles share (job.layout = "colocated")'
        case "hetstep", _:
            return "hetstep", 'the recipe asks for one allocation (job.layout = "hetstep")'
        case "multi-job", _:
            return "multi-job", 'the recipe asks for a job per component (job.layout = "multi-job")'
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


def _avoid_unconfirmed_job(placement: JobPlacement, site: Site) -> JobPlacement:
    """Request the nodes of a heterogeneous job in one allocation, if all are on one partition."""
    labels = {choice.partition for choice in placement.choices.values()}
    if placement.layout != "hetjob" or len(labels) > 1:
        return placement
    reason = (
        f"all roles are on one partition ({labels.pop()}), and it is not confirmed that {site.name} runs heterogeneous "
        "jobs: one allocation for all"
    )
    return replace(placement, layout="hetstep", reason=reason)


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
    """Place every role on the partition that suits it best; roles choose in the order of `recipe.placed_roles`.

    Engines are sized for the GPUs that each role would get beside one worker of the others. More of them than leave
    these to the trainer would wait for slower training.
    """
    on_one_machine = layout == "local"
    singles = _choose_partitions(with_single_workers(recipe), site, one_machine=on_one_machine)
    sized_for = _find_sizing_basis(singles, site)

    def keeps_gpus(smaller: Recipe) -> bool:
        try:
            chosen = _choose_partitions(smaller, site, one_machine=on_one_machine)
        except PlanError:
            return False
        return _find_sizing_basis(chosen, site) == sized_for

    recipe, sizes = _find_most_workers(find_worker_numbers(recipe, gpus=_find_gpus(singles, site)), keeps_gpus)
    choices = _choose_partitions(recipe, site, one_machine=on_one_machine)
    if on_one_machine:
        choices = _share_machine(choices, recipe, site)
    return JobPlacement(layout=layout, reason=reason, recipe=recipe, sizes=sizes, choices=choices, warnings=[])


def _share_machine(
    choices: dict[RoleName, PartitionChoice], recipe: Recipe, site: Site
) -> dict[RoleName, PartitionChoice]:
    """Deal the GPUs of one machine; where they are too few, roles share some, which vLLM's servers cannot."""
    partition = site.partitions[choices["train"].partition]
    num_gpus = sum_node_needs(choices, recipe)[2]
    if num_gpus <= partition.gpus_per_node:
        return deal_gpus(choices, num_gpus=partition.gpus_per_node)
    few = f"all roles need {num_gpus} GPUs, and site {site.name} has {partition.gpus_per_node}"
    dealt = deal_in_shifts(choices, recipe, num_gpus=partition.gpus_per_node)
    if not isinstance(dealt, str):
        return dealt | {"train": replace(dealt["train"], fallback=f"{few}: {describe_shifts(dealt)[0]}")}
    engines = (recipe.engine, *(judge.engine for judge in recipe.judge.values()))
    if recipe.train.trainer == "megatron" or any(engine.backend == "vllm" for engine in engines):
        raise PlanError(f"{few}; {dealt}: lower num_workers or gpus_per_worker in [resources]")
    dealt = deal_gpus(choices, num_gpus=partition.gpus_per_node)
    return dealt | {"train": replace(dealt["train"], fallback=f"{few}: roles share them, and their memory")}


def _find_most_workers(numbers: WorkerNumbers, fits: Callable[[Recipe], bool]) -> tuple[Recipe, list[str]]:
    """Fill in the most workers that fit, by bisection: fewer fit wherever more do; else one of each."""
    downwards = range(numbers.largest, 1, -1)
    tried = bisect_left(downwards, True, key=lambda most: fits(numbers.limit(most)[0]))
    return numbers.limit(numbers.largest - tried)


def _choose_partitions(recipe: Recipe, site: Site, *, one_machine: bool) -> dict[RoleName, PartitionChoice]:
    """Choose the best partition for each role that has the memory, and still has room after the earlier roles."""
    choices: dict[RoleName, PartitionChoice] = {}
    taken: dict[str, int] = {}
    for role in recipe.placed_roles:
        choice = choices[role] = choose_partition(
            compute_role_demand(role, recipe, one_machine=one_machine), recipe, site, taken=taken
        )
        if not one_machine:
            taken[choice.partition] = taken.get(choice.partition, 0) + choice.nodes
    return choices


def _one_partition_for_all(recipe: Recipe, site: Site, *, reason: str) -> JobPlacement:
    """Place all roles on the partition with the fewest compromises; among equals the site's order decides."""
    return _place_in_best(
        site,
        lambda label: _place_in_partition(
            label, recipe, site, choose=_choose_nodes_in, layout="hetstep", reason=reason
        ),
        refusal=f"{reason}, and no partition of {site.name} can hold them",
        advice="Lower what is refused, or choose another site",
    )


def _place_in_best(
    site: Site, place: Callable[[str], JobPlacement | str], *, refusal: str, advice: str
) -> JobPlacement:
    """Return the placement with the fewest compromises of those that `place` finds in single partitions."""
    found: list[JobPlacement] = []
    refusals: list[str] = []
    for label, partition in site.partitions.items():
        if not partition.preemptible:
            placed = place(label)
            if isinstance(placed, JobPlacement):
                found.append(placed)
            else:
                refusals.append(placed)
    if not found:
        raise PlanError(f"{refusal}: {'; '.join(refusals)}. {advice}")
    return min(found, key=lambda placement: len(placement.fallbacks()))


def _place_in_partition(
    label: str,
    recipe: Recipe,
    site: Site,
    *,
    choose: RoleChooser,
    layout: JobLayout,
    reason: str,
    has_all: bool = False,
) -> JobPlacement | str:
    """Place all roles on the nodes of a partition that `choose` gives them, or return why it cannot hold them."""
    longest = site.partitions[label].max_walltime_min
    if recipe.job.walltime_min > longest:
        return f"{label} allows {longest} min, and job.walltime_min = {recipe.job.walltime_min}"

    one_each = choose(label, with_single_workers(recipe), site)
    if isinstance(one_each, str):
        return one_each

    def may_fit(smaller: Recipe) -> bool:
        return not isinstance(choose(label, smaller, site), str)

    try:
        numbers = find_worker_numbers(recipe, gpus=_find_gpus(one_each, site))
    except PlanError as error:  # only about this partition: another may fit
        return f"{label}: {error}"
    recipe, sizes = numbers.limit(numbers.largest) if has_all else _find_most_workers(numbers, may_fit)
    choices = choose(label, recipe, site)
    if isinstance(choices, str):
        return choices
    trainer_first = sorted(choices, key=lambda role: role != "train")
    refusals = (explain_memory_refusal(role, recipe, choices[role], site) for role in trainer_first)
    if (refusal := next(filter(None, refusals), None)) is not None:
        return refusal
    return JobPlacement(layout=layout, reason=reason, recipe=recipe, sizes=sizes, choices=choices, warnings=[])


def _find_small_job(recipe: Recipe, site: Site) -> JobPlacement | None:
    """Place all roles on one node if that has all that they could use, and no role would gain from other nodes."""
    is_open = recipe.job.layout == "auto" and not recipe.job.survive_node_loss
    if not is_open or not recipe.has_rollouts or recipe.has_prefill:
        return None
    try:
        placement = _one_node_for_all(recipe, site, reason="", has_all=True)
    except PlanError:
        return None
    choice = placement.choices["train"]
    partition, gpus = site.partitions[choice.partition], count_dealt_gpus(placement.choices)
    uses = f"{gpus} of its {partition.gpus_per_node} GPUs" if gpus else "its cores"
    reason = f"one node of {choice.partition} is enough for all roles, with {uses}: they share its memory for weights"
    return replace(placement, reason=reason)


def _one_node_for_all(recipe: Recipe, site: Site, *, reason: str, has_all: bool = False) -> JobPlacement:
    """Place all roles on one node of the partition with the fewest compromises; among equals the site's order decides.

    With `has_all` only where open numbers of workers need not be lowered.
    """
    return _place_in_best(
        site,
        lambda label: _place_in_partition(
            label, recipe, site, choose=_choose_on_node, layout="colocated", reason=reason, has_all=has_all
        ),
        refusal=f"{reason}, and no node of {site.name} can hold all roles",
        advice='Lower what is refused, or set job.layout = "auto"',
    )


def _several_nodes_for_all(recipe: Recipe, site: Site, *, reason: str) -> JobPlacement:
    """Place all roles on the fewest nodes of a partition that hold them, each on all of these.

    That is with all workers that roles could use, if they are enough for these. More nodes than a role has workers hold
    no more. Where the layout is open, it is for partitions of few nodes.
    """
    single = with_single_workers(recipe)
    most = max(single.role_resources(role).num_workers for role in recipe.placed_roles)
    for has_all, num_nodes in product((True, False), range(2, most + 1)):
        place = partial(_place_on_shared_nodes, recipe=recipe, site=site, num_nodes=num_nodes, has_all=has_all)
        with contextlib.suppress(PlanError):
            return _place_in_best(
                site,
                partial(place, reason=reason),
                refusal=f"{num_nodes} nodes of {site.name} cannot hold all roles",
                advice="Lower what is refused",
            )
    raise PlanError(f"{most} nodes of {site.name} cannot hold all roles")


def _place_on_shared_nodes(
    label: str, *, recipe: Recipe, site: Site, num_nodes: int, has_all: bool, reason: str
) -> JobPlacement | str:
    has = site.partitions[label].max_nodes
    if num_nodes > has or (recipe.job.layout == "auto" and has >= MIN_SPLIT_NODES):
        return f"{label} has {has} nodes"
    choose = partial(_choose_on_node, num_nodes=num_nodes)
    placed = _place_in_partition(label, recipe, site, choose=choose, layout="colocated", reason=reason, has_all=has_all)
    if isinstance(placed, str):
        return placed
    why = f"{num_nodes} nodes of {label} hold all roles, each of them on all nodes: weights go by files"
    return replace(placed, reason=f"{reason}; {why}")


def _one_node_in_shifts(recipe: Recipe, site: Site, *, reason: str) -> JobPlacement:
    """Place all roles on one node, on whose GPUs the trainer and engines work in turns."""
    placement = _place_in_best(
        site,
        lambda label: _place_in_partition(
            label, recipe, site, choose=_choose_on_node_in_shifts, layout="colocated", reason=reason
        ),
        refusal="no node can hold all roles in turns",
        advice="Lower what is refused",
    )
    return replace(placement, sizes=[*placement.sizes, *describe_shifts(placement.choices)])


def _choose_on_node(
    label: str, recipe: Recipe, site: Site, *, num_nodes: int = 1
) -> dict[RoleName, PartitionChoice] | str:
    """Distribute all roles to a node of a partition, or to each of several, or return why it is too small."""
    choices = _fit_on_node(label, recipe, site, num_nodes=num_nodes)
    if isinstance(choices, str):
        return choices
    num_gpus = site.partitions[label].gpus_per_node
    return _explain_small_node(label, choices, recipe, site) or deal_gpus(choices, num_gpus=num_gpus)


def _choose_on_node_in_shifts(label: str, recipe: Recipe, site: Site) -> dict[RoleName, PartitionChoice] | str:
    """Distribute all roles to one node, the trainer and engines to the same GPUs, or return why it is too small."""
    choices = _fit_on_node(label, recipe, site)
    if isinstance(choices, str):
        return choices
    dealt = deal_in_shifts(choices, recipe, num_gpus=site.partitions[label].gpus_per_node)
    return dealt if isinstance(dealt, str) else _explain_small_node(label, dealt, recipe, site, is_dealt=True) or dealt


def _fit_on_node(
    label: str, recipe: Recipe, site: Site, *, num_nodes: int = 1
) -> dict[RoleName, PartitionChoice] | str:
    """Return what each role takes of a node of a partition, as if it was there alone, or why it does not fit.

    On several nodes each has an equal share of the workers of every role.
    """
    choices: dict[RoleName, PartitionChoice] = {}
    for role in recipe.placed_roles:
        demand = compute_role_demand(role, recipe, one_machine=True)
        num_workers = ceil(demand.resources.num_workers / num_nodes)
        share = replace(demand, resources=msgspec.structs.replace(demand.resources, num_workers=num_workers))
        choice = evaluate_partition(label, share, site, taken={})
        if isinstance(choice, str):
            return choice
        if choice.nodes > 1:
            return f"{role}: its workers need {choice.nodes} nodes of {label}"
        choice = replace(choice, nodes=num_nodes)
        choices[role] = replace(choice, fallback=None) if role == "env" else choice  # spare cores are what it wants
    return choices


def _explain_small_node(
    label: str, choices: dict[RoleName, PartitionChoice], recipe: Recipe, site: Site, *, is_dealt: bool = False
) -> str | None:
    """Return what a node has too little of for all roles; GPUs that were dealt are enough."""
    partition = site.partitions[label]
    has = (partition.cores_per_node, partition.mem_gib_per_node, partition.gpus_per_node)
    for need, limit, unit in zip(sum_node_needs(choices, recipe), has, ("cores", "GiB", "GPUs"), strict=True):
        if need > limit and not (is_dealt and unit == "GPUs"):
            return f"all roles need {need} {unit}, and a node of {label} has {limit:g}"
    return None


def _choose_nodes_in(label: str, recipe: Recipe, site: Site) -> dict[RoleName, PartitionChoice] | str:
    """Choose nodes of one partition for each role, or return why they are too few."""
    choices: dict[RoleName, PartitionChoice] = {}
    for role in recipe.placed_roles:
        taken = {label: sum(choice.nodes for choice in choices.values())}
        choice = evaluate_partition(label, compute_role_demand(role, recipe, one_machine=False), site, taken=taken)
        if isinstance(choice, str):
            return choice
        choices[role] = choice
    return choices


def _find_engine_gpus(choices: dict[RoleName, PartitionChoice], site: Site) -> dict[RoleName, GpuModel | None]:
    """Return the GPU type that workers of prefill and decode get."""
    return {role: gpu for role, gpu in _find_gpus(choices, site).items() if role in ENGINE_ROLES}


def _find_sizing_basis(choices: dict[RoleName, PartitionChoice], site: Site) -> tuple[object, ...]:
    """Return what the numbers of engines follow from: the GPU types of engines, the speed of the trainer's."""
    trainer = _find_gpus(choices, site).get("train")
    return _find_engine_gpus(choices, site), trainer and (trainer.bf16_tflops, trainer.fit)


def _find_gpus(choices: dict[RoleName, PartitionChoice], site: Site) -> dict[RoleName, GpuModel | None]:
    """Return the GPU type that workers of each role get."""
    return {
        role: site.find_gpu(site.partitions[choice.partition].gpu) if choice.gpus_per_worker else None
        for role, choice in choices.items()
    }
