"""The courier beside the trainer: sees a new version, announces it, sends it down the chain of nodes that lack it.

If all of them have the version before it, which is the trainer's other slot, a delta to that one may be sent. The
trainer waits for no encoding: a base that it overwrites meanwhile is a reason to send the version in full.
"""

import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple, NoReturn

import msgspec

from hpcrl.errors import WeightsError
from hpcrl.events import EventLog
from hpcrl.rundir import JobDir
from hpcrl.weights import codec
from hpcrl.weights.codec import CodecName
from hpcrl.weights.link import Link, Tag
from hpcrl.weights.pace import Codec, Pace
from hpcrl.weights.transfer import Announcement, LostError, Report, Standing, deadline_s
from hpcrl.weights.versions import Manifest
from hpcrl.weights.window import Key, Window

IDLE_NAP_S = 0.002
RETRY_S = 0.2
"""Before a version that could not be read is tried again."""


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

    def __init__(self, key: Key, link: Link, *, job: JobDir, events: EventLog, standing: Path, codec: Codec) -> None:
        self._key, self._link, self._job, self._events = key, link, job, events
        self._standing = standing
        self._peers = link.watch.peers
        self._pace = Pace(wants=codec)
        self._window: Window | None = None
        self._num_transfers = 0
        self._failed_delta: int | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="deltas")
        link.pulse, link.hear = self._pulse, self._hear

    def serve(self) -> NoReturn:
        """Send every new version to whoever lacks it, for ever."""
        self._link.until(lambda: all(peer.greeted for peer in self._peers.values()))
        self._stand()
        while True:
            self._link.attend()
            manifest = self._newest()
            chain = [rank for rank, peer in self._peers.items() if manifest and peer.has < manifest.version]
            if manifest is None or not chain:
                time.sleep(IDLE_NAP_S)
            elif self._send(manifest, chain=tuple(chain)):
                self._stand()

    def _stand(self) -> None:
        """Tell the driver that all are here, and what all have."""
        nodes = ", ".join(sorted({self._key.node, *(peer.node for peer in self._peers.values())}))
        carried = min((peer.has for peer in self._peers.values()), default=-1)
        standing = Standing(
            ready=True, reason=f"one courier each on {nodes}", carried=carried if carried >= 0 else None
        )
        standing.write(self._standing)

    def _newest(self) -> Manifest | None:
        """The trainer makes its window when it first publishes, and perhaps another one after a restart."""
        if self._window is not None and not self._window.is_current():
            self._window.close()
            self._window = None
        if self._window is None:
            self._window = Window.open(self._key, job=self._job.number)
        return self._window.newest() if self._window is not None else None

    def _send(self, manifest: Manifest, *, chain: tuple[int, ...]) -> bool:
        """Bring a version to all of `chain`; False if it has to be tried again."""
        assert self._window is not None
        began = time.monotonic()
        try:
            with self._window.unchecked(manifest.version) as data:
                load = self._link.result(self._thread.submit(self._load, manifest.version, data, chain))
                announced = self._announcement(manifest, load, chain=chain)
                self._carry(announced, load, deadline=began + deadline_s(len(data)))
            self._check_arrived(announced)  # it was not overwritten: it has to be right
        except LostError:
            raise
        except WeightsError as error:
            self._events.emit("fault", what="courier", detail=str(error), version=manifest.version)
            again = time.monotonic() + RETRY_S
            self._link.until(lambda: time.monotonic() >= again)
            return False
        finally:
            self._link.watch.end()
        self._sent(announced, load, wall_s=time.monotonic() - began)
        return True

    def _load(self, version: int, data: memoryview, chain: tuple[int, ...]) -> Load:
        """What to send: differences from a version that all of the chain have, if that pays, else all of it."""
        assert self._window is not None
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
                delta = codec.encode(old, data, self._window.layout, base=base, version=version)
        except WeightsError as error:
            return Load(data, None, str(error))
        if delta is None:
            self._pace.was_too_large()
            return Load(data, None, "a delta would not be smaller")
        return Load(delta, base, choice.reason)

    def _announcement(self, manifest: Manifest, load: Load, *, chain: tuple[int, ...]) -> Announcement:
        assert self._window is not None
        self._num_transfers += 1
        return Announcement(
            version=manifest.version,
            step=manifest.step,
            layout=self._window.layout,
            checksums=manifest.checksums,
            chain=chain,
            number=self._num_transfers,
            base=load.base,
            nbytes=len(load.data),
        )

    def _carry(self, announced: Announcement, load: Load, *, deadline: float) -> None:
        """Announce it, send it, and wait until everybody has it, whole or not."""
        link, message = self._link, msgspec.json.encode(announced)
        link.watch.begin(announced, deadline=deadline)
        for rank in announced.chain:
            link.tell(rank, Tag.ANNOUNCE, message)
        link.stream(memoryview(load.data), source=None, target=announced.chain[0], arrived=lambda _: None)
        peers, version = [self._peers[rank] for rank in announced.chain], announced.version
        link.until(lambda: all(peer.has >= version or peer.damaged == announced.number for peer in peers))

    def _check_arrived(self, announced: Announcement) -> None:
        """WeightsError: a delta has to be followed by the whole. LostError: that did not help, or was it already."""
        peers = [self._peers[rank] for rank in announced.chain]
        damaged = ", ".join(peer.node for peer in peers if peer.damaged == announced.number)
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

    def _sent(self, announced: Announcement, load: Load, *, wall_s: float) -> None:
        """Everybody has it."""
        if announced.base is None:
            self._pace.was_full(announced.nbytes, wall_s)
        else:
            self._pace.was_delta(announced.nbytes, wall_s)
        self._events.emit(
            "courier",
            version=announced.version,
            bytes=announced.layout.nbytes,
            sent_bytes=announced.nbytes,
            wall_s=round(wall_s, 4),
            codec=load.codec,
            reason=load.reason,
            to=[self._peers[rank].node for rank in announced.chain],
        )

    def _pulse(self) -> None:
        if self._job.drain.exists():
            os._exit(0)
        self._events.beat()
        for rank in self._peers:
            self._link.hint(rank, Tag.PULSE, b".")

    def _hear(self) -> None:
        for peer, message in self._link.heard(Tag.REPORT):
            report = msgspec.json.decode(message, type=Report)
            peer.greeted, peer.has, peer.nbytes, peer.damaged = True, report.has, report.nbytes, report.damaged
