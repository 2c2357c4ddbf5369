"""The lengths of episodes, in generated tokens, as counts that can be added up. Pure, without numpy.

    LengthCounts       the episodes by the bits of their length ("9": 256 to 511 tokens), and TOTAL, all their tokens
    add_length         counts an episode
    join_lengths       the counts of all episodes that have ended, and of those that finished
    summarize_lengths  their number, mean, median and 90th percentile
    LengthSummary      these

If those that are trained are shorter than those that were started, something prefers short ones (docs/learning.md).
"""

from collections import Counter
from collections.abc import Iterable, Mapping

import msgspec

from hpcrl.spool.status import TRAINABLE

LengthCounts = dict[str, int]
TOTAL = "tokens"


class LengthSummary(msgspec.Struct, frozen=True, kw_only=True):
    """The lengths of some episodes; quantiles are exact to their power of two, and interpolated within."""

    num: int
    mean: float
    p50: float
    p90: float


def add_length(counts: LengthCounts, num_tokens: int) -> None:
    """Count an episode."""
    name = str(num_tokens.bit_length())
    counts[name] = counts.get(name, 0) + 1
    counts[TOTAL] = counts.get(TOTAL, 0) + num_tokens


def join_lengths(by_status: Mapping[str, Mapping[str, int]]) -> dict[str, LengthCounts]:
    """Return the lengths of all episodes that have ended, and of those that finished."""
    started, finished = Counter[str](), Counter[str]()
    for status, counts in by_status.items():
        started.update(counts)
        if status in TRAINABLE:
            finished.update(counts)
    return {"started": dict(started), "finished": dict(finished)}


def summarize_lengths(counts: Mapping[str, int]) -> LengthSummary | None:
    """Return the figures of these episodes; None without episodes."""
    by_bits = sorted((int(name), num) for name, num in counts.items() if name != TOTAL and num > 0)
    num = sum(count for _, count in by_bits)
    if not num:
        return None
    return LengthSummary(
        num=num, mean=counts.get(TOTAL, 0) / num, p50=_find_quantile(by_bits, 0.5), p90=_find_quantile(by_bits, 0.9)
    )


def _find_quantile(by_bits: Iterable[tuple[int, int]], share: float) -> float:
    ordered = list(by_bits)
    left = share * sum(num for _, num in ordered)
    for bits, num in ordered:
        if left <= num:
            low = 1 << bits >> 1
            return low + left / num * low
        left -= num
    return 0.0
