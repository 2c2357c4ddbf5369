"""The courier beside the trainer: sees a new version, announces it, sends it down the chain of nodes that lack it.

Where the trainer is on several nodes, the others' couriers contribute: a version is announced once each of them has
offered its part, and every part comes from where it lies. Else, if all receivers have the version before it, which is
the trainer's other slot, a delta to that one may be sent. The trainer waits for no encoding: a base that it overwrites
meanwhile is a reason to send the version in full.
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
from hpcrl.errors import WeightsError
from hpcrl.weights.couriers import delta_codec
from hpcrl.weights.couriers.codec_choice import Codec, Pace
from hpcrl.weights.couriers.delta_codec import CodecName
from hpcrl.weights.couriers.link import Link, Piece, Tag, pieces_of
from hpcrl.weights.couriers.protocol import Announcement, LostError, Offer, Part, Report, Standing, deadline_s
from hpcrl.weights.couriers.spans import messages
from hpcrl.weights.layout import joined
from hpcrl.weights.versions import Manifest
from hpcrl.weights.window.file import Key
from hpcrl.weights.window.window import Window

IDLE_NAP_S = 0.002
RETRY_S = 0.2
"""Before a version that could not be read is tried again."""
NUM_OFFERS = 2
"""As many versions as a window holds are remembered of each contributor."""


class Load(NamedTuple):
    """What is sent of a version."""

    data: bytes | memoryview
    base: int | None
    reason: str
    """Why it is this and not the other codec."""

    @property
    def codec(self) -> CodecName:
        return "full" if self.base is None else "delta"


class Sender:
    """Reads the trainer's window and never writes it."""

    def __init__(
        self,
        key: Key,
        link: Link,
        *,
        job: JobDir,
        events: EventLog,
        standing: Path,
        codec: Codec,
        contributors: Iterable[int] = (),
    ) -> None:
        """`contributors`: the ranks on the trainer's other nodes, in its order."""
        self._key, self._link, self._job, self._events = key, link, job, events
        self._standing = standing
        self._contributors = tuple(contributors)
        self._peers = link.watch.peers
        self._receivers = {rank: peer for rank, peer in self._peers.items() if rank not in self._contributors}
        self._offers: dict[int, dict[int, Offer]] = defaultdict(dict)
        """By contributor and version."""
        self._pace = Pace(wants=codec)
        self._window: Window | None = None
        self._num_transfers = 0
        self._failed_delta: int | None = None
        link.pulse, link.hear = self._pulse, self._hear

    def serve(self) -> NoReturn:
        """Send every new version to whoever lacks it, for ever."""
        self._link.until(lambda: all(peer.greeted for peer in self._peers.values()))
        self._stand()
        while True:
            self._link.attend()
            manifest = self._newest()
            chain = [rank for rank, peer in self._receivers.items() if manifest and peer.has < manifest.version]
            if manifest is None or not chain:
                time.sleep(IDLE_NAP_S)
            elif self._send(manifest, chain=tuple(chain)):
                self._stand()

    def _stand(self) -> None:
        """Tell the driver that all are here, and what all have."""
        nodes = ", ".join(sorted({self._key.node, *(peer.node for peer in self._peers.values())}))
        carried = min((peer.has for peer in self._receivers.values()), default=-1)
        standing = Standing(
            ready=True, reason=f"one courier each on {nodes}", carried=carried if carried >= 0 else None
        )
        standing.write(self._standing)

    def _newest(self) -> Manifest | None:
        """The newest version of which every node of the trainer has its part."""
        self._window = Window.renewed(self._window, self._key, job=self._job.number, touch=False)
        if self._window is None or not self._contributors:
            return self._window.newest() if self._window is not None else None
        everywhere = set(self._window.versions()).intersection(*(self._offers[rank] for rank in self._contributors))
        try:
            return self._window.manifest(max(everywhere)) if everywhere else None
        except WeightsError:  # it is being overwritten just now
            return None

    def _send(self, manifest: Manifest, *, chain: tuple[int, ...]) -> bool:
        """Bring a version to all of `chain`; False if it has to be tried again."""
        assert self._window is not None
        began = time.monotonic()
        try:
            with self._window.unchecked(manifest.version) as data:
                parts = self._parts(manifest)
                load = self._link.aside(lambda: self._load(manifest.version, data, chain, parts))
                announced = self._announcement(manifest, load, chain=chain, parts=parts)
                self._carry(announced, load, deadline=began + deadline_s(announced.layout.nbytes))
            self._check_arrived(announced)  # it was not overwritten: it has to be right
        except LostError:
            raise
        except WeightsError as error:
            self._events.emit(FaultReported(what="courier", detail=str(error), version=manifest.version))
            again = time.monotonic() + RETRY_S
            self._link.until(lambda: time.monotonic() >= again)
            return False
        finally:
            self._link.watch.end()
        self._sent(announced, load, wall_s=time.monotonic() - began)
        return True

    def _parts(self, manifest: Manifest) -> tuple[Part, ...]:
        """What comes from where; nothing if all of it comes from here."""
        assert self._window is not None
        own = Part(source=self._link.wire.rank, layout=self._window.layout, checksums=manifest.checksums)
        offers = [(rank, self._offers[rank][manifest.version]) for rank in self._contributors]
        others = [Part(source=rank, layout=offer.layout, checksums=offer.checksums) for rank, offer in offers]
        parts = tuple(part for part in (own, *others) if part.layout.tensors)
        return () if parts == (own,) else parts

    def _load(self, version: int, data: memoryview, chain: tuple[int, ...], parts: tuple[Part, ...]) -> Load:
        """What to send: differences from a version that all of the chain have, if that pays, else all of it."""
        assert self._window is not None
        if parts:
            return Load(data, None, "the trainer's ranks are on several nodes")
        if self._pace.wants == "full":
            return Load(data, None, 'site.mpi.codec = "full"')
        bases = {self._peers[rank].has for rank in chain}
        base = min(bases)
        if len(bases) > 1 or base not in self._window.versions():
            return Load(data, None, "the receivers have no version in common that is still here")
        if self._failed_delta == version:
            return Load(data, None, f"the delta to version {base} did not become what it had to")
        try:
            with self._window.glancing(base) as old:
                choice = self._pace.choose(self._window.layout, old, data)
                if choice.codec == "full":
                    return Load(data, None, choice.reason)
                delta = delta_codec.encode(old, data, self._window.layout, base=base, version=version)
        except WeightsError as error:
            return Load(data, None, str(error))
        if delta is None:
            self._pace.was_too_large()
            return Load(data, None, "a delta would not be smaller")
        return Load(delta, base, choice.reason)

    def _announcement(
        self, manifest: Manifest, load: Load, *, chain: tuple[int, ...], parts: tuple[Part, ...]
    ) -> Announcement:
        """WeightsError if the parts do not make a whole."""
        assert self._window is not None
        self._num_transfers += 1
        return Announcement(
            version=manifest.version,
            step=manifest.step,
            layout=joined([part.layout for part in parts]) if parts else self._window.layout,
            checksums={} if parts else manifest.checksums,
            chain=chain,
            number=self._num_transfers,
            base=load.base,
            nbytes=sum(part.layout.nbytes for part in parts) if parts else len(load.data),
            parts=parts,
        )

    def _carry(self, announced: Announcement, load: Load, *, deadline: float) -> None:
        """Announce it, send it, and wait until everybody has it, whole or not."""
        link, message = self._link, msgspec.json.encode(announced)
        others = [part.source for part in announced.parts if part.source != link.wire.rank]
        link.watch.begin(announced, deadline=deadline)
        for rank in (*announced.chain, *others):
            link.tell(rank, Tag.ANNOUNCE, message)
        link.stream(self._pieces(announced, memoryview(load.data)), target=announced.chain[0])
        receivers, contributors = ([self._peers[rank] for rank in ranks] for ranks in (announced.chain, others))
        version, number = announced.version, announced.number
        link.until(lambda: all(peer.has >= version or peer.damaged == number for peer in receivers))
        link.until(lambda: all(peer.ended == number for peer in contributors))

    def _pieces(self, announced: Announcement, data: memoryview) -> Iterable[Piece]:
        """What goes from here."""
        if not announced.parts:
            return pieces_of(data)
        mine = [part for part in announced.parts if part.source == self._link.wire.rank]
        cut = [message for part in mine for message in messages(part.layout, announced.layout)]
        return (Piece(data[message.start : message.stop]) for message in cut)

    def _check_arrived(self, announced: Announcement) -> None:
        """WeightsError: a delta has to be followed by the whole. LostError: that did not help, or was it already."""
        gone = [part.source for part in announced.parts if self._is_damaged(part.source, announced)]
        damaged = ", ".join(self._peers[rank].node for rank in announced.chain if self._is_damaged(rank, announced))
        for rank in gone:
            self._offers[rank].pop(announced.version, None)
        if damaged and gone:
            nodes = ", ".join(self._peers[rank].node for rank in gone)
            raise WeightsError(
                f"version {announced.version} was overwritten on {nodes} before its part was sent: the newest is taken"
            )
        if damaged and announced.base is not None:
            self._failed_delta = announced.version
            raise WeightsError(
                f"the delta from version {announced.base} did not become version {announced.version} on {damaged}: it "
                "is sent in full"
            )
        if damaged:
            raise LostError(
                f"version {announced.version} arrived damaged on {damaged}, and nobody has touched it in "
                f"{self._key.path}; the couriers are started again"
            )

    def _is_damaged(self, rank: int, announced: Announcement) -> bool:
        return rank in self._peers and self._peers[rank].damaged == announced.number

    def _sent(self, announced: Announcement, load: Load, *, wall_s: float) -> None:
        """Everybody has it."""
        if announced.base is None:
            self._pace.was_full(announced.nbytes, wall_s)
        else:
            self._pace.was_delta(announced.nbytes, wall_s)
        self._events.emit(
            VersionDelivered(
                version=announced.version,
                bytes=announced.layout.nbytes,
                sent_bytes=announced.nbytes,
                wall_s=round(wall_s, 4),
                codec=load.codec,
                reason=load.reason,
                to=[self._peers[rank].node for rank in announced.chain],
                sources=[self._node_of(part.source) for part in announced.parts_from(self._link.wire.rank)],
            )
        )

    def _node_of(self, rank: int) -> str:
        return self._key.node if rank == self._link.wire.rank else self._peers[rank].node

    def _pulse(self) -> None:
        if self._job.drain.exists():
            os._exit(0)
        self._events.beat()
        Standing.beat(self._standing)
        for rank in self._peers:
            self._link.hint(rank, Tag.PULSE, b".")

    def _hear(self) -> None:
        for peer, message in self._link.heard(Tag.REPORT):
            report = msgspec.json.decode(message, type=Report)
            peer.greeted, peer.has, peer.nbytes = True, report.has, report.nbytes
            peer.damaged, peer.ended = report.damaged, report.ended
        for peer, message in self._link.heard(Tag.OFFER):
            offers, offer = self._offers[peer.rank], msgspec.json.decode(message, type=Offer)
            offers[offer.version] = offer
            for version in sorted(offers)[:-NUM_OFFERS]:
                del offers[version]
