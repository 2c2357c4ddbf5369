"""What a test session leaves in /dev/shm and in the folder of temporary files.

LeftoverCheck  compares what is there before the first of the sessions that run beside each other and after the last

Sessions share a lock file: the one that starts alone notes what is there, the one that ends last compares. So none is
blamed for what another still uses, and what any of them left is found. What a killed keeper recorded is removed first,
as the next step on that node would.
"""

import fcntl
import json
import os
import re
import tempfile
from pathlib import Path

from hpcrl.weights.window.shm_cleanup import remove_orphans

OURS = re.compile(r"psm_|sem\.mp-|hydra_hwloc_xmlfile_|hpcrl-|vllm-|pymp-")


class LeftoverCheck:
    """The part of one session, from `start` to `end`."""

    def __init__(self, folders: tuple[Path, ...], *, lock: Path) -> None:
        self._folders = folders
        self._path = lock
        self._fd = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        if self._is_alone():
            os.ftruncate(self._fd, 0)
            os.pwrite(self._fd, json.dumps(sorted(self._names())).encode(), 0)
        fcntl.flock(self._fd, fcntl.LOCK_SH)

    def end(self) -> list[str]:
        """Return what was left since the first session started; nothing while another session is running."""
        try:
            if not self._is_alone():
                return []
            remove_orphans()
            before = json.loads(os.pread(self._fd, os.fstat(self._fd).st_size, 0) or b"[]")
            return sorted(self._names().difference(before))
        finally:
            os.close(self._fd)

    def _is_alone(self) -> bool:
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def _names(self) -> set[str]:
        """Return the paths of this user's files that hpcrl, or a library for it, makes."""
        found = (Path(entry) for folder in self._folders if folder.is_dir() for entry in os.scandir(folder))
        return {str(path) for path in found if OURS.match(path.name) and path != self._path and _is_mine(path)}


def start_check() -> LeftoverCheck:
    """Start the check of this machine's folders."""
    temporary = Path(tempfile.gettempdir())
    return LeftoverCheck((Path("/dev/shm"), temporary), lock=temporary / f"hpcrl-tests-{os.getuid()}.lock")


def campaigns_are_running() -> bool:
    """Return whether any process of hpcrl is alive, whose files are in use."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().split(b"\0")
        except OSError:
            continue
        if any(word.startswith(b"hpcrl.") for word in words):
            return True
    return False


def _is_mine(path: Path) -> bool:
    try:
        return path.lstat().st_uid == os.getuid()
    except OSError:
        return False  # gone meanwhile
