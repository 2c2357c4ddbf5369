"""Sequences that start alike, each stored as what differs: the texts, ids and messages of an episode's prompts. Pure.

SharedSequence  a text, ids or messages, of which a beginning is that of another one
count_common    the number of first items that a sequence shares with one that is whole
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

S = TypeVar("S", bound="str | array[int] | tuple[Any, ...]")


@dataclass(frozen=True, eq=False, slots=True)
class SharedSequence(Generic[S]):
    """A sequence whose first items are those of another one; a conversation may have thousands in a chain."""

    own: S
    """The items after those that are shared."""
    base: "SharedSequence[S] | None" = None
    num_shared: int = 0
    """The items of `base` that it starts with."""

    def __len__(self) -> int:
        return self.num_shared + len(self.own)

    def extend(self, own: S) -> "SharedSequence[S]":
        """Return a sequence of all items of this one and some more."""
        return SharedSequence(own, self, len(self))

    def list_parts(self) -> list[S]:
        """Return the parts that make up the whole, in order."""
        parts: list[Any] = []
        link: SharedSequence[S] | None = self
        end = len(self)
        while link is not None and end:
            if end > link.num_shared:
                parts.append(link.own if end == len(link) else link.own[: end - link.num_shared])
                end = link.num_shared
            link = link.base
        return parts[::-1]


def count_common(sequence: SharedSequence[S], other: S, known: dict[SharedSequence[S], int]) -> int:
    """Return how many first items are those of `other`; `known` keeps the answers, so that none is compared twice."""
    chain = []
    link: SharedSequence[S] | None = sequence
    while link is not None and link not in known:
        chain.append(link)
        link = link.base
    for link in reversed(chain):
        common = known[link.base] if link.base is not None else 0
        if common >= link.num_shared:
            common = link.num_shared + _count_equal(link.own, other[link.num_shared : len(link)])
        known[link] = common
    return known[sequence]


def _count_equal(one: Sequence[Any], other: Sequence[Any]) -> int:
    """Return how many first items are equal."""
    most = min(len(one), len(other))
    if one[:most] == other[:most]:
        return most
    start, size = 0, 1
    while one[start : start + size] == other[start : start + size]:
        start, size = start + size, size * 2
    while size > 1:  # the first difference is among these
        half = size // 2
        if one[start : start + half] == other[start : start + half]:
            start, size = start + half, size - half
        else:
            size = half
    return start
