"""The memory of the GPUs and nodes of the trainer: whether what trains fits, and what would make it fit. Pure.

find_trainer_memory      what each GPU and node holds
explain_trainer_refusal  why it does not fit, and what to change
estimate_sleeping_state  what ranks keep while engines have their GPUs
warn_long_trajectories   whether a trajectory as long as the model reads would fit
find_micro_batch         the tokens of a micro-batch that the trainer reads
describe_micro_batch     why it has that number
advise_on_shortage       what to change after memory ran out
change_recipe, show_settings    a recipe with other settings of the trainer, and these as advice
TrainerMemory            the result of the first

The largest micro-batch has train.tokens_per_micro_batch tokens, or engine.max_model_len where that is larger: a
trajectory is never divided. With train.recompute = "auto" layers are computed again where all would not fit otherwise.
With train.tokens_per_micro_batch = "auto" what is left of a GPU is used for tokens.
"""

import itertools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from math import ceil
from typing import Any, NamedTuple

import msgspec

from hpcrl.config.pipeline import needs_critic
from hpcrl.config.recipe import DEFAULT_MICRO_BATCH_TOKENS, Recipe
from hpcrl.config.site import Site
from hpcrl.hardware.architecture import (
    MEGATRON_FAMILIES,
    ModelArchitecture,
    find_context_conflict,
    find_parallel_conflict,
    guess_architecture,
)
from hpcrl.hardware.cost_model import USABLE_SHARE
from hpcrl.hardware.degrees import DEGREES, ParallelDegrees
from hpcrl.hardware.gpus import GpuModel
from hpcrl.hardware.megatron_memory import estimate_megatron_memory
from hpcrl.hardware.memory_model import BYTES_FP32, GIB
from hpcrl.hardware.train_memory import RankMemory, estimate_rank_memory, estimate_reading_pass, find_largest
from hpcrl.plan.demand import (
    PartitionChoice,
    advise_on_fixed_models,
    estimate_host_memory,
    estimate_trainer_node,
    find_longest_row,
    list_fixed_models,
    make_megatron_setup,
    make_rank_setup,
    settle_precision,
    show_weights,
)
from hpcrl.plan.trainer_checks import find_megatron_conflict, find_share_conflict

MAX_MICRO_BATCH_TOKENS = 1 << 16
"""The most tokens of a rank in a micro-batch that is chosen here: with fewer already, a GPU waits for nothing."""
MAX_TENSOR_RANKS = 8
"""The most ranks of a tensor-parallel group in an advice: they belong on one node."""
MAX_RANKS = 8192
"""The largest trainer that is tried for an advice."""
TOKEN_STEP = 256
"""Advised numbers of tokens are multiples of this."""


class TrainerMemory(msgspec.Struct, frozen=True, kw_only=True):
    """The GiB that each GPU and each node of the trainer holds at its peak."""

    gpu: str
    usable_gib: float
    """The memory of the GPU, less what the driver and fragments take."""
    num_tokens: int
    """The tokens of the largest micro-batch, for which this is computed."""
    recompute: bool
    """True if layers keep only their inputs for the gradient."""
    weights_gib: float
    gradients_gib: float
    optimizer_gib: float
    buckets_gib: float
    others_gib: float
    """The critic, and models that the trainer only reads."""
    gathers_gib: float
    activations_gib: float
    logits_gib: float
    free_gib: float
    most_tokens: int
    """The tokens of the largest micro-batch, or the longest trajectory, that fits."""
    row_limit: int | None = None
    """The tokens of the longest training row that fits as layers are computed; None if only weights are known."""
    node_processes_gib: float
    node_snapshot_gib: float
    node_window_gib: float
    node_state_gib: float
    """Weights, gradients and moments, with train.offload; weights and moments where engines have the GPUs at times."""
    node_experts_gib: float = 0.0
    """The experts that engines chose for the tokens of a step, with train.router_replay."""
    node_free_gib: float
    """Host memory of the node that nothing is reserved for."""

    @property
    def gpu_gib(self) -> float:
        """The memory that each GPU needs."""
        return self.usable_gib - self.free_gib

    @property
    def node_gib(self) -> float:
        """The host memory that the trainer needs on each node."""
        held = self.node_processes_gib + self.node_snapshot_gib + self.node_window_gib
        return held + self.node_state_gib + self.node_experts_gib

    @property
    def most_tokens_how(self) -> str:
        """The condition under which the most tokens fit, as the end of a sentence; empty without one."""
        needs_recompute = not self.recompute and self.row_limit is not None and self.row_limit < self.most_tokens
        return " with recomputation" * needs_recompute

    def describe(self) -> list[str]:
        """Describe what a GPU and a node hold, and what is left of them."""
        parts = {
            "weights": self.weights_gib,
            "gradients": self.gradients_gib,
            "optimizer": self.optimizer_gib,
            "buckets of gradients": self.buckets_gib,
            "other models": self.others_gib,
            "gathered or copied layers": self.gathers_gib,
            "activations": self.activations_gib,
            "logits": self.logits_gib,
        }
        shown = ", ".join(f"{name} {gib:.1f}" for name, gib in parts.items() if gib >= 0.05)
        state = f"weights, gradients and optimizer {self.node_state_gib:.0f}, " * (self.node_state_gib > 0)
        experts = f", experts to replay {self.node_experts_gib:.1f}" * (self.node_experts_gib >= 0.05)
        again = "layers are recomputed" if self.recompute else "all activations are kept"
        return [
            f"each GPU of the trainer ({self.gpu}) holds {self.gpu_gib:.1f} of {self.usable_gib:.1f} usable GiB: "
            f"{shown}",
            f"that is with {self.num_tokens} tokens in a micro-batch, and {again}; {self.free_gib:.1f} GiB are left, "
            f"and {self.most_tokens} tokens would fit{self.most_tokens_how}",
            f"each node of the trainer holds {self.node_gib:.0f} GiB: {state}processes {self.node_processes_gib:.0f}, "
            f"snapshot of a checkpoint {self.node_snapshot_gib:.0f}, weight window {self.node_window_gib:.0f}"
            f"{experts}; {self.node_free_gib:.0f} GiB are left",
        ]


