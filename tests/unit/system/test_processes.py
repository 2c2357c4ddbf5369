"""The processes that were started are ended and no others: orphans, separate sessions, processes that ignore TERM."""

import os
import subprocess
import sys
import time
from pathlib import Path

from hpcrl.system.processes import is_alive, read_start_ticks

GUARDIAN = """
import subprocess, sys, time
from hpcrl.system.processes import adopt_orphans, end_descendants, list_descendants
adopt_orphans()
# a child that ends and leaves a grandchild in a separate session: the grandchild is an orphan
subprocess.run(["bash", "-c", "setsid sleep 300 & disown"], check=True)
# a child that ignores TERM
subprocess.Popen(["bash", "-c", "trap '' TERM; sleep 300; true"])
while len(list_descendants()) < 3:
    time.sleep(0.01)
print(end_descendants(grace_s=0.3), len(list_descendants()), flush=True)
"""


def test_orphans_and_stubborn_children_are_ended() -> None:
    done = subprocess.run([sys.executable, "-c", GUARDIAN], capture_output=True, text=True, check=True, timeout=60)
    at_first, left = map(int, done.stdout.split())
    assert at_first >= 3
    assert left == 0


def test_a_pid_with_another_start_time_is_another_process() -> None:
    ticks = read_start_ticks(os.getpid())
    assert ticks is not None
    assert is_alive(os.getpid(), ticks)
    assert not is_alive(os.getpid(), ticks + 1)


def test_a_process_that_ended_is_not_alive() -> None:
    child = subprocess.Popen(["sleep", "300"])
    ticks = read_start_ticks(child.pid)
    child.kill()
    deadline = time.monotonic() + 10
    while is_alive(child.pid, ticks) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not is_alive(child.pid, ticks)  # a zombie counts as ended
    child.wait()
    assert read_start_ticks(child.pid) is None


def test_a_name_with_brackets_does_not_confuse_the_start_time(tmp_path: Path) -> None:
    program = tmp_path / "odd) name (x"
    program.write_text("#!/bin/sh\nsleep 300\n")
    program.chmod(0o755)
    child = subprocess.Popen([program])
    try:
        assert is_alive(child.pid, read_start_ticks(child.pid))
    finally:
        subprocess.run(["pkill", "-P", str(child.pid)], check=False)
        child.kill()
        child.wait()
