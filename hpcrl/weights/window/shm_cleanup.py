"""Remove shared-memory files of processes that were killed, and nothing else.

    remove_orphans     remove windows that no process has open, and the segments in ledgers of ended keepers
    remove_orphan_mpi  remove the segments of ended MPI worlds, so that a world of the same name can start
    SegmentLedger      a keeper's list of the segments made by the processes below it (vLLM's leave theirs when they
                       are killed) and of its scratch directory; it is in shared memory too, so that it outlives a
                       killed keeper

A live process holds a lock on its window or ledger; locks end with the process, in any container. MPI holds no lock:
there, a live process has the segment mapped. Files of another user, very recent files, and files whose first bytes are
not those of this kind are left alone.
"""

import contextlib
import os
import re
import shutil
import stat
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from hpcrl.system.byte_locks import try_lock
from hpcrl.system.processes import list_descendants
from hpcrl.weights.window.file import MAGIC, OPEN_LOCK, SHARED_MEMORY, UNFINISHED_SUFFIX, is_own_file

MIN_ORPHAN_AGE_S = 60.0
"""A more recent file may have an owner that is about to lock it."""
MIN_MPI_AGE_S = 5.0
"""A more recent segment of MPI may be about to be mapped."""
LEDGER_MAGIC = b"hpcrlLG1"
SCRATCH_PREFIX = "hpcrl-"
"""The names of scratch directories start with this; a ledger removes no other."""
CHILD_POLL_INTERVAL_S = 0.25
MIN_LOOK_INTERVAL_S, MAX_LOOK_INTERVAL_S = 1.0, 60.0
"""The interval between looks at the shared memory of a child's processes doubles from one to the other."""
_SEGMENT_NAME = re.compile(r"(?:psm_|sem\.mp-)[\w.-]+")
"""Names that Python's multiprocessing gives to its memory and its semaphores."""
_MPI_SEGMENTS = ("mpich_*", "ucx_shm_posix_*")
"""The names of MPI's segments. UCX removes a name as soon as it has mapped the memory, unless it is killed before."""
_MAPPING_LINE = re.compile(r"\S+ \S+ \S+ \S+ (\d+)\s+(/\S+)(?: \(deleted\))?")


def remove_orphans(directory: Path = SHARED_MEMORY) -> list[str]:
    """Remove the files of ended processes; return the names of what was removed."""
    removed = []
    for path in sorted(directory.glob(f"hpcrl-{os.getuid()}-*")):
        if is_own_file(path):
            with contextlib.suppress(FileNotFoundError):  # another process cleans up too
                removed += _remove_orphan(path)
    return removed


def _remove_orphan(path: Path) -> list[str]:
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        magic = os.pread(fd, len(MAGIC), 0)
        is_unfinished = path.name.endswith(UNFINISHED_SUFFIX)
        if magic not in (MAGIC, LEDGER_MAGIC) and not is_unfinished:
            return []
        # a ledger is locked before it has its name, so its age does not matter
        if (magic == MAGIC or is_unfinished) and _measure_age_s(path) < MIN_ORPHAN_AGE_S:
            return []
        # the lock is held until the file is removed: no process opens it meanwhile, only a new file of that name
        if not try_lock(fd, OPEN_LOCK, exclusive=True) or not path.samefile(f"/proc/self/fd/{fd}"):
            return []
        segments = _remove_segments(fd, path.parent) if magic == LEDGER_MAGIC else []
        path.unlink(missing_ok=True)
        return [*segments, path.name]
    finally:
        os.close(fd)


def remove_orphan_mpi(directory: Path = SHARED_MEMORY) -> list[str]:
    """Remove the segments of MPICH, and of UCX below it, that no process has mapped; return their names.

    MPICH's are named after the step's number, which is used again where Slurm restarts its count, as in a new lab. A
    world that finds such a segment takes it for its own, and waits for ended processes forever.
    """
    found = (path for pattern in _MPI_SEGMENTS for path in directory.glob(pattern))
    orphans = {path for path in found if is_own_file(path) and _measure_age_s(path) > MIN_MPI_AGE_S}
    if orphans:
        orphans -= {Path(found[2]) for maps in Path("/proc").glob("[0-9]*/maps") for found in _read_mappings(maps)}
    for path in orphans:
        path.unlink(missing_ok=True)
    return sorted(path.name for path in orphans)