class _RankNeed(NamedTuple):
    """The need of a rank, under settings that may be tried only."""

    memory: RankMemory
    others: float
    has_recompute: bool

    @property
    def total(self) -> float:
        return self.memory.total + self.others

    @property
    def without_tokens(self) -> float:
        """The bytes of models and the optimizer alone."""
        return self.memory.state + self.others


def find_trainer_memory(recipe: Recipe, choice: PartitionChoice | None, site: Site) -> TrainerMemory | None:
    """Find what each GPU and node of the trainer holds; None without GPUs or sizes."""
    shape, gpu = recipe.model.architecture, _find_gpu(recipe, choice, site)
    if shape is None or choice is None or gpu is None:
        return None
    recipe = settle_precision(recipe, gpu)
    usable = _find_usable_bytes(gpu)
    num_tokens = _choose_micro_batch(recipe, shape, num_bytes=usable)
    need = _compute_need(recipe, shape, num_bytes=usable, num_tokens=num_tokens)
    node = estimate_trainer_node(recipe, num_ranks=choice.workers_per_node)
    assert node is not None, "its GPU and its sizes are known"
    memory, asleep = need.memory, choice.asleep_gib * GIB
    return TrainerMemory(
        gpu=gpu.name,
        usable_gib=_to_gib(usable),
        num_tokens=num_tokens,
        recompute=need.has_recompute,
        weights_gib=_to_gib(memory.weights),
        gradients_gib=_to_gib(memory.gradients),
        optimizer_gib=_to_gib(memory.optimizer),
        buckets_gib=_to_gib(memory.buckets),
        others_gib=_to_gib(need.others),
        gathers_gib=_to_gib(memory.gathers),
        activations_gib=_to_gib(memory.activations),
        logits_gib=_to_gib(memory.logits),
        free_gib=_to_gib(usable - need.total),
        most_tokens=_find_room(recipe, shape, num_bytes=usable),
        row_limit=_find_row_limit(recipe, shape, need, num_bytes=usable),
        node_processes_gib=_to_gib(node.processes),
        node_snapshot_gib=_to_gib(node.snapshot),
        node_window_gib=_to_gib(node.window),
        node_state_gib=_to_gib(node.state + asleep),
        node_experts_gib=_to_gib(node.experts),
        node_free_gib=_to_gib(site.partitions[choice.partition].mem_gib_per_node * GIB - node.total - asleep),
    )


def estimate_sleeping_state(recipe: Recipe, *, num_ranks: int) -> float:
    """Estimate the bytes that this many ranks move to host memory when engines use their GPUs; 0 without sizes."""
    shape = recipe.model.architecture
    if shape is None or recipe.train.offload:
        return 0.0
    memory = _estimate_memory(recipe, shape, has_recompute=True, num_tokens=0)
    return num_ranks * (memory.weights + memory.optimizer + _count_other_bytes(recipe))


