"""The needs of a role, before any partition is chosen. Pure.

RoleDemand                   workers, and what is reserved beside them
compute_role_demand          the demand of one role
compute_node_needs           cores and GiB of one node
DRIVER_CPUS, DRIVER_MEM_GIB  reserved for the driver
"""

from dataclasses import dataclass

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
    window_gib = memory_model.window_memory_gib(recipe.model.num_params or 0) if loads_weights else 0.0
    mem_gib = demand.reserved_mem_gib + window_gib + workers_per_node * demand.resources.mem_gib_per_worker
    return cpus, int(-(-mem_gib // 1))
