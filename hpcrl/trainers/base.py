"""What a trainer is: trajectories in, one step of learning and its figures out; weights by their HF names."""

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import msgspec
import torch

from hpcrl.spool.record import Trajectory


class StepMetrics(msgspec.Struct, frozen=True, kw_only=True):
    """One training step, as it goes to the events: every value is plain JSON, and None where there is none."""

    step: int
    version: int
    """The weights that the step began with; the lag counts from here."""
    skipped: str | None
    """Why an update was not made, the weights staying as they were; None if all went well."""
    num_trajectories: int
    num_groups: int
    num_flat_groups: int
    """Groups whose episodes all had the same reward: they teach nothing."""
    num_too_long: int
    """Trajectories longer than the model's context; they count in their group's baseline and are not trained on."""
    num_tokens: int
    """Tokens the model said: the ones that train."""
    num_padded_tokens: int
    """Tokens that went through the model, padding included."""
    reward_mean: float | None
    reward_std: float | None
    lag_mean: float
    lag_max: int
    loss: float | None
    grad_norm: float | None
    """Before clipping; the mean where a step has several minibatches."""
    clip_fraction: float | None
    is_ratio_mean: float | None
    """Importance ratio between the policy at the start of the step and the one that acted, before truncation."""
    is_truncated_fraction: float | None
    kl: float | None
    """Estimate of KL(behaviour || current)."""
    entropy: float | None
    step_s: float


class Trainer(Protocol):
    """Whoever owns the weights."""

    def train_step(self, trajectories: Sequence[Trajectory], *, step: int, version: int) -> StepMetrics:
        """Learn from whole groups. A loss or gradient that is not finite leaves the weights as they were."""

    def tensors(self) -> dict[str, torch.Tensor]:
        """The weights by the names in the model directory; no copies, so they change with the next step."""

    def save(self, directory: Path) -> None:
        """Write all that the next step depends on into an empty directory."""

    def load(self, directory: Path) -> None:
        """Go on exactly as if `save` had been the last call."""
