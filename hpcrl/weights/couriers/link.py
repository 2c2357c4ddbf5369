"""The connection between couriers, over any transport.

ByteTransport                       the interface of transports: mpi_transport, tcp_transport
CourierConnection                   messages, chunks and polling over a transport; detects silent peers
MessageTag                          the kinds of small messages
ByteChunk, split_into_chunks        one bucket and its source - some bytes as chunks
ChunksInFlight                      transfers under way
DoneCheck                           polls an operation
"""

import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from enum import IntEnum
from typing import NamedTuple, Protocol, TypeVar

import msgspec

from hpcrl.weights.couriers.protocol import (
    BUCKET_NBYTES,
    CourierPeer,
    PeerWatch,
    VersionAnnouncement,
    split_into_buckets,
)

MAX_BUCKETS_IN_FLIGHT = 4
"""Full buckets under way on each link; of smaller chunks there are more, up to the same number of bytes."""
MAX_CHUNKS_IN_FLIGHT = 64
PULSE_INTERVAL_S = 0.5
LINK_POLL_INTERVAL_S = 0.001
IDLE_INTERVAL_S = 0.002
LONG_IDLE_INTERVAL_S = 0.02
"""The pause of a courier that has had nothing to do for `LONG_IDLE_AFTER_S`: each look costs CPU time of its node."""
LONG_IDLE_AFTER_S = 1.0
NAP_RANGE_S = (1e-5, 3e-4)
SPIN_S = 1e-4
"""The time for which a bucket is polled without naps after a poll that has moved some of it."""
MAX_SPIN_S = 0.1
"""The time after which a bucket is polled with naps in any case: its peer may be stuck, or idle polls slow."""
MOVED_S = 5e-6
"""A poll that takes as long has moved bytes: MPI does that nowhere else, and over sockets a few kB with each poll."""

T = TypeVar("T")
DoneCheck = Callable[[], bool]
"""Returns True once an operation is complete; WeightsError if it has failed."""


class MessageTag(IntEnum):
    """The kind of a small message."""

    ANNOUNCE = 1
    PULSE = 2
    REPORT = 3
    OFFER = 4


class ByteChunk(NamedTuple):
    """A bucket of a transfer."""

    data: memoryview
    source: int | None = None
    """The rank that sends it; None: it is here."""


class ByteTransport(Protocol):
    """The interface of transports: no method waits, and a buffer must not change until its operation is done."""

    rank: int

    def send_message(self, message: bytes, *, to: int, tag: MessageTag) -> DoneCheck:
        """Send a small message."""
        ...

    def poll_messages(self, tag: MessageTag) -> Iterator[tuple[int, bytes]]:
        """Yield the small messages received, each with its sender's rank."""
        ...

    def send(self, chunk: memoryview, *, to: int) -> DoneCheck:
        """Send a bucket; those to one rank arrive in order."""
        ...

    def receive(self, chunk: memoryview, *, source: int) -> DoneCheck:
        """Receive the next bucket from a rank."""
        ...


class CourierConnection:
    """The connection of one courier to the others."""

    def __init__(self, transport: ByteTransport, *, watch: PeerWatch) -> None:
        self.transport = transport
        self.watch = watch
        self.send_pulse: Callable[[], None] = lambda: None
        self.read_messages: Callable[[], None] = lambda: None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="aside")
        self._unfinished_updates: dict[tuple[int, MessageTag], DoneCheck] = {}
        self._next_poll = self._next_pulse = 0.0
        self._last_message = time.monotonic()

    def send_message(self, rank: int, tag: MessageTag, message: bytes) -> None:
        """Send a small message: all work starts or ends with one."""
        self._last_message = time.monotonic()
        self.wait_until(self.transport.send_message(message, to=rank, tag=tag))

    def send_update(self, rank: int, tag: MessageTag, message: bytes) -> None:
        """Send a small message without waiting; drop it while the previous one is still under way."""
        previous = self._unfinished_updates.get((rank, tag))
        if previous is None or previous():
            self._unfinished_updates[rank, tag] = self.transport.send_message(message, to=rank, tag=tag)

    def poll_messages(self, tag: MessageTag) -> Iterator[tuple[CourierPeer, bytes]]:
        """Yield the messages received with this tag; each shows that its sender is alive."""
        for rank, message in self.transport.poll_messages(tag):
            peer = self.watch.peers[rank]
            peer.last_received = time.monotonic()
            yield peer, message

    def read_announcements(self) -> list[VersionAnnouncement]:
        """Return the announcements received; with them, the pulses received are taken."""
        for _ in self.poll_messages(MessageTag.PULSE):
            pass
        messages = self.poll_messages(MessageTag.ANNOUNCE)
        return [msgspec.json.decode(message, type=VersionAnnouncement) for _, message in messages]

    def poll(self) -> None:
        """Read messages, send a pulse, and detect stuck peers."""
        self.read_messages()
        now = time.monotonic()
        self._next_poll = now + LINK_POLL_INTERVAL_S
        if now >= self._next_pulse:
            self._next_pulse = now + PULSE_INTERVAL_S
            self.send_pulse()
            self.watch.check(now=now)

    def wait_until(self, done: DoneCheck, *, spin_s: float = 0.0) -> None:
        """Wait until an operation is done; RankStuckError if a peer holds it up.

        After a poll that has moved bytes it is polled without naps for `spin_s`; other processes may have the core.
        """
        nap, longest = NAP_RANGE_S
        before = last_moved = time.monotonic()
        spin_end = before + MAX_SPIN_S
        while not done():
            now = time.monotonic()
            if spin_s and now - before >= MOVED_S:
                last_moved, nap = now, NAP_RANGE_S[0]
            if now >= self._next_poll:
                self.poll()
            if now - last_moved < spin_s and now < spin_end:
                os.sched_yield()
            else:
                time.sleep(nap)
                nap = min(nap * 1.5, longest)
            before = time.monotonic()

    def rest(self) -> None:
        """Pause until the next look for work; longer if there has been none for a while."""
        is_long = time.monotonic() - self._last_message > LONG_IDLE_AFTER_S
        time.sleep(LONG_IDLE_INTERVAL_S if is_long else IDLE_INTERVAL_S)

    def run_in_thread(self, work: Callable[[], T]) -> T:
        """Run long work in a thread, so that pulses are still sent meanwhile."""
        return self.wait_for_result(self._thread.submit(work))

    def wait_for_result(self, future: "Future[T]") -> T:
        """Wait for the result of a thread."""
        self.wait_until(future.done)
        return future.result()

    def stream(
        self,
        chunks: Iterable[ByteChunk],
        *,
        target: int | None,
        on_moved: Callable[[memoryview], None] = lambda _: None,
    ) -> None:
        """Transfer all chunks, in order: each from its source if it has one, to `target` if there is one.

        `on_moved` is called for each chunk once it is received, or, if it has no source, once it is sent.
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
        """Wait for the chunk that was posted first, and return it."""
        self.wait_until(in_flight.chunks[0][1], spin_s=SPIN_S)
        return in_flight.popleft()

    def _finish_send(self, outgoing: "ChunksInFlight", on_moved: Callable[[memoryview], None]) -> None:
        chunk = self._finish_first(outgoing)
        if chunk.source is None:
            on_moved(chunk.data)


class ChunksInFlight:
    """The chunks under way, in the order they were posted."""

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
    """Split all of `data` into buckets."""
    return (ByteChunk(data[bucket], source) for bucket in split_into_buckets(len(data)))