def explain_trainer_refusal(
    recipe: Recipe, choice: PartitionChoice | None, site: Site, *, num_taken: int = 0
) -> str | None:
    """Return why a rank of the trainer does not fit, and what would make it fit; None if it does.

    Other roles have `num_taken` nodes of the partition. A model that is known by its number of weights alone is refused
    only if its weights do not fit.
    """
    if choice is None:
        return None
    gpu, shape = _find_gpu(recipe, choice, site), recipe.model.architecture
    recipe = settle_precision(recipe, gpu)
    if gpu is None or shape is None:
        return _explain_state_refusal(recipe, choice, gpu)
    usable = _find_usable_bytes(gpu)
    num_tokens = _choose_micro_batch(recipe, shape, num_bytes=usable)
    need = _compute_need(recipe, shape, num_bytes=usable, num_tokens=num_tokens)
    if (need.total if recipe.model.config else need.without_tokens) <= usable:
        return None
    parts = {
        f"weights, gradients and optimizer of {show_weights(shape.num_params)} weights": need.memory.state,
        **_list_other_parts(recipe),
        "layers that are gathered or copied": need.memory.gathers,
        f"activations and logits of {num_tokens} tokens": need.memory.activations + need.memory.logits,
    }
    partition = site.partitions[choice.partition]
    most_ranks = (partition.max_nodes - num_taken) * partition.gpus_per_node
    listed = _list_advice(recipe, shape, gpu=gpu, num_tokens=num_tokens, gpus_per_node=partition.gpus_per_node)
    advice = _show_possible(listed, most_ranks=most_ranks)
    is_torch = recipe.train.trainer == "torch"
    if is_torch and not recipe.train.offload and recipe.resources.train.num_workers > 1:
        settings = ({"train.sharding": "full"} if recipe.train.sharding == "none" else {}) | {"train.offload": True}
        changed = change_recipe(recipe, settings)
        node = estimate_trainer_node(changed, num_ranks=choice.workers_per_node)
        fits = _compute_need(changed, shape, num_bytes=usable, num_tokens=num_tokens).total <= usable
        if fits and node is not None and node.total <= partition.mem_gib_per_node * GIB:
            advice.append(show_settings(settings))
    if not advice and is_torch:
        listed += _advise_on_megatron(recipe, shape, num_bytes=usable, gpus_per_node=partition.gpus_per_node)
        advice = _show_possible(listed, most_ranks=most_ranks)
    if not advice:
        advice = ["choose a site whose GPUs have more memory, or a smaller model"]
        if listed:
            num_ranks = min(map(_count_ranks, listed))
            advice = [
                f"it needs resources.train.num_workers = {num_ranks} at least, and {choice.partition} has "
                f"{most_ranks} GPUs{' beside other roles' * (num_taken > 0)}: choose another site, or a smaller model"
            ]
    return (
        f"a train worker needs {need.total / GIB:.0f} GiB ({_show_parts(parts)}) and has {usable / GIB:.0f} GiB on a "
        f"GPU of type {gpu.name} ({choice.partition}): {', or '.join(advice)}"
    )


def may_fit(recipe: Recipe, site: Site) -> bool:
    """Return whether a rank of the trainer fits on some GPU of the site, or that is not known."""
    shape, gpu = recipe.model.architecture, _find_largest_gpu(recipe, site)
    if shape is None or gpu is None:
        return True
    return _has_room(settle_precision(recipe, gpu), shape, num_bytes=_find_usable_bytes(gpu))


def _has_room(recipe: Recipe, shape: ModelArchitecture, *, num_bytes: float) -> bool:
    if _compute_need(recipe, shape, num_bytes=num_bytes, num_tokens=0).without_tokens > num_bytes:
        return False
    num_tokens = _choose_micro_batch(recipe, shape, num_bytes=num_bytes)
    return _compute_need(recipe, shape, num_bytes=num_bytes, num_tokens=num_tokens).total <= num_bytes


def may_hold_state(recipe: Recipe, site: Site) -> bool:
    """Return whether some GPU of the site holds what a rank has without any tokens, or that is not known."""
    shape, gpu = recipe.model.architecture, _find_largest_gpu(recipe, site)
    if shape is None or gpu is None:
        return True
    recipe, usable = settle_precision(recipe, gpu), _find_usable_bytes(gpu)
    return _compute_need(recipe, shape, num_bytes=usable, num_tokens=0).without_tokens <= usable


def _find_largest_gpu(recipe: Recipe, site: Site) -> GpuModel | None:
    """Return the GPU of the site with the most memory; None without GPUs, or where one of them is not known."""
    gpus = [site.find_gpu(name) for name in {each.gpu for each in site.partitions.values() if each.gpus_per_node}]
    if not recipe.resources.train.gpus_per_worker or None in gpus:
        return None
    return max((gpu for gpu in gpus if gpu is not None), key=_find_usable_bytes, default=None)


