"""The courier of a node without a trainer: it receives versions into its window, passes them on, and checks them.

VersionReceiver   the courier; it writes the window of its node
IncomingVersion   a version on its way into a slot: all its parts, one after the other
RunningChecksums  checksums of some shards of a part, computed while their bytes arrive
FinishVersion     make a received version visible
"""

import os
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
from hpcrl.system.file_watch import NameWatch
from hpcrl.system.processes import do_nothing
from hpcrl.weights.checksum import start_hash
from hpcrl.weights.couriers import delta_codec
from hpcrl.weights.couriers.link import ByteChunk, CourierConnection, MessageTag, split_into_chunks
from hpcrl.weights.couriers.protocol import (
    CourierReport,
    NodePart,
    NoRoomError,
    RankLostError,
    VersionAnnouncement,
    split_into_buckets,
)
from hpcrl.weights.couriers.spans import ByteSpan, scatter, split_into_spans
from hpcrl.weights.layout import TensorLayout, TensorSlot
from hpcrl.weights.versions import VersionManifest
from hpcrl.weights.window.file import NUM_HASH_THREADS, WindowKey, compute_checksum, process_tensors
from hpcrl.weights.window.window import Window

MAX_PRIVATE_PER_LANE = 4
"""The most chunks per lane that are in private memory while they wait to be scattered."""


class RunningChecksums:
    """The checksums of some shards of a part, computed while their bytes arrive and are still in the cache."""

    def __init__(self, shard_slots: Iterable[TensorSlot], *, on_shard_done: Callable[[TensorSlot], None]) -> None:
        """Call `on_shard_done` for each shard once all its bytes have arrived."""
        self.digests: dict[str, bytes] = {}
        self._remaining = deque(shard_slots)
        self._hash = start_hash()
        self._on_shard_done = on_shard_done

    def update(self, start: int, data: memoryview) -> None:
        """Add the part's bytes from `start` on; bytes left out between two calls belong to no shard."""
        stop = start + len(data)
        while self._remaining:
            shard_slot = self._remaining[0]
            first, end = max(start, shard_slot.offset), shard_slot.offset + shard_slot.nbytes
            if first < min(stop, end):
                self._hash.update(data[first - start : min(stop, end) - start])
            if stop < end:
                return
            self._remaining.popleft()
            self.digests[shard_slot.name] = self._hash.digest()
            self._hash.reset()
            self._on_shard_done(shard_slot)


