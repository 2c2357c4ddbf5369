"""Run a worker pool of Parsl: `python -m hpcrl.job.worker_pool ROLE CAMPAIGN OPTIONS`.

    call_by_name        the task of every worker
    become_worker       be what the workers of a role are forked from
    run_worker          run a worker, which ends with the process that forked it
    end_with_children   end the pool when a process is gone that Parsl does not start again
    use_own_queues      let no worker that is killed stop the others, or lose a task
    end_silent_workers  end workers that stand still or do not work
    name_worker_ends    name how the process of a lost worker ended, and whether that was for its memory
    POOL_LOOK_INTERVAL_S, MAX_DEAD_S   times

The workers are forked from a server that has imported what their role needs; a process that holds what they share is
spawned. Both run this module under another name. Tasks are sent as names: the driver imports no role, and a worker
nothing of the driver.
"""

import contextlib
import importlib
import importlib.metadata
import os
import pickle
import platform
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from multiprocessing import context
from multiprocessing.managers import SyncManager
from pathlib import Path
from typing import Any

from hpcrl.job.fork_server import ROLES_PROGRAM, ForkedProcess, list_server_pids, start_fork_server
from hpcrl.job.parsl_programs import import_whole, load_program, use_steady_time
from hpcrl.job.pool_queue import LEDGER_INTERVAL_S, PoolQueue, TaskLedger, end_after_answer
from hpcrl.system.memory import KILLED, KillWatch
from hpcrl.system.processes import die_with_parent, is_zombie
from hpcrl.system.pulse import PULSE_WATCH_INTERVAL_S, PulseWatch, SilentProcess, end_silent

POOL_LOOK_INTERVAL_S = 2.0
MAX_DEAD_S = 15.0
"""Parsl starts a worker again within its heartbeat interval of 5 s."""
PROGRAM = "parsl.executors.high_throughput.process_worker_pool"
UNKNOWN_EXIT_CODE = 255
"""The exit code of a process whose fork server has ended with it."""
_forked: dict[str, ForkedProcess] = {}
"""The newest process of each worker, by the name that Parsl gives it."""


def call_by_name(function: str, *args: Any) -> Any:
    """Run `package.module:name` in a worker; one that fails ends then, as it may leave threads, memory and devices."""
    module, _, name = function.partition(":")
    try:
        with import_whole():  # the function may be a user's
            return getattr(importlib.import_module(module), name)(*args)
    except Exception:
        end_after_answer()
        raise


def become_worker(role: str, campaign: str) -> None:
    """Make this process, a fork of the pool, what a spawned one would become, with all that its role needs."""
    globals()["__name__"] = "__mp_main__"
    exec(load_program(PROGRAM), globals())
    importlib.import_module(ROLES_PROGRAM).import_role(campaign, role)


def run_worker(work: Callable[..., object], *args: Any) -> None:
    """Run a worker: it ends with the fork server, without which the pool cannot see whether it runs."""
    die_with_parent(signal.SIGKILL)
    work(*args)


def _make_worker(*, target: Callable[..., object], args: tuple[Any, ...], name: str) -> ForkedProcess:
    _forked[name] = ForkedProcess(target=run_worker, args=(target, *args), name=name)
    return _forked[name]


def _start_manager() -> SyncManager:
    """Start the process that holds what the workers share; it ends with the pool, however that ends."""
    manager = SyncManager(ctx=context.SpawnContext())  # not that of Parsl, whose processes are forked
    manager.start(initializer=die_with_parent, initargs=(signal.SIGKILL,))
    return manager


def end_with_children() -> None:
    """End this process when one that it has started ended some time ago and was not replaced.

    That is the process that holds what workers share: without it the pool does nothing, and looks alive. A fork server
    is replaced with the next worker.
    """
    dead_since: dict[int, float] = {}
    while True:
        now = time.monotonic()
        dead_since = {pid: dead_since.get(pid, now) for pid in _list_dead_children() if pid not in list_server_pids()}
        if any(now - since > MAX_DEAD_S for since in dead_since.values()):
            print(f"a process of this worker pool has ended: {', '.join(map(str, dead_since))}", flush=True)  # noqa: T201
            os._exit(1)
        time.sleep(POOL_LOOK_INTERVAL_S)


def _list_dead_children() -> list[int]:
    """List the children of all threads that have ended and that no thread has asked for."""
    dead = []
    for file in Path("/proc/self/task").glob("*/children"):
        with contextlib.suppress(OSError):  # a thread that has just ended
            dead += [int(pid) for pid in file.read_text().split() if is_zombie(int(pid))]
    return dead


