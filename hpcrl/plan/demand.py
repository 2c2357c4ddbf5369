"""The needs of a role on its nodes. Pure.

RoleDemand                   workers, and what is reserved beside them
PartitionChoice              the partition that is chosen for them
compute_role_demand          the demand of one role
compute_node_needs           cores and GiB of one node
compute_step_gib             GiB of one node that a role's own step may use
sum_node_needs               cores, GiB and GPUs of one node for several roles together
deal_gpus                    the GPUs of one node, dealt to its roles
count_dealt_gpus             how many these are
count_published              the values of a version of the weights
compute_window_gib           the shared memory of weights on one node
count_episodes, average_episode  the episodes of a training step, and the turns and tokens of one
settle_precision             what train.precision = "auto" is on a GPU
make_rank_setup              what decides the memory of a rank of trainer "torch"
make_megatron_setup          the same of trainer "megatron"
estimate_trainer_node        the host memory of a node of the trainer
estimate_host_memory         the same of ranks on CPUs too, beside what they compute with
MemoryNeed, list_memory_needs  the GiB that the models of a role's worker take
FixedModel, list_fixed_models, advise_on_fixed_models  the models that the trainer only reads
warn_unknown_sizes           those that no plan counts, since their size is not known
show_weights                 a number of weights, for messages
DRIVER_CPUS, DRIVER_MEM_GIB  reserved for the driver
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil, inf
from typing import NamedTuple

import msgspec

from hpcrl.config.engine_speed import count_copy_bytes, find_value_bytes
from hpcrl.config.pipeline import list_fixed_nodes
from hpcrl.config.published_adapters import publishes_adapters
from hpcrl.config.published_dtype import choose_published_dtype
from hpcrl.config.recipe import JUDGE_ROLE_PREFIX, EngineConfig, ModelConfig, Recipe, RoleName, WorkerResources
from hpcrl.hardware import memory_model
from hpcrl.hardware.architecture import ModelArchitecture, find_context_conflict, find_window
from hpcrl.hardware.gpus import GpuModel
from hpcrl.hardware.megatron_memory import MegatronSetup
from hpcrl.hardware.train_memory import (
    CPU_PROCESS_BYTES,
    RANK_PROCESS_BYTES,
    NodeMemory,
    RankSetup,
    count_adapter_params,
    estimate_node_memory,
)
from hpcrl.plan.engine_nodes import ENGINE_ROLES, may_span_nodes

DRIVER_CPUS = 1
DRIVER_MEM_GIB = 2.0


@dataclass(frozen=True, kw_only=True)
class RoleDemand:
    """The resources that a component must provide for its workers and on each node."""

    role: RoleName
    resources: WorkerResources
    reserved_cpus: int
    """Cores reserved on every node for other processes."""
    reserved_mem_gib: float
    min_nodes: int
    may_span: bool = False
    """A worker with more GPUs than a node has may be on several nodes, as the parts of one engine."""


@dataclass(frozen=True, kw_only=True)
class PartitionChoice:
    """The partition of a role, and the distribution of its workers over the nodes."""

    partition: str
    nodes: int
    workers_per_node: int
    gpus_per_worker: int
    """0 where the role runs without GPUs."""
    fallback: str | None
    skips_small: bool = False
    """True if a partition that suits the role better has too little memory for its models."""
    nodes_per_engine: int = 1
    """More than 1: workers are the parts of engines over several nodes, one on each node."""
    first_gpu: int = 0
    """The first of the role's GPUs among those of a node that several roles share."""
    asleep_gib: float = 0.0
    """The host memory for its state while another role works on its GPUs."""


def compute_role_demand(role: RoleName, recipe: Recipe, *, one_machine: bool) -> RoleDemand:
    """Return the demand of a role; env's nodes also hold the driver and the rewards, the trainer's only the driver."""
    reward = recipe.resources.reward
    num_rewards = reward.num_workers if role == "env" else 0
    hosts_driver = role == ("env" if recipe.has_rollouts else "train")
    return RoleDemand(
        role=role,
        resources=recipe.role_resources(role),
        reserved_cpus=DRIVER_CPUS * hosts_driver + num_rewards * reward.cpus_per_worker,
        reserved_mem_gib=DRIVER_MEM_GIB * hosts_driver + num_rewards * reward.mem_gib_per_worker,
        min_nodes=2 if recipe.job.survive_node_loss and not one_machine else 1,
        may_span=may_span_nodes(role, recipe) and not one_machine,
    )


