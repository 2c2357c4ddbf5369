"""Runs one slurmd of the lab, and takes in what its jobs leave behind, so that `hpcrl lab down` finds all of it.

    python keeper.py /usr/sbin/slurmd -D -N env1

A process that calls setsid, loses its parent and drops its environment would become a child of init and bear no
mark of the lab; with the keeper between, it becomes a child of the keeper. Run as a file, for a quick start: it
imports nothing of hpcrl.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36


def main(command: list[str]) -> int:
    """Start `command`, collect every child that ends, and end as the command ends; its life is bound to ours."""
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
