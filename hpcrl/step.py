"""What a step runs on its node: `python -m hpcrl.step COMMAND...`, with nothing left behind when it ends.

The command gets a temporary directory of its own. Whatever it leaves running, in whatever session, is ended, also
where Slurm tracks processes by group alone.
"""

import os
import signal
import subprocess
import sys
import tempfile
from types import FrameType

from hpcrl.processes import adopt_orphans, die_with_parent, end_descendants

GRACE_S = 2.0


def main(command: list[str]) -> int:
    """Run `command`, pass signals on, clear up; ends with its exit code."""
    adopt_orphans()
    with tempfile.TemporaryDirectory(prefix="hpcrl-", ignore_cleanup_errors=True) as scratch:
        child = subprocess.Popen(command, env=os.environ | {"TMPDIR": scratch}, preexec_fn=die_with_parent)

        def forward(number: int, _: FrameType | None) -> None:
            child.send_signal(number)

        for sig in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2):
            signal.signal(sig, forward)
        code = child.wait()
        end_descendants(grace_s=GRACE_S)
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
