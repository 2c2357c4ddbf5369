"""What an environment is: text in, text out, plain or async, and a reward at the end.

An environment is a class named in the recipe as `package.module:Name` and made with the domain's `options`.
It may be written with plain or with `async` methods; `adapt` gives the async form that episodes use.
Whatever it raises is an infrastructure fault (retried, never scored): an agent's bad action is a normal step.
"""

import asyncio
import contextlib
import importlib
import inspect
import queue
import threading
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, Protocol, TypeVar, cast

import msgspec

from hpcrl.errors import ConfigError
from hpcrl.spool.record import Trajectory

T = TypeVar("T")


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """The environment's answer to one action."""

    observation: str
    reward: float = 0.0
    done: bool = False


class Env(Protocol):
    """One environment, used for one episode at a time."""

    async def reset(self, seed: int) -> str:
        """Begin the task that `seed` names; returns the first observation. The same seed is the same task."""

    async def step(self, action: str) -> Step:
        """Do what the model said."""

    async def close(self) -> None: ...


Reward = Callable[[Trajectory], float | dict[str, float]]
"""A reward function: the score of a finished trajectory, or named parts whose sum is the score."""


def env_reward(trajectory: Trajectory) -> float:
    """The sum of what the environment gave, turn by turn."""
    return float(sum(turn.reward for turn in trajectory.turns))


def load_code(name: str, *, what: str) -> Any:
    """The object that `package.module:name` names; `what` says in messages where the name stands."""
    module_name, _, attribute = name.partition(":")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        raise ConfigError(
            f"{what} = {name!r}: importing {module_name} failed ({type(error).__name__}: {error}): "
            "install it in the environment that runs hpcrl, or mend the name"
        ) from error
    try:
        return getattr(module, attribute)
    except AttributeError:
        public = ", ".join(sorted(n for n in vars(module) if not n.startswith("_"))[:12])
        raise ConfigError(f"{what} = {name!r}: {module_name} has no {attribute!r}; it has {public}") from None


def make_env(name: str, options: dict[str, Any], *, what: str) -> Env:
    """Make the environment `name` with its options, in async form."""
    kind = load_code(name, what=what)
    try:
        return adapt(kind(**options))
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(f"{what} = {name!r} with options {options!r}: {type(error).__name__}: {error}") from error


def adapt(env: Any) -> Env:
    """The async form of an environment with plain methods; an async one is returned as it is."""
    missing = [name for name in ("reset", "step", "close") if not callable(getattr(env, name, None))]
    if missing:
        raise ConfigError(
            f"{type(env).__module__}:{type(env).__qualname__} has no {' and no '.join(missing)}: "
            "an environment has reset(seed) -> str, step(action) -> Step and close()"
        )
    kinds = {inspect.iscoroutinefunction(method) for method in (env.reset, env.step, env.close)}
    if len(kinds) > 1:
        raise ConfigError(
            f"{type(env).__module__}:{type(env).__qualname__} mixes plain and async methods: "
            "make reset, step and close all plain or all async"
        )
    return cast(Env, env) if kinds == {True} else _Threaded(env)


class _Threaded:
    """A plain environment with a thread of its own, so that a slow step stops no other episode.

    Always the same thread, since some libraries (browsers, sqlite) insist on it; a daemon, so that a step that hangs
    for good does not keep the worker from ending. Only `close` passes by a busy thread: it may be what frees it.
    """

    def __init__(self, env: Any) -> None:
        self._env = env
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._busy = False

    async def reset(self, seed: int) -> str:
        return await self._call(self._env.reset, seed)

    async def step(self, action: str) -> Step:
        return await self._call(self._env.step, action)

    async def close(self) -> None:
        if self._busy:
            aside = _Threaded(self._env)
            await aside.close()
        else:
            await self._call(self._env.close)
        self._calls.put(None)
        self._thread = None

    def _call(self, function: Callable[..., T], *args: Any) -> Awaitable[T]:
        if self._thread is None:
            self._thread = threading.Thread(target=_serve, args=(self._calls,), name="env", daemon=True)
            self._thread.start()
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[T] = loop.create_future()
        self._busy = True

        def run() -> None:
            try:
                settle = partial(_give, answer, result=function(*args))
            except BaseException as error:  # noqa: BLE001 - carried to the episode, which judges it
                settle = partial(_give, answer, error=error)
            self._busy = False
            with contextlib.suppress(RuntimeError):  # the loop has ended: nobody waits any more
                loop.call_soon_threadsafe(settle)

        self._calls.put(run)
        return answer


def _serve(calls: "queue.SimpleQueue[Callable[[], None] | None]") -> None:
    while (call := calls.get()) is not None:
        call()


def _give(answer: "asyncio.Future[Any]", *, result: Any = None, error: BaseException | None = None) -> None:
    if answer.done():  # given up at its deadline
        return
    if error is None:
        answer.set_result(result)
    elif isinstance(error, Exception) and not isinstance(error, StopIteration):
        answer.set_exception(error)
    else:  # a Future takes no StopIteration, and SystemExit would end the host
        answer.set_exception(RuntimeError(f"{type(error).__name__}: {error}"))
