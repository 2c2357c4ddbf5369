"""An event loop whose time is virtual: asyncio code runs as it is, and sleeping takes no time.

    run_virtual      like asyncio.run; the clock jumps to the next timer as soon as nothing else can run
    VirtualLoop      the loop itself
    StuckLoopError   every task waits, and no timer is set

An hour of a fleet takes only as long as its Python code, and the figures are exact: the same program gives the same
times on an idle machine and on a busy one. That holds for code that takes the time from the loop (`loop.time()`,
`asyncio.sleep`, `asyncio.timeout`) and not from the machine (`time.monotonic`). Work for other threads
(`asyncio.to_thread`) runs at once, in the thread of the loop, and takes no virtual time. It has no network: if every
task waits for something that is not a timer, StuckLoopError is raised.
"""

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor
from typing import Any, TypeVar, TypeVarTuple, Unpack

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


class StuckLoopError(RuntimeError):
    """Every task waits, and no timer is set."""


def run_virtual(main: Coroutine[Any, Any, T]) -> T:
    """Run `main` to its end in virtual time, which starts at 0."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop in which the next timer is due as soon as nothing else can run."""

    def __init__(self) -> None:
        self._virtual_selector = _VirtualSelector()
        super().__init__(self._virtual_selector)

    def time(self) -> float:
        return self._virtual_selector.seconds

    def run_in_executor(
        self, executor: Executor | None, func: Callable[[Unpack[Ts]], T], *args: *Ts
    ) -> "asyncio.Future[T]":
        """Run `func` in the loop's own thread, in no virtual time."""
        done: asyncio.Future[T] = self.create_future()
        try:
            done.set_result(func(*args))
        except Exception as error:  # noqa: BLE001 - the future delivers it
            done.set_exception(error)
        return done


class _VirtualSelector(selectors.DefaultSelector):
    """A selector that jumps to the next timer instead of waiting for it."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            if ready := super().select(0):
                return ready
            raise StuckLoopError(f"at {self.seconds:g} s every task waits, and no timer is set: nothing can wake them")
        self.seconds += max(0.0, timeout)
        return []
