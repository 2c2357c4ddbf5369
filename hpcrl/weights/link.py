"""How couriers reach each other, whatever carries the bytes.

Wire    carries bytes between ranks: mpi.py, tcp.py
Link    small messages, buckets and the naps between, over a wire; knows who has gone silent
"""

import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from enum import IntEnum
from typing import Protocol, TypeVar

from hpcrl.weights.transfer import Peer, Watch, buckets

DEPTH = 4
"""Buckets under way on each link."""
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

    def result(self, future: "Future[T]") -> T:
        """What a thread of ours has made, once it has."""
        self.until(future.done)
        return future.result()

    def stream(
        self, data: memoryview, *, source: int | None, target: int | None, arrived: Callable[[int], None]
    ) -> None:
        """Move all buckets of `data`: from `source` if there is one, to `target` if there is one."""
        pieces = [data[bucket] for bucket in buckets(len(data))]
        unposted = deque() if source is None else deque((piece, source) for piece in pieces)
        coming: deque[Done] = deque()
        going: deque[Done] = deque()
        num_bytes = 0
        for piece in pieces:
            while unposted and len(coming) < DEPTH:
                buffer, sender = unposted.popleft()
                coming.append(self.wire.receive(buffer, source=sender))
            if coming:
                self.until(coming.popleft())
                num_bytes += len(piece)
                arrived(num_bytes)
            if target is not None:
                if len(going) == DEPTH:
                    self.until(going.popleft())
                going.append(self.wire.send(piece, to=target))
        while going:
            self.until(going.popleft())
