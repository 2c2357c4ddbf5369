"""Supervise one vLLM server: `python -m hpcrl.engines.vllm.supervisor PARENT COMMAND...`.

vLLM is several processes, and one that is killed leaves the others behind with all their memory. The keeper adopts
them, ends when the process PARENT does, and ends them all when the server ends, however that comes about. It takes
down what they have in the shared memory of the node, and removes that too; also what others have left that are dead.
"""

import os
import signal
import subprocess
import sys
from types import FrameType

from hpcrl.system.exit_codes import encode_exit_code
from hpcrl.system.processes import adopt_orphans, descendants, die_with_parent, end_descendants
from hpcrl.weights.window.shm_cleanup import Ledger, sweep

GRACE_S = 5.0
LOOK_S, SELDOM_S, SLOWER = 1.0, 60.0, 1.2
"""How long until it is looked what they have in shared memory: at first, in the long run, and by how much it grows."""


def main(parent: int, command: list[str]) -> int:
    """Run `command` to its end; its exit code."""
    adopt_orphans()
    die_with_parent(signal.SIGTERM)
    if os.getppid() != parent:  # it ended before we asked to be told
        return 1
    sweep()
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, preexec_fn=die_with_parent)

    def forward(number: int, _: FrameType | None) -> None:
        child.send_signal(number)

    for sig in (signal.SIGTERM, signal.SIGINT):
        signal.signal(sig, forward)
    ledger = Ledger()
    code = _until_it_ends(child, ledger)
    ledger.note(descendants())
    end_descendants(grace_s=GRACE_S)
    ledger.clear()
    return encode_exit_code(code)


def _until_it_ends(child: "subprocess.Popen[bytes]", ledger: Ledger) -> int:
    """Its exit code; meanwhile what it and those below it have made in shared memory is taken down."""
    look_s = LOOK_S
    while True:
        try:
            return child.wait(look_s)
        except subprocess.TimeoutExpired:
            ledger.note(descendants())
            look_s = min(SLOWER * look_s, SELDOM_S)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
