"""GPUs of one node that the trainer and engines use in turns, where there are too few for both. Pure.

deal_in_shifts     deal the GPUs so, with what sleeps in host memory meanwhile
describe_shifts    what that means, for a person
"""

from collections.abc import Mapping
from dataclasses import replace

from hpcrl.config.published_dtype import choose_published_dtype
from hpcrl.config.recipe import Recipe, RoleName
from hpcrl.hardware.memory_model import BYTES_FP32, BYTES_PER_VALUE, GIB
from hpcrl.plan.demand import PartitionChoice, count_dealt_gpus
from hpcrl.plan.engine_nodes import ENGINE_ROLES
from hpcrl.plan.trainer_memory import estimate_sleeping_state


def deal_in_shifts(
    choices: Mapping[RoleName, PartitionChoice], recipe: Recipe, *, num_gpus: int
) -> dict[RoleName, PartitionChoice] | str:
    """Give the trainer and the engines the same GPUs of a node, and judges others; return why if there are too few."""
    numbers = {role: choice.gpus_per_worker * choice.workers_per_node for role, choice in choices.items()}
    num_engine = sum(numbers.get(role, 0) for role in ENGINE_ROLES)
    num_shared = max(numbers["train"], num_engine)
    num_all = num_shared + sum(num for role, num in numbers.items() if role not in (*ENGINE_ROLES, "train"))
    if num_all > num_gpus:
        return f"all roles need {num_all} GPUs, if trainer and engines use theirs in turns, and a node has {num_gpus}"
    if recipe.train.trainer == "megatron":
        return 'train.trainer = "megatron" needs its own GPUs: only "torch" leaves them to engines in between'
    dealt, first_engine, first_other = dict(choices), 0, num_shared
    for role, choice in choices.items():
        asleep_gib = _estimate_sleeping_gib(role, choice, recipe)
        if role in ENGINE_ROLES:
            dealt[role] = replace(choice, first_gpu=first_engine, asleep_gib=asleep_gib)
            first_engine += numbers[role]
        elif role == "train":
            dealt[role] = replace(choice, first_gpu=0, asleep_gib=asleep_gib)
        elif numbers[role]:
            dealt[role] = replace(choice, first_gpu=first_other)
            first_other += numbers[role]
    return dealt


def _estimate_sleeping_gib(role: RoleName, choice: PartitionChoice, recipe: Recipe) -> float:
    """Estimate the host memory for what a role has on its GPUs and keeps while the other one works; KV is dropped."""
    if not choice.gpus_per_worker:
        return 0.0
    if role == "train":
        return round(estimate_sleeping_state(recipe, num_ranks=choice.workers_per_node) / GIB, 3)
    if role not in ENGINE_ROLES or recipe.engine.backend == "sim":
        return 0.0
    each = BYTES_FP32
    if recipe.engine.backend == "vllm":
        each = BYTES_PER_VALUE[choose_published_dtype(recipe, recipe.model.config)]
    return round((recipe.model.num_weights or 0) * each * choice.workers_per_node / GIB, 3)


def describe_shifts(choices: Mapping[RoleName, PartitionChoice]) -> list[str]:
    """Describe the GPUs that are used in turns; empty where every role has its own."""
    num = count_dealt_gpus(choices)
    gib = sum(choice.asleep_gib for choice in choices.values())
    kept = f"; what they keep in host memory meanwhile has {gib:.0f} GiB at the most" if gib >= 1 else ""
    return [f"the trainer and the engines use {num} GPU{'s' * (num > 1)} in turns, never at the same time{kept}"]
