"""Run a worker pool of Parsl: `python -m hpcrl.job.worker_pool OPTIONS`.

    call_by_name        the task of every worker
    end_with_children   end the pool when a process is gone that Parsl does not start again
    LOOK_INTERVAL_S, MAX_DEAD_S   times

Parsl spawns the workers and a process that holds what they share. Each runs this module again, under another name;
only workers need more of it. Tasks are sent as names: the driver imports no role, and a worker nothing of the driver.
"""

import contextlib
import importlib
import importlib.metadata
import os
import threading
import time
from pathlib import Path
from typing import Any

from hpcrl.job.parsl_programs import forget_packages, load_program
from hpcrl.system.processes import is_zombie

LOOK_INTERVAL_S = 2.0
MAX_DEAD_S = 15.0
"""Parsl starts a worker again within its heartbeat interval of 5 s."""
PROGRAM = "parsl.executors.high_throughput.process_worker_pool"


def call_by_name(function: str, *args: Any) -> Any:
    """Run `package.module:name` in a worker."""
    forget_packages()  # the function may be a user's
    module, _, name = function.partition(":")
    return getattr(importlib.import_module(module), name)(*args)


def end_with_children() -> None:
    """End this process when one that it has started ended some time ago and was not replaced.

    That is the process that holds what workers share: without it the pool does nothing, and looks alive.
    """
    dead_since: dict[int, float] = {}
    while True:
        now = time.monotonic()
        dead_since = {pid: dead_since.get(pid, now) for pid in _list_dead_children()}
        if any(now - since > MAX_DEAD_S for since in dead_since.values()):
            print(f"a process of this worker pool has ended: {', '.join(map(str, dead_since))}", flush=True)  # noqa: T201
            os._exit(1)
        time.sleep(LOOK_INTERVAL_S)


def _list_dead_children() -> list[int]:
    """List the children of all threads that have ended and that no thread has asked for."""
    dead = []
    for file in Path("/proc/self/task").glob("*/children"):
        with contextlib.suppress(OSError):  # a thread that has just ended
            dead += [int(pid) for pid in file.read_text().split() if is_zombie(int(pid))]
    return dead


def __getattr__(name: str) -> Any:
    """Return a function of Parsl's program: a worker unpickles its own by its name here."""
    if name.startswith("__"):
        raise AttributeError(name)
    exec(load_program(PROGRAM), globals())
    return globals()[name]


if __name__ == "__main__":
    # The pool would read the metadata of all installed packages, often from a file system far away, for nothing here.
    importlib.metadata.distributions = list  # type: ignore[assignment]
    threading.Thread(target=end_with_children, name="children", daemon=True).start()
    exec(load_program(PROGRAM))
