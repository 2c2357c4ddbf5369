"""Sequences that start alike, each stored as what differs: the texts, ids and messages of an episode's prompts.

SharedSequence  a text, ids or messages, whose start is that of another one
join_ids        all ids of one
IdListCache     the ids of the sequences that were read last
SequenceIndex   finds, of many sequences, those that start like a whole one
RecentLists     the lists that were seen last, each with a value
count_equal     the number of first items that two sequences share
"""

import itertools
import threading
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, TypeVar

MAX_RECENT = 8
"""The conversations that a program may continue in turn, each as fast as if it was the only one."""
MAX_RECENT_BYTES = 8 << 20
"""The bytes of these conversations together, unless one alone has more."""
MAX_UNLISTED_PARTS = 4
"""The parts between two prompts that follow each other: an answer and what comes after it."""
S = TypeVar("S", bound="str | array[int] | tuple[Any, ...]")
T = TypeVar("T")
V = TypeVar("V")


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

    def list_parts(self, start: int = 0) -> list[S]:
        """Return the parts that make up the whole, in order; those that end before the item `start` are left out."""
        parts: list[Any] = []
        link: SharedSequence[S] | None = self
        end = len(self)
        while link is not None and end > start:
            if (num := end - link.num_shared) > 0:  # no calls here: a conversation may have thousands of links
                own = link.own
                parts.append(own if num == len(own) else own[:num])
                end = link.num_shared
            link = link.base
        return parts[::-1]


def join_ids(sequence: "SharedSequence[array[int]]") -> "array[int]":
    """Return all ids of a sequence."""
    return array("i", b"".join(sequence.list_parts()))


class IdListCache:
    """The ids of sequences that were read last, as lists: one that extends such a sequence reuses its list."""

    def __init__(self, *, max_ids: int) -> None:
        self._max_ids = max_ids
        self._lists: dict[SharedSequence[array[int]], list[int]] = {}
        self._num_ids = 0

    def read(self, sequence: "SharedSequence[array[int]]") -> list[int]:
        """Return all ids of a sequence; the list belongs to the cache, too, and is never changed."""
        link, end = sequence, len(sequence)
        parts: list[Any] = []
        while link not in self._lists and link.base is not None and len(parts) < MAX_UNLISTED_PARTS:
            parts.append(link.own[: max(0, end - link.num_shared)])
            end = min(end, link.num_shared)
            link = link.base
        known = self._lists.pop(link, None)
        if known is None:
            ids = join_ids(sequence).tolist()
        else:
            self._num_ids -= len(known)
            ids = known[:end]
            for part in reversed(parts):
                ids.extend(part)
        self._lists[sequence] = ids
        self._num_ids += len(ids)
        while self._num_ids > self._max_ids:
            self._num_ids -= len(self._lists.pop(next(iter(self._lists))))
        return ids


class RecentList(NamedTuple, Generic[T, V]):
    """A list that was seen, with a value."""

    items: list[T]
    value: V
    num_bytes: int


class RecentLists(Generic[T, V]):
    """The lists that were seen last, each with a value: with each call, a program extends one of its conversations.

    Several threads may use it: what one adds, another may miss.
    """

    def __init__(self) -> None:
        self._lists: tuple[RecentList[T, V], ...] = ()
        """The last one first."""

    def find(self, items: list[T]) -> RecentList[T, V] | None:
        """Return the list that `items` starts with, or the last one if there is none."""
        lists = self._lists
        return next((one for one in lists if _starts_with(items, one.items)), lists[0] if lists else None)

    def add(self, items: list[T], value: V, *, num_bytes: int = 0) -> None:
        """Add a list, which is never changed; those that it starts with are forgotten, and old ones that are large."""
        others = [one for one in self._lists if not _starts_with(items, one.items)]
        sizes = itertools.accumulate((one.num_bytes for one in others), initial=num_bytes)
        next(sizes)
        kept = [one for one, size in zip(others, sizes, strict=True) if size <= MAX_RECENT_BYTES]
        self._lists = (RecentList(items, value, num_bytes), *kept[: MAX_RECENT - 1])

    def __iter__(self) -> Iterator[RecentList[T, V]]:
        return iter(self._lists)


