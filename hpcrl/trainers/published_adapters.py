"""The adapters of a model as engines are sent them, without the weights that they change.

PublishedAdapters  what a trainer publishes of a model with adapters
ScaledValues       values that are scaled when they are copied

Legend: I inputs of a layer, O its outputs, R rank of the adapters
"""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from hpcrl.models.adapted_layers import name_adapter
from hpcrl.trainers.adapters import LayerAdapter, gather_whole
from hpcrl.trainers.state import WEIGHT_PART, list_local_shards
from hpcrl.trainers.world import World
from hpcrl.weights.layout import TensorShard
from hpcrl.weights.stored_tensors import StoredTensors
from hpcrl.weights.stores.sharded_store import LocalShards, ShardValues


class ScaledValues:
    """Values of an adapter, scaled when they are copied."""

    dtype = torch.float32

    def __init__(self, tensor: Tensor, scale: float) -> None:
        self._tensor = tensor
        self._scale = scale
        self.shape = tensor.shape

    def detach(self) -> Tensor:
        """Return the scaled values."""
        return self._tensor.detach() * self._scale


class PublishedAdapters:
    """The adapters of a model, by the names that they have in versions."""

    def __init__(self, adapters: Mapping[str, LayerAdapter], *, stored: StoredTensors, world: World) -> None:
        """Take adapters by the weights that they change; WeightsError if the model directory has no names for them."""
        self._world = world
        self._parameters: dict[str, tuple[Tensor, float]] = {}
        for weight, adapter in adapters.items():
            shape = (adapter.up_OR.shape[0], adapter.down_RI.shape[1])
            names = name_adapter(weight, shape, stored.get(weight))
            self._parameters[names.down] = adapter.down_RI, 1.0
            self._parameters[names.up] = adapter.up_OR, adapter.scale

    def weight_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of whole tensors."""
        return {name: tuple(parameter.shape) for name, (parameter, _) in self._parameters.items()}

    def tensors(self) -> dict[str, Tensor]:
        """Return the whole tensors on every rank; if they are sharded, all ranks must call this together."""
        return {name: gather_whole(parameter.detach()) * scale for name, (parameter, scale) in self._parameters.items()}

    def weight_shards(self) -> LocalShards:
        """Return this rank's shards."""
        return list(self._list_shards())

    def _list_shards(self) -> Iterator[tuple[TensorShard, ShardValues]]:
        for name, (parameter, scale) in self._parameters.items():
            if not isinstance(parameter, DTensor) and self._world.rank:
                continue
            for each in list_local_shards(name, parameter.detach(), part=WEIGHT_PART):
                yield each.shard, ScaledValues(each.tensor, scale)
