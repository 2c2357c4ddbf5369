"""KV files from a prefill engine to a decode engine, in a directory that both see: names, checks, space.

    make_handover_name, is_handover_name  names of handovers; the check keeps a request from naming other files
    shard_path                            the file of one rank of the engine
    digest_tokens                         a digest of the prompt
    prune_directory                       keep the directory small

A file gets its name only when it is complete. It is read once, by the engine it is meant for, which removes it; a
file that is not fetched is removed after a while.
"""

import contextlib
import hashlib
import re
import secrets
import time
from array import array
from collections.abc import Sequence
from pathlib import Path

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
