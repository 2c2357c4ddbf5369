"""The interfaces of a trainer: trajectories in, one training step and its metrics out; weights by their HF names.

    Trainer            the calls of the train role, whether one rank trains or many
    RankTrainer        the further calls of one rank: what the nodes of a step need (`nodes.py`), its weight shards
    TrainedCritic      the critic's
    Minibatch, TokenColumns   what the nodes pass on
    StepMetrics        the metrics of a step
    WritableState      state that a thread can write
    RankSnapshot       one rank's state in memory
    StepAbandonedError  the time is too short for the rest of a step
    check_trainable    refuse trajectories that no step can use
    load_fixed_models  the models of nodes that never train, by node

All ranks of a trainer make every call together.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

import msgspec
import numpy as np
import torch
from torch import Tensor

from hpcrl.config.pipeline import list_fixed_nodes
from hpcrl.config.recipe import TrainConfig
from hpcrl.errors import TrainError, show_error
from hpcrl.learn.batch import MicroBatch
from hpcrl.learn.loss import LossSums, PolicyLoss
from hpcrl.models.model_config import read_model_config
from hpcrl.spool.record import Trajectory
from hpcrl.system.processes import return_false
from hpcrl.trainers.micro_batch_loss import MinibatchTotals, PriorLogprobs
from hpcrl.trainers.spread_model import SpreadModel, load_spread_models
from hpcrl.trainers.state import WEIGHT_PART, StateShard, moments_file_name, state_file_name, write_state
from hpcrl.trainers.world import World
from hpcrl.weights.stores.sharded_store import LocalShards

T = TypeVar("T")


class StepAbandonedError(TrainError):
    """A step was abandoned before it changed a weight: the job ends before it would be made and saved."""


class StepMetrics(msgspec.Struct, frozen=True, kw_only=True):
    """A training step, as it is written to the events: every value is plain JSON, None where there is none."""

    step: int
    version: int
    """The weights that the step started from; the lag counts from here."""
    skipped: str | None
    """The reason why no update was made and the weights stayed as they were; None if all went well."""
    num_trajectories: int
    num_groups: int
    num_flat_groups: int
    """The groups whose episodes all have the same reward: they give no gradient."""
    num_too_long: int
    """The rows longer than the model's context or `train.max_row_tokens`: they are not trained on, while the reward of
    their episode counts."""
    num_tokens: int
    """The tokens that the model generated: the ones trained on."""
    num_padded_tokens: int
    """The tokens that passed through the model, padding included."""
    reward_mean: float | None
    reward_std: float | None
    lag_mean: float
    lag_max: int
    loss: float | None
    grad_norm: float | None
    """The norm before clipping; the mean where a step has several minibatches."""
    clip_fraction: float | None
    is_ratio_mean: float | None
    """The importance ratio of the policy at the start of the step to the one that acted, before truncation."""
    is_truncated_fraction: float | None
    kl: float | None
    """The estimate of KL(behaviour || current), which grows with the lag."""
    entropy: float | None
    step_s: float
    kl_fresh: float | None = None
    """The same of tokens without lag, before the step changes a weight: how much engines and trainer differ. None where
    no token of the first minibatch is without lag."""
    kl_reference: float | None = None
    """The estimate of KL(current || the model that training started from); 0 where the recipe keeps no reference."""
    is_ratio_p05: float | None = None
    is_ratio_p50: float | None = None
    is_ratio_p95: float | None = None
    value_loss: float | None = None
    """The critic's loss, if there is a critic."""
    learning_rate: float | None = None
    length_mean: float = 0.0
    """The tokens of a trajectory, generated and observed."""
    length_max: int = 0
    lags: dict[str, int] = {}
    """The number of trajectories by how many versions they were behind."""
    imbalance: float = 1.0
    """The tokens of the busiest rank over the mean."""
    tokens_per_s: float = 0.0
    """The model tokens per second."""
    times: dict[str, float] = {}
    """The seconds of the step's stages: deal, rows, learn."""
    num_rows: int = 0
    """The training rows: a trajectory has one for each conversation."""
    too_long_tokens: dict[str, int] = {}
    """The generated tokens in these rows, by domain."""
    replayed_fraction: float | None = None
    """The share of the tokens trained on that were predicted with the experts that the engine chose; None without
    `train.router_replay`."""


