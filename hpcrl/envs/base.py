"""What an environment is: text in, text out, plain or async, and a reward at the end.

An environment is a class named in the recipe as `package.module:Name` and made with the domain's `options`.
It may be written with plain or with `async` methods; `adapt` gives the async form that episodes use.
Whatever it raises is an infrastructure fault (retried, never scored): an agent's bad action is a normal step.
"""

import asyncio
import importlib
import inspect
from collections.abc import Awaitable, Callable
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
        env = kind(**options)
    except Exception as error:
        raise ConfigError(f"{what} = {name!r} with options {options!r}: {type(error).__name__}: {error}") from error
    return adapt(env)


def adapt(env: Any) -> Env:
    """The async form of an environment with plain methods; an async one is returned as it is."""
    return cast(Env, env) if inspect.iscoroutinefunction(env.step) else _Threaded(env)


class _Threaded:
    """A plain environment whose calls run in a thread, so that a slow step stops no other episode."""

    def __init__(self, env: Any) -> None:
        self._env = env

    async def reset(self, seed: int) -> str:
        return await _in_thread(self._env.reset, seed)

    async def step(self, action: str) -> Step:
        return await _in_thread(self._env.step, action)

    async def close(self) -> None:
        await _in_thread(self._env.close)


def _in_thread(function: Callable[..., T], *args: Any) -> Awaitable[T]:
    return asyncio.get_running_loop().run_in_executor(None, function, *args)
