"""The courier beside the trainer: it finds a new version, announces it, and sends it along the chain of nodes.

    VersionSender    the courier; it reads the trainer's window
    TransferPayload  the bytes sent of a version

If the trainer is on several nodes, the couriers of the others contribute: a version is announced once each of them
has offered its part, and each part is sent from its own node. Otherwise, if all receivers have the version in the
trainer's other slot, a delta to that one may be sent. The trainer never waits for encoding: if it overwrites the base
meanwhile, the version is sent in full.
"""

import os
import time
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple, NoReturn

import msgspec

from hpcrl.campaign_dir.event_log import EventLog
from hpcrl.campaign_dir.events import FaultReported, VersionDelivered
from hpcrl.campaign_dir.paths import JobDir
from hpcrl.config.site import CodecSetting
from hpcrl.errors import WeightsError
from hpcrl.system.file_watch import NameWatch
from hpcrl.weights.couriers import delta_codec
from hpcrl.weights.couriers.codec_choice import CodecChooser
from hpcrl.weights.couriers.delta_codec import CodecName
from hpcrl.weights.couriers.link import ByteChunk, CourierConnection, MessageTag, split_into_chunks
from hpcrl.weights.couriers.protocol import (
    CourierReport,
    CourierStatus,
    NodePart,
    PartOffer,
    RankLostError,
    VersionAnnouncement,
    compute_time_limit_s,
)
from hpcrl.weights.couriers.spans import split_into_spans
from hpcrl.weights.layout import join_layouts
from hpcrl.weights.versions import VersionManifest
from hpcrl.weights.window.file import WindowKey
from hpcrl.weights.window.window import VersionGoneError, Window

VERSION_RETRY_INTERVAL_S = 0.2
"""The wait before a version that could not be sent is tried again."""
MAX_SKIPPED = 5
"""Versions in a row that the trainer may overwrite before they are sent, until it is reported."""
MAX_OFFERS = 2
"""Offers kept of each contributor: a window holds two versions."""


class TransferPayload(NamedTuple):
    """The bytes sent of a version: all of it, or a delta."""

    data: bytes | memoryview
    base: int | None
    reason: str
    """The reason for this codec."""

    @property
    def codec(self) -> CodecName:
        return "full" if self.base is None else "delta"


