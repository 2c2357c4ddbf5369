"""A process that joins the control group of another and fills its memory, until the kernel ends the other.

exhaust_memory   do that
python -m tests.support.memory_hog GROUP     the process
"""

import mmap
import os
import signal
import subprocess
import sys
from pathlib import Path

CHUNK_BYTES = 1 << 20
MAX_BYTES = 8 << 30
MEMORY_ROOT = Path("/sys/fs/cgroup/memory")
"""The control groups of memory, version 1."""


def exhaust_memory(pid: int) -> None:
    """Let the kernel end a process for the memory of its control group, which others in it outlive."""
    Path(f"/proc/{pid}/oom_score_adj").write_text("1000")  # it goes first, whatever others have
    lines = [line.split(":", 2) for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines()]
    (group,) = [path for _, controllers, path in lines if "memory" in controllers.split(",")]
    command = [sys.executable, "-m", "tests.support.memory_hog", str(MEMORY_ROOT / group.lstrip("/"))]
    done = subprocess.run(command, check=False, timeout=120, cwd=Path(__file__).parents[2])
    assert done.returncode in (0, -signal.SIGKILL), "at most it goes too: the other may have freed little"


def count_kills(group: Path) -> int:
    counts = dict(line.split() for line in (group / "memory.oom_control").read_text().splitlines())
    return int(counts["oom_kill"])


def main(group: Path) -> None:
    """Join the group and take memory until another process of it has ended."""
    (group / "cgroup.procs").write_text(str(os.getpid()))
    before, taken = count_kills(group), []
    while count_kills(group) == before and len(taken) * CHUNK_BYTES < MAX_BYTES:
        chunk = mmap.mmap(-1, CHUNK_BYTES)
        chunk.write(b"x" * CHUNK_BYTES)
        taken.append(chunk)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
