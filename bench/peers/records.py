"""The trajectories that every contender writes: seeded, with log-normal lengths."""

import time
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from hpcrl.spool.record import EpisodeTurn, Trajectory

NUM = 1024
MEAN_TOKENS = 7800
_SIGMA = 0.8
"""The deviation of the logarithm of the length: the longest of 1,024 is about ten times the mean."""
_SEED = 20260101
_GROUP = 8


def trajectories(num: int = NUM, *, mean_tokens: int = MEAN_TOKENS, first: int = 0) -> list[Trajectory]:
    """Make `num` trajectories in groups of eight; `first` is the number of the first group."""
    rng = np.random.default_rng(_SEED + first)
    mu = np.log(mean_tokens) - _SIGMA**2 / 2
    lengths = np.maximum(rng.lognormal(mu, _SIGMA, num).astype(int), 16)
    return of_lengths(lengths.tolist(), first=first)


def of_lengths(lengths: Sequence[int], *, first: int = 0) -> list[Trajectory]:
    """Make a trajectory of each of these numbers of tokens."""
    rng = np.random.default_rng(_SEED + first)
    return [_trajectory(rng, first + index // _GROUP, index % _GROUP, num) for index, num in enumerate(lengths)]


def num_bytes(batch: Sequence[Trajectory]) -> int:
    """Return the bytes of the columns alone."""
    return sum(13 * len(trajectory) for trajectory in batch)


def make_record(
    name: str, token_ids: np.ndarray, *, loss_mask: np.ndarray, version: int = 0, **facts: Any
) -> Trajectory:
    """Make the trajectory `DOMAIN/GROUP/INDEX`; log-probs are those of a uniform policy unless given."""
    fields: dict[str, Any] = {
        "seed": 0,
        "status": "done",
        "producer": "000-env-0",
        "created": 0.0,
        "start_version": version,
        "end_version": version,
        "turns": [],
        "logprobs": np.where(loss_mask, -4.6, 0.0).astype(np.float32),
    }
    return Trajectory(
        id=name,
        group=name.rpartition("/")[0],
        domain=name.partition("/")[0],
        token_ids=token_ids,
        versions=np.where(loss_mask, np.int32(version), np.int32(0)),
        loss_mask=loss_mask,
        **{**fields, **facts},
    )


def _trajectory(rng: np.random.Generator, group: int, index: int, num_tokens: int) -> Trajectory:
    mask = np.zeros(num_tokens, np.bool_)
    turns = _turns(rng, num_tokens)
    for turn in turns:
        mask[turn.start : turn.end] = True
    facts: dict[str, Any] = {
        "version": int(rng.integers(1, 100)),
        "seed": int(rng.integers(1 << 31)),
        "created": time.time(),
        "turns": turns,
        "reward": float(rng.random()),
        "reward_parts": {"answer": float(rng.random()), "format": 1.0},
    }
    token_ids = rng.integers(0, 150_000, num_tokens, np.int32)
    logprobs = np.where(mask, -rng.random(num_tokens, np.float32), np.float32(0))
    return make_record(f"math/{group}/{index}", token_ids, loss_mask=mask, logprobs=logprobs, **facts)


def _turns(rng: np.random.Generator, num_tokens: int) -> list[EpisodeTurn]:
    """Make about one turn per 2,000 tokens; the model generates four fifths of them."""
    edges = np.linspace(0, num_tokens, 2 + num_tokens // 2000).astype(int)
    return [
        EpisodeTurn(
            start=int(start + (end - start) // 5),
            end=int(end),
            generate_s=float(rng.random()),
            step_s=float(rng.random()),
        )
        for start, end in pairwise(edges)
    ]
