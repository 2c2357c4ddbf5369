"""Ctrl-C while a process becomes or starts another program."""

import os
import signal
import subprocess
import sys

import pytest

CHILD = """
import sys
print("up", flush=True)
sys.stdin.readline()
from hpcrl.system.interrupts import release_interrupts
try:
    release_interrupts()
    print("not interrupted")
except KeyboardInterrupt:
    sys.exit(130)
"""
PARENT = f"""
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background of a shell ignores it
from hpcrl.system.interrupts import replace_process
replace_process([sys.executable, "-c", {CHILD!r}])
"""


def test_an_interrupt_waits_until_the_new_program_answers_it() -> None:
    command = [sys.executable, "-c", PARENT]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"up\n"
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(b"\n", timeout=60)
    assert (process.returncode, out, err) == (130, b"", b"")


STARTER = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
from hpcrl.system.interrupts import run_process
try:
    run_process([sys.executable, "-c", sys.argv[1]])
except KeyboardInterrupt:
    sys.exit(130)
"""
IMPORTING = "import time; print('up', flush=True); time.sleep(3600)"
ANSWERING = """
import time
from hpcrl.system.interrupts import release_interrupts
release_interrupts()
try:
    print("up", flush=True)
    time.sleep(3600)
except KeyboardInterrupt:
    print("in order", flush=True)
"""


@pytest.mark.parametrize(("program", "printed"), [(IMPORTING, b"up\n"), (ANSWERING, b"up\nin order\n")])
def test_an_interrupt_ends_a_program_that_imports_and_lets_one_that_works_end_in_order(
    program: str, printed: bytes
) -> None:
    """The signal is sent to the group of processes, as a terminal does."""
    command = [sys.executable, "-c", STARTER, program]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"up\n"
        os.killpg(process.pid, signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert (process.returncode, b"up\n" + out, err) == (130, printed, b"")


SLEEPING = "import os, time; print(os.getpid(), flush=True); time.sleep(3600)"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_that_ends_the_starter_ends_its_program(number: signal.Signals) -> None:
    command = [sys.executable, "-c", STARTER, SLEEPING]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        program = int(process.stdout.readline())
        process.send_signal(number)
        _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (128 + number, b"")
    with pytest.raises(ProcessLookupError):
        os.kill(program, 0)