def warn_long_trajectories(memory: TrainerMemory | None, recipe: Recipe) -> list[str]:
    """Warn if the recipe lets trajectories become longer than a GPU of the trainer has room for."""
    longest = recipe.engine.max_model_len or recipe.model.config.get("max_position_embeddings")
    if memory is None or not recipe.has_rollouts or longest is None or recipe.train.max_row_tokens != "auto":
        return []
    if memory.most_tokens < longest:
        fitting = _round_tokens(memory.most_tokens)
        more = ", or raise resources.train.num_workers" * (recipe.train.sharding == "full")
        more += _advise_on_length(memory, recipe, longest=longest)
        return [
            f"a trajectory may have {longest} tokens, and a GPU of the trainer ({memory.gpu}) has room for {fitting}, "
            f"so longer ones are not trained on: set engine.max_model_len = {fitting}{more}"
        ]
    if memory.row_limit is None or memory.row_limit >= longest:
        return []
    return [
        f"a trajectory may have {longest} tokens, and while layers keep all activations a GPU of the trainer "
        f"({memory.gpu}) has room for {_round_tokens(memory.row_limit)}, so longer ones are not trained on: set "
        f"train.recompute = true, or engine.max_model_len to the longest that you want"
    ]


def _advise_on_length(memory: TrainerMemory, recipe: Recipe, *, longest: int) -> str:
    """Return the further advice to divide the positions of rows, if some number of ranks then have room for them."""
    shape = recipe.model.architecture
    if shape is None:
        return ""
    for settings in _list_context_changes(recipe):
        room = _find_room(change_recipe(recipe, settings), shape, num_bytes=memory.usable_gib * GIB)
        if room >= longest:
            return f", or {show_settings(settings)}"
    return ""


def find_micro_batch(memory: TrainerMemory | None, recipe: Recipe) -> int:
    """Return the tokens of a micro-batch, as the recipe asks for or as they fit on a GPU."""
    is_open = recipe.train.tokens_per_micro_batch == "auto"
    return memory.num_tokens if is_open and memory is not None else recipe.train.micro_batch_tokens


def describe_micro_batch(memory: TrainerMemory | None, recipe: Recipe) -> list[str]:
    """Describe the tokens of a micro-batch, if they were chosen by what fits."""
    if memory is None or recipe.train.tokens_per_micro_batch != "auto" or not recipe.model.config:
        return []
    return [
        f"train.tokens_per_micro_batch = {memory.num_tokens}: {memory.most_tokens} would fit{memory.most_tokens_how}"
    ]


def advise_on_shortage(recipe: Recipe, *, has_gpus: bool, num_rows: int = 0, num_tokens: int = 0) -> str:
    """Return the settings that leave a rank more memory, after it ran out with a micro-batch of this size."""
    train = recipe.train
    found = []
    if num_rows > 1:
        found.append(f"train.tokens_per_micro_batch = {num_tokens // 2} at the most")
    if train.trainer == "torch":
        if train.recompute is not True:
            found.append("train.recompute = true")
        whole = 'train.sharding = "full" and ' * (train.sharding == "none")
        found.append(f"{whole}more ranks (resources.train.num_workers)")
        if num_rows == 1:
            found.append("a larger train.context_parallel")
    else:
        found.append("a larger train.tensor_parallel")
    if train.precision == "fp32" and has_gpus:
        found.append('train.precision = "bf16"')
    if recipe.has_rollouts and num_rows == 1 < num_tokens:
        found.append(f"engine.max_model_len = {num_tokens // 2} at the most")
    if not has_gpus:
        found.append("more memory (resources.train.mem_gib_per_worker)")
    return f"choose {', or '.join(found)}"


def _explain_state_refusal(recipe: Recipe, choice: PartitionChoice, gpu: GpuModel | None) -> str | None:
    """Return why the models do not fit into a worker without a GPU, or into a GPU with a policy of unknown size."""
    shape, advice = recipe.model.architecture, ["raise resources.train.mem_gib_per_worker"]
    limit = recipe.resources.train.mem_gib_per_worker * GIB
    if gpu is not None:
        limit = _find_usable_bytes(gpu)
        advice = advise_on_fixed_models(list_fixed_models(recipe))
    elif choice.gpus_per_worker:
        return None
    parts = _list_other_parts(recipe)
    if shape is not None and gpu is None and recipe.model.config:
        parts = _list_cpu_parts(recipe, shape) | parts
        advice = [f"{advice[0]} to {ceil(sum(parts.values()) / GIB)}"]
    elif shape is not None:
        state = _estimate_memory(recipe, shape, has_recompute=True, num_tokens=0).state
        parts = {f"{show_weights(shape.num_params)} weights": state} | parts
    needed = sum(parts.values())
    if needed <= limit:
        return None
    return (
        f"a train worker needs {needed / GIB:.0f} GiB ({_show_parts(parts)}) and has {limit / GIB:.0f} GiB "
        f"({choice.partition}): {', or '.join(advice)}"
    )


