"""A trajectory as a line of a list. It imports nothing heavy.

ListLine   the line
"""

import msgspec


class ListLine(msgspec.Struct, frozen=True, kw_only=True):
    """A line of `hpcrl traj ls`, and an object of its `--json`, which the monitor reads."""

    id: str
    domain: str
    group: str
    status: str
    reward: float | None
    num_turns: int
    num_tokens: int
    start_version: int
    end_version: int
    created: float
    spool: str
