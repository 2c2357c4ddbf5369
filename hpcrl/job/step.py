"""Run the command of a step on its node, and clean up when it ends: `python -m hpcrl.job.step END COMMAND...`.

The command gets its own temporary directory, and is ended when the file END appears: srun would kill it without
notice, and resources outside its memory (semaphores, sockets) would stay on the node. Processes that it leaves running,
in any session, are ended too, also where Slurm tracks processes only by group. The semaphores of processes that were
killed are removed from the node's shared memory. If this process is killed too, the next step on the node removes them,
and its temporary directory.
"""

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from types import FrameType

from hpcrl.system.exit_codes import encode_exit_code
from hpcrl.system.processes import adopt_orphans, die_with_parent, end_descendants, list_descendants
from hpcrl.weights.window.shm_cleanup import SCRATCH_PREFIX, SegmentLedger, remove_orphans

TERM_GRACE_S = 3.0


def main(end: Path, command: list[str]) -> int:
    """Run `command`, forward signals, clean up; return its exit code."""
    adopt_orphans()
    remove_orphans()
    with tempfile.TemporaryDirectory(prefix=SCRATCH_PREFIX, ignore_cleanup_errors=True) as scratch:
        ledger = SegmentLedger(scratch=Path(scratch))
        child = subprocess.Popen(command, env=os.environ | {"TMPDIR": scratch}, preexec_fn=die_with_parent)

        def forward(number: int, _: FrameType | None) -> None:
            child.send_signal(number)

        for sig in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2):
            signal.signal(sig, forward)
        code = ledger.wait(child, is_over=end.exists)
        ledger.record(list_descendants())
        end_descendants(grace_s=TERM_GRACE_S)
        ledger.clear()
    return encode_exit_code(code)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
