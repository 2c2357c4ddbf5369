"""Trajectories for the tests of spools with several processes."""

import numpy as np

from hpcrl.spool.record import EpisodeTurn, Trajectory


def trajectory(name: str, num_tokens: int) -> Trajectory:
    return Trajectory(
        id=name,
        group=name.rpartition("/")[0],
        domain="math",
        seed=1,
        status="done",
        producer="000-env-0",
        created=0.0,
        start_version=0,
        end_version=0,
        turns=[EpisodeTurn(start=0, end=num_tokens)],
        token_ids=np.arange(num_tokens, dtype=np.int32),
        logprobs=np.zeros(num_tokens, np.float32),
        versions=np.zeros(num_tokens, np.int32),
        loss_mask=np.ones(num_tokens, np.bool_),
    )
