"""Turns that wait until engines have room again: however many there are, only a few are tried at a time."""

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

Answer = TypeVar("Answer")
MAX_REFUSALS = 32
"""Whoever comes after as many that found no room is tried the next time; those go to the end."""


class RoomQueue(Generic[Answer]):
    """Who waits, in the order in which they came."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[Callable[[], Answer | None], asyncio.Future[Answer]]] = deque()
        self._is_due = False

    async def wait(self, attempt: Callable[[], Answer | None]) -> Answer:
        """What `attempt` gives once it gives something. It takes its room itself: the next is tried right after it."""
        answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._waiting.append((attempt, answer))
        return await answer

    def wake(self) -> None:
        """There may be room: try the first ones soon."""
        if self._waiting and not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_soon(self._try_first)

    def fail(self, error: BaseException) -> None:
        """Nobody will ever wake them."""
        while self._waiting:
            _, answer = self._waiting.popleft()
            if not answer.done():
                answer.set_exception(error)

    def _try_first(self) -> None:
        self._is_due = False
        num_refused = 0
        for _ in range(len(self._waiting)):
            attempt, waiter = self._waiting.popleft()
            if waiter.done():  # it was given up
                continue
            answer = attempt()
            if answer is not None:
                waiter.set_result(answer)
                continue
            self._waiting.append((attempt, waiter))
            num_refused += 1
            if num_refused == MAX_REFUSALS:
                return
