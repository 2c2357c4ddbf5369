"""A relay between MPICH and Slurm's pmi2, for what is too long between them.

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
from collections.abc import Iterator

from hpcrl.processes import die_with_parent

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
