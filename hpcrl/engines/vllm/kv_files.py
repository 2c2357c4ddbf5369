"""KV that a prefill engine leaves for a decode engine in a directory that both see: names, checks, room.

    new_name, is_name    what one hand-over is called; what may be one, so that nobody names a file elsewhere
    shard_path           the file of one rank of the engine
    digest               which prompt it is of
    prune                keep the directory small

A file has its name only when it is complete. It is read once, by the engine it was meant for, and removed by that;
what nobody fetched is removed after a while.
"""

import contextlib
import hashlib
import re
import secrets
import time
from array import array
from collections.abc import Sequence
from pathlib import Path

_NAME = re.compile(r"[A-Za-z0-9_-]{22}")


def new_name() -> str:
    """A name for one hand-over, which cannot be guessed."""
    return secrets.token_urlsafe(16)


def is_name(name: object) -> bool:
    """Could `new_name` have made this?"""
    return isinstance(name, str) and _NAME.fullmatch(name) is not None


def shard_path(directory: Path, name: str, *, rank: int) -> Path:
    """Where one rank leaves its share."""
    return directory / f"{name}.{rank}.safetensors"


def digest(token_ids: Sequence[int]) -> str:
    """Tells prompts apart."""
    return hashlib.blake2b(array("q", token_ids).tobytes(), digest_size=16).hexdigest()


def prune(directory: Path, *, max_bytes: int, ttl_s: float) -> int:
    """Remove what is older than `ttl_s`, then the oldest until the rest fits; returns how many files went.

    Whatever another process removes meanwhile is gone too. OSError if the directory cannot be read.
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
