"""The MPI worlds of the couriers start on the lab also where MPICH and Slurm would let them hang."""

import os
import sys
import textwrap
import time

import pytest

from hpcrl.weights.window.shm_cleanup import MIN_MPI_AGE_S
from tests.support.lab_tools import Lab

pytestmark = [pytest.mark.slurm, pytest.mark.mpi, pytest.mark.timeout(300)]

JOIN = """
import faulthandler, os
faulthandler.dump_traceback_later(60, exit=True)
from hpcrl.weights.couriers import mpi_transport
wire, nodes = mpi_transport.join_ranks(os.environ["SLURMD_NODENAME"], num_ranks=2)
print(*sorted(nodes), flush=True)
os._exit(0)
"""
NOTHING_IS_ZERO = """
import ctypes, random
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
chunks = []
for number in range(60000):
    size = 200 + number % 6 * 200
    chunks.append(libc.malloc(size))
    ctypes.memmove(chunks[-1], random.randbytes(size), size)
for chunk in chunks[::2]:
    libc.free(chunk)
"""


def world(lab: Lab, program: str) -> list[str]:
    """Run this on two nodes and return the output of each rank."""
    where = ("--partition=decode", "--nodes=2", "--ntasks-per-node=1", "--mpi=pmi2", "--kill-on-bad-exit=1")
    return lab.run("srun", *where, sys.executable, "-c", textwrap.dedent(program)).splitlines()


def test_a_world_starts_whatever_follows_its_address_in_memory(lab: Lab) -> None:
    assert world(lab, NOTHING_IS_ZERO + JOIN) == ["decode1 decode2"] * 2


def test_a_world_starts_where_one_of_its_name_was_killed(lab: Lab) -> None:
    job = int(lab.run("srun", "--partition=decode", "--nodes=1", "printenv", "SLURM_JOB_ID"))
    name = f"mpich_shm_{hashed(f'{job + 1}.0'):x}"
    left = [lab.find_shared_memory(f"decode{node + 1}") / f"{name}_{node}" for node in (0, 1)]
    for path in left:
        path.touch(mode=0o600)
        os.truncate(path, 1 << 20)
    time.sleep(MIN_MPI_AGE_S + 1)
    assert world(lab, JOIN) == ["decode1 decode2"] * 2
    assert not any(path.exists() for path in left)


def hashed(name: str) -> int:
    """Return the FNV-1a hash, by which MPICH names the segments of a world."""
    number = 0x811C9DC5
    for byte in name.encode():
        number = (number ^ byte) * 0x01000193 & 0xFFFFFFFF
    return number
