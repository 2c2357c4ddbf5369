"""Map shards of canonical (HF) tensors to a Megatron rank's own tensors; arithmetic only.

    ModelDims              the sizes of a model: Llama, Qwen2, Qwen3, Mistral
    ParallelRank           a rank's part of each layer (TP) and its layers (PP)
    ShardMapping           one shard and its place in a Megatron tensor
    map_shards             every shard that a rank holds
    read_model_dims        the sizes in a config
    check_parallelism      refuse a parallelism that does not divide the model
    pad_vocab_size         the rows of the padded embedding
    SUPPORTED_MODEL_TYPES  the models with a mapping

Megatron fuses q, k and v, one query group after the other (its queries, its key, its value), and gate and up; a rank
of a tensor-parallel group has whole query groups, and its own rows of gate and of up.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

from hpcrl.errors import TrainError

SUPPORTED_MODEL_TYPES = ("llama", "qwen2", "qwen3", "mistral")


class ModelDims(NamedTuple):
    """The sizes of a decoder, as in its HF config."""

    vocab: int
    hidden: int
    ffn: int
    num_layers: int
    num_heads: int
    num_groups: int
    """The number of key and value heads."""
    head: int
    tied: bool
    """The output layer is the embedding."""
    qkv_bias: bool
    qk_norm: bool


class ParallelRank(NamedTuple):
    """A rank's place in tensor and pipeline parallelism."""

    tp: int = 0
    num_tp: int = 1
    pp: int = 0
    num_pp: int = 1

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
    """The flag of the one rank that provides the shard when weights are collected."""


def read_model_dims(config: Any) -> ModelDims:
    """Read the sizes of a model; TrainError if it has no mapping."""
    rope = getattr(config, "rope_parameters", None) or {}
    if config.model_type not in SUPPORTED_MODEL_TYPES:
        raise TrainError(
            f'trainer "megatron" supports {", ".join(SUPPORTED_MODEL_TYPES)} models, '
            f'and this one is {config.model_type!r}: use trainer = "torch"'
        )
    if rope.get("rope_type", "default") != "default":
        raise TrainError(f'trainer "megatron" does not scale RoPE ({rope["rope_type"]!r}): use trainer = "torch"')
    heads = config.num_attention_heads
    return ModelDims(
        vocab=config.vocab_size,
        hidden=config.hidden_size,
        ffn=config.intermediate_size,
        num_layers=config.num_hidden_layers,
        num_heads=heads,
        num_groups=config.num_key_value_heads,
        head=getattr(config, "head_dim", None) or config.hidden_size // heads,
        tied=config.tie_word_embeddings,
        qkv_bias=config.model_type == "qwen2",
        qk_norm=config.model_type == "qwen3",
    )


def check_parallelism(dims: ModelDims, *, num_tp: int, num_pp: int) -> None:
    """Raise TrainError unless the parallelism divides the model."""
    for what, size in (("query groups", dims.num_groups), ("attention heads", dims.num_heads), ("ffn rows", dims.ffn)):
        if size % num_tp:
            raise TrainError(
                f"train.tensor_parallel = {num_tp} does not divide the model's {size} {what}: choose a divisor"
            )
    if dims.num_layers % num_pp:
        raise TrainError(
            f"train.pipeline_parallel = {num_pp} does not divide the model's {dims.num_layers} layers: choose a divisor"
        )


