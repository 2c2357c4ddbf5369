"""Supervise one vLLM server: `python -m hpcrl.engines.vllm.supervisor PARENT COMMAND...`.

    main  run the server under supervision

vLLM is several processes, and when one is killed the others stay with all their memory. The supervisor adopts them,
ends when the process PARENT does, and ends them all when the server ends for any reason. It records what they have in
the shared memory of the node and removes that at the end; at the start it removes files of processes that were killed.
"""

import os
import signal
import subprocess
import sys
from types import FrameType

from hpcrl.system.exit_codes import encode_exit_code
from hpcrl.system.processes import adopt_orphans, die_with_parent, end_descendants, list_descendants
from hpcrl.weights.window.shm_cleanup import SegmentLedger, remove_orphans

DESCENDANTS_GRACE_S = 5.0


def main(parent: int, command: list[str]) -> int:
    """Run `command` to its end; returns its exit code."""
    adopt_orphans()
    die_with_parent(signal.SIGTERM)
    if os.getppid() != parent:  # it ended before die_with_parent took effect
        return 1
    remove_orphans()
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, preexec_fn=die_with_parent)

    def forward(number: int, _: FrameType | None) -> None:
        child.send_signal(number)

    for sig in (signal.SIGTERM, signal.SIGINT):
        signal.signal(sig, forward)
    ledger = SegmentLedger()
    code = ledger.wait(child)
    ledger.record(list_descendants())
    end_descendants(grace_s=DESCENDANTS_GRACE_S)
    ledger.clear()
    return encode_exit_code(code)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
