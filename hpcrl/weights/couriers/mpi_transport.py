"""The transport of couriers over MPI; no other module imports mpi4py.

    join_ranks        connect the ranks: NoWorldError unless all that were started are there
    MpiTransport      messages and buckets as polled requests
    limit_value_size  start MPI inside, with a relay between MPICH and Slurm's pmi2

The relay shortens what MPICH publishes. MPICH sends its address in values of the length that Slurm accepts (1,024
bytes), but Slurm reads a whole command into 1,024 bytes: a value of full length is truncated, and the MPI world never
starts. It often works, since runs of zeros are written in a short form. MPICH writes 4,096 bytes of memory from the
address on, whatever follows there: whether these are zeros is chance, and the same chance at every start.
So the relay reports a smaller limit to MPICH. It is a separate process, since MPI's start blocks this one.
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

import mpi4py  # noqa: TID251

from hpcrl.system.processes import die_with_parent
from hpcrl.weights.couriers.link import NAP_RANGE_S, DoneCheck, MessageTag
from hpcrl.weights.couriers.protocol import NoWorldError
from hpcrl.weights.window.shm_cleanup import remove_orphan_mpi

mpi4py.rc.initialize = False  # only under the watchdog
mpi4py.rc.finalize = False  # it would wait for ranks that may be gone
from mpi4py import MPI  # noqa: E402, TID251

MAX_VALUE_NBYTES = 900
"""With the longest key and the step's name, this still makes a command that Slurm can read."""
_MAX_VALUE_FIELD = re.compile(rb"(?<=vallen_max=)\d+")


@contextlib.contextmanager
def limit_value_size() -> Iterator[None]:
    """Start MPI inside this block; without pmi2 the block does nothing."""
    if os.environ.get("SLURM_MPI_TYPE") != "pmi2" or "PMI_FD" not in os.environ:
        yield
        return
    slurm = int(os.environ["PMI_FD"])
    own_end, relay_end = socket.socketpair()
    relay = os.fork()
    if relay == 0:
        try:
            die_with_parent(signal.SIGKILL)
            own_end.close()
            _relay_lines(relay_end.fileno(), slurm)
        finally:
            os._exit(0)
    relay_end.close()
    os.environ["PMI_FD"] = str(own_end.fileno())
    try:
        yield
    finally:
        os.dup2(slurm, own_end.detach())  # MPI continues with Slurm itself, and the relay ends
        os.waitpid(relay, 0)


def _relay_lines(mpich: int, slurm: int) -> None:
    """Relay data in both directions until one end is closed."""
    other = {mpich: slurm, slurm: mpich}
    while True:
        for fd in select.select(other, [], [])[0]:
            if not (data := os.read(fd, 1 << 16)):
                return
            if fd == slurm and data.startswith(b"cmd=maxes"):
                data = _MAX_VALUE_FIELD.sub(lambda found: b"%d" % min(int(found[0]), MAX_VALUE_NBYTES), data)
            os.write(other[fd], data)


DATA_TAG = max(MessageTag) + 1
NAME_BYTES = 256


def join_ranks(node: str, *, num_ranks: int) -> "tuple[MpiTransport, list[str]]":
    """Return this rank's transport, and the node of every rank."""
    remove_orphan_mpi()
    with limit_value_size():
        MPI.Init_thread(MPI.THREAD_FUNNELED)
    try:
        comm = MPI.COMM_WORLD
        if comm.Get_size() != num_ranks:
            raise NoWorldError(
                f"MPI made a world of {comm.Get_size()} where {num_ranks} ranks were started (rank {comm.Get_rank()} "
                f"on {node}): is site.mpi.srun_type the one that this MPI ({MPI.Get_library_version().split()[0]}) "
                "is made for?"
            )
        return MpiTransport(comm), _gather_nodes(comm, node)
    finally:
        _unlink_segments()


class MpiTransport:
    """The transport over MPI; requests are polled, so that MPI never blocks, and uses no core while idle."""

    def __init__(self, comm: MPI.Comm) -> None:
        self.rank = comm.Get_rank()
        self._comm = comm
        self._incoming: dict[MessageTag, deque[tuple[int, bytearray, MPI.Request]]] = {
            tag: deque() for tag in MessageTag
        }

    def send_message(self, message: bytes, *, to: int, tag: MessageTag) -> DoneCheck:
        return self._comm.Isend([message, MPI.BYTE], to, tag).Test

    def poll_messages(self, tag: MessageTag) -> Iterator[tuple[int, bytes]]:
        status, incoming = MPI.Status(), self._incoming[tag]
        while (message := self._comm.Improbe(MPI.ANY_SOURCE, tag, status)) is not None:
            text = bytearray(status.Get_count(MPI.BYTE))
            incoming.append((status.Get_source(), text, message.Irecv([text, MPI.BYTE])))
        while incoming and incoming[0][2].Test():
            rank, text, _ = incoming.popleft()
            yield rank, bytes(text)

    def send(self, chunk: memoryview, *, to: int) -> DoneCheck:
        return self._comm.Isend([chunk, MPI.BYTE], to, DATA_TAG).Test

    def receive(self, chunk: memoryview, *, source: int) -> DoneCheck:
        return self._comm.Irecv([chunk, MPI.BYTE], source, DATA_TAG).Test


def _gather_nodes(comm: MPI.Comm, node: str) -> list[str]:
    names = bytearray(NAME_BYTES * comm.Get_size())
    request = comm.Iallgather([node.encode().ljust(NAME_BYTES), MPI.BYTE], [names, MPI.BYTE])
    while not request.Test():
        time.sleep(NAP_RANGE_S[1])
    return [names[start : start + NAME_BYTES].decode().rstrip() for start in range(0, len(names), NAME_BYTES)]


def _unlink_segments() -> None:
    """Remove the names of MPI's shared memory, which all ranks have mapped by now: they would outlive a kill -9."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        if " /dev/shm/" in line:
            Path("/dev/shm", line.rpartition("/")[2]).unlink(missing_ok=True)
