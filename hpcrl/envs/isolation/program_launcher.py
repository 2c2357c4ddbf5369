"""The launcher of one agent program, inside its sandbox: set limits, forward the model's port, end all that it started.

    main           read a ProgramLaunch from standard input, run the program, and print a ProgramResult
    run_program    the same with values
    ProgramLaunch  the program and its limits
    ProgramResult  its exit code and output
    PipeTail       the end of a pipe's output
    MAX_KEPT_BYTES, END_GRACE_S, DRAIN_TIMEOUT_S  limits

It imports little, since it starts with every episode. Output is drained as it is written and only its end is kept, so
that a gigabyte of it needs no memory.
"""

import json
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import IO

from hpcrl.system.processes import adopt_orphans, die_with_parent, end_descendants

MAX_KEPT_BYTES = 1 << 16
END_GRACE_S = 0.5
DRAIN_TIMEOUT_S = 2.0


@dataclass(frozen=True, kw_only=True)
class ProgramLaunch:
    """A program to run, and its limits."""

    command: list[str]
    task: str
    """Sent to the program's standard input."""
    memory_bytes: int
    cpu_s: int
    file_bytes: int
    environment: dict[str, str] = field(default_factory=dict)
    """Added to the inherited environment; not on a command line, which other users could read."""
    forward_port: int = 0
    """The port on loopback that is forwarded to `socket`, by which the program calls the model. 0: it needs none."""
    socket: str = ""


@dataclass(frozen=True, kw_only=True)
class ProgramResult:
    """The outcome of a program."""

    exit_code: int
    """Negative: killed by that signal."""
    output: str
    """The end of its standard output."""
    errors: str
    num_output_bytes: int


class PipeTail:
    """The end of a pipe's output; a thread drains the pipe."""

    def __init__(self, pipe: IO[bytes]) -> None:
        self.num_bytes = 0
        self._pipe = pipe
        self._kept = b""
        self._thread = threading.Thread(target=self._drain, daemon=True)
        self._thread.start()

    def text(self) -> str:
        """Return the end of the output once the pipe is closed, or after DRAIN_TIMEOUT_S."""
        self._thread.join(DRAIN_TIMEOUT_S)
        return self._kept[-MAX_KEPT_BYTES:].decode(errors="replace")

    def _drain(self) -> None:
        with suppress(OSError, ValueError):
            while data := os.read(self._pipe.fileno(), 1 << 18):
                self.num_bytes += len(data)
                self._kept = (self._kept + data)[-MAX_KEPT_BYTES:]


def run_program(launch: ProgramLaunch) -> ProgramResult:
    """Run the program to its end, and end processes that it left behind."""
    if launch.forward_port:
        threading.Thread(
            target=_forward_connections, args=(_open_listener(launch.forward_port), launch.socket), daemon=True
        ).start()
    _set_limits(launch)
    process = subprocess.Popen(
        launch.command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, **launch.environment},
    )
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    output, errors = PipeTail(process.stdout), PipeTail(process.stderr)
    with suppress(OSError):  # it may not read its task
        process.stdin.write(launch.task.encode())
        process.stdin.close()
    exit_code = process.wait()
    end_descendants(grace_s=END_GRACE_S)
    return ProgramResult(
        exit_code=exit_code, output=output.text(), errors=errors.text(), num_output_bytes=output.num_bytes
    )


def main() -> int:
    adopt_orphans()
    die_with_parent()
    signal.signal(signal.SIGTERM, _exit_on_signal)
    try:
        result = run_program(ProgramLaunch(**json.loads(sys.stdin.buffer.read())))
    except OSError as error:
        result = ProgramResult(exit_code=127, output="", errors=f"cannot be run: {error}", num_output_bytes=0)
    sys.stdout.write(json.dumps(asdict(result)))
    return 0


def _exit_on_signal(*_: object) -> None:
    end_descendants(grace_s=END_GRACE_S)
    os._exit(128 + signal.SIGTERM)


def _set_limits(launch: ProgramLaunch) -> None:
    """Limit this process and all its descendants, each separately."""
    limits = (
        (resource.RLIMIT_DATA, launch.memory_bytes),
        (resource.RLIMIT_CPU, launch.cpu_s),
        (resource.RLIMIT_FSIZE, launch.file_bytes),
        (resource.RLIMIT_CORE, 0),
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
