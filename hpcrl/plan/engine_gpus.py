"""Choose the GPUs of each engine where the recipe leaves them open. Pure.

choose_engine_gpus  the recipe with numbers, and the reasons
divides_heads       whether vLLM divides a model among GPUs
divides_experts     whether it divides the experts evenly among ranks
"""

from collections.abc import Iterator

import msgspec

from hpcrl.config.engine_speed import count_copy_bytes, find_value_bytes
from hpcrl.config.recipe import EngineConfig, Recipe, RoleName
from hpcrl.config.site import Site, SitePartition
from hpcrl.hardware.architecture import KNOWN_FAMILIES, ModelArchitecture, read_max_context
from hpcrl.hardware.cost_model import USABLE_SHARE
from hpcrl.hardware.gpus import GpuModel
from hpcrl.hardware.memory_model import GIB, compute_engine_gib
from hpcrl.plan.demand import compute_role_demand, show_weights
from hpcrl.plan.engine_nodes import ENGINE_ROLES, may_span_nodes
from hpcrl.plan.partitions import rank_partitions

MAX_SPANNED_NODES = 8


def choose_engine_gpus(recipe: Recipe, site: Site) -> tuple[Recipe, dict[RoleName, str]]:
    """Give each engine the fewest GPUs of its best partition that hold its model and the KV of one conversation.

    The reasons are those of roles with more than the least. A model that fits on no number has the most, and is refused
    later.
    """
    resources, reasons = recipe.resources, dict[RoleName, str]()
    for role in ENGINE_ROLES:
        if not recipe.has_open_gpus(role):
            continue
        num, why = _choose_number(role, recipe, site)
        share = msgspec.structs.replace(getattr(resources, role), gpus_per_worker=num)
        resources = msgspec.structs.replace(resources, **{role: share})
        if why:
            reasons[role] = why
    return msgspec.structs.replace(recipe, resources=resources), reasons


def divides_heads(shape: ModelArchitecture, num_gpus: int) -> bool:
    """Return whether vLLM divides the heads among GPUs; it copies KV heads where there are more GPUs."""
    num_kv_heads = shape.num_kv_heads
    is_even = not (num_kv_heads % num_gpus and num_gpus % num_kv_heads)
    return not shape.num_heads % num_gpus and (is_even or bool(shape.kv_rank))


def divides_experts(shape: ModelArchitecture, num_ranks: int, *, engine: EngineConfig) -> bool:
    """Return whether the ranks of a stage, in all copies, divide the experts evenly: whole ones, or the rows of each.

    vLLM itself would give the first ranks one expert more than the others; they would decide memory and time of all.
    Slices that are not equal it refuses, but for some families it adds rows first.
    """
    if not shape.num_expert_layers:
        return True
    if engine.expert_parallel:
        return not shape.num_experts % num_ranks
    return shape.family not in KNOWN_FAMILIES or not shape.expert_inner % num_ranks


def _choose_number(role: RoleName, recipe: Recipe, site: Site) -> tuple[int, str]:
    engine, shape = recipe.engine, recipe.model.architecture
    if recipe.role_resources(role).affinity == "cpu":
        return 0, ""
    least = engine.pipeline_parallel * engine.data_parallel
    labels = rank_partitions(compute_role_demand(role, recipe, one_machine=False), site)
    partition = site.partitions[labels[0]] if labels else None
    gpu = None if partition is None else site.find_gpu(partition.gpu)
    if partition is None or gpu is None or shape is None or engine.backend == "embedded":
        return least, ""
    longest = recipe.max_context or read_max_context(recipe.model.config) or 0
    numbers = list(_list_numbers(partition, shape, engine=engine, spans=may_span_nodes(role, recipe)))
    fitting = (num for num in numbers if _has_room(shape, gpu, num, engine=engine, longest=longest))
    num = next(fitting, numbers[-1] if numbers else least)
    if num == least:
        return num, ""
    needs = f"{show_weights(shape.num_params)} weights" + f" and the KV of {longest} tokens" * bool(longest)
    return num, (
        f"a {role} worker has {num} GPUs, the fewest that hold {needs} and divide its heads: those of {labels[0]} "
        f"({gpu.name}) have {gpu.memory_gib:g} GiB"
    )


def _list_numbers(
    partition: SitePartition, shape: ModelArchitecture, *, engine: EngineConfig, spans: bool
) -> Iterator[int]:
    """Yield the numbers of GPUs of an engine, ascending: workers fill a node, or an engine fills several."""
    per_node, least = partition.gpus_per_node, engine.pipeline_parallel * engine.data_parallel
    on_nodes = range(2, MAX_SPANNED_NODES + 1) if spans else ()
    for num in [*range(1, per_node + 1), *(nodes * per_node for nodes in on_nodes)]:
        if num % least or (num <= per_node and per_node % num) or not divides_heads(shape, num // least):
            continue
        num_ranks = num // engine.pipeline_parallel
        if divides_experts(shape, num_ranks, engine=engine) and not (engine.expert_parallel and num_ranks == 1):
            yield num


def _has_room(shape: ModelArchitecture, gpu: GpuModel, num: int, *, engine: EngineConfig, longest: int) -> bool:
    """Return whether GPUs hold their copies of a model, and each copy the KV of one conversation."""
    each_gib = gpu.memory_gib * num / engine.data_parallel
    num_ranks = num // engine.data_parallel
    kv_bytes = shape.kv_values_per_token * longest * max(1.0, num_ranks / _count_kv_heads(shape))
    kv_bytes *= find_value_bytes(engine)
    weight_bytes = count_copy_bytes(engine, shape.num_params, shape)
    fits = weight_bytes + kv_bytes <= each_gib * GIB * USABLE_SHARE
    return fits and compute_engine_gib(weight_bytes) <= each_gib


def _count_kv_heads(shape: ModelArchitecture) -> int:
    return 1 if shape.kv_rank else shape.num_kv_heads  # compressed KV is one for all heads
