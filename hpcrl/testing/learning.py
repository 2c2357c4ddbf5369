"""The input of a training step, models, and checkpoints, in one call each.

make_rows        trajectories -> shifted rows, one for each conversation, cut after the last model token
load_causal      load a language model, whole
save_checkpoint  save the state of a trainer as it is now
load_checkpoint  restore it
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hpcrl.campaign_dir.checkpoints import CheckpointManifest
from hpcrl.learn.batch import CreditPlacer, TrainingRow, divide_credits, make_chosen_rows, spread_credit
from hpcrl.learn.consumed import ConsumedTrajectories
from hpcrl.spool.record import Trajectory
from hpcrl.trainers.base import Trainer
from hpcrl.trainers.checkpoint import PendingCheckpoint, commit_checkpoint, read_checkpoint
from hpcrl.trainers.model_files import open_causal


def make_rows(
    trajectories: Sequence[Trajectory],
    *,
    credits: Sequence[Sequence[float]],
    max_length: int,
    place_credit: CreditPlacer | None = None,
) -> tuple[list[TrainingRow], int]:
    """Make the rows that fit into the context of `max_length`; also return how many do not.

    `credits` has one value per turn of each trajectory (one if it has no turns), and `place_credit` selects the
    tokens of the turn that get it, by default all. Tokens after the last model token are cut; a conversation without
    model tokens has no row.
    """
    rows: list[TrainingRow] = []
    for trajectory, credit in zip(trajectories, credits, strict=True):
        divided = divide_credits(trajectory, np.asarray(credit, dtype=np.float32))
        chosen = list(enumerate(divided))
        rows += make_chosen_rows(trajectory, chosen, place_credit=place_credit or spread_credit)
    fitting = [row for row in rows if len(row) <= max_length]
    return [row for row in fitting if len(row)], len(rows) - len(fitting)


def load_causal(model_dir: Path) -> Any:
    """Load the language model in a directory, whole and in float32, on the CPU."""
    source = open_causal(model_dir)
    source.fill(source.module, torch.device("cpu"))
    return source.module


def save_checkpoint(
    directory: Path,
    *,
    step: int,
    version: int,
    trainer: Trainer,
    consumed: ConsumedTrajectories,
    extra: dict[str, Any] | None = None,
) -> Path:
    """Commit a checkpoint: durable when this returns; if it raises, the older ones are untouched."""
    pending = PendingCheckpoint(
        step=step, version=version, state=trainer.snapshot(), consumed=consumed.encode(), extra=extra or {}
    )
    return commit_checkpoint(directory, pending)


def load_checkpoint(path: Path, *, trainer: Trainer) -> tuple[CheckpointManifest, ConsumedTrajectories]:
    """Restore `trainer` to the state of the checkpoint; `find_newest` has checked the files."""
    trainer.load(path)
    return read_checkpoint(path)
