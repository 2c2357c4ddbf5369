"""What the dead have left in the shared memory of a node, and nothing else.

    remove_orphans     remove windows that nobody has open, and the segments that a ledger names whose keeper is dead
    remove_orphan_mpi  remove the segments of MPI worlds that are gone, so that a world of the same name can begin
    SegmentLedger      a keeper's list of the segments that the processes below it have made (vLLM's do, and forget them when
                       they are killed); it lies in shared memory too, for who comes after a keeper that was killed

Who lives holds a lock, on its window or on its ledger; locks end with processes, in whatever container these were. MPI
takes none: there, who lives has the segment mapped. What is of another user, of the last moment, or by its first bytes
no file of this kind is left alone.
"""

import contextlib
import os
import re
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from hpcrl.weights.window.file import MAGIC, OPEN_LOCK, SHARED_MEMORY, UNFINISHED_SUFFIX, is_own_file, try_lock

MIN_ORPHAN_AGE_S = 60.0
"""A file that was touched so lately may have an owner that is just about to lock it."""
MIN_MPI_AGE_S = 5.0
"""A segment that MPI made so lately may be just about to be mapped."""
LEDGER_MAGIC = b"hpcrlLG1"
_SEGMENT_NAME = re.compile(r"(?:psm_|sem\.mp-)[\w.-]+")
"""What Python's multiprocessing calls its memory and its semaphores."""
_MAPPING_LINE = re.compile(r"\S+ \S+ \S+ \S+ (\d+)\s+(/\S+)")


def remove_orphans(directory: Path = SHARED_MEMORY) -> list[str]:
    """Remove what the dead have left; the names of what is gone."""
    removed = []
    for path in sorted(directory.glob(f"hpcrl-{os.getuid()}-*")):
        if is_own_file(path) and _measure_age_s(path) >= MIN_ORPHAN_AGE_S:
            with contextlib.suppress(FileNotFoundError):  # somebody else sweeps too
                removed += _remove_orphan(path)
    return removed


def _remove_orphan(path: Path) -> list[str]:
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        magic = os.pread(fd, len(MAGIC), 0)
        if magic not in (MAGIC, LEDGER_MAGIC) and not path.name.endswith(UNFINISHED_SUFFIX):
            return []
        # the lock is held until it is gone: nobody comes to life meanwhile, unless under a new file of that name
        if not try_lock(fd, OPEN_LOCK, exclusive=True) or not path.samefile(f"/proc/self/fd/{fd}"):
            return []
        segments = _remove_segments(fd, path.parent) if magic == LEDGER_MAGIC else []
        path.unlink(missing_ok=True)
        return [*segments, path.name]
    finally:
        os.close(fd)


def remove_orphan_mpi(directory: Path = SHARED_MEMORY) -> list[str]:
    """Remove MPICH's segments that no process has mapped; the names of what is gone.

    They are named after the step's number, which comes again where Slurm begins anew to count, as in a new lab. A world
    that finds one takes it for its own, and waits for the dead without an end.
    """
    orphans = {path for path in directory.glob("mpich_*") if is_own_file(path) and _measure_age_s(path) > MIN_MPI_AGE_S}
    if orphans:
        orphans -= {Path(found[2]) for maps in Path("/proc").glob("[0-9]*/maps") for found in _read_mappings(maps)}
    for path in orphans:
        path.unlink(missing_ok=True)
    return sorted(path.name for path in orphans)


class SegmentLedger:
    """Segments in shared memory that this process removes at its end, or that others do once it is dead."""

    def __init__(self, directory: Path = SHARED_MEMORY) -> None:
        self._directory = directory
        self._path = directory / f"hpcrl-{os.getuid()}-ledger-{os.getpid()}-{time.monotonic_ns()}"
        self._fd: int | None = None
        self._recorded: set[str] = set()

    def record(self, pids: Iterable[int]) -> None:
        """Take down what these processes have mapped."""
        new = {line for pid in pids for line in _list_mapped_segments(pid, self._directory)} - self._recorded
        if not new:
            return
        if self._fd is None:
            self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            try_lock(self._fd, OPEN_LOCK, exclusive=False)
            os.write(self._fd, LEDGER_MAGIC + b"\n")
        os.write(self._fd, "".join(f"{line}\n" for line in sorted(new)).encode())
        self._recorded |= new

    def clear(self) -> list[str]:
        """Remove what was taken down and is still there, for when those processes are gone; the names."""
        if self._fd is None:
            return []
        removed = _remove_segments(self._fd, self._directory)
        self._path.unlink(missing_ok=True)
        os.close(self._fd)
        self._fd = None
        return removed


def _list_mapped_segments(pid: int, directory: Path) -> Iterator[str]:
    """A line for each segment that a process has mapped: its name and its inode."""
    for found in _read_mappings(Path(f"/proc/{pid}/maps")):
        if Path(found[2]).parent == directory and _SEGMENT_NAME.fullmatch(Path(found[2]).name):
            yield f"{Path(found[2]).name} {found[1]}"


def _read_mappings(maps: Path) -> Iterator[re.Match[str]]:
    """The files that a process has mapped: inode and path."""
    with contextlib.suppress(OSError):  # it has ended, or is another user's
        yield from filter(None, map(_MAPPING_LINE.fullmatch, maps.read_text(errors="replace").splitlines()))


def _remove_segments(ledger: int, directory: Path) -> list[str]:
    """Those that are still the same files; a name may have been used again."""
    removed = []
    for line in os.pread(ledger, os.fstat(ledger).st_size, 0).decode(errors="replace").splitlines()[1:]:
        name, _, inode = line.partition(" ")
        path = directory / name
        if _SEGMENT_NAME.fullmatch(name) and is_own_file(path) and str(path.lstat().st_ino) == inode:
            path.unlink(missing_ok=True)
            removed.append(name)
    return removed


def _measure_age_s(path: Path) -> float:
    """Of what is gone: none, for somebody else was here just now."""
    try:
        status = path.lstat()
    except FileNotFoundError:
        return 0.0
    return time.time() - max(status.st_mtime, status.st_ctime)
