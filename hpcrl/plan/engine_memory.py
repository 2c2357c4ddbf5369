"""The memory of the engines' GPUs and nodes, as a plan shows it. Pure.

EngineMemory          what each GPU and node of a role holds
find_engine_memory    that of all roles with engines
find_gpu_memory       that of the GPUs of one role
"""

from collections.abc import Mapping

import msgspec
from msgspec.structs import replace

from hpcrl.config.engine_speed import count_copy_bytes, divide_engine_gpus, estimate_engine_speed
from hpcrl.config.recipe import Recipe, RoleName
from hpcrl.config.site import Site
from hpcrl.hardware.architecture import read_max_context
from hpcrl.hardware.cost_model import USABLE_SHARE, make_model_shape
from hpcrl.hardware.memory_model import GIB
from hpcrl.plan.demand import PartitionChoice
from hpcrl.plan.engine_nodes import ENGINE_ROLES


class EngineMemory(msgspec.Struct, frozen=True, kw_only=True):
    """The memory of one role's engines, by GPU and by node, in GiB."""

    role: RoleName
    gpu: str
    usable_gib: float
    """The memory of each GPU for weights and KV; the rest is for activations and the driver."""
    weights_gib: float
    """The weights on each GPU."""
    kv_tokens: int
    """The tokens of all conversations that an engine has room for."""
    longest: int
    """The tokens of the longest conversation; 0 if the model does not limit it."""
    node_gib: float | None = None
    """The host memory of the role's workers on a node, with the weight window; None on nodes with other roles."""
    node_free_gib: float | None = None

    def describe(self) -> list[str]:
        """Describe what a GPU and a node hold, and what is left of them."""
        of_longest = f", {self.kv_tokens // self.longest} of the longest ({self.longest})" if self.longest else ""
        left_gib, has_room = self.usable_gib - self.weights_gib, f"has room for {self.kv_tokens} tokens{of_longest}"
        lines = [
            f"each GPU of {self.role} ({self.gpu}) holds {self.weights_gib:.1f} GiB of weights, and {left_gib:.1f} of "
            f"{self.usable_gib:.1f} usable GiB are left for KV: an engine {has_room}"
        ]
        if self.node_gib is not None:
            window = ": its workers and the weight window"
            lines.append(
                f"each node of {self.role} holds {self.node_gib:.0f} GiB{window}; {self.node_free_gib:.0f} GiB are left"
            )
        return lines


def find_engine_memory(
    recipe: Recipe, choices: Mapping[RoleName, PartitionChoice], site: Site, *, node_gib: Mapping[RoleName, float]
) -> list[EngineMemory]:
    """Find what GPUs and nodes hold of each role with engines; those without GPUs or sizes are left out.

    `node_gib` is the host memory of the roles that share no nodes with others.
    """
    found = []
    for role in ENGINE_ROLES:
        choice = choices.get(role)
        memory = None if choice is None else find_gpu_memory(role, recipe, choice, site)
        if choice is None or memory is None:
            continue
        if (needed := node_gib.get(role)) is not None:
            left = site.partitions[choice.partition].mem_gib_per_node - needed
            memory = replace(memory, node_gib=round(needed, 3), node_free_gib=round(left, 3))
        found.append(memory)
    return found


def find_gpu_memory(role: RoleName, recipe: Recipe, choice: PartitionChoice, site: Site) -> EngineMemory | None:
    """Find what a GPU of a role holds; None without GPUs of known speed, or sizes."""
    shape, engine = recipe.model.architecture, recipe.engine
    gpu = site.find_gpu(site.partitions[choice.partition].gpu)
    if shape is None or gpu is None or not gpu.has_speed or not choice.gpus_per_worker or engine.backend == "sim":
        return None
    num_gpus = choice.gpus_per_worker * choice.nodes_per_engine
    tp, pp = divide_engine_gpus(engine, num_gpus=num_gpus)
    speed = estimate_engine_speed(engine, gpu=gpu, shape=make_model_shape(shape), num_gpus=num_gpus)
    return EngineMemory(
        role=role,
        gpu=gpu.name,
        usable_gib=round(gpu.memory_gib * USABLE_SHARE, 3),
        weights_gib=round(count_copy_bytes(engine, shape.num_params, shape) / (tp * pp) / GIB, 3),
        kv_tokens=speed.kv_tokens,
        longest=recipe.max_context or read_max_context(recipe.model.config) or 0,
    )
