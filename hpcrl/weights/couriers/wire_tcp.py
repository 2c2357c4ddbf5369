"""The couriers' wire over TCP, for where MPI does not bring the nodes together: torch.distributed with gloo.

join      meet through files that only we can read: no port is fixed, none has to be known before
TcpWire   gloo cannot be polled: for each peer, threads wait for what comes and for what has gone

gloo knows no passwords. Its sockets are bound to the site's interface, and a version is taken only with the checksums
that were announced with it; still, whoever can reach the ports of a job on that network can disturb its transfers.
"""

import os
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
from hpcrl.system.files import private_dir, publish
from hpcrl.weights.couriers.link import Done, Tag
from hpcrl.weights.couriers.protocol import LostError, NoWorldError

MAIL, DATA = 1, 2
HEAD_BYTES = 16
"""Of a small message: its tag and its length, 8 bytes each."""
MAX_MAIL_BYTES = 256 << 20
FOREVER = timedelta(days=30)
"""Who is stuck is found by the link's watch, not by gloo, which would close its connections."""
LOOK_S = 0.02
INTERFACE = "GLOO_SOCKET_IFNAME"


def join(node: str, *, nodes: tuple[str, ...], meeting: Path, interface: str | None, timeout_s: float) -> "TcpWire":
    """This rank's wire; ranks are counted as `nodes` are. `meeting` is new for every life of the couriers."""
    warnings.filterwarnings("ignore", message="The given buffer is not writable")  # gloo only reads what it sends
    if interface is not None:
        os.environ[INTERFACE] = interface
    if node not in nodes:
        raise NoWorldError(f"a courier runs on {node}, and they belong on {', '.join(nodes)}, one each")
    rank = nodes.index(node)
    try:
        dist.init_process_group(
            "gloo",
            store=Notes(private_dir(meeting), timeout_s=timeout_s),
            rank=rank,
            world_size=len(nodes),
            timeout=timedelta(seconds=timeout_s),
        )
    except RuntimeError as error:
        raise WeightsError(
            f"the courier on {node} did not reach the others over TCP within {timeout_s:g} s "
            f"(site.network.interface = {interface!r}): {error}"
        ) from None
    return TcpWire(rank, num_ranks=len(nodes))


class Notes(dist.Store):  # type: ignore[name-defined,misc]  # torch's stubs do not show it
    """What ranks tell each other to meet, one private file each; gloo needs no more than to set and to get."""

    def __init__(self, directory: Path, *, timeout_s: float) -> None:
        super().__init__()
        self._directory = directory
        self._timeout_s = timeout_s

    def set(self, key: str, value: bytes | str) -> None:
        publish(self._path(key), value if isinstance(value, str) else bytes(value))

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._path(key).read_bytes()

    def check(self, keys: list[str]) -> bool:
        return all(self._path(key).exists() for key in keys)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Until all are set; gloo hands on what is raised here."""
        deadline = time.monotonic() + (self._timeout_s if timeout is None else timeout.total_seconds())
        while not self.check(keys):
            if time.monotonic() >= deadline:
                raise TimeoutError(f"{', '.join(keys)}: not said by then")
            time.sleep(LOOK_S)

    def _path(self, key: str) -> Path:
        return self._directory / xxhash.xxh3_128_hexdigest(key.encode())


class TcpWire:
    """Messages with a head of fixed size, and buckets straight into the window."""

    def __init__(self, rank: int, *, num_ranks: int) -> None:
        self.rank = rank
        self._peers = [peer for peer in range(num_ranks) if peer != rank]
        self._mail: dict[Tag, deque[tuple[int, bytes]]] = {tag: deque() for tag in Tag}
        self._lost: deque[LostError] = deque()
        self._waiting: dict[tuple[str, int], ThreadPoolExecutor] = defaultdict(lambda: ThreadPoolExecutor(1))
        for peer in self._peers:
            Thread(target=self._collect, args=(peer,), name=f"mail of {peer}", daemon=True).start()

    def tell(self, message: bytes, *, to: int, tag: Tag) -> Done:
        head = tag.to_bytes(8, "little") + len(message).to_bytes(8, "little")
        parts = [dist.isend(_tensor(bytearray(part)), to, tag=MAIL) for part in (head, message) if part]
        return self._when_all(parts, waiting=("mail", to))

    def heard(self, tag: Tag) -> Iterator[tuple[int, bytes]]:
        if self._lost:
            raise self._lost[0]
        mail = self._mail[tag]
        while mail:
            yield mail.popleft()

    def send(self, piece: memoryview, *, to: int) -> Done:
        return self._when_all([dist.isend(_tensor(piece), to, tag=DATA)], waiting=("to", to))

    def receive(self, piece: memoryview, *, source: int) -> Done:
        return self._when_all([dist.irecv(_tensor(piece), source, tag=DATA)], waiting=("from", source))

    def _when_all(self, works: "list[dist.Work | None]", *, waiting: tuple[str, int]) -> Done:
        """gloo says that a thing is done only to who waits for it."""

        def wait() -> None:
            for work in works:
                assert work is not None, "every rank is one of the group"
                work.wait(FOREVER)

        future: Future[None] = self._waiting[waiting].submit(wait)

        def done() -> bool:
            if future.done() and (error := future.exception()) is not None:
                raise _gone(waiting[1], error)
            return future.done()

        return done

    def _collect(self, peer: int) -> None:
        """Small messages of one peer, for ever."""
        try:
            while True:
                head = self._take(HEAD_BYTES, peer)
                tag, length = Tag(int.from_bytes(head[:8], "little")), int.from_bytes(head[8:], "little")
                if length > MAX_MAIL_BYTES:
                    raise ValueError(f"it announced a message of {length} bytes")
                self._mail[tag].append((peer, self._take(length, peer)))
        except (RuntimeError, ValueError) as error:
            self._lost.append(_gone(peer, error))

    def _take(self, num_bytes: int, peer: int) -> bytes:
        text = bytearray(num_bytes)
        if text:
            work = dist.irecv(_tensor(text), peer, tag=MAIL)
            assert work is not None, "every rank is one of the group"
            work.wait(FOREVER)
        return bytes(text)


def _gone(peer: int, error: BaseException) -> LostError:
    return LostError(f"rank {peer} cannot be reached any more: {str(error)[:300]}; the couriers are started again")


def _tensor(data: bytearray | memoryview) -> torch.Tensor:
    """The same bytes, as gloo takes them."""
    return torch.frombuffer(data, dtype=torch.uint8)