def compute_node_needs(
    role: RoleName, recipe: Recipe, *, workers_per_node: int, has_couriers: bool = True
) -> tuple[int, int]:
    """Return the cores and GiB that a node needs for this many workers of a role and for what is reserved.

    Only couriers fill the windows of nodes with engines: without them engines read files.
    """
    demand = compute_role_demand(role, recipe, one_machine=False)
    cpus = demand.reserved_cpus + workers_per_node * demand.resources.cpus_per_worker
    step_gib = compute_step_gib(role, recipe, workers_per_node=workers_per_node, has_couriers=has_couriers)
    return cpus, ceil(demand.reserved_mem_gib + step_gib)


def compute_step_gib(role: RoleName, recipe: Recipe, *, workers_per_node: int, has_couriers: bool = True) -> float:
    """Return the GiB of one node that the step of a role may use: its workers, the window, a checkpoint's snapshot.

    Shared memory is charged to the step that writes it first.
    """
    loads_weights = role in (*ENGINE_ROLES, "train") and recipe.has_rollouts
    workers_gib = workers_per_node * recipe.role_resources(role).mem_gib_per_worker
    held = estimate_trainer_node(recipe, num_ranks=workers_per_node) if role == "train" else None
    if held is not None:
        workers_gib = max(workers_gib, (held.processes + held.snapshot + held.experts) / memory_model.GIB)
        window_gib = held.window / memory_model.GIB
    else:
        window_gib = compute_window_gib(recipe) * (loads_weights and (has_couriers or role == "train"))
    return window_gib + workers_gib


def sum_node_needs(choices: Mapping[RoleName, PartitionChoice], recipe: Recipe) -> tuple[int, int, int]:
    """Return the cores, GiB and GPUs of one node that holds all these roles; they share the window of the weights."""
    needs = [
        compute_node_needs(role, recipe, workers_per_node=choice.workers_per_node, has_couriers=False)
        for role, choice in choices.items()
    ]
    gpus = sum(choice.gpus_per_worker * choice.workers_per_node for choice in choices.values())
    asleep_gib = ceil(sum(choice.asleep_gib for choice in choices.values()))
    return sum(cpus for cpus, _ in needs), sum(mem_gib for _, mem_gib in needs) + asleep_gib, gpus


def deal_gpus(choices: Mapping[RoleName, PartitionChoice], *, num_gpus: int) -> dict[RoleName, PartitionChoice]:
    """Deal the GPUs of one node to the roles that want any, the trainer first; the last ones share if they are few."""
    first, dealt = 0, dict(choices)
    for role in sorted(choices, key=lambda role: role != "train"):
        choice = choices[role]
        num = choice.gpus_per_worker * choice.workers_per_node
        dealt[role] = replace(choice, first_gpu=min(first, num_gpus - num) if num else 0)
        first += num
    return dealt


def count_dealt_gpus(choices: Mapping[RoleName, PartitionChoice]) -> int:
    """Return the number of GPUs that were dealt; those that several roles have count once."""
    return max(choice.first_gpu + choice.gpus_per_worker * choice.workers_per_node for choice in choices.values())


def compute_window_gib(recipe: Recipe) -> float:
    """Return the shared memory of a node with engines for the weights; 0 if their size is not known."""
    dtype = choose_published_dtype(recipe, recipe.model.config)
    return memory_model.compute_window_bytes(count_published(recipe) or 0, dtype=dtype) / memory_model.GIB


def compute_version_bytes(recipe: Recipe) -> float:
    """Return the bytes of a published version; 0 if the size of the model is not known."""
    dtype = choose_published_dtype(recipe, recipe.model.config)
    return float((count_published(recipe) or 0) * memory_model.BYTES_PER_VALUE[dtype])


def count_published(recipe: Recipe) -> int | None:
    """Count the values of a version: the model's weights, or its adapters; None if that is not known."""
    shape = recipe.model.architecture
    if shape is not None and publishes_adapters(recipe, recipe.model.config):
        return count_adapter_params(shape, rank=recipe.train.lora_rank)
    return recipe.model.num_weights


def count_episodes(recipe: Recipe) -> int:
    """Return the episodes of a training step."""
    return recipe.train.groups_per_step * recipe.rollout.group_size if recipe.has_rollouts else 0


def average_episode(recipe: Recipe) -> tuple[float, float]:
    """Return the turns and tokens of an episode, by the usual lengths of the domains that are trained."""
    domains = [domain for domain in recipe.domains.values() if not domain.held_out]
    weights, turns, tokens = 0.0, 0.0, 0.0
    longest = recipe.max_context or inf
    for domain in domains:
        reply = domain.usual_reply_tokens or domain.max_new_tokens or recipe.rollout.max_new_tokens
        weights += domain.weight
        turns += domain.weight * domain.max_turns
        tokens += domain.weight * min(domain.max_turns * (domain.usual_prompt_tokens + reply), longest)
    return (turns / weights, tokens / weights) if weights else (0.0, 0.0)


