"""Fetch files of a repository of the hub: what is there already is kept, by its digest.

list_repository   the commit of a revision, and its files with sizes and digests
choose_files      those of a model that a campaign reads
StageTransfer     the transfer of its files, in several threads
is_whole          whether a file has the size and the digest that are listed
LISTING_TIMEOUT_S, NUM_THREADS, ABANDONED_S   limits

Each process writes a separate file, whose name has its node, its id and its start, and renames it when the digest is
right. So no lock is needed: a process that sees another's file waits for it, and continues with it if that process is
gone. In the worst case a file is fetched twice.
"""

import errno
import hashlib
import io
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from hpcrl.campaign.staged_files import HubName, StagedFile
from hpcrl.errors import StageError
from hpcrl.system.files import make_private_dir, sync_directory
from hpcrl.system.processes import do_nothing, is_alive, read_start_ticks

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer
    from huggingface_hub.hf_api import RepoSibling

LISTING_TIMEOUT_S = 30.0
NUM_THREADS = 4
ABANDONED_S = 600.0
"""A partial file of another node that was not written to for so long is of a process that ended."""
WAIT_INTERVAL_S = 0.5
WEIGHTS_OF_OTHERS = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.h5", "*.msgpack", "*.ot", "*.gguf", "*.onnx", "*.onnx_data")
"""Files with the same weights for other programs; the first three are read where safetensors files are missing."""
UNREAD_FILES = ("original/*", "onnx/*", "consolidated*.safetensors", "*.png", "*.jpg", "*.jpeg", "*.gif", ".git*")
_CHUNK_BYTES = 1 << 20
_PARTIAL_NAME = re.compile(r"\.(?P<file>.+)~(?P<node>[^~/]+)~(?P<pid>\d+)~(?P<ticks>\d+)\.part")


class RepositoryListing(NamedTuple):
    """The files of a commit."""

    commit: str
    files: dict[str, StagedFile]


def list_repository(name: HubName) -> RepositoryListing:
    """Ask the hub for the commit of a revision and its files; raises StageError, with what to do."""
    with _explain_errors(name):
        from huggingface_hub import HfApi

        facts = HfApi().repo_info(
            name.repository,
            revision=name.revision,
            repo_type=name.kind,
            files_metadata=True,
            timeout=LISTING_TIMEOUT_S,
        )
        siblings: list[RepoSibling] = getattr(facts, "siblings", None) or []
        return RepositoryListing(str(facts.sha), {one.rfilename: _read_facts(one) for one in siblings})


def _read_facts(sibling: "RepoSibling") -> StagedFile:
    path = Path(sibling.rfilename)
    if path.is_absolute() or ".." in path.parts:
        raise StageError(f"the hub lists a file named {sibling.rfilename!r}, which is outside of its repository")
    size = int(sibling.size or 0)
    if sibling.lfs is not None:
        return StagedFile(size=size, sha256=sibling.lfs.sha256)
    return StagedFile(size=size, git_sha1=str(sibling.blob_id or ""))


def choose_files(files: Mapping[str, StagedFile]) -> dict[str, StagedFile]:
    """Return the files of a model that are read: not its pictures, nor the same weights in other formats."""
    has_safetensors = any(fnmatch(name, "*.safetensors") for name in files)
    left_out = (*UNREAD_FILES, *(WEIGHTS_OF_OTHERS if has_safetensors else WEIGHTS_OF_OTHERS[3:]))
    return {name: facts for name, facts in files.items() if not any(fnmatch(name, one) for one in left_out)}


def is_whole(path: Path, facts: StagedFile) -> bool:
    """Return whether a file has the size and the digest that are listed."""
    try:
        if path.stat().st_size != facts.size:
            return False
        digest = hashlib.sha256() if facts.sha256 else hashlib.sha1(b"blob %d\0" % facts.size, usedforsecurity=False)
        with path.open("rb") as file:
            while chunk := file.read(_CHUNK_BYTES):
                digest.update(chunk)
    except OSError:
        return False
    return digest.hexdigest() == (facts.sha256 or facts.git_sha1)


