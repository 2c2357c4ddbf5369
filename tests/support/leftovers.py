"""Files that a test session leaves in /dev/shm and in the folder of temporary files.

LeftoverCheck  compares what is there before the first of the sessions that run beside each other and after the last
Leftovers      its result
start_check    start it for this machine's folders, and mark what this session starts
remove_own     remove what multiprocessing would only remove when this process ends

Sessions share a lock file: the one that starts alone notes what is there, the one that ends last compares. So none is
blamed for what another still uses, and what any of them left is found. The last one also removes the lock file, and
pytest's folder unless failed tests left something there. A file belongs to something else on this machine, such as a
developer's campaign, if a process uses it that no test session has started.
"""

import contextlib
import fcntl
import json
import multiprocessing.util
import os
import re
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.process import current_process
from pathlib import Path

import psutil

from hpcrl.weights.window.shm_cleanup import remove_orphans

OURS = re.compile(r"psm_|sem\.mp-|hydra_hwloc_xmlfile_|hpcrl-|vllm-|pymp-|torchinductor_")
LEDGER = re.compile(r"hpcrl-\d+-ledger-")
MARK = "HPCRL_TEST_SESSION"
"""Every program that a test session starts inherits this variable."""
END_TIMEOUT_S = 60.0
"""Processes that are about to end remove their files within this time."""


@dataclass(frozen=True)
class Leftovers:
    """The paths that were left."""

    lasting: tuple[str, ...] = ()
    """They stay until a person removes them."""
    orphans: tuple[str, ...] = ()
    """The next step of a campaign on this node would have removed them: their owners were killed."""
    may_be_of_killed: bool = False
    """True if another session ran meanwhile, which may have killed the owners of the orphans on purpose."""


class LeftoverCheck:
    """The part of one session, from `start` to `end`."""

    def __init__(self, folders: tuple[Path, ...], *, lock: Path) -> None:
        self._folders = folders
        self._path = lock
        while not self._enter():
            os.close(self._fd)

    def _enter(self) -> bool:
        """Join the sessions of the lock file; return False if the last of them has removed it meanwhile."""
        self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_APPEND, 0o600)
        is_alone = self._is_alone()
        if not is_alone:
            fcntl.flock(self._fd, fcntl.LOCK_SH)  # once the first session has noted what is there
        if not os.fstat(self._fd).st_nlink:
            return False
        if is_alone:
            os.ftruncate(self._fd, 0)
            os.write(self._fd, json.dumps(sorted(self._find_files())).encode())
            fcntl.flock(self._fd, fcntl.LOCK_SH)
        else:
            os.write(self._fd, b"\n")
        return True

    def end(self) -> Leftovers:
        """Return what was left since the first session started; nothing while another session is running."""
        try:
            if not self._is_alone():
                return Leftovers()
            before, *others = os.pread(self._fd, os.fstat(self._fd).st_size, 0).split(b"\n")
            left = self._wait_for_owners(set(json.loads(before)))
            if left:
                for folder in self._folders:
                    remove_orphans(folder)
            lasting = left & self._find_files().keys()
            self._remove_folders_of_pytest()
            self._path.unlink(missing_ok=True)
            return Leftovers(tuple(sorted(lasting)), tuple(sorted(left - lasting)), bool(others))
        finally:
            os.close(self._fd)

    def _remove_folders_of_pytest(self) -> None:
        """Remove the folder in which pytest makes one for each session, and its link, if no session left any."""
        for made in (path for folder in self._folders for path in folder.glob("pytest-of-*")):
            with contextlib.suppress(OSError):  # it holds what failed tests left, or is another user's
                if not (newest := made / "pytest-current").exists():
                    newest.unlink(missing_ok=True)
                made.rmdir()

    def _wait_for_owners(self, before: set[str]) -> set[str]:
        """Return what is left once no process of a test session, except this one, uses any of it, or after a while."""
        deadline = time.monotonic() + END_TIMEOUT_S
        while True:
            files = self._find_files()
            left = files.keys() - before - {current_process()._config.get("tempdir")}  # removed when this process ends
            if not left:
                return left
            of_sessions, of_others = _find_used(files)
            left -= of_others
            if not left & of_sessions or time.monotonic() > deadline:
                return left
            time.sleep(0.2)

    def _is_alone(self) -> bool:
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def _find_files(self) -> dict[str, tuple[int, int]]:
        """Return the paths of this user's files that hpcrl, or a library for it, makes; with their device and inode."""
        found = (Path(entry) for folder in self._folders if folder.is_dir() for entry in os.scandir(folder))
        files = {}
        for path in found:
            if OURS.match(path.name) and path != self._path:
                try:
                    facts = path.lstat()
                except OSError:
                    continue  # gone meanwhile
                if facts.st_uid == os.getuid():
                    files[str(path)] = (facts.st_dev, facts.st_ino)
        return files


def start_check() -> LeftoverCheck:
    """Start the check of this machine's folders; what this session starts from now on is marked as its own."""
    os.environ[MARK] = str(os.getpid())
    temporary = Path(tempfile.gettempdir())
    return LeftoverCheck((Path("/dev/shm"), temporary), lock=temporary / f"hpcrl-tests-{os.getuid()}.lock")


def remove_own() -> None:
    """Remove now what multiprocessing has made for this process and removes when it ends: it may be killed before."""
    multiprocessing.util._run_finalizers()


def _find_used(files: dict[str, tuple[int, int]]) -> tuple[set[str], set[str]]:
    """Return which files are used by processes that test sessions have started, this one apart, and by others."""
    below = {process.pid for process in psutil.Process().children(recursive=True)}
    of_sessions: set[str] = set()
    of_others: set[str] = set()
    for path in Path("/proc").glob("[0-9]*"):
        if int(path.name) == os.getpid():
            continue
        try:
            environment = (path / "environ").read_bytes()
            used = _list_used(path, environment, files)
        except OSError:
            continue  # it has ended, or is another user's
        is_of_session = int(path.name) in below or f"{MARK}=".encode() in environment
        (of_sessions if is_of_session else of_others).update(used)
    recorded = {path for ledger in of_others if LEDGER.match(Path(ledger).name) for path in _read_ledger(Path(ledger))}
    return of_sessions, of_others | recorded


def _list_used(process: Path, environment: bytes, files: dict[str, tuple[int, int]]) -> list[str]:
    """Return the files that a process has open or mapped, and the directories that it works in or was started with."""
    links = [link.readlink() for link in (process / "cwd", *(process / "fd").iterdir())]
    words = b"\0".join([environment, (process / "cmdline").read_bytes(), *map(os.fsencode, links)])
    inodes = set(_list_inodes(process))
    return [path for path, inode in files.items() if inode in inodes or os.fsencode(path) in words]


def _list_inodes(process: Path) -> Iterator[tuple[int, int]]:
    """Yield device and inode of what a process has mapped; a semaphore's name in the list may be another one."""
    for line in (process / "maps").read_text(errors="replace").splitlines():
        device, inode = line.split(maxsplit=5)[3:5]
        major, minor = device.split(":")
        yield os.makedev(int(major, 16), int(minor, 16)), int(inode)


def _read_ledger(path: Path) -> list[str]:
    """Return the files and directories that a running step has recorded as its own."""
    try:
        lines = path.read_text(errors="replace").splitlines()[1:]
    except OSError:
        return []
    return [str(path.parent / line.rpartition(" ")[0]) for line in lines]
