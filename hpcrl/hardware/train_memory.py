"""The memory of a rank of trainer "torch" and of its node, from the architecture of what it trains. Pure.

    estimate_rank_memory, RankMemory    bytes on the device of a rank, by what they are for
    estimate_reading_pass               what a model that does not train holds beside its weights
    find_largest                        the largest micro-batch that fits
    estimate_node_memory, NodeMemory    bytes of host memory of a node of the trainer
    RankSetup                           the settings that decide both
    count_trained_params, count_adapter_params    the weights that change, and those of LoRA
    choose_shard_dim                    the dimension of a weight of which each rank has a part
    MAX_CHUNK_LOGITS                    logits that exist at once

A rank holds its state all the time. What comes and goes is computed at each moment that can be the peak, and the
largest counts: the last chunk of logits of the forward pass, the gradient of the output layer, the backward pass of the
largest layer. `python -m bench.memory` compares this with steps of the trainer on tensors without data.

The terms are those of transformers' layers under PyTorch's attention without a mask. A layer that is compiled, or has
separate kernels, keeps less.
"""

from collections.abc import Callable
from typing import NamedTuple

import msgspec

from hpcrl.hardware.architecture import ModelArchitecture, count_kv_repeats
from hpcrl.hardware.memory_model import BYTES_BF16, BYTES_FP32, GIB, compute_window_bytes

MAX_CHUNK_LOGITS = 1 << 25
"""The most logits that exist at once: 128 MiB in float32, 220 tokens of a vocabulary of 151,936, which is about what
keeps a GPU's matrix units busy."""
LOGITS_CHUNK_BYTES = 3 * BYTES_FP32 * MAX_CHUNK_LOGITS
"""The logits of a chunk, and two more tensors of their size."""
RANK_PROCESS_BYTES = 3 * GIB
"""Host memory of the process of a rank on a GPU: libraries, the CUDA context, the rows of a step."""
CPU_PROCESS_BYTES = 1 * GIB
"""The same of a rank on CPUs: libraries take 0.4 GiB."""
NUM_MOMENTS = 2
"""The moments of a weight in a checkpoint."""
MAX_TOKENS = 1 << 24
"""The micro-batches that are looked at, when the largest is looked for, have fewer tokens."""


