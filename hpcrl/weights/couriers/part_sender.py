"""The courier of another node of the trainer: offers its part of every version, and sends it when it is told to."""

import os
import time
from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import NoReturn

import msgspec

from hpcrl.campaign_dir.event_log import EventLog
from hpcrl.campaign_dir.events import FaultReported
from hpcrl.campaign_dir.paths import JobDir
from hpcrl.errors import WeightsError
from hpcrl.weights.couriers.link import Link, Piece, Tag
from hpcrl.weights.couriers.protocol import Announcement, LostError, Offer, Part, Report
from hpcrl.weights.couriers.spans import messages
from hpcrl.weights.window.file import Key
from hpcrl.weights.window.window import Window

IDLE_NAP_S = 0.002


class Contributor:
    """Reads the window in which the trainer's ranks on this node keep their part, and never writes it."""

    def __init__(self, key: Key, link: Link, *, job: JobDir, events: EventLog) -> None:
        self._key, self._link, self._job, self._events = key, link, job, events
        [self._sender] = link.watch.peers.values()
        self._window: Window | None = None
        self._offered = -1
        self._gone = 0
        self._damaged = self._ended = -1
        self._announced: deque[Announcement] = deque()
        link.pulse, link.hear = self._pulse, self._hear

    def serve(self) -> NoReturn:
        """Offer and send, for ever."""
        self._link.tell(self._sender.rank, Tag.REPORT, self._report())
        while True:
            self._link.attend()
            if self._announced:
                self._contribute(self._announced.popleft())
            elif not self._offer():
                time.sleep(IDLE_NAP_S)

    def _offer(self) -> bool:
        """Tell the sender of a new version; False if there is none."""
        window = self._newest_window()
        manifest = None if window is None else window.newest()
        if window is None or manifest is None or manifest.version == self._offered:
            return False
        offer = Offer(version=manifest.version, layout=window.layout, checksums=manifest.checksums)
        self._link.tell(self._sender.rank, Tag.OFFER, msgspec.json.encode(offer))
        self._offered = manifest.version
        return True

    def _contribute(self, announced: Announcement) -> None:
        """Send this node's part.

        Where it is gone, or goes meanwhile, as many other bytes are sent: the receivers wait for them, and find out.
        """
        self._link.watch.begin(announced)
        self._gone = 0
        [part] = [part for part in announced.parts if part.source == self._link.wire.rank]
        cut = messages(part.layout, announced.layout)
        try:
            with self._held(announced.version, part) as data:
                self._stream((data[message.start : message.stop] for message in cut), announced)
        except LostError:
            raise
        except WeightsError as error:
            self._damaged = announced.number
            self._events.emit(FaultReported(what="courier", detail=str(error), version=announced.version))
            if not self._gone:  # it was not there to begin with
                blank = memoryview(bytes(max(message.stop - message.start for message in cut)))
                self._stream((blank[: message.stop - message.start] for message in cut), announced)
        self._gone, self._ended = part.layout.nbytes, announced.number
        self._link.tell(self._sender.rank, Tag.REPORT, self._report())
        self._link.watch.end()

    def _held(self, version: int, part: Part) -> AbstractContextManager[memoryview]:
        """The part of a version, kept while it is sent."""
        window = self._newest_window()
        if window is None or window.layout != part.layout:
            raise WeightsError(f"version {version} is not in {self._key.path} any more: the newest is taken")
        return window.unchecked(version)

    def _newest_window(self) -> Window | None:
        """The trainer makes its window with the first version, and perhaps another one after a restart."""
        self._window = Window.renewed(self._window, self._key, job=self._job.number, touch=False)
        return self._window

    def _stream(self, pieces: Iterator[memoryview], announced: Announcement) -> None:
        self._link.stream(map(Piece, pieces), target=announced.chain[0], moved=self._went)

    def _went(self, data: memoryview) -> None:
        self._gone += len(data)

    def _report(self) -> bytes:
        return msgspec.json.encode(Report(nbytes=self._gone, damaged=self._damaged, ended=self._ended))

    def _pulse(self) -> None:
        if self._job.drain.exists():
            os._exit(0)
        self._events.beat()
        self._link.hint(self._sender.rank, Tag.REPORT, self._report())

    def _hear(self) -> None:
        for _ in self._link.heard(Tag.PULSE):
            pass
        for _, message in self._link.heard(Tag.ANNOUNCE):
            self._announced.append(msgspec.json.decode(message, type=Announcement))
