"""The trajectories of all tests."""

from typing import Any

import numpy as np

from hpcrl.spool.record import EpisodeTurn, Trajectory


def make_trajectory(name: str = "math/0/0", num_tokens: int = 4, *, version: int = 0, **changed: Any) -> Trajectory:
    """Make a trajectory of one turn, all of it trained; columns that are given may be lists and set its length."""
    for column, dtype in (("token_ids", np.int32), ("logprobs", np.float32), ("versions", np.int32)):
        if column in changed:
            changed[column] = np.asarray(changed[column], dtype)
            num_tokens = len(changed[column])
    if "loss_mask" in changed:
        changed["loss_mask"] = np.asarray(changed["loss_mask"], np.bool_)
        num_tokens = len(changed["loss_mask"])
    fields: dict[str, Any] = {
        "id": name,
        "group": name.rpartition("/")[0],
        "domain": name.partition("/")[0],
        "seed": 1,
        "status": "done",
        "producer": "000-env-0",
        "created": 0.0,
        "start_version": version,
        "end_version": version,
        "turns": [EpisodeTurn(start=0, end=num_tokens)],
        "token_ids": np.arange(num_tokens, dtype=np.int32),
        "logprobs": np.zeros(num_tokens, np.float32),
        "versions": np.full(num_tokens, version, np.int32),
        "loss_mask": np.ones(num_tokens, np.bool_),
    }
    return Trajectory(**{**fields, **changed})
