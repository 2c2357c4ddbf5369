"""The layout of a version: where every tensor is stored in one flat run of bytes. Nothing heavy is imported.

    TensorLayout, TensorSlot        all tensors by HF name (or, on a node with a part, shards of them), and one of them
    ShardOrigin                     the tensor that a shard was cut from
    TensorShard                     the place in a tensor of the values that one rank of a trainer holds
    make_whole_shard  the shard that is all of a tensor
    check_shard, check_cover        values fit their shard - every value is held by exactly one shard
    align_nbytes                    round up to the alignment
    view_values                     a tensor in a slot as integers

Each node of a trainer may keep only its own part of a version; the whole is then assembled nowhere.

    PartAssignment                  the node of every rank, and the layout of every node's part
    build_part_layout               the shards of some ranks as a window's layout, merged where they fill a larger one
    join_layouts                    the layout of the whole, from those of all its parts
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
import xxhash

from hpcrl.errors import WeightsError

if TYPE_CHECKING:
    import torch


ALIGNMENT = 64
ITEM_SIZES = {
    **dict.fromkeys(("bool", "int8", "uint8", "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu"), 1),
    **dict.fromkeys(("bfloat16", "float16", "int16", "uint16"), 2),
    **dict.fromkeys(("float32", "int32", "uint32"), 4),
    **dict.fromkeys(("float64", "int64", "uint64"), 8),
}
"""Bytes of one value, by torch's name of its type."""
ROUNDED_DTYPES = ("bfloat16", "float16")
"""The types to which values of a trainer, in float32, may be rounded when they are copied into a layout."""


class ShardOrigin(msgspec.Struct, frozen=True, kw_only=True):
    """The tensor that a shard with its own slot was cut from."""

    name: str
    start: tuple[int, ...]
    shape: tuple[int, ...]
    """Shape of the whole tensor."""


