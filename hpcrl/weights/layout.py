"""Where every tensor of a version lies in one flat run of bytes; imports nothing heavy.

Layout         all tensors by their HF names: dtype, shape, place; or boxes of tensors, where a node has only a part
Shard          the box of one tensor that one rank of a trainer holds; `make_whole_shard` and `split_tensor` make the usual ones
check_cover    every value is held by exactly one shard

Which node of a trainer holds what of a version: each keeps its own part, and nowhere is the whole put together.

Parts       for every rank its node, for every node the layout of its part
part_of     the boxes of some ranks as the layout of a window, joined to larger boxes where they fill one
joined      the layout of the whole, from those of all its parts
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

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


class ShardOrigin(msgspec.Struct, frozen=True, kw_only=True):
    """Of which tensor a box is that is placed by itself."""

    name: str
    start: tuple[int, ...]
    shape: tuple[int, ...]
    """Of the whole tensor."""


class TensorSlot(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One tensor, or one box of it, and its place."""

    name: str
    dtype: str
    """As torch calls it, without "torch."."""
    shape: tuple[int, ...]
    offset: int
    nbytes: int
    cut: ShardOrigin | None = None
    """None: a whole tensor."""

    @property
    def shard(self) -> "TensorShard":
        """Which values of which tensor these are."""
        return (
            make_whole_shard(self)
            if self.cut is None
            else TensorShard(name=self.cut.name, start=self.cut.start, shape=self.shape)
        )


class TensorLayout(msgspec.Struct, frozen=True, kw_only=True):
    """All tensors of a version, in order, each aligned to 64 bytes."""

    tensors: tuple[TensorSlot, ...]
    nbytes: int
    """Of the whole, padding included."""

    @classmethod
    def from_tensors(cls, tensors: "Mapping[str, torch.Tensor]") -> "TensorLayout":
        """The layout of these tensors, in their order."""
        return cls.pack((name, str(t.dtype).removeprefix("torch."), tuple(t.shape)) for name, t in tensors.items())

    @classmethod
    def pack(cls, tensors: Iterable[tuple[str, str, tuple[int, ...]]]) -> "TensorLayout":
        """The layout of tensors given by name, dtype and shape."""
        return cls._place_boxes((name, dtype, shape, None) for name, dtype, shape in tensors)

    @classmethod
    def from_boxes(cls, boxes: "Iterable[tuple[TensorShard, TensorSlot]]") -> "TensorLayout":
        """The layout of boxes, each given with the tensor it is of; one that is all of it keeps that one's name."""
        return cls._place_boxes(_describe_box(shard, tensor) for shard, tensor in boxes)

    @classmethod
    def _place_boxes(cls, boxes: "Iterable[tuple[str, str, tuple[int, ...], ShardOrigin | None]]") -> "TensorLayout":
        slots, offset = [], 0
        for name, dtype, shape, cut in boxes:
            if dtype not in ITEM_SIZES:
                raise WeightsError(
                    f"tensor {name!r} is {dtype}, which has no place in a layout: "
                    f"publish one of {', '.join(sorted(ITEM_SIZES))}"
                )
            nbytes = math.prod(shape) * ITEM_SIZES[dtype]
            slots.append(TensorSlot(name=name, dtype=dtype, shape=shape, offset=offset, nbytes=nbytes, cut=cut))
            offset += align_nbytes(nbytes)
        return cls(tensors=tuple(slots), nbytes=offset)

    @classmethod
    def from_json(cls, data: bytes) -> "TensorLayout":
        """The inverse of `to_json`; WeightsError if the data are damaged."""
        try:
            layout = msgspec.json.decode(data, type=cls)
        except msgspec.DecodeError as error:
            raise WeightsError(f"the layout of the weights is damaged ({error}): publish them anew") from None
        if layout != cls._place_boxes((t.name, t.dtype, t.shape, t.cut) for t in layout.tensors):
            raise WeightsError("the layout of the weights is damaged (its places are not its tensors'): publish anew")
        return layout

    def to_json(self) -> bytes:
        return msgspec.json.encode(self)

    def digest(self) -> str:
        """xxh3_128 of the JSON: equal digests, equal layouts."""
        return xxhash.xxh3_128_hexdigest(self.to_json())

    def tensors_by_name(self) -> dict[str, TensorSlot]:
        return {tensor.name: tensor for tensor in self.tensors}

    def check_same(self, other: "TensorLayout", *, own_name: str, other_name: str) -> None:
        """WeightsError naming the first tensor in which the two differ."""
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
                    f"{other_tensors[name].dtype} {list(other_tensors[name].shape)} in {other_name}: is it the same model?"
                )
        if self != other:
            raise WeightsError(
                f"{own_name} and {other_name} hold their tensors in a different order: publish in one order"
            )


