"""What one env host begins next: tasks by the weights of their domains, with environments made ahead of them.

A domain whose environment is over its fault budget is passed over until its pause ends; the others share its turns.
Tasks are drawn a little ahead, so that their environments are made and reset while earlier episodes still run. What
has a process of its own has a place too, for the memory that the plan gives the host holds only so many.
"""

from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, nullcontext
from functools import partial

from hpcrl.config.recipe import DomainConfig
from hpcrl.envs.base import Env, is_program
from hpcrl.envs.pool import EnvPool, EnvSlots, open_env
from hpcrl.hardware.memory_model import num_env_places
from hpcrl.rollout.fault_budget import FaultBudget
from hpcrl.rollout.tasks import AgentTask, TaskStream

MAX_STARTING_PER_CPU = 2
"""Environments of a domain made at once: more that start at the same time would only slow each other down."""


class TaskQueue:
    """The tasks and environments of one env host."""

    def __init__(
        self,
        domains: Mapping[str, DomainConfig],
        *,
        tasks: TaskStream,
        budget: FaultBudget,
        groups_ahead: int,
        episodes_per_group: int,
        cpus: int,
        mem_gib: float,
        open_env: Callable[[str, DomainConfig], Awaitable[Env]] = open_env,
    ) -> None:
        """`cpus` and `mem_gib`: what this host has, its environments included; `open_env` makes one of a domain."""
        self.program_domains = {name for name, domain in domains.items() if is_program(domain.env)}
        """Domains whose environment drives the model itself; nothing of those is made ahead."""
        self._domains = domains
        self._tasks = tasks
        self._budget = budget
        self._groups_ahead = groups_ahead
        self._episodes_per_group = episodes_per_group
        self._weights = {name: domain.weight for name, domain in domains.items() if not domain.held_out}
        self._prefetched: deque[AgentTask] = deque()
        isolated = {name for name, domain in domains.items() if domain.isolation != "none"}
        self._domains_with_process = isolated | self.program_domains
        each_gib = max((domains[name].env_memory_gib for name in self._domains_with_process), default=mem_gib)
        self._slots = EnvSlots(
            max(num_env_places(mem_gib, each_gib=each_gib), 1),
            num_ahead=groups_ahead * episodes_per_group if isolated else 0,
        )
        self._pools = {
            name: EnvPool(
                partial(open_env, name, domain),
                create_timeout_s=domain.create_timeout_s,
                reset_timeout_s=domain.reset_timeout_s,
                max_starting=MAX_STARTING_PER_CPU * cpus,
                slots=self._slots if name in isolated else None,
            )
            for name, domain in domains.items()
        }

    def take_task(self, *, now: float) -> AgentTask | None:
        """The task that begins now; None while every domain is paused."""
        open_domains = {name for name, domain in self._domains.items() if self._budget.may_start(domain.env, now=now)}
        self._prefetch_tasks(open_domains)
        task = next((task for task in self._prefetched if task.domain in open_domains), None)
        if task is None:
            return None
        self._prefetched.remove(task)
        self._budget.record_start(self._domains[task.domain].env)
        self._prefetch_tasks(open_domains)
        return task

    def reserve_slot(self, task: AgentTask) -> AbstractAsyncContextManager[None]:
        """What an episode holds while it runs: room for its environment, if that has a process of its own."""
        return self._slots.running if task.domain in self._domains_with_process else nullcontext()

    async def take_env(self, task: AgentTask) -> Env:
        """An environment for one episode of a task."""
        return await self._pools[task.domain].take(task.seed)

    def discard_envs(self, task: AgentTask) -> None:
        """No episode of this task begins any more."""
        self._pools[task.domain].forget(task.seed)

    def record_end(self, domain: str, *, fault: bool, now: float) -> float | None:
        """Book how an episode ended; returns for how many seconds its environment is paused from now on, if it is."""
        return self._budget.record_end(self._domains[domain].env, fault=fault, now=now)

    def set_weights(self, weights: Mapping[str, float]) -> None:
        """From now on, tasks are drawn by these weights."""
        self._weights = dict(weights)

    async def close(self) -> None:
        """End the environments that nobody took."""
        for pool in self._pools.values():
            await pool.close()

    def _prefetch_tasks(self, open_domains: set[str]) -> None:
        """Draw tasks of domains that may begin, at least one, and prepare their environments."""
        weights = {name: weight for name, weight in self._weights.items() if name in open_domains and weight > 0}
        num_prefetched = sum(task.domain in open_domains for task in self._prefetched)
        while weights and num_prefetched < max(self._groups_ahead, 1):
            task = self._tasks.draw(weights)
            self._prefetched.append(task)
            num_prefetched += 1
            if self._groups_ahead and task.domain not in self.program_domains:
                self._pools[task.domain].prepare(task.seed, count=self._episodes_per_group)