def _list_cpu_parts(recipe: Recipe, shape: ModelArchitecture) -> dict[str, float]:
    """List what a rank on CPUs holds for the policy; the window of the weights is counted beside its workers' memory.

    Without a GPU, layers are computed again as the trainer decides by itself.
    """
    train, num_tokens = recipe.train, max(recipe.train.micro_batch_tokens, find_longest_row(recipe))
    has_recompute = train.recompute is True
    if train.recompute == "auto" and train.trainer == "torch":
        has_recompute = make_rank_setup(recipe, has_recompute=False).is_sharded
    memory = _estimate_memory(recipe, shape, has_recompute=has_recompute, num_tokens=num_tokens)
    host = estimate_host_memory(recipe, shape, num_ranks=1)
    return {
        f"weights, gradients and optimizer of {show_weights(shape.num_params)} weights": memory.state + host.state,
        "layers that are gathered or copied": memory.gathers,
        f"activations and logits of {num_tokens} tokens": memory.activations + memory.logits,
        "the snapshot of a checkpoint": host.snapshot,
        "experts to replay": host.experts,
        "its process": host.processes,
    }


def _find_gpu(recipe: Recipe, choice: PartitionChoice | None, site: Site) -> GpuModel | None:
    if choice is None or not choice.gpus_per_worker:
        return None
    return site.find_gpu(site.partitions[choice.partition].gpu)


def _find_usable_bytes(gpu: GpuModel) -> float:
    return gpu.memory_gib * USABLE_SHARE * GIB


def _choose_micro_batch(recipe: Recipe, shape: ModelArchitecture, *, num_bytes: float) -> int:
    """Return the tokens of the largest micro-batch; where the recipe leaves it open, what fits into this memory.

    More tokens than the default do not make up for layers that are computed again.
    """
    longest = find_longest_row(recipe)
    wanted = max(recipe.train.micro_batch_tokens, longest)
    has_stages = recipe.train.degrees.pipeline > 1  # which work at once only on several micro-batches
    if recipe.train.tokens_per_micro_batch != "auto" or not recipe.model.config or has_stages:
        return wanted
    need = _compute_need(recipe, shape, num_bytes=num_bytes, num_tokens=wanted)
    setup = make_rank_setup(recipe, has_recompute=need.has_recompute)
    most = _find_most_tokens(recipe, shape, has_recompute=need.has_recompute, num_bytes=num_bytes - need.others)
    # The mask of packed rows, and the time that it takes, grow with the square of their tokens.
    limit = wanted if setup.has_mask else max(MAX_MICRO_BATCH_TOKENS * setup.context_parallel, longest)
    return max(min(_round_tokens(most), limit), longest or DEFAULT_MICRO_BATCH_TOKENS)


def _compute_need(recipe: Recipe, shape: ModelArchitecture, *, num_bytes: float, num_tokens: int) -> _RankNeed:
    """Compute what a rank needs; layers are computed again only where they must be, or where the recipe asks for it."""
    asked, others = recipe.train.recompute, _count_other_bytes(recipe)
    for has_recompute in (False, True) if asked == "auto" else (asked,):
        memory = _estimate_memory(recipe, shape, has_recompute=has_recompute, num_tokens=num_tokens)
        need = _RankNeed(memory, others, has_recompute)
        if need.total <= num_bytes:
            break
    return need


def _find_row_limit(recipe: Recipe, shape: ModelArchitecture, need: _RankNeed, *, num_bytes: float) -> int | None:
    """Find the longest row that fits; None for a model that is known by its number of weights alone."""
    if not recipe.model.config:
        return None
    left = num_bytes - need.others
    return _find_most_tokens(recipe, shape, has_recompute=need.has_recompute, num_bytes=left) or None


def _find_room(recipe: Recipe, shape: ModelArchitecture, *, num_bytes: float) -> int:
    """Find the tokens of the largest micro-batch that fits."""
    left, has_recompute = num_bytes - _count_other_bytes(recipe), recipe.train.recompute is not False
    return _find_most_tokens(recipe, shape, has_recompute=has_recompute, num_bytes=left)


def _estimate_memory(recipe: Recipe, shape: ModelArchitecture, *, has_recompute: bool, num_tokens: int) -> RankMemory:
    """Estimate what a rank of the recipe's trainer holds beside other models at its peak."""
    return _make_estimate(recipe, shape, has_recompute=has_recompute)(num_tokens)


def _find_most_tokens(recipe: Recipe, shape: ModelArchitecture, *, has_recompute: bool, num_bytes: float) -> int:
    """Return the tokens of the largest micro-batch that a rank has room for beside other models."""
    estimate = _make_estimate(recipe, shape, has_recompute=has_recompute)
    return find_largest(lambda num: estimate(num).total, num_bytes=num_bytes)


