"""Run the command of a step on its node, and clean up when it ends: `python -m hpcrl.job.step END COMMAND...`.

The command gets its own temporary directory, and is ended when the file END appears: srun would kill it without
notice, and resources outside its memory (semaphores, sockets) would stay on the node. Processes that it leaves running,
in any session, are ended too, also where Slurm tracks processes only by group. The semaphores of processes that were
killed are removed from the node's shared memory.
"""

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import FrameType

from hpcrl.system.exit_codes import encode_exit_code
from hpcrl.system.processes import adopt_orphans, die_with_parent, end_descendants, list_descendants
from hpcrl.weights.window.shm_cleanup import SegmentLedger

TERM_GRACE_S = 3.0
POLL_INTERVAL_S = 0.25
MIN_LOOK_INTERVAL_S, MAX_LOOK_INTERVAL_S = 1.0, 60.0
"""The interval between looks at the shared memory of the command's processes doubles from one to the other."""


def main(end: Path, command: list[str]) -> int:
    """Run `command`, forward signals, clean up; return its exit code."""
    adopt_orphans()
    with tempfile.TemporaryDirectory(prefix="hpcrl-", ignore_cleanup_errors=True) as scratch:
        child = subprocess.Popen(command, env=os.environ | {"TMPDIR": scratch}, preexec_fn=die_with_parent)

        def forward(number: int, _: FrameType | None) -> None:
            child.send_signal(number)

        for sig in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2):
            signal.signal(sig, forward)
        ledger = SegmentLedger()
        code = _wait_for_child(child, end, ledger)
        ledger.record(list_descendants())
        end_descendants(grace_s=TERM_GRACE_S)
        ledger.clear()
    return encode_exit_code(code)


def _wait_for_child(child: "subprocess.Popen[bytes]", end: Path, ledger: SegmentLedger) -> int:
    """Return the exit code of `child`; if it was asked to end, that is 0. Record its shared memory meanwhile."""
    interval_s = MIN_LOOK_INTERVAL_S
    next_look = time.monotonic() + interval_s
    while True:
        try:
            return child.wait(POLL_INTERVAL_S)
        except subprocess.TimeoutExpired:
            if time.monotonic() >= next_look:
                ledger.record(list_descendants())
                interval_s = min(2 * interval_s, MAX_LOOK_INTERVAL_S)
                next_look = time.monotonic() + interval_s
        if end.exists():
            child.terminate()
            child.wait()
            return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