class IncomingVersion:
    """A version that is being received; each lane, a thread, computes the checksums of its share of the shards."""

    def __init__(
        self, slot: memoryview, layout: TensorLayout, parts: Sequence[NodePart], *, lanes: Sequence[ThreadPoolExecutor]
    ) -> None:
        self._slot, self._layout, self._parts, self._lanes = slot, layout, parts, lanes
        self._shares = [
            [
                RunningChecksums(part.layout.tensors[i :: len(lanes)], on_shard_done=self._finish_shard)
                for i in range(len(lanes))
            ]
            for part in parts
        ]
        self._spans = [split_into_spans(part.layout, layout) for part in parts]
        self._tensors = layout.tensors_by_name()
        self._num_missing_shards = self._count_contiguous_shards()
        self._lock = Lock()
        self._joined_digests: dict[str, bytes] = {}
        """Checksums of tensors that arrive in several shards."""
        self._expected: deque[tuple[int, ByteSpan]] = deque()
        self._pending: list[Future[None]] = []
        self._private_work: deque[Future[None]] = deque()
        """The lanes' unfinished work on chunks in private memory."""

    def chunks(self, *, source: int | None) -> Iterator[ByteChunk]:
        """Yield the target of every chunk, in order of arrival: from `source`, or each part from its own if None.

        A chunk that must be scattered has private memory, which is allocated just before it arrives.
        """
        for number, part in enumerate(self._parts):
            for span in self._spans[number]:
                self._expected.append((number, span))
                nbytes, target_start = span.stop - span.start, span.target_start
                data = (
                    memoryview(bytearray(nbytes))
                    if target_start is None
                    else self._slot[target_start : target_start + nbytes]
                )
                yield ByteChunk(data, part.source if source is None else source)

    def add_chunk(self, data: memoryview) -> None:
        """Process the next chunk, which has arrived."""
        number, span = self._expected.popleft()
        if span.target_start is None:
            self._pending.append(self._lanes[0].submit(self._scatter_span, number, span, data))
        self._submit_checksums(number, span.start, data)
        if span.target_start is None:
            self._private_work += self._pending[-len(self._lanes) :]

    def has_room(self) -> bool:
        """Return True while only a few chunks in private memory wait for the lanes."""
        while self._private_work and self._private_work[0].done():
            self._private_work.popleft()
        return len(self._private_work) <= MAX_PRIVATE_PER_LANE * len(self._lanes)

    def list_pending(self) -> list["Future[None]"]:
        """Return the work that must end before `verify_checksums`."""
        return self._pending

    def verify_checksums(self) -> tuple[dict[str, str], list[bytes]]:
        """Return the expected checksums of all tensors, and the actual ones in order.

        WeightsError if a shard differs from its source's; a tensor in several shards is right if all of these are.
        """
        expected: dict[str, str] = {}
        actual = dict(self._joined_digests)
        for part, shares in zip(self._parts, self._shares, strict=True):
            for share in shares:
                share.update(part.layout.nbytes, memoryview(b""))  # the last shards may have no bytes
            done = {name: digest for share in shares for name, digest in share.digests.items()}
            shard_slots = {
                shard_slot.name: shard_slot for shard_slot in part.layout.tensors if shard_slot.cut is not None
            }
            expected |= {name: checksum for name, checksum in part.checksums.items() if name not in shard_slots}
            actual |= {name: digest for name, digest in done.items() if name not in shard_slots}
            for name in shard_slots:
                _check_shard(name, done[name].hex(), part)

        def compute_joined(_: int, tensor: TensorSlot) -> None:
            if tensor.name not in actual:
                self._joined_digests[tensor.name] = compute_checksum(self._slot, tensor)

        if len(actual) < len(self._layout.tensors):
            process_tensors(self._layout, compute_joined)
        expected |= {name: digest.hex() for name, digest in self._joined_digests.items()}
        actual |= self._joined_digests
        return expected, [actual[tensor.name] for tensor in self._layout.tensors]

    def _count_contiguous_shards(self) -> Counter[str]:
        """Count the shards of each tensor that arrives in several, none of which must be scattered."""
        shard_slots = Counter(
            shard_slot.shard.name
            for part in self._parts
            for shard_slot in part.layout.tensors
            if shard_slot.cut is not None
        )
        for part, spans in zip(self._parts, self._spans, strict=True):
            for span in spans:
                if span.target_start is None:
                    shard_slots.pop(part.layout.tensors[span.shard_index].shard.name, None)
        return shard_slots

    def _finish_shard(self, shard_slot: TensorSlot) -> None:
        """Compute a tensor's checksum after its last shard, while other tensors arrive."""
        name = shard_slot.shard.name
        with self._lock:
            self._num_missing_shards[name] -= 1
            is_last = self._num_missing_shards[name] == 0
        if is_last:
            self._joined_digests[name] = compute_checksum(self._slot, self._tensors[name])

    def _submit_checksums(self, number: int, start: int, data: memoryview) -> None:
        for lane, share in zip(self._lanes, self._shares[number], strict=True):
            self._pending.append(lane.submit(share.update, start, data))

    def _scatter_span(self, number: int, span: ByteSpan, data: memoryview) -> None:
        shard_slot = self._parts[number].layout.tensors[span.shard_index]
        scatter(data, span, shard_slot=shard_slot, tensor=self._tensors[shard_slot.shard.name], slot=self._slot)


def _check_shard(name: str, actual: str, part: NodePart) -> None:
    if actual != (expected := part.checksums.get(name)):
        raise WeightsError(
            f"shard {name!r} of rank {part.source} arrived with checksum {actual}, {expected} was sent: "
            "it was damaged, or changed, on the way; the version before it stays in use"
        )


