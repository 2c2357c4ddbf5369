"""A trajectory as a row for other tools: the same columns in Parquet and in JSON lines.

Only types that pyarrow, pandas and `datasets` read alike whatever the first rows hold: lists of records instead of
mappings with free keys, and what is only known to a newer schema as JSON text.
"""

from typing import Any

import msgspec

from hpcrl.spool.record import COLUMNS, Trajectory, Turn
from hpcrl.traj.conversation import Speech, conversation, messages


def row(trajectory: Trajectory, speech: Speech) -> dict[str, Any]:
    """Everything but the token columns."""
    said = messages(conversation(trajectory, speech)) if speech.chat is not None else []
    return {
        "id": trajectory.id,
        "group": trajectory.group,
        "domain": trajectory.domain,
        "seed": trajectory.seed,
        "status": trajectory.status,
        "reward": trajectory.reward,
        "reward_parts": [{"name": name, "value": value} for name, value in trajectory.reward_parts.items()],
        "messages": said,
        "turns": [_turn(turn) for turn in trajectory.turns],
        "num_tokens": len(trajectory),
        "start_version": trajectory.start_version,
        "end_version": trajectory.end_version,
        "producer": trajectory.producer,
        "created": trajectory.created,
        "reset_s": trajectory.reset_s,
        "extra": _extra(trajectory),
    }


def json_line(trajectory: Trajectory, speech: Speech) -> bytes:
    """One line; JSON has no NaN and no infinity, so null stands for them."""
    columns = {name: getattr(trajectory, name).tolist() for name in COLUMNS}
    return msgspec.json.encode({**row(trajectory, speech), **columns}) + b"\n"


def _turn(turn: Turn) -> dict[str, Any]:
    return {name: getattr(turn, name) for name in Turn.__struct_fields__ if name != "extra"}


def _extra(trajectory: Trajectory) -> str:
    of_turns = [turn.extra for turn in trajectory.turns]
    return msgspec.json.encode({**trajectory.extra, **({"turns": of_turns} if any(of_turns) else {})}).decode()
