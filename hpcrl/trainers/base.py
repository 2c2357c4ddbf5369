"""What a trainer is: trajectories in, one step of learning and its figures out; weights by their HF names."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import msgspec
import torch

from hpcrl.errors import TrainError
from hpcrl.spool.record import Trajectory
from hpcrl.trainers.state import Piece, state_file, write


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
    kl_reference: float | None = None
    """Estimate of KL(current || the model that training began with); 0 where the recipe keeps no reference."""
    is_ratio_p05: float | None = None
    is_ratio_p50: float | None = None
    is_ratio_p95: float | None = None
    value_loss: float | None = None
    """Of the critic, if there is one."""
    learning_rate: float | None = None
    length_mean: float = 0.0
    """Tokens of a trajectory, said and seen."""
    length_max: int = 0
    lags: dict[str, int] = {}
    """How many trajectories were so many versions behind."""
    imbalance: float = 1.0
    """Tokens of the busiest rank over the mean."""
    tokens_per_s: float = 0.0
    """Model tokens."""
    times: dict[str, float] = {}
    """Seconds of the step: dealing, making rows, learning."""


class Writable(Protocol):
    """State that can be written later, by a thread, while its trainer goes on."""

    def write(self, directory: Path) -> None:
        """Into a directory that all ranks write to; they use names of their own."""


@dataclass(frozen=True)
class Snapshot:
    """One rank's part of a trainer's state, in memory."""

    rank: int
    pieces: list[Piece]

    def write(self, directory: Path) -> None:
        write(self.pieces, directory / state_file(self.rank))


class Trainer(Protocol):
    """Whoever owns the weights. With several ranks, each has one, and they make every call together."""

    def train_step(self, trajectories: Sequence[Trajectory], *, step: int, version: int) -> StepMetrics:
        """Learn from whole groups. A loss or gradient that is not finite leaves the weights as they were."""

    def tensors(self) -> dict[str, torch.Tensor]:
        """The weights by the names in the model directory; perhaps no copies, so they change with the next step."""

    def snapshot(self) -> Writable:
        """All that the next step depends on, apart from what the next step changes."""

    def load(self, directory: Path) -> None:
        """Go on exactly as if `snapshot` had been the last call, whatever parallelism wrote the directory."""


def check_trainable(trajectories: Sequence[Trajectory], *, vocabulary_size: int) -> None:
    """TrainError for a trajectory that no step of this model can use."""
    for trajectory in trajectories:
        if trajectory.reward is None:
            raise TrainError(f"trajectory {trajectory.id!r} has no reward: train on the spool `scored`, not `rollouts`")
        ids = trajectory.token_ids
        if len(ids) and not 0 <= ids.min() <= ids.max() < vocabulary_size:
            raise TrainError(
                f"trajectory {trajectory.id!r} has token ids from {ids.min()} to {ids.max()}, the model knows "
                f"0 to {vocabulary_size - 1}: engine and trainer must use the same model directory"
            )
