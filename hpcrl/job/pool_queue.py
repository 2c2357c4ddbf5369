"""The queue between a worker pool of Parsl and its workers, any of which may be killed at any moment.

    PoolQueue      a queue in which no lock is held: the kernel gives each message to one reader, whole
    TaskLedger     the tasks of a pool without a result, of which some are lost with the worker that took them
    end_after_answer   let this process answer its task, and take no other
    LOST_AFTER_S, LEDGER_INTERVAL_S   times
    MAX_MESSAGE_BYTES               a longer message goes through a file

The queue of `multiprocessing` is locked by the reader that waits: a worker that is killed while it is idle, its usual
state, leaves it locked, and its pool would look alive and never run another task.
"""

import contextlib
import fcntl
import os
import pickle
import queue
import socket
import struct
import sys
import tempfile
import termios
import threading
import time
from collections import deque
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from hpcrl.system.exit_codes import EXIT_FAILED

MAX_MESSAGE_BYTES = 1 << 15
LOST_AFTER_S = 30.0
"""A worker notes within milliseconds which task it has taken, unless it was killed, or is stopped for a while."""
LEDGER_INTERVAL_S = 5.0
_IN_FILE, _IN_MESSAGE = b"f", b"m"
_has_failed = threading.Event()


def end_after_answer() -> None:
    """Let this process answer its task, and end instead of taking another one."""
    _has_failed.set()


class PoolQueue:
    """A queue between processes; it is passed to a process that is spawned, as one of `multiprocessing`."""

    def __init__(self) -> None:
        self._reader, self._writer = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._start_empty()

    def _start_empty(self) -> None:
        self._waiting: deque[bytes] = deque()
        self._lock = threading.Condition()

    def __getstate__(self) -> tuple[socket.socket, socket.socket]:
        return self._reader, self._writer

    def __setstate__(self, ends: tuple[socket.socket, socket.socket]) -> None:
        self._reader, self._writer = ends
        self._start_empty()

    def put(self, item: Any) -> None:
        """Send an item at once, or, where the kernel holds enough already, in a thread as soon as it fits.

        A process that ends afterwards waits instead.
        """
        message = _IN_MESSAGE + pickle.dumps(item)
        if len(message) > MAX_MESSAGE_BYTES:
            message = _IN_FILE + _write_file(message[1:])
        with self._lock:
            if not self._waiting:
                with contextlib.suppress(BlockingIOError):
                    self._writer.send(message, 0 if _has_failed.is_set() else socket.MSG_DONTWAIT)
                    return
                threading.Thread(target=self._send_waiting, args=(message,), name="queue", daemon=True).start()
            self._waiting.append(message)

    def _send_waiting(self, message: bytes | None) -> None:
        """Send what waits, the first message first."""
        while message is not None:
            self._writer.send(message)
            with self._lock:
                self._waiting.popleft()
                message = self._waiting[0] if self._waiting else None

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        """Return the next item; raise queue.Empty if there is none in time."""
        if _has_failed.is_set():
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(EXIT_FAILED)
        wait_s = 0.0 if timeout is None else max(timeout, 1e-3)
        self._reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _pack_time(wait_s))
        try:
            message = self._reader.recv(MAX_MESSAGE_BYTES, 0 if block else socket.MSG_DONTWAIT)
        except BlockingIOError:
            raise queue.Empty from None
        content = message[1:]
        return pickle.loads(content if message[:1] == _IN_MESSAGE else _read_file(content))  # noqa: S301 - our own

    def qsize(self) -> int:
        """Return how many items were not sent yet."""
        return len(self._waiting)

    def is_empty(self) -> bool:
        """Return whether no item waits for a reader."""
        num_bytes = struct.unpack("i", fcntl.ioctl(self._reader, termios.FIONREAD, struct.pack("i", 0)))[0]
        return num_bytes == 0 and not self._waiting


def _pack_time(seconds: float) -> bytes:
    """Return a time limit as the kernel takes it; 0 is none."""
    return struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))


def _write_file(content: bytes) -> bytes:
    descriptor, path = tempfile.mkstemp(prefix="hpcrl-task-")
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
    return path.encode()


def _read_file(path: bytes) -> bytes:
    file = Path(path.decode())
    content = file.read_bytes()
    file.unlink(missing_ok=True)
    return content


class TaskLedger:
    """The tasks that a pool was sent and has not answered."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._open: set[int] = set()
        self._missing_since: dict[int, float] = {}
        self._next_look = float("-inf")

    def note_task(self, id: int) -> None:
        """Note a task that was sent to the workers."""
        self._open.add(id)

    def note_result(self, id: int) -> None:
        """Note that a task was answered."""
        self._open.discard(id)

    def is_due(self) -> bool:
        """Return whether it is time to look for lost tasks."""
        now = self._clock()
        if now < self._next_look:
            return False
        self._next_look = now + LEDGER_INTERVAL_S
        return True

    def find_lost(self, running: Collection[int]) -> int | None:
        """Return a task that no worker has had for a while; no task and no result may wait in a queue now."""
        now = self._clock()
        missing = self._open.difference(running)
        self._missing_since = {id: self._missing_since.get(id, now) for id in missing}
        lost = [id for id, since in self._missing_since.items() if now - since > LOST_AFTER_S]
        return min(lost, default=None)
