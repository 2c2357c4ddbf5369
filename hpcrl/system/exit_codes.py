"""The exit codes of hpcrl's processes, and what becomes of a child's return code."""

EXIT_DONE = 0
EXIT_FAILED = 1
"""The command ran, and what it looked at is not well: a failed campaign, a damaged or an incomplete record."""
EXIT_USAGE = 2
"""The user can fix it: one message says how."""
EXIT_DRAINED = 3
"""How the trainer's process says that it has checkpointed and the campaign is to go on in another job."""
EXIT_INTERRUPTED = 130


def encode_exit_code(return_code: int) -> int:
    """Return what to exit with after a child that ended with `return_code`: 128 + N if signal N killed it."""
    return return_code if return_code >= 0 else 128 - return_code
