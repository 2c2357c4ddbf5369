"""The locks of the GPUs of one node that the trainer and engines share: only one of the two works on them at a time.

    ShiftLocks   the lock file, opened by one process

They end with the processes that hold them, however these end: no other process waits for one that is gone, or has to
judge the age of a lock. The server of an engine inherits the descriptor, and with it the lock, until it has ended too.
"""

import os
from pathlib import Path

from hpcrl.system.byte_locks import is_locked, try_lock, unlock_byte

REQUEST_LOCK = 0
"""Held by the trainer from its request until it leaves the GPUs."""
SHIFT_LOCK = 1
"""Held by rank 0 of the trainer, or shared by all engines that are awake."""
RANK_LOCK = 2
"""Shared by the other ranks whose state is on GPUs: they may outlive rank 0 for a moment."""


class ShiftLocks:
    """The locks as one process has them."""

    def __init__(self, path: Path) -> None:
        """Open the lock file, which only this user can; make it if it is not there."""
        self.fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        if os.fstat(self.fd).st_uid != os.getuid():
            os.close(self.fd)
            raise PermissionError(f"{path} belongs to another user: remove it")

    def close(self) -> None:
        """Release all locks of this process."""
        os.close(self.fd)

    # ---- the trainer

    def request(self) -> bool:
        """Ask all engines to leave the GPUs; False while another trainer does."""
        return try_lock(self.fd, REQUEST_LOCK, exclusive=True)

    def try_start_training(self) -> bool:
        """Take the GPUs, once all engines have left them."""
        return try_lock(self.fd, SHIFT_LOCK, exclusive=True)

    def end_training(self) -> None:
        """Leave the GPUs to the engines."""
        unlock_byte(self.fd, SHIFT_LOCK)
        unlock_byte(self.fd, REQUEST_LOCK)

    def enter_rank(self) -> bool:
        """Note that this rank's state is on a GPU."""
        return try_lock(self.fd, RANK_LOCK, exclusive=False)

    def leave_rank(self) -> None:
        """Note that this rank's state is in host memory."""
        unlock_byte(self.fd, RANK_LOCK)

    # ---- an engine

    def is_requested(self) -> bool:
        """Return whether the trainer asks for the GPUs, or has them."""
        return is_locked(self.fd, REQUEST_LOCK)

    def try_start_serving(self) -> bool:
        """Take the GPUs beside other engines, unless the trainer has them or asks for them."""
        if self.is_requested() or not try_lock(self.fd, SHIFT_LOCK, exclusive=False):
            return False
        if is_locked(self.fd, RANK_LOCK):
            self.end_serving()
            return False
        return True

    def end_serving(self) -> None:
        """Leave the GPUs."""
        unlock_byte(self.fd, SHIFT_LOCK)
