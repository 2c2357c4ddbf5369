"""The memory of a rank of trainer "megatron", from the architecture of what it trains and its parallelism. Pure.

    estimate_megatron_memory     bytes on the device of a rank, by what they are for
    MegatronSetup                the settings that decide them

A rank has the layers of its stage, a part of each by tensor parallelism, and whole experts by expert parallelism. With
tensor parallelism the positions between layers are divided too. The first stage keeps the activations of one
micro-batch for each stage; the last one makes logits. The one that needs more decides.

The terms are those of trainers/megatron/layers.py; a test compares them with what its passes hold.
"""

import math
from typing import NamedTuple

import msgspec

from hpcrl.hardware.architecture import ModelArchitecture, count_kv_repeats
from hpcrl.hardware.degrees import find_part_layers
from hpcrl.hardware.memory_model import BYTES_BF16, BYTES_FP32
from hpcrl.hardware.train_memory import LOGITS_CHUNK_BYTES, MAX_CHUNK_LOGITS, PassMoment, RankMemory

NORM_BYTES = 2 * BYTES_FP32
"""A norm keeps its input and the normalized one, in float32 whatever the precision of products is."""
DENSE_INNER_PARTS = 5
"""Tensors of the inner size that an MLP keeps: both factors and their joint tensor, the activated one, the product."""
EXPERT_INNER_PARTS = 6
"""Tensors of the inner size that an expert keeps, whose product is weighted too."""
EXPERT_ENDED_PARTS, EXCHANGED_ENDED_PARTS = 3, 4
"""Tensors of all inputs or outputs of experts at the end of a layer, beside the inputs that are kept: inputs in the
order of tokens, outputs of each expert and together. With expert parallelism: inputs in the order of tokens and as they
were received, outputs together and by rank."""
CHUNK_BUFFERS = 3
"""Tensors that are on their way while a stage with several parts of the model computes: a received input, a received
gradient, and one that is sent."""
NORM_GRADIENT_PARTS = 5
"""Tensors in float32 of its input's size that exist at once while a norm's gradient is computed."""
ANGLE_PARTS = 4
"""Tensors of the size of a head that a layer keeps of each position: sine and cosine, for queries and for keys."""
EXPERT_IMBALANCE = 2.0
"""The excess of the busiest expert's tokens over their mean, as a share of it: an assumption, since routers decide.
Ranks with several experts are busy less unevenly, by the root of their number."""


