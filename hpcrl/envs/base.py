"""What an environment is: text in, text out, plain or async, and a reward at the end.

An environment is a class named in the recipe as `package.module:Name` and made with the domain's `options`.
It may be written with plain or with `async` methods; `adapt_env` gives the async form that episodes use.
Whatever it raises is an infrastructure fault (retried, never scored): an agent's bad action is a normal step.

A thread of its own for code that blocks, with answers for a running event loop.

Always the same thread, since some libraries (browsers, sqlite) insist on it; a daemon, so that a call that hangs for
good does not keep the process from ending.
"""

import asyncio
import contextlib
import inspect
import queue
import threading
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar, cast

import msgspec

from hpcrl.config.user_code import load_code
from hpcrl.errors import ConfigError

if TYPE_CHECKING:
    from hpcrl.spool.record import Trajectory


T = TypeVar("T")


class OwnThread:
    """Runs one call after the other; the thread begins with the first."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self.busy = False
        """A call has not come back."""

    def call(self, function: Callable[..., T], *args: Any) -> Awaitable[T]:
        """Run `function` in the thread. Who is cancelled meanwhile leaves the call behind: it goes on."""
        if self._thread is None:
            self._thread = threading.Thread(target=_run_calls, args=(self._calls,), name="env", daemon=True)
            self._thread.start()
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[T] = loop.create_future()
        self.busy = True

        def run() -> None:
            try:
                settle = partial(_resolve_future, answer, result=function(*args))
            except BaseException as error:
                settle = partial(_resolve_future, answer, error=error)
            self.busy = False
            with contextlib.suppress(RuntimeError):  # the loop has ended: nobody waits any more
                loop.call_soon_threadsafe(settle)

        self._calls.put(run)
        return answer

    def end(self) -> None:
        """Let the thread end once it is through with what it was given."""
        self._calls.put(None)
        self._thread = None


def _run_calls(calls: "queue.SimpleQueue[Callable[[], None] | None]") -> None:
    while (call := calls.get()) is not None:
        call()


def _resolve_future(answer: "asyncio.Future[Any]", *, result: Any = None, error: BaseException | None = None) -> None:
    if answer.done():  # given up at its deadline
        return
    if error is None:
        answer.set_result(result)
    elif isinstance(error, Exception) and not isinstance(error, StopIteration):
        answer.set_exception(error)
    else:  # a Future takes no StopIteration, and SystemExit would end the host
        answer.set_exception(RuntimeError(f"{type(error).__name__}: {error}"))


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


class ModelAccess(msgspec.Struct, frozen=True, kw_only=True):
    """Where a program reaches the model, by OpenAI's API."""

    url: str
    """On loopback; ends in /v1."""
    socket: str
    """The same as a socket file, for sandboxes without a network."""
    api_key: str
    """This program's own."""
    model: str


class ProgramEnv(Protocol):
    """An environment that drives the model itself: an agent program, used for one episode.

    It is recognised by its method `run`.
    """

    sampling: Literal["recipe", "program"]
    """Whose temperature, top_p and top_k count; what is not sampled as the recipe says is not trained on."""
    trains: Literal["longest", "last"]
    """Which of its conversations is trained: where the model said most, or the one gone on with last."""

    async def run(self, seed: int, access: ModelAccess) -> float | None:
        """Do the task that `seed` names; returns the reward, or None if it was posted. Being cancelled ends it all."""


RewardFunction = Callable[["Trajectory"], float | dict[str, float]]
"""A reward function: the score of a finished trajectory, or named parts whose sum is the score."""


def env_reward(trajectory: "Trajectory") -> float:
    """The sum of what the environment gave, turn by turn."""
    return float(sum(turn.reward for turn in trajectory.turns))


def make_env(name: str, options: dict[str, Any], *, what: str) -> Env:
    """Make the environment `name` with its options, in async form."""
    return adapt_env(construct_env(name, options, what=what))


async def make_env_in_thread(name: str, options: dict[str, Any], *, what: str) -> Env:
    """The same in a thread: importing and making it stop no other episode, and who waits too long can be cancelled."""
    thread = OwnThread()
    try:
        return adapt_env(await thread.call(partial(construct_env, name, options, what=what)), thread=thread)
    except BaseException:
        thread.end()
        raise


def construct_env(name: str, options: dict[str, Any], *, what: str) -> Any:
    """Make the environment `name` with its options, as it is."""
    kind = load_code(name, what=what)
    try:
        env = kind(**options)
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(f"{what} = {name!r} with options {options!r}: {type(error).__name__}: {error}") from error
    _check_methods(env)
    return env


def adapt_env(env: Any, *, thread: OwnThread | None = None) -> Env:
    """The async form of an environment with plain methods, which run in `thread`; an async one is returned as it is."""
    if not _check_methods(env):
        return _ThreadedEnv(env, thread or OwnThread())
    if thread is not None:
        thread.end()
    return cast(Env, env)


def make_program(name: str, options: dict[str, Any], *, what: str) -> ProgramEnv:
    """Make the agent program `name` with its options."""
    return cast(ProgramEnv, construct_env(name, options, what=what))


def is_program(name: str) -> bool:
    """Whether this environment drives the model itself; what cannot be loaded is found out when it is used."""
    try:
        return callable(getattr(load_code(name, what="env"), "run", None))
    except ConfigError:
        return False


def _check_methods(env: Any) -> bool:
    """Refuse what is no environment; True for an async one."""
    if inspect.iscoroutinefunction(getattr(env, "run", None)):
        return True
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
    return kinds == {True}


class _ThreadedEnv:
    """A plain environment with a thread of its own, so that a slow step stops no other episode.

    Only `close` passes by a busy thread: it may be what frees it.
    """

    def __init__(self, env: Any, thread: OwnThread) -> None:
        self._env = env
        self._thread = thread

    async def reset(self, seed: int) -> str:
        return await self._thread.call(self._env.reset, seed)

    async def step(self, action: str) -> Step:
        return await self._thread.call(self._env.step, action)

    async def close(self) -> None:
        thread = OwnThread() if self._thread.busy else self._thread
        await thread.call(self._env.close)
        thread.end()
        if thread is not self._thread:
            self._thread.end()
