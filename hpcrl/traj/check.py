"""What can be wrong with a segment, a trajectory, or a file in a spool. Each check answers in words, or with None."""

import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from hpcrl.errors import SpoolError
from hpcrl.spool import quarantine
from hpcrl.spool.names import parse
from hpcrl.spool.record import TRAINABLE, Trajectory
from hpcrl.spool.segment import Segment, read_segment

LEFTOVER_AGE_S = 3600.0


def read_checked(path: Path) -> Segment:
    """Read a segment with all its checksums and hold it against its name."""
    segment = read_segment(path, verify=True)
    name = parse(path.name)
    if name is None:
        raise SpoolError("a segment, but its name is not one's, so readers pass it over: give it back its name")
    if name.count != len(segment):
        raise SpoolError(f"holds {len(segment)} trajectories, and its name says {name.count}")
    return segment


def flaw(trajectory: Trajectory, *, is_scored: bool) -> str | None:
    """What in a trajectory cannot be, though its bytes are as they were written."""
    if trajectory.group != trajectory.id.rpartition("/")[0]:
        return f"its group {trajectory.group!r} does not begin its id"
    place = 0
    for index, turn in enumerate(trajectory.turns):
        if not place <= turn.start <= turn.end <= len(trajectory):
            return f"turn {index + 1} is tokens {turn.start} to {turn.end} of {len(trajectory)}"
        if not trajectory.loss_mask[turn.start : turn.end].all() or trajectory.loss_mask[place : turn.start].any():
            return f"turn {index + 1} does not fit the loss mask"
        place = turn.end
    if not np.isfinite(trajectory.logprobs[trajectory.loss_mask]).all():
        return "log-probabilities that are no numbers"
    if is_scored and trajectory.status in TRAINABLE and trajectory.reward is None:
        return "has no reward, though it could be trained on"
    return None


def unlike(rollouts: Segment, scored: Segment) -> str | None:
    """How two twins differ in what scoring does not change."""
    if len(rollouts) != len(scored):
        return f"{len(rollouts)} trajectories and {len(scored)}"
    for one, other in zip(rollouts, scored, strict=True):
        if one.id != other.id:
            return f"{one.id!r} and {other.id!r} have one place"
        if not all(
            np.array_equal(getattr(one, name), getattr(other, name), equal_nan=name == "logprobs")
            for name in ("token_ids", "logprobs", "versions", "loss_mask")
        ):
            return f"the tokens of {one.id!r}"
    return None


def stray(directory: Path) -> Iterator[tuple[Path, str]]:
    """Files that are no segments: what killed writers left, and what does not belong there."""
    for path in sorted(directory.iterdir()):
        if path.name.startswith("."):
            if path.name.endswith(".tmp") and _age_s(path) > LEFTOVER_AGE_S:
                yield path, "left by a writer that was killed; nothing acknowledged is in it, and it may be removed"
        elif not path.name.endswith(".h5") and path.name != quarantine.DIRECTORY:
            yield path, "no segment; nothing reads it"


def _age_s(path: Path) -> float:
    """How long ago it was changed; no time at all if it is gone."""
    try:
        return time.time() - path.stat().st_mtime
    except FileNotFoundError:
        return 0.0
