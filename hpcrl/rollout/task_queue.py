"""What one env host begins next: tasks by the weights of their domains, with environments made ahead of them.

A domain whose environment is over its fault budget is passed over until its pause ends; the others share its turns.
Tasks are drawn a little ahead, so that their environments are made and reset while earlier episodes still run. What
has a process of its own has a place too, for the memory that the plan gives the host holds only so many.
"""

from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, nullcontext
from functools import partial

from hpcrl.config.recipe import Domain
from hpcrl.envs.base import Env, is_program
from hpcrl.envs.pool import Places, Pool, open_env
from hpcrl.hardware.memory_model import env_places
from hpcrl.rollout.fault_budget import FaultBudget
from hpcrl.rollout.tasks import Task, TaskStream

STARTING_PER_CPU = 2
"""Environments of a domain made at once: more that start at the same time would only slow each other down."""


class Agenda:
    """The tasks and environments of one env host."""

    def __init__(
        self,
        domains: Mapping[str, Domain],
        *,
        tasks: TaskStream,
        budget: FaultBudget,
        groups_ahead: int,
        episodes_per_group: int,
        cpus: int,
        mem_gib: float,
        open_env: Callable[[str, Domain], Awaitable[Env]] = open_env,
    ) -> None:
        """`cpus` and `mem_gib`: what this host has, its environments included; `open_env` makes one of a domain."""
        self.programs = {name for name, domain in domains.items() if is_program(domain.env)}
        """Domains whose environment drives the model itself; nothing of those is made ahead."""
        self._domains = domains
        self._tasks = tasks
        self._budget = budget
        self._groups_ahead = groups_ahead
        self._episodes_per_group = episodes_per_group
        self._weights = {name: domain.weight for name, domain in domains.items() if not domain.held_out}
        self._ahead: deque[Task] = deque()
        isolated = {name for name, domain in domains.items() if domain.isolation != "none"}
        self._with_process = isolated | self.programs
        each_gib = max((domains[name].env_memory_gib for name in self._with_process), default=mem_gib)
        self._places = Places(
            max(env_places(mem_gib, each_gib=each_gib), 1),
            ahead=groups_ahead * episodes_per_group if isolated else 0,
        )
        self._pools = {
            name: Pool(
                partial(open_env, name, domain),
                create_timeout_s=domain.create_timeout_s,
                reset_timeout_s=domain.reset_timeout_s,
                most_starting=STARTING_PER_CPU * cpus,
                places=self._places if name in isolated else None,
            )
            for name, domain in domains.items()
        }

    def next(self, *, now: float) -> Task | None:
        """The task that begins now; None while every domain is paused."""
        may = {name for name, domain in self._domains.items() if self._budget.may_begin(domain.env, now=now)}
        self._look_ahead(may)
        task = next((task for task in self._ahead if task.domain in may), None)
        if task is None:
            return None
        self._ahead.remove(task)
        self._budget.began(self._domains[task.domain].env)
        self._look_ahead(may)
        return task

    def place(self, task: Task) -> AbstractAsyncContextManager[None]:
        """What an episode holds while it runs: room for its environment, if that has a process of its own."""
        return self._places.running if task.domain in self._with_process else nullcontext()

    async def env(self, task: Task) -> Env:
        """An environment for one episode of a task."""
        return await self._pools[task.domain].take(task.seed)

    def closed(self, task: Task) -> None:
        """No episode of this task begins any more."""
        self._pools[task.domain].forget(task.seed)

    def ended(self, domain: str, *, fault: bool, now: float) -> float | None:
        """Book how an episode ended; returns for how many seconds its environment is paused from now on, if it is."""
        return self._budget.ended(self._domains[domain].env, fault=fault, now=now)

    def reweigh(self, weights: Mapping[str, float]) -> None:
        """From now on, tasks are drawn by these weights."""
        self._weights = dict(weights)

    async def close(self) -> None:
        """End the environments that nobody took."""
        for pool in self._pools.values():
            await pool.close()

    def _look_ahead(self, may: set[str]) -> None:
        """Draw tasks of domains that may begin, at least one, and prepare their environments."""
        weights = {name: weight for name, weight in self._weights.items() if name in may and weight > 0}
        num_ahead = sum(task.domain in may for task in self._ahead)
        while weights and num_ahead < max(self._groups_ahead, 1):
            task = self._tasks.draw(weights)
            self._ahead.append(task)
            num_ahead += 1
            if self._groups_ahead and task.domain not in self.programs:
                self._pools[task.domain].prepare(task.seed, count=self._episodes_per_group)
