"""Adapters in place of weights (LoRA, arXiv 2106.09685), by peft: the only place that knows of it.

    with_adapters    freeze a model and give each of its linear layers an adapter that at first adds nothing
    merged           what the model has become, by the names of its directory

Engines never hear of adapters: what is published and exported is merged.
"""

from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import Tensor

from hpcrl.errors import TrainError

PREFIX = "lora."
"""Before the names of adapters in checkpoints."""
_ADAPTER = "default"


def with_adapters(module: Any, *, rank: int, alpha: float) -> Any:
    """The same on every rank and every time; the output layer and the embeddings stay as they are."""
    try:
        from peft import LoraConfig, get_peft_model  # an extra
    except ModuleNotFoundError as error:
        raise TrainError(
            f'train.lora_rank = {rank} needs the package peft ({error}): pip install "hpcrl[lora]", or set it to 0'
        ) from error
    config = LoraConfig(r=rank, lora_alpha=cast(int, alpha), target_modules="all-linear", lora_dropout=0.0)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return get_peft_model(module, config)


def is_adapted(module: Any) -> bool:
    return hasattr(module, "peft_config")


def merged(module: Any) -> Iterator[tuple[str, Tensor]]:
    """Every weight of the model by its own name, with what its adapter adds."""
    layers = dict(module.get_base_model().named_modules())
    for name, parameter in module.get_base_model().named_parameters():
        outer, _, last = name.rpartition(".base_layer.")
        if outer:
            delta = layers[outer].get_delta_weight(_ADAPTER) if last == "weight" else 0.0
            yield f"{outer}.{last}", parameter.detach() + delta
        elif ".lora_" not in name:
            yield name, parameter.detach()
