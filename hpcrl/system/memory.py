"""The memory of this process's control group, as far as the kernel shows it.

count_oom_kills    how many of its processes the kernel has ended for a lack of memory
read_memory_limit  the memory that it may use
KillWatch          whether it has ended more
KILLED             the reason to report then
"""

import contextlib
from collections.abc import Callable
from pathlib import Path

UNLIMITED = 1 << 62
"""The least of the numbers that cgroup v1 has without a limit."""
KILLED = "the kernel ended it, since the memory of its control group was used up"


class KillWatch:
    """Notices that the kernel has ended a process of this control group for a lack of memory."""

    def __init__(self, count: Callable[[], int | None] | None = None) -> None:
        self._count = count or count_oom_kills
        self._num = self._count()

    def has_killed(self) -> bool:
        """Return whether it has since the last call, or since the start."""
        before, self._num = self._num, self._count()
        return before is not None and self._num is not None and self._num > before


def count_oom_kills(membership: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Count the processes of this control group that the kernel has ended for a lack of memory; None if unknown."""
    for file in _list_counters(membership, root):
        try:
            counts = dict(line.split() for line in file.read_text().splitlines())
            return int(counts["oom_kill"])
        except (OSError, ValueError, KeyError):
            continue
    return None


def read_memory_limit(membership: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Return the bytes that this control group may use, or one around it; None without a limit."""
    limits = []
    for group, top in _list_groups(membership, root):
        for folder in (group, *group.parents):
            for name in ("memory.max", "memory.limit_in_bytes"):
                with contextlib.suppress(OSError, ValueError):  # a limit may be the word "max"
                    limits.append(int((folder / name).read_text()))
            if folder == top:
                break
    least = min(limits, default=UNLIMITED)
    return least if least < UNLIMITED else None


def _list_counters(membership: Path, root: Path) -> list[Path]:
    """List the files that may have the count."""
    groups = _list_groups(membership, root)
    return [group / ("memory.oom_control" if top.name == "memory" else "memory.events") for group, top in groups]


def _list_groups(membership: Path, root: Path) -> list[tuple[Path, Path]]:
    """List the folders of the control group and their tops: of cgroup v1 or v2, which a machine may both have."""
    try:
        lines = [line.split(":", 2) for line in membership.read_text().splitlines()]
    except OSError:
        return []
    found: list[tuple[Path, Path]] = []
    for _, controllers, group in (line for line in lines if len(line) == 3):
        below = group.lstrip("/")
        if "memory" in controllers.split(","):
            found.insert(0, (root / "memory" / below, root / "memory"))
        elif not controllers:
            found += [(top / below, top) for top in (root, root / "unified")]
    return found
