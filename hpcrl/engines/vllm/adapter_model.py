"""Versions that are adapters (LoRA), as vLLM holds them.

AdapterOutline     what the adapters of a model look like, whatever their rank is
make_lora_model    the adapters of a version, checked and copied
ADAPTER_ID         their number in vLLM

Legend: I inputs of a layer, O its outputs, R rank of the adapters
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import torch
from vllm.lora.lora_model import LoRAModel
from vllm.lora.peft_helper import PEFTHelper

from hpcrl.errors import WeightsError
from hpcrl.models.adapted_layers import AdapterNames, list_adapted_layers, name_adapter
from hpcrl.weights.model_update import check_fit
from hpcrl.weights.stored_tensors import StoredTensors
from hpcrl.weights.stores.store import Tensors

ADAPTER_ID = 1
PEFT_PREFIX = "base_model.model."
MERGED_INSTEAD = 'set train.publish_lora = "merged"'


@dataclass(frozen=True)
class AdapterOutline:
    """The names of a model's adapters, and the shapes of the weights that they change."""

    shapes_OI: Mapping[AdapterNames, tuple[int, int]]

    @classmethod
    def from_model(cls, module: Any, stored: StoredTensors) -> Self:
        """List those of a causal LM of transformers, which need no memory."""
        return cls(
            {
                name_adapter(weight, layer.weight.shape, stored.get(weight)): (layer.out_features, layer.in_features)
                for weight, layer in list_adapted_layers(module).items()
            }
        )

    def check(self, tensors: Tensors, *, max_rank: int) -> int:
        """Raise WeightsError, naming the tensor, unless these are all adapters, of one rank; return the rank."""
        rank = next((int(tensors[names.down].shape[0]) for names in self.shapes_OI if names.down in tensors), 0)
        if rank > max_rank:
            raise WeightsError(f"the adapters have rank {rank}, and the engine was started for {max_rank} at most")
        expected: dict[str, torch.Tensor] = {}
        for names, (num_outputs, num_inputs) in self.shapes_OI.items():
            expected[names.down] = make_outline((rank, num_inputs))
            expected[names.up] = make_outline((num_outputs, rank))
        check_fit({name: make_outline(tensor.shape) for name, tensor in tensors.items()}, expected)
        return rank


def make_outline(shape: tuple[int, ...]) -> torch.Tensor:
    """Return a tensor with this shape and no memory, of one type: vLLM converts to the type it computes in."""
    return torch.empty(shape, dtype=torch.float32, device="meta")


def make_lora_model(tensors: Tensors, outline: AdapterOutline, *, model: Any, lora_config: Any) -> LoRAModel:
    """Check the adapters of a version and copy them into the form in which vLLM's model takes them."""
    rank = outline.check(tensors, max_rank=lora_config.max_lora_rank)
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    lora = LoRAModel.from_lora_tensors(
        ADAPTER_ID,
        {PEFT_PREFIX + name: tensor.to(lora_config.lora_dtype, copy=True) for name, tensor in tensors.items()},
        PEFTHelper(r=rank, lora_alpha=rank, target_modules=[]),  # the matrices are scaled already
        device="cpu",
        dtype=lora_config.lora_dtype,
        weights_mapper=None if mapper is None else mapper.get_rename_mapper(),
    )
    _check_places(lora, model.lora_manager)
    return lora


def _check_places(lora: LoRAModel, manager: Any) -> None:
    """Check that vLLM has layers of all these names, since it would ignore the adapters of others."""
    places = {part for name in manager.modules for part in manager.packed_modules.get(name, [name])}
    kinds = {name.rsplit(".", 1)[-1] for name in places}
    if missing := sorted({name.rsplit(".", 1)[-1] for name in lora.loras} - kinds):
        raise WeightsError(
            f"vLLM takes no adapters on {', '.join(missing)} of {type(manager.model).__name__}: {MERGED_INSTEAD}"
        )
