"""Environments in separate processes: code that hangs, forks, prints or grows without end costs one episode.

    ProcessLimits  the limits of such a process
    ProcessEnv     an environment whose code runs in another process (hpcrl.envs.process_child)
    MAX_OUTPUT_BYTES, MAX_KEPT_BYTES, PROCESS_CLOSE_TIMEOUT_S, REAP_TIMEOUT_S  limits
    SINGLE_THREAD_VARIABLES  environment variables of the process

The process leads a separate session. It ends, with all that it has started, when the environment is closed or
abandoned, and when this process ends for any reason: then its standard input is closed.
"""

import asyncio
import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import IO, Any

import msgspec

from hpcrl.envs.base import Step, TaskFields, TaskStart
from hpcrl.envs.isolation.sandbox import SandboxChoice, SandboxSpec, choose_sandbox, list_readable_paths, wrap_command
from hpcrl.envs.process_wire import (
    HEADER_BYTES,
    Act,
    Close,
    EnvAnswer,
    EnvRequest,
    Make,
    Reset,
    decode_answer,
    encode_message,
    read_size,
)
from hpcrl.errors import EnvFault
from hpcrl.system.exit_codes import decode_exit_code, describe_end

MAX_OUTPUT_BYTES = 4 << 20
"""The most bytes that an environment may print; one that prints more is killed."""
MAX_KEPT_BYTES = 2000
SINGLE_THREAD_VARIABLES = {"OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "2"}
"""Many such processes share a node: numpy's threads, with buffers for every core, would fill their limit at once."""
PROCESS_CLOSE_TIMEOUT_S = 2.0
"""The time limit of an environment for closing."""
REAP_TIMEOUT_S = 5.0
"""The time limit of its keeper for ending all processes that are left."""


_CHILD_CODE = """
import importlib.util, sys
spec = importlib.util.spec_from_file_location("hpcrl", {package!r} + "/__init__.py")
sys.modules["hpcrl"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(sys.modules["hpcrl"])
from hpcrl.envs.process_child import main
sys.exit(main(int(sys.argv[1])))
"""
"""The child finds hpcrl by its path: the packages beside it may not fit another interpreter."""


class ProcessLimits(msgspec.Struct, frozen=True, kw_only=True):
    """The limits of one environment's process."""

    memory_bytes: int = 4 << 30
    """Bytes of data in each of its processes."""
    cpu_s: int = 3600


class ProcessEnv:
    """An environment in a separate process; `start` makes one."""

    def __init__(
        self, process: "subprocess.Popen[bytes]", connection: socket.socket, workdir: Path | None, *, name: str
    ) -> None:
        self._process = process
        self._workdir = workdir
        self._connection = connection
        self._name = name
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self._busy = False
        self._num_printed = 0
        self._last_printed = b""
        self._kill_reason: str | None = None

    @classmethod
    async def start(
        cls,
        name: str,
        options: dict[str, Any],
        *,
        limits: ProcessLimits,
        sandbox: SandboxChoice = "none",
        has_tasks: bool = False,
        python: str = sys.executable,
    ) -> "ProcessEnv":
        """Start the process, in a sandbox if `sandbox` is not "none", and make the environment in it.

        `python` is its interpreter, which needs msgspec and finds hpcrl here, and no other package of ours.
        """
        try:
            started = await asyncio.to_thread(_start_keeper, sandbox, python)
        except OSError as error:
            raise EnvFault(f"{name}: python = {python!r} cannot be run: {error.strerror}") from error
        env = cls(*started, name=name)
        try:
            await env._open_streams()
            await env._request_answer(
                Make(
                    env=name,
                    options=options,
                    memory_bytes=limits.memory_bytes,
                    cpu_s=limits.cpu_s,
                    has_tasks=has_tasks,
                )
            )
        except BaseException:
            env._kill()
            asyncio.get_running_loop().run_in_executor(None, env._reap)
            raise
        return env

    @property
    def pid(self) -> int:
        """The id of the keeper and of the process group of both processes."""
        return self._process.pid

    async def reset(self, seed: int, task: TaskFields | None = None) -> TaskStart:
        answer = await self._request_answer(Reset(seed=seed, task=task))
        if answer.done:
            return Step(observation=answer.observation, done=True)
        return answer.prompt or answer.observation

    async def step(self, action: str) -> Step:
        answer = await self._request_answer(Act(action=action))
        return Step(observation=answer.observation, reward=answer.reward, done=answer.done)

    async def close(self) -> None:
        """Close the environment if it still answers, and end its process and everything that it started."""
        try:
            if not self._busy and self._kill_reason is None:
                with contextlib.suppress(EnvFault, TimeoutError):
                    await asyncio.wait_for(self._request_answer(Close()), PROCESS_CLOSE_TIMEOUT_S)
        finally:
            self._kill()
        await asyncio.to_thread(self._reap)

    async def _open_streams(self) -> None:
        """Read the connection, and drain the output, which is bounded, so that the process never waits for us."""
        self._streams = await asyncio.open_connection(sock=self._connection)
        stdout = self._stdout
        os.set_blocking(stdout.fileno(), False)
        asyncio.get_running_loop().add_reader(stdout.fileno(), self._drain_stdout, stdout)

    async def _request_answer(self, request: EnvRequest) -> EnvAnswer:
        """Send a request and return its answer; every failure is a fault of the environment."""
        assert self._streams is not None
        reader, writer = self._streams
        self._busy = True
        try:
            writer.write(encode_message(request))
            await writer.drain()
            answer = decode_answer(await reader.readexactly(read_size(await reader.readexactly(HEADER_BYTES))))
        except (OSError, EOFError) as error:
            raise EnvFault(await self._find_end_reason()) from error
        except (ValueError, msgspec.MsgspecError) as error:
            self._kill()
            raise EnvFault(f"{self._name}: it does not follow our protocol: {error}") from error
        self._busy = False
        if answer.error is not None:
            full = ": it reached its memory limit, env_memory_gib" * answer.error.startswith("MemoryError")
            raise EnvFault(f"{self._name}: {answer.error.rstrip(': ')}{full}")
        return answer

    async def _find_end_reason(self) -> str:
        if self._kill_reason is not None:
            return f"{self._name}: {self._kill_reason}"
        with contextlib.suppress(subprocess.TimeoutExpired):  # its keeper exits with the code of its end, if we wait
            await asyncio.to_thread(self._process.wait, PROCESS_CLOSE_TIMEOUT_S)
        self._kill()
        await asyncio.to_thread(self._reap)
        code = self._process.returncode
        how = describe_end(decode_exit_code(code))
        last = self._last_printed.decode(errors="replace").strip().rpartition("\n")[2]
        return f"{self._name}: its process {how}" + f", its last output: {last[-300:]}" * bool(last)

    @property
    def _stdout(self) -> IO[bytes]:
        assert self._process.stdout is not None
        return self._process.stdout

    def _drain_stdout(self, stdout: IO[bytes]) -> None:
        try:
            data = os.read(stdout.fileno(), 1 << 16)
        except BlockingIOError:
            return
        self._num_printed += len(data)
        self._last_printed = (self._last_printed + data)[-MAX_KEPT_BYTES:]
        if self._num_printed > MAX_OUTPUT_BYTES:
            self._kill_reason = f"it printed more than {MAX_OUTPUT_BYTES >> 20} MiB: print less, or to a file"
            self._kill()
        elif not data:
            self._close_stdout()

    def _close_stdout(self) -> None:
        if not self._stdout.closed:
            asyncio.get_running_loop().remove_reader(self._stdout.fileno())
            self._stdout.close()

    def _kill(self) -> None:
        """Close the process's standard input: its keeper then ends all processes."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._close_stdout()
        if self._streams is not None:
            self._streams[1].close()
        else:
            self._connection.close()

    def _reap(self) -> None:
        """Wait for the keeper; one that does not end is killed with its process group."""
        try:
            self._process.wait(REAP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        if self._workdir is not None:
            shutil.rmtree(self._workdir, ignore_errors=True)


def _start_keeper(sandbox: SandboxChoice, python: str) -> tuple["subprocess.Popen[bytes]", socket.socket, Path | None]:
    """Start the keeper, which leads a new session; returns it, our end of the socket, and its directory."""
    parent_end, child_end = socket.socketpair()
    package = str(Path(__file__).resolve().parents[1])
    command = [python, "-c", _CHILD_CODE.format(package=package), str(child_end.fileno())]
    workdir = None
    if (kind := choose_sandbox(sandbox, image=None)) != "none":
        workdir = Path(tempfile.mkdtemp(prefix="hpcrl-env-"))
        places = [str(path.parent.parent) for path in (Path(python), Path(python).resolve())]
        spec = SandboxSpec(kind=kind, workdir=str(workdir), readable=list_readable_paths(*places))
        command = wrap_command(command, spec)
    with child_end:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=os.environ | SINGLE_THREAD_VARIABLES,
            pass_fds=[child_end.fileno()],
            start_new_session=True,
        )
    parent_end.setblocking(False)
    return process, parent_end, workdir
