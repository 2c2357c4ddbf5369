"""One process a node carries versions from the trainer's window into the windows of all other nodes, over MPI.

`python -m hpcrl.weights.courier CAMPAIGN JOB NODES SOURCE`, as many ranks as NODES (a,b,c) has names; SOURCE is the
trainer's node. Ranks know each other by node, never by number. Nothing here blocks inside MPI: every request is
polled with naps, so that couriers leave the cores to others, hear each other meanwhile, and notice who is stuck.
Any failure ends the whole step; the driver starts it again, and the newest version is sent again.

    Sender      the trainer's node: sees a new version, announces it, sends it down the chain of nodes that lack it
    Receiver    any other node: takes buckets into its window, passes them on, checks them while they arrive
"""

import argparse
import faulthandler
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn, TypeVar

import mpi4py
import msgspec
import xxhash

from hpcrl.endpoints import this_node
from hpcrl.errors import WeightsError
from hpcrl.events import EventLog
from hpcrl.processes import die_with_parent
from hpcrl.rundir import JobDir, RunDir
from hpcrl.weights.layout import Placed
from hpcrl.weights.transfer import (
    SILENT_S,
    Announcement,
    Peer,
    Report,
    Standing,
    StuckError,
    Watch,
    buckets,
    deadline_s,
)
from hpcrl.weights.versions import Manifest
from hpcrl.weights.window import HASH_THREADS, Key, Window

mpi4py.rc.initialize = False  # only under the watchdog
mpi4py.rc.finalize = False  # it would wait for ranks that may be gone
from mpi4py import MPI  # noqa: E402

