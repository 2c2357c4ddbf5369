"""A separate random state for an environment that uses the generators which all code in a process shares.

    IsolatedRandom  the state

Such libraries seed `random` and `numpy.random` in reset; beside other episodes the draws would mix, and the same seed
would no longer be the same task. It is only for code that does not wait while it draws.
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
        """Seed both generators."""
        with self.activate():
            random.seed(seed)
            np.random.seed(seed % 2**32)

    @contextmanager
    def activate(self) -> Iterator[None]:
        """Put this state into the shared generators during the block, and restore theirs afterwards."""
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
