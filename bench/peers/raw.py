"""The limits of the disk: files of the same bytes, without a format.

The bytes are prepared before the clock starts: columns and JSON exactly as in a segment, without checksums or offsets.
"""

import os
from collections.abc import Sequence
from pathlib import Path

from hpcrl.spool.record import COLUMNS, PackedTrajectory
from hpcrl.system.files import sync_directory

_IOV_MAX = 1024
Batches = list[list[memoryview]]


def ready(packed: Sequence[PackedTrajectory], per_batch: int) -> Batches:
    """Return the contents of each file: column by column, then the facts."""
    groups = [packed[first : first + per_batch] for first in range(0, len(packed), per_batch)]
    return [_buffers(group) for group in groups]


def _buffers(group: Sequence[PackedTrajectory]) -> list[memoryview]:
    columns = [one.columns[name].data.cast("B") for name in COLUMNS for one in group]
    return [*columns, *(memoryview(one.facts) for one in group)]


def write_segments(directory: Path, batches: Batches) -> None:
    """Write a file per batch: write, fsync, rename, fsync the directory."""
    for number, buffers in enumerate(batches):
        temporary = directory / f".{number:08d}.tmp"
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        write_all(fd, buffers)
        os.fsync(fd)
        os.close(fd)
        temporary.rename(directory / f"{number:08d}.raw")
        sync_directory(directory)


def write_append(directory: Path, batches: Batches) -> None:
    """Write one file for all batches: append, fdatasync."""
    fd = os.open(directory / "all.raw", os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o600)
    for buffers in batches:
        write_all(fd, buffers)
        os.fdatasync(fd)
    os.close(fd)


def write_all(fd: int, buffers: Sequence[memoryview]) -> None:
    """Write all buffers. The disk of a bench is not full and writes everything at once; anything else is an error."""
    for first in range(0, len(buffers), _IOV_MAX):
        part = buffers[first : first + _IOV_MAX]
        wanted = sum(len(buffer) for buffer in part)
        written = os.writev(fd, part)
        if written != wanted:
            raise OSError(f"{written} of {wanted} bytes written: a bench needs a disk with room")