NUM_LANES = max(HASH_THREADS // 2, 1)
"""Threads that take checksums while MPI, which copies too, has a core of its own."""
ANNOUNCE, PULSE, REPORT, DATA = 1, 2, 3, 4
DEPTH = 4
"""Buckets under way on each link."""
PULSE_S = 0.5
HEAR_EVERY_S = 0.001
IDLE_NAP_S = 0.002
NAPS_S = (1e-5, 3e-4)
NAME_BYTES = 256
WATCHDOG_S = 60.0
"""How long MPI may take to bring all ranks together."""


T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Place:
    """What a courier is told."""

    run: RunDir
    job: JobDir
    node: str
    nodes: tuple[str, ...]
    source: str
    silent_s: float

    @property
    def key(self) -> Key:
        """The window of this node."""
        return Key(campaign=self.run.root, node=self.node)


class Link:
    """The other couriers: small messages, buckets, and the naps between; knows who has gone silent."""

    def __init__(self, comm: MPI.Comm, *, watch: Watch) -> None:
        self.comm = comm
        self.watch = watch
        self.pulse: Callable[[], None] = lambda: None
        self.hear: Callable[[], None] = lambda: None
        self._sent: dict[tuple[int, int], tuple[MPI.Request, bytes]] = {}
        self._coming: dict[int, deque[tuple[int, bytearray, MPI.Request]]] = {
            tag: deque() for tag in (ANNOUNCE, PULSE, REPORT)
        }
        self._next_hearing = self._next_pulse = 0.0

    def tell(self, rank: int, tag: int, message: bytes) -> None:
        """Send a small message."""
        self.until(self.comm.Isend([message, MPI.BYTE], rank, tag).Test)

    def hint(self, rank: int, tag: int, message: bytes) -> None:
        """As `tell`, but without waiting, and dropped while the hint before it is still on its way."""
        before = self._sent.get((rank, tag))
        if before is None or before[0].Test():  # MPI reads the message until its request is done
            self._sent[rank, tag] = self.comm.Isend([message, MPI.BYTE], rank, tag), message

    def heard(self, tag: int) -> Iterator[tuple[Peer, bytes]]:
        """What has come in with this tag; whoever said it is alive."""
        status, coming = MPI.Status(), self._coming[tag]
        while (message := self.comm.Improbe(MPI.ANY_SOURCE, tag, status)) is not None:
            text = bytearray(status.Get_count(MPI.BYTE))
            coming.append((status.Get_source(), text, message.Irecv([text, MPI.BYTE])))
        while coming and coming[0][2].Test():
            rank, text, _ = coming.popleft()
            peer = self.watch.peers[rank]
            peer.heard = time.monotonic()
            yield peer, bytes(text)

    def attend(self) -> None:
        """Hear the others, say that we are here, and notice who is not."""
        self.hear()
        now = time.monotonic()
        self._next_hearing = now + HEAR_EVERY_S
        if now >= self._next_pulse:
            self._next_pulse = now + PULSE_S
            self.pulse()
            self.watch.check(now=now)

    def until(self, done: Callable[[], bool]) -> None:
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
        coming: deque[MPI.Request] = deque()
        going: deque[MPI.Request] = deque()
        num_bytes = 0
        for piece in pieces:
            while unposted and len(coming) < DEPTH:
                buffer, sender = unposted.popleft()
                coming.append(self.comm.Irecv([buffer, MPI.BYTE], sender, DATA))
            if coming:
                self.until(coming.popleft().Test)
                num_bytes += len(piece)
                arrived(num_bytes)
            if target is not None:
                if len(going) == DEPTH:
                    self.until(going.popleft().Test)
                going.append(self.comm.Isend([piece, MPI.BYTE], target, DATA))
        while going:
            self.until(going.popleft().Test)


class Sender:
    """The courier beside the trainer."""

    def __init__(self, place: Place, link: Link, events: EventLog) -> None:
        self._place, self._link, self._events = place, link, events
        self._peers = link.watch.peers
        self._window: Window | None = None
        link.pulse, link.hear = self._pulse, self._hear

    def serve(self) -> NoReturn:
        """Send every new version to whoever lacks it, for ever."""
        self._link.until(lambda: all(peer.greeted for peer in self._peers.values()))
        nodes = ", ".join(self._place.nodes)
        Standing(ready=True, reason=f"one courier each on {nodes}").write(self._place.job.couriers)
        while True:
            self._link.attend()
            manifest = self._newest()
            chain = [rank for rank, peer in self._peers.items() if manifest and peer.has < manifest.version]
            if manifest is None or not chain or not self._send(manifest, chain=tuple(chain)):
                time.sleep(IDLE_NAP_S)

    def _newest(self) -> Manifest | None:
        """The trainer makes its window when it first publishes, and perhaps another one after a restart."""
        if self._window is not None and not self._window.is_current():
            self._window.close()
            self._window = None
        if self._window is None:
            self._window = Window.open(self._place.key, job=self._place.job.number)
        return self._window.newest() if self._window is not None else None

    def _send(self, manifest: Manifest, *, chain: tuple[int, ...]) -> bool:
        """Bring a version to all of `chain`; False if the trainer has overwritten it meanwhile."""
        assert self._window is not None
        link, version, layout = self._link, manifest.version, self._window.layout
        announced = Announcement(
            version=version, step=manifest.step, layout=layout, checksums=manifest.checksums, chain=chain
        )
        message, began = msgspec.json.encode(announced), time.monotonic()
        try:
            with self._window.unchecked(version) as data:
                link.watch.begin(announced, deadline=began + deadline_s(layout.nbytes))
                for rank in chain:
                    link.tell(rank, ANNOUNCE, message)
                link.stream(data, source=None, target=chain[0], arrived=lambda _: None)
                link.until(lambda: all(self._peers[rank].has >= version for rank in chain))
        except StuckError:
            raise
        except WeightsError as error:
            self._events.emit("fault", what="courier", detail=str(error), version=version)
            link.watch.end()
            return False
        link.watch.end()
        wall_s = round(time.monotonic() - began, 4)
        to = [self._peers[rank].node for rank in chain]
        self._events.emit("courier", version=version, bytes=layout.nbytes, wall_s=wall_s, codec="full", to=to)
        return True

    def _pulse(self) -> None:
        if self._place.job.drain.exists():
            os._exit(0)
        self._events.beat()
        for rank in self._peers:
            self._link.hint(rank, PULSE, b".")

    def _hear(self) -> None:
        for peer, message in self._link.heard(REPORT):
            report = msgspec.json.decode(message, type=Report)
            peer.greeted, peer.has, peer.nbytes = True, report.has, report.nbytes


class Sums:
    """Checksums of some tensors, taken while their bytes arrive and are still in the cache."""

    def __init__(self, slot: memoryview, tensors: Iterable[Placed]) -> None:
        self.done: dict[str, bytes] = {}
        self._slot = slot
        self._left = deque(tensors)
        self._hash = xxhash.xxh3_128()
        self._reached = 0

    def take(self, num_bytes: int) -> None:
        """The slot holds its first `num_bytes` now."""
        while self._left:
            tensor = self._left[0]
            start, end = max(self._reached, tensor.offset), tensor.offset + tensor.nbytes
            if num_bytes > start:
                self._reached = min(num_bytes, end)
                self._hash.update(self._slot[start : self._reached])
            if num_bytes < end:
                return
            self._left.popleft()
            self.done[tensor.name] = self._hash.digest()
            self._hash.reset()


class Receiver:
    """The courier of a node that is not the trainer's; writes the window from which engines read."""

    def __init__(self, place: Place, link: Link, events: EventLog) -> None:
        self._place, self._link, self._events = place, link, events
        [self._source] = link.watch.peers.values()
        self._window = Window.open(place.key, job=place.job.number)
        self._writes = False
        self._threads = [ThreadPoolExecutor(1, thread_name_prefix="checksums") for _ in range(NUM_LANES)]
        self._announced: deque[Announcement] = deque()
        self._arrived = 0
        link.pulse, link.hear = self._pulse, self._hear

    def serve(self) -> NoReturn:
        """Take what is announced, for ever."""
        self._link.tell(self._source.rank, REPORT, self._report())
        while True:
            self._link.attend()
            if self._announced:
                self._receive(self._announced.popleft())
            else:
                time.sleep(IDLE_NAP_S)

    def _receive(self, announced: Announcement) -> None:
        """Take a version into the window and pass it on; WeightsError, and no version, if it does not arrive whole."""
        link, rank = self._link, self._link.comm.Get_rank()
        link.watch.begin(announced)
        before, _, after = (self._source.rank, *announced.chain, None)[announced.chain.index(rank) :][:3]
        window, slot = link.result(self._threads[0].submit(self._begin, announced))  # may wait for a reader
        shares = [Sums(slot, announced.layout.tensors[index::NUM_LANES]) for index in range(NUM_LANES)]
        pending: list[Future[None]] = []

        def arrived(num_bytes: int) -> None:
            self._arrived = self._source.nbytes = num_bytes
            for thread, share in zip(self._threads, shares, strict=True):
                pending.append(thread.submit(share.take, num_bytes))

        arrived(0)
        link.stream(slot, source=before, target=after, arrived=arrived)
        for future in pending:
            link.result(future)
        sums = {name: digest for share in shares for name, digest in share.done.items()}
        window.commit(announced.checksums, sums=[sums[tensor.name] for tensor in announced.layout.tensors])
        link.tell(self._source.rank, REPORT, self._report())
        link.watch.end()

    def _begin(self, announced: Announcement) -> tuple[Window, memoryview]:
        window = self._window
        if window is None or not self._writes or window.layout != announced.layout or not window.is_current():
            if window is not None:
                window.close()
            window = Window.create(self._place.key, announced.layout, job=self._place.job)
            self._window, self._writes = window, True
        return window, window.begin(announced.version, step=announced.step)

    def _report(self) -> bytes:
        newest = self._window.newest() if self._window is not None else None
        return msgspec.json.encode(Report(has=newest.version if newest else -1, nbytes=self._arrived))

    def _pulse(self) -> None:
        if self._place.job.drain.exists():  # nobody needs another version
            if self._window is not None:
                self._window.unlink()
            os._exit(0)
        self._events.beat()
        self._link.hint(self._source.rank, REPORT, self._report())

    def _hear(self) -> None:
        for _ in self._link.heard(PULSE):
            pass
        for _, message in self._link.heard(ANNOUNCE):
            self._announced.append(msgspec.json.decode(message, type=Announcement))


def meet(comm: MPI.Comm, place: Place) -> Link:
    """Learn which rank is on which node; WeightsError unless all are there, each once."""
    if comm.Get_size() != len(place.nodes):
        raise NoWorldError(
            f"MPI made a world of {comm.Get_size()} where {len(place.nodes)} ranks were started (rank "
            f"{comm.Get_rank()} on {place.node}): is site.mpi.srun_type the one that this MPI "
            f"({MPI.Get_library_version().split()[0]}) is made for?"
        )
    names = bytearray(NAME_BYTES * comm.Get_size())
    request = comm.Iallgather([place.node.encode().ljust(NAME_BYTES), MPI.BYTE], [names, MPI.BYTE])
    while not request.Test():
        time.sleep(NAPS_S[1])
    nodes = [names[start : start + NAME_BYTES].decode().rstrip() for start in range(0, len(names), NAME_BYTES)]
    if sorted(nodes) != sorted(place.nodes):
        raise NoWorldError(f"the couriers are on {', '.join(nodes)} and belong on {', '.join(place.nodes)}, one each")
    now = time.monotonic()
    sees = [rank for rank, node in enumerate(nodes) if (node == place.source) != (place.node == place.source)]
    peers = {rank: Peer(rank=rank, node=nodes[rank], heard=now) for rank in sees}
    return Link(comm, watch=Watch(peers=peers, silent_s=place.silent_s))


class NoWorldError(WeightsError):
    """MPI did not bring the couriers together, and would not the next time."""


def main() -> NoReturn:
    """Be one rank of the couriers' step until the driver ends it."""
    die_with_parent()
    faulthandler.enable()
    place = _place(sys.argv[1:])
    name = f"{place.job.number:03d}-courier-{place.node}"
    path = place.run.events / f"{name}.jsonl"
    events = EventLog(path, job=place.job.number, role="courier", worker=name, node=place.node)
    try:
        _serve(place, events)
    except WeightsError as error:
        facts = {}
        if isinstance(error, StuckError):
            facts = {"rank": error.rank, "at": error.node, "bucket": error.bucket, "bytes": error.nbytes}
        events.emit("fault", what="courier", detail=str(error), **facts)
        Standing(ready=False, reason=str(error), hopeless=isinstance(error, NoWorldError)).write(place.job.couriers)
        print(error, file=sys.stderr, flush=True)  # noqa: T201 - the step's log
    except BaseException:  # noqa: BLE001 - os._exit follows: nobody else would print it
        sys.excepthook(*sys.exc_info())
    os._exit(1)  # no orderly end: threads and other ranks would be waited for


def _serve(place: Place, events: EventLog) -> NoReturn:
    """Find the others, within a time, and carry versions."""
    faulthandler.dump_traceback_later(WATCHDOG_S, exit=True)
    MPI.Init_thread(MPI.THREAD_FUNNELED)
    try:
        link = meet(MPI.COMM_WORLD, place)
    finally:
        _forget_segments()
    faulthandler.cancel_dump_traceback_later()
    (Sender if place.node == place.source else Receiver)(place, link, events).serve()


def _forget_segments() -> None:
    """Remove the names of MPI's own shared memory, which all ranks have mapped by now: they would outlive a kill -9."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        if " /dev/shm/" in line:
            Path("/dev/shm", line.rpartition("/")[2]).unlink(missing_ok=True)


def _place(arguments: list[str]) -> Place:
    parser = argparse.ArgumentParser(prog="python -m hpcrl.weights.courier")
    parser.add_argument("campaign", type=Path)
    parser.add_argument("job", type=int)
    parser.add_argument("nodes", help="all nodes that have a courier: a,b,c")
    parser.add_argument("source", help="the trainer's node")
    parser.add_argument("--silent-s", type=float, default=SILENT_S, help="after this silence a rank is stuck")
    given = parser.parse_args(arguments)
    run = RunDir(given.campaign)
    return Place(
        run=run,
        job=run.job(given.job),
        node=this_node(),
        nodes=tuple(given.nodes.split(",")),
        source=given.source,
        silent_s=given.silent_s,
    )


if __name__ == "__main__":
    main()
