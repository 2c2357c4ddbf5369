"""Tasks: domains drawn by weight, numbers that no two env workers share, seeds or rows that define the task. Pure.

AgentTask           one task, the same for all episodes of a group
RowSource           what a stream of tasks needs of the domains' rows
RowOrder            the row of each place in the endless sequence of a domain's rows
RowProgress         the places that one env worker has taken, and those whose groups have not ended
shuffle_number      a permutation of the first numbers, computed for one of them at a time
TaskStream          the tasks of one env worker, without end
make_held_out_task  makes a task that is never trained on
choose_domain       chooses the domain furthest behind its weight
stable_hash         the same number in every process and on every machine
NUM_SEEDS           the seeds of training tasks

The row of a place depends only on the recipe's seed, the domain, the epoch and the place. Env worker i of n has the
places i, i + n, i + 2n, and so on; its progress is on disk, so that it continues from there in the next job.
"""

import hashlib
from collections import Counter, deque
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

import msgspec

from hpcrl.campaign_dir.workers import EnvWorkerId
from hpcrl.spool.ids import make_episode_id, make_group_id, make_held_out_domain

_NUM_SHUFFLE_ROUNDS = 4
NUM_SEEDS = 1 << 31
"""The bound of seeds: those of training tasks are below it, those of held-out tasks are not."""


class AgentTask(msgspec.Struct, frozen=True, kw_only=True):
    """The task of an agent; all episodes of a group have the same."""

    domain: str
    number: int
    """Unique in the campaign, over all domains and jobs."""
    seed: int
    """Given to the environment's `reset`."""
    place: int | None = None
    """Its place in the sequence of its domain's rows, if the domain has `tasks`."""

    @property
    def group(self) -> str:
        return make_group_id(self.domain, self.number)

    def episode(self, index: int) -> str:
        """Return the id of the group's episode `index`."""
        return make_episode_id(self.group, index)


class RowSource(Protocol):
    """The rows of domains with `tasks`; `hpcrl.rollout.task_sets.TaskSets` is one."""

    def is_ended(self, domain: str) -> bool:
        """Return whether a domain has no more tasks for this worker."""

    def take_place(self, domain: str) -> int | None:
        """Take the place of the next row; None for a domain whose tasks are seeds."""


class TaskStream:
    """The tasks of an env worker: numbers `start` and above that equal its index modulo the number of workers.

    After a resume `start` must be above every number used before; a number used twice would repeat the task.
    """

    def __init__(self, worker: EnvWorkerId, *, recipe_seed: int, start: int = 0, rows: RowSource | None = None) -> None:
        self._rows = rows
        self._recipe_seed = recipe_seed
        self._num_workers = worker.count
        self._next = start + (worker.index - start) % worker.count
        self._weights: dict[str, float] = {}
        self._num_started: Counter[str] = Counter()

    def draw(self, weights: Mapping[str, float]) -> AgentTask:
        """Draw the next task; draws under earlier weights count neither for nor against a domain."""
        if weights != self._weights:
            self._weights, self._num_started = dict(weights), Counter()
        domain = choose_domain(self._weights, self._num_started)
        self._num_started[domain] += 1
        number, self._next = self._next, self._next + self._num_workers
        return AgentTask(
            domain=domain,
            number=number,
            seed=stable_hash(self._recipe_seed, domain, number, bits=31),
            place=self._rows.take_place(domain) if self._rows is not None else None,
        )

    def is_ended(self, domain: str) -> bool:
        """Return whether a domain has no more tasks."""
        return self._rows is not None and self._rows.is_ended(domain)


def make_held_out_task(domain: str, *, recipe_seed: int, round: int, index: int) -> AgentTask:
    """Make held-out task `index` of a domain: the same in every round, with a seed that training never uses."""
    name = make_held_out_domain(domain)
    seed = NUM_SEEDS + stable_hash(recipe_seed, name, index, bits=31)
    return AgentTask(domain=name, number=round, seed=seed, place=index)


def choose_domain(weights: Mapping[str, float], num_started: Mapping[str, int]) -> str:
    """Return the domain whose share of started tasks is furthest below its weight; the first by name among equals."""
    total_weight = sum(weights.values())
    num_total = sum(num_started[domain] for domain in weights) + 1
    return max(sorted(weights), key=lambda domain: weights[domain] / total_weight * num_total - num_started[domain])


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
        """Record that the group of a place is durable, or lost for good."""
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
        for step in range(_NUM_SHUFFLE_ROUNDS):
            left, right = right, left ^ stable_hash(key, step, right, bits=half)
        number = left << half | right
        if number < count:
            return number


def stable_hash(*parts: object, bits: int) -> int:
    """Return a number below 2 ** bits (at most 63, for int64 columns) hashed from the parts' text."""
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> (64 - bits)
