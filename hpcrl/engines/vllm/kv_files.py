"""KV that a prefill engine leaves for a decode engine in a directory that both see: names, checks, room.

    make_handover_name, is_handover_name  what one hand-over is called; what may be one, so that nobody names a file elsewhere
    shard_path                            the file of one rank of the engine
    digest_tokens                         which prompt it is of
    prune_directory                       keep the directory small

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

_NAME_PATTERN = re.compile(r"[A-Za-z0-9_-]{22}")


def make_handover_name() -> str:
    """A name for one hand-over, which cannot be guessed."""
    return secrets.token_urlsafe(16)


def is_handover_name(name: object) -> bool:
    """Could `make_handover_name` have made this?"""
    return isinstance(name, str) and _NAME_PATTERN.fullmatch(name) is not None


def shard_path(directory: Path, name: str, *, rank: int) -> Path:
    """Where one rank leaves its share."""
    return directory / f"{name}.{rank}.safetensors"


def digest_tokens(token_ids: Sequence[int]) -> str:
    """Tells prompts apart."""
    return hashlib.blake2b(array("q", token_ids).tobytes(), digest_size=16).hexdigest()


def prune_directory(directory: Path, *, max_bytes: int, ttl_s: float) -> int:
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
