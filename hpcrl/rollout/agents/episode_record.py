"""The record of an agent program's episode, from its recorded turns: each conversation a row, each turn in one.

    build_record          turns -> a trajectory
    EpisodeFacts          the fields of the record that the episode supplies
    measure_engines_s     the time that engines took

A conversation is what the model saw and generated up to a turn that nothing continued. Its row shares the longest
prefix that an earlier row has, token by token: so a template that renders the whole history for each turn, without
its old thoughts, stores what changed and no more. What is shared ends before the first turn that no earlier row holds.
"""

import itertools
import math
import time
from array import array
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray

from hpcrl.envs.base import ConversationChoice
from hpcrl.rollout.agents.recording import RecordedTurn
from hpcrl.spool.record import COLUMNS, ConversationRow, EpisodeTurn, Trajectory
from hpcrl.spool.routed_experts import join_experts, place_span
from hpcrl.spool.rows import RowSpan, list_parts
from hpcrl.spool.status import EpisodeStatus

CHUNK_TOKENS = 64
"""The tokens of a chunk: beginnings that rows share are found chunk by chunk, then to the token."""


class EpisodeFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of the record that the episode supplies."""

    id: str
    group: str
    domain: str
    seed: int
    status: EpisodeStatus
    producer: str
    start_version: int
    started_at: float
    """The start of its program; `reset_s` is the time from then to the first request."""
    ended_at: float
    outcome: str = ""
    extra: dict[str, Any] = {}


def build_record(
    turns: Sequence[RecordedTurn], facts: EpisodeFacts, *, reward: float, choice: ConversationChoice = "all"
) -> Trajectory:
    """Build the record of an episode; the reward is that of the last turn which is trained."""
    leaves = _find_leaves(turns)
    first = _choose_leaf(leaves, choice)
    chosen = set(first.path()) if first is not None else set(turns)
    masks = {turn: "sampling" if not turn.is_trained else "" if turn in chosen else "choice" for turn in turns}
    builder = _RowBuilder(masks)
    for leaf in sorted(leaves, key=lambda leaf: (leaf is not first, leaf.number)):
        builder.add_conversation(leaf.path())
    trained = [turn for turn in turns if not masks[turn]] or list(turns)
    versions = [version for turn in trained for version in turn.completion.versions]
    rewarded = trained[-1] if trained else None
    times = _TurnTimes(turns, ended_at=facts.ended_at)
    return Trajectory(
        id=facts.id,
        group=facts.group,
        domain=facts.domain,
        seed=facts.seed,
        status=facts.status,
        outcome=facts.outcome,
        producer=facts.producer,
        created=time.time(),
        start_version=min(versions, default=facts.start_version),
        end_version=versions[-1] if versions else facts.start_version,
        turns=[
            EpisodeTurn(
                start=builder.starts[turn],
                end=builder.starts[turn] + len(turn.completion.token_ids),
                reward=reward if turn is rewarded else 0.0,
                generate_s=turn.generate_s,
                overlap_s=times.overlap_s[turn],
                step_s=times.step_s[turn],
                remote_prefill=turn.completion.remote_prefill,
                row=builder.row_of[turn],
                masked=masks[turn],
                num_forced=0 if masks[turn] else sum(turn.forced),
            )
            for turn in turns
        ],
        rows=builder.rows if len(builder.rows) > 1 else [],
        reset_s=max(0.0, min(turn.started_at for turn in turns) - facts.started_at) if turns else 0.0,
        extra=dict(facts.extra),
        experts=builder.join_experts(turns),
        **builder.join_columns(),
    )


class _RowBuilder:
    """The rows made so far; each conversation adds one."""

    def __init__(self, masks: dict[RecordedTurn, str]) -> None:
        self.rows: list[ConversationRow] = []
        self.row_of: dict[RecordedTurn, int] = {}
        """The row that has each turn among its own tokens."""
        self.starts: dict[RecordedTurn, int] = {}
        """The position of each turn's answer in the columns."""
        self._masks = masks
        self._columns: dict[str, list[NDArray[Any]]] = {name: [] for name in COLUMNS}
        self._ids = array("i")
        self._spans: list[RowSpan] = []
        self._latest: dict[bytes, int] = {}
        """The latest row that has a chunk, and all before it."""

    def add_conversation(self, path: list[RecordedTurn]) -> None:
        """Add the row of a conversation, given its turns; the last of them is in no row yet."""
        num_known = sum(turn in self.row_of for turn in path)
        known, new = path[:num_known], path[num_known:]
        ids = np.concatenate([np.array(part, np.int32) for turn in path for part in _list_parts(turn)])
        num_known_ids = sum(len(part) for turn in known for part in _list_parts(turn))
        keys = list(_chain_chunks(ids))
        parent, shares = self._find_parent(
            ids[: num_known_ids + len(new[0].prompt.new_token_ids)],
            keys,
            hints={self.row_of[known[-1]]} if known else set(),
        )
        number, start = len(self.rows), len(self._ids)
        self._ids.extend(ids[shares:].tolist())
        self.rows.append(ConversationRow(end=len(self._ids), parent=parent, shares=shares))
        self._spans.append(RowSpan(start, len(self._ids), parent, shares))
        self._latest.update(dict.fromkeys(keys, number))
        position = start - shares + num_known_ids
        for turn in new:
            self.row_of[turn] = number
            self.starts[turn] = position + len(turn.prompt.new_token_ids)
            position = self.starts[turn] + len(turn.completion.token_ids)
        self._add_columns(ids[shares:], new, start=start)

    def join_columns(self) -> dict[str, Any]:
        """Return the per-token columns of all rows."""
        return {
            name: np.concatenate([np.zeros(0, COLUMNS[name]), *parts], dtype=COLUMNS[name])
            for name, parts in self._columns.items()
        }

    def join_experts(self, turns: Sequence[RecordedTurn]) -> NDArray[Any] | None:
        """Return the column of the experts that were reported with these turns."""
        return join_experts(len(self._ids), self._list_reports(turns))

    def _list_reports(self, turns: Sequence[RecordedTurn]) -> Iterator[tuple[NDArray[np.intp], NDArray[Any]]]:
        """Yield the experts of each turn with the positions of their tokens, in the order of the answers."""
        for turn in turns:
            if turn.completion.experts:
                parts = list_parts(self._spans, self.row_of[turn])
                places = np.concatenate([np.arange(part.start, part.stop) for part in parts])
                yield from (place_span(span, places) for span in turn.completion.experts)

    def _add_columns(self, own_ids: NDArray[np.int32], new: list[RecordedTurn], *, start: int) -> None:
        columns = {name: np.zeros(len(own_ids), dtype) for name, dtype in COLUMNS.items()}
        columns["token_ids"] = own_ids
        for turn in new:
            completion, first = turn.completion, self.starts[turn] - start
            answer = slice(first, first + len(completion.token_ids))
            columns["logprobs"][answer] = completion.logprobs
            columns["versions"][answer] = completion.versions
            columns["loss_mask"][answer] = False if self._masks[turn] else np.logical_not(turn.forced)
        for name, column in columns.items():
            self._columns[name].append(column)

    def _find_parent(self, ids: NDArray[np.int32], keys: Sequence[bytes], *, hints: set[int]) -> tuple[int, int]:
        """Find the row that shares the longest prefix, and its length: of the hints, the last row, and by chunks."""
        known = itertools.takewhile(self._latest.__contains__, keys[: len(ids) // CHUNK_TOKENS])
        by_chunks = {self._latest[key] for key in list(known)[-1:]}
        candidates = hints | by_chunks | {len(self.rows) - 1}
        lengths = {number: self._count_common(ids, number) for number in sorted(candidates - {-1})}
        parent = max(lengths, key=lambda number: lengths[number], default=-1)
        return (parent, lengths[parent]) if lengths.get(parent) else (-1, 0)

    def _count_common(self, ids: NDArray[np.int32], number: int) -> int:
        """Return the number of first tokens that a row shares."""
        stored = np.frombuffer(self._ids, np.int32) if self._ids else np.zeros(0, np.int32)
        row = np.concatenate([stored[part] for part in list_parts(self._spans, number)])
        length = min(len(ids), len(row))
        different = np.flatnonzero(ids[:length] != row[:length])
        return int(different[0]) if len(different) else length


def _find_leaves(turns: Sequence[RecordedTurn]) -> list[RecordedTurn]:
    """Return the last turns of all conversations."""
    continued = {turn.prompt.parent for turn in turns}
    return [turn for turn in turns if turn not in continued]


def _choose_leaf(leaves: Sequence[RecordedTurn], choice: ConversationChoice) -> RecordedTurn | None:
    """Return the last turn of the conversation to train on; None if all are."""
    match choice:
        case "all":
            return None
        case "last":
            return max(leaves, key=lambda leaf: leaf.number, default=None)
        case "longest":
            return max(leaves, key=lambda leaf: (_count_trained_tokens(leaf), leaf.number), default=None)


def _count_trained_tokens(leaf: RecordedTurn) -> int:
    return sum(turn.forced.count(False) for turn in leaf.path() if turn.is_trained)


class _TurnTimes:
    """The times of turns that may overlap: each moment counts once, as one of a request or as one of a step."""

    def __init__(self, turns: Sequence[RecordedTurn], *, ended_at: float) -> None:
        self.overlap_s: dict[RecordedTurn, float] = {}
        self.step_s = dict.fromkeys(turns, 0.0)
        """The time after the answer of a turn until the next request, if no other was being answered then."""
        latest: RecordedTurn | None = None
        answered_at = -math.inf
        for turn in sorted(turns, key=lambda turn: turn.started_at):
            self.overlap_s[turn] = min(turn.generate_s, max(0.0, answered_at - turn.started_at))
            if latest is not None and turn.started_at > answered_at:
                self.step_s[latest] = turn.started_at - answered_at
            if turn.started_at + turn.generate_s >= answered_at:
                latest, answered_at = turn, turn.started_at + turn.generate_s
        if latest is not None:
            self.step_s[latest] = max(0.0, ended_at - answered_at)


def measure_engines_s(turns: Sequence[RecordedTurn]) -> float:
    """Return the time in which a request of these turns was being answered."""
    times = _TurnTimes(turns, ended_at=-math.inf)
    return sum(turn.generate_s - times.overlap_s[turn] for turn in turns)


def _list_parts(turn: RecordedTurn) -> tuple[Sequence[int], Sequence[int]]:
    return turn.prompt.new_token_ids, turn.completion.token_ids


def _chain_chunks(ids: NDArray[np.int32]) -> Iterator[bytes]:
    """Yield for each whole chunk a hash of the ids up to its end."""
    digest = xxhash.xxh3_128()
    for start in range(0, len(ids) - CHUNK_TOKENS + 1, CHUNK_TOKENS):
        digest.update(ids[start : start + CHUNK_TOKENS].tobytes())
        yield digest.digest()
