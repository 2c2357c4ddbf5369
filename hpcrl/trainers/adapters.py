"""Adapters of low rank (LoRA, arXiv 2106.09685): a pair of small matrices beside each linear layer of a frozen model.

    add_adapters       freeze a model, and add a pair to each linear layer; they have memory where the model has
    fill_adapters      their first values, with which they add nothing
    find_adapters      the adapters of a model, by the weight that they change
    without_adapters   a context in which they add nothing: the model that training started from
    list_base_weights  the weights beside the adapters
    MergedWeight       a weight or a shard of it with its adapter, added when the weight is copied
    gather_merged      a whole weight with its adapter
    gather_whole       one without
    MergedTensors      the weights of a model, each merged when it is read
    ADAPTER_PREFIX     the prefix of adapters in checkpoints

Exported weights are merged, and so are published ones where engines do not take adapters (published_adapters.py); no
more than one weight is in memory merged.

Legend: I inputs of a layer, O its outputs, R rank of the adapters
"""

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import functional

from hpcrl.errors import TrainError
from hpcrl.models.adapted_layers import list_adapted_layers
from hpcrl.trainers.state import list_local_shards
from hpcrl.weights.stored_tensors import list_model_tensors

ADAPTER_PREFIX = "lora."
"""The prefix of adapter names in checkpoints."""
_ATTRIBUTE = "adapter"
"""The name of an adapter in its layer."""


class LayerAdapter(torch.nn.Module):
    """The adapter of a linear layer: what it adds to the output is scale x up x down x input."""

    def __init__(self, layer: torch.nn.Linear, *, rank: int, scale: float) -> None:
        """Make it without values, on the layer's device, in float32 whatever the layer's type is."""
        super().__init__()
        device = layer.weight.device
        self.scale = scale
        self.is_on = True
        self.down_RI = torch.nn.Parameter(torch.empty(rank, layer.in_features, device=device))
        self.up_OR = torch.nn.Parameter(torch.empty(layer.out_features, rank, device=device))

    def forward(self, inputs: Tensor) -> Tensor:
        inner = functional.linear(inputs, self.down_RI.to(inputs.dtype))
        return functional.linear(inner, self.up_OR.to(inputs.dtype)) * self.scale


def add_adapters(module: Any, *, rank: int, alpha: float) -> None:
    """Freeze a model and add adapters; the output layer, the embeddings and experts stay as they are."""
    module.requires_grad_(False)
    chosen = list_adapted_layers(module).values()
    if not chosen:
        raise TrainError(
            f"train.lora_rank = {rank}: a {type(module).__name__} has no linear layers for adapters: set it to 0"
        )
    for layer in chosen:
        layer.add_module(_ATTRIBUTE, LayerAdapter(layer, rank=rank, scale=alpha / rank))
        layer.register_forward_hook(_add_output)


def _add_output(layer: torch.nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
    adapter: Any = layer.adapter
    return output + adapter(inputs[0]) if adapter.is_on else output


def fill_adapters(adapters: Mapping[str, LayerAdapter]) -> None:
    """Give adapters their first values, the same on every rank and every time."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, adapter in adapters.items():
            rank, num_inputs = adapter.down_RI.shape
            drawn_RI = (2 * torch.rand(rank, num_inputs, generator=generator) - 1) / num_inputs**0.5
            for shard in list_local_shards(name, adapter.down_RI, part=""):
                shard.tensor.copy_(drawn_RI[shard.shard.index])
            adapter.up_OR.zero_()


def find_adapters(module: torch.nn.Module) -> dict[str, LayerAdapter]:
    """Find the adapters of a model, each by the name of the weight that it changes."""
    return {
        f"{name.removesuffix(_ATTRIBUTE)}weight": adapter
        for name, adapter in module.named_modules()
        if isinstance(adapter, LayerAdapter)
    }


@contextmanager
def without_adapters(adapters: Mapping[str, LayerAdapter]) -> Iterator[None]:
    """Run the model without its adapters in a block."""
    for adapter in adapters.values():
        adapter.is_on = False
    try:
        yield
    finally:
        for adapter in adapters.values():
            adapter.is_on = True


def list_base_weights(module: torch.nn.Module) -> dict[str, Tensor]:
    """Return the weights by their names in the module, without adapters; a tied one has its first name."""
    return {name: tensor for name, tensor in list_model_tensors(module).items() if f".{_ATTRIBUTE}." not in name}


class MergedWeight:
    """A frozen weight, or a rank's shard of it, to which its adapter is added in float32 when it is read.

    It has what publishing asks of a tensor: its type, its shape, its parts and `detach`.
    """

    dtype = torch.float32

    def __init__(self, weight: Tensor, adapter: LayerAdapter | None = None) -> None:
        """Take this rank's rows of the weight and the adapter; all ranks must call this together."""
        self._weight = _find_local(weight)
        self.shape = self._weight.shape
        self._up_OR = self._down_RI = None
        self._scale = 1.0
        if adapter is not None:  # layers are divided by rows, so the rows of `up` are those of the weight
            self._up_OR, self._scale = _find_local(adapter.up_OR.detach()), adapter.scale
            self._down_RI = gather_whole(adapter.down_RI.detach())

    def __getitem__(self, index: tuple[int | slice, ...]) -> "MergedWeight":
        """Return a part of it, which is merged alone; only a weight with rows and columns has an adapter."""
        part = copy.copy(self)
        part._weight = self._weight[index]
        part.shape = part._weight.shape
        if self._up_OR is not None and self._down_RI is not None:
            rows, columns = index
            part._up_OR, part._down_RI = self._up_OR[rows], self._down_RI[:, columns]
        return part

    def detach(self) -> Tensor:
        """Return the weight with its adapter."""
        if self._up_OR is None or self._down_RI is None:
            return self._weight.float()
        return torch.addmm(self._weight.float(), self._up_OR, self._down_RI, alpha=self._scale)


def gather_merged(weight: Tensor, adapter: LayerAdapter | None) -> Tensor:
    """Return a whole weight with its adapter, on every rank; all must call this together."""
    merged = MergedWeight(weight, adapter).detach()
    if not isinstance(weight, DTensor):
        return merged
    mesh, placements = weight.device_mesh, weight.placements
    return DTensor.from_local(
        merged, mesh, placements, run_check=False, shape=weight.shape, stride=weight.stride()
    ).full_tensor()


class MergedTensors(Mapping[str, Tensor]):
    """The weights of a model of which this rank has all; each is merged when it is read."""

    def __init__(self, merged: Mapping[str, MergedWeight]) -> None:
        self._merged = merged

    def __getitem__(self, name: str) -> Tensor:
        return self._merged[name].detach()

    def __iter__(self) -> Iterator[str]:
        return iter(self._merged)

    def __len__(self) -> int:
        return len(self._merged)


def _find_local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def gather_whole(tensor: Tensor) -> Tensor:
    """Return a whole tensor on every rank; if it is sharded, all must call this together."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
