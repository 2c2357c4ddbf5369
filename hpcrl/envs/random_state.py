"""Chance of its own for an environment that draws from the generators which all code in a process shares.

Such libraries seed `random` and `numpy.random` in reset; beside other episodes the draws would mix, and the same seed
would no longer be the same task. Only for code that does not wait while it draws.
"""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np


class IsolatedRandom:
    """The state of both generators between the calls of one environment."""

    def __init__(self) -> None:
        self._state: tuple[Any, Any] | None = None

    def seed(self, seed: int) -> None:
        """Begin anew."""
        with self.activate():
            random.seed(seed)
            np.random.seed(seed % 2**32)

    @contextmanager
    def activate(self) -> Iterator[None]:
        """The shared generators are ours for the while, and then as they were."""
        shared_state = random.getstate(), np.random.get_state()
        if self._state is not None:
            self._restore(self._state)
        try:
            yield
        finally:
            self._state = random.getstate(), np.random.get_state()
            self._restore(shared_state)

    @staticmethod
    def _restore(state: tuple[Any, Any]) -> None:
        random.setstate(state[0])
        np.random.set_state(state[1])
