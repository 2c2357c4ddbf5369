"""Locks on single bytes of a file, which end with the processes that hold them.

try_lock, unlock_byte   lock and unlock a byte
is_locked               whether another descriptor has a lock on it
"""

import errno
import fcntl
import os
import struct

_LOCK = struct.Struct("hhqqi4x")


def try_lock(fd: int, byte: int, *, exclusive: bool) -> bool:
    """Try to lock one byte of the file; such a lock belongs to the descriptor and ends with it."""
    kind = fcntl.F_WRLCK if exclusive else fcntl.F_RDLCK
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _LOCK.pack(kind, os.SEEK_SET, byte, 1, 0))
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EACCES):
            return False
        raise
    return True


def unlock_byte(fd: int, byte: int) -> None:
    """Unlock a byte now: memory that is still in use keeps a copy of the descriptor, and with it the lock."""
    fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _LOCK.pack(fcntl.F_UNLCK, os.SEEK_SET, byte, 1, 0))


def is_locked(fd: int, byte: int) -> bool:
    """Return whether any other descriptor has a lock on a byte, shared or not."""
    answer = fcntl.fcntl(fd, fcntl.F_OFD_GETLK, _LOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, byte, 1, 0))
    return bool(_LOCK.unpack(answer)[0] != fcntl.F_UNLCK)
