"""Map shards of canonical (HF) tensors to a Megatron rank's own tensors; arithmetic only.

    ModelDims              what the map needs of a model, of one of MEGATRON_FAMILIES
    ParallelRank           a rank's part of each layer (TP, EP), its layers (PP), and its copy of both
    ShardMapping           one shard and its place in a Megatron tensor
    map_shards             every shard that a rank holds
    list_chunk_layers      the layers of a part of the model
    EMBEDDING, name_head   Megatron's names of the table of words and of the output layer
    read_model_dims        the sizes in a config.json
    check_parallelism      refuse a parallelism that does not divide the model
    pad_vocab_size         the rows of the padded embedding

Megatron fuses q, k and v, one query group after the other (its queries, its key, its value), and gate and up; a rank
of a tensor-parallel group has whole query groups, and its own rows of gate and of up. An expert is never divided: each
rank of an expert-parallel group has whole ones. The canonical names are those of transformers' models, in which the
experts of a layer are one tensor. Megatron's start with the number of the part of the model that they belong to.
"""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from hpcrl.errors import TrainError
from hpcrl.hardware.architecture import (
    MEGATRON_FAMILIES,
    ModelArchitecture,
    find_parallel_conflict,
    read_architecture,
)
from hpcrl.hardware.degrees import ParallelDegrees, find_part_layers

EMBEDDING = "0.embedding.word_embeddings.weight"
_SIGMOID_ROUTERS = ("deepseek_v3", "glm4_moe")
"""Families whose routers add a bias, which is not trained, to scores from a sigmoid."""
_ROPE_TYPES = ("default", "linear", "llama3", "yarn")
"""Forms of RoPE whose frequencies do not depend on the length of the row."""


class ModelDims(NamedTuple):
    """The sizes of a decoder, as in its HF config."""

    shape: ModelArchitecture
    qkv_bias: bool

    @property
    def has_router_bias(self) -> bool:
        return self.shape.family in _SIGMOID_ROUTERS

    def has_experts(self, layer: int) -> bool:
        return layer not in self.shape.dense_layers


class ParallelRank(NamedTuple):
    """A rank's place in each kind of parallelism."""

    tp: int = 0
    num_tp: int = 1
    pp: int = 0
    num_pp: int = 1
    ep: int = 0
    num_ep: int = 1
    num_cp: int = 1
    num_chunks: int = 1
    """The parts of the model that a rank has: each stage has its layers in this many places."""
    copy: int = 0
    """The index of this rank among those with the same part of what is not an expert.

    Those that divide the positions of the same rows follow one another.
    """
    expert_copy: int = 0
    """The index among those with the same experts."""

    @property
    def cp(self) -> int:
        return self.copy % self.num_cp

    @property
    def is_first(self) -> bool:
        return self.pp == 0

    @property
    def is_last(self) -> bool:
        return self.pp == self.num_pp - 1


class ShardMapping(NamedTuple):
    """A shard of a canonical tensor and its place in this rank's tensors."""

    name: str
    """The HF name."""
    start: tuple[int, ...]
    shape: tuple[int, ...]
    whole_shape: tuple[int, ...]
    megatron_name: str
    """The name of Megatron's tensor."""
    rows: slice
    """The rows of Megatron's tensor, with all columns."""
    is_owner: bool
    """True on the one rank of a copy of the model whose shard counts, where several hold the same one."""


def read_model_dims(fields: Mapping[str, Any]) -> ModelDims:
    """Read the sizes from the fields of a config.json; TrainError if the model has no map, KeyError without a field."""
    family = fields["model_type"]
    if family not in MEGATRON_FAMILIES:
        raise TrainError(
            f'trainer "megatron" supports {", ".join(MEGATRON_FAMILIES)} models, '
            f'and this one is {family!r}: use trainer = "torch"'
        )
    shape = read_architecture(fields)
    dims = ModelDims(shape, family == "qwen2" or bool(fields.get("attention_bias")))
    if (problem := _find_foreign_part(fields, dims)) is not None:
        raise TrainError(f'trainer "megatron" does not support {problem}: use trainer = "torch"')
    return dims