class TensorShard(msgspec.Struct, frozen=True, kw_only=True):
    """The box of one canonical tensor that a rank holds, under whatever TP, PP and DP.

    A fused tensor of a trainer (qkv, gate and up) is several shards; a replicated one is written by one rank.
    """

    name: str
    start: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def index(self) -> tuple[slice, ...]:
        """Where it is in the whole tensor."""
        return tuple(slice(start, start + size) for start, size in zip(self.start, self.shape, strict=True))

    @property
    def num_values(self) -> int:
        return math.prod(self.shape)

    def index_in(self, box: "TensorShard") -> tuple[slice, ...] | None:
        """Where it is in another box of its tensor; None if that does not hold all of it."""
        start = tuple(own - first for own, first in zip(self.start, box.start, strict=True))
        ends = (first + size for first, size in zip(start, self.shape, strict=True))
        if min(start, default=0) < 0 or any(end > size for end, size in zip(ends, box.shape, strict=True)):
            return None
        return TensorShard(name=self.name, start=start, shape=self.shape).index


def align_nbytes(nbytes: int) -> int:
    """The bytes that something takes up, with those before the next."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def _describe_box(shard: TensorShard, tensor: TensorSlot) -> tuple[str, str, tuple[int, ...], ShardOrigin | None]:
    if shard.shape == tensor.shape:
        return tensor.name, tensor.dtype, tensor.shape, None
    name = f"{tensor.name}@{','.join(map(str, shard.start))}"
    return name, tensor.dtype, shard.shape, ShardOrigin(name=tensor.name, start=shard.start, shape=tensor.shape)


def make_whole_shard(tensor: TensorSlot) -> TensorShard:
    """All of a tensor."""
    return TensorShard(name=tensor.name, start=(0,) * len(tensor.shape), shape=tensor.shape)


def split_tensor(tensor: TensorSlot, *, axis: int, num_shards: int) -> list[TensorShard]:
    """A tensor in `num_shards` boxes, as even as can be, the larger ones first."""
    edges = [-(-index * tensor.shape[axis] // num_shards) for index in range(num_shards + 1)]
    return [
        TensorShard(
            name=tensor.name,
            start=tuple(low if i == axis else 0 for i in range(len(tensor.shape))),
            shape=tuple(high - low if i == axis else size for i, size in enumerate(tensor.shape)),
        )
        for low, high in pairwise(edges)
    ]


def check_shard(shard: TensorShard, tensors: Mapping[str, TensorSlot], *, dtype: str, shape: tuple[int, ...]) -> None:
    """WeightsError unless values of this type and shape may be written as `shard` of one of `tensors`."""
    tensor = _find_tensor(shard, tensors)
    if (dtype, shape) != (tensor.dtype, shard.shape):
        raise WeightsError(
            f"tensor {shard.name!r}: a shard of {tensor.dtype} {list(shard.shape)} at {list(shard.start)} was to come, "
            f"and {dtype} {list(shape)} came"
        )


def check_cover(layout: TensorLayout, held_by_rank: Sequence[Sequence[TensorShard]]) -> None:
    """WeightsError naming the tensor, and the ranks, unless every value is in exactly one shard; `held_by_rank` is by rank."""
    tensors = layout.tensors_by_name()
    boxes: dict[str, list[tuple[TensorShard, int]]] = {name: [] for name in tensors}
    for rank, shards in enumerate(held_by_rank):
        for shard in shards:
            if shard.num_values:
                boxes[_find_tensor(shard, tensors).name].append((shard, rank))
    for tensor in layout.tensors:
        _check_disjoint(boxes[tensor.name])
        lacking = math.prod(tensor.shape) - sum(shard.num_values for shard, _ in boxes[tensor.name])
        if lacking:
            raise WeightsError(
                f"tensor {tensor.name!r}: {lacking} of its {math.prod(tensor.shape)} values are held by no rank: "
                "the trainer's shards have to cover every tensor"
            )


def _check_disjoint(boxes: list[tuple[TensorShard, int]]) -> None:
    """WeightsError if two boxes of one tensor meet."""
    in_order = sorted(boxes, key=lambda box: box[0].start)
    for number, (shard, rank) in enumerate(in_order):
        for other, other_rank in in_order[number + 1 :]:
            if shard.start and other.start[0] >= shard.start[0] + shard.shape[0]:
                break  # and so do all after it
            if all(
                max(a, b) < min(a + m, b + n)
                for a, m, b, n in zip(shard.start, shard.shape, other.start, other.shape, strict=True)
            ):
                raise WeightsError(
                    f"tensor {shard.name!r}: rank {rank} and rank {other_rank} both hold values from "
                    f"{list(map(max, shard.start, other.start))} on: one of them has to leave them out"
                )


def _find_tensor(shard: TensorShard, tensors: Mapping[str, TensorSlot]) -> TensorSlot:
    """The tensor a shard is of; WeightsError if it does not lie within it."""
    tensor = tensors.get(shard.name)
    if tensor is None:
        raise WeightsError(f"a shard is of tensor {shard.name!r}, which the layout does not have")
    fits = len(shard.start) == len(shard.shape) == len(tensor.shape) and all(
        min(start, size) >= 0 and start + size <= size_of_all
        for start, size, size_of_all in zip(shard.start, shard.shape, tensor.shape, strict=True)
    )
    if not fits:
        raise WeightsError(
            f"tensor {shard.name!r} has shape {list(tensor.shape)}; a shard of it starts at {list(shard.start)} "
            f"and has shape {list(shard.shape)}: it has to lie within"
        )
    return tensor


@dataclass(frozen=True, kw_only=True)
class PartAssignment:
    """How the ranks of a trainer lie on nodes."""

    nodes: tuple[str, ...]
    """Of every rank."""
    layouts: dict[str, TensorLayout]
    """Of every node's window."""

    @classmethod
    def from_shards(
        cls, layout: TensorLayout, *, nodes: Sequence[str], held_by_rank: Sequence[Sequence[TensorShard]]
    ) -> "PartAssignment":
        """What lies where if the ranks on these nodes hold these boxes; WeightsError if they do not make the whole."""
        check_cover(layout, held_by_rank)
        shards: dict[str, list[TensorShard]] = {node: [] for node in nodes}
        for node, boxes in zip(nodes, held_by_rank, strict=True):
            shards[node] += [shard for shard in boxes if shard.num_values]
        shards[nodes[0]] += [make_whole_shard(tensor) for tensor in layout.tensors if not math.prod(tensor.shape)]
        return cls(
            nodes=tuple(nodes), layouts={node: build_part_layout(layout, boxes) for node, boxes in shards.items()}
        )

    def writer(self, rank: int) -> int:
        """The rank that commits what this one stages."""
        return self.nodes.index(self.nodes[rank])

    def writers(self) -> dict[str, int]:
        """On each node the rank that makes its window and commits: the first one there."""
        return {node: self.nodes.index(node) for node in self.layouts}


