"""Measure other ways to send bytes to processes: `mpiexec -n 5 python -m bench.peers.broadcast NBYTES ROUNDS WAY...`.

Rank 0 has the bytes and prints the fastest round of each way in seconds, as JSON. Only the ways that start with
"summed-" check anything: every receiver computes a checksum once it has all bytes.
"""

import json
import mmap
import os
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import mpi4py  # noqa: TID251
import numpy as np
import torch
import torch.distributed
import xxhash
from safetensors.torch import load_file, save_file

from hpcrl.weights.couriers.mpi_transport import limit_value_size

mpi4py.rc.initialize = False  # as it needs a limit between MPICH and Slurm
from mpi4py import MPI  # noqa: E402, TID251

WORLD = MPI.COMM_WORLD
DEPTH = 2


def main(nbytes: int, rounds: int, ways: list[str]) -> None:
    data = np.zeros(nbytes, np.uint8) if WORLD.rank else np.random.default_rng(0).integers(0, 256, nbytes, np.uint8)
    found = {way: best(prepare(way, data), rounds) for way in ways if not way.startswith("shared")}
    data = shared(data)
    found |= {way: best(prepare(way.removeprefix("shared-"), data), rounds) for way in ways if way.startswith("shared")}
    if WORLD.rank == 0:
        print(json.dumps(found))


def prepare(way: str, data: np.ndarray) -> Callable[[], object]:
    """Prepare a way; the returned function runs one round of it."""
    if way.startswith("summed-"):
        bring = prepare(way.removeprefix("summed-"), data)
        return lambda: (bring(), xxhash.xxh3_128_digest(data.data) if WORLD.rank else None)
    if way == "Bcast":
        return lambda: WORLD.Bcast([data, MPI.BYTE], 0)
    if way.startswith("Ibcast"):
        return lambda: chunked(data, int(way.removeprefix("Ibcast")) << 20)
    if way == "gloo":
        return gloo(data)
    return lambda: through_files(data)


def shared(data: np.ndarray) -> np.ndarray:
    """Copy the bytes to memory that other processes can map, as a window is."""
    with tempfile.TemporaryFile(dir="/dev/shm") as file:
        file.truncate(len(data))
        copy = np.frombuffer(mmap.mmap(file.fileno(), len(data)), np.uint8)
    copy[:] = data
    return copy


def best(work: Callable[[], object], rounds: int) -> float:
    """Return the seconds of the fastest round, from the common start to the last rank's end."""
    fastest = float("inf")
    for _ in range(rounds + 1):
        WORLD.Barrier()
        started = time.perf_counter()
        work()
        WORLD.Barrier()
        fastest = min(fastest, time.perf_counter() - started)
    return fastest


def chunked(data: np.ndarray, chunk: int) -> None:
    """Broadcast in chunks, two at a time."""
    pending: list[MPI.Request] = []
    for start in range(0, len(data), chunk):
        pending.append(WORLD.Ibcast([data[start : start + chunk], MPI.BYTE], 0))
        if len(pending) >= DEPTH:
            pending.pop(0).Wait()
    MPI.Request.Waitall(pending)


def gloo(data: np.ndarray) -> Callable[[], object]:
    tensor = torch.from_numpy(data)
    if torch.distributed.is_initialized():
        return lambda: torch.distributed.broadcast(tensor, 0)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = WORLD.bcast(probe.getsockname()[1])
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
    torch.distributed.init_process_group("gloo", rank=WORLD.rank, world_size=WORLD.size)
    return lambda: torch.distributed.broadcast(tensor, 0)


def through_files(data: np.ndarray) -> None:
    """Write safetensors to /dev/shm on one rank, and map them on the others."""
    path = Path(WORLD.bcast(tempfile.mkdtemp(dir="/dev/shm") if WORLD.rank == 0 else None)) / "model.safetensors"
    if WORLD.rank == 0:
        save_file({"weights": torch.from_numpy(data)}, path)
    WORLD.Barrier()
    if WORLD.rank:
        load_file(path)
    WORLD.Barrier()
    if WORLD.rank == 0:
        path.unlink()
        path.parent.rmdir()


if __name__ == "__main__":
    torch.set_num_threads(1)
    with limit_value_size():
        MPI.Init()
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
    MPI.Finalize()
