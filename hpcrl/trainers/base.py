"""The interfaces of a trainer: trajectories in, one step of learning and its metrics out; weights by their HF names.

    Trainer        what the train role calls, whether one rank trains or many
    RankTrainer    what one rank does besides: the parts of a step that `step.learn` calls, and its part of the weights

All ranks of a trainer make every call together.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

import msgspec
import torch

from hpcrl.errors import TrainError
from hpcrl.learn.batch import MicroBatch
from hpcrl.learn.loss import LossSums
from hpcrl.spool.record import Trajectory
from hpcrl.trainers.micro_batch_loss import MinibatchTotals, PriorLogprobs
from hpcrl.trainers.state import StateShard, state_file_name, write_state
from hpcrl.trainers.world import World


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


class WritableState(Protocol):
    """State that can be written later, by a thread, while its trainer goes on."""

    def write(self, directory: Path) -> None:
        """Into a directory that all ranks write to; they use names of their own."""


@dataclass(frozen=True)
class RankSnapshot:
    """One rank's part of a trainer's state, in memory."""

    rank: int
    state_shards: list[StateShard]

    def write(self, directory: Path) -> None:
        write_state(self.state_shards, directory / state_file_name(self.rank))


class Trainer(Protocol):
    """The owner of the weights, as the train role sees it: one rank, or rank 0 on behalf of all (`RankLeader`)."""

    def train_step(self, trajectories: Sequence[Trajectory], *, step: int, version: int) -> StepMetrics:
        """Learn from whole groups. A loss or gradient that is not finite leaves the weights as they were."""

    def tensors(self) -> dict[str, torch.Tensor]:
        """The weights by the names in the model directory; perhaps no copies, so they change with the next step."""

    def snapshot(self) -> WritableState:
        """All that the next step depends on, apart from what the next step changes."""

    def load(self, directory: Path) -> None:
        """Go on exactly as if `snapshot` had been the last call, whatever parallelism wrote the directory."""


class PreparedMinibatch(NamedTuple):
    """The micro-batches of one optimizer step, on this rank's device, and what had to be computed before the first."""

    micro_batches: list[MicroBatch]
    prior: list[PriorLogprobs]
    """Of each micro-batch."""


class RankTrainer(Trainer, Protocol):
    """One rank of a trainer; what it returns of all ranks is the same on each."""

    world: World

    @property
    def num_shares(self) -> int:
        """Into how many shares a step is dealt."""

    @property
    def share(self) -> int:
        """Which of them is this rank's."""

    @property
    def max_length(self) -> int:
        """Positions that the model can read."""

    @property
    def vocabulary_size(self) -> int: ...

    def prepare_minibatches(self, minibatches: list[list[MicroBatch]]) -> list[PreparedMinibatch]:
        """Give every rank the same number of micro-batches, and compute what must be known before weights change."""

    def accumulate_gradient(self, minibatch: PreparedMinibatch, totals: MinibatchTotals) -> LossSums:
        """Add the gradient of a minibatch, of all ranks."""

    def clip_gradient(self) -> float:
        """Clip the gradient; returns its norm before, over all ranks."""

    def apply_gradient(self, *, rate: float) -> None:
        """Make an optimizer step at this learning rate; the gradient is gone afterwards."""

    def discard_gradient(self) -> None:
        """Leave the weights as they are."""

    def train_critic(self, number: int, *, totals: MinibatchTotals, step: int) -> float | None:
        """Make the critic's optimizer step of minibatch `number`; returns its loss, None if there is no critic."""

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Every tensor of the model, whichever rank holds it; the same on all ranks."""

    def shards(self) -> Iterator[StateShard]:
        """The boxes of the weights that this rank gives, each value once over all ranks."""


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
