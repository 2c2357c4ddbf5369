"""The optimizer of every trainer: AdamW, as the recipe sets it.

make_optimizer   an optimizer over parameters, which decays matrices only
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from hpcrl.config.recipe import TrainConfig


def make_optimizer(
    parameters: Iterable[Tensor], *, train: TrainConfig, learning_rate: float, fused: bool = False
) -> torch.optim.AdamW:
    """Make an optimizer; `weight_decay` pulls at matrices, not at norms and biases, which have one dimension."""
    given = list(parameters)
    groups: list[dict[str, Any]] = [
        {"params": [parameter for parameter in given if parameter.ndim > 1], "weight_decay": train.weight_decay},
        {"params": [parameter for parameter in given if parameter.ndim <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=learning_rate,
        betas=train.adam_betas,
        eps=train.adam_eps,
        fused=fused or None,
    )