def _make_estimate(recipe: Recipe, shape: ModelArchitecture, *, has_recompute: bool) -> Callable[[int], RankMemory]:
    """Return what estimates the memory of a rank: with the passes of the policy, or of a model that it has whole."""
    setup, is_megatron = make_rank_setup(recipe, has_recompute=has_recompute), recipe.train.trainer == "megatron"
    parallel = make_megatron_setup(recipe, has_recompute=has_recompute) if is_megatron else None
    whole = [
        shape if model.is_policy else guess_architecture(model.num_params)
        for model in list_fixed_models(recipe)
        if model.is_whole
    ]

    def estimate(num_tokens: int) -> RankMemory:
        if parallel is not None:
            memory = estimate_megatron_memory(shape, parallel, num_tokens=num_tokens)
        else:
            memory = estimate_rank_memory(shape, setup, num_tokens=num_tokens)
        for fixed_shape in whole:  # it computes while the policy does not
            moment = estimate_reading_pass(fixed_shape, setup, num_tokens=num_tokens)
            if memory.state + moment.total > memory.total:
                parts = {"activations": moment.activations, "logits": moment.logits}
                memory = msgspec.structs.replace(memory, gathers=moment.gathers, **parts, peak=moment.name)
        return memory

    return estimate


def _list_other_parts(recipe: Recipe) -> dict[str, float]:
    """List the bytes of the critic, and of the models that a rank only reads, which are sharded as the policy is."""
    setup, shape = make_rank_setup(recipe, has_recompute=True), recipe.model.architecture
    found: dict[str, float] = {}
    if shape is not None and needs_critic(recipe.train):
        full = msgspec.structs.replace(setup, lora_rank=0)
        found["the critic"] = estimate_rank_memory(shape, full, num_tokens=0).state
    each, num_shards = setup.compute_bytes, setup.num_shards
    is_megatron = recipe.train.trainer == "megatron"
    if is_megatron:
        each, num_shards = BYTES_FP32, recipe.train.degrees.tensor * recipe.train.degrees.pipeline
    for model in list_fixed_models(recipe):
        size = model.num_params * (setup.compute_bytes if model.is_whole else each / num_shards)
        if is_megatron and model.is_policy and not model.is_whole and shape is not None:  # its experts are divided too
            size = _estimate_memory(recipe, shape, has_recompute=True, num_tokens=0).weights
        name = f"{show_weights(model.num_params)} weights of the model of {model.setting}"
        found[name] = found.get(name, 0.0) + size
    return found


def _count_other_bytes(recipe: Recipe) -> float:
    return sum(_list_other_parts(recipe).values())


def _show_parts(parts: Mapping[str, float]) -> str:
    return ", ".join(f"{part / GIB:.0f} for {name}" for name, part in parts.items() if part > GIB / 2)


def _list_advice(
    recipe: Recipe, shape: ModelArchitecture, *, gpu: GpuModel, num_tokens: int, gpus_per_node: int
) -> list[dict[str, Any] | str]:
    """List the changes after each of which the micro-batch fits; the fewest settings first."""
    found: list[dict[str, Any] | str] = []
    is_megatron, num_bytes = recipe.train.trainer == "megatron", _find_usable_bytes(gpu)
    kinds = [_list_changes(recipe, has_bf16=gpu.has_bf16), _list_context_changes(recipe)]
    if is_megatron:
        kinds = [_list_megatron_changes(recipe, gpus_per_node=gpus_per_node)]
    for changes in kinds:
        for settings in changes:
            tried = _list_choices(change_recipe(recipe, settings))
            needs = (_compute_need(each, shape, num_bytes=num_bytes, num_tokens=num_tokens) for each in tried)
            if any(need.total <= num_bytes for need in needs):
                found.append(settings)
                break
    enough = recipe
    if recipe.train.recompute is False:
        enough = change_recipe(recipe, {"train.recompute": "auto"})
    room = _round_tokens(_find_room(enough, shape, num_bytes=num_bytes))
    if 0 < room < num_tokens:
        limits = {}
        if recipe.train.tokens_per_micro_batch != "auto" or not recipe.engine.max_model_len:
            limits["train.tokens_per_micro_batch"] = recipe.train.micro_batch_tokens
        if recipe.has_rollouts:
            limits["engine.max_model_len"] = recipe.engine.max_model_len or 0
        shorter: dict[str, Any] = {name: room for name, now in limits.items() if now > room}
        again = {"train.recompute": "auto"} if enough is not recipe else {}
        found.append(again | shorter)
    models = list_fixed_models(recipe)
    found += _advise_on_sharing(recipe, shape, num_bytes=num_bytes, num_tokens=num_tokens)
    if models and not is_megatron:
        found.append('train.trainer = "megatron" with train.tensor_parallel, which splits all models')
    return [*found, *advise_on_fixed_models(models)]


def _count_ranks(change: Mapping[str, Any] | str) -> int:
    """Count the ranks of the trainer after a change; 0 where it leaves their number."""
    return 0 if isinstance(change, str) else int(change.get("resources.train.num_workers", 0))


def _show_possible(changes: Sequence[dict[str, Any] | str], *, most_ranks: int) -> list[str]:
    """Show the changes with no more ranks than there are GPUs for."""
    possible = (change for change in changes if _count_ranks(change) <= most_ranks)
    return [change if isinstance(change, str) else show_settings(change) for change in possible]


