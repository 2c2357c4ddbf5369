"""A version on its way into a slot: its bytes are put where they belong, and checked while they are in the cache.

Sums      checksums of some boxes of a part, taken while their bytes arrive
Intake    all parts of a version, one after the other
"""

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Lock

import xxhash

from hpcrl.errors import WeightsError
from hpcrl.weights.checksums import for_each_tensor, sum_of
from hpcrl.weights.layout import Layout, Placed
from hpcrl.weights.link import Piece
from hpcrl.weights.messages import Message, messages, spread
from hpcrl.weights.transfer import Part

MOST_PRIVATE = 4
"""So many pieces are in memory of their own while they wait to be spread."""


class Sums:
    """Checksums of some boxes of a part, taken while their bytes arrive and are still in the cache."""

    def __init__(self, boxes: Iterable[Placed], *, ended: Callable[[Placed], None]) -> None:
        """`ended` hears of each box whose bytes are all here."""
        self.done: dict[str, bytes] = {}
        self._left = deque(boxes)
        self._hash = xxhash.xxh3_128()
        self._ended = ended

    def take(self, start: int, data: memoryview) -> None:
        """The part's bytes from `start` on are these; what is between two calls is of no box."""
        stop = start + len(data)
        while self._left:
            box = self._left[0]
            first, end = max(start, box.offset), box.offset + box.nbytes
            if first < min(stop, end):
                self._hash.update(data[first - start : min(stop, end) - start])
            if stop < end:
                return
            self._left.popleft()
            self.done[box.name] = self._hash.digest()
            self._hash.reset()
            self._ended(box)


class Intake:
    """One version; each lane, a thread, takes the checksums of its share of the boxes."""

    def __init__(
        self, slot: memoryview, layout: Layout, parts: Sequence[Part], *, lanes: Sequence[ThreadPoolExecutor]
    ) -> None:
        self._slot, self._layout, self._parts, self._lanes = slot, layout, parts, lanes
        self._shares = [
            [Sums(part.layout.tensors[i :: len(lanes)], ended=self._box_ended) for i in range(len(lanes))]
            for part in parts
        ]
        self._messages = [messages(part.layout, layout) for part in parts]
        self._tensors = layout.by_name()
        self._missing = self._in_runs()
        self._lock = Lock()
        self._joined: dict[str, bytes] = {}
        """Checksums of tensors that came in several boxes."""
        self._expected: deque[tuple[int, Message]] = deque()
        self._pending: list[Future[None]] = []
        self._private: deque[Future[None]] = deque()
        """What the lanes still have to do with pieces in memory of their own."""

    def pieces(self, *, source: int | None) -> Iterator[Piece]:
        """Where everything goes, in the order in which it comes: from `source`, or each part from its own if None.

        What has to be spread comes into memory of its own, which is made when it is about to come.
        """
        for number, part in enumerate(self._parts):
            for message in self._messages[number]:
                self._expected.append((number, message))
                nbytes, at = message.stop - message.start, message.at
                data = memoryview(bytearray(nbytes)) if at is None else self._slot[at : at + nbytes]
                yield Piece(data, part.source if source is None else source)

    def came(self, data: memoryview) -> None:
        """The next piece is here."""
        number, message = self._expected.popleft()
        if message.at is None:
            self._pending.append(self._lanes[0].submit(self._spread, number, message, data))
        self._take(number, message.start, data)
        if message.at is None:
            self._private += self._pending[-len(self._lanes) :]

    def has_room(self) -> bool:
        """Are the lanes so far that there is no more than a few pieces in memory of their own?"""
        while self._private and self._private[0].done():
            self._private.popleft()
        return len(self._private) <= MOST_PRIVATE * len(self._lanes)

    def pending(self) -> list["Future[None]"]:
        """What has to end before `settle`."""
        return self._pending

    def settle(self) -> tuple[dict[str, str], list[bytes]]:
        """What the checksums of all tensors should be, and, in order, what they are.

        WeightsError if a box is not what its source has; a tensor that came in several is right if these are.
        """
        wanted: dict[str, str] = {}
        seen = dict(self._joined)
        for part, shares in zip(self._parts, self._shares, strict=True):
            for share in shares:
                share.take(part.layout.nbytes, memoryview(b""))  # the last ones may have no bytes
            done = {name: digest for share in shares for name, digest in share.done.items()}
            boxes = {box.name: box for box in part.layout.tensors if box.cut is not None}
            wanted |= {name: checksum for name, checksum in part.checksums.items() if name not in boxes}
            seen |= {name: digest for name, digest in done.items() if name not in boxes}
            for name in boxes:
                _check(name, done[name].hex(), part)

        def sum_up(_: int, tensor: Placed) -> None:
            if tensor.name not in seen:
                self._joined[tensor.name] = sum_of(self._slot, tensor)

        if len(seen) < len(self._layout.tensors):
            for_each_tensor(self._layout, sum_up)
        wanted |= {name: digest.hex() for name, digest in self._joined.items()}
        seen |= self._joined
        return wanted, [seen[tensor.name] for tensor in self._layout.tensors]

    def _in_runs(self) -> Counter[str]:
        """How many boxes there are of each tensor that comes in several, and that nothing of has to be spread."""
        boxes = Counter(box.shard.name for part in self._parts for box in part.layout.tensors if box.cut is not None)
        for part, cut in zip(self._parts, self._messages, strict=True):
            for message in cut:
                if message.at is None:
                    boxes.pop(part.layout.tensors[message.box].shard.name, None)
        return boxes

    def _box_ended(self, box: Placed) -> None:
        """With its last box a tensor is there, and its checksum is taken while others arrive."""
        name = box.shard.name
        with self._lock:
            self._missing[name] -= 1
            is_last = self._missing[name] == 0
        if is_last:
            self._joined[name] = sum_of(self._slot, self._tensors[name])

    def _take(self, number: int, start: int, data: memoryview) -> None:
        for lane, share in zip(self._lanes, self._shares[number], strict=True):
            self._pending.append(lane.submit(share.take, start, data))

    def _spread(self, number: int, message: Message, data: memoryview) -> None:
        box = self._parts[number].layout.tensors[message.box]
        spread(data, message, box=box, tensor=self._tensors[box.shard.name], slot=self._slot)


def _check(name: str, seen: str, part: Part) -> None:
    if seen != (wanted := part.checksums.get(name)):
        raise WeightsError(
            f"box {name!r} of rank {part.source} arrived with checksum {seen}, {wanted} was sent: it was damaged, or "
            "changed, on the way; the version before it stays in use"
        )
