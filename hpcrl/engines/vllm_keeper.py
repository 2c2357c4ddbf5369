"""Keeps one vLLM server: `python -m hpcrl.engines.vllm_keeper PARENT COMMAND...`; nothing of it outlives its worker.

vLLM is several processes, and one that is killed leaves the others behind with all their memory. The keeper adopts
them, ends when the process PARENT does, and ends them all when the server ends, however that comes about.
"""

import os
import signal
import subprocess
import sys
from types import FrameType

from hpcrl.processes import adopt_orphans, die_with_parent, end_descendants

GRACE_S = 5.0


def main(parent: int, command: list[str]) -> int:
    """Run `command` to its end; its exit code."""
    adopt_orphans()
    die_with_parent(signal.SIGTERM)
    if os.getppid() != parent:  # it ended before we asked to be told
        return 1
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, preexec_fn=die_with_parent)

    def forward(number: int, _: FrameType | None) -> None:
        child.send_signal(number)

    for sig in (signal.SIGTERM, signal.SIGINT):
        signal.signal(sig, forward)
    code = child.wait()
    end_descendants(grace_s=GRACE_S)
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
