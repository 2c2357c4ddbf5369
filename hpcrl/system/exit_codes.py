"""The exit codes of hpcrl's processes, how a child's return code becomes one, and how the work of a command does."""

import os
import signal
import sys
from collections.abc import Callable

from hpcrl.errors import HpcrlError
from hpcrl.system.file_watch import describe_outage, is_denied, is_outage
from hpcrl.system.interrupts import release_interrupts

EXIT_DONE = 0
EXIT_FAILED = 1
"""The command ran and found a problem: a failed campaign, a damaged or an incomplete record."""
EXIT_USAGE = 2
"""The user can fix it: one message explains how."""
EXIT_DRAINED = 3
"""The trainer's process has saved a checkpoint, and the campaign is to continue in another job."""
EXIT_OUT_OF_MEMORY = 4
"""A rank of the trainer has run out of memory, or the kernel ended it for that."""
EXIT_HUNG = 5
"""A rank of the trainer stood still, or did not work, and was ended."""
EXIT_INTERRUPTED = 130
_SIGNAL_CODE = 128
"""The exit code for signal N is this plus N."""


def encode_exit_code(return_code: int) -> int:
    """Return the exit code for a child that ended with `return_code`: 128 + N if signal N killed it."""
    return return_code if return_code >= 0 else _SIGNAL_CODE - return_code


def decode_exit_code(code: int) -> int:
    """Return the return code that `encode_exit_code` had: -N if signal N killed the child."""
    return _SIGNAL_CODE - code if code > _SIGNAL_CODE else code


def describe_end(return_code: int) -> str:
    """Return how a child ended, such as "was killed by SIGSEGV"."""
    if return_code >= 0:
        return f"ended with code {return_code}"
    try:
        return f"was killed by {signal.Signals(-return_code).name}"
    except ValueError:
        return f"was killed by signal {-return_code}"


def run_for_code(run: Callable[[], int]) -> int:
    """Run the work of a command in a separate interpreter; an error that the user can fix is one message."""
    try:
        release_interrupts()
        code = run()
        sys.stdout.flush()
    except (HpcrlError, ModuleNotFoundError) as error:
        hint = f": {sys.executable} needs `pip install 'hpcrl[local]'`" * isinstance(error, ModuleNotFoundError)
        return _refuse(f"{error}{hint}")
    except BrokenPipeError:  # the reader of the output has closed it, as `| head` does
        drop_output()
        return EXIT_DONE
    except OSError as error:
        if not is_outage(error) and not is_denied(error):
            raise
        drop_output()
        return _refuse(describe_outage(error))
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    return code


def _refuse(message: str) -> int:
    from hpcrl.system.terminal import print_to_stderr  # late: most commands refuse nothing

    print_to_stderr(f"hpcrl: {message}")
    return EXIT_USAGE


def drop_output() -> None:
    """Let what was not written go nowhere, or Python would try again at its end, and fail."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
