"""The order in which the rows of a task set are used: each row once an epoch, in that epoch's own shuffle. Pure.

    RowOrder        the row of each place in the endless sequence of a domain's rows
    RowProgress     the places that one env worker has taken, and those whose groups have not ended
    shuffle_number  a permutation of the first numbers, computed for one of them at a time

The row of a place depends only on the recipe's seed, the domain, the epoch and the place. Env worker i of n has the
places i, i + n, i + 2n, and so on; its progress is on disk, so that it goes on from there in the next job.
"""

from collections import deque
from collections.abc import Iterable, Mapping
from hashlib import blake2b
from typing import Any

import msgspec

from hpcrl.campaign_dir.workers import EnvWorkerId

_NUM_ROUNDS = 4


class RowOrder(msgspec.Struct, frozen=True, kw_only=True):
    """The order of a task set's rows."""

    num_rows: int
    shuffle_key: str | None
    """The order of each epoch depends on it; None: the order of the file."""

    def find_row(self, place: int) -> int:
        """Return the row of a place."""
        number = place % self.num_rows
        if self.shuffle_key is None:
            return number
        return shuffle_number(number, count=self.num_rows, key=f"{self.shuffle_key}/{self.find_epoch(place)}")

    def find_epoch(self, place: int) -> int:
        """Return the epoch of a place, from 0."""
        return place // self.num_rows


class RowProgress:
    """The progress of one env worker in one domain's rows."""

    def __init__(self, *, num_turns: int = 0, open_places: Iterable[int] = ()) -> None:
        """Continue after `num_turns` turns; the places that were open then are taken again first."""
        self.num_turns = num_turns
        """The worker's turns in the sequence that it has taken."""
        self._open = set(open_places)
        """Places whose groups have not ended, those returned included."""
        self._returned = deque(sorted(self._open))

    def peek_place(self, worker: EnvWorkerId) -> int:
        """Return the place that is taken next: one that was returned, else the one of the worker's next turn."""
        return self._returned[0] if self._returned else worker.index + self.num_turns * worker.count

    def take_place(self, worker: EnvWorkerId) -> int:
        """Take the next place."""
        place = self.peek_place(worker)
        if self._returned:
            return self._returned.popleft()
        self.num_turns += 1
        self._open.add(place)
        return place

    def finish_place(self, place: int) -> None:
        """Record that the group of a place was released, or lost for good."""
        self._open.discard(place)

    def return_place(self, place: int) -> None:
        """Take a place again later, if its group was ended before it could finish."""
        if place in self._open and place not in self._returned:
            self._returned.append(place)

    def to_json(self) -> dict[str, Any]:
        return {"num_turns": self.num_turns, "open": sorted(self._open)}

    @classmethod
    def from_json(cls, saved: Mapping[str, Any]) -> "RowProgress":
        return cls(num_turns=saved["num_turns"], open_places=saved["open"])


def shuffle_number(number: int, *, count: int, key: str) -> int:
    """Return the number that a permutation of range(count), chosen by `key`, has at `number`.

    It is a Feistel network over the next even number of bits; results outside the range go through it again.
    """
    half = max((count - 1).bit_length() + 1, 2) // 2
    while True:
        left, right = number >> half, number & ((1 << half) - 1)
        for step in range(_NUM_ROUNDS):
            left, right = right, left ^ _mix(key, step, right, bits=half)
        number = left << half | right
        if number < count:
            return number


def _mix(key: str, step: int, number: int, *, bits: int) -> int:
    digest = blake2b(f"{step}/{number}/{key}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> (64 - bits)
