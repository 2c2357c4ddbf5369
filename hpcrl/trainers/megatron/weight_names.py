"""Which box of which canonical (HF) tensor lies where in a Megatron rank's own tensors; arithmetic only.

    Shape of a model    Dims        what the mapping needs of a config: Llama, Qwen2, Qwen3 and their like
    Place of a rank     Rank        its part of each layer (TP) and its layers (PP)
    links               every box that the rank holds

Megatron fuses q, k and v, one query group after the other (its queries, its key, its value), and gate and up; a rank
of a tensor-parallel group has whole query groups, and its own rows of gate and of up.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

from hpcrl.errors import TrainError

FAMILIES = ("llama", "qwen2", "qwen3", "mistral")


class Dims(NamedTuple):
    """Sizes of a decoder as HF's config has them."""

    vocab: int
    hidden: int
    ffn: int
    num_layers: int
    num_heads: int
    num_groups: int
    """Key and value heads."""
    head: int
    tied: bool
    """The output layer is the embedding."""
    qkv_bias: bool
    qk_norm: bool


class Rank(NamedTuple):
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


class Link(NamedTuple):
    """One box of a canonical tensor and where it lies here."""

    name: str
    """HF's."""
    start: tuple[int, ...]
    shape: tuple[int, ...]
    whole: tuple[int, ...]
    own: str
    """Megatron's."""
    rows: slice
    """Of Megatron's tensor, all columns."""
    given: bool
    """This rank gives the box when the weights are collected; another gives it otherwise."""


def dims_of(config: Any) -> Dims:
    """The sizes of a model, or TrainError if the mapping does not know it."""
    rope = getattr(config, "rope_parameters", None) or {}
    if config.model_type not in FAMILIES:
        raise TrainError(
            f'trainer "megatron" knows {", ".join(FAMILIES)} models, and this one is {config.model_type!r}: '
            'use trainer = "torch"'
        )
    if rope.get("rope_type", "default") != "default":
        raise TrainError(f'trainer "megatron" does not scale RoPE ({rope["rope_type"]!r}): use trainer = "torch"')
    heads = config.num_attention_heads
    return Dims(
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


def check_divides(dims: Dims, *, num_tp: int, num_pp: int) -> None:
    """TrainError unless the parallelism divides the model."""
    for what, size in (("query groups", dims.num_groups), ("attention heads", dims.num_heads), ("ffn rows", dims.ffn)):
        if size % num_tp:
            raise TrainError(
                f"train.tensor_parallel = {num_tp} does not divide the model's {size} {what}: choose a divisor"
            )
    if dims.num_layers % num_pp:
        raise TrainError(
            f"train.pipeline_parallel = {num_pp} does not divide the model's {dims.num_layers} layers: choose a divisor"
        )


def padded_vocab(dims: Dims, *, num_tp: int) -> int:
    """Rows of the embedding, filled up so that every rank has as many."""
    return -(-dims.vocab // num_tp) * num_tp


def links(dims: Dims, rank: Rank) -> Iterator[Link]:
    """Every box of this rank."""
    if rank.is_first:
        yield _vocab_rows(dims, rank, "model.embed_tokens.weight", "embedding.word_embeddings.weight", given=True)
    per_stage = dims.num_layers // rank.num_pp
    for own in range(per_stage):
        yield from _layer(dims, rank, f"model.layers.{rank.pp * per_stage + own}", f"decoder.layers.{own}")
    if rank.is_last:
        yield _whole("model.norm.weight", "decoder.final_layernorm.weight", dims.hidden, rank)
        if not dims.tied:
            yield _vocab_rows(dims, rank, "lm_head.weight", "output_layer.weight", given=True)
        elif rank.num_pp > 1:
            yield _vocab_rows(dims, rank, "model.embed_tokens.weight", "output_layer.weight", given=False)


def _layer(dims: Dims, rank: Rank, name: str, own: str) -> Iterator[Link]:
    yield _whole(f"{name}.input_layernorm.weight", f"{own}.input_layernorm.weight", dims.hidden, rank)
    yield _whole(f"{name}.post_attention_layernorm.weight", f"{own}.pre_mlp_layernorm.weight", dims.hidden, rank)
    yield from _qkv(dims, rank, name, own, kind="weight", columns=(dims.hidden,))
    if dims.qkv_bias:
        yield from _qkv(dims, rank, name, own, kind="bias", columns=())
    if dims.qk_norm:
        yield _whole(f"{name}.self_attn.q_norm.weight", f"{own}.self_attention.q_layernorm.weight", dims.head, rank)
        yield _whole(f"{name}.self_attn.k_norm.weight", f"{own}.self_attention.k_layernorm.weight", dims.head, rank)
    width = dims.num_heads * dims.head
    yield _columns(f"{name}.self_attn.o_proj.weight", f"{own}.self_attention.linear_proj.weight", dims, width, rank)
    ffn = dims.ffn // rank.num_tp
    for number, half in enumerate(("gate_proj", "up_proj")):
        yield Link(
            name=f"{name}.mlp.{half}.weight",
            start=(rank.tp * ffn, 0),
            shape=(ffn, dims.hidden),
            whole=(dims.ffn, dims.hidden),
            own=f"{own}.mlp.linear_fc1.weight",
            rows=slice(number * ffn, (number + 1) * ffn),
            given=True,
        )
    yield _columns(f"{name}.mlp.down_proj.weight", f"{own}.mlp.linear_fc2.weight", dims, dims.ffn, rank)


def _qkv(dims: Dims, rank: Rank, name: str, own: str, *, kind: str, columns: tuple[int, ...]) -> Iterator[Link]:
    """q, k and v of this rank's query groups."""
    per_group = dims.num_heads // dims.num_groups * dims.head
    block = per_group + 2 * dims.head
    num = dims.num_groups // rank.num_tp
    for mine in range(num):
        group = rank.tp * num + mine
        for part, rows, offset in (
            ("q", per_group, 0),
            ("k", dims.head, per_group),
            ("v", dims.head, block - dims.head),
        ):
            yield Link(
                name=f"{name}.self_attn.{part}_proj.{kind}",
                start=(group * rows, *(0 for _ in columns)),
                shape=(rows, *columns),
                whole=(dims.num_groups * rows, *columns),
                own=f"{own}.self_attention.linear_qkv.{kind}",
                rows=slice(mine * block + offset, mine * block + offset + rows),
                given=True,
            )


def _whole(name: str, own: str, size: int, rank: Rank) -> Link:
    """A vector that every rank of a tensor-parallel group has."""
    return Link(name, (0,), (size,), (size,), own, slice(0, size), given=rank.tp == 0)


def _columns(name: str, own: str, dims: Dims, width: int, rank: Rank) -> Link:
    """A matrix of which each rank has its columns."""
    mine = width // rank.num_tp
    rows = slice(0, dims.hidden)
    return Link(name, (0, rank.tp * mine), (dims.hidden, mine), (dims.hidden, width), own, rows, given=True)


def _vocab_rows(dims: Dims, rank: Rank, name: str, own: str, *, given: bool) -> Link:
    """A matrix of which each rank has its rows; the last may have fewer than it has room for."""
    room = padded_vocab(dims, num_tp=rank.num_tp) // rank.num_tp
    first = min(rank.tp * room, dims.vocab)
    num = min(room, dims.vocab - first)
    return Link(name, (first, 0), (num, dims.hidden), (dims.vocab, dims.hidden), own, slice(0, num), given=given)
