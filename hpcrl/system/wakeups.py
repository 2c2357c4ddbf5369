"""Wake-ups: a datagram to a process of the same job ends its wait before the next poll.

    WakeListener   a process that can be woken; its address is the name of an empty file
    WakeSender     wakes all listeners of some names
    WakeEvent      the same for an event loop, which may also be woken from inside
    wait_readable  wait until sockets can be read, also in a process with thousands of open files
    TOKEN_BYTES, MAX_DATAGRAM_BYTES   sizes

Nothing depends on a wake-up: one may be lost, late or unneeded, and its receiver polls as well. It has no content: the
receiver looks earlier at the files that it would look at anyway. The name of a listener's file contains a token, and
the directory is its owner's alone, so datagrams of others end no wait.
"""

import asyncio
import contextlib
import hmac
import select
import socket
import threading
from collections.abc import Collection, Sequence
from pathlib import Path
from secrets import token_hex
from typing import NamedTuple

from hpcrl.system.file_watch import NameWatch
from hpcrl.system.files import make_private_dir

TOKEN_BYTES = 16
MAX_DATAGRAM_BYTES = 64


def wait_readable(fds: Sequence[int], timeout_s: float) -> set[int]:
    """Wait until some of the descriptors can be read or are closed, for `timeout_s` at most; return these."""
    poll = select.poll()  # select.select takes no descriptor above 1,023
    for fd in fds:
        poll.register(fd, select.POLLIN)
    return {fd for fd, _ in poll.poll(timeout_s * 1000)}


class WakeListener:
    """A process that can be woken: files of an earlier process of this name are removed."""

    def __init__(self, directory: Path, name: str, *, host: str) -> None:
        """Listen on `host`; OSError if that is impossible, and then the caller only polls."""
        self._token = token_hex(TOKEN_BYTES)
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        try:
            self._socket.setblocking(False)
            self._socket.bind((host, 0))
            make_private_dir(directory)
            for old in directory.glob(f"{name}@*"):
                old.unlink(missing_ok=True)
            address, port = self._socket.getsockname()
            self._path = directory / f"{name}@{address}@{port}@{self._token}"
            self._path.touch(mode=0o600)
        except BaseException:
            self._socket.close()
            raise

    def fileno(self) -> int:
        return self._socket.fileno()

    def wait(self, timeout_s: float) -> bool:
        """Wait until another process wakes this one, or for `timeout_s`; return whether one did."""
        return bool(wait_readable([self.fileno()], timeout_s)) and self.receive()

    def receive(self) -> bool:
        """Receive all wake-ups that have arrived; return whether there was one."""
        is_woken = False
        with contextlib.suppress(OSError):  # nothing more has arrived
            while True:
                data = self._socket.recv(MAX_DATAGRAM_BYTES)
                is_woken = hmac.compare_digest(data, self._token.encode()) or is_woken
        return is_woken

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._path.unlink(missing_ok=True)
        self._socket.close()


class _ListenerAddress(NamedTuple):
    host: str
    port: int
    token: bytes


class WakeSender:
    """Wakes the listeners of a directory whose names start with one of some words; it may be used by several threads.

    The directory is looked at ever more rarely while nothing changes: a listener that is new polls until it is seen.
    """

    def __init__(self, directory: Path, *names: str, host: str | None = None, is_local: bool = False) -> None:
        """Send from `host`, so that the socket is not open on other networks too, and only to it if `is_local`."""
        self._names = names
        self._only_host = host if is_local else None
        self._watch = NameWatch(directory)
        self._seen: frozenset[str] = frozenset()
        self._addresses: list[_ListenerAddress] = []
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.setblocking(False)
        if host is not None:
            with contextlib.suppress(OSError):
                self._socket.bind((host, 0))
        self._lock = threading.Lock()

    def wake(self) -> None:
        """Wake them; what cannot be sent is left out."""
        with self._lock:
            with contextlib.suppress(OSError):
                self._read_addresses()
            for host, port, token in self._addresses:
                with contextlib.suppress(OSError):
                    self._socket.sendto(token, (host, port))

    def close(self) -> None:
        self._socket.close()

    def _read_addresses(self) -> None:
        seen = self._watch.names()
        if seen is not self._seen:
            self._seen = seen
            found = [_parse_address(name, self._names) for name in sorted(seen)]
            self._addresses = [one for one in found if one and self._only_host in (None, one.host)]


def _parse_address(file_name: str, names: Collection[str]) -> _ListenerAddress | None:
    match file_name.split("@"):
        case [name, host, port, token] if name.startswith(tuple(names)) and port.isdigit():
            return _ListenerAddress(host, int(port), token.encode())
    return None


class WakeEvent:
    """Ends the waits of an event loop early."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def attach(self, listener: WakeListener) -> None:
        """Also end waits when another process wakes this one, as long as the listener is open."""
        loop = asyncio.get_running_loop()
        loop.add_reader(listener.fileno(), self._receive, listener)

    def detach(self, listener: WakeListener) -> None:
        asyncio.get_running_loop().remove_reader(listener.fileno())

    def set(self) -> None:
        """End the present wait, or the next one."""
        self._event.set()

    def set_from_thread(self, loop: asyncio.AbstractEventLoop) -> None:
        """Do the same from another thread; a loop that is closed has no waits."""
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(self._event.set)

    async def wait(self, timeout_s: float) -> bool:
        """Wait until woken, or for `timeout_s`; return whether it was woken."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._event.wait()
        is_woken = self._event.is_set()
        self._event.clear()
        return is_woken

    def _receive(self, listener: WakeListener) -> None:
        if listener.receive():
            self._event.set()
