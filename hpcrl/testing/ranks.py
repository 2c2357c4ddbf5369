"""Run several ranks of a trainer, each in a process: `run_ranks(size, function, *args)`.

The ranks are forked from a server that has imported the heavy packages once.

run_ranks        call a function on each rank
preload_module   let the server import a module as well
RANK_SERVER      the server, for other processes that train
"""

import importlib
import json
import multiprocessing
import os
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

RANK_SERVER = multiprocessing.get_context("forkserver")
PRELOADED = ["hpcrl.testing.rank_imports"]
RANK_SERVER.set_forkserver_preload(PRELOADED)
RANK_VARIABLES = {"GLOO_SOCKET_IFNAME": "lo", "MASTER_ADDR": "127.0.0.1", "TRANSFORMERS_VERBOSITY": "error"}


def preload_module(name: str) -> None:
    """Let the server import a module too, if it has not started yet: each rank would import it otherwise."""
    PRELOADED.append(name)
    RANK_SERVER.set_forkserver_preload(PRELOADED)


def run_ranks(size: int, function: str, *args: Any, timeout_s: float = 240) -> list[Any]:
    """Call `function` (`module:name`) with a World and `args` on each rank; return the results, all plain JSON."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        shared = os.environ | RANK_VARIABLES | {"WORLD_SIZE": str(size)}
        processes = [
            RANK_SERVER.Process(
                target=_run_rank,
                args=(folder, shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)}, function, json.dumps(args)),
            )
            for rank in range(size)
        ]
        deadline = time.monotonic() + timeout_s
        for process in processes:
            process.start()
        try:
            for process in processes:
                process.join(max(0.0, deadline - time.monotonic()))
        finally:
            for process in processes:
                process.kill()
                process.join()
        for rank, process in enumerate(processes):
            if process.exitcode:
                output = (folder / f"{rank}.log").read_text(errors="replace")
                raise RuntimeError(f"rank {rank} of {function} ended with {process.exitcode}:\n{output[-4000:]}")
        return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(size)]


def _run_rank(folder: Path, environ: dict[str, str], function: str, args: str) -> None:
    """Join the other ranks, call the function, write its result as JSON."""
    import torch

    os.environ.update(environ)
    rank = environ["RANK"]
    with (folder / f"{rank}.log").open("ab") as log:
        os.dup2(log.fileno(), sys.stdout.fileno())
        os.dup2(log.fileno(), sys.stderr.fileno())
    torch.set_num_threads(1)
    from hpcrl.trainers.world import join_world, leave_world

    try:
        world = join_world(folder / "meeting.json")
        module, _, name = function.partition(":")
        result = getattr(importlib.import_module(module), name)(world, *json.loads(args))
    except BaseException:
        traceback.print_exc()
        raise
    (folder / f"{rank}.json").write_text(json.dumps(result))
    leave_world(world)
