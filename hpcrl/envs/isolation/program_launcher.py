"""The launcher of one agent program, inside its sandbox: set limits, forward the model's port, end all that it started.

    main           read a ProgramLaunch from standard input, run the program, and print a ProgramResult
    start_program, finish_program  the same with values
    ProgramLaunch  the program and its limits
    ProgramResult  its exit code and output
    PipeTail       the end of a pipe's output
    STARTED_MARK, MAX_KEPT_BYTES, PROGRAM_END_GRACE_S, REWARD_KEY_VARIABLE, NICENESS  constants

In a sandbox it is process 1, which no process inside can kill, and its memory and descriptors are hidden: only the
launcher can report a result. It imports little, since it starts with every episode. Output is drained as it is written
and only its end is kept, so that a gigabyte of it needs no memory. What is printed after the program's end is not its
output.
"""

import fcntl
import json
import os
import resource
import select
import signal
import socket
import struct
import subprocess
import sys
import termios
import threading
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import IO

from hpcrl.envs.isolation.syscall_filter import deny_hidden_memory
from hpcrl.system.processes import adopt_orphans, die_with_parent, end_descendants, list_descendants, protect_memory

STARTED_MARK = "started\n"
"""Printed once the program has been started, before its result."""
MAX_KEPT_BYTES = 1 << 16
PROGRAM_END_GRACE_S = 0.5
NICENESS = 10
"""Programs run behind their supervisor, so that it can still end one that starts processes without end."""
REWARD_KEY_VARIABLE = "HPCRL_REWARD_KEY_FD"
"""The variable with the number of the descriptor from which a program reads its reward key, once."""


@dataclass(frozen=True, kw_only=True)
class ProgramLaunch:
    """A program to run, and its limits."""

    command: list[str]
    task: str
    """Sent to the program's standard input."""
    memory_bytes: int
    cpu_s: int
    file_bytes: int
    max_tasks: int = 0
    """The processes and threads of the sandbox, where the kernel counts them separately; 0: no limit."""
    environment: dict[str, str] = field(default_factory=dict)
    """Added to the inherited environment; not on a command line, which other users could read."""
    forward_port: int = 0
    """The port on loopback that is forwarded to `socket`, by which the program calls the model. 0: it needs none."""
    socket: str = ""
    reward_key: str = ""
    """Sent to the program on a descriptor."""


@dataclass(frozen=True, kw_only=True)
class ProgramResult:
    """The outcome of a program."""

    exit_code: int
    """Negative: killed by that signal."""
    output: str
    """The end of its standard output."""
    errors: str
    num_output_bytes: int
    num_left_tasks: int = 0
    """The processes and threads that it left running; all are ended."""
    was_started: bool = True


class PipeTail:
    """The end of a pipe's output; a thread drains the pipe."""

    def __init__(self, pipe: IO[bytes]) -> None:
        self.num_bytes = 0
        self._pipe = pipe
        self._kept = b""
        self._lock = threading.Lock()
        self._is_open = True
        threading.Thread(target=self._drain, daemon=True).start()

    def close(self) -> str:
        """Return the end of what has been written until now; what comes later is not read."""
        with self._lock:
            num_waiting = struct.unpack("i", fcntl.ioctl(self._pipe, termios.FIONREAD, bytes(4)))[0]
            while num_waiting > 0 and self._is_open:
                num_waiting -= self._read(num_waiting)
            self._is_open = False
        return self._kept.decode(errors="replace")

    def _drain(self) -> None:
        while self._is_open:
            select.select([self._pipe], [], [])
            with self._lock:
                if self._is_open and select.select([self._pipe], [], [], 0.0)[0]:
                    self._read(1 << 18)

    def _read(self, max_bytes: int) -> int:
        data = os.read(self._pipe.fileno(), max_bytes)
        self.num_bytes += len(data)
        self._kept = (self._kept + data)[-MAX_KEPT_BYTES:]
        self._is_open = bool(data)
        return len(data)


