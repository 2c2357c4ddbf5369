"""What couriers tell each other, how a version is cut into messages, who is stuck; no MPI here.

Announcement    the sender: this version comes now, to these ranks, in this order
Part            what of it comes from where, if there are several sources
Offer           a contributor: this part of a version is here
Report          a receiver or a contributor: what it has, what has come or gone, what went wrong
Watch           when each peer was last heard, and which one holds up the others
Standing        the couriers to the driver

WeightsError
  NoWorldError  the ranks were not brought together: another rung of the ladder
  NoRoomError   a node cannot hold a window: files
  LostError     one of them is gone: all start again
    StuckError  it is there and holds up the others
"""

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from hpcrl.errors import WeightsError
from hpcrl.system.files import publish
from hpcrl.weights.layout import Layout

BUCKET_NBYTES = 16 << 20
"""One message. MPI's own segments are far smaller, and its own choice of tree is linear for some numbers of ranks."""
SILENT_S = 10.0
"""A peer that says nothing for so long is stuck."""
SLOWEST_BYTES_S = 20e6
LEAST_DEADLINE_S = 30.0


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """What one node of the trainer has of a version."""

    source: int
    """The rank that sends it."""
    layout: Layout
    checksums: dict[str, str]


class Announcement(msgspec.Struct, frozen=True, kw_only=True):
    """A version that comes now."""

    version: int
    step: int
    layout: Layout
    checksums: dict[str, str]
    chain: tuple[int, ...]
    """The ranks that receive it; each passes every bucket on to the next."""
    number: int
    """Counts the transfers of this life of the couriers."""
    base: int | None = None
    """The bytes that come are a delta to this version, which all of the chain have; None: the version in full."""
    nbytes: int
    """That come."""
    parts: tuple[Part, ...] = ()
    """Where it comes from, one after the other; none: all of it from the sender, with `checksums`."""

    def parts_from(self, sender: int) -> tuple[Part, ...]:
        """What comes, wherever from, if it comes in full."""
        return self.parts or (Part(source=sender, layout=self.layout, checksums=self.checksums),)


class Offer(msgspec.Struct, frozen=True, kw_only=True):
    """A contributor's part of a version, complete."""

    version: int
    layout: Layout
    checksums: dict[str, str]


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """How far a receiver or contributor is; sent twice a second, and when something has happened."""

    has: int = -1
    """The newest version in its window, whole."""
    nbytes: int = 0
    """What has arrived of the one that is coming, or has gone of the part that is sent."""
    damaged: int = -1
    """Number of the last transfer that did not become, or was not, what had been announced."""
    ended: int = -1
    """Number of the last transfer to which a contributor has sent its part."""


class Standing(msgspec.Struct, frozen=True, kw_only=True):
    """What the couriers tell the driver."""

    ready: bool
    """Every rank is there, and the sender serves."""
    reason: str
    hopeless: bool = False
    """They would fail again: do not start them anew."""
    carried: int | None = None
    """The newest version that every node has; None before the first."""

    @classmethod
    def read(cls, path: Path) -> "Standing | None":
        """None as long as they have said nothing."""
        try:
            return msgspec.json.decode(path.read_bytes(), type=cls)
        except (FileNotFoundError, msgspec.DecodeError):
            return None

    def write(self, path: Path) -> None:
        publish(path, msgspec.json.encode(self))

    @staticmethod
    def beat(path: Path) -> None:
        """Say that what was said still holds: touch the file."""
        with contextlib.suppress(FileNotFoundError):
            os.utime(path)

    @staticmethod
    def beaten(path: Path) -> float:
        """When that was said last, by the clock of the file system; 0 if nothing was. Opened: NFS looks anew then."""
        try:
            with path.open("rb") as file:
                return os.fstat(file.fileno()).st_mtime
        except FileNotFoundError:
            return 0.0


class NoWorldError(WeightsError):
    """The couriers were not brought together, and would not be the next time."""


class NoRoomError(WeightsError):
    """A node has no memory for its window, and would not have it the next time."""


class LostError(WeightsError):
    """Another rank is gone, and this life of the couriers with it."""


class StuckError(LostError):
    """A rank holds up the others: which, where, and how far it came."""

    def __init__(self, peer: "Peer", *, why: str, version: int | None, nbytes: int) -> None:
        self.rank, self.node, self.nbytes = peer.rank, peer.node, peer.nbytes
        self.bucket = peer.nbytes // BUCKET_NBYTES
        what = "no transfer was under way"
        if version is not None:
            what = f"version {version}: {peer.nbytes} of {nbytes} bytes, bucket {self.bucket} of {num_buckets(nbytes)}"
        super().__init__(f"rank {peer.rank} on {peer.node} {why}; {what}; the couriers are started again")


@dataclass
class Peer:
    """Another rank, as seen from here."""

    rank: int
    node: str
    heard: float
    """Monotonic."""
    greeted: bool = False
    has: int = -1
    nbytes: int = 0
    damaged: int = -1
    ended: int = -1


@dataclass
class Watch:
    """Peers, and the transfer that they take part in."""

    peers: dict[int, Peer]
    silent_s: float = SILENT_S
    version: int | None = None
    nbytes: int = 0
    allowed_s: float = 0.0
    deadline: float = float("inf")
    chain: tuple[int, ...] = ()
    parts: tuple[Part, ...] = ()

    def begin(self, announced: Announcement, *, deadline: float = float("inf")) -> None:
        """A transfer starts, which has to end by `deadline` (monotonic)."""
        self.version, self.nbytes, self.chain = announced.version, announced.nbytes, announced.chain
        self.parts = announced.parts
        self.allowed_s, self.deadline = deadline_s(announced.layout.nbytes), deadline
        for peer in self.peers.values():
            peer.nbytes = 0

    def end(self) -> None:
        self.version, self.deadline, self.chain, self.parts = None, float("inf"), (), ()

    def check(self, *, now: float) -> None:
        """StuckError naming the rank that was silent for too long, or the one that came least far by the deadline."""
        quiet = min(self.peers.values(), key=lambda peer: peer.heard, default=None)
        if quiet is not None and now - quiet.heard > self.silent_s:
            raise self._stuck(quiet, f"has said nothing for {now - quiet.heard:.1f} s")
        if now > self.deadline:
            raise self._stuck(self._slowest(), f"did not finish within {self.allowed_s:.0f} s")

    def _slowest(self) -> Peer:
        """Who came least far: a receiver that waits for a contributor is not to blame."""
        waits = [((peer.has, peer.nbytes), peer) for peer in map(self.peers.__getitem__, self.chain)]
        first, least = 0, min(waits, key=lambda wait: wait[0])
        for part in self.parts:
            contributor = self.peers.get(part.source)
            behind = contributor is not None and contributor.nbytes < part.layout.nbytes
            if behind and contributor is not None and first + contributor.nbytes <= least[0][1]:
                return contributor
            first += part.layout.nbytes
        return least[1]

    def _stuck(self, peer: Peer, why: str) -> StuckError:
        return StuckError(peer, why=why, version=self.version, nbytes=self.nbytes)


def deadline_s(nbytes: int) -> float:
    """How long a transfer may take at all."""
    return LEAST_DEADLINE_S + nbytes / SLOWEST_BYTES_S


def num_buckets(nbytes: int) -> int:
    return -(-nbytes // BUCKET_NBYTES)


def buckets(nbytes: int) -> Iterator[slice]:
    """A version's bytes, cut into messages."""
    for start in range(0, nbytes, BUCKET_NBYTES):
        yield slice(start, min(start + BUCKET_NBYTES, nbytes))
