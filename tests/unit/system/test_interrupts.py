"""Ctrl-C while a process becomes another program."""

import signal
import subprocess
import sys

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