def _list_choices(recipe: Recipe) -> Iterator[Recipe]:
    """Yield a recipe whole, and with the sizes of groups that the plan may choose for its ranks."""
    yield recipe
    if recipe.train.trainer == "torch":
        yield from (change_recipe(recipe, {"train.context_parallel": size}) for size in list_context_sizes(recipe))


def list_context_sizes(recipe: Recipe) -> list[int]:
    """List the groups of ranks of trainer "torch" that may divide the positions of rows, if a recipe leaves it open."""
    num_ranks, config = recipe.resources.train.num_workers, recipe.model.config
    if recipe.train.context_parallel != "auto" or not config:
        return []
    powers = (2**exponent for exponent in range(1, num_ranks.bit_length()))
    return [size for size in powers if not num_ranks % size and not find_context_conflict(config, size=size)]


def _list_changes(recipe: Recipe, *, has_bf16: bool) -> Iterator[dict[str, Any]]:
    """Yield settings to try: alone, together, and with more and more ranks."""
    train, num_ranks = recipe.train, recipe.resources.train.num_workers
    single: dict[str, Any] = {}
    if train.recompute is False:
        single["train.recompute"] = "auto"
    if train.sharding == "none" and num_ranks > 1:
        single["train.sharding"] = "full"
    if train.precision == "fp32" and has_bf16:
        single["train.precision"] = "bf16"
    yield from ({name: value} for name, value in single.items())
    if len(single) > 1:
        yield single
    if train.sharding == "none":
        single["train.sharding"] = "full"
    more = num_ranks * 2
    while more <= MAX_RANKS:
        always = {name: value for name, value in single.items() if name != "train.precision"}
        for settings in (always, single):
            yield settings | {"resources.train.num_workers": more}
        more *= 2


