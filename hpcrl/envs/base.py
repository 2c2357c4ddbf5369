"""The protocol of an environment: text in, text and a reward out, with plain or async methods.

    Env, Step, TaskPrompt        an environment, its answer to one action, and the start of a task with messages
    TaskStart                    whatever a reset may return
    TaskFields, TaskEnv          one row of a domain's task set, and an environment that is reset to it
    choose_seed                  the seed of a task, which its row may have
    ProgramEnv, ModelAccess      an environment that calls the model itself, and how it reaches it
    RewardFunction, env_reward   the score of a trajectory, and the default one
    quick_reward, is_quick_reward   a function that env workers call themselves
    make_env_in_thread, make_program, construct_env  make one by its name in a recipe
    adapt_env, is_program_domain  its async form, and its kind
    check_signatures             refuse an environment whose methods cannot be called as they will be
    accepts                      whether a function can be called with given arguments
    check_program_choices        refuse options of a program that have other values than those known
    SamplingSource, ConversationChoice  two options that every agent program has
    OwnThread, MAX_SPARE_THREADS   a thread for code that blocks, and how many wait for other code
    INVALID_COST                 the cost of a step that is not understood, in the environments of this package

An environment is a class that the recipe names as `package.module:Name`, made with the domain's `options`. Any
exception it raises is an infrastructure fault, which is retried and never scored: a bad action of an agent is a normal
step. A step that takes too long, or whose reward is not a finite number, is an outcome: the domain's settings score it.
"""

import asyncio
import contextlib
import inspect
import os
import queue
import threading
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal, Protocol, TypeVar, cast, get_args

import msgspec

from hpcrl.config.user_code import load_code
from hpcrl.errors import ConfigError, show_error

if TYPE_CHECKING:
    from hpcrl.config.recipe import DomainConfig
    from hpcrl.spool.record import Trajectory


T = TypeVar("T")
INVALID_COST = 0.05
TaskFields = dict[str, Any]
"""The fields of one row of a domain's task set, by name; the values are those of JSON."""


class OwnThread:
    """A daemon thread, started by its first call, that runs one call after the other.

    An environment always has the same thread, which some libraries (browsers, sqlite) require. As a daemon it does
    not keep the process alive when a call hangs forever.
    """

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self.busy = False
        """True while a call has not returned."""

    def call(self, function: Callable[..., T], *args: Any) -> Awaitable[T]:
        """Run `function` in the thread. If the caller is cancelled meanwhile, the call continues."""
        if self._thread is None:
            self._thread = threading.Thread(target=_run_calls, args=(self._calls,), name="env", daemon=True)
            self._thread.start()
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[T] = loop.create_future()
        self.busy = True

        def run() -> None:
            try:
                settle = partial(_resolve_future, answer, result=function(*args))
            except BaseException as error:  # noqa: BLE001 - the caller gets it
                settle = partial(_resolve_future, answer, error=error)
            self.busy = False
            with contextlib.suppress(RuntimeError):  # the loop has ended: no task waits any more
                loop.call_soon_threadsafe(settle)

        self._calls.put(run)
        return answer

    def end(self) -> None:
        """Let the thread end after its calls."""
        self._calls.put(None)
        self._thread = None


MAX_SPARE_THREADS = 8
_spare_threads: list[OwnThread] = []
"""Threads that have made an environment which does not need one."""
os.register_at_fork(after_in_child=_spare_threads.clear)


def _run_calls(calls: "queue.SimpleQueue[Callable[[], None] | None]") -> None:
    while (call := calls.get()) is not None:
        call()


def _resolve_future(answer: "asyncio.Future[Any]", *, result: Any = None, error: BaseException | None = None) -> None:
    if answer.done():  # cancelled at its deadline
        return
    if error is None:
        answer.set_result(result)
    elif isinstance(error, Exception) and not isinstance(error, StopIteration):
        answer.set_exception(error)
    else:  # a Future accepts no StopIteration, and SystemExit would end the env worker
        answer.set_exception(RuntimeError(f"{type(error).__name__}: {error}"))


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """The environment's answer to one action."""

    observation: str
    reward: float = 0.0
    done: bool = False


class TaskPrompt(msgspec.Struct, frozen=True, kw_only=True):
    """The start of a task that is more than one observation: a system message, examples, tools."""

    messages: Annotated[list[dict[str, Any]], msgspec.Meta(min_length=1)]
    """Messages as OpenAI clients send them; the model answers the last."""
    tools: list[dict[str, Any]] = []
    """Tools that the chat template describes to the model; the environment reads the calls in its answers."""
    keep_thoughts: bool = True
    """True if the thoughts in an answer stay in the prompts of later turns. If not, an answer that had one is shown to
    the model by the chat template without it, and the turn after it starts another training row."""


TaskStart = str | TaskPrompt | Step
"""The result of `reset`: an observation, a task prompt, or a Step that is done if the task ended before any turn."""


