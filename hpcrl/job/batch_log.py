"""Notes in the log of the batch script, where people look when a job has ended: the standard error of the driver.

note_in_log     write a line; the log may be on the file system that fails just now
note_exception  write the traceback of the exception that is being handled
"""

import contextlib
import sys
import traceback


def note_in_log(text: str) -> None:
    """Write a line, if the file system takes it."""
    with contextlib.suppress(OSError, ValueError):
        print(text, file=sys.stderr, flush=True)  # noqa: T201 - the batch log


def note_exception() -> None:
    """Write the traceback of the exception that is being handled."""
    note_in_log(traceback.format_exc())
