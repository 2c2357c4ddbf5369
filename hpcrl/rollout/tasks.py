"""Tasks: domains drawn by weight, numbers that no two env workers share, seeds or rows that define the task. Pure.

AgentTask           one task, the same for all episodes of a group
RowSource           what a stream of tasks needs of the domains' rows
RowOrder            the row of each place in the endless sequence of a domain's rows
DrawProgress        how many tasks an env worker has drawn
shuffle_number      a permutation of the first numbers, computed for one of them at a time
TaskStream          the tasks of one env worker, without end
make_held_out_task  makes a task that is never trained on
choose_domain       chooses the domain furthest behind its weight
stable_hash         the same number in every process and on every machine
NUM_SEEDS           the seeds of training tasks

The row of a place depends only on the recipe's seed, the domain, the epoch and the place. Env worker i of n has the
places i, i + n, i + 2n, and so on, and the same numbers; how many it has drawn is in its journal
(hpcrl.rollout.journal), so that the next job draws what this one would have drawn.
"""

import hashlib
from collections import deque
from collections.abc import Callable, Container, Mapping
from typing import Protocol

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
        """Return whether a domain has no more rows for this worker."""

    def next_place(self, domain: str) -> int | None:
        """Return the place of the next row; None for a domain whose tasks are seeds."""


class DrawProgress(msgspec.Struct, kw_only=True):
    """The place of an env worker in its stream of tasks."""

    num_drawn: int = 0
    """Tasks that were drawn, in all runs."""
    weights: dict[str, float] = {}
    """The weights of the last draw."""
    drawn: dict[str, int] = {}
    """Tasks that were drawn by these weights, by domain."""
    rows: dict[str, int] = {}
    """Tasks that were drawn, in all runs, of each domain with rows."""

    def record_draw(self, task: AgentTask, weights: Mapping[str, float]) -> None:
        """Record that a task was drawn by these weights; draws by others are forgotten."""
        if weights != self.weights:
            self.weights, self.drawn = dict(weights), {}
        self.num_drawn += 1
        self.drawn[task.domain] = self.drawn.get(task.domain, 0) + 1
        if task.place is not None:
            self.rows[task.domain] = self.rows.get(task.domain, 0) + 1


class TaskStream:
    """The tasks of an env worker: those returned, then new ones, whose numbers are its index modulo the workers.

    Those whose episodes were lost take turns with new ones, so that some that cannot be played do not hold up others.
    """

    def __init__(
        self,
        worker: EnvWorkerId,
        *,
        recipe_seed: int,
        rows: RowSource | None = None,
        progress: DrawProgress | None = None,
        record_draw: Callable[[AgentTask, Mapping[str, float]], None] | None = None,
    ) -> None:
        """Continue from `progress`, which `record_draw` keeps up to date; by default its own method."""
        self._rows = rows
        self._recipe_seed = recipe_seed
        self._worker = worker
        self._progress = progress or DrawProgress()
        self._record_draw = record_draw or self._progress.record_draw
        self._returned: deque[AgentTask] = deque()
        self._lost: deque[AgentTask] = deque()
        self._is_turn_of_lost = False

    def draw(self, weights: Mapping[str, float]) -> AgentTask:
        """Draw the next task; draws under earlier weights count neither for nor against a domain."""
        fresh = {domain: weight for domain, weight in weights.items() if not self._has_no_new(domain)}
        if (task := _take_first(self._returned, weights)) is not None:
            return task
        if (self._is_turn_of_lost or not fresh) and (task := _take_first(self._lost, weights)) is not None:
            self._is_turn_of_lost = False
            return task
        self._is_turn_of_lost = True
        progress = self._progress
        domain = choose_domain(fresh, progress.drawn if weights == progress.weights else {})
        number = self._worker.index + progress.num_drawn * self._worker.count
        task = AgentTask(
            domain=domain,
            number=number,
            seed=stable_hash(self._recipe_seed, domain, number, bits=31),
            place=self._rows.next_place(domain) if self._rows is not None else None,
        )
        self._record_draw(task, weights)
        return task

    def return_task(self, task: AgentTask, *, lost: bool = False) -> None:
        """Draw a task again, before any new one; after the next new one if its episodes were lost."""
        if lost:
            self._is_turn_of_lost = self._is_turn_of_lost and bool(self._lost)
            self._lost.append(task)
        else:
            self._returned.append(task)

    def is_ended(self, domain: str) -> bool:
        """Return whether a domain has no more tasks."""
        return self._has_no_new(domain) and not any(task.domain == domain for task in (*self._returned, *self._lost))

    def _has_no_new(self, domain: str) -> bool:
        return self._rows is not None and self._rows.is_ended(domain)


def _take_first(tasks: deque[AgentTask], domains: Container[str]) -> AgentTask | None:
    """Take the first task that is of one of these domains."""
    first = next((task for task in tasks if task.domain in domains), None)
    if first is not None:
        tasks.remove(first)
    return first


def make_held_out_task(domain: str, *, recipe_seed: int, round: int, index: int) -> AgentTask:
    """Make held-out task `index` of a domain: the same in every round, with a seed that training never uses."""
    name = make_held_out_domain(domain)
    seed = NUM_SEEDS + stable_hash(recipe_seed, name, index, bits=31)
    return AgentTask(domain=name, number=round, seed=seed, place=index)


def choose_domain(weights: Mapping[str, float], num_started: Mapping[str, int]) -> str:
    """Return the domain whose share of started tasks is furthest below its weight; the first by name among equals."""
    total_weight = sum(weights.values())
    started = {domain: num_started.get(domain, 0) for domain in weights}
    num_total = sum(started.values()) + 1
    return max(sorted(weights), key=lambda domain: weights[domain] / total_weight * num_total - started[domain])


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
