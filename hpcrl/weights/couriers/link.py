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

from hpcrl.weights.couriers.protocol import BUCKET_NBYTES, CourierPeer, PeerWatch, split_into_buckets

MAX_BUCKETS_IN_FLIGHT = 4
"""Buckets under way on each link; of smaller pieces more, so that as many bytes are."""
MAX_CHUNKS_IN_FLIGHT = 64
PULSE_INTERVAL_S = 0.5
POLL_INTERVAL_S = 0.001
NAP_RANGE_S = (1e-5, 3e-4)

T = TypeVar("T")
DoneCheck = Callable[[], bool]
"""Has it come to its end? Asked until it has; WeightsError if it cannot any more."""


class MessageTag(IntEnum):
    """What a small message is."""

    ANNOUNCE = 1
    PULSE = 2
    REPORT = 3
    OFFER = 4


class ByteChunk(NamedTuple):
    """One bucket of what is moved."""

    data: memoryview
    source: int | None = None
    """Who it comes from; None: it is here."""


class ByteTransport(Protocol):
    """Carries bytes between ranks; nothing here waits. What was handed over stays untouched until it is done."""

    rank: int

    def send_message(self, message: bytes, *, to: int, tag: MessageTag) -> DoneCheck:
        """Send a small message."""
        ...

    def poll_messages(self, tag: MessageTag) -> Iterator[tuple[int, bytes]]:
        """The small messages that have come in, and from whom."""
        ...

    def send(self, chunk: memoryview, *, to: int) -> DoneCheck:
        """Send a bucket; those to one rank arrive in order."""
        ...

    def receive(self, chunk: memoryview, *, source: int) -> DoneCheck:
        """Take the next bucket from a rank."""
        ...


class CourierConnection:
    """The other couriers, as seen from this one."""

    def __init__(self, transport: ByteTransport, *, watch: PeerWatch) -> None:
        self.transport = transport
        self.watch = watch
        self.send_pulse: Callable[[], None] = lambda: None
        self.read_messages: Callable[[], None] = lambda: None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="aside")
        self._unfinished_updates: dict[tuple[int, MessageTag], DoneCheck] = {}
        self._next_poll = self._next_pulse = 0.0

    def send_message(self, rank: int, tag: MessageTag, message: bytes) -> None:
        """Send a small message."""
        self.wait_until(self.transport.send_message(message, to=rank, tag=tag))

    def send_update(self, rank: int, tag: MessageTag, message: bytes) -> None:
        """As `send_message`, but without waiting, and dropped while the hint before it is still on its way."""
        previous = self._unfinished_updates.get((rank, tag))
        if previous is None or previous():
            self._unfinished_updates[rank, tag] = self.transport.send_message(message, to=rank, tag=tag)

    def poll_messages(self, tag: MessageTag) -> Iterator[tuple[CourierPeer, bytes]]:
        """What has come in with this tag; whoever said it is alive."""
        for rank, message in self.transport.poll_messages(tag):
            peer = self.watch.peers[rank]
            peer.last_received = time.monotonic()
            yield peer, message

    def poll(self) -> None:
        """Hear the others, say that we are here, and notice who is not."""
        self.read_messages()
        now = time.monotonic()
        self._next_poll = now + POLL_INTERVAL_S
        if now >= self._next_pulse:
            self._next_pulse = now + PULSE_INTERVAL_S
            self.send_pulse()
            self.watch.check(now=now)

    def wait_until(self, done: DoneCheck) -> None:
        """Wait for something; StuckError if that is in vain."""
        nap, longest = NAP_RANGE_S
        while not done():
            if time.monotonic() >= self._next_poll:
                self.poll()
            time.sleep(nap)
            nap = min(nap * 1.5, longest)

    def run_in_thread(self, work: Callable[[], T]) -> T:
        """Do in a thread what may take long, so that the others do not take us for gone."""
        return self.wait_for_result(self._thread.submit(work))

    def wait_for_result(self, future: "Future[T]") -> T:
        """What a thread of ours has made, once it has."""
        self.wait_until(future.done)
        return future.result()

    def stream(
        self,
        chunks: Iterable[ByteChunk],
        *,
        target: int | None,
        on_moved: Callable[[memoryview], None] = lambda _: None,
    ) -> None:
        """Move all pieces, in order: each from its source if it has one, to `target` if there is one.

        `on_moved` hears of each that has come in, or, where none comes in, has gone.
        """
        unposted, incoming, outgoing = iter(chunks), ChunksInFlight(), ChunksInFlight()
        while True:
            while not incoming.is_full() and (chunk := next(unposted, None)) is not None:
                incoming.append(chunk, self._start_receive(chunk))
            if not incoming.chunks:
                break
            chunk = self._finish_first(incoming)
            if chunk.source is not None:
                on_moved(chunk.data)
            if target is not None:
                while outgoing.is_full():
                    self._finish_send(outgoing, on_moved)
                outgoing.append(chunk, self.transport.send(chunk.data, to=target))
        while outgoing.chunks:
            self._finish_send(outgoing, on_moved)

    def _start_receive(self, chunk: ByteChunk) -> DoneCheck:
        return (lambda: True) if chunk.source is None else self.transport.receive(chunk.data, source=chunk.source)

    def _finish_first(self, in_flight: "ChunksInFlight") -> ByteChunk:
        """The first that was posted, once it is done."""
        self.wait_until(in_flight.chunks[0][1])
        return in_flight.popleft()

    def _finish_send(self, outgoing: "ChunksInFlight", on_moved: Callable[[memoryview], None]) -> None:
        chunk = self._finish_first(outgoing)
        if chunk.source is None:
            on_moved(chunk.data)


class ChunksInFlight:
    """Pieces that were posted one after the other."""

    def __init__(self) -> None:
        self.chunks: deque[tuple[ByteChunk, DoneCheck]] = deque()
        self._nbytes = 0

    def is_full(self) -> bool:
        return self._nbytes >= MAX_BUCKETS_IN_FLIGHT * BUCKET_NBYTES or len(self.chunks) >= MAX_CHUNKS_IN_FLIGHT

    def append(self, chunk: ByteChunk, done: DoneCheck) -> None:
        self.chunks.append((chunk, done))
        self._nbytes += len(chunk.data)

    def popleft(self) -> ByteChunk:
        chunk, _ = self.chunks.popleft()
        self._nbytes -= len(chunk.data)
        return chunk


def split_into_chunks(data: memoryview, *, source: int | None = None) -> Iterator[ByteChunk]:
    """All of `data`, in buckets."""
    return (ByteChunk(data[bucket], source) for bucket in split_into_buckets(len(data)))
