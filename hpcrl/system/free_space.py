"""The space that is left for a user: on the file system, and within quotas.

FreeSpace         bytes and files that may still be written, and what limits them
find_free_space   ask the file system, and `lfs quota` and `quota` where they are installed
read_quotas       the limits in the output of one of them
QUERY_TIMEOUT_S   how long each may take
"""

import getpass
import grp
import math
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

QUERY_TIMEOUT_S = 10.0
_KIB = 1024
_NUM_COLUMNS = 8
"""Blocks and files, each with its use, its quota, its limit and the time of grace."""


class FreeSpace(NamedTuple):
    """The space that is left."""

    num_bytes: float
    num_files: float
    source: str = "the file system"
    """The name of what limits it."""


def find_free_space(path: Path) -> FreeSpace:
    """Return the least that is left at a path, by the file system and by the user's quotas."""
    facts = os.statvfs(path)
    num_files = facts.f_favail if facts.f_files else math.inf  # some file systems count none, nor bytes
    num_bytes = facts.f_bavail * facts.f_frsize if facts.f_blocks else math.inf
    least = FreeSpace(num_bytes, num_files)
    for space in _query_quotas(path):
        if space.num_bytes < least.num_bytes or space.num_files < least.num_files:
            least = FreeSpace(
                min(space.num_bytes, least.num_bytes), min(space.num_files, least.num_files), source=space.source
            )
    return least


def _query_quotas(path: Path) -> Iterator[FreeSpace]:
    """Ask the programs that are there; each fails on the file systems of the other."""
    user, group = getpass.getuser(), grp.getgrgid(os.getgid()).gr_name
    for words in (
        ["lfs", "quota", "-q", "-u", user, str(path)],
        ["lfs", "quota", "-q", "-g", group, str(path)],
        ["quota", "-w", "-p", "-f", str(path)],
    ):
        try:
            done = subprocess.run(
                words,
                capture_output=True,
                text=True,
                timeout=QUERY_TIMEOUT_S,
                check=False,
                env=os.environ | {"LC_ALL": "C"},
            )
        except (OSError, subprocess.TimeoutExpired):
            continue
        # `quota` ends with 1 where a quota is exceeded
        yield from (space._replace(source=f"`{' '.join(words)}`") for space in read_quotas(done.stdout))


def read_quotas(output: str) -> list[FreeSpace]:
    """Return what each line with limits leaves; a long name of a file system has its line.

    A limit of 0 is none. Between quota and limit there is a time of grace, which may be over when the job starts: the
    quota counts, where there is one.
    """
    found = []
    for numbers in re.finditer(rf"(?:\s+(?:\d+\*?|-|\w+)){{{_NUM_COLUMNS}}}(?=\s|$)", output):
        words = [word.rstrip("*") for word in numbers[0].split()]
        counts = [words[index] for index in (0, 1, 2, 4, 5, 6)]
        if all(word.isdigit() for word in counts):
            used_kib, quota_kib, limit_kib, used, quota, limit = map(int, counts)
            left = _subtract(quota_kib or limit_kib, used_kib) * _KIB
            found.append(FreeSpace(left, _subtract(quota or limit, used)))
    return found


def _subtract(limit: int, used: int) -> float:
    return max(limit - used, 0) if limit else math.inf
