"""What a role needs of a node, before any partition is chosen. Pure."""

from dataclasses import dataclass

from hpcrl.config.recipe import Recipe, RoleName, WorkerResources
from hpcrl.hardware import memory_model

DRIVER_CPUS = 1
DRIVER_MEM_GIB = 2.0


@dataclass(frozen=True, kw_only=True)
class RoleDemand:
    """What one component must give to each of its nodes' workers and to the node itself."""

    role: RoleName
    resources: WorkerResources
    reserved_cpus: int
    """Cores taken on every node for what runs beside the workers."""
    reserved_mem_gib: float
    min_nodes: int


def compute_role_demand(role: RoleName, recipe: Recipe, *, one_machine: bool) -> RoleDemand:
    """What a node of a role must hold, beside what runs there anyway."""
    reward = recipe.resources.reward
    hosts_driver = role == "env"  # the driver and the rewards run on env's nodes
    return RoleDemand(
        role=role,
        resources=getattr(recipe.resources, role),
        reserved_cpus=DRIVER_CPUS + reward.num_workers * reward.cpus_per_worker if hosts_driver else 0,
        reserved_mem_gib=DRIVER_MEM_GIB + reward.num_workers * reward.mem_gib_per_worker if hosts_driver else 0.0,
        min_nodes=2 if recipe.job.survive_node_loss and not one_machine else 1,
    )


def compute_node_needs(role: RoleName, recipe: Recipe, *, workers_per_node: int) -> tuple[int, int]:
    """Cores and GiB that one node needs for this many workers of a role and what runs beside them."""
    demand = compute_role_demand(role, recipe, one_machine=False)
    cpus = demand.reserved_cpus + workers_per_node * demand.resources.cpus_per_worker
    window_gib = 0.0 if role == "env" else memory_model.window_memory_gib(recipe.model.num_params or 0)
    mem_gib = demand.reserved_mem_gib + window_gib + workers_per_node * demand.resources.mem_gib_per_worker
    return cpus, int(-(-mem_gib // 1))
