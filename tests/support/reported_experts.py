"""Experts as an engine reports them that depend on all tokens so far, as those of a model do.

choose_by_prefix   the experts of every token of a sequence
report_experts     those that come with a turn: all that was asked for but the last token
check_known        the experts of a row of a record are those of its tokens, for all but the last of a conversation
"""

import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpcrl.spool.routed_experts import ExpertSpan, find_known_tokens, make_span


def choose_by_prefix(token_ids: Sequence[int], *, dtype: Any = np.uint8) -> NDArray[Any]:
    """Return two experts of each token in one layer."""
    ids, found = np.asarray(token_ids, np.int32), []
    for end in range(1, len(ids) + 1):
        digest = zlib.crc32(ids[:end].tobytes())
        found.append([[digest % 100, 100 + digest // 100 % 100]])
    return np.array(found, dtype).reshape(-1, 1, 2)


def report_experts(token_ids: Sequence[int], start: int | None, **options: Any) -> list[ExpertSpan]:
    """Return what an engine reports of a prompt and its answer."""
    if start is None or start >= len(token_ids) - 1:
        return []
    return [make_span(start, choose_by_prefix(token_ids, **options)[start:-1])]


def check_known(row: Any, known: Sequence[bool] | NDArray[np.bool_]) -> None:
    """Check the experts of the tokens of a row, and which of them have any."""
    assert row.experts is not None
    np.testing.assert_array_equal(find_known_tokens(row.experts), known)
    np.testing.assert_array_equal(row.experts[known], choose_by_prefix(row.token_ids)[known])
