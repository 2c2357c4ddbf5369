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
    RankStuckError  it is there and holds up the others
"""

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from hpcrl.errors import WeightsError
from hpcrl.system.files import publish_file
from hpcrl.weights.layout import TensorLayout

BUCKET_NBYTES = 16 << 20
"""One message. MPI's own segments are far smaller, and its own choice of tree is linear for some numbers of ranks."""
SILENCE_TIMEOUT_S = 10.0
"""A peer that says nothing for so long is stuck."""
MIN_BYTES_PER_S = 20e6
MIN_TIME_LIMIT_S = 30.0


class NodePart(msgspec.Struct, frozen=True, kw_only=True):
    """What one node of the trainer has of a version."""

    source: int
    """The rank that sends it."""
    layout: TensorLayout
    checksums: dict[str, str]


class VersionAnnouncement(msgspec.Struct, frozen=True, kw_only=True):
    """A version that comes now."""

    version: int
    step: int
    layout: TensorLayout
    checksums: dict[str, str]
    chain: tuple[int, ...]
    """The ranks that receive it; each passes every bucket on to the next."""
    number: int
    """Counts the transfers of this life of the couriers."""
    base: int | None = None
    """The bytes that come are a delta to this version, which all of the chain have; None: the version in full."""
    nbytes: int
    """That come."""
    parts: tuple[NodePart, ...] = ()
    """Where it comes from, one after the other; none: all of it from the sender, with `checksums`."""

    def parts_from(self, sender: int) -> tuple[NodePart, ...]:
        """What comes, wherever from, if it comes in full."""
        return self.parts or (NodePart(source=sender, layout=self.layout, checksums=self.checksums),)


class PartOffer(msgspec.Struct, frozen=True, kw_only=True):
    """A contributor's part of a version, complete."""

    version: int
    layout: TensorLayout
    checksums: dict[str, str]


class CourierReport(msgspec.Struct, frozen=True, kw_only=True):
    """How far a receiver or contributor is; sent twice a second, and when something has happened."""

    has: int = -1
    """The newest version in its window, whole."""
    nbytes: int = 0
    """What has arrived of the one that is coming, or has gone of the part that is sent."""
    damaged: int = -1
    """Number of the last transfer that did not become, or was not, what had been announced."""
    ended: int = -1
    """Number of the last transfer to which a contributor has sent its part."""


class CourierStatus(msgspec.Struct, frozen=True, kw_only=True):
    """What the couriers tell the driver."""

    ready: bool
    """Every rank is there, and the sender serves."""
    reason: str
    hopeless: bool = False
    """They would fail again: do not start them anew."""
    carried: int | None = None
    """The newest version that every node has; None before the first."""

    @classmethod
    def read(cls, path: Path) -> "CourierStatus | None":
        """None as long as they have said nothing."""
        try:
            return msgspec.json.decode(path.read_bytes(), type=cls)
        except (FileNotFoundError, msgspec.DecodeError):
            return None

    def write(self, path: Path) -> None:
        publish_file(path, msgspec.json.encode(self))

    @staticmethod
    def touch(path: Path) -> None:
        """Say that what was said still holds: touch the file."""
        with contextlib.suppress(FileNotFoundError):
            os.utime(path)

    @staticmethod
    def read_touch_time(path: Path) -> float:
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


class RankLostError(WeightsError):
    """Another rank is gone, and this life of the couriers with it."""


class RankStuckError(RankLostError):
    """A rank holds up the others: which, where, and how far it came."""

    def __init__(self, peer: "CourierPeer", *, reason: str, version: int | None, nbytes: int) -> None:
        self.rank, self.node, self.nbytes = peer.rank, peer.node, peer.nbytes
        self.bucket = peer.nbytes // BUCKET_NBYTES
        what = "no transfer was under way"
        if version is not None:
            what = (
                f"version {version}: {peer.nbytes} of {nbytes} bytes, bucket {self.bucket} of {count_buckets(nbytes)}"
            )
        super().__init__(f"rank {peer.rank} on {peer.node} {reason}; {what}; the couriers are started again")


@dataclass
class CourierPeer:
    """Another rank, as seen from here."""

    rank: int
    node: str
    last_received: float
    """Monotonic."""
    has_reported: bool = False
    held_version: int = -1
    nbytes: int = 0
    damaged_transfer: int = -1
    ended_transfer: int = -1


@dataclass
class PeerWatch:
    """Peers, and the transfer that they take part in."""

    peers: dict[int, CourierPeer]
    silence_timeout_s: float = SILENCE_TIMEOUT_S
    version: int | None = None
    nbytes: int = 0
    time_limit_s: float = 0.0
    deadline: float = float("inf")
    chain: tuple[int, ...] = ()
    parts: tuple[NodePart, ...] = ()

    def start_transfer(self, announcement: VersionAnnouncement, *, deadline: float = float("inf")) -> None:
        """A transfer starts, which has to end by `deadline` (monotonic)."""
        self.version, self.nbytes, self.chain = announcement.version, announcement.nbytes, announcement.chain
        self.parts = announcement.parts
        self.time_limit_s, self.deadline = compute_time_limit_s(announcement.layout.nbytes), deadline
        for peer in self.peers.values():
            peer.nbytes = 0

    def end_transfer(self) -> None:
        self.version, self.deadline, self.chain, self.parts = None, float("inf"), (), ()

    def check(self, *, now: float) -> None:
        """StuckError naming the rank that was silent for too long, or the one that came least far by the deadline."""
        quiet = min(self.peers.values(), key=lambda peer: peer.last_received, default=None)
        if quiet is not None and now - quiet.last_received > self.silence_timeout_s:
            raise self._make_stuck_error(quiet, f"has said nothing for {now - quiet.last_received:.1f} s")
        if now > self.deadline:
            raise self._make_stuck_error(self._slowest(), f"did not finish within {self.time_limit_s:.0f} s")

    def _slowest(self) -> CourierPeer:
        """Who came least far: a receiver that waits for a contributor is not to blame."""
        waits = [((peer.held_version, peer.nbytes), peer) for peer in map(self.peers.__getitem__, self.chain)]
        first, least = 0, min(waits, key=lambda wait: wait[0])
        for part in self.parts:
            contributor = self.peers.get(part.source)
            is_behind = contributor is not None and contributor.nbytes < part.layout.nbytes
            if is_behind and contributor is not None and first + contributor.nbytes <= least[0][1]:
                return contributor
            first += part.layout.nbytes
        return least[1]

    def _make_stuck_error(self, peer: CourierPeer, reason: str) -> RankStuckError:
        return RankStuckError(peer, reason=reason, version=self.version, nbytes=self.nbytes)


def compute_time_limit_s(nbytes: int) -> float:
    """How long a transfer may take at all."""
    return MIN_TIME_LIMIT_S + nbytes / MIN_BYTES_PER_S


def count_buckets(nbytes: int) -> int:
    return -(-nbytes // BUCKET_NBYTES)


def split_into_buckets(nbytes: int) -> Iterator[slice]:
    """A version's bytes, cut into messages."""
    for start in range(0, nbytes, BUCKET_NBYTES):
        yield slice(start, min(start + BUCKET_NBYTES, nbytes))
