"""Which layout a job has, and where in it every role goes. Pure.

    place       the answer, for a recipe on a site
    Placement   the answer

Layouts:
    hetjob      a heterogeneous job: a component for each role, on the kind of node that it wants; the first choice
    hetstep     one allocation on one partition, its nodes dealt to the roles: for sites that run no heterogeneous jobs,
                and for an MPI that cannot span components
    local       one machine without a scheduler
"""

from dataclasses import dataclass, replace
from typing import Literal

from hpcrl.config.recipe import Recipe, RoleName
from hpcrl.config.site import Site
from hpcrl.errors import PlanError
from hpcrl.hardware import memory_model
from hpcrl.hardware.gpus import GPUS
from hpcrl.plan.components import PLACED
from hpcrl.plan.demand import demand_of, node_needs
from hpcrl.plan.partitions import Choice, choose, choose_in
from hpcrl.plan.sizing import fitted, with_one

Layout = Literal["hetjob", "hetstep", "local"]


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Where a recipe goes, and why."""

    layout: Layout
    reason: str
    recipe: Recipe
    """With all numbers of workers."""
    sizes: list[str]
    choices: dict[RoleName, Choice]
    doubts: list[str]

    def fallbacks(self) -> list[str]:
        """What was compromised, role by role."""
        return [choice.fallback for choice in self.choices.values() if choice.fallback]


def place(recipe: Recipe, site: Site) -> Placement:
    """The layout that the site and the recipe allow, and a partition for every role."""
    layout, reason = _layout(recipe, site)
    if layout == "hetstep":
        return _together(recipe, site, reason=reason)
    placed = _apart(recipe, site, layout=layout, reason=reason)
    return replace(placed, doubts=_doubts(recipe, site)) if layout == "hetjob" else placed


def _layout(recipe: Recipe, site: Site) -> tuple[Layout, str]:
    if site.scheduler == "local":
        return "local", f"site {site.name} has no scheduler: every role is a process of this machine"
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


def _doubts(recipe: Recipe, site: Site) -> list[str]:
    """What may go wrong with a heterogeneous job, or would go better without."""
    found = []
    if site.het_jobs == "unknown":
        found.append(
            f"nobody has confirmed that {site.name} runs heterogeneous jobs: try `hpcrl submit --dry-run` first"
        )
    mpi = site.mpi
    carries = mpi.couriers and mpi.flavour != "none"
    if carries and mpi.world_over_components == "no" and recipe.job.layout == "auto" and _fit_together(recipe, site):
        found.append(
            f"MPI does not span the components of a heterogeneous job on {site.name}, so weights go by TCP: with "
            'job.layout = "hetstep" they go by MPI, in one allocation on one partition'
        )
    return found


def _fit_together(recipe: Recipe, site: Site) -> bool:
    try:
        _together(recipe, site, reason="")
    except PlanError:
        return False
    return True


def _apart(recipe: Recipe, site: Site, *, layout: Layout, reason: str) -> Placement:
    """Every role on the partition that suits it best; the order of PLACED decides who chooses first."""
    on_one_machine = layout == "local"
    gpus = _engine_gpus(_chosen(with_one(recipe), site, one_machine=on_one_machine), site)

    def fits(smaller: Recipe) -> bool:
        try:
            return _engine_gpus(_chosen(smaller, site, one_machine=on_one_machine), site) == gpus
        except PlanError:
            return False

    recipe, sizes = fitted(recipe, gpus=gpus, fits=fits)
    choices = _chosen(recipe, site, one_machine=on_one_machine)
    refusal = _memory_refusal(recipe, choices, site)
    if refusal is not None:
        raise PlanError(refusal)
    return Placement(layout=layout, reason=reason, recipe=recipe, sizes=sizes, choices=choices, doubts=[])


def _chosen(recipe: Recipe, site: Site, *, one_machine: bool) -> dict[RoleName, Choice]:
    """The best partition for each role that those before it have left room in."""
    choices: dict[RoleName, Choice] = {}
    taken: dict[str, int] = {}
    for role in PLACED:
        choice = choices[role] = choose(demand_of(role, recipe, one_machine=one_machine), site, taken=taken)
        if not one_machine:
            taken[choice.partition] = taken.get(choice.partition, 0) + choice.nodes
    return choices


def _together(recipe: Recipe, site: Site, *, reason: str) -> Placement:
    """All roles on the partition that asks for the fewest compromises; among equals the site's order decides."""
    found: list[Placement] = []
    refusals: list[str] = []
    for label, partition in site.partitions.items():
        if not partition.preemptible:
            placed = _all_in(label, recipe, site, reason=reason)
            if isinstance(placed, Placement):
                found.append(placed)
            else:
                refusals.append(placed)
    if not found:
        raise PlanError(
            f"{reason}, and no partition of {site.name} can hold them: {'; '.join(refusals)}. "
            "Lower what is refused, or choose another site"
        )
    return min(found, key=lambda placement: len(placement.fallbacks()))