class Env(Protocol):
    """One environment, used for one episode at a time.

    In a domain with `tasks`, `reset` is called as reset(seed, task=fields), with the fields of one row.
    """

    async def reset(self, seed: int) -> TaskStart:
        """Start the task of `seed` and return the first observation. The same seed is the same task.

        A `Step` that is done means that the task ended before the model's first turn: no data, and no fault.
        """

    async def step(self, action: str) -> Step:
        """Perform the action that the model generated."""

    async def close(self) -> None: ...


SamplingSource = Literal["recipe", "program"]
"""The source of temperature, top_p and top_k; turns not sampled as in the recipe are recorded but not trained on."""
ConversationChoice = Literal["all", "longest", "last"]
"""The conversations to train on: all, the one with the most generated tokens (the later of equals), or the one
continued last. Whatever is chosen, each turn is trained in one row, and the others are stored."""


class ModelAccess(msgspec.Struct, frozen=True, kw_only=True):
    """The address of the model for a program, by OpenAI's API."""

    url: str
    """A URL on loopback that ends in /v1."""
    socket: str
    """The same as a socket file, for sandboxes without a network."""
    api_key: str
    """A key for this program only."""
    model: str
    reward_key: str = ""
    """The key that posts its reward; that of the model cannot."""


class ProgramEnv(Protocol):
    """An environment that calls the model itself: an agent program, used for one episode.

    It is recognised by its method `run`, which in a domain with `tasks` is called as run(seed, access, task=fields).
    """

    sampling: SamplingSource
    trains: ConversationChoice

    async def run(self, seed: int, access: ModelAccess, **task: TaskFields) -> float | None:
        """Do the task of `seed`; returns the reward, or None if it was posted. Cancelling ends all of it."""


def check_program_choices(kind: str, **choices: tuple[Any, Any]) -> None:
    """Raise ConfigError for an option, given with its value and a Literal of those known, that has another value."""
    for name, (value, literal) in choices.items():
        if value not in (known := get_args(literal)):
            raise ConfigError(f"{kind}: {name} = {value!r}: it must be one of {', '.join(known)}")


def choose_seed(seed: int, task: TaskFields | None) -> int:
    """Return the seed of a task: that of its row, if it has one, else `seed`."""
    own = (task or {}).get("seed")
    return own if isinstance(own, int) else seed


class TaskEnv:
    """An environment bound to one row of its domain's task set: its `reset` needs only the seed."""

    def __init__(self, env: Any, task: TaskFields) -> None:
        self._env = env
        self._task = task

    async def reset(self, seed: int) -> TaskStart:
        return cast(TaskStart, await self._env.reset(seed, task=self._task))

    async def step(self, action: str) -> Step:
        return cast(Step, await self._env.step(action))

    async def close(self) -> None:
        await self._env.close()


RewardFunction = Callable[["Trajectory"], float | dict[str, float]]
"""A function that returns the score of a finished trajectory, or named parts whose sum is the score."""


RewardCode = TypeVar("RewardCode", bound=Callable[..., Any])


def quick_reward(function: RewardCode) -> RewardCode:
    """Mark a reward function that takes microseconds and never hangs: env workers call it where an episode ends.

    Others are called by reward workers, in processes with a time limit.
    """
    function.is_quick_reward = True  # type: ignore[attr-defined]
    return function


def is_quick_reward(function: Callable[..., Any]) -> bool:
    return getattr(function, "is_quick_reward", False) is True


@quick_reward
def env_reward(trajectory: "Trajectory") -> float:
    """Return the sum of the environment's rewards over all turns."""
    return float(sum(turn.reward for turn in trajectory.turns))


async def make_env_in_thread(name: str, options: dict[str, Any], *, what: str) -> Env:
    """Make it in a thread, so that importing and making block no other episode and can be cancelled."""
    thread = _spare_threads.pop() if _spare_threads else OwnThread()
    try:
        return adapt_env(await thread.call(partial(construct_env, name, options, what=what)), thread=thread)
    except BaseException:
        thread.end()
        raise


def construct_env(name: str, options: dict[str, Any], *, what: str) -> Any:
    """Make the environment `name` with its options, without adapting it."""
    kind = load_code(name, what=what)
    _check_option_names(kind, options, env=name, what=f"{what} = {name!r}")
    try:
        env = kind(**options)
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(f"{what} = {name!r} with options {options!r}: {show_error(error)}") from error
    _check_methods(env)
    return env


