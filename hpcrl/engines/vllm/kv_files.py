"""KV files from a prefill engine to a decode engine, on the disks of their nodes: names, checks, space.

    make_handover_name, is_handover_name  names of handovers; the check keeps a request from naming other files
    shard_path, read_shard_name           the file of one rank of the engine, and the name by which it is fetched
    choose_parent                         the directory of temporary files that no other node sees
    name_job_directory                    the directory of a job's engines in it
    digest_tokens                         a digest of the prompt
    prune_directory                       keep the directory small

Each engine has a directory on its node. The engine that a file is meant for moves it to its own, or fetches it by HTTP
from another node. A file gets its name only when it is complete. It is read once and removed; one that is not fetched
is removed after a while.
"""

import contextlib
import hashlib
import os
import re
import secrets
import tempfile
import time
from array import array
from collections.abc import Sequence
from pathlib import Path

from hpcrl.errors import EngineError
from hpcrl.system.file_systems import is_shared_path
from hpcrl.weights.window.file import SHARED_MEMORY

_NAME_PATTERN = re.compile(r"[A-Za-z0-9_-]{22}")


def make_handover_name() -> str:
    """Return a name for one handover, which cannot be guessed."""
    return secrets.token_urlsafe(16)


def is_handover_name(name: object) -> bool:
    """Return whether `name` has the form of `make_handover_name`."""
    return isinstance(name, str) and _NAME_PATTERN.fullmatch(name) is not None


def shard_path(directory: Path, name: str, *, rank: int) -> Path:
    """Return the path of one rank's share."""
    return directory / f"{name}.{rank}.safetensors"


def read_shard_name(directory: Path, shard_name: str) -> Path | None:
    """Return the path of "NAME.RANK" if it is there."""
    name, _, rank = shard_name.rpartition(".")
    if not is_handover_name(name) or not re.fullmatch(r"\d{1,4}", rank):
        return None
    path = shard_path(directory, name, rank=int(rank))
    return path if path.exists() else None


def choose_parent(asked: str | None, *, beside: str) -> Path:
    """Return the site's directory, or one for temporary files, that other nodes do not see, as they do `beside`."""
    if asked is not None:
        if is_shared_path(asked, beside=beside):
            raise EngineError(
                f"inference.kv_dir = {asked!r} is on a file system that other nodes see, and KV would slow it down "
                "for all: name a directory on the nodes' own disks in the site file"
            )
        return Path(asked)
    temporary = tempfile.gettempdir()
    return SHARED_MEMORY if is_shared_path(temporary, beside=beside) else Path(temporary)


def name_job_directory(job_root: Path) -> str:
    """Return the name of the directory of a job's engines, which is the same for all on a node."""
    digest = hashlib.blake2b(bytes(job_root), digest_size=8).hexdigest()
    return f"hpcrl-kv-{os.getuid()}-{digest}"


def digest_tokens(token_ids: Sequence[int]) -> str:
    """Return a digest that identifies a prompt."""
    return hashlib.blake2b(array("q", token_ids).tobytes(), digest_size=16).hexdigest()


def prune_directory(directory: Path, *, max_bytes: int, ttl_s: float) -> int:
    """Remove files older than `ttl_s`, then the oldest until the rest fits; returns how many were removed.

    Files that another process removes meanwhile are skipped. Raises OSError if the directory cannot be read.
    """
    held = []
    for path in directory.iterdir():
        with contextlib.suppress(FileNotFoundError):
            facts = path.stat()
            held.append((facts.st_mtime, facts.st_size, path))
    held.sort(key=lambda entry: entry[0], reverse=True)
    now, total, removed = time.time(), 0, 0
    for changed, size, path in held:
        total += size
        if total > max_bytes or now - changed > ttl_s:
            path.unlink(missing_ok=True)
            removed += 1
    return removed
