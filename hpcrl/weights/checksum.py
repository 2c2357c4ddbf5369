"""The checksum of a tensor's bytes: xxh3_128."""

from typing import Any

import xxhash


def hash_bytes(data: Any) -> bytes:
    """Compute the checksum of a buffer."""
    return xxhash.xxh3_128_digest(data)


def start_hash() -> xxhash.xxh3_128:
    """Start a checksum to which bytes are added as they arrive."""
    return xxhash.xxh3_128()
