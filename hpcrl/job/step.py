"""What a step runs on its node: `python -m hpcrl.job.step END COMMAND...`, with nothing left behind when it ends.

The command gets a temporary directory of its own, and is ended when the file END appears: srun would kill it without
notice, and what a program keeps outside its memory (semaphores, sockets) would stay on the node. Whatever it leaves
running, in whatever session, is ended too, also where Slurm tracks processes by group alone.
"""

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from types import FrameType

from hpcrl.system.exit_codes import encode_exit_code
from hpcrl.system.processes import adopt_orphans, die_with_parent, end_descendants

TERM_GRACE_S = 3.0
POLL_INTERVAL_S = 0.25


def main(end: Path, command: list[str]) -> int:
    """Run `command`, pass signals on, clear up; ends with its exit code."""
    adopt_orphans()
    with tempfile.TemporaryDirectory(prefix="hpcrl-", ignore_cleanup_errors=True) as scratch:
        child = subprocess.Popen(command, env=os.environ | {"TMPDIR": scratch}, preexec_fn=die_with_parent)

        def forward(number: int, _: FrameType | None) -> None:
            child.send_signal(number)

        for sig in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2):
            signal.signal(sig, forward)
        code = _wait_for_child(child, end)
        end_descendants(grace_s=TERM_GRACE_S)
    return encode_exit_code(code)


def _wait_for_child(child: "subprocess.Popen[bytes]", end: Path) -> int:
    """Its exit code; to end when asked to is success."""
    while True:
        try:
            return child.wait(POLL_INTERVAL_S)
        except subprocess.TimeoutExpired:
            if end.exists():
                child.terminate()
                child.wait()
                return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
