"""Choose the partition for a role, by affinity, and report every fallback. Pure.

choose_partition         choose the best partition that can hold the role and its models
rank_partitions          rank those that it may get
evaluate_partition       check a given partition, for a job that is to be on one
explain_memory_refusal   whether a role's models fit there
"""

from dataclasses import replace
from math import ceil
from operator import itemgetter
from typing import Any

from hpcrl.config.recipe import Affinity, Recipe, RoleName, name_role_resources
from hpcrl.config.site import Site, SitePartition
from hpcrl.errors import PlanError
from hpcrl.hardware import memory_model
from hpcrl.hardware.architecture import CONTEXT_FAMILIES, read_architecture
from hpcrl.plan.demand import (
    PartitionChoice,
    RoleDemand,
    compute_node_needs,
    compute_window_gib,
    estimate_trainer_node,
    list_memory_needs,
)
from hpcrl.plan.engine_memory import find_gpu_memory
from hpcrl.plan.engine_nodes import ENGINE_ROLES
from hpcrl.plan.trainer_checks import find_share_conflict
from hpcrl.plan.trainer_memory import change_recipe, explain_trainer_refusal, show_settings


def choose_partition(demand: RoleDemand, recipe: Recipe, site: Site, *, taken: dict[str, int]) -> PartitionChoice:
    """Choose the best partition that can hold `demand`; `taken` counts nodes given to other roles.

    Where the role's models fit nowhere, the reason of the partition with the most memory is given.
    """
    wanted, gpus, shortfall = _match_affinity(demand, site)
    refusals: list[str] = []
    too_small: list[tuple[float, str]] = []
    for rank, label in enumerate(_rank_partitions(site, wanted, gpus=gpus, taken=taken)):
        fit = _fit_workers(demand, label, site.partitions[label], gpus=gpus, taken=taken)
        if isinstance(fit, str):
            refusals.append(fit)
        elif (why := explain_memory_refusal(demand.role, recipe, fit, site, num_taken=taken.get(label, 0))) is not None:
            too_small.append((_get_memory(site.partitions[label], site), why))
            refusals.append(f"the memory of {label} is too small for its models")
        else:
            fallback = shortfall or (_describe_fallback(demand, label, refusals) if rank else None)
            return replace(fit, fallback=fallback, skips_small=bool(too_small))
    if too_small:
        raise PlanError(max(too_small, key=itemgetter(0))[1])
    table = name_role_resources(demand.role)
    raise PlanError(
        f"site {site.name!r} cannot hold {table}: {'; '.join(refusals)}. Lower {table} or choose another site"
    )


def rank_partitions(demand: RoleDemand, site: Site) -> list[str]:
    """Rank the partitions that a role may get, from best to worst, whatever their size."""
    wanted, gpus, _ = _match_affinity(demand, site)
    return _rank_partitions(site, wanted, gpus=gpus, taken={})


def evaluate_partition(label: str, demand: RoleDemand, site: Site, *, taken: dict[str, int]) -> PartitionChoice | str:
    """Return the choice of this partition, even if others are better, or why it cannot hold `demand`."""
    wanted, gpus, shortfall = _match_affinity(demand, site)
    ranked = _rank_partitions(site, wanted, gpus=gpus, taken={})
    if label not in ranked:
        return f"{demand.role}: {label} has no GPUs, and one worker needs {gpus}"
    fit = _fit_workers(demand, label, site.partitions[label], gpus=gpus, taken=taken)
    if isinstance(fit, str):
        return f"{demand.role}: {fit}"
    best = _score_partition(site.partitions[ranked[0]], wanted, site)
    if shortfall is None and _score_partition(site.partitions[label], wanted, site) < best:
        shortfall = f"{demand.role} wanted {wanted}, got {label}: one allocation is on one partition"
    return replace(fit, fallback=shortfall)


def _match_affinity(demand: RoleDemand, site: Site) -> tuple[Affinity, int, str | None]:
    """Return the affinity to rank by, the GPUs per worker, and the fallback if that is not what was wanted."""
    role, wanted, gpus = demand.role, demand.resources.affinity, demand.resources.gpus_per_worker
    lasting = [p for p in site.partitions.values() if not p.preemptible]
    kinds = {p.gpu for p in lasting if p.gpu}
    left_out = "" if len(lasting) == len(site.partitions) else " outside preemptible partitions"
    if wanted == "cpu" or gpus == 0:
        if site.scheduler != "local" and all(p.gpu for p in lasting):
            why = f"site {site.name} has no CPU nodes{left_out}"
            return "cpu", 0, f"{role} wanted CPU nodes, got cores of GPU nodes: {why}"
        return "cpu", 0, None
    if not kinds:
        why = f"site {site.name} has no GPUs{left_out}"
        return "cpu", 0, f"{role} wanted {gpus} GPU a worker ({wanted}), got CPU cores: {why}"
    if wanted == "bandwidth" and len(kinds) == 1:
        return wanted, gpus, f"{role} wanted {wanted}, got {kinds.pop()}: site {site.name} has no other GPU type"
    return wanted, gpus, None


