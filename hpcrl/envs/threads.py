"""A thread of its own for code that blocks, with answers for a running event loop.

Always the same thread, since some libraries (browsers, sqlite) insist on it; a daemon, so that a call that hangs for
good does not keep the process from ending.
"""

import asyncio
import contextlib
import queue
import threading
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, TypeVar

T = TypeVar("T")


class OwnThread:
    """Runs one call after the other; the thread begins with the first."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self.busy = False
        """A call has not come back."""

    def call(self, function: Callable[..., T], *args: Any) -> Awaitable[T]:
        """Run `function` in the thread. Who is cancelled meanwhile leaves the call behind: it goes on."""
        if self._thread is None:
            self._thread = threading.Thread(target=_serve, args=(self._calls,), name="env", daemon=True)
            self._thread.start()
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[T] = loop.create_future()
        self.busy = True

        def run() -> None:
            try:
                settle = partial(_give, answer, result=function(*args))
            except BaseException as error:  # noqa: BLE001 - carried to the caller, who judges it
                settle = partial(_give, answer, error=error)
            self.busy = False
            with contextlib.suppress(RuntimeError):  # the loop has ended: nobody waits any more
                loop.call_soon_threadsafe(settle)

        self._calls.put(run)
        return answer

    def end(self) -> None:
        """Let the thread end once it is through with what it was given."""
        self._calls.put(None)
        self._thread = None


def _serve(calls: "queue.SimpleQueue[Callable[[], None] | None]") -> None:
    while (call := calls.get()) is not None:
        call()


def _give(answer: "asyncio.Future[Any]", *, result: Any = None, error: BaseException | None = None) -> None:
    if answer.done():  # given up at its deadline
        return
    if error is None:
        answer.set_result(result)
    elif isinstance(error, Exception) and not isinstance(error, StopIteration):
        answer.set_exception(error)
    else:  # a Future takes no StopIteration, and SystemExit would end the host
        answer.set_exception(RuntimeError(f"{type(error).__name__}: {error}"))
