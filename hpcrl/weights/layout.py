"""Where every tensor of a version lies in one flat run of bytes; imports nothing heavy.

Layout   all tensors by their HF names: dtype, shape, place
Shard    the box of one tensor that one rank of a trainer holds
runs     the contiguous bytes of the layout that a shard covers
check_cover    every byte is held by exactly one shard
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from itertools import product
from typing import TYPE_CHECKING, NamedTuple

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


class Placed(msgspec.Struct, frozen=True, kw_only=True):
    """One tensor and its place."""

    name: str
    dtype: str
    """As torch calls it, without "torch."."""
    shape: tuple[int, ...]
    offset: int
    nbytes: int


class Layout(msgspec.Struct, frozen=True, kw_only=True):
    """All tensors of a version, in order, each aligned to 64 bytes."""

    tensors: tuple[Placed, ...]
    nbytes: int
    """Of the whole, padding included."""

    @classmethod
    def of(cls, tensors: "Mapping[str, torch.Tensor]") -> "Layout":
        """The layout of these tensors, in their order."""
        return cls.pack((name, str(t.dtype).removeprefix("torch."), tuple(t.shape)) for name, t in tensors.items())

    @classmethod
    def pack(cls, tensors: Iterable[tuple[str, str, tuple[int, ...]]]) -> "Layout":
        """The layout of tensors given by name, dtype and shape."""
        placed, offset = [], 0
        for name, dtype, shape in tensors:
            if dtype not in ITEM_SIZES:
                raise WeightsError(
                    f"tensor {name!r} is {dtype}, which has no place in a layout: "
                    f"publish one of {', '.join(sorted(ITEM_SIZES))}"
                )
            nbytes = math.prod(shape) * ITEM_SIZES[dtype]
            placed.append(Placed(name=name, dtype=dtype, shape=shape, offset=offset, nbytes=nbytes))
            offset += -(-nbytes // ALIGNMENT) * ALIGNMENT
        return cls(tensors=tuple(placed), nbytes=offset)

    @classmethod
    def from_json(cls, data: bytes) -> "Layout":
        """The inverse of `to_json`; WeightsError if the data are damaged."""
        try:
            layout = msgspec.json.decode(data, type=cls)
        except msgspec.DecodeError as error:
            raise WeightsError(f"the layout of the weights is damaged ({error}): publish them anew") from None
        if layout != cls.pack((t.name, t.dtype, t.shape) for t in layout.tensors):
            raise WeightsError("the layout of the weights is damaged (its places are not its tensors'): publish anew")
        return layout

    def to_json(self) -> bytes:
        return msgspec.json.encode(self)

    def digest(self) -> str:
        """xxh3_128 of the JSON: equal digests, equal layouts."""
        return xxhash.xxh3_128_hexdigest(self.to_json())

    def by_name(self) -> dict[str, Placed]:
        return {tensor.name: tensor for tensor in self.tensors}

    def check_same(self, other: "Layout", *, ours: str, theirs: str) -> None:
        """WeightsError naming the first tensor in which the two differ."""
        mine, its = self.by_name(), other.by_name()
        if missing := [name for name in its if name not in mine]:
            raise WeightsError(f"{ours} lacks tensor {missing[0]!r}, which {theirs} has: is it the same model?")
        if extra := [name for name in mine if name not in its]:
            raise WeightsError(f"{ours} holds tensor {extra[0]!r}, which {theirs} does not have: is it the same model?")
        for name, tensor in mine.items():
            if (tensor.dtype, tensor.shape) != (its[name].dtype, its[name].shape):
                raise WeightsError(
                    f"tensor {name!r} is {tensor.dtype} {list(tensor.shape)} in {ours} and "
                    f"{its[name].dtype} {list(its[name].shape)} in {theirs}: is it the same model?"
                )
        if self != other:
            raise WeightsError(f"{ours} and {theirs} hold their tensors in a different order: publish in one order")


class Shard(msgspec.Struct, frozen=True, kw_only=True):
    """The box of one canonical tensor that a rank holds, under whatever TP, PP and DP.

    A fused tensor of a trainer (qkv, gate and up) is several shards; a replicated one is written by one rank.
    """

    name: str
    start: tuple[int, ...]
    shape: tuple[int, ...]


class Run(NamedTuple):
    """Contiguous bytes of a layout."""

    offset: int
    nbytes: int


def runs(layout: Layout, shard: Shard) -> Iterator[Run]:
    """The bytes that a shard covers, in the order of its own values: its rank writes each with one copy."""
    tensor = _tensor_of(layout, shard)
    item = ITEM_SIZES[tensor.dtype]
    strides = [math.prod(tensor.shape[axis + 1 :]) for axis in range(len(tensor.shape))]
    split = _first_axis_of_run(tensor, shard)
    nbytes = math.prod(shard.shape[split:]) * item
    if nbytes == 0 or math.prod(shard.shape) == 0:
        return
    tail = sum(start * stride for start, stride in zip(shard.start[split:], strides[split:], strict=True))
    for index in product(*(range(shard.start[axis], shard.start[axis] + shard.shape[axis]) for axis in range(split))):
        head = sum(i * stride for i, stride in zip(index, strides[:split], strict=True))
        yield Run(offset=tensor.offset + (head + tail) * item, nbytes=nbytes)


def check_cover(layout: Layout, shards: Iterable[Shard]) -> None:
    """WeightsError naming the tensor unless every value is held by exactly one shard."""
    held: dict[str, list[Run]] = {tensor.name: [] for tensor in layout.tensors}
    for shard in shards:
        held[_tensor_of(layout, shard).name] += runs(layout, shard)
    for tensor in layout.tensors:
        reached = tensor.offset
        for run in sorted(held[tensor.name]):
            if run.offset != reached:
                wrong = "are held by two ranks" if run.offset < reached else "are held by no rank"
                raise WeightsError(_uncovered(tensor, min(run.offset, reached), wrong))
            reached += run.nbytes
        if reached != tensor.offset + tensor.nbytes:
            raise WeightsError(_uncovered(tensor, reached, "are held by no rank"))


def _uncovered(tensor: Placed, offset: int, wrong: str) -> str:
    return (
        f"tensor {tensor.name!r}: bytes from {offset - tensor.offset} on (of {tensor.nbytes}) {wrong}: "
        "the trainer's shards have to cover every tensor once"
    )


def _tensor_of(layout: Layout, shard: Shard) -> Placed:
    """The tensor a shard is of; WeightsError if it does not lie within it."""
    tensor = next((tensor for tensor in layout.tensors if tensor.name == shard.name), None)
    if tensor is None:
        raise WeightsError(f"a shard is of tensor {shard.name!r}, which the layout does not have")
    fits = len(shard.start) == len(shard.shape) == len(tensor.shape) and all(
        min(start, size) >= 0 and start + size <= whole
        for start, size, whole in zip(shard.start, shard.shape, tensor.shape, strict=True)
    )
    if not fits:
        raise WeightsError(
            f"tensor {shard.name!r} has shape {list(tensor.shape)}; a shard of it starts at {list(shard.start)} "
            f"and has shape {list(shard.shape)}: it has to lie within"
        )
    return tensor


def _first_axis_of_run(tensor: Placed, shard: Shard) -> int:
    """From this axis on, the box is contiguous: all axes after it are whole."""
    axis = len(tensor.shape)
    while axis > 0 and shard.shape[axis - 1 :] == tensor.shape[axis - 1 :]:
        axis -= 1
    return max(axis - 1, 0)