def start_program(launch: ProgramLaunch) -> "subprocess.Popen[bytes]":
    """Set the limits and start the program; raises OSError for one that cannot be started."""
    if launch.forward_port:
        threading.Thread(
            target=_forward_connections, args=(_open_listener(launch.forward_port), launch.socket), daemon=True
        ).start()
    _set_limits(launch)
    environment = {**os.environ, **launch.environment}
    descriptors = []
    if launch.reward_key:
        descriptors = [_open_key(launch.reward_key)]
        environment[REWARD_KEY_VARIABLE] = str(descriptors[0])
    process = subprocess.Popen(
        launch.command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment,
        pass_fds=descriptors,
    )
    for descriptor in descriptors:
        os.close(descriptor)
    return process


def finish_program(process: "subprocess.Popen[bytes]", launch: ProgramLaunch) -> ProgramResult:
    """Await the program's end, and end processes that it left behind."""
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    output, errors = PipeTail(process.stdout), PipeTail(process.stderr)
    with suppress(OSError):  # it may not read its task
        process.stdin.write(launch.task.encode())
        process.stdin.close()
    exit_code = process.wait()
    result = ProgramResult(
        exit_code=exit_code,
        output=output.close(),
        errors=errors.close(),
        num_output_bytes=output.num_bytes,
        num_left_tasks=_count_tasks(),
    )
    end_descendants(grace_s=PROGRAM_END_GRACE_S)
    return result


def _count_tasks() -> int:
    """Count the processes and threads below this one."""
    num_tasks = 0
    for pid in list_descendants():
        with suppress(OSError):  # it may have ended
            num_tasks += len(os.listdir(f"/proc/{pid}/task"))  # noqa: PTH208 - as few imports as possible
    return num_tasks


def _open_key(key: str) -> int:
    """Return a descriptor from which a key can be read once."""
    reading, writing = os.pipe()
    os.write(writing, key.encode())
    os.close(writing)
    return reading


def main() -> int:
    adopt_orphans()
    protect_memory()
    os.nice(NICENESS)
    if os.getpid() == 1:  # all processes of the sandbox end with it; signals without a handler do not reach it
        deny_hidden_memory()
        die_with_parent(signal.SIGKILL)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    else:
        die_with_parent()
        signal.signal(signal.SIGTERM, _exit_on_signal)
    launch = ProgramLaunch(**json.loads(sys.stdin.buffer.read()))
    try:
        process = start_program(launch)
    except OSError as error:
        result = ProgramResult(
            exit_code=127, output="", errors=f"cannot be run: {error}", num_output_bytes=0, was_started=False
        )
    else:
        sys.stdout.write(STARTED_MARK)
        sys.stdout.flush()
        result = finish_program(process, launch)
    sys.stdout.write(json.dumps(asdict(result)))
    return 0


def _exit_on_signal(*_: object) -> None:
    end_descendants(grace_s=PROGRAM_END_GRACE_S)
    os._exit(128 + signal.SIGTERM)


def _set_limits(launch: ProgramLaunch) -> None:
    """Limit this process and all its descendants: each separately, but the tasks together."""
    limits = (
        (resource.RLIMIT_DATA, launch.memory_bytes),
        (resource.RLIMIT_CPU, launch.cpu_s),
        (resource.RLIMIT_FSIZE, launch.file_bytes),
        (resource.RLIMIT_CORE, 0),
        *([(resource.RLIMIT_NPROC, launch.max_tasks)] if launch.max_tasks else []),
    )
    for what, most in limits:
        _, hard = resource.getrlimit(what)
        resource.setrlimit(what, (most, most) if hard == resource.RLIM_INFINITY else (min(most, hard), hard))


# ---- forwarding to the model, out of a sandbox that has no network but its own loopback


def _open_listener(port: int) -> socket.socket:
    return socket.create_server(("127.0.0.1", port), backlog=128)


def _forward_connections(listening: socket.socket, path: str) -> None:
    while True:
        near, _ = listening.accept()
        near.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        far = socket.socket(socket.AF_UNIX)
        try:
            far.connect(path)
        except OSError:
            near.close()
            continue
        for source, target in ((near, far), (far, near)):
            threading.Thread(target=_copy_stream, args=(source, target), daemon=True).start()


def _copy_stream(source: socket.socket, target: socket.socket) -> None:
    with suppress(OSError):
        while data := source.recv(1 << 16):
            target.sendall(data)
    with suppress(OSError):
        target.shutdown(socket.SHUT_WR)


if __name__ == "__main__":
    sys.exit(main())
