"""The trajectories of all tests.

make_trajectory         one turn, all of it trained
make_random_trajectory  two turns of random tokens, to train on
make_lake_trajectory    two turns in words of the tiny tokenizer, scored, to show and to score
make_taught_trajectory  the same with the log-probs of a teacher
make_odd_trajectory     different values in every column, to store
dump_exactly            all that trajectories contain, to compare
"""

from collections.abc import Iterable
from typing import Any

import numpy as np

from hpcrl.spool.record import COLUMNS, EpisodeTurn, Trajectory, pack_trajectory

# Ids of the tiny tokenizer: <user> h i <agent> a b <eos> <user> ? <agent> c
TOKENS = (2, 77, 78, 3, 70, 71, 1, 2, 36, 3, 72)
GENERATED = (0, 0, 0, 0, 1, 1, 1, 0, 0, 0, 1)


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


def make_lake_trajectory(number: int = 0, index: int = 0, *, domain: str = "lake", **changed: Any) -> Trajectory:
    """Make a trajectory of two turns: input "hi", output "ab", input "?", output "c"."""
    fields: dict[str, Any] = {
        "domain": domain,
        "seed": 7 + number,
        "created": 1_800_000_000.0 + number + index / 100,
        "start_version": number,
        "end_version": number + 1,
        "turns": [
            EpisodeTurn(start=4, end=7, reward=0.25, generate_s=0.4, step_s=0.05, remote_prefill=True),
            EpisodeTurn(start=10, end=11, reward=0.5, generate_s=0.2, step_s=0.05),
        ],
        "reset_s": 0.1,
        "reward": number / 10,
        "reward_parts": {"goal": number / 10},
        "token_ids": TOKENS,
        "logprobs": np.where(GENERATED, -0.5, 0.0),
        "versions": np.where(GENERATED, number, 0),
        "loss_mask": GENERATED,
    }
    return make_trajectory(f"{domain}/{number}/{index}", **{**fields, **changed})


def make_taught_trajectory(number: int = 0, index: int = 0, **changed: Any) -> Trajectory:
    """Make the trajectory of the lake, scored by a teacher whose log-probs are 0.25 below those of the model."""
    return make_lake_trajectory(
        number, index, teacher_logprobs=np.where(GENERATED, -0.75, np.nan).astype(np.float32), **changed
    )


def make_random_trajectory(
    name: str, length: int = 20, *, reward: float | None, vocabulary: int, seed: int = 0, **changed: Any
) -> Trajectory:
    """Make two turns of random tokens, with log-probs of a nearly uniform policy; each turn has half of the reward."""
    rng = np.random.default_rng([seed, int(name.rpartition("/")[2]), length])
    spans = [(length // 4, length // 2), (length * 3 // 4, length)]
    generated = np.zeros(length, dtype=np.bool_)
    for start, end in spans:
        generated[start:end] = True
    random = {
        "token_ids": rng.integers(0, vocabulary, length, dtype=np.int32),
        "logprobs": np.where(generated, -np.log(vocabulary) + 0.1 * rng.normal(size=length), 0),
        "loss_mask": generated,
        "turns": [EpisodeTurn(start=start, end=end, reward=(reward or 0.0) / 2) for start, end in spans],
        "reward": reward,
    }
    return make_trajectory(name, version=1, **{**random, **changed})


def make_odd_trajectory(name: str = "math/0/0", num_tokens: int = 6, *, seed: int = 0, **changed: Any) -> Trajectory:
    """Make a trajectory whose columns and facts all differ, and have values that a careless format loses."""
    num_tokens = len(changed.get("token_ids", range(num_tokens)))
    start = min(2, num_tokens // 2)
    odd = {
        "seed": seed,
        "created": 1.5,
        "start_version": 2,
        "end_version": 3,
        "turns": [EpisodeTurn(start=start, end=num_tokens, reward=0.5, generate_s=0.25)],
        "token_ids": np.arange(num_tokens) + 1000 * (seed % 1000),
        "logprobs": [0, np.nan, -np.inf, -1.5, *range(num_tokens)][:num_tokens],
        "loss_mask": np.arange(num_tokens) >= start,
    }
    return make_trajectory(name, num_tokens, version=2, **{**odd, **changed})


def dump_exactly(trajectories: Iterable[Trajectory]) -> list[tuple[bytes, list[bytes]]]:
    """Return everything in these trajectories, to the bit."""
    packed = [pack_trajectory(one) for one in trajectories]
    return [(one.facts, [one.columns[name].tobytes() for name in COLUMNS]) for one in packed]
