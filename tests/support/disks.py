"""Simulate a full disk for the duration of a block."""

import contextlib
import resource
from collections.abc import Iterator


@contextlib.contextmanager
def largest_file(num_bytes: int) -> Iterator[None]:
    """Keep files from growing beyond `num_bytes`. Use it only around calls that must fail: stdout may be a file too."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
