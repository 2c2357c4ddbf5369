"""The lengths of episodes, in generated tokens, as counts that can be added up. Pure, without numpy.

    LengthCounts       episodes and tokens by the least length of a bucket ("448+": 448 to 511), and TOTAL, all tokens
    add_length         counts an episode
    join_lengths       the counts of all episodes that have ended, and of those that finished
    count_lengths      the episodes of each mean length
    summarize_lengths  their number, mean, median and 90th percentile
    LengthSummary      these

If those that are trained are shorter than those that were started, something prefers short ones (docs/learning.md).
"""

import re
from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

import msgspec

from hpcrl.spool.status import TRAINABLE

LengthCounts = dict[str, int]
TOTAL = "tokens"
_LEADING_BITS = 3
"""The bits by which a length is sorted: four buckets for each power of two, and one for each length below 8."""
_BUCKET = re.compile(r"\d{1,15}\+|\d{1,2}", re.ASCII)
"""The names of buckets: by the least length, or in older campaigns by the bits of a length."""


class LengthSummary(msgspec.Struct, frozen=True, kw_only=True):
    """The lengths of some episodes; a quantile is the mean of the bucket it is in."""

    num: int
    mean: float
    p50: float
    p90: float


class _LengthBucket(NamedTuple):
    """The episodes of nearly the same length."""

    mean: float
    num: int


def add_length(counts: LengthCounts, num_tokens: int) -> None:
    """Count an episode."""
    shift = max(0, num_tokens.bit_length() - _LEADING_BITS)
    bucket = f"{num_tokens >> shift << shift}+"
    for name, increment in ((bucket, 1), (bucket + TOTAL, num_tokens), (TOTAL, num_tokens)):
        counts[name] = counts.get(name, 0) + increment


def join_lengths(by_status: Mapping[str, Mapping[str, int]]) -> dict[str, LengthCounts]:
    """Return the lengths of all episodes that have ended, and of those that finished."""
    started, finished = Counter[str](), Counter[str]()
    for status, counts in by_status.items():
        started.update(counts)
        if status in TRAINABLE:
            finished.update(counts)
    return {"started": dict(started), "finished": dict(finished)}


def count_lengths(counts: Mapping[str, int]) -> list[tuple[float, int]]:
    """Return the mean length of each bucket, with its episodes."""
    return [(bucket.mean, bucket.num) for bucket in _list_buckets(counts)]


def summarize_lengths(counts: Mapping[str, int]) -> LengthSummary | None:
    """Return the figures of these episodes; None without episodes."""
    buckets = _list_buckets(counts)
    num = sum(bucket.num for bucket in buckets)
    if not num:
        return None
    return LengthSummary(
        num=num, mean=counts.get(TOTAL, 0) / num, p50=_find_quantile(buckets, 0.5), p90=_find_quantile(buckets, 0.9)
    )


def _list_buckets(counts: Mapping[str, int]) -> list[_LengthBucket]:
    return sorted(_make_bucket(name, counts) for name in counts if _BUCKET.fullmatch(name) and counts[name] > 0)


def _make_bucket(name: str, counts: Mapping[str, int]) -> _LengthBucket:
    """Return a bucket; older campaigns counted episodes by the bits of a length ("9": 256 to 511), and no tokens."""
    num = counts[name]
    if name.endswith("+"):
        return _LengthBucket(counts.get(name + TOTAL, 0) / num, num)
    return _LengthBucket(1.5 * (1 << int(name) >> 1), num)


def _find_quantile(buckets: list[_LengthBucket], share: float) -> float:
    left = share * sum(bucket.num for bucket in buckets)
    for bucket in buckets:
        if left <= bucket.num:
            return bucket.mean
        left -= bucket.num
    return buckets[-1].mean
