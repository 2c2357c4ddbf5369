"""A thread for work that training does not wait for.

BackgroundWork  the thread, and the work that it has
"""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any


class BackgroundWork:
    """Work that one thread does, one item after the other."""

    def __init__(self, *, name: str) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=name)
        self._items: list[Future[Any]] = []

    def run(self, work: Callable[[], Any]) -> None:
        """Run work after all that was given before."""
        self._items.append(self._thread.submit(work))

    def wait(self) -> None:
        """Wait until all work is done; its errors are raised here."""
        items, self._items = self._items, []
        for item in items:
            item.result()

    def close(self) -> None:
        """End the thread after its work."""
        self._thread.shutdown()