def _rank_partitions(site: Site, wanted: Affinity, *, gpus: int, taken: dict[str, int]) -> list[str]:
    """Return the candidates from best to worst; among equals the least used, then the site's order."""
    usable = [label for label, p in site.partitions.items() if not p.preemptible and (p.gpu or not gpus)]
    scores = {label: _score_partition(site.partitions[label], wanted, site) for label in usable}
    return sorted(usable, key=lambda label: (-scores[label], taken.get(label, 0)))


def _get_memory(partition: SitePartition, site: Site) -> float:
    gpu = site.find_gpu(partition.gpu)
    return gpu.memory_gib if gpu else partition.mem_gib_per_node


def _score_partition(partition: SitePartition, wanted: Affinity, site: Site) -> float:
    gpu = site.find_gpu(partition.gpu)
    match wanted:
        case "compute":
            return (gpu.bf16_tflops or 0.0) if gpu else 0.0
        case "bandwidth":
            return (gpu.memory_tb_per_s or 0.0) if gpu else 0.0
        case "cpu":
            return 0.0 if gpu else 1.0


def _fit_workers(
    demand: RoleDemand, label: str, partition: SitePartition, *, gpus: int, taken: dict[str, int]
) -> PartitionChoice | str:
    """Distribute the workers over the nodes of a partition, or return why it cannot hold them."""
    span = _count_spanned_nodes(demand, partition, gpus=gpus)
    gpus_each = gpus // span
    per_node = _count_workers_per_node(demand, partition, gpus=gpus_each)
    if span > 1 and per_node:
        return _fit_spanning(demand, label, partition, gpus=gpus_each, span=span, taken=taken)
    nodes = max(ceil(demand.resources.num_workers / per_node), demand.min_nodes) if per_node else 0
    refusal = _explain_refusal(demand, label, partition, gpus=gpus, nodes=nodes, taken=taken.get(label, 0))
    if refusal is not None:
        return refusal
    workers_per_node = ceil(demand.resources.num_workers / nodes)
    return PartitionChoice(
        partition=label, nodes=nodes, workers_per_node=workers_per_node, gpus_per_worker=gpus, fallback=None
    )


def _count_spanned_nodes(demand: RoleDemand, partition: SitePartition, *, gpus: int) -> int:
    """Return the number of nodes of one engine: more than 1 if it has more GPUs than a node, and fills its nodes."""
    has = partition.gpus_per_node
    return gpus // has if demand.may_span and has and gpus > has and gpus % has == 0 else 1


def _fit_spanning(
    demand: RoleDemand, label: str, partition: SitePartition, *, gpus: int, span: int, taken: dict[str, int]
) -> PartitionChoice | str:
    """Distribute engines of several nodes, or return why the partition has too few."""
    nodes = max(demand.resources.num_workers, ceil(demand.min_nodes / span)) * span
    refusal = _explain_refusal(demand, label, partition, gpus=gpus, nodes=nodes, taken=taken.get(label, 0))
    if refusal is not None:
        return refusal
    return PartitionChoice(
        partition=label, nodes=nodes, workers_per_node=1, gpus_per_worker=gpus, fallback=None, nodes_per_engine=span
    )