class VersionSender:
    """The courier that reads the trainer's window, and never writes it."""

    def __init__(
        self,
        key: WindowKey,
        connection: CourierConnection,
        *,
        job: JobDir,
        events: EventLog,
        status_path: Path,
        codec: CodecSetting,
        contributors: Iterable[int] = (),
    ) -> None:
        """Set `contributors` to the ranks on the trainer's other nodes, in the trainer's order."""
        self._key, self._connection, self._job, self._events = key, connection, job, events
        self._requests = NameWatch(job.root)
        self._status_path = status_path
        self._contributors = tuple(contributors)
        self._peers = connection.watch.peers
        self._receivers = {rank: peer for rank, peer in self._peers.items() if rank not in self._contributors}
        self._offers: dict[int, dict[int, PartOffer]] = defaultdict(dict)
        """Offers by contributor and version."""
        self._codec_chooser = CodecChooser(setting=codec)
        self._window: Window | None = None
        self._num_transfers = 0
        self._num_skipped = 0
        self._failed_delta: int | None = None
        connection.send_pulse, connection.read_messages = self._send_pulse, self._read_messages

    def serve(self) -> NoReturn:
        """Send every new version to the receivers that lack it, forever."""
        self._connection.wait_until(lambda: all(peer.has_reported for peer in self._peers.values()))
        self._write_status()
        while True:
            self._connection.poll()
            manifest = self._newest_complete()
            chain = [
                rank for rank, peer in self._receivers.items() if manifest and peer.held_version < manifest.version
            ]
            if manifest is None or not chain:
                self._connection.rest()
            elif self._send_version(manifest, chain=tuple(chain)):
                self._write_status()

    def _write_status(self) -> None:
        """Write the status for the driver: all couriers are here, and the version that all have."""
        nodes = ", ".join(sorted({self._key.node, *(peer.node for peer in self._peers.values())}))
        carried = min((peer.held_version for peer in self._receivers.values()), default=-1)
        status = CourierStatus(
            ready=True, reason=f"one courier each on {nodes}", carried=carried if carried >= 0 else None
        )
        status.write(self._status_path)

    def _newest_complete(self) -> VersionManifest | None:
        """Return the newest version of which every node of the trainer has its part."""
        self._window = Window.reopen(self._window, self._key, job=self._job.number, touch=False)
        if self._window is None or not self._contributors:
            return self._window.newest() if self._window is not None else None
        everywhere = set(self._window.versions()).intersection(*(self._offers[rank] for rank in self._contributors))
        try:
            return self._window.manifest(max(everywhere)) if everywhere else None
        except WeightsError:  # it has just been overwritten
            return None

    def _send_version(self, manifest: VersionManifest, *, chain: tuple[int, ...]) -> bool:
        """Send a version to all of `chain`; return False if it must be tried again."""
        assert self._window is not None
        start = time.monotonic()
        try:
            with self._window.read_unchecked(manifest.version) as data:
                parts = self._list_parts(manifest)
                payload = self._connection.run_in_thread(
                    lambda: self._choose_payload(manifest.version, data, chain, parts)
                )
                announcement = self._make_announcement(manifest, payload, chain=chain, parts=parts)
                self._transfer(announcement, payload, deadline=start + compute_time_limit_s(announcement.layout.nbytes))
            self._check_arrived(announcement)  # it was not overwritten, so it must have arrived intact
        except RankLostError:
            raise
        except VersionGoneError as error:
            return self._skip_version(manifest, error)
        except WeightsError as error:
            self._events.emit(FaultReported(what="courier", detail=str(error), version=manifest.version))
            retry_at = time.monotonic() + VERSION_RETRY_INTERVAL_S
            self._connection.wait_until(lambda: time.monotonic() >= retry_at)
            return False
        finally:
            self._connection.watch.end_transfer()
        self._num_skipped = 0
        self._record_transfer(announcement, payload, wall_s=time.monotonic() - start)
        return True

    def _skip_version(self, manifest: VersionManifest, error: VersionGoneError) -> bool:
        """Leave a version to which the trainer has preferred a newer one; report it if that happens again and again."""
        assert self._window is not None
        if self._window.newest() == manifest:  # nothing is newer: its writer has not released it yet
            self._connection.rest()
            return False
        self._num_skipped += 1
        if self._num_skipped % MAX_SKIPPED == 0:
            detail = f"{MAX_SKIPPED} versions in a row were overwritten before they were sent, the last: {error}"
            self._events.emit(FaultReported(what="courier", detail=detail, version=manifest.version))
        return False

    def _list_parts(self, manifest: VersionManifest) -> tuple[NodePart, ...]:
        """List the parts of a version and their sources; empty if all of it is here."""
        assert self._window is not None
        own = NodePart(source=self._connection.transport.rank, layout=self._window.layout, checksums=manifest.checksums)
        offers = [(rank, self._offers[rank][manifest.version]) for rank in self._contributors]
        others = [NodePart(source=rank, layout=offer.layout, checksums=offer.checksums) for rank, offer in offers]
        parts = tuple(part for part in (own, *others) if part.layout.tensors)
        return () if parts == (own,) else parts

    def _choose_payload(
        self, version: int, data: memoryview, chain: tuple[int, ...], parts: tuple[NodePart, ...]
    ) -> TransferPayload:
        """Choose what to send: a delta to a version that all of the chain have, if that is faster, else all of it."""
        assert self._window is not None
        if parts:
            return TransferPayload(data, None, "the trainer's ranks are on several nodes")
        if self._codec_chooser.setting == "full":
            return TransferPayload(data, None, 'site.mpi.codec = "full"')
        bases = {self._peers[rank].held_version for rank in chain}
        base = min(bases)
        if len(bases) > 1 or base not in self._window.versions():
            return TransferPayload(data, None, "the receivers have no version in common that is still in the window")
        if self._failed_delta == version:
            return TransferPayload(data, None, f"the delta to version {base} gave a wrong result")
        try:
            with self._window.read_optimistic(base) as old:
                choice = self._codec_chooser.choose(self._window.layout, old, data)
                if choice.codec == "full":
                    return TransferPayload(data, None, choice.reason)
                delta = delta_codec.encode_delta(old, data, self._window.layout, base=base, version=version)
        except WeightsError as error:
            return TransferPayload(data, None, str(error))
        if delta is None:
            self._codec_chooser.record_oversize()
            return TransferPayload(data, None, "a delta would not be smaller")
        return TransferPayload(delta, base, choice.reason)

    def _make_announcement(
        self,
        manifest: VersionManifest,
        payload: TransferPayload,
        *,
        chain: tuple[int, ...],
        parts: tuple[NodePart, ...],
    ) -> VersionAnnouncement:
        """Make the announcement of a version; WeightsError if the parts do not make up the whole."""
        assert self._window is not None
        self._num_transfers += 1
        return VersionAnnouncement(
            version=manifest.version,
            step=manifest.step,
            layout=join_layouts([part.layout for part in parts]) if parts else self._window.layout,
            checksums={} if parts else manifest.checksums,
            chain=chain,
            number=self._num_transfers,
            base=payload.base,
            nbytes=sum(part.layout.nbytes for part in parts) if parts else len(payload.data),
            parts=parts,
        )

    def _transfer(self, announcement: VersionAnnouncement, payload: TransferPayload, *, deadline: float) -> None:
        """Announce a version, send it, and wait until all have it, whole or damaged."""
        connection, message = self._connection, msgspec.json.encode(announcement)
        others = [part.source for part in announcement.parts if part.source != connection.transport.rank]
        connection.watch.start_transfer(announcement, deadline=deadline)
        for rank in (*announcement.chain, *others):
            connection.send_message(rank, MessageTag.ANNOUNCE, message)
        connection.stream(self._own_chunks(announcement, memoryview(payload.data)), target=announcement.chain[0])
        receivers, contributors = ([self._peers[rank] for rank in ranks] for ranks in (announcement.chain, others))
        version, number = announcement.version, announcement.number
        connection.wait_until(
            lambda: all(peer.held_version >= version or peer.damaged_transfer == number for peer in receivers)
        )
        connection.wait_until(lambda: all(peer.ended_transfer == number for peer in contributors))

    def _own_chunks(self, announcement: VersionAnnouncement, data: memoryview) -> Iterable[ByteChunk]:
        """Yield the chunks that are sent from here."""
        if not announcement.parts:
            return split_into_chunks(data)
        own_parts = [part for part in announcement.parts if part.source == self._connection.transport.rank]
        spans = [span for part in own_parts for span in split_into_spans(part.layout, announcement.layout)]
        return (ByteChunk(data[span.start : span.stop]) for span in spans)

    def _check_arrived(self, announcement: VersionAnnouncement) -> None:
        """Raise WeightsError if a transfer must be repeated, RankLostError if a full version arrived damaged."""
        overwritten = [part.source for part in announcement.parts if self._is_damaged(part.source, announcement)]
        damaged = ", ".join(
            self._peers[rank].node for rank in announcement.chain if self._is_damaged(rank, announcement)
        )
        for rank in overwritten:
            self._offers[rank].pop(announcement.version, None)
        if damaged and overwritten:
            nodes = ", ".join(self._peers[rank].node for rank in overwritten)
            raise WeightsError(
                f"version {announcement.version} was overwritten on {nodes} before its part was sent: "
                "the newest is sent instead"
            )
        if damaged and announcement.base is not None:
            self._failed_delta = announcement.version
            raise WeightsError(
                f"the delta from version {announcement.base} did not become version {announcement.version} "
                f"on {damaged}: it is sent in full"
            )
        if damaged:
            raise RankLostError(
                f"version {announcement.version} arrived damaged on {damaged}, and was not overwritten in "
                f"{self._key.path}; the couriers are restarted"
            )

    def _is_damaged(self, rank: int, announcement: VersionAnnouncement) -> bool:
        return rank in self._peers and self._peers[rank].damaged_transfer == announcement.number

    def _record_transfer(self, announcement: VersionAnnouncement, payload: TransferPayload, *, wall_s: float) -> None:
        """Record a transfer, now that all have the version."""
        if announcement.base is None:
            self._codec_chooser.record_full(announcement.nbytes, wall_s)
        else:
            self._codec_chooser.record_delta(announcement.nbytes, wall_s)
        self._events.emit(
            VersionDelivered(
                version=announcement.version,
                bytes=announcement.layout.nbytes,
                sent_bytes=announcement.nbytes,
                wall_s=round(wall_s, 4),
                codec=payload.codec,
                reason=payload.reason,
                to=[self._peers[rank].node for rank in announcement.chain],
                sources=[
                    self._node_of(part.source) for part in announcement.parts_from(self._connection.transport.rank)
                ],
            )
        )

    def _node_of(self, rank: int) -> str:
        return self._key.node if rank == self._connection.transport.rank else self._peers[rank].node

    def _send_pulse(self) -> None:
        if self._job.drain.name in self._requests.names():
            os._exit(0)
        self._events.beat()
        CourierStatus.touch(self._status_path)
        for rank in self._peers:
            self._connection.send_update(rank, MessageTag.PULSE, b".")

    def _read_messages(self) -> None:
        for peer, message in self._connection.poll_messages(MessageTag.REPORT):
            report = msgspec.json.decode(message, type=CourierReport)
            peer.has_reported, peer.held_version, peer.nbytes = True, report.has, report.nbytes
            peer.damaged_transfer, peer.ended_transfer = report.damaged, report.ended
        for peer, message in self._connection.poll_messages(MessageTag.OFFER):
            offers, offer = self._offers[peer.rank], msgspec.json.decode(message, type=PartOffer)
            offers[offer.version] = offer
            for version in sorted(offers)[:-MAX_OFFERS]:
                del offers[version]
