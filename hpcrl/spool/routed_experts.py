"""The experts to which a model's layers sent each token, as engines report them and records keep them.

    ExpertSpan             the experts of tokens that follow one another, as they are sent
    make_span, read_span   from and to an array
    find_span_end          the first token that spans do not reach
    choose_expert_dtype    the smallest type for a model's experts
    place_span             the array of a span, and where it belongs
    join_experts           the column of a trajectory, from what engines reported
    cut_spans              spans without their last tokens
    find_known_tokens      the tokens of a column that have a choice
    NO_EXPERT_BYTE         the value of a token's bytes without a choice

An array has a number for each token, each layer with experts, and each of the K experts that the token was sent to
there: [N, L, K], of uint8, or uint16 where a model has more than 255 experts. No pass of an engine reads the last token
that it generates, nor what an environment adds after it: these tokens have no choice, which is the largest number of
the type. A trainer that replays choices makes its own for them.

A token keeps the choice of the pass that read it first. The token before a generated one was read by the pass that
generated it, so its choice is the one under which that log-prob was computed, even if KV was computed again later.

Legend: N tokens, L layers with experts, K experts of a token
"""

import math
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from hpcrl.errors import EngineAnswerError, SpoolError

NO_EXPERT_BYTE = 0xFF
EXPERT_DTYPES = (np.dtype(np.uint8), np.dtype(np.uint16))


class ExpertSpan(msgspec.Struct, frozen=True, kw_only=True):
    """The experts of some tokens of a sequence that follow one another."""

    start: int
    """The index in the sequence, prompt and answer, of the first token."""
    shape: tuple[int, int, int]
    """Tokens, layers with experts, experts of a token."""
    data: bytes
    """One or two bytes for each number, little-endian."""

    @property
    def end(self) -> int:
        return self.start + self.shape[0]


def choose_expert_dtype(num_experts: int) -> np.dtype[Any]:
    """Return the type of the numbers of experts; its largest value is not one of them."""
    return EXPERT_DTYPES[0] if num_experts <= NO_EXPERT_BYTE else EXPERT_DTYPES[1]


def make_span(start: int, experts_NLK: NDArray[Any]) -> ExpertSpan:
    """Make the span of tokens from `start` on."""
    assert experts_NLK.dtype in EXPERT_DTYPES, "an engine records experts in one of these types"
    num_tokens, num_layers, num_chosen = experts_NLK.shape
    return ExpertSpan(start=start, shape=(num_tokens, num_layers, num_chosen), data=experts_NLK.tobytes())


def read_span(span: ExpertSpan) -> NDArray[Any]:
    """Return the array of a span; raises EngineAnswerError if its data does not have its shape."""
    num = math.prod(span.shape)
    size = len(span.data) // num if num else 1
    if min(span.start, *span.shape) < 0 or size not in (1, 2) or size * num != len(span.data):
        raise EngineAnswerError(
            f"an engine reported experts of shape {span.shape} from {span.start} in {len(span.data)} bytes"
        )
    return np.frombuffer(span.data, EXPERT_DTYPES[size - 1]).reshape(span.shape)


def find_span_end(spans: Sequence[ExpertSpan], start: int | None) -> int | None:
    """Return the first token that the spans do not reach, at least `start`; None if experts are not asked for."""
    return None if start is None else max([start, *(span.end for span in spans)])


def cut_spans(spans: Sequence[ExpertSpan], num: int) -> list[ExpertSpan]:
    """Return spans that follow one another without their last `num` tokens."""
    if not num or not spans:
        return list(spans)
    last = spans[-1]
    num_kept = max(last.shape[0] - num, 0)
    kept = [make_span(last.start, read_span(last)[:num_kept])] if num_kept else []
    return [*cut_spans(spans[:-1], num - (last.shape[0] - num_kept)), *kept]


def place_span(span: ExpertSpan, places: Sequence[int] | NDArray[np.intp]) -> tuple[NDArray[np.intp], NDArray[Any]]:
    """Return the array of a span with the positions of its tokens, given those of all tokens of its sequence."""
    if span.end > len(places):
        raise EngineAnswerError(f"an engine reported the experts of {span.end} tokens, and read at most {len(places)}")
    return np.asarray(places[span.start : span.end], np.intp), read_span(span)


def make_unknown(num_tokens: int, *, like: NDArray[Any]) -> NDArray[Any]:
    """Return the column of tokens without a choice, for the model that chose the experts in `like`."""
    return np.full((num_tokens, *like.shape[1:]), np.iinfo(like.dtype).max, like.dtype)


def find_known_tokens(experts_NLK: NDArray[Any]) -> NDArray[np.bool_]:
    """Return for each token whether it has a choice."""
    if not experts_NLK[0:1].size:
        return np.zeros(len(experts_NLK), np.bool_)
    return np.asarray(experts_NLK[:, 0, 0] != np.iinfo(experts_NLK.dtype).max)


def join_experts(num_tokens: int, reports: Iterable[tuple[NDArray[np.intp], NDArray[Any]]]) -> NDArray[Any] | None:
    """Return the column of a trajectory, or None if no engine reported experts.

    A report has the positions of tokens in the columns, and their experts; the first with a token counts for it.
    """
    column: NDArray[Any] | None = None
    for places, experts_NLK in reports:
        if column is None:
            column = make_unknown(num_tokens, like=experts_NLK)
        if (column.shape[1:], column.dtype) != (experts_NLK.shape[1:], experts_NLK.dtype):
            raise SpoolError(
                f"engines reported experts of {column.shape[1:]} and {experts_NLK.shape[1:]} as layers and places, in "
                f"{column.dtype} and {experts_NLK.dtype}: all must have the same model"
            )
        is_new = ~find_known_tokens(column[places])
        column[places[is_new]] = experts_NLK[is_new]
    return column
