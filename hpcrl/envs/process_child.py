"""One environment in a separate process, used over a socket; `process` starts it.

    main   start both processes

The keeper, which the env worker has started, adopts orphans of the environment, and ends them all when the
environment's process has ended or the env worker has closed our standard input. Its child, with limits on memory and
CPU time, makes the environment and answers requests. The keeper runs no code of the environment, so nothing that
hangs, forks or leaves its session can outlive it.
"""

import asyncio
import inspect
import math
import os
import resource
import select
import socket
import sys
from typing import Any

from hpcrl.envs.base import Step, TaskPrompt, check_signatures, construct_env
from hpcrl.envs.process_wire import Act, Close, EnvAnswer, EnvRequest, Make, Reset, encode_message, receive_request
from hpcrl.errors import HpcrlError
from hpcrl.system.exit_codes import encode_exit_code
from hpcrl.system.processes import adopt_orphans, end_descendants, prefer_to_die


def main(fd: int) -> int:
    """Fork the environment's process and guard it."""
    connection = socket.socket(fileno=fd)
    adopt_orphans()
    child = os.fork()
    if child == 0:
        os._exit(_serve_requests(connection))
    connection.close()  # so that the env worker sees the end of the environment's process as the end of the connection
    return _guard_child(child)


def _guard_child(child: int) -> int:
    """Wait until the child ends or standard input is closed, and end all processes that are left."""
    ended = os.pidfd_open(child)
    select.select([ended, sys.stdin], [], [])
    status = os.waitpid(child, os.WNOHANG)[1] if ended in select.select([ended], [], [], 0)[0] else 0
    end_descendants(grace_s=0.0)
    code = os.waitstatus_to_exitcode(status)
    return encode_exit_code(code)


def _serve_requests(connection: socket.socket) -> int:
    """Answer requests until the env worker closes the environment or the connection."""
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    env: Any = None
    with asyncio.Runner() as runner:
        while (request := receive_request(connection)) is not None:
            try:
                if isinstance(request, Make):
                    env, answer = _make_limited_env(request), EnvAnswer()
                else:
                    answer = _handle_request(runner, env, request)
            except BaseException as error:  # noqa: BLE001 - the answer reports it
                answer = EnvAnswer(error=_describe_error(error))
            connection.sendall(_encode_answer(answer))
            if isinstance(request, Close):
                break
    return 0


def _make_limited_env(request: Make) -> Any:
    """Limit this process, then run the environment's code for the first time."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_DATA, (request.memory_bytes, request.memory_bytes))
    resource.setrlimit(resource.RLIMIT_CPU, (request.cpu_s, request.cpu_s + 5))
    prefer_to_die()
    env = construct_env(request.env, request.options, what="env")
    check_signatures(env, has_tasks=request.has_tasks)
    return env


def _handle_request(runner: asyncio.Runner, env: Any, request: EnvRequest) -> EnvAnswer:
    """Call the environment; plain methods run here, in the main thread, where signals work too."""
    match request:
        case Reset(seed=seed, task=task):
            observation = _await_result(runner, env.reset(seed) if task is None else env.reset(seed, task=task))
            if isinstance(observation, TaskPrompt):
                return EnvAnswer(prompt=observation)
            if isinstance(observation, Step) and observation.done:
                return EnvAnswer(observation=observation.observation, done=True)
            if not isinstance(observation, str):
                what = type(observation).__name__
                return EnvAnswer(
                    error=f"reset returned {what}: it must return text, TaskPrompt, or a Step that is done"
                )
            return EnvAnswer(observation=observation)
        case Act(action=action):
            step = _await_result(runner, env.step(action))
            if not isinstance(step, Step):
                return EnvAnswer(error=f"step returned {type(step).__name__}: it must return hpcrl.envs.base.Step")
            return EnvAnswer(observation=step.observation, reward=_to_number(step.reward), done=step.done)
        case _:
            _await_result(runner, env.close() if env is not None else None)
            return EnvAnswer()


def _to_number(reward: object) -> float:
    """Return a reward as a number; NaN, which the episode reports, for anything else."""
    try:
        return float(reward)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        return math.nan


def _await_result(runner: asyncio.Runner, value: Any) -> Any:
    async def wait() -> Any:
        return await value

    return runner.run(wait()) if inspect.isawaitable(value) else value


def _encode_answer(answer: EnvAnswer) -> bytes:
    """Encode an answer; one that cannot be encoded is a fault of the environment."""
    try:
        return encode_message(answer)
    except (TypeError, ValueError, OverflowError) as error:
        return encode_message(EnvAnswer(error=f"its answer cannot be sent: {_describe_error(error)}"))


def _describe_error(error: BaseException) -> str:
    if isinstance(error, HpcrlError):
        return str(error)[:2000]
    return f"{type(error).__name__}: {error}"[:2000]