class TensorSlot(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A tensor, or one shard of it, and its offset."""

    name: str
    dtype: str
    """torch's name for it, without "torch."."""
    shape: tuple[int, ...]
    offset: int
    nbytes: int
    cut: ShardOrigin | None = None
    """The tensor it is a shard of; None: it is a whole tensor."""

    @property
    def shard(self) -> "TensorShard":
        """The values, and the tensor they belong to."""
        return (
            make_whole_shard(self)
            if self.cut is None
            else TensorShard(name=self.cut.name, start=self.cut.start, shape=self.shape)
        )


class TensorLayout(msgspec.Struct, frozen=True, kw_only=True):
    """The tensors of a version, in order, each aligned to 64 bytes."""

    tensors: tuple[TensorSlot, ...]
    nbytes: int
    """Bytes of the whole, padding included."""

    @classmethod
    def from_tensors(cls, tensors: "Mapping[str, torch.Tensor]") -> "TensorLayout":
        """Lay out these tensors, in their order."""
        return cls.pack((name, str(t.dtype).removeprefix("torch."), tuple(t.shape)) for name, t in tensors.items())

    @classmethod
    def pack(cls, tensors: Iterable[tuple[str, str, tuple[int, ...]]]) -> "TensorLayout":
        """Lay out tensors given by name, dtype and shape."""
        return cls._lay_out((name, dtype, shape, None) for name, dtype, shape in tensors)

    @classmethod
    def from_shards(cls, shards: "Iterable[tuple[TensorShard, TensorSlot]]") -> "TensorLayout":
        """Lay out shards, each given with its tensor; one that is all of its tensor keeps the tensor's name."""
        return cls._lay_out(_describe_shard(shard, tensor) for shard, tensor in shards)

    @classmethod
    def _lay_out(cls, tensors: "Iterable[tuple[str, str, tuple[int, ...], ShardOrigin | None]]") -> "TensorLayout":
        slots, offset = [], 0
        for name, dtype, shape, cut in tensors:
            if dtype not in ITEM_SIZES:
                raise WeightsError(
                    f"tensor {name!r} is {dtype}, which a layout does not support: "
                    f"publish one of {', '.join(sorted(ITEM_SIZES))}"
                )
            nbytes = math.prod(shape) * ITEM_SIZES[dtype]
            slots.append(TensorSlot(name=name, dtype=dtype, shape=shape, offset=offset, nbytes=nbytes, cut=cut))
            offset += align_nbytes(nbytes)
        return cls(tensors=tuple(slots), nbytes=offset)

    @classmethod
    def from_json(cls, data: bytes) -> "TensorLayout":
        """Decode what `to_json` encoded; WeightsError if the data are damaged."""
        try:
            layout = _LAYOUT_DECODER.decode(data)
        except msgspec.DecodeError as error:
            raise WeightsError(f"the layout of the weights is damaged ({error}): publish them again") from None
        if layout != cls._lay_out((t.name, t.dtype, t.shape, t.cut) for t in layout.tensors):
            raise WeightsError(
                "the layout of the weights is damaged (its offsets do not match its tensors): publish them again"
            )
        return layout

    def to_json(self) -> bytes:
        return msgspec.json.encode(self)

    def digest(self) -> str:
        """Compute the xxh3_128 of the JSON: equal digests mean equal layouts."""
        return xxhash.xxh3_128_hexdigest(self.to_json())

    def tensors_by_name(self) -> dict[str, TensorSlot]:
        return {tensor.name: tensor for tensor in self.tensors}

    def check_same(self, other: "TensorLayout", *, own_name: str, other_name: str) -> None:
        """Raise WeightsError, naming the first tensor that differs, unless both layouts are the same."""
        own_tensors, other_tensors = self.tensors_by_name(), other.tensors_by_name()
        if missing := [name for name in other_tensors if name not in own_tensors]:
            raise WeightsError(f"{own_name} lacks tensor {missing[0]!r}, which {other_name} has: is it the same model?")
        if extra := [name for name in own_tensors if name not in other_tensors]:
            raise WeightsError(
                f"{own_name} holds tensor {extra[0]!r}, which {other_name} does not have: is it the same model?"
            )
        for name, tensor in own_tensors.items():
            if (tensor.dtype, tensor.shape) != (other_tensors[name].dtype, other_tensors[name].shape):
                raise WeightsError(
                    f"tensor {name!r} is {tensor.dtype} {list(tensor.shape)} in {own_name} and "
                    f"{other_tensors[name].dtype} {list(other_tensors[name].shape)} in {other_name}: "
                    "is it the same model?"
                )
        if self != other:
            raise WeightsError(
                f"{own_name} and {other_name} hold their tensors in a different order: publish in one order"
            )


_LAYOUT_DECODER = msgspec.json.Decoder(TensorLayout)
"""Made at import: msgspec may crash where two threads are the first to decode a type, both at the same time."""


class TensorShard(msgspec.Struct, frozen=True, kw_only=True):
    """The slice of one canonical tensor that a rank holds, with any TP, PP and DP.

    A trainer's fused tensor (qkv, gate and up) is several shards; a replicated one is written by one rank.
    """

    name: str
    start: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def index(self) -> tuple[slice, ...]:
        """The index of this shard in the whole tensor."""
        return tuple(slice(start, start + size) for start, size in zip(self.start, self.shape, strict=True))

    @property
    def num_values(self) -> int:
        return math.prod(self.shape)

    def index_in(self, outer: "TensorShard") -> tuple[slice, ...] | None:
        """Return the index of this shard in another of its tensor; None if that does not hold all of it."""
        start = tuple(own - first for own, first in zip(self.start, outer.start, strict=True))
        ends = (first + size for first, size in zip(start, self.shape, strict=True))
        if min(start, default=0) < 0 or any(end > size for end, size in zip(ends, outer.shape, strict=True)):
            return None
        return TensorShard(name=self.name, start=start, shape=self.shape).index


def view_values(slot: memoryview, tensor: TensorSlot) -> Any:
    """View a tensor in a slot as integers of its width, which are copied bit for bit."""
    import numpy as np  # here: a process that only reads layouts does not need it

    int_dtype = np.dtype(f"<u{ITEM_SIZES[tensor.dtype]}")
    data = np.frombuffer(slot, np.uint8)[tensor.offset : tensor.offset + tensor.nbytes]
    return data.view(int_dtype).reshape(tensor.shape)


def align_nbytes(nbytes: int) -> int:
    """Round a size up to the alignment."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def _describe_shard(shard: TensorShard, tensor: TensorSlot) -> tuple[str, str, tuple[int, ...], ShardOrigin | None]:
    if shard.shape == tensor.shape:
        return tensor.name, tensor.dtype, tensor.shape, None
    name = f"{tensor.name}@{','.join(map(str, shard.start))}"
    return name, tensor.dtype, shard.shape, ShardOrigin(name=tensor.name, start=shard.start, shape=tensor.shape)


def make_whole_shard(tensor: TensorSlot) -> TensorShard:
    """Return all of a tensor as one shard."""
    return TensorShard(name=tensor.name, start=(0,) * len(tensor.shape), shape=tensor.shape)


def check_shard(shard: TensorShard, tensors: Mapping[str, TensorSlot], *, dtype: str, shape: tuple[int, ...]) -> None:
    """Raise WeightsError unless values of this type and shape may be written as `shard` of one of `tensors`.

    Values in float32 may be written as fewer bits: they are rounded.
    """
    tensor = _find_tensor(shard, tensors)
    is_rounded = dtype == "float32" and tensor.dtype in ROUNDED_DTYPES
    if shape != shard.shape or (dtype != tensor.dtype and not is_rounded):
        raise WeightsError(
            f"tensor {shard.name!r}: a shard of {tensor.dtype} {list(shard.shape)} at {list(shard.start)} is expected, "
            f"but {dtype} {list(shape)} was given"
        )


def check_cover(layout: TensorLayout, held_by_rank: Sequence[Sequence[TensorShard]]) -> None:
    """Raise WeightsError, naming the tensor and the ranks, unless every value is in exactly one shard."""
    tensors = layout.tensors_by_name()
    holders: dict[str, list[tuple[TensorShard, int]]] = {name: [] for name in tensors}
    for rank, shards in enumerate(held_by_rank):
        for shard in shards:
            if shard.num_values:
                holders[_find_tensor(shard, tensors).name].append((shard, rank))
    for tensor in layout.tensors:
        _check_disjoint(holders[tensor.name])
        lacking = math.prod(tensor.shape) - sum(shard.num_values for shard, _ in holders[tensor.name])
        if lacking:
            raise WeightsError(
                f"tensor {tensor.name!r}: {lacking} of its {math.prod(tensor.shape)} values are held by no rank: "
                "the trainer's shards must cover every tensor"
            )


def _check_disjoint(shards_and_ranks: list[tuple[TensorShard, int]]) -> None:
    """Raise WeightsError if two shards of one tensor overlap."""
    in_order = sorted(shards_and_ranks, key=lambda pair: pair[0].start)
    for number, (shard, rank) in enumerate(in_order):
        for other, other_rank in in_order[number + 1 :]:
            if shard.start and other.start[0] >= shard.start[0] + shard.shape[0]:
                break  # all later ones start after this one, too
            if all(
                max(a, b) < min(a + m, b + n)
                for a, m, b, n in zip(shard.start, shard.shape, other.start, other.shape, strict=True)
            ):
                raise WeightsError(
                    f"tensor {shard.name!r}: rank {rank} and rank {other_rank} both hold values from "
                    f"{list(map(max, shard.start, other.start))} on: one of them must leave them out"
                )


def _find_tensor(shard: TensorShard, tensors: Mapping[str, TensorSlot]) -> TensorSlot:
    """Return the tensor of a shard; WeightsError if the shard exceeds it."""
    tensor = tensors.get(shard.name)
    if tensor is None:
        raise WeightsError(f"a shard belongs to tensor {shard.name!r}, which the layout does not have")
    fits = len(shard.start) == len(shard.shape) == len(tensor.shape) and all(
        min(start, size) >= 0 and start + size <= size_of_all
        for start, size, size_of_all in zip(shard.start, shard.shape, tensor.shape, strict=True)
    )
    if not fits:
        raise WeightsError(
            f"tensor {shard.name!r} has shape {list(tensor.shape)}; a shard of it starts at {list(shard.start)} "
            f"and has shape {list(shard.shape)}: it must be within the tensor"
        )
    return tensor


@dataclass(frozen=True, kw_only=True)
class PartAssignment:
    """The nodes of a trainer's ranks, and the part of the weights on each."""

    nodes: tuple[str, ...]
    """Node of every rank."""
    layouts: dict[str, TensorLayout]
    """Layout of every node's window."""

    @classmethod
    def from_shards(
        cls, layout: TensorLayout, *, nodes: Sequence[str], held_by_rank: Sequence[Sequence[TensorShard]]
    ) -> "PartAssignment":
        """Assign parts to nodes by the shards that their ranks hold; WeightsError unless these make up the whole."""
        check_cover(layout, held_by_rank)
        shards: dict[str, list[TensorShard]] = {node: [] for node in nodes}
        for node, held in zip(nodes, held_by_rank, strict=True):
            shards[node] += [shard for shard in held if shard.num_values]
        shards[nodes[0]] += [make_whole_shard(tensor) for tensor in layout.tensors if not math.prod(tensor.shape)]
        return cls(nodes=tuple(nodes), layouts={node: build_part_layout(layout, held) for node, held in shards.items()})

    def writer(self, rank: int) -> int:
        """Return the rank that commits what this one stages."""
        return self.nodes.index(self.nodes[rank])

    def writers(self) -> dict[str, int]:
        """Return the rank on each node that creates its window and commits: the first one there."""
        return {node: self.nodes.index(node) for node in self.layouts}


def build_part_layout(layout: TensorLayout, shards: Iterable[TensorShard]) -> TensorLayout:
    """Lay out these shards, in the order of their tensors."""
    by_name: dict[str, list[TensorShard]] = {}
    for shard in shards:
        by_name.setdefault(shard.name, []).append(shard)
    return TensorLayout.from_shards(
        (shard, tensor) for tensor in layout.tensors for shard in _merge_shards(by_name.get(tensor.name, []), tensor)
    )


def join_layouts(parts: Sequence[TensorLayout]) -> TensorLayout:
    """Lay out all tensors of which the parts hold shards; WeightsError unless they hold every value once."""
    tensors: dict[str, tuple[str, tuple[int, ...]]] = {}
    for part in parts:
        for shard_slot in part.tensors:
            seen = (shard_slot.dtype, shard_slot.shape if shard_slot.cut is None else shard_slot.cut.shape)
            if tensors.setdefault(shard_slot.shard.name, seen) != seen:
                raise WeightsError(
                    f"tensor {shard_slot.shard.name!r} is {seen[0]} {list(seen[1])} on one node of the trainer and "
                    f"{tensors[shard_slot.shard.name]} on another: do all ranks hold the same model?"
                )
    layout = TensorLayout.pack((name, dtype, shape) for name, (dtype, shape) in tensors.items())
    check_cover(layout, [[shard_slot.shard for shard_slot in part.tensors] for part in parts])
    return layout


def _merge_shards(shards: list[TensorShard], tensor: TensorSlot) -> list[TensorShard]:
    """Merge disjoint shards into the one that they fill together, if they do."""
    if len(shards) < 2:
        return shards
    low = tuple(map(min, zip(*(shard.start for shard in shards), strict=True)))
    ends = [[start + size for start, size in zip(shard.start, shard.shape, strict=True)] for shard in shards]
    shape = tuple(max(end) - start for end, start in zip(zip(*ends, strict=True), low, strict=True))
    if math.prod(shape) == sum(shard.num_values for shard in shards):
        return [TensorShard(name=tensor.name, start=low, shape=shape)]
    return sorted(shards, key=lambda shard: shard.start)