def _count_workers_per_node(demand: RoleDemand, partition: SitePartition, *, gpus: int) -> int:
    """Return the number of workers that one node can hold."""
    resources = demand.resources
    limits = [
        (partition.cores_per_node - demand.reserved_cpus) // resources.cpus_per_worker,
        int((partition.mem_gib_per_node - demand.reserved_mem_gib) // resources.mem_gib_per_worker),
    ]
    if gpus:
        limits.append(partition.gpus_per_node // gpus)
    return max(min(limits), 0)


def _explain_refusal(
    demand: RoleDemand, label: str, partition: SitePartition, *, gpus: int, nodes: int, taken: int
) -> str | None:
    resources = demand.resources
    if nodes == 0:
        return (
            f"{label} has nodes of {partition.cores_per_node} cores, {partition.mem_gib_per_node:g} GiB and "
            f"{partition.gpus_per_node} GPUs, and one worker needs {resources.cpus_per_worker} cores, "
            f"{resources.mem_gib_per_worker:g} GiB and {gpus} GPUs"
            + (f" beside {demand.reserved_cpus} reserved cores" if demand.reserved_cpus else "")
        )
    if taken + nodes > partition.max_nodes:
        others = f" beside {taken} for other roles" if taken else ""
        return f"{label} allows {partition.max_nodes} nodes, and {resources.num_workers} workers need {nodes}{others}"
    return None


def _describe_fallback(demand: RoleDemand, label: str, refusals: list[str]) -> str:
    return f"{demand.role} wanted {demand.resources.affinity}, got {label}: {refusals[0]}"


def explain_memory_refusal(
    role: RoleName, recipe: Recipe, choice: PartitionChoice, site: Site, *, num_taken: int = 0
) -> str | None:
    """Return why the models of a role and their KV do not fit into a worker or node; None if they do, or may."""
    if role == "train":
        refusal = explain_trainer_refusal(recipe, choice, site, num_taken=num_taken)
        if refusal is not None:
            return refusal
    resources, table = recipe.role_resources(role), name_role_resources(role)
    gpu = site.find_gpu(site.partitions[choice.partition].gpu)
    num_gpus = choice.gpus_per_worker * choice.nodes_per_engine
    for need in list_memory_needs(recipe):
        num_used = min(num_gpus, 1) if need.is_on_one_gpu else num_gpus
        limit = gpu.memory_gib * num_used if gpu and num_gpus else resources.mem_gib_per_worker
        if need.role == role and need.gib > limit:
            advice = f"raise {table}.mem_gib_per_worker"
            if gpu and num_gpus:
                advice = need.advice or f"raise {table}.gpus_per_worker"
            return (
                f"a {role} worker needs {need.gib:.0f} GiB for {need.what} and has {limit:.0f} GiB "
                f"({choice.partition}): {advice}"
            )
    if (refusal := _explain_kv_refusal(role, recipe, choice, site)) is not None:
        return refusal
    return _explain_node_refusal(role, recipe, choice, site)


def _explain_kv_refusal(role: RoleName, recipe: Recipe, choice: PartitionChoice, site: Site) -> str | None:
    """Return why a copy of the policy's model lacks room for the KV of one conversation; None if it has it, or may.

    Layers with a window, and other forms of KV by `engine.vllm_args`, take less than is counted here.
    """
    engine, config = recipe.engine, recipe.model.config
    is_counted = config and read_architecture(config).family in CONTEXT_FAMILIES and not engine.vllm_args
    memory = find_gpu_memory(role, recipe, choice, site) if is_counted and role in ENGINE_ROLES else None
    if memory is None or (room := memory.kv_tokens // engine.data_parallel) >= memory.longest:
        return None
    changes = [f"set engine.max_model_len to {room} or less"]
    if engine.backend == "embedded":
        changes.append('engine.backend = "vllm"')
    elif engine.dtype == "float32":
        changes.append('engine.dtype = "auto", which is half as large')
    if engine.backend == "vllm":
        changes.append(f"raise {name_role_resources(role)}.gpus_per_worker")
    return (
        f"a conversation may have {memory.longest} tokens, and a {role} worker ({choice.partition}, {memory.gpu}) has "
        f"room for the KV of {room} beside {memory.weights_gib:.1f} GiB of weights on each GPU: {', or '.join(changes)}"
    )


def _advise_more_nodes(recipe: Recipe, choice: PartitionChoice, site: Site) -> str:
    """Advise the fewest full nodes of the trainer that have the memory for their part of it."""
    partition, per_node = site.partitions[choice.partition], choice.workers_per_node
    is_whole = recipe.train.sharding != "full" and recipe.train.trainer == "torch"
    given: dict[str, Any] = {"train.sharding": "full"} if is_whole else {}
    for num_nodes in range(choice.nodes + 1, partition.max_nodes + 1):
        settings = given | {"resources.train.num_workers": num_nodes * per_node}
        more = change_recipe(recipe, settings)
        if num_nodes * per_node % more.train.degrees.num_divided or find_share_conflict(more) is not None:
            continue
        _, needs_gib = compute_node_needs("train", more, workers_per_node=per_node, has_couriers=site.mpi.couriers)
        if needs_gib <= partition.mem_gib_per_node:
            return show_settings(settings)
    return "choose a partition whose nodes have more memory"


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
        least_gib = max((need.gib for need in list_memory_needs(recipe) if need.role == role), default=0.0)
        held_by_workers = 0.0 if choice.gpus_per_worker else least_gib * choice.workers_per_node
        advice = f"lower {table}.mem_gib_per_worker"
        if window_gib + held_by_workers > node_gib:
            advice = "choose a partition whose nodes have more memory"
        return f"{needs}, {window_gib:.0f} of them shared memory for two versions of the weights, and {has}: {advice}"
    if held.total < node_gib * memory_model.GIB:
        advice = f"lower {table}.mem_gib_per_worker"
    else:
        advice = _advise_more_nodes(recipe, choice, site)
    experts = f", {held.experts / memory_model.GIB:.0f} for experts to replay" * (held.experts > 0)
    return (
        f"{needs}, {held.window / memory_model.GIB:.0f} of them shared memory for two versions of the weights and "
        f"{held.snapshot / memory_model.GIB:.0f} for the snapshot of a checkpoint{experts}, and {has}: {advice}"
    )