def pad_vocab_size(dims: ModelDims, *, num_tp: int) -> int:
    """Return the rows of the embedding, padded so that every rank has the same number."""
    return -(-dims.vocab // num_tp) * num_tp


def map_shards(dims: ModelDims, rank: ParallelRank) -> Iterator[ShardMapping]:
    """Yield every shard of this rank."""
    if rank.is_first:
        yield _map_vocab_rows(
            dims, rank, "model.embed_tokens.weight", "embedding.word_embeddings.weight", is_owner=True
        )
    per_stage = dims.num_layers // rank.num_pp
    for layer in range(per_stage):
        yield from _map_layer(dims, rank, f"model.layers.{rank.pp * per_stage + layer}", f"decoder.layers.{layer}")
    if rank.is_last:
        yield _map_replicated("model.norm.weight", "decoder.final_layernorm.weight", dims.hidden, rank)
        if not dims.tied:
            yield _map_vocab_rows(dims, rank, "lm_head.weight", "output_layer.weight", is_owner=True)
        elif rank.num_pp > 1:
            yield _map_vocab_rows(dims, rank, "model.embed_tokens.weight", "output_layer.weight", is_owner=False)


def _map_layer(dims: ModelDims, rank: ParallelRank, name: str, megatron_name: str) -> Iterator[ShardMapping]:
    yield _map_replicated(
        f"{name}.input_layernorm.weight", f"{megatron_name}.input_layernorm.weight", dims.hidden, rank
    )
    yield _map_replicated(
        f"{name}.post_attention_layernorm.weight", f"{megatron_name}.pre_mlp_layernorm.weight", dims.hidden, rank
    )
    yield from _map_qkv(dims, rank, name, megatron_name, kind="weight", columns=(dims.hidden,))
    if dims.qkv_bias:
        yield from _map_qkv(dims, rank, name, megatron_name, kind="bias", columns=())
    if dims.qk_norm:
        yield _map_replicated(
            f"{name}.self_attn.q_norm.weight", f"{megatron_name}.self_attention.q_layernorm.weight", dims.head, rank
        )
        yield _map_replicated(
            f"{name}.self_attn.k_norm.weight", f"{megatron_name}.self_attention.k_layernorm.weight", dims.head, rank
        )
    width = dims.num_heads * dims.head
    yield _map_columns(
        f"{name}.self_attn.o_proj.weight", f"{megatron_name}.self_attention.linear_proj.weight", dims, width, rank
    )
    ffn = dims.ffn // rank.num_tp
    for number, half in enumerate(("gate_proj", "up_proj")):
        yield ShardMapping(
            name=f"{name}.mlp.{half}.weight",
            start=(rank.tp * ffn, 0),
            shape=(ffn, dims.hidden),
            whole_shape=(dims.ffn, dims.hidden),
            megatron_name=f"{megatron_name}.mlp.linear_fc1.weight",
            rows=slice(number * ffn, (number + 1) * ffn),
            is_owner=True,
        )
    yield _map_columns(f"{name}.mlp.down_proj.weight", f"{megatron_name}.mlp.linear_fc2.weight", dims, dims.ffn, rank)


def _map_qkv(
    dims: ModelDims, rank: ParallelRank, name: str, megatron_name: str, *, kind: str, columns: tuple[int, ...]
) -> Iterator[ShardMapping]:
    """Map q, k and v of this rank's query groups."""
    per_group = dims.num_heads // dims.num_groups * dims.head
    block = per_group + 2 * dims.head
    num_groups = dims.num_groups // rank.num_tp
    for local_group in range(num_groups):
        group = rank.tp * num_groups + local_group
        for part, rows, offset in (
            ("q", per_group, 0),
            ("k", dims.head, per_group),
            ("v", dims.head, block - dims.head),
        ):
            yield ShardMapping(
                name=f"{name}.self_attn.{part}_proj.{kind}",
                start=(group * rows, *(0 for _ in columns)),
                shape=(rows, *columns),
                whole_shape=(dims.num_groups * rows, *columns),
                megatron_name=f"{megatron_name}.self_attention.linear_qkv.{kind}",
                rows=slice(local_group * block + offset, local_group * block + offset + rows),
                is_owner=True,
            )


def _map_replicated(name: str, megatron_name: str, size: int, rank: ParallelRank) -> ShardMapping:
    """Map a vector that every rank of a tensor-parallel group holds."""
    return ShardMapping(name, (0,), (size,), (size,), megatron_name, slice(0, size), is_owner=rank.tp == 0)


def _map_columns(name: str, megatron_name: str, dims: ModelDims, width: int, rank: ParallelRank) -> ShardMapping:
    """Map a matrix that is split over ranks by columns."""
    num_columns = width // rank.num_tp
    rows = slice(0, dims.hidden)
    return ShardMapping(
        name,
        (0, rank.tp * num_columns),
        (dims.hidden, num_columns),
        (dims.hidden, width),
        megatron_name,
        rows,
        is_owner=True,
    )


def _map_vocab_rows(
    dims: ModelDims, rank: ParallelRank, name: str, megatron_name: str, *, is_owner: bool
) -> ShardMapping:
    """Map a matrix that is split over ranks by rows; the last may have fewer rows than the others."""
    max_rows = pad_vocab_size(dims, num_tp=rank.num_tp) // rank.num_tp
    first = min(rank.tp * max_rows, dims.vocab)
    num_rows = min(max_rows, dims.vocab - first)
    return ShardMapping(
        name,
        (first, 0),
        (num_rows, dims.hidden),
        (dims.vocab, dims.hidden),
        megatron_name,
        slice(0, num_rows),
        is_owner=is_owner,
    )
