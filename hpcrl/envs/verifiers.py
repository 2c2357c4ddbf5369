"""The environments of verifiers 0.4: a task set, an agent (a harness) that calls the model itself, and its rewards.

    Verifiers        one environment, as an agent program
    SERVER, START_TIMEOUT_S  what they run, and a limit

Episodes are played by one process for each environment (hpcrl.envs.verifiers_server), in any interpreter that has
verifiers: its pins often conflict with those of an engine. There the task set is loaded once, and system and few-shot
messages, tools and judges are verifiers' own. The model is reached through the proxy of the env worker.
"""

import asyncio
import contextlib
import itertools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any, Literal

from hpcrl.envs.base import ConversationChoice, ModelAccess, SamplingSource, TaskFields, check_program_choices
from hpcrl.errors import ConfigError, EnvFault, PolicyFailure
from hpcrl.spool.outcome import OUTCOME_EXIT

_SandboxOption = Literal["auto", "none"]
SERVER = Path(__file__).with_name("verifiers_server.py")
START_TIMEOUT_S = 300.0
"""The time limit for importing verifiers and loading the task set."""


class Verifiers:
    """The task set `taskset`, played by a harness.

    taskset       the id of a task set: a module that exports it, or one of those of verifiers
    options       settings of the task set, such as a split
    env           the id of an environment that plays it, if not the task set's own
    harness       "null" (chat with the task's tools), "bash", or another harness that runs in a subprocess
    role, agent   the name of the agent in the environment, and more of its settings, such as max_turns
    sandbox       auto, or none: let a harness other than "null" run the model's commands as this user, unconfined
    python        an interpreter that has verifiers; the default is the one that runs hpcrl
    sampling, trains   as in AgentProgram

    A task is the row with the number `task` of a domain's `tasks`, else one that the seed selects.
    """

    def __init__(
        self,
        *,
        taskset: str,
        options: dict[str, Any] | None = None,
        env: str = "",
        harness: str = "null",
        role: str = "agent",
        agent: dict[str, Any] | None = None,
        sandbox: _SandboxOption = "auto",
        python: str | None = None,
        sampling: SamplingSource = "recipe",
        trains: ConversationChoice = "all",
    ) -> None:
        check_program_choices(
            "Verifiers",
            sandbox=(sandbox, _SandboxOption),
            sampling=(sampling, SamplingSource),
            trains=(trains, ConversationChoice),
        )
        self.sampling = sampling
        self.trains = trains
        self._python = python or sys.executable
        self._name = f"verifiers, taskset = {taskset!r}"
        seat = {"harness": {"id": harness}, "runtime": {"type": "subprocess"}, **(agent or {})}
        played_by = seat["harness"]
        if sandbox != "none" and not (isinstance(played_by, dict) and played_by.get("id") == "null"):
            raise ConfigError(
                f"Verifiers: harness = {played_by!r} may run commands of the model without a sandbox, as this "
                'user: set sandbox = "none" to allow that, or harness = "null"'
            )
        config = {"id": env, "taskset": {"id": taskset, **(options or {})}, role: seat}
        self._config = json.dumps({"config": config})

    async def run(self, seed: int, access: ModelAccess, task: TaskFields | None = None) -> float | None:
        """Play the episode of a task; returns its reward."""
        number = seed if task is None else task.get("task")
        if not isinstance(number, int):
            raise EnvFault(f"{self._name}: a row must have the number of a task in the field `task`, not {task!r:.200}")
        server = await _find_server(self._python, self._config, name=self._name)
        return await server.play({"task": number, "url": access.url, "key": access.api_key, "model": access.model})

    def check_task(self, task: TaskFields | None) -> None:
        """Raise ConfigError for a row without the number of a task."""
        if task is not None and not isinstance(task.get("task"), int):
            raise ConfigError(f"{self._name}: a row must have the number of a task in the field `task`")

    def check(self) -> int:
        """Load the task set once, at submission; returns its number of tasks."""
        try:
            done = subprocess.run(
                [self._python, "-P", str(SERVER)],
                input=self._config + "\n",
                capture_output=True,
                text=True,
                timeout=START_TIMEOUT_S,
                check=False,
            )
            answer = json.loads(done.stdout.splitlines()[0])
        except OSError as error:
            raise ConfigError(f"{self._name}: python = {self._python!r} cannot be run: {error.strerror}") from error
        except subprocess.TimeoutExpired:
            raise ConfigError(f"{self._name}: its task set was not loaded in {START_TIMEOUT_S:g} s") from None
        except (ValueError, IndexError):
            last = (done.stderr.strip().splitlines() or ["no answer"])[-1]
            raise ConfigError(f"{self._name}: python = {self._python!r} cannot load verifiers: {last[-300:]}") from None
        if "error" in answer:
            raise ConfigError(f"{self._name}: {answer['error']}")
        return int(answer["num_tasks"])