class WritableState(Protocol):
    """The state that a thread can write later, while its trainer continues."""

    def write(self, directory: Path) -> None:
        """Write into a directory that all ranks share; each rank uses its own file names."""


@dataclass(frozen=True)
class RankSnapshot:
    """The part of one rank in a trainer's state, in memory."""

    rank: int
    state_shards: list[StateShard]

    def write(self, directory: Path) -> None:
        weights = [each for each in self.state_shards if each.part == WEIGHT_PART]
        moments = [each for each in self.state_shards if each.part != WEIGHT_PART]
        write_state(weights, directory / state_file_name(self.rank))
        write_state(moments, directory / moments_file_name(self.rank))


class Trainer(Protocol):
    """The owner of the weights, as the train role sees it: one rank, or rank 0 for all of them (`RankLeader`)."""

    def train_step(
        self,
        trajectories: Sequence[Trajectory],
        *,
        step: int,
        version: int,
        train: TrainConfig | None = None,
        must_abandon: Callable[[], bool] = return_false,
    ) -> StepMetrics:
        """Train on whole groups. A loss or gradient that is not finite leaves the weights as they were.

        `train` has the settings of this step, where they differ from those of the recipe (a warm-up's). `must_abandon`
        is asked, before the step's first update, whether the time is too short for its rest.
        """

    def tensors(self) -> Mapping[str, torch.Tensor]:
        """Return what is published, the weights or adapters alone; the values may change with the next step."""

    def restart_optimizer(self) -> None:
        """Forget the optimizer's moments, as before the first step; the weights stay."""

    def snapshot(self) -> WritableState:
        """Return all that the next step depends on, copied so that the next step does not change it."""

    def load(self, directory: Path) -> None:
        """Continue exactly as if `snapshot` had been the last call, whatever parallelism wrote the directory."""

    def sleep(self) -> None:
        """Move all state to host memory and leave that of the GPUs, until `wake`; only `snapshot` may come between."""

    def wake(self) -> None:
        """Move the state back to the GPUs."""


def nothing_to_check() -> None:
    """Let a step continue."""


Minibatch = list[MicroBatch]
"""The micro-batches of one optimizer step, on this rank's device."""
TokenColumns = list[Tensor | None]
"""A number for each model token of a minibatch, by micro-batch; None where this rank has none or needs none."""


class TrainedCritic(Protocol):
    """A model of values, in training."""

    def add_advantages(self, minibatches: list[Minibatch]) -> list[Minibatch]:
        """Replace the rewards of the minibatches by advantages."""

    def learn(self, number: int, *, num_tokens: float, rate: float) -> float:
        """Make an optimizer step on minibatch `number` of those evaluated; return the loss over all ranks."""


class RankTrainer(Trainer, Protocol):
    """A rank of a trainer; results over all ranks are the same on each."""

    world: World

    @property
    def num_shares(self) -> int:
        """The number of shares that a step is divided into."""

    @property
    def share(self) -> int:
        """The index of this rank's share."""

    @property
    def has_logprobs(self) -> bool:
        """True if this rank is given the log-probs of its tokens; else it has no part in the loss."""

    @property
    def max_length(self) -> int:
        """The positions that the model can read."""

    @property
    def vocabulary_size(self) -> int: ...

    has_scored_reference: bool
    """True if the log-probs of the reference come with the trajectories, from a teacher's engine."""

    fitting_tokens: int
    """The tokens of the largest micro-batch of any rank so far, padding included: there was memory for it."""

    def use_settings(self, train: TrainConfig) -> None:
        """Use the settings of the step that starts; a warm-up has others than reinforcement learning."""

    spread_models: dict[str, SpreadModel]
    """The models of nodes whose data-parallel degree is not the trainer's."""

    @property
    def critic(self) -> TrainedCritic | None:
        """The critic, where the recipe needs one."""

    def place_batches(self, minibatches: list[Minibatch]) -> list[Minibatch]:
        """Give every rank the same number of micro-batches, on its device."""

    def compute_logprobs(self, minibatches: list[Minibatch], *, model: str | None) -> list[TokenColumns]:
        """Compute the log-probs of all tokens under the policy, or under the model of the node with this name."""

    def accumulate_gradient(
        self,
        minibatch: Minibatch,
        priors: list[PriorLogprobs],
        *,
        totals: MinibatchTotals,
        policy_loss: PolicyLoss,
        check: Callable[[], None] = nothing_to_check,
    ) -> LossSums:
        """Add the gradient of a minibatch, over all ranks; `check` may end the step before any micro-batch.

        All ranks make that call for the same micro-batches.
        """

    def clip_gradient(self) -> float:
        """Clip the gradient and return its norm before clipping, over all ranks."""

    def apply_gradient(self, *, rate: float) -> None:
        """Make an optimizer step at this learning rate, then clear the gradient."""

    def discard_gradient(self) -> None:
        """Clear the gradient and leave the weights as they are."""

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of every tensor that is published, whichever rank holds it; the same on all ranks."""

    @property
    def num_params(self) -> int:
        """The number of the model's parameters."""

    def precise_names(self) -> Collection[str]:
        """Return the tensors that are published in float32 where others are rounded: engines keep them so."""

    def shards(self) -> LocalShards:
        """Return this rank's shards of what is published; over all ranks, each value comes once."""