def _all_in(label: str, recipe: Recipe, site: Site, *, reason: str) -> Placement | str:
    """All roles on one partition, or why it cannot be."""
    longest = site.partitions[label].max_walltime_min
    if recipe.job.walltime_min > longest:
        return f"{label} allows {longest} min, and job.walltime_min = {recipe.job.walltime_min}"

    one_each = _chosen_in(label, with_one(recipe), site)
    if isinstance(one_each, str):
        return one_each

    def fits(smaller: Recipe) -> bool:
        return not isinstance(_chosen_in(label, smaller, site), str)

    try:
        recipe, sizes = fitted(recipe, gpus=_engine_gpus(one_each, site), fits=fits)
    except PlanError as error:  # of this partition: another may do
        return f"{label}: {error}"
    choices = _chosen_in(label, recipe, site)
    if isinstance(choices, str):
        return choices
    refusal = _memory_refusal(recipe, choices, site)
    if refusal is not None:
        return refusal
    return Placement(layout="hetstep", reason=reason, recipe=recipe, sizes=sizes, choices=choices, doubts=[])


def _chosen_in(label: str, recipe: Recipe, site: Site) -> dict[RoleName, Choice] | str:
    """Nodes of one partition for each role, or why they are too few."""
    choices: dict[RoleName, Choice] = {}
    for role in PLACED:
        taken = {label: sum(choice.nodes for choice in choices.values())}
        choice = choose_in(label, demand_of(role, recipe, one_machine=False), site, taken=taken)
        if isinstance(choice, str):
            return choice
        choices[role] = choice
    return choices


def _engine_gpus(choices: dict[RoleName, Choice], site: Site) -> dict[RoleName, str | None]:
    """The GPUs that workers of prefill and decode get."""
    engines: tuple[RoleName, ...] = ("prefill", "decode")
    return {
        role: site.partitions[choices[role].partition].gpu if choices[role].gpus_per_worker else None
        for role in engines
    }


def _memory_refusal(recipe: Recipe, choices: dict[RoleName, Choice], site: Site) -> str | None:
    """Model and KV must fit into what a worker has, where the recipe says how large the model is."""
    num_params = recipe.model.num_params
    if num_params is None:
        return None
    needs = {
        "prefill": memory_model.engine_memory_gib(num_params),
        "decode": memory_model.engine_memory_gib(num_params),
        "train": memory_model.train_memory_gib(num_params, num_workers=recipe.resources.train.num_workers),
    }
    for role in ("prefill", "decode", "train"):
        choice, resources = choices[role], getattr(recipe.resources, role)
        gpu = site.partitions[choice.partition].gpu
        has = GPUS[gpu].memory_gib * choice.gpus_per_worker if gpu and choice.gpus_per_worker else None
        limit = has if has is not None else resources.mem_gib_per_worker
        if needs[role] > limit:
            cure = "gpus_per_worker" if has is not None else "mem_gib_per_worker"
            return (
                f"a {role} worker needs {needs[role]:.0f} GiB for {num_params / 1e9:.1f} billion weights and has "
                f"{limit:.0f} GiB ({choice.partition}): raise resources.{role}.{cure}"
            )
        _, wanted = node_needs(role, recipe, workers_per_node=choice.workers_per_node)
        there = site.partitions[choice.partition].mem_gib_per_node
        if wanted > there:
            return (
                f"a {role} node needs {wanted} GiB, {memory_model.window_memory_gib(num_params):.0f} of them "
                f"shared memory for two versions of the weights, and has {there:.0f} GiB ({choice.partition}): lower "
                f"resources.{role}.mem_gib_per_worker"
            )
    return None
