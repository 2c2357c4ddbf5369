"""Memory on a host for environments in processes of their own: a bounded number of places, some for those made ahead.

Whoever runs holds a place for the whole of its episode, so that no deadline runs while it waits for one. Those made
ahead have places of their own and wait for none: else they could hold what the episodes before them need to end.

Environments made, and reset to their task, before an episode needs them.

Pool       the environments of one domain
open_env   one environment, where its domain wants it: here, in a process of its own, or shut in
"""

import asyncio
import contextlib
from collections import defaultdict, deque
from collections.abc import Awaitable, Callable

from hpcrl.config.recipe import DomainConfig
from hpcrl.envs.base import Env, Step, make_env_in_thread
from hpcrl.envs.isolation.process import ProcessEnv, ProcessLimits
from hpcrl.envs.isolation.sandbox import SandboxChoice
from hpcrl.errors import EnvFault


class EnvSlots:
    """The environments in processes of their own that one host may have at once."""

    def __init__(self, max_envs: int, *, num_ahead: int) -> None:
        """`num_ahead`: how many of them may be made before their episodes begin, if that leaves half to those that run."""
        assert max_envs > 0, f"{max_envs} places"
        self._num_free_ahead = min(num_ahead, max_envs // 2)
        self.running = asyncio.Semaphore(max_envs - self._num_free_ahead)
        """For `async with`: the place of one episode."""

    def reserve(self, num_wanted: int) -> int:
        """Places for environments made ahead: as many of those wanted as are free. `release` each of them."""
        num_given = min(num_wanted, self._num_free_ahead)
        self._num_free_ahead -= num_given
        return num_given

    def release(self) -> None:
        """One that was made ahead has its episode now, or is gone."""
        self._num_free_ahead += 1


async def open_env(name: str, domain: DomainConfig) -> Env:
    """Make an environment of domain `name`."""
    if domain.isolation == "none":
        return await make_env_in_thread(domain.env, domain.options, what=f"domains.{name}.env")
    limits = ProcessLimits(memory_bytes=int(domain.env_memory_gib * 2**30), cpu_s=domain.env_cpu_s)
    sandbox: SandboxChoice = "auto" if domain.isolation == "sandbox" else "none"
    return await ProcessEnv.start(domain.env, domain.options, limits=limits, sandbox=sandbox)


class EnvPool:
    """Environments of one domain; `prepare` begins some for a task, `take` gives one to an episode."""

    def __init__(
        self,
        make: Callable[[], Awaitable[Env]],
        *,
        create_timeout_s: float,
        reset_timeout_s: float,
        max_starting: int,
        slots: EnvSlots | None = None,
    ) -> None:
        """`max_starting`: how many are made at the same time; `slots`: of environments that need one."""
        self._make = make
        self._slots = slots
        self._create_timeout_s = create_timeout_s
        self._reset_timeout_s = reset_timeout_s
        self._ready: defaultdict[int, deque[asyncio.Task[_PreparedEnv]]] = defaultdict(deque)
        self._starting = asyncio.Semaphore(max_starting)
        self._discarding: set[asyncio.Task[None]] = set()

    def prepare(self, seed: int, *, count: int) -> None:
        """Begin to make `count` environments, or fewer where places lack, and to reset them to the task of `seed`."""
        if self._slots is not None:
            count = self._slots.reserve(count)
        self._ready[seed] += [asyncio.create_task(self._prepare_env(seed)) for _ in range(count)]

    async def take(self, seed: int) -> Env:
        """An environment for the task of `seed`: a prepared one, else a new one; EnvFault if making it failed."""
        waiting = self._ready.get(seed)
        if not waiting:
            return await self._make_env()
        task = waiting.popleft()
        if not waiting:
            del self._ready[seed]
        try:
            env = await asyncio.shield(task)
        except asyncio.CancelledError:
            self._discard(task)
            raise
        except BaseException:
            self._release_slot()
            raise
        self._release_slot()
        return env

    def forget(self, seed: int) -> None:
        """Nobody will take what is still prepared for this task."""
        for task in self._ready.pop(seed, ()):
            self._discard(task)

    async def close(self) -> None:
        """End what nobody took."""
        for seed in list(self._ready):
            self.forget(seed)
        await asyncio.gather(*self._discarding)

    async def _make_env(self) -> Env:
        """A new one; its time begins when it is its turn to start."""
        async with self._starting:
            try:
                async with asyncio.timeout(self._create_timeout_s):
                    return await self._make()
            except TimeoutError:
                raise EnvFault(f"making the environment: no answer in {self._create_timeout_s:g} s") from None

    async def _prepare_env(self, seed: int) -> "_PreparedEnv":
        env = await self._make_env()
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
        """Stop preparing, or close what has been prepared already."""
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
    """An environment that was reset ahead of need."""

    def __init__(self, env: Env, *, seed: int, first: str) -> None:
        self._env = env
        self._seed = seed
        self._first: str | None = first

    async def reset(self, seed: int) -> str:
        first, self._first = self._first, None
        return first if first is not None and seed == self._seed else await self._env.reset(seed)

    async def step(self, action: str) -> Step:
        return await self._env.step(action)

    async def close(self) -> None:
        await self._env.close()


async def _close_quietly(env: Env) -> None:
    with contextlib.suppress(Exception):  # it is given up; its process, if it has one, is killed all the same
        await env.close()
