"""Environments in processes of their own: what hangs, forks, prints or grows without end costs one episode.

Limits        what such a process may use
ProcessEnv    an environment whose code runs at the other end of a socket (hpcrl.envs.isolation.child)

The process leads a session of its own. It ends, with all that it has started, when the environment is closed, when
it is given up, and when this process ends, however that happens: its standard input is the line that it hangs by.
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

from hpcrl.envs.base import Step
from hpcrl.envs.isolation.sandbox import Walls, Wanted, choose, readable, walled
from hpcrl.envs.isolation.wire import HEADER, Act, Answer, Close, Make, Request, Reset, decode_answer, encode, size_of
from hpcrl.errors import EnvFault

MAX_OUTPUT = 4 << 20
"""Bytes that an environment may print in its life; one that prints more is given up."""
KEPT_OUTPUT = 2000
ONE_THREAD = {"OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "2"}
"""Many such processes share a node: numpy's threads, with buffers for every core, would fill their limit at once."""
CLOSE_S = 2.0
"""How long an environment may take to end well."""
REAP_S = 5.0
"""How long its keeper may take to end all that is left."""


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """What the process of one environment may use."""

    memory_bytes: int = 4 << 30
    """Of data, in each of its processes."""
    cpu_s: int = 3600


class ProcessEnv:
    """An environment in a process of its own; `start` makes one."""

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
        self._given_up: str | None = None

    @classmethod
    async def start(
        cls, name: str, options: dict[str, Any], *, limits: Limits, sandbox: Wanted = "none"
    ) -> "ProcessEnv":
        """Start the process, inside walls if they are wanted, and make the environment in it."""
        env = cls(*await asyncio.to_thread(_launch, sandbox), name=name)
        try:
            await env._listen()
            await env._ask(Make(env=name, options=options, memory_bytes=limits.memory_bytes, cpu_s=limits.cpu_s))
        except BaseException:
            env._kill()
            asyncio.get_running_loop().run_in_executor(None, env._reap)
            raise
        return env

    @property
    def pid(self) -> int:
        """The process group that holds the environment, and the process that keeps it."""
        return self._process.pid

    async def reset(self, seed: int) -> str:
        return (await self._ask(Reset(seed=seed))).observation

    async def step(self, action: str) -> Step:
        answer = await self._ask(Act(action=action))
        return Step(observation=answer.observation, reward=answer.reward, done=answer.done)

    async def close(self) -> None:
        """End the environment, well if it still answers, and everything that it started."""
        try:
            if not self._busy and self._given_up is None:
                with contextlib.suppress(EnvFault, TimeoutError):
                    await asyncio.wait_for(self._ask(Close()), CLOSE_S)
        finally:
            self._kill()
        await asyncio.to_thread(self._reap)

    async def _listen(self) -> None:
        """Hear the connection, and what is printed: that is drained so that nobody waits, and bounded."""
        self._streams = await asyncio.open_connection(sock=self._connection)
        printed = self._printed
        os.set_blocking(printed.fileno(), False)
        asyncio.get_running_loop().add_reader(printed.fileno(), self._drain, printed)

    async def _ask(self, request: Request) -> Answer:
        """One question, one answer; any way in which there is none is a fault of the environment."""
        assert self._streams is not None
        reader, writer = self._streams
        self._busy = True
        try:
            writer.write(encode(request))
            await writer.drain()
            answer = decode_answer(await reader.readexactly(size_of(await reader.readexactly(HEADER))))
        except (OSError, EOFError) as error:
            raise EnvFault(await self._why_it_ended()) from error
        except (ValueError, msgspec.MsgspecError) as error:
            self._kill()
            raise EnvFault(f"{self._name}: it does not speak our protocol: {error}") from error
        self._busy = False
        if answer.error is not None:
            full = ": it filled the memory that it has, env_memory_gib" * answer.error.startswith("MemoryError")
            raise EnvFault(f"{self._name}: {answer.error.rstrip(': ')}{full}")
        return answer

    async def _why_it_ended(self) -> str:
        if self._given_up is not None:
            return f"{self._name}: {self._given_up}"
        with contextlib.suppress(subprocess.TimeoutExpired):  # its keeper knows how it ended, if we let it see that
            await asyncio.to_thread(self._process.wait, CLOSE_S)
        self._kill()
        await asyncio.to_thread(self._reap)
        code = self._process.returncode
        how = f"was killed by {_signal_name(code - 128)}" if code > 128 else f"ended with code {code}"
        last = self._last_printed.decode(errors="replace").strip().rpartition("\n")[2]
        return f"{self._name}: its process {how}" + f", its last words: {last[-300:]}" * bool(last)

    @property
    def _printed(self) -> IO[bytes]:
        assert self._process.stdout is not None
        return self._process.stdout

    def _drain(self, printed: IO[bytes]) -> None:
        try:
            data = os.read(printed.fileno(), 1 << 16)
        except BlockingIOError:
            return
        self._num_printed += len(data)
        self._last_printed = (self._last_printed + data)[-KEPT_OUTPUT:]
        if self._num_printed > MAX_OUTPUT:
            self._given_up = f"it printed more than {MAX_OUTPUT >> 20} MiB: let it print less, or to a file"
            self._kill()
        elif not data:
            self._deafen()

    def _deafen(self) -> None:
        if not self._printed.closed:
            asyncio.get_running_loop().remove_reader(self._printed.fileno())
            self._printed.close()

    def _kill(self) -> None:
        """Let go of the line that the process hangs by: its keeper ends all that is there."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._deafen()
        if self._streams is not None:
            self._streams[1].close()
        else:
            self._connection.close()

    def _reap(self) -> None:
        """Wait for the keeper; one that does not end is killed with its process group."""
        try:
            self._process.wait(REAP_S)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        if self._workdir is not None:
            shutil.rmtree(self._workdir, ignore_errors=True)


def _launch(sandbox: Wanted) -> tuple["subprocess.Popen[bytes]", socket.socket, Path | None]:
    """Start the keeper, the leader of a session of its own; returns it, our end of the socket, and its directory."""
    ours, theirs = socket.socketpair()
    command = [sys.executable, "-m", "hpcrl.envs.isolation.child", str(theirs.fileno())]
    workdir = None
    if (kind := choose(sandbox, image=None)) != "none":
        workdir = Path(tempfile.mkdtemp(prefix="hpcrl-env-"))
        command = walled(command, Walls(kind=kind, workdir=str(workdir), readable=readable()))
    with theirs:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=os.environ | ONE_THREAD,
            pass_fds=[theirs.fileno()],
            start_new_session=True,
        )
    ours.setblocking(False)
    return process, ours, workdir


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