def _list_megatron_changes(recipe: Recipe, *, gpus_per_node: int) -> Iterator[dict[str, Any]]:
    """Yield settings to try for trainer "megatron": first recomputation, then parallelism of more and more ranks.

    Those that share a layer stay on one node.
    """
    train, shape, num_ranks = recipe.train, recipe.model.architecture, recipe.resources.train.num_workers
    again: dict[str, Any] = {"train.recompute": "auto"} if train.recompute is False else {}
    if again:
        yield again
    if shape is None:
        return
    now, found = train.degrees.settings, []
    for degrees in list_recipe_divisions(recipe, shape):
        divided, numbers = degrees.num_divided, list(degrees.settings.values())
        num = -(-num_ranks // divided) * divided
        if degrees.tensor == train.degrees.tensor or num <= gpus_per_node or gpus_per_node % degrees.tensor == 0:
            found.append((num, sum(numbers), numbers))
    for num, _, numbers in sorted(found):
        new = dict(zip(now, numbers, strict=True))
        settings = {f"train.{name}": new[name] for name in now if new[name] != now[name]}
        if num != num_ranks:
            settings["resources.train.num_workers"] = num
        if settings and num <= MAX_RANKS:
            yield again | settings
    yield from (again | {"resources.train.num_workers": num_ranks * more} for more in (2, 4, 8, 16, 32))


def _advise_on_megatron(
    recipe: Recipe, shape: ModelArchitecture, *, num_bytes: float, gpus_per_node: int
) -> list[dict[str, Any] | str]:
    """Advise trainer "megatron" where it takes the recipe, with more ranks if needed; the plan chooses open degrees."""
    given: dict[str, Any] = {"train.trainer": "megatron"}
    if recipe.train.sharding == "full":  # which it refuses
        given["train.sharding"] = "auto"
    changed = change_recipe(recipe, {"train.sharding": recipe.train.sharding} | given)
    if shape.family not in MEGATRON_FAMILIES or find_megatron_conflict(changed.train) is not None:
        return []
    open_degrees = {f"train.{name}_parallel" for name in DEGREES if getattr(recipe.train, f"{name}_parallel") == "auto"}
    for settings in ({}, *_list_megatron_changes(changed, gpus_per_node=gpus_per_node)):
        tried = change_recipe(changed, {"train.sharding": changed.train.sharding} | settings)
        if find_share_conflict(tried) is None and _has_room(tried, shape, num_bytes=num_bytes):
            shown = {name: value for name, value in settings.items() if name not in open_degrees}
            return [given | shown]
    return []


def list_recipe_divisions(
    recipe: Recipe, shape: ModelArchitecture, *, fixed: Collection[str] = ()
) -> Iterator[ParallelDegrees]:
    """Yield the divisions of a recipe's model by trainer "megatron" with its degrees or more; the `fixed` ones stay.

    Where the number of weights alone is known, these are powers of two, which divide most models.
    """
    least, num_chunks = recipe.train.degrees, recipe.train.pipeline_chunks
    if recipe.model.config:
        yield from list_divisions(shape, least, fixed=fixed, num_chunks=num_chunks)
        return
    most = {"tensor": MAX_TENSOR_RANKS, "pipeline": shape.num_layers // num_chunks}
    for tensor, pipeline in itertools.product(
        *([getattr(least, name)] if name in fixed else _list_doubled(getattr(least, name), most[name]) for name in most)
    ):
        if num_chunks == 1 or pipeline > 1:
            yield msgspec.structs.replace(least, tensor=tensor, pipeline=pipeline)


def _list_doubled(least: int, most: int) -> list[int]:
    """Return a number and those of its doubles that are not above another."""
    return [least, *(least << power for power in range(1, most.bit_length()) if least << power <= most)]


def list_divisions(
    shape: ModelArchitecture, least: ParallelDegrees, *, fixed: Collection[str] = (), num_chunks: int = 1
) -> Iterator[ParallelDegrees]:
    """Yield the divisions of a model by trainer "megatron" with these degrees or more; the `fixed` ones stay."""
    options = {
        "tensor": _list_divisors(
            shape.num_heads if shape.kv_rank else shape.num_kv_heads, at_least=least.tensor, at_most=MAX_TENSOR_RANKS
        ),
        "pipeline": _list_stages(shape.num_layers, at_least=least.pipeline),
        "expert": _list_divisors(shape.num_experts or 1, at_least=least.expert),
        "context": _list_divisors(shape.num_heads, at_least=least.context),
    }
    given = [[getattr(least, name)] if name in fixed else options[name] for name in DEGREES]
    for numbers in itertools.product(*given):
        degrees = ParallelDegrees(**dict(zip(DEGREES, numbers, strict=True)))
        if find_parallel_conflict(shape, degrees, num_chunks=num_chunks) is None:
            yield degrees


def _list_stages(num_layers: int, *, at_least: int) -> list[int]:
    """List the numbers of stages to try: those that divide the layers, and powers of two."""
    return [num for num in range(at_least, num_layers + 1) if num_layers % num == 0 or num.bit_count() == 1]


def _list_divisors(number: int, *, at_least: int, at_most: int = MAX_RANKS) -> list[int]:
    return [each for each in range(at_least, min(number, at_most) + 1) if number % each == 0]


def _list_context_changes(recipe: Recipe) -> Iterator[dict[str, Any]]:
    """Yield settings with larger and larger groups of ranks that divide the positions of rows."""
    train, config, num_ranks = recipe.train, recipe.model.config, recipe.resources.train.num_workers
    others: dict[str, Any] = {"train.sharding": "full"} if train.sharding == "none" else {}
    if train.recompute is False:
        others["train.recompute"] = "auto"
    for size in range(train.degrees.context + 1, num_ranks + 1) if config else ():
        if num_ranks % size == 0 and find_context_conflict(config, size=size) is None:
            yield others | {"train.context_parallel": size}


def change_recipe(recipe: Recipe, settings: dict[str, Any]) -> Recipe:
    """Return the recipe with other settings of the trainer, sharded where it leaves that open."""
    replace = msgspec.structs.replace
    train = {name.removeprefix("train."): value for name, value in settings.items() if name.startswith("train.")}
    num_ranks = settings.get("resources.train.num_workers", recipe.resources.train.num_workers)
    resources = replace(recipe.resources, train=replace(recipe.resources.train, num_workers=num_ranks))
    if recipe.train.sharding == "auto":
        train = {"sharding": "full"} | train
    return replace(recipe, train=replace(recipe.train, **train), resources=resources)


def _advise_on_sharing(recipe: Recipe, shape: ModelArchitecture, *, num_bytes: float, num_tokens: int) -> list[str]:
    """Return the advice to let ranks divide the models that some have whole, if a rank then has room."""
    replace, nodes = msgspec.structs.replace, recipe.train.pipeline
    names = [name for name, node in nodes.items() if node.data_parallel is not None]
    divided = {name: replace(node, data_parallel=None) for name, node in nodes.items()}
    changed = replace(recipe, train=replace(recipe.train, pipeline=divided))
    if not names or _compute_need(changed, shape, num_bytes=num_bytes, num_tokens=num_tokens).total > num_bytes:
        return []
    return [f"remove {' and '.join(f'train.pipeline.{name}.data_parallel' for name in names)}"]


def show_settings(settings: dict[str, Any]) -> str:
    """Show settings as advice."""
    shown = (
        f'{name} = "{value}"' if isinstance(value, str) else f"{name} = {str(value).lower()}"
        for name, value in settings.items()
    )
    return f"set {' and '.join(shown)}"


def _round_tokens(num: int) -> int:
    return num // TOKEN_STEP * TOKEN_STEP


def _to_gib(num_bytes: float) -> float:
    return round(num_bytes / GIB, 2)
