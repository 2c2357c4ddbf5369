"""The record of one episode: a trajectory, exact to the token.

    TrajectoryFacts              what is known of the episode besides its tokens; stored as JSON
    Trajectory                   the facts and the per-token columns
    pack_trajectory              checks a trajectory and brings it into the form that is stored
    parse_facts, attach_columns    the way back

Shape: `token_ids` is everything the model saw and said, in order; the other per-token columns have the same
length. `loss_mask` is True where the model said it; `logprobs` and `versions` are 0 elsewhere.

Schema: a newer minor version may add facts (of the episode or of a turn); a reader that does not know them keeps
them in `extra` and writes them back. A new column or a new status is a new major version.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from hpcrl.errors import SpoolError
from hpcrl.spool.status import EpisodeStatus

SCHEMA_MAJOR = 1
SCHEMA_MINOR = 0

TRAINABLE: frozenset[EpisodeStatus] = frozenset({"done", "truncated"})


class EpisodeTurn(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """One generate/step pair."""

    start: int
    """Index in `token_ids` of the first token that the model said in this turn."""
    end: int
    """Index after the last one."""
    reward: float = 0.0
    generate_s: float = 0.0
    step_s: float = 0.0
    remote_prefill: bool = False
    extra: dict[str, Any] = {}
    """Facts of a newer minor schema version, kept as they came."""


class TrajectoryFacts(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is known of an episode besides its tokens."""

    id: str
    """Unique in the campaign and the same when the episode is retried: `group/index`."""
    group: str
    """Episodes with one group had the same task: `domain/number`."""
    domain: str
    seed: int
    status: EpisodeStatus
    producer: str
    """The worker that ran it."""
    created: float
    """Seconds since the epoch when it ended."""
    start_version: int
    """Version of the weights when it began; staleness counts from here."""
    end_version: int
    turns: list[EpisodeTurn]
    reset_s: float = 0.0
    reward: float | None = None
    """None until scored."""
    reward_parts: dict[str, float] = {}
    extra: dict[str, Any] = {}
    """Facts of a newer minor schema version, kept as they came."""


class Trajectory(TrajectoryFacts, frozen=True, kw_only=True, eq=False):
    """What one episode left behind."""

    token_ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    versions: NDArray[np.int32]
    loss_mask: NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.token_ids)


COLUMNS: dict[str, np.dtype[Any]] = {
    "token_ids": np.dtype(np.int32),
    "logprobs": np.dtype(np.float32),
    "versions": np.dtype(np.int32),
    "loss_mask": np.dtype(np.bool_),
}
_FACT_NAMES = tuple(name for name in TrajectoryFacts.__struct_fields__ if name != "extra")
_TURN_FACT_NAMES = frozenset(EpisodeTurn.__struct_fields__) - {"extra"}
_FACTS_DECODER = msgspec.json.Decoder(TrajectoryFacts, strict=False)


@dataclass(frozen=True, slots=True)
class PackedTrajectory:
    """A trajectory as it is stored: known to be readable again."""

    id: str
    facts: bytes
    """One JSON object."""
    columns: dict[str, NDArray[Any]]

    @property
    def num_bytes(self) -> int:
        return len(self.facts) + sum(column.nbytes for column in self.columns.values())


def pack_trajectory(trajectory: Trajectory) -> PackedTrajectory:
    """Bring a trajectory into the form that is stored, or refuse what could not be read back.

    The columns are not copied: they must not change afterwards.
    """
    columns = {name: _check_column(trajectory, name) for name in COLUMNS}
    lengths = {name: len(column) for name, column in columns.items()}
    if len(set(lengths.values())) > 1:
        raise SpoolError(f"trajectory {trajectory.id!r} has columns of unequal length {lengths}: one entry per token")
    return PackedTrajectory(id=trajectory.id, facts=_encode_facts(trajectory), columns=columns)


def parse_facts(data: bytes) -> TrajectoryFacts:
    """Facts from a JSON object; what this version does not know goes to `extra`."""
    if b'"extra"' not in data:  # a fact of that name is one that this version does not know
        try:
            return _FACTS_DECODER.decode(data)
        except msgspec.ValidationError:
            pass
    return _parse_with_unknown(msgspec.json.decode(data))


