"""Tasks: domains drawn by weight, numbers that no two env workers share, seeds that define the task. Pure.

AgentTask           one task, the same for all episodes of a group
RowSource           what a stream of tasks needs of the domains' rows
TaskStream          the tasks of one env worker, without end
make_held_out_task  makes a task that is never trained on
choose_domain       chooses the domain furthest behind its weight
stable_hash         the same number in every process and on every machine
NUM_SEEDS           the seeds of training tasks
"""

import hashlib
from collections import Counter
from collections.abc import Mapping
from typing import Protocol

import msgspec

from hpcrl.campaign_dir.workers import EnvWorkerId
from hpcrl.spool.ids import make_episode_id, make_group_id, make_held_out_domain

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


def stable_hash(*parts: object, bits: int) -> int:
    """Return a number below 2 ** bits (at most 63, for int64 columns) hashed from the parts' text."""
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> (64 - bits)
