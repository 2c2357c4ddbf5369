"""The needs of a stage's layers, kept for each pass of a micro-batch.

Several micro-batches are in a pipeline at the same time, and a layer that is recomputed runs again during a backward
pass, after the forward pass of others: what it needed then, it gets again.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Generic, TypeVar

Value = TypeVar("Value")


class KeptPass(Generic[Value]):
    """The needs of layers in the pass that is made; None outside, and where they have none."""

    def __init__(self) -> None:
        self.current: Value | None = None

    @contextmanager
    def use(self, value: Value | None) -> Iterator[None]:
        """Have this value in a pass."""
        previous, self.current = self.current, value
        try:
            yield
        finally:
            self.current = previous

    def use_again(self) -> AbstractContextManager[None]:
        """Return the context in which the current value is there again."""
        return self.use(self.current)
