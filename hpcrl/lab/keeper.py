"""Run one slurmd of the lab and adopt the orphans of its jobs, so that `hpcrl lab down` finds them all.

    python keeper.py /usr/sbin/slurmd -D -N env1

A process that calls setsid, loses its parent and clears its environment would become a child of init without any
mark of the lab; with the keeper it becomes a child of the keeper. It runs as a file and imports nothing of hpcrl, to
start quickly.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36


def main(command: list[str]) -> int:
    """Start `command`, collect every child that ends, and return its exit code; it is killed if this process ends."""
    prctl = ctypes.CDLL(None).prctl
    prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    child = os.fork()
    if child == 0:
        prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
        os.execv(command[0], command)
    while True:
        pid, status = os.wait()
        if pid == child:
            return os.waitstatus_to_exitcode(status)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
