"""Hold Ctrl-C back while this process becomes another program, until that one can answer it.

replace_process       become another program
release_interrupts    answer Ctrl-C again, in that program: one that was held back is raised here
"""

import os
import signal
import sys
from collections.abc import Sequence
from typing import NoReturn


def replace_process(words: Sequence[str]) -> NoReturn:
    """Become another program, with SIGINT held back: an interpreter that still imports would print a traceback."""
    sys.stdout.flush()
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        os.execv(words[0], list(words))
    finally:
        release_interrupts()


def release_interrupts() -> None:
    """Answer SIGINT again."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