class _EpisodeServer:
    """The process that plays the episodes of one environment."""

    def __init__(self, process: asyncio.subprocess.Process, *, name: str) -> None:
        self.process = process
        self._name = name
        self._runs: dict[int, asyncio.Future[float]] = {}
        self._ids = itertools.count()
        self._reading: asyncio.Task[None] | None = None

    @property
    def is_usable(self) -> bool:
        return self.process.returncode is None and (self._reading is None or not self._reading.done())

    async def configure(self, config: str) -> None:
        """Send the configuration and wait until the task set is loaded."""
        self._write_line(config)
        assert self.process.stdout is not None
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                line = await self.process.stdout.readline()
        except TimeoutError:
            raise EnvFault(f"{self._name}: its task set was not loaded in {START_TIMEOUT_S:g} s") from None
        answer = json.loads(line) if line else {"error": "its process ended at the start (see the log of this worker)"}
        if "error" in answer:
            raise EnvFault(f"{self._name}: {answer['error']}")
        self._reading = asyncio.create_task(self._read_answers())

    async def play(self, request: dict[str, Any]) -> float:
        """Play an episode; cancelling ends it."""
        run = next(self._ids)
        result: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        self._runs[run] = result
        try:
            self._write_line(json.dumps({"run": run, **request}))
            return await result
        except asyncio.CancelledError:
            self._write_line(json.dumps({"cancel": run}))
            raise
        finally:
            del self._runs[run]

    def _write_line(self, line: str) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(OSError, RuntimeError):  # the process has ended, and so do the runs
            self.process.stdin.write(line.encode() + b"\n")

    async def _read_answers(self) -> None:
        assert self.process.stdout is not None
        while line := await self.process.stdout.readline():
            answer = json.loads(line)
            result = self._runs.get(answer["run"])
            if result is None or result.done():
                continue
            if "error" in answer:
                why = f"{self._name}: {answer['error']}"
                result.set_exception(PolicyFailure(OUTCOME_EXIT, why) if "by_policy" in answer else EnvFault(why))
            else:
                result.set_result(answer["reward"])
        for result in self._runs.values():
            if not result.done():
                result.set_exception(EnvFault(f"{self._name}: its process ended"))


_servers: "dict[tuple[asyncio.AbstractEventLoop, str, str], asyncio.Task[_EpisodeServer]]" = {}


async def _find_server(python: str, config: str, *, name: str) -> _EpisodeServer:
    """Return the process of an environment; it is started by the first episode, and again after it has ended."""
    key = (asyncio.get_running_loop(), python, config)
    starting = _servers.get(key)
    if starting is None or (starting.done() and (starting.exception() or not starting.result().is_usable)):
        starting = _servers[key] = asyncio.create_task(_start_server(python, config, name=name))
    return await asyncio.shield(starting)


async def _start_server(python: str, config: str, *, name: str) -> _EpisodeServer:
    try:
        process = await asyncio.create_subprocess_exec(
            python, "-P", str(SERVER), stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
        )
    except OSError as error:
        raise EnvFault(f"{name}: python = {python!r} cannot be run: {error.strerror}") from error
    server = _EpisodeServer(process, name=name)
    try:
        await server.configure(config)
    except BaseException:
        process.kill()
        await process.wait()
        raise
    return server
