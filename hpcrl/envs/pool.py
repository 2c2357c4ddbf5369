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

from hpcrl.config.recipe import Domain
from hpcrl.envs.base import Env, Step, make_env_aside
from hpcrl.envs.isolation.process import Limits, ProcessEnv
from hpcrl.envs.isolation.sandbox import Wanted
from hpcrl.errors import EnvFault


class Places:
    """The environments in processes of their own that one host may have at once."""

    def __init__(self, most: int, *, ahead: int) -> None:
        """`ahead`: how many of them may be made before their episodes begin, if that leaves half to those that run."""
        assert most > 0, f"{most} places"
        self._num_free_ahead = min(ahead, most // 2)
        self.running = asyncio.Semaphore(most - self._num_free_ahead)
        """For `async with`: the place of one episode."""

    def reserve(self, wanted: int) -> int:
        """Places for environments made ahead: as many of those wanted as are free. `give_back` each of them."""
        given = min(wanted, self._num_free_ahead)
        self._num_free_ahead -= given
        return given

    def give_back(self) -> None:
        """One that was made ahead has its episode now, or is gone."""
        self._num_free_ahead += 1


async def open_env(name: str, domain: Domain) -> Env:
    """Make an environment of domain `name`."""
    if domain.isolation == "none":
        return await make_env_aside(domain.env, domain.options, what=f"domains.{name}.env")
    limits = Limits(memory_bytes=int(domain.env_memory_gib * 2**30), cpu_s=domain.env_cpu_s)
    walls: Wanted = "auto" if domain.isolation == "sandbox" else "none"
    return await ProcessEnv.start(domain.env, domain.options, limits=limits, sandbox=walls)


class Pool:
    """Environments of one domain; `prepare` begins some for a task, `take` gives one to an episode."""

    def __init__(
        self,
        make: Callable[[], Awaitable[Env]],
        *,
        create_timeout_s: float,
        reset_timeout_s: float,
        most_starting: int,
        places: Places | None = None,
    ) -> None:
        """`most_starting`: how many are made at the same time; `places`: of environments that need one."""
        self._make = make
        self._places = places
        self._create_timeout_s = create_timeout_s
        self._reset_timeout_s = reset_timeout_s
        self._ready: defaultdict[int, deque[asyncio.Task[_Prepared]]] = defaultdict(deque)
        self._starting = asyncio.Semaphore(most_starting)
        self._giving_up: set[asyncio.Task[None]] = set()

    def prepare(self, seed: int, *, count: int) -> None:
        """Begin to make `count` environments, or fewer where places lack, and to reset them to the task of `seed`."""
        if self._places is not None:
            count = self._places.reserve(count)
        self._ready[seed] += [asyncio.create_task(self._prepared(seed)) for _ in range(count)]

    async def take(self, seed: int) -> Env:
        """An environment for the task of `seed`: a prepared one, else a new one; EnvFault if making it failed."""
        waiting = self._ready.get(seed)
        if not waiting:
            return await self._made()
        task = waiting.popleft()
        if not waiting:
            del self._ready[seed]
        try:
            env = await asyncio.shield(task)
        except asyncio.CancelledError:
            self._give_up(task)
            raise
        except BaseException:
            self._give_back()
            raise
        self._give_back()
        return env

    def forget(self, seed: int) -> None:
        """Nobody will take what is still prepared for this task."""
        for task in self._ready.pop(seed, ()):
            self._give_up(task)

    async def close(self) -> None:
        """End what nobody took."""
        for seed in list(self._ready):
            self.forget(seed)
        await asyncio.gather(*self._giving_up)

    async def _made(self) -> Env:
        """A new one; its time begins when it is its turn to start."""
        async with self._starting:
            try:
                async with asyncio.timeout(self._create_timeout_s):
                    return await self._make()
            except TimeoutError:
                raise EnvFault(f"making the environment: no answer in {self._create_timeout_s:g} s") from None

    async def _prepared(self, seed: int) -> "_Prepared":
        env = await self._made()
        try:
            async with asyncio.timeout(self._reset_timeout_s):
                return _Prepared(env, seed=seed, first=await env.reset(seed))
        except BaseException as error:
            await _close(env)
            if isinstance(error, TimeoutError):
                raise EnvFault(f"reset: no answer in {self._reset_timeout_s:g} s") from error
            raise

    def _give_up(self, task: "asyncio.Task[_Prepared]") -> None:
        ending = asyncio.create_task(self._end(task))
        self._giving_up.add(ending)
        ending.add_done_callback(self._giving_up.discard)

    async def _end(self, task: "asyncio.Task[_Prepared]") -> None:
        """Stop preparing, or close what has been prepared already."""
        task.cancel()
        try:
            with contextlib.suppress(Exception, asyncio.CancelledError):
                await _close(await task)
        finally:
            self._give_back()

    def _give_back(self) -> None:
        if self._places is not None:
            self._places.give_back()


class _Prepared:
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


async def _close(env: Env) -> None:
    with contextlib.suppress(Exception):  # it is given up; its process, if it has one, is killed all the same
        await env.close()