def build_part_layout(layout: TensorLayout, shards: Iterable[TensorShard]) -> TensorLayout:
    """These boxes, in the order of their tensors."""
    by_name: dict[str, list[TensorShard]] = {}
    for shard in shards:
        by_name.setdefault(shard.name, []).append(shard)
    return TensorLayout.from_boxes(
        (box, tensor) for tensor in layout.tensors for box in _merge_shards(by_name.get(tensor.name, []), tensor)
    )


def join_layouts(parts: Sequence[TensorLayout]) -> TensorLayout:
    """All tensors of which the parts hold boxes; WeightsError unless they hold every value once."""
    tensors: dict[str, tuple[str, tuple[int, ...]]] = {}
    for part in parts:
        for box in part.tensors:
            seen = (box.dtype, box.shape if box.cut is None else box.cut.shape)
            if tensors.setdefault(box.shard.name, seen) != seen:
                raise WeightsError(
                    f"tensor {box.shard.name!r} is {seen[0]} {list(seen[1])} on one node of the trainer and "
                    f"{tensors[box.shard.name]} on another: do all ranks hold the same model?"
                )
    layout = TensorLayout.pack((name, dtype, shape) for name, (dtype, shape) in tensors.items())
    check_cover(layout, [[box.shard for box in part.tensors] for part in parts])
    return layout


def _merge_shards(shards: list[TensorShard], tensor: TensorSlot) -> list[TensorShard]:
    """The box that these fill together, if they do; they do not meet."""
    if len(shards) < 2:
        return shards
    low = tuple(map(min, zip(*(shard.start for shard in shards), strict=True)))
    ends = [[start + size for start, size in zip(shard.start, shard.shape, strict=True)] for shard in shards]
    shape = tuple(max(end) - start for end, start in zip(zip(*ends, strict=True), low, strict=True))
    if math.prod(shape) == sum(shard.num_values for shard in shards):
        return [TensorShard(name=tensor.name, start=low, shape=shape)]
    return sorted(shards, key=lambda shard: shard.start)
