"""The courier of a node that is not the trainer's: takes buckets into its window, passes them on, checks them."""

import os
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import NoReturn

import msgspec

from hpcrl.errors import WeightsError
from hpcrl.events import EventLog
from hpcrl.rundir import JobDir
from hpcrl.weights import codec
from hpcrl.weights.checksums import HASH_THREADS
from hpcrl.weights.intake import Intake
from hpcrl.weights.link import Link, Piece, Tag, pieces_of
from hpcrl.weights.transfer import Announcement, LostError, NoRoomError, Report, buckets
from hpcrl.weights.versions import Manifest
from hpcrl.weights.window import Key, Window

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
            self._events.emit("fault", what="courier", detail=str(error), version=announced.version)
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
        codec.apply(memoryview(delta), slot, announced.layout, base=announced.base)
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