def _find_foreign_part(fields: Mapping[str, Any], dims: ModelDims) -> str | None:
    """Return the first part of a model that this trainer would compute differently; None if there is none."""
    shape = dims.shape
    rope = fields.get("rope_parameters") or fields.get("rope_scaling") or {}
    rope_type = rope.get("rope_type") or rope.get("type") or "default"
    if rope_type not in _ROPE_TYPES:
        return f"RoPE of type {rope_type!r}"
    rows = shape.num_heads * shape.head_dim + shape.num_kv_heads * (shape.head_dim + shape.value_dim)
    if shape.num_biases != dims.qkv_bias * rows:
        return "biases of other layers than q, k and v (attention_bias, mlp_bias)"
    window = fields.get("sliding_window")
    if window and fields.get("use_sliding_window", shape.family in ("mistral", "mixtral")):
        return f"attention within a window (sliding_window = {window})"
    if (activation := fields.get("hidden_act", "silu")) != "silu":
        return f"an MLP with hidden_act = {activation!r}"
    if shape.kv_rank and not fields.get("rope_interleave", True):
        return "compressed attention without interleaved RoPE (rope_interleave = false)"
    if dims.has_router_bias and not fields.get("norm_topk_prob", True):
        return "weights of experts that do not sum up to one (norm_topk_prob = false)"
    is_normalized = dims.has_router_bias or shape.family == "mixtral" or fields.get("norm_topk_prob")
    if shape.experts_per_token == 1 and is_normalized:  # Megatron would take the score, or refuse
        return "num_experts_per_tok = 1 where the weights of experts sum up to one"
    num_groups, chosen = fields.get("n_group") or 1, fields.get("topk_group") or 1
    if dims.has_router_bias and num_groups > 1 and shape.experts_per_token != 2 * chosen:
        return (
            f"num_experts_per_tok = {shape.experts_per_token} with topk_group = {chosen}: Megatron ranks groups of "
            "experts by the sum of num_experts_per_tok / topk_group scores, and the model by that of two"
        )
    return None


def check_parallelism(dims: ModelDims, degrees: ParallelDegrees, *, num_chunks: int = 1) -> None:
    """Raise TrainError unless the parallelism divides the model."""
    if conflict := find_parallel_conflict(dims.shape, degrees, num_chunks=num_chunks):
        raise TrainError(conflict)