def _starts_with(items: list[Any], start: list[Any]) -> bool:
    num = len(start)  # most others differ in the last item already
    return 0 < num <= len(items) and items[num - 1] == start[-1] and items[:num] == start


class _IndexBranch(NamedTuple):
    """The items between two nodes: a part of those that a sequence stores, so that none is stored twice."""

    items: Any
    start: int
    end: int
    node: "_IndexNode"


@dataclass(eq=False, slots=True)
class _IndexNode:
    """A place where sequences end or differ."""

    some_value: Any
    """The value of a sequence that leads here."""
    last_value: Any = None
    """The value of the last one that ends here."""
    branches: dict[Any, _IndexBranch] = field(default_factory=dict)
    """The continuations, by their first items."""


class SequenceIndex(Generic[S, V]):
    """Values, each with a sequence: a tree, in which looking one up compares each of its items once at most.

    Adding is cheap: the tree grows when something is looked up. Both may be done by several threads.
    """

    def __init__(self, read_sequence: Callable[[V], SharedSequence[S]]) -> None:
        self._read_sequence = read_sequence
        self._root = _IndexNode(None)
        self._ends: dict[SharedSequence[S], _IndexNode] = {}
        self._added: deque[V] = deque()
        self._lock = threading.Lock()

    def add(self, value: V) -> None:
        """Add a value, whose sequence is read when it is needed."""
        self._added.append(value)

    def find_common(self, whole: S) -> tuple[int, V | None]:
        """Return how many first items of `whole` a sequence has, at most, and the value of such a sequence."""
        with self._lock:
            self._grow()
            found = _find_place(self._root, whole)
        node = found.nodes[-1] if found.branch is None else found.branch.node
        return found.num_items, node.some_value

    def find_start(self, whole: S) -> V | None:
        """Return the value of the longest sequence that `whole` starts with, of equals the last added."""
        with self._lock:
            self._grow()
            values = (node.last_value for node in reversed(_find_place(self._root, whole).nodes))
            return next((value for value in values if value is not None), None)

    def _grow(self) -> None:
        while self._added:
            value = self._added.popleft()
            self._insert(self._read_sequence(value), value).last_value = value

    def _insert(self, sequence: SharedSequence[S], value: V) -> _IndexNode:
        """Return the node at the end of the sequence; of one that extends another only its own items are compared."""
        chain, link = [], sequence
        while link not in self._ends and link.base is not None and link.num_shared == len(link.base):
            chain.append(link)
            link = link.base
        if link not in self._ends:
            node = self._root
            for part in link.list_parts():
                node = _extend(node, part, value)
            self._ends[link] = node
        node = self._ends[link]
        for link in reversed(chain):
            node = self._ends[link] = _extend(node, link.own, value)
        return node


class _IndexPlace(NamedTuple):
    """The place in a tree to which items lead."""

    nodes: list[_IndexNode]
    """The nodes on the way."""
    branch: _IndexBranch | None
    """The branch after the last node, if the place is in it."""
    num_in_branch: int
    num_items: int


def _find_place(node: _IndexNode, items: Any) -> _IndexPlace:
    nodes, place = [node], 0
    while place < len(items) and (branch := node.branches.get(items[place])) is not None:
        size = branch.end - branch.start
        common = count_equal(branch.items[branch.start : branch.end], items[place : place + size])
        place += common
        if common < size:
            return _IndexPlace(nodes, branch, common, place)
        node = branch.node
        nodes.append(node)
    return _IndexPlace(nodes, None, 0, place)


def _extend(node: _IndexNode, items: Any, value: Any) -> _IndexNode:
    """Return the node to which `items` lead from another one, made if there is none."""
    found = _find_place(node, items)
    node = found.nodes[-1]
    if (branch := found.branch) is not None:
        middle = branch.start + found.num_in_branch
        between = _IndexNode(branch.node.some_value)
        between.branches[branch.items[middle]] = branch._replace(start=middle)
        node.branches[branch.items[branch.start]] = branch._replace(end=middle, node=between)
        node = between
    if found.num_items < len(items):
        end = _IndexNode(value)
        node.branches[items[found.num_items]] = _IndexBranch(items, found.num_items, len(items), end)
        node = end
    return node


def count_equal(one: Sequence[Any], other: Sequence[Any]) -> int:
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
