"""The names of a model's values in the files of its directory: versions, checkpoints and exports have the same names.

    StoredTensor        a tensor of a file, and the part of the model's tensor that it is
    StoredTensors       those of each of the model's tensors, by its name
    list_model_tensors  the tensors of a model that files hold
    split_shard         a shard of a model's tensor as shards of stored tensors
    split_tensors       whole tensors of a model as stored tensors

Files of the hub hold the experts of a layer one by one, or stacked, while transformers has all of them in one tensor.
vLLM's loaders expect the names of the files. A model without known files has its own names.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

from hpcrl.weights.layout import TensorShard

if TYPE_CHECKING:
    import torch


class StoredTensor(NamedTuple):
    """A tensor of a file, and the part of the model's tensor that it is."""

    file: Path
    name: str
    shape: tuple[int, ...]
    place: TensorShard
    """Its part of the model's tensor; one dimension more than in the file where experts are stacked."""
    dtype: str
    """The name of its type in safetensors."""


StoredTensors = Mapping[str, Sequence[StoredTensor]]


class _Shaped(Protocol):
    @property
    def shape(self) -> tuple[int, ...]: ...


Values = TypeVar("Values", bound=_Shaped)


class StoredSlice(NamedTuple):
    """A shard of a stored tensor, in the memory of the model."""

    stored: StoredTensor
    shard: TensorShard
    tensor: Any
    """A part of what was split: a tensor, or what computes one."""


def list_model_tensors(module: "torch.nn.Module") -> "dict[str, torch.Tensor]":
    """Return parameters, and buffers that files hold, by name; a tied one once, under its first name."""
    found = {name: parameter.detach() for name, parameter in module.named_parameters()}
    for path, submodule in module.named_modules():
        for name, buffer in submodule._buffers.items():
            if buffer is not None and name not in submodule._non_persistent_buffers_set:
                found[f"{path}.{name}" if path else name] = buffer
    return found


def split_tensors(tensors: Mapping[str, Values], stored: StoredTensors) -> dict[str, Values]:
    """Return the whole tensors of a model, by name, as those in its files, as far as `stored` has them."""
    found: dict[str, Values] = {}
    for name, tensor in tensors.items():
        shape = tuple(tensor.shape)
        whole = TensorShard(name=name, start=(0,) * len(shape), shape=shape)
        if parts := stored.get(name):
            found |= {part.shard.name: part.tensor for part in split_shard(whole, tensor, parts)}
        else:
            found[name] = tensor
    return found


def split_shard(own: TensorShard, tensor: Any, stored: Sequence[StoredTensor]) -> Iterator[StoredSlice]:
    """Yield the parts of a shard of a model's tensor that belong to each of the stored tensors; nothing is copied."""
    for each in stored:
        place = each.place
        low = tuple(max(a, b) for a, b in zip(own.start, place.start, strict=True))
        high = [min(a + n, b + m) for a, n, b, m in zip(own.start, own.shape, place.start, place.shape, strict=True)]
        if any(first >= last for first, last in zip(low, high, strict=True)):
            continue
        num_added = len(place.shape) - len(each.shape)  # dimensions that the file does not have
        ranges = list(zip(low, high, own.start, place.start, strict=True))
        in_own = [
            a - start if number < num_added else slice(a - start, b - start)
            for number, (a, b, start, _) in enumerate(ranges)
        ]
        in_file = ranges[num_added:]
        shard = TensorShard(
            name=each.name,
            start=tuple(a - start for a, _, _, start in in_file),
            shape=tuple(b - a for a, b, _, _ in in_file),
        )
        yield StoredSlice(each, shard, tensor[tuple(in_own)])
