"""A deep model that was trained, saved and exported, for the servers that load the export.

ExportedModel       its trainer and its directories
train_and_export   makes one
train_once         makes one more step
compute_logprobs   the log-probabilities of a trainer for an answer
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from hpcrl.campaign_dir.paths import CampaignDir
from hpcrl.config.recipe import TinyModel, TrainConfig
from hpcrl.learn.batch import make_packed_batches
from hpcrl.learn.consumed import ConsumedTrajectories
from hpcrl.models.tiny import make_tiny_model
from hpcrl.spool.record import Trajectory
from hpcrl.testing.learning import make_rows, save_checkpoint
from hpcrl.trainers.export import export_model
from hpcrl.trainers.token_model import compute_token_logprobs
from hpcrl.trainers.torch import TorchTrainer
from tests.support.trajectories import make_trajectory


@dataclass(frozen=True)
class ExportedModel:
    """A trainer far from its initial weights."""

    trainer: TorchTrainer
    initial: Path
    """The model before training."""
    exported: Path


def make_deep_model(directory: Path) -> None:
    make_tiny_model(directory, TinyModel(num_layers=24, context_length=4096), seed=0)


def train_and_export(directory: Path, *, make_model: Callable[[Path], None] = make_deep_model) -> ExportedModel:
    """Train a model for two steps, save a checkpoint and export it."""
    torch.set_num_threads(1)
    campaign = CampaignDir(directory / "trained")
    campaign.root.mkdir(parents=True)
    make_model(campaign.model)
    trainer = TorchTrainer(campaign.model, TrainConfig(num_steps=2, groups_per_step=1, learning_rate=1e-2), seed=0)
    for step in (1, 2):
        train_once(trainer, step=step)
    save_checkpoint(campaign.checkpoints, step=2, version=2, trainer=trainer, consumed=ConsumedTrajectories())
    export_model(campaign, directory / "exported")
    return ExportedModel(trainer=trainer, initial=campaign.model, exported=directory / "exported")


def train_once(trainer: TorchTrainer, *, step: int) -> None:
    rng = np.random.default_rng(step)
    episodes = [make_trained_episode(rng.integers(0, 90, 40).tolist(), index=index) for index in range(4)]
    assert trainer.train_step(episodes, step=step, version=step).skipped is None


def make_trained_episode(token_ids: list[int], *, index: int = 0, start: int = 6) -> Trajectory:
    """Return an episode in which the model generated all tokens from `start`."""
    generated = np.arange(len(token_ids)) >= start
    return make_trajectory(
        f"t/0/{index}",
        turns=[],
        reward=float(index % 2),
        token_ids=token_ids,
        logprobs=np.where(generated, -4.6, 0.0),
        loss_mask=generated,
    )


def compute_logprobs(trainer: TorchTrainer, prompt: list[int], answer: list[int]) -> list[float]:
    trajectory = make_trained_episode([*prompt, *answer], start=len(prompt))
    rows, _ = make_rows([trajectory], credits=[[0.0]], max_length=trainer.max_length)
    with torch.no_grad():
        packed = make_packed_batches(rows, tokens_per_micro_batch=512)[0]
        logprobs_N = compute_token_logprobs(trainer._policy, packed, temperature=1.0)[0]
    return list(logprobs_N.tolist())
