"""Hold Ctrl-C back while this process becomes or starts another program, until that one can answer it.

replace_process       become another program
run_process           run another program, and wait for it
release_interrupts    answer Ctrl-C again, in that program: one that was held back is raised here
INTERRUPT_GRACE_S     the time in which a program that was started ends after Ctrl-C, or is killed
"""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import IO, NoReturn

INTERRUPT_GRACE_S = 5.0


def replace_process(words: Sequence[str]) -> NoReturn:
    """Become another program, with SIGINT held back: an interpreter that still imports would print a traceback."""
    sys.stdout.flush()
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        os.execv(words[0], list(words))
    finally:
        release_interrupts()


def run_process(
    words: Sequence[str], *, environment: Mapping[str, str] | None = None, stdout: IO[str] | None = None
) -> int:
    """Run another program to its end and return its return code.

    A terminal sends Ctrl-C to both. The program answers it once it has called `release_interrupts`; one that has not
    ended by then, mostly as it still imports, is killed. SIGTERM and SIGHUP end both.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        with subprocess.Popen(words, env=environment, stdout=stdout) as process:
            try:
                release_interrupts()
                with _raise_end_signals():
                    return process.wait()
            except KeyboardInterrupt:
                _end_process(process)
                raise
            except SystemExit:
                process.terminate()
                _end_process(process)
                raise
    finally:
        release_interrupts()


@contextlib.contextmanager
def _raise_end_signals() -> Iterator[None]:
    """Let signals that would end this process at once raise SystemExit; those that are ignored stay so."""

    def end(number: int, _: object) -> None:
        raise SystemExit(128 + number)

    known = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    default = [number for number, handler in known.items() if handler is signal.SIG_DFL]
    for number in default:
        signal.signal(number, end)
    try:
        yield
    finally:
        for number in default:
            signal.signal(number, signal.SIG_DFL)


def _end_process(process: "subprocess.Popen[bytes]") -> None:
    try:
        process.wait(INTERRUPT_GRACE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def release_interrupts() -> None:
    """Answer SIGINT again."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
