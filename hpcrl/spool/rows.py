"""The rows of a record: the conversations of an episode, each as the model saw it.

    list_spans       where each row's own tokens are, and what it shares; one row if the record has none
    RowSpan          the place of one row
    expand_row       the per-token columns of a row, shared tokens first
    RowColumns       those columns
    list_parts       the parts of the columns that a row consists of
    list_row_turns   the turns that each row trains
    list_placed_turns, PlacedTurn    all turns of each row, also shared ones, at their positions in it
    count_by_fate    the generated tokens that are trained, and those that are not by reason

A record stores what several rows share once, in the row that had it first. Only there may it be trained: `loss_mask`
is False on the shared tokens of a row, so a generated token is in the loss of one row.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hpcrl.spool.record import Trajectory, TrajectoryFacts
from hpcrl.spool.token_fates import FORCED
from hpcrl.spool.token_fates import TRAINED as TRAINED


class RowSpan(NamedTuple):
    """The place of a row."""

    start: int
    """Index in the columns of its first own token."""
    end: int
    parent: int = -1
    shares: int = 0

    @property
    def num_tokens(self) -> int:
        """The length of the row, shared tokens included."""
        return self.shares + self.end - self.start


class PlacedTurn(NamedTuple):
    """A turn at its place in a row; it has the same tokens in all rows that share it."""

    number: int
    """Its index in `turns`."""
    start: int
    end: int


@dataclass(frozen=True)
class RowColumns:
    """The per-token columns of a row: the tokens that the model saw and generated in one conversation."""

    token_ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    versions: NDArray[np.int32]
    loss_mask: NDArray[np.bool_]
    teacher_logprobs: NDArray[np.float32] | None = None
    experts: NDArray[Any] | None = None

    def __len__(self) -> int:
        return len(self.token_ids)


def list_spans(trajectory: Trajectory) -> list[RowSpan]:
    """Return the place of each row; a record without rows is one row."""
    starts = [0, *(row.end for row in trajectory.rows)]
    spans = [
        RowSpan(start, row.end, row.parent, row.shares) for start, row in zip(starts, trajectory.rows, strict=False)
    ]
    return spans or [RowSpan(0, len(trajectory))]


def expand_row(trajectory: Trajectory, number: int, *, spans: Sequence[RowSpan] | None = None) -> RowColumns:
    """Return the columns of a row; those of a record without rows are views. `spans`: for callers with many rows."""
    if not trajectory.rows:
        names = ("token_ids", "logprobs", "versions", "loss_mask", "teacher_logprobs", "experts")
        return RowColumns(**{name: getattr(trajectory, name) for name in names})
    parts = list_parts(list_spans(trajectory) if spans is None else spans, number)

    def join(column: NDArray[Any]) -> NDArray[Any]:
        return np.concatenate([column[part] for part in parts])

    loss_mask = join(trajectory.loss_mask)
    loss_mask[: trajectory.rows[number].shares] = False
    return RowColumns(
        token_ids=join(trajectory.token_ids),
        logprobs=join(trajectory.logprobs),
        versions=join(trajectory.versions),
        loss_mask=loss_mask,
        teacher_logprobs=None if trajectory.teacher_logprobs is None else join(trajectory.teacher_logprobs),
        experts=None if trajectory.experts is None else join(trajectory.experts),
    )


def list_parts(spans: Sequence[RowSpan], number: int) -> list[slice]:
    """Return the parts of the columns that a row consists of, in order; the last is its own."""
    parts: list[slice] = []
    limit = spans[number].num_tokens
    while number >= 0:
        span = spans[number]
        if limit > span.shares or not parts:
            parts.append(slice(span.start, span.start + max(limit - span.shares, 0)))
        limit, number = min(limit, span.shares), span.parent
    return parts[::-1]


def list_row_turns(facts: TrajectoryFacts) -> list[list[int]]:
    """Return for each row the indices of its own turns, by their position."""
    found: list[list[int]] = [[] for _ in range(max(len(facts.rows), 1))]
    for number, turn in sorted(enumerate(facts.turns), key=lambda one: (one[1].start, one[0])):
        found[turn.row].append(number)
    return found


def list_placed_turns(trajectory: Trajectory) -> list[list[PlacedTurn]]:
    """Return for each row all its turns at their positions in it, those that it shares included."""
    placed: list[list[PlacedTurn]] = []
    for span, own in zip(list_spans(trajectory), list_row_turns(trajectory), strict=True):
        shared = [turn for turn in placed[span.parent] if turn.end <= span.shares] if span.parent >= 0 else []
        move = span.shares - span.start
        turns = ((number, trajectory.turns[number]) for number in own)
        placed.append([*shared, *(PlacedTurn(number, turn.start + move, turn.end + move) for number, turn in turns)])
    return placed


def count_by_fate(facts: TrajectoryFacts) -> Counter[str]:
    """Count the generated tokens: `trained`, and those masked by reason."""
    counts: Counter[str] = Counter()
    for turn in facts.turns:
        counts[turn.masked or TRAINED] += turn.end - turn.start - turn.num_forced
        if turn.num_forced:
            counts[FORCED] += turn.num_forced
    return counts
