"""Several ranks of a trainer in processes of their own, for tests and benches: `run(size, function, *args)`."""

import importlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ENV = {
    "OMP_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    "MASTER_ADDR": "127.0.0.1",
    "TRANSFORMERS_VERBOSITY": "error",
}


def run(size, function, *args, timeout_s=240):
    """What `function` (`module:name`) returned on each rank, called with its World and `args`; all plain JSON."""
    with tempfile.TemporaryDirectory() as scratch:
        meeting = Path(scratch) / "meeting.json"
        processes = []
        for rank in range(size):
            environ = os.environ | ENV | {"RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank)}
            command = [sys.executable, "-m", "tests.ranks", str(meeting), f"{scratch}/{rank}.json", function]
            process = subprocess.Popen(
                [*command, json.dumps(args)], env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
            )
            processes.append(process)
        try:
            said = [process.communicate(timeout=timeout_s)[0] for process in processes]
        finally:
            for process in processes:
                process.kill()
        for rank, process in enumerate(processes):
            assert process.returncode == 0, f"rank {rank} of {function}:\n{said[rank][-4000:]}"
        return [json.loads((Path(scratch) / f"{rank}.json").read_text()) for rank in range(size)]


def main():
    from hpcrl.trainers.world import join_world, leave_world

    meeting, answer, function, args = sys.argv[1:5]
    world = join_world(Path(meeting))
    module, _, name = function.partition(":")
    result = getattr(importlib.import_module(module), name)(world, *json.loads(args))
    Path(answer).write_text(json.dumps(result))
    leave_world(world)


if __name__ == "__main__":
    main()