class _PartialFile(NamedTuple):
    """A file that a process fetches, or fetched until it was killed."""

    path: Path
    node: str
    pid: int
    ticks: int

    def is_live(self) -> bool:
        """Return whether the process may still write to it."""
        if self.node == socket.gethostname():
            return is_alive(self.pid, self.ticks)
        try:
            return time.time() - self.path.stat().st_mtime < ABANDONED_S
        except OSError:
            return False


def _list_partials(path: Path) -> list[_PartialFile]:
    """Return what processes have of a file, the most first."""
    found = []
    with suppress(FileNotFoundError):
        for other in path.parent.iterdir():
            match = _PARTIAL_NAME.fullmatch(other.name)
            if match is not None and match["file"] == path.name:
                found.append(_PartialFile(other, match["node"], int(match["pid"]), int(match["ticks"])))
    return sorted(found, key=lambda one: -_read_size(one.path))


def _read_size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _identify_file(path: Path) -> tuple[int, int, int] | None:
    """Return what changes where a file is replaced or written to; None if there is none."""
    try:
        facts = path.stat()
    except OSError:
        return None
    return facts.st_ino, facts.st_size, facts.st_mtime_ns


def _claim_partial(path: Path) -> Path | None:
    """Return the file of this process for a file to fetch, perhaps with its first bytes; None if another fetches it."""
    pid = os.getpid()
    own = path.with_name(f".{path.name}~{socket.gethostname()}~{pid}~{read_start_ticks(pid) or 0}.part")
    others = [one for one in _list_partials(path) if one.path != own]
    if any(one.is_live() for one in others):
        return None
    for other in others:
        with suppress(FileNotFoundError):  # another process was faster
            if own.exists():
                other.path.unlink()
            else:
                os.rename(other.path, own)  # noqa: PTH104 - as in staged_path
    own.touch(mode=0o600)
    if any(one.is_live() and one.path.name < own.name for one in _list_partials(path) if one.path != own):
        own.unlink(missing_ok=True)
        return None
    return own


@dataclass(frozen=True)
class StageTransfer:
    """The transfer of the files of one repository."""

    name: HubName
    commit: str
    folder: Path
    files: dict[str, StagedFile]
    advance: Callable[[int], object] = do_nothing
    """Called with the bytes that are there: kept ones that were checked, and fetched ones."""
    fetched: list[str] = field(default_factory=list)
    damaged: list[str] = field(default_factory=list)
    """Files that were there, with other contents than listed."""
    _stop: threading.Event = field(default_factory=threading.Event)

    def count_missing_bytes(self) -> int:
        """Return how many bytes are to be fetched, by the sizes of what is there."""
        missing = 0
        for file, facts in self.files.items():
            path = self.folder / file
            if _read_size(path) != facts.size:
                missing += max(facts.size - sum(_read_size(one.path) for one in _list_partials(path)), 0)
        return missing

    def bring_files(self) -> None:
        """Keep the files that are whole and fetch the others; raises StageError for the first that cannot be."""
        largest_first = sorted(self.files.items(), key=lambda item: -item[1].size)
        pool = ThreadPoolExecutor(NUM_THREADS)
        try:
            futures = [pool.submit(self._bring_file, file, facts) for file, facts in largest_first]
            done, _ = wait(futures, return_when=FIRST_EXCEPTION)
            for future in done:
                future.result()
        finally:
            self._stop.set()
            pool.shutdown(cancel_futures=True)

    def _bring_file(self, file: str, facts: StagedFile) -> None:
        path = self.folder / file
        make_private_dir(path.parent)
        seen = None
        while not self._stop.is_set():
            now = _identify_file(path)
            if now != seen:
                if is_whole(path, facts):
                    self.advance(facts.size)
                    return
                seen = now
            with _explain_errors(self.name):
                partial = _claim_partial(path)
            if partial is None:
                time.sleep(WAIT_INTERVAL_S)
                continue
            if path.exists():
                self.damaged.append(file)
            self._fetch_file(file, facts, partial)
            os.rename(partial, path)  # noqa: PTH104 - replaces a damaged one
            sync_directory(path.parent)
            self.fetched.append(file)
            return

    def _fetch_file(self, file: str, facts: StagedFile, partial: Path) -> None:
        """Fetch what a partial file lacks; once more from the start if its digest is wrong then."""
        for is_last in (False, True):
            self._fetch_rest(file, facts, partial)
            if is_whole(partial, facts):
                return
            self.advance(-_read_size(partial))
            partial.unlink()
            if is_last:
                raise StageError(
                    f"{file} of {self.name} came twice with another digest than the hub lists: something between here "
                    "and the hub changes it, such as a proxy; try another network, or later"
                )
            partial.touch(mode=0o600)

    def _fetch_rest(self, file: str, facts: StagedFile, partial: Path) -> None:
        from huggingface_hub import hf_hub_url
        from huggingface_hub.file_download import http_get
        from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]

        kind, commit = self.name.kind, self.commit
        self.advance(_read_size(partial))
        with _explain_errors(self.name), _CountedFile(partial, self.advance, self._stop) as out:
            if _read_size(partial) > facts.size:
                out.truncate(0)
            http_get(
                hf_hub_url(self.name.repository, file, repo_type=kind, revision=commit),
                out,
                resume_size=out.seek(0, os.SEEK_END),
                headers=build_hf_headers(),
                expected_size=facts.size,
            )
            out.flush()
            os.fsync(out.fileno())


