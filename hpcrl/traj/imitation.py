"""The trajectories of a campaign as the data of another's warm-up: `python -m hpcrl.traj.imitation`.

    main              print the chosen trajectories, one a line; started by hpcrl.envs.task_set
    ImitationRequest  its argument, as JSON
    build_row         a trajectory -> a row, with the recorded tokens

A row has the recorded token ids, so the model of both campaigns must have the same tokens. One segment is in memory at
a time.
"""

import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from hpcrl.campaign_dir.paths import CampaignDir
from hpcrl.errors import ConfigError, HpcrlError
from hpcrl.models.model_config import read_vocabulary
from hpcrl.spool.record import TRAINABLE, Trajectory
from hpcrl.system.files import read_json
from hpcrl.traj.history import TrajectoryHistory, TrajectorySelection


class ImitationRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The campaign to read, and what is wanted of it."""

    root: str
    model: str | None
    """The directory of the model to train; None for a tiny one."""
    min_reward: float | None


def main() -> int:
    """Print the rows; an error that the user can fix is one line on stderr and exit code 2."""
    request = msgspec.json.decode(sys.argv[1], type=ImitationRequest)
    campaign = CampaignDir(Path(request.root))
    history = TrajectoryHistory(campaign, spools=("scored", "archive"))
    num_scored = num_chosen = 0
    try:
        _check_tokens(campaign, request.model)
        for _, trajectory in history.trajectories(TrajectorySelection(), verify=True):
            if trajectory.status not in TRAINABLE or trajectory.reward is None or not trajectory.loss_mask.any():
                continue
            num_scored += 1
            if request.min_reward is None or trajectory.reward >= request.min_reward:
                num_chosen += 1
                sys.stdout.buffer.write(msgspec.json.encode(build_row(trajectory)) + b"\n")
        if history.problems:
            raise ConfigError(f"a segment cannot be read: {next(iter(history.problems.values()))}")
        if not num_chosen:
            bound = "" if request.min_reward is None else f" with a reward of {request.min_reward:g} or more"
            raise ConfigError(f"it has no trajectory{bound} among the {num_scored} that are scored")
    except HpcrlError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    return 0


def build_row(trajectory: Trajectory) -> dict[str, Any]:
    """Return the tokens of a trajectory, where its turns and conversations are, and the spans that are trained."""
    edges = np.flatnonzero(np.diff(trajectory.loss_mask.astype(np.int8), prepend=0, append=0))
    return {
        "token_ids": trajectory.token_ids.tolist(),
        "trained": edges.reshape(-1, 2).tolist(),
        "turns": [
            {"start": one.start, "end": one.end, "row": one.row, "masked": one.masked} for one in trajectory.turns
        ],
        "rows": trajectory.rows,
    }


def _check_tokens(campaign: CampaignDir, model: str | None) -> None:
    """Refuse a campaign whose recorded token ids mean something else to the model to train."""
    was_tiny = read_json(campaign.recipe).get("model", {}).get("tiny") is not None
    why = "export its messages (`hpcrl traj export`) and imitate the file"
    if was_tiny != (model is None):
        tiny, other = ("its", "this") if was_tiny else ("this", "its")
        raise ConfigError(f"{tiny} model is a tiny one and {other} model is not, so its token ids differ: {why}")
    if model is None:
        return
    recorded, known = read_vocabulary(campaign.model), read_vocabulary(Path(model))
    different = [token for token, number in recorded.items() if known.get(token) != number]
    if different:
        example = min(different, key=lambda token: (len(token), token))
        raise ConfigError(
            f"its model has another vocabulary than model.path = {model!r} ({example!r} is {recorded[example]} and "
            f"{known.get(example)}), so its token ids mean something else: {why}"
        )


if __name__ == "__main__":
    sys.exit(main())