def check_trainable(
    trajectories: Sequence[Trajectory], *, vocabulary_size: int, has_scored_reference: bool = False
) -> None:
    """Raise TrainError for a trajectory that no step of this model can use."""
    for trajectory in trajectories:
        if has_scored_reference:
            _check_taught(trajectory)
        if trajectory.reward is None:
            raise TrainError(f"trajectory {trajectory.id!r} has no reward: train on the spool `scored`, not `rollouts`")
        ids = trajectory.token_ids
        if len(ids) and not 0 <= ids.min() <= ids.max() < vocabulary_size:
            raise TrainError(
                f"trajectory {trajectory.id!r} has token ids from {ids.min()} to {ids.max()}, the model has "
                f"0 to {vocabulary_size - 1}: engine and trainer must use the same model directory"
            )


def _check_taught(trajectory: Trajectory) -> None:
    """Raise TrainError unless a teacher's engine has scored all trained tokens."""
    column = trajectory.teacher_logprobs
    if column is None or not np.isfinite(column[trajectory.loss_mask]).all():
        raise TrainError(
            f"trajectory {trajectory.id!r} has no log-probs of teacher.judge for some trained tokens: it was scored "
            "without the teacher, so remove its segment from the spools, or its campaign's spools"
        )


def load_fixed_models(
    trainer: RankTrainer,
    train: TrainConfig,
    model_dir: Path,
    *,
    teacher: Path | None,
    temperature: float,
    load: Callable[[Path], T],
) -> tuple[dict[str, SpreadModel], dict[str, T]]:
    """Load the models of nodes that never train: those of another data-parallel degree, and by `load` all others."""
    paths = _find_fixed_models(
        train,
        model_dir,
        teacher=teacher,
        vocabulary_size=trainer.vocabulary_size,
        has_scored_reference=trainer.has_scored_reference,
    )
    spread_models = load_spread_models(
        train,
        paths,
        num_shares=trainer.num_shares,
        share=trainer.share,
        world=trainer.world,
        temperature=temperature,
    )
    return spread_models, {name: load(path) for name, path in paths.items() if name not in spread_models}


def _find_fixed_models(
    train: TrainConfig, model_dir: Path, *, teacher: Path | None, vocabulary_size: int, has_scored_reference: bool
) -> dict[str, Path]:
    """Return the model directory of each node with a model that does not train.

    That of `reference` is the teacher's, or the policy's first one, where it names none; it has none if an engine
    scored the tokens.
    """
    found: dict[str, Path] = {}
    for name, node in list_fixed_nodes(train).items():
        if name == "reference" and has_scored_reference:
            continue
        if node.model is not None:
            found[name] = _check_vocabulary(f"train.pipeline.{name}.model", Path(node.model), vocabulary_size)
        elif teacher is not None:
            found[name] = _check_vocabulary("teacher.path", teacher, vocabulary_size)
        else:
            found[name] = model_dir
    return found


def _check_vocabulary(setting: str, path: Path, size: int) -> Path:
    """Refuse what does not look like a model directory, or a model with another number of tokens than the policy."""
    try:
        seen = read_model_config(path / "config.json").fields["vocab_size"]
    except (OSError, ValueError, KeyError) as error:
        raise TrainError(
            f"{setting} = {str(path)!r} is not a model directory: its config.json gives no vocab_size "
            f"({show_error(error)})"
        ) from error
    if seen != size:
        raise TrainError(
            f"{setting} = {str(path)!r} has a vocabulary of {seen} tokens, the policy one of {size}: choose a model "
            "with the same tokenizer"
        )
    return path