class _CountedFile(io.BufferedRandom):
    """A file that counts what is written, and refuses to be written to once the transfer was stopped."""

    def __init__(self, path: Path, advance: Callable[[int], object], stop: threading.Event) -> None:
        super().__init__(io.FileIO(path, "r+"))
        self._advance, self._stop = advance, stop

    def write(self, data: "ReadableBuffer") -> int:
        if self._stop.is_set():
            raise StageError("stopped; what was fetched is kept, and the next `hpcrl stage` continues")
        written = super().write(data)
        self._advance(written)
        return written

    def truncate(self, size: int | None = None) -> int:
        self.flush()
        before = os.fstat(self.fileno()).st_size
        after = super().truncate(size)
        self._advance(after - before)
        return after


@contextmanager
def _explain_errors(name: HubName) -> Iterator[None]:
    """Translate whatever the hub, the network or the disk raises into one message with what to do."""
    try:
        yield
    except StageError:
        raise
    except ModuleNotFoundError as error:
        raise StageError(f"{error.name} is missing here: pip install 'hpcrl[stage]'") from error
    except Exception as error:
        raise StageError(_describe_failure(name, error)) from error


def _describe_failure(name: HubName, error: Exception) -> str:
    from huggingface_hub import constants, errors

    if isinstance(error, errors.GatedRepoError):
        return f"{name}: its owner wants its terms to be accepted on the hub's page first; then set HF_TOKEN"
    if isinstance(error, errors.RepositoryNotFoundError):
        return f"the hub has no {name.kind} {name.repository!r}, or it is private: correct the name, or set HF_TOKEN"
    if isinstance(error, errors.RevisionNotFoundError):
        return f"{name.repository} has no revision {name.revision!r} on the hub: correct what follows the @"
    if isinstance(error, errors.OfflineModeIsEnabled):
        return "HF_HUB_OFFLINE is set here, so nothing is fetched: unset it on the login node"
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return (
            f"{name}: the disk, or your quota, is full ({error.strerror}): free space, or set the site's staging_dir "
            "to another file system; what was fetched is kept, and the next `hpcrl stage` continues"
        )
    proxies = [f"{one}={os.environ[one]}" for one in ("https_proxy", "HTTPS_PROXY", "http_proxy") if one in os.environ]
    way = f"through {proxies[0]}" if proxies else "without a proxy"
    return (
        f"{name}: {constants.ENDPOINT} cannot be used from here, {way} ({_shorten(error)}): run this on a node with "
        "internet, correct https_proxy or HF_ENDPOINT, or try again; what was fetched is kept"
    )


def _shorten(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return lines[0][:200]


def sum_sizes(files: Iterable[StagedFile]) -> int:
    """Return the bytes of files together."""
    return sum(one.size for one in files)
