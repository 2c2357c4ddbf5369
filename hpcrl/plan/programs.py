"""The check that the programs of agents, at their limits, fit into the nodes of the env role. Pure.

check_programs   refuse a program that fits no node; return warnings where those that run at once do not
warn_foreign_images   return warnings of images that may be made for other CPUs

Limits are not reserved: `env_memory_gib` is, which decides how many programs run at once. Where all of them may exceed
the node together, the kernel would end some process, which may be any.
"""

from collections.abc import Collection, Iterator
from math import ceil

from hpcrl.config.program import (
    AGENT_PROGRAM,
    ProgramLimits,
    is_registry_image,
    read_program_limits,
    reserves_place,
)
from hpcrl.config.recipe import Recipe
from hpcrl.config.site import Site, SitePartition
from hpcrl.errors import PlanError
from hpcrl.hardware import memory_model
from hpcrl.plan.components import JobComponent
from hpcrl.plan.demand import compute_node_needs


def check_programs(recipe: Recipe, site: Site, component: JobComponent, *, workers_per_node: int) -> list[str]:
    """Compare what programs may use with a node of `component`, where the env workers are."""
    limits = {name: each for name, domain in recipe.domains.items() if (each := read_program_limits(domain))}
    if not limits:
        return []
    partition = site.partitions[component.partition]
    is_local = site.scheduler == "local"
    env_gib = compute_node_needs("env", recipe, workers_per_node=workers_per_node)[1]
    planned_gib = component.mem_gib_per_node if "train" in component.roles else env_gib
    own_gib = workers_per_node * recipe.resources.env.mem_gib_per_worker
    others_gib = planned_gib - own_gib + workers_per_node * memory_model.ENV_WORKER_GIB
    whole_gib = partition.mem_gib_per_node - others_gib
    is_whole = is_local or partition.exclusive or not partition.mem_flag
    given_gib = whole_gib if is_whole else component.mem_gib_per_node - others_gib
    name = max(limits, key=lambda name: limits[name].memory_gib)
    if limits[name].memory_gib > whole_gib:
        raise PlanError(
            f"domains.{name}.options: one program may use {_describe_memory(limits[name])}, and a node of partition "
            f"{component.partition!r} has {whole_gib:.3g} GiB for programs: lower these limits"
        )
    found = _warn_memory(recipe, name, limits[name], workers_per_node=workers_per_node, given_gib=given_gib)
    name = max(limits, key=lambda name: limits[name].scratch_gib)
    at_once = workers_per_node * _count_at_once(recipe)
    return [*found, *_warn_scratch(name, limits[name], partition, at_once=at_once)]


def warn_foreign_images(recipe: Recipe, site: Site, partitions: Collection[str]) -> list[str]:
    """Warn of images of registries on nodes of these partitions, if all are aarch64: most images are for x86-64."""
    if any(site.find_architecture(label) != "aarch64" for label in partitions):
        return []
    return [
        f"{setting} = {image!r} runs on nodes of partition {' or '.join(partitions)}, which are aarch64: one that was "
        'made for x86-64 alone, as most are, fails there with "exec format error"; choose a site with x86-64 nodes for '
        "environments, or tasks whose images are for aarch64 too"
        for setting, image in _list_registry_images(recipe)
    ]


def _list_registry_images(recipe: Recipe) -> Iterator[tuple[str, str]]:
    """Yield the images of registries that programs run in, with the settings that name them."""
    for name, domain in recipe.domains.items():
        changed = recipe.evaluation.options.get(name, {})
        tables = {f"domains.{name}.options": domain.options, f"evaluation.options.{name}": changed}
        for table, options in tables.items() if domain.env == AGENT_PROGRAM else ():
            image = options.get("image")
            if isinstance(image, str) and is_registry_image(image):
                yield f"{table}.image", image


def _warn_memory(
    recipe: Recipe, name: str, limits: ProgramLimits, *, workers_per_node: int, given_gib: float
) -> list[str]:
    each_gib, env, num_each = limits.memory_gib, recipe.resources.env, _count_at_once(recipe)
    at_once = workers_per_node * num_each
    if at_once * each_gib <= given_gib:
        return []
    num_held = int(given_gib / each_gib * env.num_workers / workers_per_node)
    least = recipe.rollout.episodes_per_group * env.num_workers
    fewer = f"set rollout.max_running = {num_held}, or " if num_held >= least else ""
    all_gib = ceil(memory_model.ENV_WORKER_GIB + num_each * each_gib)
    way_out = f"{fewer}set env_memory_gib = {each_gib:.3g} and resources.env.mem_gib_per_worker = {all_gib}"
    return [
        f"domains.{name}.options: {at_once} programs may run at once on a node, and each may use "
        f"{_describe_memory(limits)}: {at_once * each_gib:.3g} GiB, and the node has {given_gib:.3g} GiB for them: "
        f"lower these limits, {way_out}"
    ]


def _warn_scratch(name: str, limits: ProgramLimits, partition: SitePartition, *, at_once: int) -> list[str]:
    has_gib = partition.scratch_gib_per_node
    if has_gib is None or at_once * limits.scratch_gib <= has_gib:
        return []
    return [
        f"domains.{name}.options: {at_once} programs may run at once on a node, and each may write "
        f"{limits.scratch_gib:.3g} GiB (max_disk_mb = {limits.max_disk_mb:g}{_describe_disks(limits)}): "
        f"{at_once * limits.scratch_gib:.3g} GiB, and the node has {has_gib:g} GiB of scratch: lower max_disk_mb or "
        "rollout.max_running"
    ]


def _count_at_once(recipe: Recipe) -> int:
    """Return the number of programs that one env worker runs at once."""
    env = recipe.resources.env
    each_gib = max(domain.env_memory_gib for domain in recipe.domains.values() if reserves_place(domain))
    places = max(memory_model.num_env_places(env.mem_gib_per_worker, each_gib=each_gib), 1)
    return min(places, ceil(recipe.rollout.max_running / env.num_workers))


def _describe_memory(limits: ProgramLimits) -> str:
    files = (
        f", and max_disk_mb = {limits.max_disk_mb:g} of files, which are in memory{_describe_disks(limits)}"
        if limits.has_disks_in_memory
        else ""
    )
    return f"{limits.memory_gib:.3g} GiB (max_memory_mb = {limits.max_memory_mb:g}{files})"


def _describe_disks(limits: ProgramLimits) -> str:
    return ", for the program and its judge each" if limits.num_disks > 1 else ""