def _parse_with_unknown(row: dict[str, Any]) -> TrajectoryFacts:
    known = {name: row[name] for name in _FACT_NAMES if name in row}
    known["turns"] = [_split_turn(turn) for turn in row["turns"]]
    extra = {name: value for name, value in row.items() if name not in known}
    return msgspec.convert({**known, "extra": extra}, TrajectoryFacts, strict=False)


def attach_columns(facts: TrajectoryFacts, columns: Mapping[str, NDArray[Any]]) -> Trajectory:
    """The trajectory that these facts and columns are."""
    fields: dict[str, Any] = {**msgspec.structs.asdict(facts), **columns}
    return Trajectory(**fields)


def _check_column(trajectory: Trajectory, name: str) -> NDArray[Any]:
    column = getattr(trajectory, name)
    dtype = COLUMNS[name]
    if not isinstance(column, np.ndarray) or column.ndim != 1 or column.dtype != dtype:
        seen = f"{column.dtype} {column.shape}" if isinstance(column, np.ndarray) else type(column).__name__
        raise SpoolError(
            f"trajectory {trajectory.id!r}: {name} is {seen}, not a {dtype} array of one dimension: "
            f"make it with np.asarray(..., np.{dtype})"
        )
    return np.ascontiguousarray(column)


def _encode_facts(trajectory: Trajectory) -> bytes:
    row: Any = {**trajectory.extra, **{name: getattr(trajectory, name) for name in _FACT_NAMES}}
    try:
        if _should_encode_carefully(trajectory):
            row = _convert_carefully(row)
        data = msgspec.json.encode(row, enc_hook=_convert_numpy_number)
        parse_facts(data)  # a reader must never be the first to find out
    except (msgspec.MsgspecError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise SpoolError(
            f"trajectory {trajectory.id!r} cannot be stored ({error}): "
            "facts must have the types of hpcrl.spool.record.TrajectoryFacts, `extra` finite JSON values"
        ) from error
    return data


def _should_encode_carefully(trajectory: Trajectory) -> bool:
    """Whether a plain JSON encoder would lose something: numbers that are not finite, facts of newer turns."""
    total = trajectory.created + trajectory.reset_s + (trajectory.reward or 0.0) + sum(trajectory.reward_parts.values())
    total += sum(turn.reward + turn.generate_s + turn.step_s for turn in trajectory.turns)
    return not math.isfinite(total) or bool(trajectory.extra) or any(turn.extra for turn in trajectory.turns)


def _convert_carefully(row: dict[str, Any]) -> dict[str, Any]:
    json.dumps([row[name] for name in row.keys() - set(_FACT_NAMES)], allow_nan=False)
    json.dumps([turn.extra for turn in row["turns"]], allow_nan=False)
    plain = msgspec.to_builtins(row, enc_hook=_convert_numpy_number)
    plain["turns"] = [{**turn.pop("extra", {}), **turn} for turn in plain["turns"]]
    return {name: _spell_non_finite(value) for name, value in plain.items()}


def _spell_non_finite(value: Any) -> Any:
    """JSON has no NaN and no infinity: write them as text, which reads back as a number where one is due."""
    match value:
        case float() if not math.isfinite(value):
            return str(value)
        case dict():
            return {name: _spell_non_finite(item) for name, item in value.items()}
        case list():
            return [_spell_non_finite(item) for item in value]
        case _:
            return value


def _convert_numpy_number(value: Any) -> Any:
    """Reward functions return NumPy numbers: the same value as Python's."""
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"{type(value).__name__} {value!r} is no JSON value")


def _split_turn(row: dict[str, Any]) -> dict[str, Any]:
    if row.keys() <= _TURN_FACT_NAMES:
        return row
    known = {name: row[name] for name in _TURN_FACT_NAMES if name in row}
    return {**known, "extra": {name: value for name, value in row.items() if name not in known}}