class SegmentLedger:
    """The files that this process removes at its end, or other processes after it was killed."""

    def __init__(self, directory: Path = SHARED_MEMORY, *, scratch: Path | None = None) -> None:
        """Record a directory for temporary files, if there is one, at once."""
        self._directory = directory
        self._path = directory / f"hpcrl-{os.getuid()}-ledger-{os.getpid()}-{time.monotonic_ns()}"
        self._fd: int | None = None
        self._recorded: set[str] = set()
        if scratch is not None:
            self._write_lines({f"{scratch} {scratch.stat().st_ino}"})

    def record(self, pids: Iterable[int]) -> None:
        """Record the segments that these processes have mapped."""
        new = {line for pid in pids for line in _list_mapped_segments(pid, self._directory)} - self._recorded
        if new:
            self._write_lines(new)

    def wait(self, child: "subprocess.Popen[bytes]", *, is_over: Callable[[], bool] = lambda: False) -> int:
        """Return the exit code of `child`, or 0 as soon as `is_over()`, while it still runs. Record its segments."""
        interval_s = MIN_LOOK_INTERVAL_S
        next_look = time.monotonic() + interval_s
        while True:
            try:
                return child.wait(CHILD_POLL_INTERVAL_S)
            except subprocess.TimeoutExpired:
                if time.monotonic() >= next_look:
                    self.record(list_descendants())
                    interval_s = min(2 * interval_s, MAX_LOOK_INTERVAL_S)
                    next_look = time.monotonic() + interval_s
            if is_over():
                return 0

    def _write_lines(self, lines: set[str]) -> None:
        if self._fd is None:
            unfinished = self._path.with_name(self._path.name + UNFINISHED_SUFFIX)
            self._fd = os.open(unfinished, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            try_lock(self._fd, OPEN_LOCK, exclusive=False)
            os.write(self._fd, LEDGER_MAGIC + b"\n")
            unfinished.rename(self._path)
        os.write(self._fd, "".join(f"{line}\n" for line in sorted(lines)).encode())
        self._recorded |= lines

    def clear(self) -> list[str]:
        """Remove what was recorded and is still there, once those processes have ended; return the names."""
        if self._fd is None:
            return []
        removed = _remove_segments(self._fd, self._directory)
        self._path.unlink(missing_ok=True)
        os.close(self._fd)
        self._fd = None
        return removed


def _list_mapped_segments(pid: int, directory: Path) -> Iterator[str]:
    """Yield a line for each segment that a process has mapped: its name and its inode.

    The process that made a semaphore has it mapped under a temporary name, which is gone; the inode is the same.
    """
    maps = _read_mappings(Path(f"/proc/{pid}/maps"))
    if not (inodes := {found[1] for found in maps if Path(found[2]).parent == directory}):
        return
    with os.scandir(directory) as entries:
        yield from (
            f"{entry.name} {entry.inode()}"
            for entry in entries
            if str(entry.inode()) in inodes and _SEGMENT_NAME.fullmatch(entry.name)
        )


def _read_mappings(maps: Path) -> Iterator[re.Match[str]]:
    """Yield the files that a process has mapped: inode and path."""
    with contextlib.suppress(OSError):  # it has ended, or is another user's
        yield from filter(None, map(_MAPPING_LINE.fullmatch, maps.read_text(errors="replace").splitlines()))


def _remove_segments(ledger: int, directory: Path) -> list[str]:
    """Remove what is still the same files and directories; a name may have been used again."""
    removed = []
    for line in os.pread(ledger, os.fstat(ledger).st_size, 0).decode(errors="replace").splitlines()[1:]:
        name, _, inode = line.rpartition(" ")
        path = directory / name
        if _SEGMENT_NAME.fullmatch(name) and is_own_file(path) and str(path.lstat().st_ino) == inode:
            path.unlink(missing_ok=True)
            removed.append(name)
        elif path.name.startswith(SCRATCH_PREFIX) and _is_own_directory(path, inode=inode):
            shutil.rmtree(path, ignore_errors=True)
            removed.append(name)
    return removed


def _is_own_directory(path: Path, *, inode: str) -> bool:
    try:
        facts = path.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(facts.st_mode) and facts.st_uid == os.getuid() and str(facts.st_ino) == inode


def _measure_age_s(path: Path) -> float:
    """Return a file's age; 0 if it is gone, since another process has just removed it."""
    try:
        status = path.lstat()
    except FileNotFoundError:
        return 0.0
    return time.time() - max(status.st_mtime, status.st_ctime)
