"""A rank's rows of the next step, read while the present one is learned from.

Rank 0 guesses what the next step will train on, from what waits already; each rank reads its part of the guess. If the
step turns out so, its rows are there, else they are read then: what is trained on, and in which order, is never
changed by a guess. Two steps' rows are in memory at most: those that are learned from and those that come next.
"""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

from hpcrl.learn.batch import Row
from hpcrl.learn.deal import Share

Parts = list[list[Row]]
"""Rows of each minibatch."""


class Ahead:
    """One rank's reading; `read` brings the rows of a share."""

    def __init__(self, read: Callable[[Share], Parts]) -> None:
        self._read = read
        self._thread = ThreadPoolExecutor(1, "ahead")
        self._guess: Share | None = None
        self._coming: Future[Parts] | None = None

    def begin(self, guess: Share) -> None:
        """Read this in the background; whatever was begun before is let go."""
        self._let_go()
        if any(guess):
            self._guess, self._coming = guess, self._thread.submit(self._loaded, guess)

    def rows(self, share: Share) -> Parts:
        """The rows of this share, however they come."""
        if self._coming is None or share != self._guess:
            self._let_go()
            return self._read(share)
        try:
            return self._coming.result()
        finally:
            self._guess = self._coming = None

    def close(self) -> None:
        self._let_go()
        self._thread.shutdown()

    def _let_go(self) -> None:
        if self._coming is not None:
            self._coming.cancel()  # if it has begun already its result, and what went wrong with it, is nobody's
        self._guess = self._coming = None

    def _loaded(self, share: Share) -> Parts:
        """Not views of mapped files: the file system is waited for here."""
        return [[_copied(row) for row in rows] for rows in self._read(share)]


def _copied(row: Row) -> Row:
    return Row(
        inputs=np.array(row.inputs),
        mask=np.array(row.mask),
        targets=row.targets,
        behaviour=row.behaviour,
        credit=row.credit,
    )
