"""The queue of events in simulated time (`EventQueue`). Its `now` takes the place of a clock in policies."""

import heapq
from collections.abc import Callable
from itertools import count


class EventQueue:
    """Calls at times in the future, the earliest first; calls at the same time in the order in which they were asked.

    `now` is the time in seconds since the simulation started.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self.num_run = 0
        """Calls that were made."""
        self._calls: list[tuple[float, int, Callable[[], object]]] = []
        self._numbers = count()

    def call_at(self, time: float, call: Callable[[], object]) -> None:
        """Make a call at a time; one in the past is made next."""
        heapq.heappush(self._calls, (max(time, self.now), next(self._numbers), call))

    def call_later(self, delay_s: float, call: Callable[[], object]) -> None:
        """Make a call after a delay."""
        self.call_at(self.now + delay_s, call)

    def run(self, *, is_done: Callable[[], bool], until: float = float("inf")) -> bool:
        """Make calls in order until `is_done`; return False if the time is up, or no call is left, before that."""
        calls = self._calls
        while calls:
            if is_done():
                return True
            if calls[0][0] > until:
                return False
            self.now, _, call = heapq.heappop(calls)
            self.num_run += 1
            call()
        return is_done()