def pad_vocab_size(dims: ModelDims, *, num_tp: int) -> int:
    """Return the rows of the embedding, padded so that every rank has the same number."""
    return -(-dims.shape.vocabulary_size // num_tp) * num_tp


def map_shards(dims: ModelDims, rank: ParallelRank) -> Iterator[ShardMapping]:
    """Yield every shard of this rank."""
    shape = dims.shape
    if rank.is_first:
        yield _map_vocab_rows(dims, rank, "model.embed_tokens.weight", EMBEDDING, is_owner=True)
    for layer, chunk, own in _list_layers(dims, rank):
        yield from _map_layer(dims, rank, layer, f"model.layers.{layer}", f"{chunk}.decoder.layers.{own}")
    if rank.is_last:
        norm, head = f"{rank.num_chunks - 1}.decoder.final_layernorm.weight", name_head(rank)
        yield _map_replicated("model.norm.weight", norm, shape.hidden_size, rank)
        if not shape.is_tied:
            yield _map_vocab_rows(dims, rank, "lm_head.weight", head, is_owner=True)
        elif rank.num_pp > 1:
            yield _map_vocab_rows(dims, rank, "model.embed_tokens.weight", head, is_owner=False)


def name_head(rank: ParallelRank) -> str:
    """Return the name of the output layer on a rank of the last stage."""
    return f"{rank.num_chunks - 1}.output_layer.weight"


def list_chunk_layers(dims: ModelDims, rank: ParallelRank, *, chunk: int) -> range:
    """List the layers of a part of the model that this rank has; the parts of all ranks take turns."""
    num_parts = rank.num_pp * rank.num_chunks
    return find_part_layers(dims.shape.num_layers, num_parts=num_parts, index=chunk * rank.num_pp + rank.pp)


def _list_layers(dims: ModelDims, rank: ParallelRank) -> Iterator[tuple[int, int, int]]:
    """Yield the layers of this rank, each with its part of the model and its index there."""
    for chunk in range(rank.num_chunks):
        yield from ((layer, chunk, own) for own, layer in enumerate(list_chunk_layers(dims, rank, chunk=chunk)))


def _map_layer(
    dims: ModelDims, rank: ParallelRank, layer: int, name: str, megatron_name: str
) -> Iterator[ShardMapping]:
    hidden = dims.shape.hidden_size
    yield _map_replicated(f"{name}.input_layernorm.weight", f"{megatron_name}.input_layernorm.weight", hidden, rank)
    yield _map_replicated(
        f"{name}.post_attention_layernorm.weight", f"{megatron_name}.pre_mlp_layernorm.weight", hidden, rank
    )
    attention = (f"{name}.self_attn", f"{megatron_name}.self_attention")
    yield from (_map_compressed if dims.shape.kv_rank else _map_attention)(dims, rank, *attention)
    width = dims.shape.num_heads * dims.shape.value_dim
    yield _map_columns(f"{name}.self_attn.o_proj.weight", f"{attention[1]}.linear_proj.weight", hidden, width, rank)
    if dims.has_experts(layer):
        yield from _map_experts(dims, rank, f"{name}.mlp", f"{megatron_name}.mlp")
    else:
        yield from _map_mlp(dims, rank, f"{name}.mlp", f"{megatron_name}.mlp", dims.shape.dense_inner)


def _map_attention(dims: ModelDims, rank: ParallelRank, name: str, megatron_name: str) -> Iterator[ShardMapping]:
    """Map q, k and v, with their biases and norms."""
    yield from _map_qkv(dims, rank, name, megatron_name, kind="weight", columns=(dims.shape.hidden_size,))
    if dims.qkv_bias:
        yield from _map_qkv(dims, rank, name, megatron_name, kind="bias", columns=())
    for part in ("q", "k") if dims.shape.has_query_norm else ():
        yield _map_replicated(
            f"{name}.{part}_norm.weight", f"{megatron_name}.{part}_layernorm.weight", dims.shape.head_dim, rank
        )


def _map_qkv(
    dims: ModelDims, rank: ParallelRank, name: str, megatron_name: str, *, kind: str, columns: tuple[int, ...]
) -> Iterator[ShardMapping]:
    """Map q, k and v of this rank's query groups."""
    shape = dims.shape
    per_group = shape.num_heads // shape.num_kv_heads * shape.head_dim
    block = per_group + 2 * shape.head_dim
    num_groups = shape.num_kv_heads // rank.num_tp
    for local_group in range(num_groups):
        group = rank.tp * num_groups + local_group
        for part, rows, offset in (
            ("q", per_group, 0),
            ("k", shape.head_dim, per_group),
            ("v", shape.head_dim, block - shape.head_dim),
        ):
            yield ShardMapping(
                name=f"{name}.{part}_proj.{kind}",
                start=(group * rows, *(0 for _ in columns)),
                shape=(rows, *columns),
                whole_shape=(shape.num_kv_heads * rows, *columns),
                megatron_name=f"{megatron_name}.linear_qkv.{kind}",
                rows=slice(local_group * block + offset, local_group * block + offset + rows),
                is_owner=True,
            )


def _map_compressed(dims: ModelDims, rank: ParallelRank, name: str, megatron_name: str) -> Iterator[ShardMapping]:
    """Map compressed attention: every rank has what compresses, and its own heads of what expands."""
    shape = dims.shape
    hidden, queries = shape.hidden_size, shape.num_heads * shape.head_dim
    if shape.query_rank:
        compressed = (shape.query_rank, hidden)
        yield _map_replicated(f"{name}.q_a_proj.weight", f"{megatron_name}.linear_q_down_proj.weight", compressed, rank)
        yield _map_replicated(
            f"{name}.q_a_layernorm.weight", f"{megatron_name}.q_layernorm.weight", shape.query_rank, rank
        )
        expanded = (queries, shape.query_rank)
        yield _map_rows(f"{name}.q_b_proj.weight", f"{megatron_name}.linear_q_up_proj.weight", expanded, rank)
    else:
        yield _map_rows(f"{name}.q_proj.weight", f"{megatron_name}.linear_q_proj.weight", (queries, hidden), rank)
    compressed = (shape.kv_rank + shape.rope_dim, hidden)
    yield _map_replicated(
        f"{name}.kv_a_proj_with_mqa.weight", f"{megatron_name}.linear_kv_down_proj.weight", compressed, rank
    )
    yield _map_replicated(f"{name}.kv_a_layernorm.weight", f"{megatron_name}.kv_layernorm.weight", shape.kv_rank, rank)
    expanded = (shape.num_heads * (shape.head_dim - shape.rope_dim + shape.value_dim), shape.kv_rank)
    yield _map_rows(f"{name}.kv_b_proj.weight", f"{megatron_name}.linear_kv_up_proj.weight", expanded, rank)


def _map_mlp(dims: ModelDims, rank: ParallelRank, name: str, megatron_name: str, inner: int) -> Iterator[ShardMapping]:
    """Map an MLP of this inner size: gate and up are one tensor, this rank's rows of one after those of the other."""
    hidden, own = dims.shape.hidden_size, inner // rank.num_tp
    for number, half in enumerate(("gate_proj", "up_proj")):
        yield ShardMapping(
            name=f"{name}.{half}.weight",
            start=(rank.tp * own, 0),
            shape=(own, hidden),
            whole_shape=(inner, hidden),
            megatron_name=f"{megatron_name}.linear_fc1.weight",
            rows=slice(number * own, (number + 1) * own),
            is_owner=True,
        )
    yield _map_columns(f"{name}.down_proj.weight", f"{megatron_name}.linear_fc2.weight", hidden, inner, rank)


def _map_experts(dims: ModelDims, rank: ParallelRank, name: str, megatron_name: str) -> Iterator[ShardMapping]:
    """Map the router, this rank's experts, and the MLP that all tokens use."""
    shape = dims.shape
    hidden, inner = shape.hidden_size, shape.expert_inner
    yield _map_replicated(f"{name}.gate.weight", f"{megatron_name}.router.weight", (shape.num_experts, hidden), rank)
    if dims.has_router_bias:
        correction = f"{name}.gate.e_score_correction_bias"
        yield _map_replicated(correction, f"{megatron_name}.router.expert_bias", shape.num_experts, rank)
    num_own = shape.num_experts // rank.num_ep
    for own in range(num_own):
        for part, layer, rows, columns in (
            ("gate_up_proj", "linear_fc1", 2 * inner, hidden),
            ("down_proj", "linear_fc2", hidden, inner),
        ):
            yield ShardMapping(
                name=f"{name}.experts.{part}",
                start=(rank.ep * num_own + own, 0, 0),
                shape=(1, rows, columns),
                whole_shape=(shape.num_experts, rows, columns),
                megatron_name=f"{megatron_name}.experts.local_experts.{own}.{layer}.weight",
                rows=slice(0, rows),
                is_owner=True,
            )
    if shape.shared_inner:
        shared = "shared_experts"
        yield from _map_mlp(dims, rank, f"{name}.{shared}", f"{megatron_name}.{shared}", shape.shared_inner)


def _map_replicated(name: str, megatron_name: str, size: int | tuple[int, int], rank: ParallelRank) -> ShardMapping:
    """Map a vector or matrix that every rank of a tensor-parallel group holds."""
    shape = size if isinstance(size, tuple) else (size,)
    return ShardMapping(name, (0,) * len(shape), shape, shape, megatron_name, slice(0, shape[0]), rank.tp == 0)


def _map_rows(name: str, megatron_name: str, whole: tuple[int, int], rank: ParallelRank) -> ShardMapping:
    """Map a matrix that is split over ranks by rows."""
    own = whole[0] // rank.num_tp
    return ShardMapping(name, (rank.tp * own, 0), (own, whole[1]), whole, megatron_name, slice(0, own), is_owner=True)


def _map_columns(name: str, megatron_name: str, num_rows: int, width: int, rank: ParallelRank) -> ShardMapping:
    """Map a matrix that is split over ranks by columns."""
    own = width // rank.num_tp
    return ShardMapping(
        name,
        (0, rank.tp * own),
        (num_rows, own),
        (num_rows, width),
        megatron_name,
        slice(0, num_rows),
        is_owner=True,
    )


def _map_vocab_rows(
    dims: ModelDims, rank: ParallelRank, name: str, megatron_name: str, *, is_owner: bool
) -> ShardMapping:
    """Map a matrix that is split over ranks by rows; the last may have fewer rows than the others."""
    vocabulary, hidden = dims.shape.vocabulary_size, dims.shape.hidden_size
    max_rows = pad_vocab_size(dims, num_tp=rank.num_tp) // rank.num_tp
    first = min(rank.tp * max_rows, vocabulary)
    num_rows = min(max_rows, vocabulary - first)
    return ShardMapping(
        name,
        (first, 0),
        (num_rows, hidden),
        (vocabulary, hidden),
        megatron_name,
        slice(0, num_rows),
        is_owner=is_owner,
    )