def settle_precision(recipe: Recipe, gpu: GpuModel | None) -> Recipe:
    """Return the recipe with train.precision = "fp32" where that is "auto" and the trainer's GPU has no bfloat16."""
    if recipe.train.precision != "auto" or gpu is None or gpu.has_bf16:
        return recipe
    train = msgspec.structs.replace(recipe.train, precision="fp32")
    return msgspec.structs.replace(recipe, train=train)


def find_longest_row(recipe: Recipe) -> int:
    """Find the most tokens of a trajectory that the recipe lets into training; 0 where it sets no limit."""
    longest = (recipe.engine.max_model_len if recipe.has_rollouts else None) or 0
    return longest if recipe.train.max_row_tokens == "auto" else min(longest, recipe.train.max_row_tokens)


def make_rank_setup(recipe: Recipe, *, has_recompute: bool) -> RankSetup:
    """Return the settings that decide what a rank of trainer "torch" holds."""
    train, num_ranks = recipe.train, recipe.resources.train.num_workers
    return RankSetup(
        num_ranks=num_ranks,
        is_sharded=train.sharding == "full" and num_ranks > 1,
        is_bf16=train.has_bf16(on_bf16_gpus=recipe.resources.train.gpus_per_worker > 0),
        has_recompute=has_recompute,
        is_packed=train.rows == "packed",
        has_mask=train.rows == "packed" and find_context_conflict(recipe.model.config, size=1) is not None,
        window=find_window(recipe.model.config),
        longest_row=find_longest_row(recipe),
        context_parallel=train.degrees.context,
        lora_rank=train.lora_rank,
        is_offloaded=train.offload,
        has_bf16_moments=train.moments_dtype == "bfloat16",
    )


def make_megatron_setup(recipe: Recipe, *, has_recompute: bool) -> MegatronSetup:
    """Return the settings that decide what a rank of trainer "megatron" holds."""
    train = recipe.train
    return MegatronSetup(
        num_ranks=recipe.resources.train.num_workers,
        **train.degrees.settings,
        pipeline_chunks=train.pipeline_chunks,
        is_bf16=train.has_bf16(on_bf16_gpus=recipe.resources.train.gpus_per_worker > 0),
        has_recompute=has_recompute,
    )


def estimate_trainer_node(recipe: Recipe, *, num_ranks: int) -> NodeMemory | None:
    """Estimate the host memory of a node with this many ranks of the trainer; None without GPUs or sizes."""
    shape = recipe.model.architecture
    if shape is None or not recipe.resources.train.gpus_per_worker:
        return None
    return estimate_host_memory(recipe, shape, num_ranks=num_ranks)


def estimate_host_memory(recipe: Recipe, shape: ModelArchitecture, *, num_ranks: int) -> NodeMemory:
    """Estimate what this many ranks of the trainer hold on a node beside what is on their GPUs or CPUs."""
    setup = make_rank_setup(recipe, has_recompute=False)
    if recipe.train.trainer == "megatron":  # all its ranks save and publish a share
        setup = msgspec.structs.replace(setup, is_sharded=setup.num_ranks > 1)
    choices = 0.0
    if recipe.train.router_replay:  # of a step's rows, in the micro-batches of each rank that has them
        _, num_tokens = average_episode(recipe)
        choices = shape.choice_bytes * num_tokens * count_episodes(recipe) / max(recipe.num_train_shares, 1)
    return estimate_node_memory(
        shape,
        setup,
        num_ranks=num_ranks,
        published_dtype=choose_published_dtype(recipe, recipe.model.config) if recipe.has_rollouts else None,
        num_published=count_published(recipe),
        choices=choices,
        process_bytes=RANK_PROCESS_BYTES if recipe.resources.train.gpus_per_worker else CPU_PROCESS_BYTES,
    )


@dataclass(frozen=True, kw_only=True)
class MemoryNeed:
    """The memory that a worker of a role needs for its models."""

    role: RoleName
    gib: float
    what: str
    """The models, for a message."""
    is_on_one_gpu: bool = False
    """True if a worker uses one GPU, however many it has."""
    advice: str = ""
    """The advice where its GPUs have less memory, in place of more GPUs."""


