"""Which task comes next: domains by weight, numbers that no two env hosts share, seeds that say what the task is. Pure.

Task          what the agent is asked
TaskStream    the tasks of one env host, without end
next_domain   the domain furthest behind its weight
stable_hash   the same number in every process and on every machine
held_out      a task that is never trained on
"""

import hashlib
from collections import Counter
from collections.abc import Mapping

import msgspec

from hpcrl.campaign_dir.workers import EnvWorkerId
from hpcrl.spool.ids import make_episode_id, make_group_id, make_held_out_domain

NUM_SEEDS = 1 << 31
"""Seeds of training tasks are below, those of held-out tasks are not."""


class AgentTask(msgspec.Struct, frozen=True, kw_only=True):
    """What the agent is asked; all episodes of a group have the same."""

    domain: str
    number: int
    """Unique in the campaign, over all domains and jobs."""
    seed: int
    """Given to the environment's `reset`."""

    @property
    def group(self) -> str:
        return make_group_id(self.domain, self.number)

    def episode(self, index: int) -> str:
        """The id of the group's episode `index`."""
        return make_episode_id(self.group, index)


class TaskStream:
    """The tasks of an env worker: numbers `start` and above that are its index modulo the count of workers.

    After a resume `start` must be above every number used before; a number used twice would be the same task again.
    """

    def __init__(self, worker: EnvWorkerId, *, recipe_seed: int, start: int = 0) -> None:
        self._recipe_seed = recipe_seed
        self._num_workers = worker.count
        self._next = start + (worker.index - start) % worker.count
        self._weights: dict[str, float] = {}
        self._num_started: Counter[str] = Counter()

    def draw(self, weights: Mapping[str, float]) -> AgentTask:
        """The next task. What was drawn by other weights is neither made up for nor held against a domain."""
        if weights != self._weights:
            self._weights, self._num_started = dict(weights), Counter()
        domain = choose_domain(self._weights, self._num_started)
        self._num_started[domain] += 1
        number, self._next = self._next, self._next + self._num_workers
        return AgentTask(domain=domain, number=number, seed=stable_hash(self._recipe_seed, domain, number, bits=31))


def make_held_out_task(domain: str, *, recipe_seed: int, round: int, index: int) -> AgentTask:
    """Held-out task `index` of a domain: the same in every round, and no seed of training's."""
    name = make_held_out_domain(domain)
    seed = NUM_SEEDS + stable_hash(recipe_seed, name, index, bits=31)
    return AgentTask(domain=name, number=round, seed=seed)


def choose_domain(weights: Mapping[str, float], num_started: Mapping[str, int]) -> str:
    """The domain whose share of the tasks begun is furthest below its weight's; the first by name among equals."""
    total_weight = sum(weights.values())
    num_total = sum(num_started[domain] for domain in weights) + 1
    return max(sorted(weights), key=lambda domain: weights[domain] / total_weight * num_total - num_started[domain])


def stable_hash(*parts: object, bits: int) -> int:
    """A number below 2 ** bits (at most 63, for int64 columns) made of the parts' text."""
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> (64 - bits)
