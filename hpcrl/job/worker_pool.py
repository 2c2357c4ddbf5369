"""Run a worker pool of Parsl: `python -m hpcrl.job.worker_pool OPTIONS`.

    call_by_name   the task of every worker

Parsl spawns the workers and a process that holds what they share. Each runs this module again, under another name;
only workers need more of it. Tasks are sent as names: the driver imports no role, and a worker nothing of the driver.
"""

import importlib
import importlib.metadata
from typing import Any

from hpcrl.job.parsl_programs import forget_packages, load_program

PROGRAM = "parsl.executors.high_throughput.process_worker_pool"


def call_by_name(function: str, *args: Any) -> Any:
    """Run `package.module:name` in a worker."""
    forget_packages()  # the function may be a user's
    module, _, name = function.partition(":")
    return getattr(importlib.import_module(module), name)(*args)


def __getattr__(name: str) -> Any:
    """Return a function of Parsl's program: a worker unpickles its own by its name here."""
    if name.startswith("__"):
        raise AttributeError(name)
    exec(load_program(PROGRAM), globals())
    return globals()[name]


if __name__ == "__main__":
    # The pool would read the metadata of all installed packages, often from a file system far away, for nothing here.
    importlib.metadata.distributions = list  # type: ignore[assignment]
    exec(load_program(PROGRAM))