def list_memory_needs(recipe: Recipe) -> list[MemoryNeed]:
    """Return the needs of the engines with a model of known size; trainer_memory.py has those of the trainer."""
    found: list[MemoryNeed] = []
    engines: list[tuple[RoleName, ModelConfig, EngineConfig]] = [
        *((role, recipe.model, recipe.engine) for role in ENGINE_ROLES),
        *((role, judge, judge.engine) for role, judge in zip(recipe.judge_roles, recipe.judge.values(), strict=True)),
    ]
    for role, model, engine in engines:
        if (num_params := model.num_weights) is not None:
            weight_bytes = engine.data_parallel * count_copy_bytes(engine, num_params, model.architecture)
            gib = memory_model.compute_engine_gib(weight_bytes)
            found.append(_describe_need(role, engine, gib=gib, num_params=num_params))
    return found


def _describe_need(role: RoleName, engine: EngineConfig, *, gib: float, num_params: int) -> MemoryNeed:
    """Describe the need of a worker for the weights of its engine."""
    what = f"{show_weights(num_params)} weights" + f" in {engine.data_parallel} copies" * (engine.data_parallel > 1)
    if find_value_bytes(engine) == memory_model.BYTES_FP32:
        what += " in float32"
    if engine.backend != "embedded":
        return MemoryNeed(role=role, gib=gib, what=what)
    judge = role.removeprefix(JUDGE_ROLE_PREFIX)
    setting = "engine.backend" if judge == role else f"judge.{judge}.engine.backend"
    advice = f'set {setting} = "vllm", or choose GPUs with more memory: an embedded engine is on one GPU'
    return MemoryNeed(role=role, gib=gib, what=what, is_on_one_gpu=True, advice=advice)


class FixedModel(NamedTuple):
    """A model that the trainer only reads, such as a reference or a teacher."""

    setting: str
    """The setting that names it."""
    num_params: int
    is_whole: bool
    """True if the ranks that have it have all of it, because its node has its own data-parallel degree."""
    is_policy: bool
    """True if it is the model that is trained, as it was at first."""


def list_fixed_models(recipe: Recipe) -> list[FixedModel]:
    """Return those of known size."""
    found = []
    for name, node in list_fixed_nodes(recipe.train).items():
        is_whole = node.data_parallel not in (None, recipe.num_train_shares)
        if recipe.train.lora_rank and node.model is None and recipe.teacher is None and not is_whole:
            continue  # the policy without its adapters
        setting, num_params = _find_node_setting(recipe, name), _find_node_size(recipe, name)
        if num_params is not None:
            found.append(FixedModel(setting, num_params, is_whole, is_policy=setting == "train.kl"))
    return found


def warn_unknown_sizes(recipe: Recipe) -> list[str]:
    """Warn of models that the trainer only reads and no plan counts, since their size is not known."""
    if recipe.model.path is None and recipe.model.architecture is None:
        return []  # a model for tests
    held = {
        _find_node_setting(recipe, name)
        for name, node in list_fixed_nodes(recipe.train).items()
        if _find_node_size(recipe, name) is None and (node.model is not None or _has_own_teacher(recipe))
    }
    return [
        f"the size of {setting} is not known, and the memory of the trainer is counted without it: set "
        f"{setting.rpartition('.')[0]}.num_params, or stage the model first (hpcrl stage)"
        for setting in sorted(held)
    ]


def advise_on_fixed_models(models: Sequence[FixedModel]) -> list[str]:
    """Return how the trainer would need less memory for models that it only reads."""
    settings = list(dict.fromkeys(model.setting for model in models))
    found = [f"a smaller model for {setting}" for setting in settings if setting != "train.kl"]
    return [*found, *["teacher.judge in place of teacher.path"] * ("teacher.path" in settings)]


def _find_node_setting(recipe: Recipe, name: str) -> str:
    """Return the setting that names the model of a node."""
    node = recipe.train.pipeline.get(name)
    if node is not None and node.model is not None:
        return f"train.pipeline.{name}.model"
    return "train.kl" if recipe.teacher is None else "teacher.path"


def _find_node_size(recipe: Recipe, name: str) -> int | None:
    """Return the number of weights of the model of a node, which may be the teacher's or the policy's first one."""
    node = recipe.train.pipeline.get(name)
    if node is not None and node.model is not None:
        return node.num_params
    if recipe.teacher is None:
        return recipe.model.num_weights
    return recipe.teacher.num_params if _has_own_teacher(recipe) else None  # a judge's engines hold theirs


def _has_own_teacher(recipe: Recipe) -> bool:
    """Return whether the trainer holds the teacher."""
    return recipe.teacher is not None and recipe.teacher.path is not None


def show_weights(num_params: int) -> str:
    """Show a number of weights."""
    return f"{num_params / 1e9:.1f} billion"
