"""The transport of couriers over TCP, for nodes that MPI does not connect: torch.distributed with gloo.

    join_ranks       connect the ranks through files that only this user can read; no port is fixed or configured
    TcpTransport     messages and buckets; gloo cannot be polled, so threads for each peer wait for its transfers
    RendezvousStore  the files through which ranks find each other

gloo has no authentication. Its sockets are bound to the site's interface, and a version is accepted only with the
checksums in its announcement; still, anyone who can reach a job's ports on that network can disturb its transfers.
"""

import os
import re
import time
import warnings
from collections import defaultdict, deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from threading import Thread

import torch
import torch.distributed as dist
import xxhash

from hpcrl.errors import WeightsError
from hpcrl.system.files import make_private_dir, publish_file
from hpcrl.system.network import find_interface
from hpcrl.weights.couriers.link import DoneCheck, MessageTag
from hpcrl.weights.couriers.protocol import NoWorldError, RankLostError

MAIL_TAG, DATA_TAG = 1, 2
HEAD_BYTES = 16
"""Bytes before a small message: its tag and its length, 8 bytes each."""
MAX_MAIL_BYTES = 256 << 20
MAX_WAIT = timedelta(days=30)
"""Stuck ranks are found by PeerWatch, not by gloo, which would close its connections."""
KEY_POLL_INTERVAL_S = 0.02
INTERFACE_VARIABLE = "GLOO_SOCKET_IFNAME"
_SOURCE_PLACE = re.compile(r"^\[[^\]]*:\d+\] ")


def join_ranks(
    node: str, *, nodes: tuple[str, ...], meeting: Path, interfaces: tuple[str, ...], timeout_s: float
) -> "TcpTransport":
    """Return this rank's transport; ranks are in the order of `nodes`, and `meeting` is new for every run."""
    warnings.filterwarnings("ignore", message="The given buffer is not writable")  # gloo only reads what it sends
    interface = find_interface(interfaces)[0] if interfaces else None
    if interface is not None:
        os.environ[INTERFACE_VARIABLE] = interface
    if node not in nodes:
        raise NoWorldError(f"a courier runs on {node}, but couriers must run on {', '.join(nodes)}, one each")
    rank = nodes.index(node)
    try:
        dist.init_process_group(
            "gloo",
            store=RendezvousStore(make_private_dir(meeting), timeout_s=timeout_s),
            rank=rank,
            world_size=len(nodes),
            timeout=timedelta(seconds=timeout_s),
        )
    except RuntimeError as error:
        raise WeightsError(
            f"the courier on {node} did not reach the others over TCP within {timeout_s:g} s "
            f"(site.network.interface = {interface!r}): {error}"
        ) from None
    return TcpTransport(rank, num_ranks=len(nodes))


class RendezvousStore(dist.Store):  # type: ignore[name-defined,misc]  # torch's stubs do not show it
    """The values that ranks exchange to connect, in one private file each; gloo only sets and gets."""

    def __init__(self, directory: Path, *, timeout_s: float) -> None:
        super().__init__()
        self._directory = directory
        self._timeout_s = timeout_s

    def set(self, key: str, value: bytes | str) -> None:
        publish_file(self._path(key), value if isinstance(value, str) else bytes(value))

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._path(key).read_bytes()

    def check(self, keys: list[str]) -> bool:
        return all(self._path(key).exists() for key in keys)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys are set; gloo passes on what is raised here."""
        deadline = time.monotonic() + (self._timeout_s if timeout is None else timeout.total_seconds())
        while not self.check(keys):
            if time.monotonic() >= deadline:
                raise TimeoutError(f"{', '.join(keys)}: not set in time")
            time.sleep(KEY_POLL_INTERVAL_S)

    def _path(self, key: str) -> Path:
        return self._directory / xxhash.xxh3_128_hexdigest(key.encode())


class TcpTransport:
    """The transport over TCP: messages with a head of fixed size, and buckets directly into the window."""

    def __init__(self, rank: int, *, num_ranks: int) -> None:
        self.rank = rank
        self._peers = [peer for peer in range(num_ranks) if peer != rank]
        self._mail: dict[MessageTag, deque[tuple[int, bytes]]] = {tag: deque() for tag in MessageTag}
        self._errors: deque[RankLostError] = deque()
        self._waiters: dict[tuple[str, int], ThreadPoolExecutor] = defaultdict(lambda: ThreadPoolExecutor(1))
        for peer in self._peers:
            Thread(target=self._collect_messages, args=(peer,), name=f"mail of {peer}", daemon=True).start()

    def send_message(self, message: bytes, *, to: int, tag: MessageTag) -> DoneCheck:
        head = tag.to_bytes(8, "little") + len(message).to_bytes(8, "little")
        parts = [dist.isend(_wrap_bytes(bytearray(part)), to, tag=MAIL_TAG) for part in (head, message) if part]
        return self._wait_for_all(parts, waiter=("mail", to))

    def poll_messages(self, tag: MessageTag) -> Iterator[tuple[int, bytes]]:
        if self._errors:
            raise self._errors[0]
        mail = self._mail[tag]
        while mail:
            yield mail.popleft()

    def send(self, chunk: memoryview, *, to: int) -> DoneCheck:
        return self._wait_for_all([dist.isend(_wrap_bytes(chunk), to, tag=DATA_TAG)], waiter=("to", to))

    def receive(self, chunk: memoryview, *, source: int) -> DoneCheck:
        return self._wait_for_all([dist.irecv(_wrap_bytes(chunk), source, tag=DATA_TAG)], waiter=("from", source))

    def _wait_for_all(self, works: "list[dist.Work | None]", *, waiter: tuple[str, int]) -> DoneCheck:
        """Wait in a thread, since gloo reports completion only to a waiter."""

        def wait() -> None:
            for work in works:
                assert work is not None, "every rank is one of the group"
                work.wait(MAX_WAIT)

        future: Future[None] = self._waiters[waiter].submit(wait)

        def done() -> bool:
            if future.done() and (error := future.exception()) is not None:
                raise _make_lost_error(waiter[1], error)
            return future.done()

        return done

    def _collect_messages(self, peer: int) -> None:
        """Collect the small messages of one peer forever."""
        try:
            while True:
                head = self._receive_bytes(HEAD_BYTES, peer)
                tag, length = MessageTag(int.from_bytes(head[:8], "little")), int.from_bytes(head[8:], "little")
                if length > MAX_MAIL_BYTES:
                    raise ValueError(f"it announced a message of {length} bytes")
                self._mail[tag].append((peer, self._receive_bytes(length, peer)))
        except (RuntimeError, ValueError) as error:
            self._errors.append(_make_lost_error(peer, error))

    def _receive_bytes(self, num_bytes: int, peer: int) -> bytes:
        text = bytearray(num_bytes)
        if text:
            work = dist.irecv(_wrap_bytes(text), peer, tag=MAIL_TAG)
            assert work is not None, "every rank is one of the group"
            work.wait(MAX_WAIT)
        return bytes(text)


def _make_lost_error(peer: int, error: BaseException) -> RankLostError:
    why = _SOURCE_PLACE.sub("", str(error).partition(". This is")[0])[:300]  # gloo adds its file, and advice
    return RankLostError(f"rank {peer} can no longer be reached: {why}; the couriers are restarted")


def _wrap_bytes(data: bytearray | memoryview) -> torch.Tensor:
    """Wrap bytes in a tensor for gloo, without a copy."""
    return torch.frombuffer(data, dtype=torch.uint8)
