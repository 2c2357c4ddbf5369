"""Queue of an env worker's next tasks, drawn by the weights of domains, with environments prepared ahead.

A domain that is over its fault budget is skipped until its pause ends; the others share its turns.
Tasks are drawn a little ahead, so that their environments are made and reset while earlier episodes still run. An
environment in a separate process also needs a slot, since the memory that the plan gives the worker is limited.
"""

import contextlib
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, nullcontext
from functools import partial

from hpcrl.config.recipe import DomainConfig
from hpcrl.envs.base import Env, TaskFields, is_program_domain
from hpcrl.envs.pool import EnvPool, EnvSlots, open_env
from hpcrl.errors import EnvFault
from hpcrl.hardware.memory_model import num_env_places
from hpcrl.rollout.fault_budget import FaultBudget
from hpcrl.rollout.tasks import AgentTask, TaskStream

ReadFields = Callable[[AgentTask], TaskFields | None]
"""Reads the row of a task, or returns None for a task that is a seed; raises EnvFault."""
MAX_STARTING_PER_CPU = 2
"""Environments of a domain that are made at once, for each CPU: more would only slow each other down."""


class TaskQueue:
    """The tasks and environments of one env worker."""

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
        read_fields: ReadFields = lambda task: None,
    ) -> None:
        """Set up the pools of `domains`.

        `cpus` and `mem_gib` are those of the worker with its environments; `open_env` makes an environment;
        `read_fields` reads the row of a task.
        """
        self.program_domains = {name for name, domain in domains.items() if is_program_domain(domain)}
        """Domains whose environment is an agent program; those are never prepared ahead."""
        self._domains = domains
        self._read_fields = read_fields
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
        """Take the task to start now; return None while every domain is paused."""
        open_domains = {name for name in self._domains if self._budget.may_start(name, now=now)}
        self._prefetch_tasks(open_domains)
        task = next((task for task in self._prefetched if task.domain in open_domains), None)
        if task is None:
            return None
        self._prefetched.remove(task)
        self._budget.record_start(task.domain, group=task.group)
        self._prefetch_tasks(open_domains)
        return task

    def reserve_slot(self, task: AgentTask) -> AbstractAsyncContextManager[None]:
        """Return the slot that an episode holds while it runs; only environments in separate processes need one."""
        return self._slots.running if task.domain in self._domains_with_process else nullcontext()

    async def take_env(self, task: AgentTask) -> Env:
        """Take an environment for one episode of a task."""
        return await self._pools[task.domain].take(task.seed, self._read_fields(task))

    def end_task(self, task: AgentTask) -> None:
        """Discard the environments of a task of which no more episodes will start; it decides no pause any more."""
        self._pools[task.domain].forget(task.seed)
        self._budget.record_cancel(task.domain, group=task.group)

    def return_task(self, task: AgentTask, *, lost: bool = False) -> None:
        """Start a task again, before any new one; after the next new one if its episodes were lost."""
        self._tasks.return_task(task, lost=lost)

    def record_end(self, domain: str, *, group: str, fault: bool, now: float) -> float | None:
        """Record how an episode ended; return for how many seconds its domain is paused from now, or None."""
        return self._budget.record_end(domain, group=group, fault=fault, now=now)

    def set_weights(self, weights: Mapping[str, float]) -> None:
        """Draw tasks by these weights from now on."""
        self._weights = dict(weights)

    async def close(self) -> None:
        """Close the environments that were not taken."""
        for pool in self._pools.values():
            await pool.close()

    def _prefetch_tasks(self, open_domains: set[str]) -> None:
        """Draw tasks of domains that may start, at least one, and prepare their environments."""
        num_prefetched = sum(task.domain in open_domains for task in self._prefetched)
        while num_prefetched < max(self._groups_ahead, 1) and (weights := self._current_weights(open_domains)):
            task = self._tasks.draw(weights)
            self._prefetched.append(task)
            num_prefetched += 1
            if self._groups_ahead and task.domain not in self.program_domains:
                with contextlib.suppress(EnvFault):  # each of its episodes ends with this fault
                    fields = self._read_fields(task)
                    self._pools[task.domain].prepare(task.seed, count=self._episodes_per_group, task=fields)

    def _current_weights(self, open_domains: set[str]) -> dict[str, float]:
        """Return the weights of the domains that have tasks and may start."""
        return {
            name: weight
            for name, weight in self._weights.items()
            if name in open_domains and weight > 0 and not self._tasks.is_ended(name)
        }
