"""The record of one episode: a trajectory, exact to the token.

    EpisodeTurn                  one turn of an episode
    ConversationRow              one conversation of an episode that has several
    TrajectoryFacts              the facts of the episode besides its tokens; stored as JSON
    Trajectory                   the facts and the per-token columns
    PackedTrajectory             a trajectory in the form that is stored
    pack_trajectory              checks and packs a trajectory
    parse_facts, attach_columns    make a trajectory from stored data
    list_columns                 the per-token columns as lists
    sum_phase_times              the times of an episode by phase
    COLUMNS                      the per-token columns and their types
    OPTIONAL_COLUMNS             those that a trajectory may lack
    ALL_COLUMNS                  both
    EXPERTS                      the column of experts, which has several numbers for each token
    SCHEMA_MAJOR, SCHEMA_MINOR    the version of the schema

Shape: `token_ids` is the input and the output of the model, in order; the other per-token columns have the same
length. `loss_mask` is True for tokens that the model generated and that are trained; `logprobs` and `versions` are 0
where the model generated nothing. `teacher_logprobs` are NaN where no teacher's engine was asked. `experts` has several
numbers for each token, and no export has it. An episode with several conversations has `rows`, whose tokens are stored
one after another without what a row shares with an earlier one: `hpcrl.spool.rows` puts them together.

Schema: a newer minor version may add facts (of the episode or of a turn); a reader without them keeps
them in `extra` and writes them back. A new column or a new status needs a new major version.
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
from hpcrl.spool.routed_experts import EXPERT_DTYPES
from hpcrl.spool.status import TRAINABLE as TRAINABLE
from hpcrl.spool.status import EpisodeStatus

SCHEMA_MAJOR = 4
SCHEMA_MINOR = 0

MASK_REASONS = {
    "choice": "the environment trains another conversation (`trains`)",
    "sampling": "it was not sampled as training assumes",
}
"""The reasons why a turn is not trained."""


class EpisodeTurn(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """A turn: the model generates, the environment steps."""

    start: int
    """Index in the columns of the first token that the model generated in this turn."""
    end: int
    """Index after the last one that it generated."""
    reward: float = 0.0
    generate_s: float = 0.0
    """The time from its request to its answer."""
    overlap_s: float = 0.0
    """The part of `generate_s` in which an earlier request had no answer yet either."""
    step_s: float = 0.0
    """The time after its answer in which no request was being answered."""
    remote_prefill: bool = False
    row: int = 0
    """The index in `rows` of the conversation that has it among its own tokens."""
    masked: str = ""
    """The reason why its tokens are not trained, one of `MASK_REASONS`; empty if they are."""
    token_rewards: list[float] = []
    """The reward of each of its tokens, whose sum is `reward`; empty if these have none."""
    num_forced: int = 0
    """The tokens of a turn that is trained which are not: the required form of the answer allowed no other."""
    extra: dict[str, Any] = {}
    """Facts of a newer minor schema version, kept as they came."""


class ConversationRow(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """A conversation: the first tokens of an earlier row, then its own, which start where the row before ends."""

    end: int
    """Index in the columns after its last own token."""
    parent: int = -1
    """The row with which it shares its first tokens; -1 if with none."""
    shares: int = 0
    """The number of tokens that it shares."""


class TrajectoryFacts(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The facts of an episode besides its tokens."""

    id: str
    """Unique in the campaign, and unchanged when the episode is retried: `group/index`."""
    group: str
    """Episodes of one group have the same task: `domain/number`."""
    domain: str
    seed: int
    status: EpisodeStatus
    producer: str
    """The worker that ran it."""
    created: float
    """The time at which it ended, in seconds since the epoch."""
    start_version: int
    """Version of the weights when it started; staleness counts from here."""
    end_version: int
    turns: list[EpisodeTurn]
    """The turns, in the order in which they were answered."""
    rows: list[ConversationRow] = []
    """The conversations; empty if the columns are one."""
    reset_s: float = 0.0
    outcome: str = ""
    """The way it ended, one of `hpcrl.spool.outcome.OUTCOMES`; "" if its status is enough."""
    reward: float | None = None
    """The reward; None until scored."""
    reward_parts: dict[str, float] = {}
    extra: dict[str, Any] = {}
    """Facts of a newer minor schema version, kept as they came."""


