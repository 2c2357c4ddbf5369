"""A step's command leaves nothing in the shared memory of its node, also when its processes are killed."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")
HOLD_SEMAPHORES = """
import multiprocessing, os, signal, sys, time
semaphore = multiprocessing.get_context("spawn").Semaphore()
print(semaphore._semlock.name, flush=True)
time.sleep(60)
"""


def read_children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_semaphores_of_a_killed_command_are_removed(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "hpcrl.job.step", str(tmp_path / "end"), sys.executable, "-c", HOLD_SEMAPHORES]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as step:
        assert step.stdout is not None
        semaphore = SHARED_MEMORY / f"sem.{step.stdout.readline().strip().lstrip('/')}"
        assert semaphore.exists()
        deadline = time.monotonic() + 30
        while not list(SHARED_MEMORY.glob(f"hpcrl-{os.getuid()}-ledger-{step.pid}-*")):
            assert time.monotonic() < deadline, "the step records what its processes have mapped"
            time.sleep(0.05)
        [child] = read_children(step.pid)
        for pid in (*read_children(child), child):  # with the tracker, which would remove it
            os.kill(pid, signal.SIGKILL)
        assert step.wait(30) == 128 + signal.SIGKILL
    assert not semaphore.exists()
    assert not list(SHARED_MEMORY.glob(f"hpcrl-{os.getuid()}-ledger-{step.pid}-*"))