class RankSetup(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of the trainer that decide what a rank holds."""

    num_ranks: int = 1
    is_sharded: bool = False
    """True with train.sharding = "full" on several ranks."""
    is_bf16: bool = False
    has_recompute: bool = False
    """True if layers keep only their inputs, and compute the rest again for the gradient."""
    is_packed: bool = False
    """True with train.rows = "packed"."""
    has_mask: bool = False
    """True if the attention of packed rows has a mask of all pairs: in models whose rows cannot be looked at alone."""
    window: int = 0
    """The positions that a layer attends to, in models with a sliding window: longer rows have masks; 0: all."""
    longest_row: int = 0
    """The most tokens of a row; 0: those of a micro-batch."""
    context_parallel: int = 1
    """Ranks that divide the positions of the rows."""
    lora_rank: int = 0
    is_offloaded: bool = False
    """True with train.offload: shards are in host memory while they do not compute."""
    has_bf16_moments: bool = False
    """True if checkpoints have the optimizer's moments in bfloat16."""

    def count_mask_pairs(self, num_tokens: int) -> int:
        """Count the pairs of positions in the mask of a layer, for this rank's tokens; 0 without a mask."""
        if self.has_mask:
            return num_tokens**2
        whole = num_tokens * self.context_parallel  # attention sees all positions
        row = min(whole, self.longest_row or whole)
        return row * whole if 0 < self.window <= row else 0

    @property
    def num_shards(self) -> int:
        return self.num_ranks if self.is_sharded else 1

    @property
    def trains_all(self) -> bool:
        """False if only adapters change: other weights have no gradients, and the precision of the passes."""
        return not self.lora_rank

    @property
    def weight_bytes(self) -> int:
        """The bytes of a weight of the model."""
        return BYTES_FP32 if self.trains_all else self.compute_bytes

    @property
    def saved_bytes(self) -> int:
        """The bytes of a trained weight in a checkpoint, with its moments."""
        return BYTES_FP32 + NUM_MOMENTS * (BYTES_BF16 if self.has_bf16_moments else BYTES_FP32)

    @property
    def compute_bytes(self) -> int:
        """The bytes of a number in a matrix product."""
        return BYTES_BF16 if self.is_bf16 else BYTES_FP32

    @property
    def stream_bytes(self) -> int:
        """The bytes of a number between layers: autocast leaves it in float32, sharded layers have one precision."""
        return BYTES_FP32 if self.trains_all and not self.is_sharded else self.compute_bytes


class RankMemory(msgspec.Struct, frozen=True, kw_only=True):
    """The bytes on the device of a rank: its state, and what else it holds at the peak."""

    weights: float
    gradients: float
    optimizer: float
    """The moments of AdamW."""
    buckets: float
    """The copies of gradients that replicas exchange."""
    gathers: float
    """Whole layers of sharded weights with their gradients on the way, and weights in another precision."""
    activations: float
    """Tensors that the tokens of the micro-batch keep for the gradient, and those of one layer at a time."""
    logits: float
    """The chunk of logits, and the gradient of the output layer."""
    peak: str
    """The moment of the peak."""

    @property
    def state(self) -> float:
        """The bytes that a rank holds all the time."""
        return self.weights + self.gradients + self.optimizer + self.buckets

    @property
    def total(self) -> float:
        return self.state + self.gathers + self.activations + self.logits


class PassMoment(NamedTuple):
    """The bytes that a rank holds at one moment beside its state."""

    name: str
    gathers: float
    activations: float
    logits: float = 0.0

    @property
    def total(self) -> float:
        return self.gathers + self.activations + self.logits


def estimate_rank_memory(shape: ModelArchitecture, setup: RankSetup, *, num_tokens: int) -> RankMemory:
    """Estimate the memory of a rank with a micro-batch of this many tokens, padding included.

    The ranks of a context-parallel group divide them.
    """
    num_tokens = -(-num_tokens // setup.context_parallel)
    uneven = _count_uneven_params(shape, setup.num_shards)
    trained = count_trained_params(shape, setup) / setup.num_shards + uneven * setup.trains_all
    frozen = 0.0 if setup.trains_all else shape.num_params / setup.num_shards + uneven
    has_buckets = setup.num_ranks > 1 and not setup.is_sharded
    list_moments = _list_sharded_moments if setup.is_sharded else _list_whole_moments
    moments = list_moments(shape, setup, num_tokens)
    peak = max(moments, key=lambda moment: moment.total)
    held = 0.0 if setup.is_offloaded else 1.0
    return RankMemory(
        weights=held * (BYTES_FP32 * trained + setup.weight_bytes * frozen),
        gradients=held * BYTES_FP32 * trained,
        optimizer=held * 2 * BYTES_FP32 * trained,
        buckets=BYTES_FP32 * trained * has_buckets,
        gathers=peak.gathers,
        activations=peak.activations,
        logits=peak.logits,
        peak=peak.name,
    )


def estimate_reading_pass(shape: ModelArchitecture, setup: RankSetup, *, num_tokens: int) -> PassMoment:
    """Estimate what a pass without a gradient holds beside the weights, where a rank has a model that does not train
    whole, and all positions of a micro-batch of this many tokens.
    """
    setup = msgspec.structs.replace(setup, context_parallel=1)
    each, hidden = setup.compute_bytes, shape.hidden_size
    angles = 2 * each * (shape.rope_dim or shape.head_dim)
    layer = max(_list_reading_bytes(shape, setup))
    last = (BYTES_FP32 + each) * hidden + 3 * BYTES_FP32
    moments = [
        PassMoment("reading", 0.0, num_tokens * (angles + layer) + _count_working_masks(setup, num_tokens)),
        PassMoment("reading", 0.0, float(num_tokens * (angles + 2 * each * hidden + last)), LOGITS_CHUNK_BYTES),
    ]
    return max(moments, key=lambda moment: moment.total)


def _list_reading_bytes(shape: ModelArchitecture, setup: RankSetup) -> list[float]:
    """List what a token holds in a layer that keeps nothing: in its attention, in its MLP, in its experts."""
    each, hidden, num_heads = setup.compute_bytes, shape.hidden_size, shape.num_heads
    num_kv_heads = num_heads if setup.has_mask else shape.num_kv_heads
    queries, keys, values = num_heads * shape.head_dim, num_kv_heads * shape.head_dim, num_kv_heads * shape.value_dim
    if shape.value_dim < shape.head_dim:  # values and outputs are as large as keys (trainers/attention.py)
        queries, values = queries + queries // 4, keys
    # Queries, and three tensors of their size while they are turned to their positions.
    found = [each * (3 * hidden + 4 * queries + keys + values + shape.query_rank + shape.kv_rank)]
    # With the embeddings, the input of the layer, the sum behind its attention, and its normalized one.
    if shape.num_dense_layers:
        found.append(each * (4 * hidden + 3 * shape.dense_inner))
    if shape.num_expert_layers:
        weighted = BYTES_FP32 if shape.has_precise_router else each
        inner = each * (hidden + 4 * shape.expert_inner)
        outputs = 2 * (each + weighted) * hidden  # inputs and outputs of experts, weighted ones in both orders
        router = 2 * BYTES_FP32 * shape.num_experts
        found.append(4 * each * hidden + router + shape.experts_per_token * max(inner, outputs))
        found.append(each * (5 * hidden + 3 * shape.shared_inner))
    return [float(size) for size in found]


def choose_shard_dim(shape: tuple[int, ...], num_ranks: int) -> int:
    """Return the dimension of a weight of which each rank has a part.

    It is the first; of a stack of experts whose number cannot be divided, another one that can.
    """
    if len(shape) < 3 or not shape[0] % num_ranks:
        return 0
    return next((dim for dim, size in enumerate(shape) if not size % num_ranks), 0)


def _count_uneven_params(shape: ModelArchitecture, num_shards: int) -> float:
    """Count the weights of experts that a rank has beyond an even share: those of whole experts, where none is cut."""
    num, inner, hidden = shape.num_experts, shape.expert_inner, shape.hidden_size
    stacks = ((num, 2 * inner, hidden), (num, hidden, inner)) if num else ()
    sizes = (stack[choose_shard_dim(stack, num_shards)] for stack in stacks)
    if not any(size % num_shards for size in sizes):
        return 0.0
    return shape.num_expert_params * (-(-num // num_shards) / num - 1 / num_shards)


def find_largest(count_bytes: Callable[[int], float], *, num_bytes: float) -> int:
    """Return the largest number of tokens whose bytes are within this memory; 0 if none is."""
    low, high = 0, MAX_TOKENS
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if count_bytes(middle) <= num_bytes else (low, middle)
    return low


def count_trained_params(shape: ModelArchitecture, setup: RankSetup) -> int:
    """Count the weights that change."""
    return shape.num_params if setup.trains_all else count_adapter_params(shape, rank=setup.lora_rank)


def count_adapter_params(shape: ModelArchitecture, *, rank: int) -> int:
    """Count the weights of adapters on all linear layers; the experts of a layer, one tensor, have none."""
    hidden, queries = shape.hidden_size, shape.num_heads * shape.head_dim
    keys, values = shape.num_kv_heads * shape.head_dim, shape.num_kv_heads * shape.value_dim
    outputs = shape.num_heads * shape.value_dim
    attention = 4 * hidden + queries + keys + values + outputs
    return rank * (
        shape.num_layers * attention
        + shape.num_dense_layers * 3 * (hidden + shape.dense_inner)
        + shape.num_expert_layers * 3 * (hidden + shape.shared_inner) * bool(shape.shared_inner)
    )


def _list_sharded_moments(shape: ModelArchitecture, setup: RankSetup, num_tokens: int) -> list[PassMoment]:
    """List the moments of shards (FSDP2): a layer is gathered while it computes, and the next one meanwhile."""
    each, hidden = setup.compute_bytes, shape.hidden_size
    layer, outer = shape.largest_layer_params, shape.head_params
    root = hidden if outer else shape.embedding_params + hidden  # what no part gathers for itself
    kept = each * root
    last = _count_last_bytes(shape, setup) * num_tokens
    inputs = _count_kept_bytes(shape, setup, num_tokens)
    stream = each * hidden * num_tokens
    chunk = LOGITS_CHUNK_BYTES
    ahead = each * layer
    if not setup.trains_all:  # no gradient is as large as a layer
        head_hidden = (BYTES_FP32 - each) * hidden * num_tokens
        working = _count_working_bytes(shape, setup, num_tokens)
        return [
            PassMoment("forward", kept + 2 * each * outer, inputs + last + stream, chunk),
            PassMoment("head", kept + each * outer, inputs + last + head_hidden, chunk),
            PassMoment("layer", kept + 2 * ahead, inputs + working),
        ]
    head_grad = each * shape.embedding_params
    reduced = BYTES_FP32 * outer * (1 + 1 / setup.num_shards)
    tied_grad = 0 if outer else head_grad  # the embedding's gradient is exchanged after the first layer's
    masks = _count_working_masks(setup, num_tokens)
    # Two layers that are gathered, and the gradient of another one on its way.
    around = kept + tied_grad + 2 * ahead + BYTES_FP32 * max(layer, outer)
    others = inputs if setup.has_recompute else inputs * (1 - 1 / shape.num_layers)
    return [
        PassMoment("forward", kept + 2 * each * outer, inputs + last + stream, chunk),
        PassMoment(
            "head", kept + each * outer, inputs + last + (BYTES_FP32 - each) * hidden * num_tokens, chunk + head_grad
        ),
        PassMoment("head-exchange", kept + ahead + reduced, inputs + last, head_grad),
        *(
            PassMoment(name, around + gradients, inputs + masks + num_tokens * tokens)
            for has_experts in _list_kinds(shape)
            for name, gradients, tokens in _list_mlp_moments(shape, setup, has_experts=has_experts)
        ),
        PassMoment("layer-end", around + ahead, others + stream),
        PassMoment("embedding", BYTES_FP32 * (shape.embedding_params + layer) + 2 * tied_grad + head_grad, stream),
    ]


def _list_whole_moments(shape: ModelArchitecture, setup: RankSetup, num_tokens: int) -> list[PassMoment]:
    """List the moments of a rank with the whole model; with bf16, autocast copies each weight that multiplies.

    It keeps the copies until the pass ends, but not those of experts, which are made beside it.
    """
    hidden, chunk = shape.hidden_size, LOGITS_CHUNK_BYTES
    layer, embedding = shape.largest_layer_params, shape.embedding_params
    last, inputs = _count_last_bytes(shape, setup) * num_tokens, _count_kept_bytes(shape, setup, num_tokens)
    layers = shape.num_params - embedding - shape.head_params
    has_casts, trains_head = setup.is_bf16 and setup.trains_all, setup.trains_all
    casts = BYTES_BF16 * layers * has_casts
    head = BYTES_BF16 * embedding * has_casts
    kept, one, made = casts, 0, casts
    if setup.has_recompute:
        kept, one = 0, BYTES_BF16 * layer * has_casts
        made = casts - BYTES_BF16 * shape.num_expert_params * has_casts
    head_grad = setup.compute_bytes * embedding * trains_head
    converted = BYTES_FP32 * embedding * has_casts
    gradient = 3 * _count_first_gradient(shape, setup) if setup.is_bf16 else _count_first_gradient(shape, setup)
    working = _count_working_bytes(shape, setup, num_tokens)
    stream = setup.stream_bytes * hidden * num_tokens
    return [
        PassMoment("forward", made + head, inputs + last + stream, chunk),
        PassMoment("head", kept + head, inputs + last + stream, chunk + head_grad),
        PassMoment("head-gradient", kept, inputs + last, head_grad + converted),
        PassMoment("layer", kept + one + gradient * trains_head, inputs + working),
    ]


def _count_kept_bytes(shape: ModelArchitecture, setup: RankSetup, num_tokens: int) -> float:
    """Count what all layers keep from the forward pass."""
    if setup.has_recompute:
        return float(shape.num_layers * setup.stream_bytes * shape.hidden_size * num_tokens)
    masks = shape.num_layers * _count_mask_bytes(setup, num_tokens)
    dense = shape.num_dense_layers * _count_saved_bytes(shape, setup, has_experts=False)
    return masks + num_tokens * (dense + shape.num_expert_layers * _count_saved_bytes(shape, setup, has_experts=True))


def _count_working_bytes(shape: ModelArchitecture, setup: RankSetup, num_tokens: int) -> float:
    """Count what the backward pass of one layer needs beside what all layers keep, for the layer that needs most."""
    needed = max(
        tokens
        for has_experts in _list_kinds(shape)
        for _, _, tokens in _list_mlp_moments(shape, setup, has_experts=has_experts)
    )
    return needed * num_tokens + _count_working_masks(setup, num_tokens)


def _list_kinds(shape: ModelArchitecture) -> list[bool]:
    """List whether layers have experts: both, if some have."""
    return [False] * bool(shape.num_dense_layers) + [True] * bool(shape.num_expert_layers)


def _list_mlp_moments(
    shape: ModelArchitecture, setup: RankSetup, *, has_experts: bool
) -> list[tuple[str, float, float]]:
    """List the moments of the backward pass of a layer's MLP that can be the peak: name, bytes of its gradients so far,
    and bytes that a token needs beside what all layers keep.

    Later there are more gradients and less of what the MLP has kept, which is released: without recomputation it is a
    part of what all layers keep.
    """
    each, hidden = setup.compute_bytes, shape.hidden_size
    again = setup.has_recompute * _count_saved_bytes(shape, setup, has_experts=has_experts)
    if not has_experts:
        inner, gradients = shape.dense_inner, each * shape.dense_mlp_params
        return [
            # The gradients of the output, and of both factors of the inner values.
            ("layer", gradients / 3, float(again + each * (hidden + 2 * inner))),
            ("mlp", float(gradients), float(again + each * (2 * hidden - 3 * inner))),
        ]
    num, inner = shape.experts_per_token, shape.expert_inner
    gradients = each * (shape.routed_params + 3 * hidden * shape.shared_inner)
    if setup.stream_bytes != each:  # autocast computes the sum of outputs in float32
        weighting = num * (2 * setup.stream_bytes * hidden + each * inner)
    else:  # the gradient of the weighted outputs, and its products with weights and with outputs
        weighting = num * 3 * hidden * (BYTES_FP32 if shape.has_precise_router else each)
    released = num * 2 * inner + 4 * shape.shared_inner
    return [
        ("weighting", 0.0, float(again + weighting)),
        ("layer", each * shape.routed_params / 3, float(again + each * num * (2 * inner - hidden))),
        ("experts", float(gradients), float(again + each * (hidden - released))),
    ]


def _count_working_masks(setup: RankSetup, num_tokens: int) -> float:
    """Count the masks of one layer: one of layers, one of booleans."""
    return _count_mask_bytes(setup, num_tokens) + setup.count_mask_pairs(num_tokens)


def _count_mask_bytes(setup: RankSetup, num_tokens: int) -> float:
    """Count a mask of packed rows or of a window: one entry for each pair, in the precision of attention."""
    return float(setup.compute_bytes * setup.count_mask_pairs(num_tokens))


def _count_first_gradient(shape: ModelArchitecture, setup: RankSetup) -> float:
    """Count the gradient of the weight that a layer's backward pass comes to first, the last of its MLP."""
    experts = shape.routed_params if shape.num_expert_layers else 0
    return setup.compute_bytes * max(experts, shape.dense_mlp_params * bool(shape.num_dense_layers)) / 3


def _count_last_bytes(shape: ModelArchitecture, setup: RankSetup) -> float:
    """Count what a token keeps behind the layers: the last norm, the input of the head, angles, and three numbers."""
    norm = (BYTES_FP32 + setup.stream_bytes * setup.trains_all) * shape.hidden_size
    angles = 2 * setup.stream_bytes * (shape.rope_dim or shape.head_dim)
    return norm + setup.compute_bytes * shape.hidden_size + angles + 3 * BYTES_FP32


def _count_saved_bytes(shape: ModelArchitecture, setup: RankSetup, *, has_experts: bool) -> int:
    """Count what a layer keeps of a token for the gradient, if it keeps all."""
    each, stream, hidden = setup.compute_bytes, setup.stream_bytes, shape.hidden_size
    # Its input in float32, and the normalized one for the gradient of its weight.
    norms = shape.num_layer_norms * (BYTES_FP32 + stream * setup.trains_all) * hidden
    is_cast = each != stream
    attention_inputs = each * hidden * (3 if is_cast else 1)  # autocast copies it for each product
    return (
        norms
        + attention_inputs
        + _count_attention_bytes(shape, setup)
        + (
            _count_expert_bytes(shape, setup)
            if has_experts
            else each * (hidden * (1 + is_cast) + 4 * shape.dense_inner)
        )
    )


def _count_expert_bytes(shape: ModelArchitecture, setup: RankSetup) -> int:
    """Count what a token keeps in a layer with experts: for each, its input, inner values and output."""
    each, hidden = setup.compute_bytes, shape.hidden_size
    routed = shape.experts_per_token * (2 * hidden + 4 * shape.expert_inner)
    router = BYTES_FP32 * shape.num_experts
    if shape.has_precise_router and setup.stream_bytes != BYTES_FP32:  # its input is converted
        router += BYTES_FP32 * hidden
    return each * (hidden + routed + 4 * shape.shared_inner) + router


def _count_attention_bytes(shape: ModelArchitecture, setup: RankSetup) -> int:
    """Count what attention keeps of a token: queries, keys, values, its output and the sums of its softmax."""
    each, num_kv_heads = setup.compute_bytes, shape.num_heads if setup.has_mask else shape.num_kv_heads
    outputs, values = shape.num_heads * shape.value_dim, shape.value_dim
    if values < shape.head_dim:  # attention has values and outputs as large as keys (trainers/attention.py)
        outputs, values = outputs + shape.num_heads * shape.head_dim, shape.head_dim
    elif setup.context_parallel > 1:  # the output is kept before and after the ranks swap their parts
        num_kv_heads *= count_kv_repeats(shape.num_heads, num_kv_heads, size=setup.context_parallel)
        outputs *= 2
    queries, keys = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    norms = (BYTES_FP32 + each * setup.trains_all) * (queries + keys) * shape.has_query_norm
    compressed = (BYTES_FP32 + each * (1 + setup.trains_all)) * (shape.query_rank + shape.kv_rank)
    kept = queries + num_kv_heads * (shape.head_dim + values) + outputs
    return norms + compressed + each * kept + BYTES_FP32 * shape.num_heads


class NodeMemory(msgspec.Struct, frozen=True, kw_only=True):
    """The bytes of host memory on a node of the trainer."""

    processes: float
    snapshot: float
    """The copies of weights and moments that are written to a checkpoint while training continues."""
    window: float
    """The shared memory of the versions of the weights that engines read."""
    state: float
    """The weights, gradients and moments of the ranks, with train.offload."""
    experts: float
    """The experts that engines chose for the tokens of a step, with train.router_replay."""

    @property
    def total(self) -> float:
        return self.processes + self.snapshot + self.window + self.state + self.experts


def estimate_node_memory(
    shape: ModelArchitecture,
    setup: RankSetup,
    *,
    num_ranks: int,
    published_dtype: str | None,
    num_published: int | None = None,
    choices: float = 0.0,
    process_bytes: int = RANK_PROCESS_BYTES,
) -> NodeMemory:
    """Estimate the host memory of a node with this many of the ranks, beside what is on the device of each.

    Nothing is published without a `published_dtype`; `num_published` is the number of values, by default all weights.
    `choices` are the bytes of experts to replay that each rank has.

    Each rank reads its slices of the model's files, so that loading needs less than the snapshot. A model that is not
    sharded is saved and published by one rank, whose node this is.
    """
    share = num_ranks / setup.num_ranks if setup.is_sharded else 1.0
    saved = count_trained_params(shape, setup) * share * setup.saved_bytes
    on_gpu = estimate_rank_memory(shape, msgspec.structs.replace(setup, is_offloaded=False), num_tokens=0)
    num_values = shape.num_params if num_published is None else num_published
    window = 0.0 if published_dtype is None else compute_window_bytes(num_values, dtype=published_dtype)
    return NodeMemory(
        processes=float(num_ranks * process_bytes),
        snapshot=saved,
        window=window * share,
        state=num_ranks * (on_gpu.weights + on_gpu.gradients + on_gpu.optimizer) * setup.is_offloaded,
        experts=num_ranks * choices,
    )
