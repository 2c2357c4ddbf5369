"""Queue of turns that wait until engines have room again: however long it is, only a few are tried at a time."""

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

Answer = TypeVar("Answer")
MAX_REFUSALS = 32
"""The number of turns without success after which a pass stops; they go to the end, and the rest is tried next time."""


class RoomQueue(Generic[Answer]):
    """Waiting turns in the order of arrival."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[Callable[[], Answer | None], asyncio.Future[Answer]]] = deque()
        self._is_due = False

    async def wait(self, attempt: Callable[[], Answer | None]) -> Answer:
        """Wait until `attempt` returns a result. It must reserve the room itself: the next is tried right after it."""
        answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._waiting.append((attempt, answer))
        return await answer

    def wake(self) -> None:
        """Try the first turns soon, since there may be room."""
        if self._waiting and not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_soon(self._try_first)

    def fail(self, error: BaseException) -> None:
        """Fail all waiting turns, since nothing will wake them."""
        while self._waiting:
            _, answer = self._waiting.popleft()
            if not answer.done():
                answer.set_exception(error)

    def _try_first(self) -> None:
        self._is_due = False
        num_refused = 0
        for _ in range(len(self._waiting)):
            attempt, waiter = self._waiting.popleft()
            if waiter.done():  # it was cancelled
                continue
            answer = attempt()
            if answer is not None:
                waiter.set_result(answer)
                continue
            self._waiting.append((attempt, waiter))
            num_refused += 1
            if num_refused == MAX_REFUSALS:
                return