NUM_LANES = max(NUM_HASH_THREADS // 2, 1)
"""Threads that compute checksums; the transport, which copies too, keeps a core for itself."""
FinishVersion = Callable[[], VersionManifest]
"""Makes a received version visible; WeightsError if it is not what was announced."""


class VersionReceiver:
    """The courier that writes the window from which the engines of its node read.

    One thread at a time accesses the window: while it prepares a slot, reports contain the last known values.
    """

    def __init__(
        self,
        key: WindowKey,
        connection: CourierConnection,
        *,
        job: JobDir,
        events: EventLog,
        on_received: Callable[[], object] = do_nothing,
    ) -> None:
        """Call `on_received` once a version can be read on this node."""
        self._on_received = on_received
        self._key, self._connection, self._job, self._events = key, connection, job, events
        self._requests = NameWatch(job.root)
        [self._source] = connection.watch.peers.values()
        self._window = Window.open(key, job=job.number, touch=False)
        self._is_writer = False
        newest = None if self._window is None else self._window.newest()
        self._held_version = -1 if newest is None else newest.version
        self._damaged_transfer = -1
        self._arrived_nbytes = 0
        self._threads = [ThreadPoolExecutor(1, thread_name_prefix="checksums") for _ in range(NUM_LANES)]
        self._announcements: deque[VersionAnnouncement] = deque()
        connection.send_pulse, connection.read_messages = self._send_pulse, self._read_messages

    def serve(self) -> NoReturn:
        """Receive announced versions forever."""
        self._connection.send_message(self._source.rank, MessageTag.REPORT, self._encode_report())
        while True:
            self._connection.poll()
            if self._announcements:
                self._receive_version(self._announcements.popleft())
            else:
                self._connection.rest()

    def _receive_version(self, announcement: VersionAnnouncement) -> None:
        """Receive a version into the window and pass it on; one that is not as announced is dropped."""
        connection = self._connection
        connection.watch.start_transfer(announcement)
        self._arrived_nbytes = 0
        finish = self._receive_full(announcement) if announcement.base is None else self._receive_delta(announcement)
        try:
            connection.run_in_thread(finish)
            self._held_version = announcement.version
            self._on_received()
        except (RankLostError, NoRoomError):
            raise
        except WeightsError as error:  # the trainer may have overwritten it meanwhile: the sender checks that
            self._damaged_transfer = announcement.number
            self._events.emit(FaultReported(what="courier", detail=str(error), version=announcement.version))
        connection.send_message(self._source.rank, MessageTag.REPORT, self._encode_report())
        connection.watch.end_transfer()

    def _receive_full(self, announcement: VersionAnnouncement) -> FinishVersion:
        """Receive every bucket directly into the slot, and compute checksums meanwhile."""
        connection = self._connection
        window, slot = connection.run_in_thread(lambda: self._start_version(announcement))  # may wait for a reader
        incoming = IncomingVersion(
            slot, announcement.layout, announcement.parts_from(self._source.rank), lanes=self._threads
        )

        def on_moved(data: memoryview) -> None:
            self._count_arrived(len(data))
            incoming.add_chunk(data)
            connection.wait_until(incoming.has_room)

        self._stream_chunks(incoming.chunks(source=self._previous_rank(announcement)), announcement, on_moved)
        for future in incoming.list_pending():
            connection.wait_for_result(future)

        def finish() -> VersionManifest:
            checksums, sums = incoming.verify_checksums()
            return window.commit(checksums, sums=sums)

        return finish

    def _receive_delta(self, announcement: VersionAnnouncement) -> FinishVersion:
        """Receive a delta into private memory; it is applied to a copy of its base in the other slot."""
        delta = bytearray(announcement.nbytes)
        previous = self._previous_rank(announcement)
        chunks = split_into_chunks(memoryview(delta), source=self._source.rank if previous is None else previous)
        self._stream_chunks(chunks, announcement, lambda data: self._count_arrived(len(data)))
        return lambda: self._apply_delta(delta, announcement)

    def _apply_delta(self, delta: bytearray, announcement: VersionAnnouncement) -> VersionManifest:
        assert announcement.base is not None, "it is a delta"
        window, slot = self._start_version(announcement)
        with window.read_optimistic(announcement.base) as old:  # no other process writes here
            for bucket in split_into_buckets(len(slot)):  # a copy holds the GIL
                slot[bucket] = old[bucket]
        delta_codec.apply_delta(memoryview(delta), slot, announcement.layout, base=announcement.base)
        return window.commit(announcement.checksums)

    def _stream_chunks(
        self, chunks: Iterable[ByteChunk], announcement: VersionAnnouncement, on_moved: Callable[[memoryview], None]
    ) -> None:
        after = announcement.chain[announcement.chain.index(self._connection.transport.rank) + 1 :]
        self._connection.stream(chunks, target=after[0] if after else None, on_moved=on_moved)

    def _previous_rank(self, announcement: VersionAnnouncement) -> int | None:
        """Return the receiver that passes everything on to this one; None for the first, to which the sources send."""
        place = announcement.chain.index(self._connection.transport.rank)
        return announcement.chain[place - 1] if place else None

    def _count_arrived(self, num_bytes: int) -> None:
        self._arrived_nbytes += num_bytes
        self._source.nbytes = self._arrived_nbytes

    def _start_version(self, announcement: VersionAnnouncement) -> tuple[Window, memoryview]:
        """Return a slot to fill, in a window of this layout that this process writes."""
        window = self._window
        if window is None or not self._is_writer or window.layout != announcement.layout or not window.is_current():
            if window is not None:
                window.close()
            window = self._create_window(announcement)
            self._window, self._is_writer = window, True
        return window, window.start_version(announcement.version, step=announcement.step)

    def _create_window(self, announcement: VersionAnnouncement) -> Window:
        try:
            return Window.create(self._key, announcement.layout, job=self._job)
        except WeightsError as error:
            if isinstance(error.__cause__, OSError):
                raise NoRoomError(f"node {self._key.node}: {error}") from error
            raise

    def _encode_report(self) -> bytes:
        return msgspec.json.encode(
            CourierReport(has=self._held_version, nbytes=self._arrived_nbytes, damaged=self._damaged_transfer)
        )

    def _send_pulse(self) -> None:
        if self._job.drain.name in self._requests.names():
            self.exit_process()
        self._events.beat()
        self._connection.send_update(self._source.rank, MessageTag.REPORT, self._encode_report())

    def exit_process(self) -> NoReturn:
        """Remove the window, which is not needed any more, and exit."""
        for thread in self._threads:
            thread.shutdown(cancel_futures=True)
        if self._window is not None:
            self._window.unlink()
        os._exit(0)

    def _read_messages(self) -> None:
        self._announcements.extend(self._connection.read_announcements())
