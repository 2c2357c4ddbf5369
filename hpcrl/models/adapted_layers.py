"""The layers of a model that adapters (LoRA) are for, and the names of adapters in versions of the weights.

list_adapted_layers  the linear layers that have adapters, by the names of their weights
name_adapter         the names of an adapter's matrices
AdapterNames         these names

They are the names of PEFT, an adapter beside the weight that it changes, which has its name in the model directory.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from hpcrl.errors import WeightsError
from hpcrl.weights.stored_tensors import StoredTensor

WEIGHT_SUFFIX = ".weight"


class AdapterNames(NamedTuple):
    """The names of the matrices of an adapter."""

    down: str
    """The matrix of rank x inputs."""
    up: str
    """The matrix of outputs x rank, scaled: up x down is what the adapter adds to the weight."""


def list_adapted_layers(module: Any) -> dict[str, torch.nn.Linear]:
    """List the linear layers of a causal LM but its output layer; experts in one tensor are none."""
    outputs = module.get_output_embeddings()
    return {
        name + WEIGHT_SUFFIX: layer
        for name, layer in module.named_modules()
        if isinstance(layer, torch.nn.Linear) and layer is not outputs
    }


def name_adapter(weight: str, shape: Sequence[int], stored: Sequence[StoredTensor] | None) -> AdapterNames:
    """Name the adapter of a weight with this name and shape in the module; `stored` is what it is in files."""
    if stored is not None:
        if len(stored) != 1 or stored[0].shape != tuple(shape):
            raise WeightsError(
                f"{weight} is not one tensor in the files of the model, so its adapter has no name there: set "
                'train.publish_lora = "merged"'
            )
        weight = stored[0].name
    layer = weight.removesuffix(WEIGHT_SUFFIX)
    return AdapterNames(down=f"{layer}.lora_A.weight", up=f"{layer}.lora_B.weight")