class Trajectory(TrajectoryFacts, frozen=True, kw_only=True, eq=False):
    """The record of one episode: its facts and its per-token columns."""

    token_ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    versions: NDArray[np.int32]
    loss_mask: NDArray[np.bool_]
    teacher_logprobs: NDArray[np.float32] | None = None
    """The log-probs of the trained tokens under the model of a teacher's engine; NaN elsewhere."""
    experts: NDArray[Any] | None = None
    """The experts that engines sent each token to, for `train.router_replay` (hpcrl.spool.routed_experts)."""

    def __len__(self) -> int:
        return len(self.token_ids)


COLUMNS: dict[str, np.dtype[Any]] = {
    "token_ids": np.dtype(np.int32),
    "logprobs": np.dtype(np.float32),
    "versions": np.dtype(np.int32),
    "loss_mask": np.dtype(np.bool_),
}
OPTIONAL_COLUMNS: dict[str, np.dtype[Any]] = {"teacher_logprobs": np.dtype(np.float32)}
ALL_COLUMNS = {**COLUMNS, **OPTIONAL_COLUMNS}
EXPERTS = "experts"
_FACT_NAMES = tuple(name for name in TrajectoryFacts.__struct_fields__ if name != "extra")
_TURN_FACT_NAMES = frozenset(EpisodeTurn.__struct_fields__) - {"extra"}
_FACTS_DECODER = msgspec.json.Decoder(TrajectoryFacts, strict=False)


@dataclass(frozen=True, slots=True)
class PackedTrajectory:
    """A trajectory as it is stored; it is known to be readable again."""

    id: str
    facts: bytes
    """The facts as one JSON object."""
    columns: dict[str, NDArray[Any]]
    reward: float | None = None
    """The reward, if it has one already: then it is stored in "scored" as it is in "rollouts"."""

    @property
    def num_bytes(self) -> int:
        return len(self.facts) + sum(column.nbytes for column in self.columns.values())


def pack_trajectory(trajectory: Trajectory) -> PackedTrajectory:
    """Return a trajectory in the form that is stored; refuse one that could not be read back.

    The columns are not copied: they must not change afterwards.
    """
    names = (*COLUMNS, *(name for name in OPTIONAL_COLUMNS if getattr(trajectory, name) is not None))
    columns = {name: _check_column(trajectory, name) for name in names}
    if trajectory.experts is not None:
        columns[EXPERTS] = _check_experts(trajectory)
    lengths = {name: len(column) for name, column in columns.items()}
    if len(set(lengths.values())) > 1:
        raise SpoolError(f"trajectory {trajectory.id!r} has columns of unequal length {lengths}: one entry per token")
    if trajectory.rows:
        _check_rows(trajectory)
    facts = _encode_facts(trajectory)
    for turn in trajectory.turns:
        if turn.token_rewards and len(turn.token_rewards) != turn.end - turn.start:
            raise SpoolError(
                f"trajectory {trajectory.id!r}: a turn from {turn.start} to {turn.end} has {len(turn.token_rewards)} "
                "token_rewards: one for each of its tokens, or none"
            )
    return PackedTrajectory(id=trajectory.id, facts=facts, columns=columns, reward=trajectory.reward)


def parse_facts(data: bytes) -> TrajectoryFacts:
    """Return the facts in a JSON object; those that this version does not have go to `extra`."""
    if b'"extra"' not in data:  # a fact of that name is unknown to this version
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
    """Return the trajectory with these facts and columns."""
    fields: dict[str, Any] = {**msgspec.structs.asdict(facts), **columns}
    return Trajectory(**fields)


def sum_phase_times(facts: TrajectoryFacts) -> dict[str, float]:
    """Return the seconds of each phase; what happened at the same time counts once."""
    return {
        "generate": sum(turn.generate_s - turn.overlap_s for turn in facts.turns),
        "step": sum(turn.step_s for turn in facts.turns),
        "reset": facts.reset_s,
    }


def _check_rows(trajectory: Trajectory) -> None:
    """Refuse rows that do not divide the columns, or share what is not there, and turns across their borders."""
    lengths: list[int] = []
    start = 0
    for number, row in enumerate(trajectory.rows):
        available = lengths[row.parent] if 0 <= row.parent < number else 0
        if row.end < start or not -1 <= row.parent < number or not 0 <= row.shares <= available:
            raise SpoolError(
                f"trajectory {trajectory.id!r}: row {number} is {row}: it must end at {start} or later, and share at "
                f"most the {available} tokens of an earlier row"
            )
        lengths.append(row.shares + row.end - start)
        start = row.end
    if start != len(trajectory):
        raise SpoolError(f"trajectory {trajectory.id!r}: its rows end at {start}, its columns at {len(trajectory)}")
    borders = [0, *(row.end for row in trajectory.rows)]
    for turn in trajectory.turns:
        known = 0 <= turn.row < len(trajectory.rows)
        if not known or not borders[turn.row] <= turn.start <= turn.end <= borders[turn.row + 1]:
            raise SpoolError(
                f"trajectory {trajectory.id!r}: a turn from {turn.start} to {turn.end} is not in its row {turn.row}"
            )


