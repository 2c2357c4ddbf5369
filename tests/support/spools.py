"""Plain trajectories for the tests of spools."""

from typing import Any

import numpy as np

from hpcrl.spool.record import EpisodeTurn, Trajectory


def trajectory(name: str, num_tokens: int, **changed: Any) -> Trajectory:
    """Make a trajectory of one turn, all of it trained."""
    fields: dict[str, Any] = {
        "id": name,
        "group": name.rpartition("/")[0],
        "domain": "math",
        "seed": 1,
        "status": "done",
        "producer": "000-env-0",
        "created": 0.0,
        "start_version": 0,
        "end_version": 0,
        "turns": [EpisodeTurn(start=0, end=num_tokens)],
        "token_ids": np.arange(num_tokens, dtype=np.int32),
        "logprobs": np.zeros(num_tokens, np.float32),
        "versions": np.zeros(num_tokens, np.int32),
        "loss_mask": np.ones(num_tokens, np.bool_),
    }
    return Trajectory(**{**fields, **changed})
