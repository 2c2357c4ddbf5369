"""The record of one episode: a trajectory, exact to the token.

Shape: `token_ids` is everything the model saw and said, in order; the other per-token columns have the same
length. `loss_mask` is True where the model said it; `logprobs` and `versions` are 0 elsewhere.
"""

from typing import Annotated, Any, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

SCHEMA_MAJOR = 1
SCHEMA_MINOR = 0

Status = Literal["done", "truncated", "aborted-stale", "aborted-redundant", "env-fault", "policy-fault"]
TRAINABLE: frozenset[Status] = frozenset({"done", "truncated"})


class Turn(msgspec.Struct, frozen=True, kw_only=True):
    """One generate/step pair."""

    start: int
    """Index in `token_ids` of the first token that the model said in this turn."""
    end: int
    """Index after the last one."""
    reward: float = 0.0
    generate_s: float = 0.0
    step_s: float = 0.0
    remote_prefill: bool = False


class Trajectory(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """What one episode left behind."""

    id: str
    """Unique in the campaign and the same when the episode is retried: `group/index`."""
    group: str
    """Episodes with one group had the same task: `domain/number`."""
    domain: str
    seed: int
    status: Status
    producer: str
    """The worker that ran it."""
    created: float
    """Seconds since the epoch when it ended."""
    start_version: int
    """Version of the weights when it began; staleness counts from here."""
    end_version: int
    token_ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    versions: NDArray[np.int32]
    loss_mask: NDArray[np.bool_]
    turns: list[Turn]
    reset_s: float = 0.0
    reward: float | None = None
    """None until scored."""
    reward_parts: dict[str, float] = {}
    extra: Annotated[dict[str, Any], "fields of a newer minor schema version, kept as they came"] = {}

    def __len__(self) -> int:
        return len(self.token_ids)
