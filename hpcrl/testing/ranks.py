"""Run several ranks of a trainer, each in a process: `run_ranks(size, function, *args)`."""

import importlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

RANK_VARIABLES = {
    "OMP_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    "MASTER_ADDR": "127.0.0.1",
    "TRANSFORMERS_VERBOSITY": "error",
}


def run_ranks(size: int, function: str, *args: Any, timeout_s: float = 240) -> list[Any]:
    """Call `function` (`module:name`) with a World and `args` on each rank; return the results, all plain JSON."""
    with tempfile.TemporaryDirectory() as scratch:
        meeting = Path(scratch) / "meeting.json"
        processes = []
        for rank in range(size):
            variables = os.environ | RANK_VARIABLES | {"RANK": str(rank), "WORLD_SIZE": str(size)}
            variables["LOCAL_RANK"] = str(rank)
            command = [sys.executable, "-m", "hpcrl.testing.ranks", str(meeting), f"{scratch}/{rank}.json", function]
            processes.append(
                subprocess.Popen(
                    [*command, json.dumps(args)],
                    env=variables,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                )
            )
        try:
            outputs = [process.communicate(timeout=timeout_s)[0] for process in processes]
        finally:
            for process in processes:
                process.kill()
        for rank, process in enumerate(processes):
            if process.returncode:
                raise RuntimeError(f"rank {rank} of {function}:\n{outputs[rank][-4000:]}")
        return [json.loads((Path(scratch) / f"{rank}.json").read_text()) for rank in range(size)]


def main() -> None:
    """Join the other ranks, call the function, write its result as JSON."""
    from hpcrl.trainers.world import join_world, leave_world

    meeting, result_file, function, args = sys.argv[1:5]
    world = join_world(Path(meeting))
    module, _, name = function.partition(":")
    result = getattr(importlib.import_module(module), name)(world, *json.loads(args))
    Path(result_file).write_text(json.dumps(result))
    leave_world(world)


if __name__ == "__main__":
    main()
