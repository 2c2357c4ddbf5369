"""The couriers' wire over MPI; nothing else imports mpi4py.

join    bring the ranks together: NoWorldError unless there are as many as were started

A relay between MPICH and Slurm's pmi2, for what is too long between them.

MPICH tells the others its address in values of as many bytes as Slurm says that it takes (1,024), and Slurm reads a
whole command into 1,024 bytes: a value that fills its room is torn, and the world never comes up. It often works, for
runs of zeros are written short. What is written are 4,096 bytes of memory from the address on, whatever follows it
there: whether they are zeros is a matter of luck, and the same luck again at every start.
So the relay lets Slurm say less. It is a process of its own: MPI's beginning keeps this one from all else.
"""

import contextlib
import os
import re
import select
import signal
import socket
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path

import mpi4py
from mpi4py import MPI

from hpcrl.system.processes import die_with_parent
from hpcrl.weights.couriers.link import NAPS_S, Done, Tag
from hpcrl.weights.couriers.protocol import NoWorldError
from hpcrl.weights.window.shm_cleanup import free_mpi

VALUE_NBYTES = 900
"""With the longest key and the name of the step around it, still a command that Slurm can read."""
_LONGEST_VALUE = re.compile(rb"(?<=vallen_max=)\d+")


@contextlib.contextmanager
def short_values() -> Iterator[None]:
    """MPI may begin inside; where something else than pmi2 started this process, nothing happens."""
    if os.environ.get("SLURM_MPI_TYPE") != "pmi2" or "PMI_FD" not in os.environ:
        yield
        return
    slurm = int(os.environ["PMI_FD"])
    ours, theirs = socket.socketpair()
    relay = os.fork()
    if relay == 0:
        try:
            die_with_parent(signal.SIGKILL)
            ours.close()
            _relay(theirs.fileno(), slurm)
        finally:
            os._exit(0)
    theirs.close()
    os.environ["PMI_FD"] = str(ours.fileno())
    try:
        yield
    finally:
        os.dup2(slurm, ours.detach())  # MPI goes on with Slurm itself, and the relay ends
        os.waitpid(relay, 0)


def _relay(mpich: int, slurm: int) -> None:
    """Pass on what either says, until one of them has ended."""
    other = {mpich: slurm, slurm: mpich}
    while True:
        for fd in select.select(other, [], [])[0]:
            if not (said := os.read(fd, 1 << 16)):
                return
            if fd == slurm and said.startswith(b"cmd=maxes"):
                said = _LONGEST_VALUE.sub(lambda found: b"%d" % min(int(found[0]), VALUE_NBYTES), said)
            os.write(other[fd], said)


mpi4py.rc.initialize = False  # only under the watchdog
mpi4py.rc.finalize = False  # it would wait for ranks that may be gone

DATA = max(Tag) + 1
NAME_BYTES = 256


def join(node: str, *, num_ranks: int) -> "tuple[MpiWire, list[str]]":
    """This rank's wire, and the node of every rank."""
    free_mpi()
    with short_values():
        MPI.Init_thread(MPI.THREAD_FUNNELED)
    try:
        comm = MPI.COMM_WORLD
        if comm.Get_size() != num_ranks:
            raise NoWorldError(
                f"MPI made a world of {comm.Get_size()} where {num_ranks} ranks were started (rank {comm.Get_rank()} "
                f"on {node}): is site.mpi.srun_type the one that this MPI ({MPI.Get_library_version().split()[0]}) "
                "is made for?"
            )
        return MpiWire(comm), _nodes(comm, node)
    finally:
        _forget_segments()


class MpiWire:
    """Polled requests: MPI never blocks us, and takes no core while nothing comes."""

    def __init__(self, comm: MPI.Comm) -> None:
        self.rank = comm.Get_rank()
        self._comm = comm
        self._coming: dict[Tag, deque[tuple[int, bytearray, MPI.Request]]] = {tag: deque() for tag in Tag}

    def tell(self, message: bytes, *, to: int, tag: Tag) -> Done:
        return self._comm.Isend([message, MPI.BYTE], to, tag).Test

    def heard(self, tag: Tag) -> Iterator[tuple[int, bytes]]:
        status, coming = MPI.Status(), self._coming[tag]
        while (message := self._comm.Improbe(MPI.ANY_SOURCE, tag, status)) is not None:
            text = bytearray(status.Get_count(MPI.BYTE))
            coming.append((status.Get_source(), text, message.Irecv([text, MPI.BYTE])))
        while coming and coming[0][2].Test():
            rank, text, _ = coming.popleft()
            yield rank, bytes(text)

    def send(self, piece: memoryview, *, to: int) -> Done:
        return self._comm.Isend([piece, MPI.BYTE], to, DATA).Test

    def receive(self, piece: memoryview, *, source: int) -> Done:
        return self._comm.Irecv([piece, MPI.BYTE], source, DATA).Test


def _nodes(comm: MPI.Comm, node: str) -> list[str]:
    names = bytearray(NAME_BYTES * comm.Get_size())
    request = comm.Iallgather([node.encode().ljust(NAME_BYTES), MPI.BYTE], [names, MPI.BYTE])
    while not request.Test():
        time.sleep(NAPS_S[1])
    return [names[start : start + NAME_BYTES].decode().rstrip() for start in range(0, len(names), NAME_BYTES)]


def _forget_segments() -> None:
    """Remove the names of MPI's own shared memory, which all ranks have mapped by now: they would outlive a kill -9."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        if " /dev/shm/" in line:
            Path("/dev/shm", line.rpartition("/")[2]).unlink(missing_ok=True)
