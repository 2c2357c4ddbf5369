"""Environments that are made, and reset to their task, before an episode needs them.

    EnvPool    the environments of one domain
    EnvSlots   a bounded number of slots for environments in separate processes, whose memory is limited
    open_env   make one environment with the isolation of its domain: in this process, a separate one, or a sandbox
    start_process  make one in a separate process

An episode holds a slot for its whole time, so that no deadline runs while it waits for one. Environments made ahead
have separate slots and never wait: else they could hold the slots that earlier episodes need to end.
"""

import asyncio
import contextlib
import sys
from collections import defaultdict, deque
from collections.abc import Awaitable, Callable

from hpcrl.config.recipe import DomainConfig
from hpcrl.envs.base import Env, Step, TaskEnv, TaskFields, TaskStart, choose_seed, make_env_in_thread
from hpcrl.envs.isolation.sandbox import SandboxChoice
from hpcrl.envs.process import ProcessEnv, ProcessLimits
from hpcrl.errors import EnvFault


class EnvSlots:
    """The slots of one env worker for environments in separate processes."""

    def __init__(self, max_envs: int, *, num_ahead: int) -> None:
        """Split the slots: `num_ahead`, but at most half, are for environments made before their episodes start."""
        assert max_envs > 0, f"{max_envs} places"
        self._num_free_ahead = min(num_ahead, max_envs // 2)
        self.running = asyncio.Semaphore(max_envs - self._num_free_ahead)
        """The slot of one episode, for `async with`."""

    def reserve(self, num_wanted: int) -> int:
        """Reserve slots for environments made ahead, as far as they are free; `release` each of them."""
        num_given = min(num_wanted, self._num_free_ahead)
        self._num_free_ahead -= num_given
        return num_given

    def release(self) -> None:
        """Free the slot of an environment made ahead, which is used by an episode now, or closed."""
        self._num_free_ahead += 1


async def open_env(name: str, domain: DomainConfig) -> Env:
    """Make an environment of domain `name`."""
    if domain.isolation == "none":
        return await make_env_in_thread(domain.env, domain.options, what=f"domains.{name}.env")
    return await start_process(domain)


async def start_process(domain: DomainConfig) -> ProcessEnv:
    """Make an environment of a domain in a separate process."""
    sandbox: SandboxChoice = "auto" if domain.isolation == "sandbox" else "none"
    return await ProcessEnv.start(
        domain.env,
        domain.options,
        limits=ProcessLimits(memory_bytes=int(domain.env_memory_gib * 2**30), cpu_s=domain.env_cpu_s),
        sandbox=sandbox,
        has_tasks=domain.tasks is not None,
        python=domain.python or sys.executable,
    )


class EnvPool:
    """The environments of one domain; `prepare` starts some for a task, `take` returns one for an episode."""

    def __init__(
        self,
        make: Callable[[], Awaitable[Env]],
        *,
        create_timeout_s: float,
        reset_timeout_s: float,
        max_starting: int,
        slots: EnvSlots | None = None,
    ) -> None:
        """Create a pool that makes at most `max_starting` at the same time; `slots`: None if they need none."""
        self._make = make
        self._slots = slots
        self._create_timeout_s = create_timeout_s
        self._reset_timeout_s = reset_timeout_s
        self._ready: defaultdict[int, deque[asyncio.Task[_PreparedEnv]]] = defaultdict(deque)
        self._starting = asyncio.Semaphore(max_starting)
        self._discarding: set[asyncio.Task[None]] = set()

    def prepare(self, seed: int, *, count: int, task: TaskFields | None = None) -> None:
        """Start to make `count` environments, or fewer if slots are short, and reset them to the task of `seed`."""
        if self._slots is not None:
            count = self._slots.reserve(count)
        self._ready[seed] += [asyncio.create_task(self._prepare_env(seed, task)) for _ in range(count)]

    async def take(self, seed: int, task: TaskFields | None = None) -> Env:
        """Return a prepared environment for the task of `seed`, else a new one; raises EnvFault if making it failed."""
        waiting = self._ready.get(seed)
        if not waiting:
            return await self._make_env(task)
        preparing = waiting.popleft()
        if not waiting:
            del self._ready[seed]
        try:
            env = await asyncio.shield(preparing)
        except asyncio.CancelledError:
            self._discard(preparing)
            raise
        except BaseException:
            self._release_slot()
            raise
        self._release_slot()
        return env

    def forget(self, seed: int) -> None:
        """Discard the environments that are still prepared for this task."""
        for preparing in self._ready.pop(seed, ()):
            self._discard(preparing)

    async def close(self) -> None:
        """End all environments that were not taken."""
        for seed in list(self._ready):
            self.forget(seed)
        await asyncio.gather(*self._discarding)

    async def _make_env(self, task: TaskFields | None) -> Env:
        """Make a new one; its time limit starts when its turn has come."""
        async with self._starting:
            try:
                async with asyncio.timeout(self._create_timeout_s):
                    env = await self._make()
                return env if task is None else TaskEnv(env, task)
            except TimeoutError:
                raise EnvFault(f"making the environment: no answer in {self._create_timeout_s:g} s") from None

    async def _prepare_env(self, seed: int, task: TaskFields | None) -> "_PreparedEnv":
        env, seed = await self._make_env(task), choose_seed(seed, task)
        try:
            async with asyncio.timeout(self._reset_timeout_s):
                return _PreparedEnv(env, seed=seed, first=await env.reset(seed))
        except BaseException as error:
            await _close_quietly(env)
            if isinstance(error, TimeoutError):
                raise EnvFault(f"reset: no answer in {self._reset_timeout_s:g} s") from error
            raise

    def _discard(self, task: "asyncio.Task[_PreparedEnv]") -> None:
        ending = asyncio.create_task(self._stop_preparing(task))
        self._discarding.add(ending)
        ending.add_done_callback(self._discarding.discard)

    async def _stop_preparing(self, task: "asyncio.Task[_PreparedEnv]") -> None:
        """Stop preparing, or close the environment if it is ready."""
        task.cancel()
        try:
            with contextlib.suppress(Exception, asyncio.CancelledError):
                await _close_quietly(await task)
        finally:
            self._release_slot()

    def _release_slot(self) -> None:
        if self._slots is not None:
            self._slots.release()


class _PreparedEnv:
    """An environment that was reset before it is needed."""

    def __init__(self, env: Env, *, seed: int, first: TaskStart) -> None:
        self._env = env
        self._seed = seed
        self._first: TaskStart | None = first

    async def reset(self, seed: int) -> TaskStart:
        first, self._first = self._first, None
        return first if first is not None and seed == self._seed else await self._env.reset(seed)

    async def step(self, action: str) -> Step:
        return await self._env.step(action)

    async def close(self) -> None:
        await self._env.close()


async def _close_quietly(env: Env) -> None:
    with contextlib.suppress(Exception):  # it is not used any more; its process, if any, is killed anyway
        await env.close()