def _check_column(trajectory: Trajectory, name: str) -> NDArray[Any]:
    column = getattr(trajectory, name)
    dtype = {**COLUMNS, **OPTIONAL_COLUMNS}[name]
    if not isinstance(column, np.ndarray) or column.ndim != 1 or column.dtype != dtype:
        seen = f"{column.dtype} {column.shape}" if isinstance(column, np.ndarray) else type(column).__name__
        raise SpoolError(
            f"trajectory {trajectory.id!r}: {name} is {seen}, not a {dtype} array of one dimension: "
            f"make it with np.asarray(..., np.{dtype})"
        )
    return np.ascontiguousarray(column)


def _check_experts(trajectory: Trajectory) -> NDArray[Any]:
    column = trajectory.experts
    if not isinstance(column, np.ndarray) or column.ndim != 3 or column.dtype not in EXPERT_DTYPES:
        seen = f"{column.dtype} {column.shape}" if isinstance(column, np.ndarray) else type(column).__name__
        raise SpoolError(
            f"trajectory {trajectory.id!r}: experts is {seen}, not an array of tokens, layers and places of uint8 or "
            "uint16: make it with hpcrl.spool.routed_experts"
        )
    return np.ascontiguousarray(column)


def _encode_facts(trajectory: Trajectory) -> bytes:
    row: Any = {**trajectory.extra, **{name: getattr(trajectory, name) for name in _FACT_NAMES}}
    try:
        if _should_encode_carefully(trajectory):
            row = _convert_carefully(row)
        data = msgspec.json.encode(row, enc_hook=_convert_numpy_number)
        parse_facts(data)  # find an unreadable record now, not when it is read
    except (msgspec.MsgspecError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise SpoolError(
            f"trajectory {trajectory.id!r} cannot be stored ({error}): "
            "facts must have the types of hpcrl.spool.record.TrajectoryFacts, `extra` finite JSON values"
        ) from error
    return data


def _should_encode_carefully(trajectory: Trajectory) -> bool:
    """Return whether a plain JSON encoder would lose something: non-finite numbers, unknown facts."""
    total = trajectory.created + trajectory.reset_s + (trajectory.reward or 0.0) + sum(trajectory.reward_parts.values())
    total += sum(
        turn.reward + turn.generate_s + turn.overlap_s + turn.step_s + sum(turn.token_rewards)
        for turn in trajectory.turns
    )
    return not math.isfinite(total) or bool(trajectory.extra) or any(turn.extra for turn in trajectory.turns)


def _convert_carefully(row: dict[str, Any]) -> dict[str, Any]:
    json.dumps([row[name] for name in row.keys() - set(_FACT_NAMES)], allow_nan=False)
    json.dumps([turn.extra for turn in row["turns"]], allow_nan=False)
    plain = msgspec.to_builtins(row, enc_hook=_convert_numpy_number)
    plain["turns"] = [{**turn.pop("extra", {}), **turn} for turn in plain["turns"]]
    return {name: _spell_non_finite(value) for name, value in plain.items()}


def _spell_non_finite(value: Any) -> Any:
    """Replace NaN and infinity, which JSON lacks, by text; it is decoded as a number where one is expected."""
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
    """Return the Python number of a NumPy one, which reward functions may return."""
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"{type(value).__name__} {value!r} is not a JSON value")


def _split_turn(row: dict[str, Any]) -> dict[str, Any]:
    if row.keys() <= _TURN_FACT_NAMES:
        return row
    known = {name: row[name] for name in _TURN_FACT_NAMES if name in row}
    return {**known, "extra": {name: value for name, value in row.items() if name not in known}}


def list_columns(trajectory: Trajectory) -> dict[str, list[Any] | None]:
    """Return the token columns as lists; None stands for one that the trajectory does not have."""
    columns = {name: getattr(trajectory, name) for name in ALL_COLUMNS}
    return {name: None if column is None else column.tolist() for name, column in columns.items()}
