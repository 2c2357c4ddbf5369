"""The courier of a node that is not the trainer's: takes buckets into its window, passes them on, checks them.

Sums        checksums of some tensors, taken while their bytes arrive
Receiver    writes the window from which the engines of its node read
"""

import os
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NoReturn

import msgspec
import xxhash

from hpcrl.errors import WeightsError
from hpcrl.events import EventLog
from hpcrl.rundir import JobDir
from hpcrl.weights import codec
from hpcrl.weights.checksums import HASH_THREADS
from hpcrl.weights.layout import Placed
from hpcrl.weights.link import Link, Tag
from hpcrl.weights.transfer import Announcement, LostError, NoRoomError, Report, buckets
from hpcrl.weights.versions import Manifest
from hpcrl.weights.window import Key, Window

NUM_LANES = max(HASH_THREADS // 2, 1)
"""Threads that take checksums while the wire, which copies too, has a core of its own."""
IDLE_NAP_S = 0.002
Finish = Callable[[], Manifest]
"""Makes visible what has come; WeightsError if that is not what was announced."""


class Sums:
    """Checksums of some tensors, taken while their bytes arrive and are still in the cache."""

    def __init__(self, slot: memoryview, tensors: Iterable[Placed]) -> None:
        self.done: dict[str, bytes] = {}
        self._slot = slot
        self._left = deque(tensors)
        self._hash = xxhash.xxh3_128()
        self._reached = 0

    def take(self, num_bytes: int) -> None:
        """The slot holds its first `num_bytes` now."""
        while self._left:
            tensor = self._left[0]
            start, end = max(self._reached, tensor.offset), tensor.offset + tensor.nbytes
            if num_bytes > start:
                self._reached = min(num_bytes, end)
                self._hash.update(self._slot[start : self._reached])
            if num_bytes < end:
                return
            self._left.popleft()
            self.done[tensor.name] = self._hash.digest()
            self._hash.reset()


class Receiver:
    """Its window is touched by one thread at a time: while one prepares a slot, reports tell what was known before."""

    def __init__(self, key: Key, link: Link, *, job: JobDir, events: EventLog) -> None:
        self._key, self._link, self._job, self._events = key, link, job, events
        [self._source] = link.watch.peers.values()
        self._window = Window.open(key, job=job.number)
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
            link.result(self._threads[0].submit(finish))
            self._has = announced.version
        except (LostError, NoRoomError):
            raise
        except WeightsError as error:  # the trainer may have overwritten it meanwhile: the sender knows
            self._damaged = announced.number
            self._events.emit("fault", what="courier", detail=str(error), version=announced.version)
        link.tell(self._source.rank, Tag.REPORT, self._report())
        link.watch.end()

    def _take_whole(self, announced: Announcement) -> Finish:
        """Every bucket straight into the slot, its checksums taken meanwhile."""
        link = self._link
        window, slot = link.result(self._threads[0].submit(self._begin, announced))  # may wait for a reader
        shares = [Sums(slot, announced.layout.tensors[index::NUM_LANES]) for index in range(NUM_LANES)]
        pending: list[Future[None]] = []

        def arrived(num_bytes: int) -> None:
            self._came(num_bytes)
            for thread, share in zip(self._threads, shares, strict=True):
                pending.append(thread.submit(share.take, num_bytes))

        arrived(0)
        self._stream(slot, announced, arrived)
        for future in pending:
            link.result(future)
        sums = {name: digest for share in shares for name, digest in share.done.items()}
        in_order = [sums[tensor.name] for tensor in announced.layout.tensors]
        return lambda: window.commit(announced.checksums, sums=in_order)

    def _take_delta(self, announced: Announcement) -> Finish:
        """To private memory, for its base is not touched: it becomes the new version in the other slot."""
        delta = bytearray(announced.nbytes)
        self._stream(memoryview(delta), announced, self._came)
        return lambda: self._apply(delta, announced)

    def _apply(self, delta: bytearray, announced: Announcement) -> Manifest:
        assert announced.base is not None, "it is a delta"
        window, slot = self._begin(announced)
        with window.glancing(announced.base) as old:  # nobody but us writes here
            for piece in buckets(len(slot)):  # a copy holds the GIL
                slot[piece] = old[piece]
        codec.apply(memoryview(delta), slot, announced.layout, base=announced.base)
        return window.commit(announced.checksums)

    def _stream(self, data: memoryview, announced: Announcement, arrived: Callable[[int], None]) -> None:
        place = announced.chain.index(self._link.wire.rank)
        before, _, after = (self._source.rank, *announced.chain, None)[place:][:3]
        self._link.stream(data, source=before, target=after, arrived=arrived)

    def _came(self, num_bytes: int) -> None:
        self._arrived = self._source.nbytes = num_bytes

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