def _check_option_names(kind: Any, options: dict[str, Any], *, env: str, what: str) -> None:
    """Raise ConfigError for an option that the environment does not have, with its new name or the nearest one."""
    try:
        parameters = inspect.signature(kind).parameters.values()
    except (TypeError, ValueError):  # not of Python, such as a class of an extension
        return
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return
    known = sorted(p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY))
    if set(options) <= set(known):
        return
    from hpcrl.config.program import RENAMED_OPTIONS  # not in each process of an environment that is made as it should
    from hpcrl.config.toml import suggest_name

    renamed = RENAMED_OPTIONS.get(env, {})
    for name in options:
        if name in renamed:
            raise ConfigError(f"{what}: the option {name!r} is now called {renamed[name]!r}: use the new name")
        if name not in known:
            raise ConfigError(
                f"{what} has no option {name!r}: {suggest_name(name, known)}it has {', '.join(known) or 'none'}"
            )


def adapt_env(env: Any, *, thread: OwnThread | None = None) -> Env:
    """Return the async form of an environment; plain methods run in `thread`, an async one is returned unchanged."""
    if not _check_methods(env):
        return _ThreadedEnv(env, thread or OwnThread())
    if thread is not None and len(_spare_threads) < MAX_SPARE_THREADS:
        _spare_threads.append(thread)
    elif thread is not None:
        thread.end()
    return cast(Env, env)


def make_program(name: str, options: dict[str, Any], *, what: str) -> ProgramEnv:
    """Make the agent program `name` with its options."""
    return cast(ProgramEnv, construct_env(name, options, what=what))


def is_program_domain(domain: "DomainConfig") -> bool:
    """Return whether a domain's environment calls the model itself; False if it cannot be loaded, which fails later."""
    if domain.python is not None:
        return False
    try:
        return callable(getattr(load_code(domain.env, what="env"), "run", None))
    except ConfigError:
        return False


def check_signatures(env: Any, *, has_tasks: bool) -> None:
    """Raise ConfigError for an environment or program with a method that cannot be called as it will be."""
    name = f"{type(env).__module__}:{type(env).__qualname__}"
    is_program = inspect.iscoroutinefunction(getattr(env, "run", None))
    start, num_given = (env.run, 2) if is_program else (env.reset, 1)
    plain, with_row = (
        ("run(seed, access)", "run(seed, access, task)") if is_program else ("reset(seed)", "reset(seed, task)")
    )
    if has_tasks and not accepts(start, *[None] * num_given, task={}):
        raise ConfigError(
            f"{name} cannot be given the rows of a task set: it needs {with_row}, where `task` is a dict with the "
            "fields of a row; or remove the domain's `tasks`"
        )
    if not has_tasks and not accepts(start, *[None] * num_given):
        hint = f", or set the domain's `tasks` for {with_row}" if accepts(start, *[None] * num_given, task={}) else ""
        raise ConfigError(f"{name} has {_show_method(start)}, which is called as {plain}: change it{hint}")
    if is_program:
        return
    for method, called, given in ((env.step, "step(action)", ("",)), (env.close, "close()", ())):
        if not accepts(method, *given):
            raise ConfigError(f"{name} has {_show_method(method)}, which is called as {called}: change it")


def accepts(function: Callable[..., Any], *given: Any, **named: Any) -> bool:
    """Return whether a function can be called with these arguments; True for one of C that does not show it."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return True
    try:
        signature.bind(*given, **named)
    except TypeError:
        return False
    return True


def _show_method(method: Any) -> str:
    return f"{getattr(method, '__name__', type(method).__name__)}{inspect.signature(method)}"


def _check_methods(env: Any) -> bool:
    """Raise ConfigError for anything but an environment; returns True for an async one."""
    if inspect.iscoroutinefunction(getattr(env, "run", None)):
        return True
    missing = [name for name in ("reset", "step", "close") if not callable(getattr(env, name, None))]
    if missing:
        raise ConfigError(
            f"{type(env).__module__}:{type(env).__qualname__} has no {' and no '.join(missing)}: "
            "an environment needs reset(seed) -> str, step(action) -> Step and close()"
        )
    kinds = {inspect.iscoroutinefunction(method) for method in (env.reset, env.step, env.close)}
    if len(kinds) > 1:
        raise ConfigError(
            f"{type(env).__module__}:{type(env).__qualname__} mixes plain and async methods: "
            "make reset, step and close all plain or all async"
        )
    return kinds == {True}


class _ThreadedEnv:
    """An environment with plain methods in a separate thread, so that a slow step blocks no other episode.

    Only `close` does not wait for a busy thread, since it may be what frees it.
    """

    def __init__(self, env: Any, thread: OwnThread) -> None:
        self._env = env
        self._thread = thread

    async def reset(self, seed: int, task: TaskFields | None = None) -> TaskStart:
        given = {} if task is None else {"task": task}
        return await self._thread.call(partial(self._env.reset, seed, **given))

    async def step(self, action: str) -> Step:
        return await self._thread.call(self._env.step, action)

    async def close(self) -> None:
        thread = OwnThread() if self._thread.busy else self._thread
        await thread.call(self._env.close)
        thread.end()
        if thread is not self._thread:
            self._thread.end()
