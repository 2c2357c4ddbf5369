"""The needs of a role, before any partition is chosen. Pure.

RoleDemand                   workers, and what is reserved beside them
compute_role_demand          the demand of one role
compute_node_needs           cores and GiB of one node
MemoryNeed, list_memory_needs  the GiB that the models of a role's worker take
DRIVER_CPUS, DRIVER_MEM_GIB  reserved for the driver
"""

from dataclasses import dataclass

from hpcrl.config.pipeline import list_fixed_nodes, needs_critic
from hpcrl.config.recipe import Recipe, RoleName, WorkerResources
from hpcrl.hardware import memory_model

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
    )


def compute_node_needs(role: RoleName, recipe: Recipe, *, workers_per_node: int) -> tuple[int, int]:
    """Return the cores and GiB that a node needs for this many workers of a role and for what is reserved."""
    demand = compute_role_demand(role, recipe, one_machine=False)
    cpus = demand.reserved_cpus + workers_per_node * demand.resources.cpus_per_worker
    loads_weights = role != "env" and role not in recipe.judge_roles and recipe.has_rollouts
    window_gib = memory_model.window_memory_gib(recipe.model.num_weights or 0) if loads_weights else 0.0
    mem_gib = demand.reserved_mem_gib + window_gib + workers_per_node * demand.resources.mem_gib_per_worker
    return cpus, int(-(-mem_gib // 1))


@dataclass(frozen=True, kw_only=True)
class MemoryNeed:
    """The memory that a worker of a role needs for its models."""

    role: RoleName
    gib: float
    what: str
    """The models, for a message."""
    advice: str = ""
    """The advice where its GPUs have less memory, in place of more GPUs."""


def list_memory_needs(recipe: Recipe) -> list[MemoryNeed]:
    """Return the needs of the roles with a model of known size."""
    found: list[MemoryNeed] = []
    engines: list[tuple[RoleName, int | None]] = [(role, recipe.model.num_weights) for role in ("prefill", "decode")]
    engines += zip(recipe.judge_roles, (judge.num_weights for judge in recipe.judge.values()), strict=True)
    for role, num_params in engines:
        if num_params is not None:
            gib = memory_model.engine_memory_gib(num_params)
            found.append(MemoryNeed(role=role, gib=gib, what=f"{_show_weights(num_params)} weights"))
    return [*found, *_list_trainer_needs(recipe)]


def _list_trainer_needs(recipe: Recipe) -> list[MemoryNeed]:
    """Return the need of a worker of the trainer: what trains, and the models that it only reads."""
    train, policy = recipe.train, recipe.model.num_weights
    num_workers = recipe.resources.train.num_workers
    num_split = train.tensor_parallel * train.pipeline_parallel if train.trainer == "megatron" else 1
    num_shards = num_workers if train.trainer == "torch" and train.sharding == "full" else num_split
    gib, what = 0.0, []
    if policy is not None:
        whole = memory_model.train_memory_gib(policy, num_workers=num_shards)
        frozen = memory_model.fixed_memory_gib(policy, num_shards=1)  # with adapters, which are small
        gib = (frozen if train.lora_rank else whole) + whole * needs_critic(train)
        what = [f"{_show_weights(policy)} weights"]
    fixed: dict[str, str] = {}
    for name, node in list_fixed_nodes(train).items():
        setting, num_params = f"train.pipeline.{name}.model", _find_node_size(recipe, name)
        if node.model is None:
            setting = "train.kl" if recipe.teacher is None else "teacher.path"
        if num_params is not None:
            is_whole = node.data_parallel not in (None, num_workers // num_split)
            each = memory_model.fixed_memory_gib(num_params, num_shards=1 if is_whole else num_split)
            gib += each
            fixed[setting] = f"{_show_weights(num_params)} of the model of {setting} ({each:.0f} GiB)"
    if not gib:
        return []
    advice = _advise_trainer(recipe, list(fixed))
    return [MemoryNeed(role="train", gib=gib, what=" and ".join([*what, *fixed.values()]), advice=advice)]


def _advise_trainer(recipe: Recipe, fixed: list[str]) -> str:
    """Return how a rank of the trainer would need less memory; `fixed` are settings of models that it only reads."""
    train, more = recipe.train, "raise resources.train.num_workers"
    if train.trainer == "megatron":
        found = [f"{more} and train.tensor_parallel"]
    elif train.lora_rank:
        found = ["choose a partition whose GPUs have more memory"]
    else:
        found = [f'set train.sharding = "full" and {more}' if train.sharding == "none" else more]
        found += ['train.trainer = "megatron" with train.tensor_parallel, which splits all models'] * bool(fixed)
    found += [f"a smaller model for {setting}" for setting in fixed if setting != "train.kl"]
    return ", or ".join([*found, *["teacher.judge in place of teacher.path"] * ("teacher.path" in fixed)])


def _find_node_size(recipe: Recipe, name: str) -> int | None:
    """Return the number of weights of the model of a node, which may be the teacher's or the policy's first one."""
    node = recipe.train.pipeline.get(name)
    if node is not None and node.model is not None:
        return node.num_params
    if recipe.teacher is None:
        return recipe.model.num_weights
    return recipe.teacher.num_params if recipe.teacher.path is not None else None  # a judge's engines hold theirs


def _show_weights(num_params: int) -> str:
    return f"{num_params / 1e9:.1f} billion"
