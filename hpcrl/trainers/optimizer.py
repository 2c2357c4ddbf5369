"""The optimizer of every trainer: AdamW, as the recipe sets it, or the user's update of each weight.

make_optimizer   an optimizer over parameters; AdamW decays matrices only
UserOptimizer    an optimizer that calls the user's function
WeightUpdate     this function
MOMENT_PARTS     the names of the state that has the shape of a weight
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from hpcrl.config.recipe import TrainConfig
from hpcrl.errors import TrainError

MOMENT_PARTS = ("exp_avg", "exp_avg_sq")
WeightUpdate = Callable[[Tensor, Tensor, dict[str, Tensor], float], Any]
"""A function of a weight, its gradient, its state and the learning rate; it changes weight and state in place."""


class UserOptimizer(torch.optim.Optimizer):
    """An optimizer whose function the user wrote; its state has the form of AdamW's, and so have its checkpoints."""

    def __init__(self, parameters: Iterable[Tensor], *, learning_rate: float, update: WeightUpdate) -> None:
        super().__init__(parameters, {"lr": learning_rate})
        self._update = update

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Change every weight that has a gradient."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._change_weight(parameter, parameter.grad, rate=group["lr"])

    def _change_weight(self, parameter: Tensor, gradient: Tensor, *, rate: float) -> None:
        state = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), device=parameter.device)
            state.update({part: torch.zeros_like(parameter) for part in MOMENT_PARTS})
        state["step"] += 1
        before = dict(state)
        result = self._update(parameter, gradient, state, rate)
        if result is not None or any(state.get(name) is not tensor for name, tensor in before.items()):
            raise TrainError(
                "train.pipeline.update must change weight and state in place and return nothing, as "
                f"weight.sub_(rate * gradient) does; it returned {type(result).__name__}"
            )
        if len(state) > len(before):
            raise TrainError(
                f"train.pipeline.update added {', '.join(sorted(state.keys() - before.keys()))} to the state: only "
                f"{', '.join(before)} are part of a checkpoint"
            )


def make_optimizer(
    parameters: Iterable[Tensor],
    *,
    train: TrainConfig,
    learning_rate: float,
    update: WeightUpdate | None = None,
) -> torch.optim.Optimizer:
    """Make an optimizer; `weight_decay` pulls at matrices, not at norms and biases, which have one dimension.

    A fused one copies nothing: on GPUs, torch would otherwise copy all second moments in each step.
    """
    given = list(parameters)
    if update is not None:
        return UserOptimizer(given, learning_rate=learning_rate, update=update)
    groups: list[dict[str, Any]] = [
        {"params": [parameter for parameter in given if parameter.ndim > 1], "weight_decay": train.weight_decay},
        {"params": [parameter for parameter in given if parameter.ndim <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=learning_rate,
        betas=train.adam_betas,
        eps=train.adam_eps,
        fused=True,
    )
