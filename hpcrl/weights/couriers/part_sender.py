"""The courier of another node of the trainer: it offers its part of every version, and sends it on request."""

import os
from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import NoReturn

import msgspec

from hpcrl.campaign_dir.event_log import EventLog
from hpcrl.campaign_dir.events import FaultReported
from hpcrl.campaign_dir.paths import JobDir
from hpcrl.errors import WeightsError
from hpcrl.system.file_watch import NameWatch
from hpcrl.weights.couriers.link import ByteChunk, CourierConnection, MessageTag
from hpcrl.weights.couriers.protocol import CourierReport, NodePart, PartOffer, RankLostError, VersionAnnouncement
from hpcrl.weights.couriers.spans import split_into_spans
from hpcrl.weights.window.file import WindowKey
from hpcrl.weights.window.window import Window


class PartSender:
    """The courier that reads the part of the trainer's ranks on this node from their window, and never writes it."""

    def __init__(self, key: WindowKey, connection: CourierConnection, *, job: JobDir, events: EventLog) -> None:
        self._key, self._connection, self._job, self._events = key, connection, job, events
        self._requests = NameWatch(job.root)
        [self._sender] = connection.watch.peers.values()
        self._window: Window | None = None
        self._offered_version = -1
        self._sent_nbytes = 0
        self._damaged_transfer = self._ended_transfer = -1
        self._announcements: deque[VersionAnnouncement] = deque()
        connection.send_pulse, connection.read_messages = self._send_pulse, self._read_messages

    def serve(self) -> NoReturn:
        """Offer and send parts forever."""
        self._connection.send_message(self._sender.rank, MessageTag.REPORT, self._encode_report())
        while True:
            self._connection.poll()
            if self._announcements:
                self._send_part(self._announcements.popleft())
            elif not self._offer_newest():
                self._connection.rest()

    def _offer_newest(self) -> bool:
        """Offer a new version to the sender; return False if there is none."""
        window = self._newest_window()
        manifest = None if window is None else window.newest()
        if window is None or manifest is None or manifest.version == self._offered_version:
            return False
        offer = PartOffer(version=manifest.version, layout=window.layout, checksums=manifest.checksums)
        self._connection.send_message(self._sender.rank, MessageTag.OFFER, msgspec.json.encode(offer))
        self._offered_version = manifest.version
        return True

    def _send_part(self, announcement: VersionAnnouncement) -> None:
        """Send this node's part.

        If it is or becomes overwritten, the same number of other bytes is sent: the receivers wait for them, and
        their checksums fail.
        """
        self._connection.watch.start_transfer(announcement)
        self._sent_nbytes = 0
        [part] = [part for part in announcement.parts if part.source == self._connection.transport.rank]
        spans = split_into_spans(part.layout, announcement.layout)
        try:
            with self._hold_part(announcement.version, part) as data:
                self._stream_chunks((data[span.start : span.stop] for span in spans), announcement)
        except RankLostError:
            raise
        except WeightsError as error:
            self._damaged_transfer = announcement.number
            self._events.emit(FaultReported(what="courier", detail=str(error), version=announcement.version))
            if not self._sent_nbytes:  # the part was already gone
                blank = memoryview(bytes(max(span.stop - span.start for span in spans)))
                self._stream_chunks((blank[: span.stop - span.start] for span in spans), announcement)
        self._sent_nbytes, self._ended_transfer = part.layout.nbytes, announcement.number
        self._connection.send_message(self._sender.rank, MessageTag.REPORT, self._encode_report())
        self._connection.watch.end_transfer()

    def _hold_part(self, version: int, part: NodePart) -> AbstractContextManager[memoryview]:
        """Hold the part of a version while it is sent."""
        window = self._newest_window()
        if window is None or window.layout != part.layout:
            raise WeightsError(f"version {version} is not in {self._key.path} any more: the newest is sent instead")
        return window.read_unchecked(version)

    def _newest_window(self) -> Window | None:
        """Open the window, which the trainer creates with the first version, and perhaps again after a restart."""
        self._window = Window.reopen(self._window, self._key, job=self._job.number, touch=False)
        return self._window

    def _stream_chunks(self, chunks: Iterator[memoryview], announcement: VersionAnnouncement) -> None:
        self._connection.stream(map(ByteChunk, chunks), target=announcement.chain[0], on_moved=self._count_sent)

    def _count_sent(self, data: memoryview) -> None:
        self._sent_nbytes += len(data)

    def _encode_report(self) -> bytes:
        return msgspec.json.encode(
            CourierReport(nbytes=self._sent_nbytes, damaged=self._damaged_transfer, ended=self._ended_transfer)
        )

    def _send_pulse(self) -> None:
        if self._job.drain.name in self._requests.names():
            os._exit(0)
        self._events.beat()
        self._connection.send_update(self._sender.rank, MessageTag.REPORT, self._encode_report())

    def _read_messages(self) -> None:
        self._announcements.extend(self._connection.read_announcements())