def use_own_queues() -> None:
    """Replace the queues of Parsl's pool by those of hpcrl; call it after `load_program`."""
    from parsl.executors.high_throughput import mpi_resource_management  # noqa: TID251
    from parsl.multiprocessing import SpawnContext  # noqa: TID251

    class NotedScheduler(mpi_resource_management.TaskScheduler):  # type: ignore[misc]
        """The scheduler of a pool, which answers for a worker that was killed while it took a task."""

        def __init__(self, tasks: PoolQueue, results: PoolQueue) -> None:
            super().__init__(tasks, results)
            self._ledger = TaskLedger()

        def put_task(self, task: dict[str, Any]) -> None:
            self._ledger.note_task(task["task_id"])
            self.pending_task_q.put(task)

        def get_result(self, block: bool = True, timeout: float | None = None) -> bytes | None:
            if self._ledger.is_due() and (lost := self._find_lost()) is not None:
                package = _make_lost_result(lost)
            else:
                try:
                    package = self.pending_result_q.get(timeout=LEDGER_INTERVAL_S)
                except queue.Empty:
                    return None
            if package is not None:
                self._ledger.note_result(pickle.loads(package).get("task_id"))  # noqa: S301 - of our own process
            return package

        def _find_lost(self) -> int | None:
            running = {task["task_id"] for task in globals()["manager"]._tasks_in_progress.values()}
            if not (self.pending_task_q.is_empty() and self.pending_result_q.is_empty()):
                return None
            return self._ledger.find_lost(running)

    mpi_resource_management.TaskScheduler = NotedScheduler
    SpawnContext.Queue = PoolQueue
    SpawnContext.Manager = _start_manager
    if list_server_pids():
        SpawnContext.Process = _make_worker


def end_silent_workers() -> None:
    """End workers that stand still or do not work; their tasks fail with the reason."""
    pulses = PulseWatch()
    while True:
        time.sleep(PULSE_WATCH_INTERVAL_S)
        for worker in pulses.look():
            _end_worker(worker)


def _end_worker(worker: SilentProcess) -> None:
    manager = globals()["manager"]
    task = manager._tasks_in_progress.pop(worker.rank, None)  # Parsl would report that its worker was lost
    end_silent(worker.pid)
    if task is not None:
        error = RuntimeError(f"{worker.reason}; its stacks are in its log")
        manager.pending_result_queue.put(_make_failure(task["task_id"], error))


def name_worker_ends() -> None:
    """Let the loss of a worker name how its process ended, and that the kernel did it where its memory was used up."""
    from parsl.executors.high_throughput import errors  # noqa: TID251

    kills, make_loss = KillWatch(), errors.WorkerLost

    def make_named_loss(worker: object, host: str) -> Any:
        end = KILLED if kills.has_killed() else _describe_end(_forked.get(f"HTEX-Worker-{worker}"))
        return make_loss(f"{worker} ({end})" if end else worker, host)

    errors.WorkerLost = make_named_loss  # before Parsl's program imports it


def _describe_end(process: ForkedProcess | None) -> str:
    """Return the exit code or the signal with which a process ended; empty if it is not known."""
    code = process.exitcode if process is not None else None
    if code is None or code == UNKNOWN_EXIT_CODE:
        return ""
    return f"ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"


def _make_lost_result(id: int) -> bytes:
    """Return the result of a task that was lost with its worker."""
    from parsl.executors.high_throughput.errors import WorkerLost  # noqa: TID251

    return _make_failure(id, WorkerLost("that took the task", platform.node()))


def _make_failure(id: int, error: Exception) -> bytes:
    """Return the result of a task that failed, in the form of Parsl's pool."""
    from parsl.app.errors import RemoteExceptionWrapper  # noqa: TID251
    from parsl.serialize import serialize  # noqa: TID251

    wrapped = serialize(RemoteExceptionWrapper(type(error), error, None))
    return pickle.dumps({"type": "result", "task_id": id, "exception": wrapped})


def __getattr__(name: str) -> Any:
    """Return a function of Parsl's program: a worker unpickles its own by its name here."""
    if name.startswith("__"):
        raise AttributeError(name)
    exec(load_program(PROGRAM), globals())
    return globals()[name]


if __name__ == "__main__":
    words = [sys.argv.pop(1) for _ in range(2)]
    # A pool ends by being killed; Python's tracker then removes its lock, and would warn of a leak in the log.
    sys.warnoptions.append("ignore:resource_tracker:UserWarning")
    program = load_program(PROGRAM)
    exec(program, {"__name__": PROGRAM})  # what it imports: once for this process and the server
    start_fork_server(partial(become_worker, *words))
    use_steady_time()
    # The pool would read the metadata of all installed packages, often from a file system far away, for nothing here.
    importlib.metadata.distributions = list  # type: ignore[assignment]
    threading.Thread(target=end_with_children, name="children", daemon=True).start()
    use_own_queues()
    name_worker_ends()
    threading.Thread(target=end_silent_workers, name="pulses", daemon=True).start()
    exec(program)
