"""How couriers reach each other, whatever carries the bytes.

Wire    carries bytes between ranks: mpi.py, tcp.py
Piece   one bucket, and where it comes from
Link    small messages, buckets and the naps between, over a wire; knows who has gone silent
"""

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from enum import IntEnum
from typing import NamedTuple, Protocol, TypeVar

from hpcrl.weights.couriers.protocol import BUCKET_NBYTES, Peer, Watch, buckets

DEPTH = 4
"""Buckets under way on each link; of smaller pieces more, so that as many bytes are."""
MOST_UNDER_WAY = 64
PULSE_S = 0.5
HEAR_EVERY_S = 0.001
NAPS_S = (1e-5, 3e-4)

T = TypeVar("T")
Done = Callable[[], bool]
"""Has it come to its end? Asked until it has; WeightsError if it cannot any more."""


class Tag(IntEnum):
    """What a small message is."""

    ANNOUNCE = 1
    PULSE = 2
    REPORT = 3
    OFFER = 4


class Piece(NamedTuple):
    """One bucket of what is moved."""

    data: memoryview
    source: int | None = None
    """Who it comes from; None: it is here."""


class Wire(Protocol):
    """Carries bytes between ranks; nothing here waits. What was handed over stays untouched until it is done."""

    rank: int

    def tell(self, message: bytes, *, to: int, tag: Tag) -> Done:
        """Send a small message."""
        ...

    def heard(self, tag: Tag) -> Iterator[tuple[int, bytes]]:
        """The small messages that have come in, and from whom."""
        ...

    def send(self, piece: memoryview, *, to: int) -> Done:
        """Send a bucket; those to one rank arrive in order."""
        ...

    def receive(self, piece: memoryview, *, source: int) -> Done:
        """Take the next bucket from a rank."""
        ...


class Link:
    """The other couriers, as seen from this one."""

    def __init__(self, wire: Wire, *, watch: Watch) -> None:
        self.wire = wire
        self.watch = watch
        self.pulse: Callable[[], None] = lambda: None
        self.hear: Callable[[], None] = lambda: None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="aside")
        self._hints: dict[tuple[int, Tag], Done] = {}
        self._next_hearing = self._next_pulse = 0.0

    def tell(self, rank: int, tag: Tag, message: bytes) -> None:
        """Send a small message."""
        self.until(self.wire.tell(message, to=rank, tag=tag))

    def hint(self, rank: int, tag: Tag, message: bytes) -> None:
        """As `tell`, but without waiting, and dropped while the hint before it is still on its way."""
        before = self._hints.get((rank, tag))
        if before is None or before():
            self._hints[rank, tag] = self.wire.tell(message, to=rank, tag=tag)

    def heard(self, tag: Tag) -> Iterator[tuple[Peer, bytes]]:
        """What has come in with this tag; whoever said it is alive."""
        for rank, message in self.wire.heard(tag):
            peer = self.watch.peers[rank]
            peer.heard = time.monotonic()
            yield peer, message

    def attend(self) -> None:
        """Hear the others, say that we are here, and notice who is not."""
        self.hear()
        now = time.monotonic()
        self._next_hearing = now + HEAR_EVERY_S
        if now >= self._next_pulse:
            self._next_pulse = now + PULSE_S
            self.pulse()
            self.watch.check(now=now)

    def until(self, done: Done) -> None:
        """Wait for something; StuckError if that is in vain."""
        nap, longest = NAPS_S
        while not done():
            if time.monotonic() >= self._next_hearing:
                self.attend()
            time.sleep(nap)
            nap = min(nap * 1.5, longest)

    def aside(self, work: Callable[[], T]) -> T:
        """Do in a thread what may take long, so that the others do not take us for gone."""
        return self.result(self._thread.submit(work))

    def result(self, future: "Future[T]") -> T:
        """What a thread of ours has made, once it has."""
        self.until(future.done)
        return future.result()

    def stream(
        self, pieces: Iterable[Piece], *, target: int | None, moved: Callable[[memoryview], None] = lambda _: None
    ) -> None:
        """Move all pieces, in order: each from its source if it has one, to `target` if there is one.

        `moved` hears of each that has come in, or, where none comes in, has gone.
        """
        unposted, coming, going = iter(pieces), UnderWay(), UnderWay()
        while True:
            while not coming.is_full() and (piece := next(unposted, None)) is not None:
                coming.append(piece, self._expected(piece))
            if not coming.pieces:
                break
            piece = self._next(coming)
            if piece.source is not None:
                moved(piece.data)
            if target is not None:
                while going.is_full():
                    self._gone(going, moved)
                going.append(piece, self.wire.send(piece.data, to=target))
        while going.pieces:
            self._gone(going, moved)

    def _expected(self, piece: Piece) -> Done:
        return (lambda: True) if piece.source is None else self.wire.receive(piece.data, source=piece.source)

    def _next(self, under_way: "UnderWay") -> Piece:
        """The first that was posted, once it is done."""
        self.until(under_way.pieces[0][1])
        return under_way.popleft()

    def _gone(self, going: "UnderWay", moved: Callable[[memoryview], None]) -> None:
        piece = self._next(going)
        if piece.source is None:
            moved(piece.data)


class UnderWay:
    """Pieces that were posted one after the other."""

    def __init__(self) -> None:
        self.pieces: deque[tuple[Piece, Done]] = deque()
        self._nbytes = 0

    def is_full(self) -> bool:
        return self._nbytes >= DEPTH * BUCKET_NBYTES or len(self.pieces) >= MOST_UNDER_WAY

    def append(self, piece: Piece, done: Done) -> None:
        self.pieces.append((piece, done))
        self._nbytes += len(piece.data)

    def popleft(self) -> Piece:
        piece, _ = self.pieces.popleft()
        self._nbytes -= len(piece.data)
        return piece


def pieces_of(data: memoryview, *, source: int | None = None) -> Iterator[Piece]:
    """All of `data`, in buckets."""
    return (Piece(data[bucket], source) for bucket in buckets(len(data)))