class MegatronSetup(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of the trainer that decide what a rank holds."""

    num_ranks: int = 1
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    expert_parallel: int = 1
    context_parallel: int = 1
    """Ranks that divide the positions of the rows."""
    pipeline_chunks: int = 1
    """The parts of the model on each stage."""
    is_bf16: bool = False
    has_recompute: bool = False
    """True if layers keep only their inputs, and compute the rest again for the gradient."""

    @property
    def compute_bytes(self) -> int:
        """The bytes of a number in a matrix product, and between layers."""
        return BYTES_BF16 if self.is_bf16 else BYTES_FP32

    @property
    def num_copies(self) -> int:
        """The ranks with the same part of what is not an expert; each updates some of its tensors."""
        return max(self.num_ranks // (self.tensor_parallel * self.pipeline_parallel), 1)

    @property
    def num_expert_copies(self) -> int:
        return max(self.num_ranks // (self.expert_parallel * self.pipeline_parallel), 1)


class _StageLayers(NamedTuple):
    """The layers of a rank, and its place among the stages."""

    num_dense: int
    num_with_experts: int
    num_in_flight: float
    """The micro-batches whose activations it keeps at once; of several parts of the model, their mean."""
    num_sent: float
    """The tensors between stages, of a micro-batch each, that it has at once: what it sends stays with it, and the
    gradient comes into a tensor of the same size."""
    is_first: bool
    is_last: bool


def estimate_megatron_memory(shape: ModelArchitecture, setup: MegatronSetup, *, num_tokens: int) -> RankMemory:
    """Estimate the memory of the rank that needs most, with micro-batches of this many tokens, padding included.

    The ranks of a context-parallel group divide them.
    """
    num_tokens = -(-num_tokens // setup.context_parallel)
    stages = (_make_stage(shape, setup, index=index) for index in range(setup.pipeline_parallel))
    found = (_estimate_stage(shape, setup, stage, num_tokens=num_tokens) for stage in stages)
    return max(found, key=lambda memory: memory.total)


def _make_stage(shape: ModelArchitecture, setup: MegatronSetup, *, index: int) -> _StageLayers:
    num_after, num_chunks = setup.pipeline_parallel - 1 - index, setup.pipeline_chunks
    num_parts = setup.pipeline_parallel * num_chunks
    parts = range(index, num_parts, setup.pipeline_parallel)
    layers = [find_part_layers(shape.num_layers, num_parts=num_parts, index=part) for part in parts]
    num_dense = sum(layer in shape.dense_layers for part in layers for layer in part)
    is_last = num_after == 0
    in_flight = float(num_after + 1)
    sent = in_flight * (not is_last)
    if num_chunks > 1:
        num_under_way = 2 * num_after + (num_chunks - 1) * setup.pipeline_parallel + 1
        in_flight, sent = num_under_way / num_chunks, num_under_way - is_last + CHUNK_BUFFERS
    return _StageLayers(
        num_dense=num_dense,
        num_with_experts=sum(map(len, layers)) - num_dense,
        num_in_flight=in_flight,
        num_sent=sent,
        is_first=index == 0,
        is_last=is_last,
    )


def _estimate_stage(
    shape: ModelArchitecture, setup: MegatronSetup, stage: _StageLayers, *, num_tokens: int
) -> RankMemory:
    experts = stage.num_with_experts * shape.routed_params / setup.expert_parallel
    others = _count_other_params(shape, setup, stage)
    # A tensor is updated as a whole: a copy has at least the largest one.
    updated = max(others / setup.num_copies, _count_largest_tensor(shape, setup, stage))
    updated += experts / setup.num_expert_copies
    peak = max(_list_moments(shape, setup, stage, num_tokens), key=lambda moment: moment.total)
    return RankMemory(
        weights=BYTES_FP32 * (others + experts),
        gradients=BYTES_FP32 * (others + experts),
        optimizer=2 * BYTES_FP32 * updated,
        buckets=0.0,
        gathers=peak.gathers,
        activations=peak.activations,
        logits=peak.logits,
        peak=peak.name,
    )


def _count_other_params(shape: ModelArchitecture, setup: MegatronSetup, stage: _StageLayers) -> float:
    """Count the weights of a rank that are not those of experts."""
    num_tp, num_layers = setup.tensor_parallel, stage.num_dense + stage.num_with_experts
    is_alone_with_tied = stage.is_first and stage.is_last and shape.is_tied
    num_tables = stage.is_first + stage.is_last - is_alone_with_tied
    divided = num_layers * _count_divided_attention(shape) + stage.num_dense * shape.dense_mlp_params
    divided += num_tables * shape.embedding_params
    divided += stage.num_with_experts * 3 * shape.hidden_size * shape.shared_inner
    whole = num_layers * (shape.attention_params - _count_divided_attention(shape) + shape.norm_params)
    whole += stage.num_with_experts * shape.hidden_size * shape.num_experts + stage.is_last * shape.hidden_size
    return divided / num_tp + whole


def _count_divided_attention(shape: ModelArchitecture) -> int:
    """Count the weights of attention that tensor parallelism divides: not those that compress."""
    if not shape.kv_rank:
        return shape.attention_params
    compressing = shape.hidden_size * (shape.query_rank + shape.kv_rank + shape.rope_dim)
    return shape.attention_params - compressing


def _count_largest_tensor(shape: ModelArchitecture, setup: MegatronSetup, stage: _StageLayers) -> float:
    table = shape.embedding_params if stage.is_first or stage.is_last else 0
    return max(table, _count_first_matrix(shape, stage)) / setup.tensor_parallel


def _count_first_matrix(shape: ModelArchitecture, stage: _StageLayers) -> int:
    """Count the weights of an MLP's first matrix, for both factors of its inner values."""
    return (
        2 * shape.hidden_size * (shape.dense_inner if stage.num_dense else max(shape.shared_inner, shape.expert_inner))
    )


def _list_moments(
    shape: ModelArchitecture, setup: MegatronSetup, stage: _StageLayers, num_tokens: int
) -> list[PassMoment]:
    """List what a rank holds beside its state: in the backward pass of a layer, and at the last stage's head."""
    num_tp, each, hidden = setup.tensor_parallel, setup.compute_bytes, shape.hidden_size
    kept = num_tokens * (
        stage.num_dense * _count_kept_bytes(shape, setup, has_experts=False)
        + stage.num_with_experts * _count_kept_bytes(shape, setup, has_experts=True)
    )
    kinds = [False] * bool(stage.num_dense) + [True] * bool(stage.num_with_experts)
    working = num_tokens * max(_count_working_bytes(shape, setup, has_experts=kind) for kind in kinds)
    gradient = (BYTES_FP32 + each * setup.is_bf16) * _count_first_matrix(shape, stage) / num_tp
    buffer = num_tokens * each * hidden * (num_tp > 1)  # in which inputs of products are gathered, for all layers
    ended = num_tokens * max(_count_ended_bytes(shape, setup, has_experts=kind) for kind in kinds)
    released = num_tokens * max(_count_released_bytes(shape, setup, has_experts=kind) for kind in kinds)
    # Embeddings are in float32 whatever the precision of products is.
    between = (BYTES_FP32 - each) * stage.is_first * stage.num_in_flight + each * stage.num_sent
    held = stage.num_in_flight * kept + num_tokens * between * hidden / num_tp + buffer
    moments = [
        PassMoment("layer", 0.0, held + working),
        PassMoment("layer-gradient", gradient, held + working - released),
        PassMoment("again" if setup.has_recompute else "forward", 0.0, held + ended),
    ]
    if stage.is_last:
        own, embedding = num_tokens / num_tp, shape.embedding_params
        last = own * (NORM_BYTES * hidden + 2 * each * hidden)
        whole = each * embedding * (num_tp > 1 or setup.is_bf16)  # gathered, or in another precision
        share = min(own * shape.vocabulary_size / MAX_CHUNK_LOGITS, 1.0)
        chunk = share * (LOGITS_CHUNK_BYTES + each * MAX_CHUNK_LOGITS)
        # The whole gradient is summed and divided, and then has the precision of the weights.
        own_gradient = embedding / num_tp * (each * (num_tp > 1) + BYTES_FP32 * setup.is_bf16)
        moments += [
            PassMoment("head", whole, held + last, chunk + each * embedding),
            PassMoment("head-gradient", whole + own_gradient, held + last, each * embedding),
            PassMoment("norm", 0.0, held + own * NORM_GRADIENT_PARTS * BYTES_FP32 * hidden),
        ]
    return moments


def _count_kept_bytes(shape: ModelArchitecture, setup: MegatronSetup, *, has_experts: bool) -> float:
    """Count what a layer keeps of a token from the forward pass."""
    if setup.has_recompute:
        return setup.compute_bytes * shape.hidden_size / setup.tensor_parallel
    return _count_saved_bytes(shape, setup, has_experts=has_experts)


def _count_saved_bytes(shape: ModelArchitecture, setup: MegatronSetup, *, has_experts: bool) -> float:
    """Count what a layer keeps of a token if it keeps all."""
    each, hidden = setup.compute_bytes, shape.hidden_size
    around = shape.num_layer_norms * (NORM_BYTES + each) * hidden + _count_attention_bytes(shape, setup)
    angles = ANGLE_PARTS * each * (shape.rope_dim or shape.head_dim)  # of all positions
    if not has_experts:
        return angles + (around + DENSE_INNER_PARTS * each * shape.dense_inner) / setup.tensor_parallel
    routed = _count_routed(shape, setup) * each * (hidden + EXPERT_INNER_PARTS * shape.expert_inner)
    router = BYTES_FP32 * shape.num_experts
    shared = DENSE_INNER_PARTS * each * shape.shared_inner
    return angles + (around + routed + router + shared) / setup.tensor_parallel


def _count_attention_bytes(shape: ModelArchitecture, setup: MegatronSetup) -> int:
    """Count what attention keeps of a token: queries, keys, values, its output, the sums of its softmax, its norms."""
    each, swapped = setup.compute_bytes, 0
    queries, outputs = shape.num_heads * shape.head_dim, shape.num_heads * shape.value_dim
    if shape.kv_rank:  # queries, keys, values and outputs of their size (trainers/attention.py), and the outputs
        kept = 4 * queries + outputs
        ranks = shape.query_rank + shape.kv_rank
        return each * (kept + ranks) + NORM_BYTES * ranks + BYTES_FP32 * shape.num_heads
    keys, values = shape.num_kv_heads * shape.head_dim, shape.num_kv_heads * shape.value_dim
    # Queries and keys are kept after they were turned by their positions, beside the tensor that they come from.
    if setup.context_parallel > 1:  # values beside the tensor that they come from, and the output before its swap
        num_heads = shape.num_heads // setup.tensor_parallel
        num_groups = max(shape.num_kv_heads // setup.tensor_parallel, 1)
        repeats = count_kv_repeats(num_heads, num_groups, size=setup.context_parallel)
        swapped = values * repeats + keys * (repeats - 1) + outputs
    kept = queries + keys + (queries + keys + values) + outputs + swapped
    norms = NORM_BYTES * (queries + keys) * shape.has_query_norm
    return each * kept + norms + BYTES_FP32 * shape.num_heads


def _count_working_bytes(shape: ModelArchitecture, setup: MegatronSetup, *, has_experts: bool) -> float:
    """Count what the backward pass of one layer needs of a token beside what all layers keep."""
    each, hidden = setup.compute_bytes, shape.hidden_size
    if has_experts:
        needed = each * _count_routed(shape, setup) * (2 * hidden + shape.expert_inner) / setup.tensor_parallel
    else:  # the gradient of the output, and of both factors of the inner values, and the input that ranks gather again
        needed = each * (hidden + 2 * shape.dense_inner / setup.tensor_parallel)
        needed += each * hidden * (setup.tensor_parallel > 1)
    return needed + setup.has_recompute * _count_saved_bytes(shape, setup, has_experts=has_experts)


def _count_released_bytes(shape: ModelArchitecture, setup: MegatronSetup, *, has_experts: bool) -> float:
    """Count what a token has released of that when the gradient of the MLP's first matrix is there."""
    if has_experts:
        return setup.compute_bytes * _count_routed(shape, setup) * shape.hidden_size / setup.tensor_parallel
    return setup.compute_bytes * DENSE_INNER_PARTS * shape.dense_inner / setup.tensor_parallel


def _count_ended_bytes(shape: ModelArchitecture, setup: MegatronSetup, *, has_experts: bool) -> float:
    """Count what a token holds at the end of a layer beside what all keep: outputs, and those of experts."""
    num_outputs = 2.0  # that of its attention, and a gradient or, the first time, its input
    if has_experts:
        num_parts = EXCHANGED_ENDED_PARTS if setup.expert_parallel > 1 else EXPERT_ENDED_PARTS
        num_outputs += num_parts * _count_routed(shape, setup) + (shape.shared_inner > 0)
    outputs = num_outputs * setup.compute_bytes * shape.hidden_size / setup.tensor_parallel
    return outputs + setup.has_recompute * _count_saved_bytes(shape, setup, has_experts=has_experts)


def _count_routed(shape: ModelArchitecture, setup: MegatronSetup) -> float:
    """Count the experts that compute for a token on the busiest rank."""
    num_own = max(shape.num_experts // setup.expert_parallel, 1)
    busiest = min(1 + EXPERT_IMBALANCE / math.sqrt(num_own), setup.expert_parallel)
    return shape.experts_per_token * busiest
