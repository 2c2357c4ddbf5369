"""A version on its way into a slot: its bytes are put where they belong, and checked while they are in the cache.

Sums      checksums of some boxes of a part, taken while their bytes arrive
Intake    all parts of a version, one after the other

The courier of a node that is not the trainer's: takes buckets into its window, passes them on, checks them.
"""

import os
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Lock
from typing import NoReturn

import msgspec

from hpcrl.campaign_dir.event_log import EventLog
from hpcrl.campaign_dir.events import FaultReported
from hpcrl.campaign_dir.paths import JobDir
from hpcrl.errors import WeightsError
from hpcrl.weights.checksum import start_hash
from hpcrl.weights.couriers import delta_codec
from hpcrl.weights.couriers.link import Link, Piece, Tag, pieces_of
from hpcrl.weights.couriers.protocol import Announcement, LostError, NoRoomError, Part, Report, buckets
from hpcrl.weights.couriers.spans import Message, messages, spread
from hpcrl.weights.layout import Layout, Placed
from hpcrl.weights.versions import Manifest
from hpcrl.weights.window.file import HASH_THREADS, Key, for_each_tensor, sum_of
from hpcrl.weights.window.window import Window

MOST_PRIVATE = 4
"""So many pieces are in memory of their own while they wait to be spread."""


class Sums:
    """Checksums of some boxes of a part, taken while their bytes arrive and are still in the cache."""

    def __init__(self, boxes: Iterable[Placed], *, ended: Callable[[Placed], None]) -> None:
        """`ended` hears of each box whose bytes are all here."""
        self.done: dict[str, bytes] = {}
        self._left = deque(boxes)
        self._hash = start_hash()
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


NUM_LANES = max(HASH_THREADS // 2, 1)
"""Threads that take checksums while the wire, which copies too, has a core of its own."""
IDLE_NAP_S = 0.002
Finish = Callable[[], Manifest]
"""Makes visible what has come; WeightsError if that is not what was announced."""


class Receiver:
    """Writes the window from which the engines of its node read.

    The window is touched by one thread at a time: while one prepares a slot, reports tell what was known before.
    """

    def __init__(self, key: Key, link: Link, *, job: JobDir, events: EventLog) -> None:
        self._key, self._link, self._job, self._events = key, link, job, events
        [self._source] = link.watch.peers.values()
        self._window = Window.open(key, job=job.number, touch=False)
        self._is_writer = False
        newest = None if self._window is None else self._window.newest()
        self._has = -1 if newest is None else newest.version
        self._damaged = -1
        self._arrived = 0
        self._threads = [ThreadPoolExecutor(1, thread_name_prefix="checksums") for _ in range(NUM_LANES)]
        self._announced: deque[Announcement] = deque()
        link.pulse, link.hear = self._pulse, self._hear

    def serve(self) -> NoReturn:
        """Take what is announced, for ever."""
        self._link.tell(self._source.rank, Tag.REPORT, self._report())
        while True:
            self._link.attend()
            if self._announced:
                self._receive(self._announced.popleft())
            else:
                time.sleep(IDLE_NAP_S)

    def _receive(self, announced: Announcement) -> None:
        """Take a version into the window and pass it on; one that did not become what was announced is dropped."""
        link = self._link
        link.watch.begin(announced)
        self._arrived = 0
        finish = self._take_whole(announced) if announced.base is None else self._take_delta(announced)
        try:
            link.aside(finish)
            self._has = announced.version
        except (LostError, NoRoomError):
            raise
        except WeightsError as error:  # the trainer may have overwritten it meanwhile: the sender knows
            self._damaged = announced.number
            self._events.emit(FaultReported(what="courier", detail=str(error), version=announced.version))
        link.tell(self._source.rank, Tag.REPORT, self._report())
        link.watch.end()

    def _take_whole(self, announced: Announcement) -> Finish:
        """Every bucket straight into the slot, its checksums taken meanwhile."""
        link = self._link
        window, slot = link.aside(lambda: self._begin(announced))  # may wait for a reader
        intake = Intake(slot, announced.layout, announced.parts_from(self._source.rank), lanes=self._threads)

        def moved(data: memoryview) -> None:
            self._came(len(data))
            intake.came(data)
            link.until(intake.has_room)

        self._stream(intake.pieces(source=self._before(announced)), announced, moved)
        for future in intake.pending():
            link.result(future)

        def finish() -> Manifest:
            checksums, sums = intake.settle()
            return window.commit(checksums, sums=sums)

        return finish

    def _take_delta(self, announced: Announcement) -> Finish:
        """To private memory, for its base is not touched: it becomes the new version in the other slot."""
        delta = bytearray(announced.nbytes)
        before = self._before(announced)
        pieces = pieces_of(memoryview(delta), source=self._source.rank if before is None else before)
        self._stream(pieces, announced, lambda data: self._came(len(data)))
        return lambda: self._apply(delta, announced)

    def _apply(self, delta: bytearray, announced: Announcement) -> Manifest:
        assert announced.base is not None, "it is a delta"
        window, slot = self._begin(announced)
        with window.glancing(announced.base) as old:  # nobody but us writes here
            for piece in buckets(len(slot)):  # a copy holds the GIL
                slot[piece] = old[piece]
        delta_codec.apply(memoryview(delta), slot, announced.layout, base=announced.base)
        return window.commit(announced.checksums)

    def _stream(self, pieces: Iterable[Piece], announced: Announcement, moved: Callable[[memoryview], None]) -> None:
        after = announced.chain[announced.chain.index(self._link.wire.rank) + 1 :]
        self._link.stream(pieces, target=after[0] if after else None, moved=moved)

    def _before(self, announced: Announcement) -> int | None:
        """The receiver that passes everything on to this one; None for the first, to which the sources send."""
        place = announced.chain.index(self._link.wire.rank)
        return announced.chain[place - 1] if place else None

    def _came(self, num_bytes: int) -> None:
        self._arrived += num_bytes
        self._source.nbytes = self._arrived

    def _begin(self, announced: Announcement) -> tuple[Window, memoryview]:
        """The slot to fill, in a window that is ours to write and of this layout."""
        window = self._window
        if window is None or not self._is_writer or window.layout != announced.layout or not window.is_current():
            if window is not None:
                window.close()
            window = self._create(announced)
            self._window, self._is_writer = window, True
        return window, window.begin(announced.version, step=announced.step)

    def _create(self, announced: Announcement) -> Window:
        try:
            return Window.create(self._key, announced.layout, job=self._job)
        except WeightsError as error:
            if isinstance(error.__cause__, OSError):
                raise NoRoomError(f"node {self._key.node}: {error}") from error
            raise

    def _report(self) -> bytes:
        return msgspec.json.encode(Report(has=self._has, nbytes=self._arrived, damaged=self._damaged))

    def _pulse(self) -> None:
        if self._job.drain.exists():
            self._leave()
        self._events.beat()
        self._link.hint(self._source.rank, Tag.REPORT, self._report())

    def _leave(self) -> NoReturn:
        """Nobody needs another version, nor this window."""
        for thread in self._threads:
            thread.shutdown(cancel_futures=True)
        if self._window is not None:
            self._window.unlink()
        os._exit(0)

    def _hear(self) -> None:
        for _ in self._link.heard(Tag.PULSE):
            pass
        for _, message in self._link.heard(Tag.ANNOUNCE):
            self._announced.append(msgspec.json.decode(message, type=Announcement))
