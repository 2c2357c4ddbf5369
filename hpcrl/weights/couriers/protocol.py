"""The protocol of couriers: their messages, the split of a version into buckets, and stuck ranks; no MPI here.

VersionAnnouncement     the sender: this version is sent now, to these ranks, in this order
NodePart                the part of a version from one source, if there are several
PartOffer               a contributor: this part of a version is complete
CourierReport           a receiver or contributor: its version, its progress, its errors
CourierStatus           the status of all couriers for the driver
CourierPeer, PeerWatch  another rank - the time of each one's last message, and which holds up the others
compute_time_limit_s    limit on the duration of a transfer
count_buckets           the number of messages that a version is sent in
split_into_buckets      those messages

NoWorldError            the ranks could not be connected: the next transport in the fallback order is used
NoRoomError             a node cannot hold a window: files are used
RankLostError           a rank is lost: all start again
RankStuckError          a rank is there and holds up the others
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
"""Bytes of a message.

MPI's own segments are far smaller, and its own choice of tree is linear for some numbers of ranks.
"""
RANK_SILENCE_TIMEOUT_S = 10.0
"""A peer that sends nothing for this long is stuck."""
MIN_BYTES_PER_S = 20e6
MIN_TIME_LIMIT_S = 30.0


class NodePart(msgspec.Struct, frozen=True, kw_only=True):
    """The part of a version on one node of the trainer."""

    source: int
    """The rank that sends it."""
    layout: TensorLayout
    checksums: dict[str, str]


class VersionAnnouncement(msgspec.Struct, frozen=True, kw_only=True):
    """The announcement of a version that is sent now."""

    version: int
    step: int
    layout: TensorLayout
    checksums: dict[str, str]
    chain: tuple[int, ...]
    """The ranks that receive it; each passes every bucket on to the next."""
    number: int
    """Counts the transfers of this run of the couriers."""
    base: int | None = None
    """The version that the delta is based on, which all of the chain have; None: the version is sent in full."""
    nbytes: int
    """Bytes to be transferred."""
    parts: tuple[NodePart, ...] = ()
    """The sources, one after the other; empty: all is from the sender, with `checksums`."""

    def parts_from(self, sender: int) -> tuple[NodePart, ...]:
        """Return the parts of a version in full, from all sources."""
        return self.parts or (NodePart(source=sender, layout=self.layout, checksums=self.checksums),)


class PartOffer(msgspec.Struct, frozen=True, kw_only=True):
    """The offer of a contributor's part of a version, complete."""

    version: int
    layout: TensorLayout
    checksums: dict[str, str]


class CourierReport(msgspec.Struct, frozen=True, kw_only=True):
    """The progress of a receiver or contributor; sent twice a second, and after every change."""

    has: int = -1
    """The newest whole version in its window."""
    nbytes: int = 0
    """Bytes received of the current version, or sent of the current part."""
    damaged: int = -1
    """Number of the last transfer whose content was not as announced."""
    ended: int = -1
    """Number of the last transfer for which a contributor has sent its part."""


class CourierStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The status of the couriers for the driver."""

    ready: bool
    """True once every rank is there and the sender serves."""
    reason: str
    hopeless: bool = False
    """The couriers would fail again: do not restart them."""
    carried: int | None = None
    """The newest version that every node has; None before the first."""

    @classmethod
    def read(cls, path: Path) -> "CourierStatus | None":
        """Read the status; None as long as there is none."""
        try:
            return msgspec.json.decode(path.read_bytes(), type=cls)
        except (FileNotFoundError, msgspec.DecodeError):
            return None

    def write(self, path: Path) -> None:
        publish_file(path, msgspec.json.encode(self))

    @staticmethod
    def touch(path: Path) -> None:
        """Touch the file, which shows that the status is still valid."""
        with contextlib.suppress(FileNotFoundError):
            os.utime(path)

    @staticmethod
    def read_touch_time(path: Path) -> float:
        """Return the time of the last touch by the file system's clock, or 0; NFS updates it when a file is opened."""
        try:
            with path.open("rb") as file:
                return os.fstat(file.fileno()).st_mtime
        except FileNotFoundError:
            return 0.0


class NoWorldError(WeightsError):
    """The couriers could not be connected, and a restart would not help."""


class NoRoomError(WeightsError):
    """A node has no memory for its window, and a restart would not help."""


class RankLostError(WeightsError):
    """A rank is lost, which ends this run of the couriers."""


class RankStuckError(RankLostError):
    """A rank holds up the others; the error reports the rank, its node and its progress."""

    def __init__(self, peer: "CourierPeer", *, reason: str, version: int | None, nbytes: int) -> None:
        self.rank, self.node, self.nbytes = peer.rank, peer.node, peer.nbytes
        self.bucket = peer.nbytes // BUCKET_NBYTES
        what = "no transfer was under way"
        if version is not None:
            what = (
                f"version {version}: {peer.nbytes} of {nbytes} bytes, bucket {self.bucket} of {count_buckets(nbytes)}"
            )
        super().__init__(f"rank {peer.rank} on {peer.node} {reason}; {what}; the couriers are restarted")


@dataclass
class CourierPeer:
    """The state of another rank, as known here."""

    rank: int
    node: str
    last_received: float
    """Time of its last message, monotonic."""
    has_reported: bool = False
    held_version: int = -1
    nbytes: int = 0
    damaged_transfer: int = -1
    ended_transfer: int = -1


@dataclass
class PeerWatch:
    """The peers, and the transfer that they take part in."""

    peers: dict[int, CourierPeer]
    silence_timeout_s: float = RANK_SILENCE_TIMEOUT_S
    version: int | None = None
    nbytes: int = 0
    time_limit_s: float = 0.0
    deadline: float = float("inf")
    chain: tuple[int, ...] = ()
    parts: tuple[NodePart, ...] = ()

    def start_transfer(self, announcement: VersionAnnouncement, *, deadline: float = float("inf")) -> None:
        """Start a transfer that must end by `deadline` (monotonic)."""
        self.version, self.nbytes, self.chain = announcement.version, announcement.nbytes, announcement.chain
        self.parts = announcement.parts
        self.time_limit_s, self.deadline = compute_time_limit_s(announcement.layout.nbytes), deadline
        for peer in self.peers.values():
            peer.nbytes = 0

    def end_transfer(self) -> None:
        self.version, self.deadline, self.chain, self.parts = None, float("inf"), (), ()

    def check(self, *, now: float) -> None:
        """Raise RankStuckError for the rank that was silent for too long, or has the least progress at the deadline."""
        quiet = min(self.peers.values(), key=lambda peer: peer.last_received, default=None)
        if quiet is not None and now - quiet.last_received > self.silence_timeout_s:
            raise self._make_stuck_error(quiet, f"has sent nothing for {now - quiet.last_received:.1f} s")
        if now > self.deadline:
            raise self._make_stuck_error(self._slowest(), f"did not finish within {self.time_limit_s:.0f} s")

    def _slowest(self) -> CourierPeer:
        """Return the peer with the least progress, but not a receiver that waits for a contributor."""
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
    """Return the longest time that a transfer may take."""
    return MIN_TIME_LIMIT_S + nbytes / MIN_BYTES_PER_S


def count_buckets(nbytes: int) -> int:
    return -(-nbytes // BUCKET_NBYTES)


def split_into_buckets(nbytes: int) -> Iterator[slice]:
    """Split a version's bytes into messages."""
    for start in range(0, nbytes, BUCKET_NBYTES):
        yield slice(start, min(start + BUCKET_NBYTES, nbytes))
