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

END_GRACE_S = 5.0
MIN_LOOK_INTERVAL_S, MAX_LOOK_INTERVAL_S, LOOK_INTERVAL_FACTOR = 1.0, 60.0, 1.2
"""The interval between looks at the shared memory of the server's processes: at first, at most, and its growth."""


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
    code = _wait_for_end(child, ledger)
    ledger.record(list_descendants())
    end_descendants(grace_s=END_GRACE_S)
    ledger.clear()
    return encode_exit_code(code)


def _wait_for_end(child: "subprocess.Popen[bytes]", ledger: SegmentLedger) -> int:
    """Wait for the exit code; meanwhile record the shared memory of the process and its descendants."""
    interval_s = MIN_LOOK_INTERVAL_S
    while True:
        try:
            return child.wait(interval_s)
        except subprocess.TimeoutExpired:
            ledger.record(list_descendants())
            interval_s = min(LOOK_INTERVAL_FACTOR * interval_s, MAX_LOOK_INTERVAL_S)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
