"""How many processes the kernel has ended for a lack of memory, by both versions of control groups."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hpcrl.system.exit_codes import EXIT_OUT_OF_MEMORY
from hpcrl.system.memory import KillWatch, count_oom_kills, read_memory_limit

V1 = "4:memory:/job/step\n1:cpu:/\n0::/\n"
V2 = "0::/system.slice/job/step\n"
CGROUP_V1 = Path("/sys/fs/cgroup/memory")
LIMIT_BYTES = 96 << 20
HUNGRY = "import sys; filled = b'x' * (400 << 20) if sys.argv[1] == '1' else __import__('time').sleep(60)"
"""A rank that needs more than its group may have, if it is rank 1."""


@pytest.mark.parametrize(
    ("membership", "file", "content"),
    [
        (V1, "memory/job/step/memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill 3\n"),
        (V2, "system.slice/job/step/memory.events", "low 0\nmax 9\noom 4\noom_kill 3\n"),
        (V2, "unified/system.slice/job/step/memory.events", "oom 4\noom_kill 3\n"),
    ],
    ids=["v1", "v2", "both"],
)
def test_the_kernel_counts_the_processes_of_a_control_group_that_it_ended(tmp_path, membership, file, content):
    (tmp_path / "cgroup").write_text(membership)
    assert count_oom_kills(tmp_path / "cgroup", tmp_path / "fs") is None
    counter = tmp_path / "fs" / file
    counter.parent.mkdir(parents=True)
    counter.write_text(content)
    assert count_oom_kills(tmp_path / "cgroup", tmp_path / "fs") == 3


@pytest.mark.parametrize(
    ("membership", "files", "limit"),
    [
        (V2, {"system.slice/job/step/memory.max": "max", "system.slice/job/memory.max": "4096"}, 4096),
        (V2, {"system.slice/job/step/memory.max": "2048", "system.slice/job/memory.max": "4096"}, 2048),
        (V2, {"system.slice/job/step/memory.max": "max"}, None),
        (V1, {"memory/job/memory.limit_in_bytes": "8192", "memory/memory.limit_in_bytes": str(2**63 - 4096)}, 8192),
        (V1, {"memory/memory.limit_in_bytes": str(2**63 - 4096)}, None),
    ],
)
def test_the_least_limit_of_the_groups_around_a_process_counts(tmp_path, membership, files, limit):
    (tmp_path / "cgroup").write_text(membership)
    for name, text in files.items():
        path = tmp_path / "fs" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    assert read_memory_limit(tmp_path / "cgroup", tmp_path / "fs") == limit


@pytest.mark.parametrize("content", ["", "oom_kill\n", "oom_kill many\n", "oom 1\n"])
def test_a_counter_that_cannot_be_read_is_unknown(tmp_path, content):
    (tmp_path / "cgroup").write_text(V2)
    counter = tmp_path / "fs/system.slice/job/step/memory.events"
    counter.parent.mkdir(parents=True)
    counter.write_text(content)
    assert count_oom_kills(tmp_path / "cgroup", tmp_path / "fs") is None
    assert count_oom_kills(tmp_path / "nothing", tmp_path / "fs") is None


@pytest.fixture
def small_group():
    """A control group with little memory, where this user may make one."""
    group = CGROUP_V1 / f"hpcrl-test-{os.getpid()}"
    try:
        group.mkdir()
        (group / "memory.limit_in_bytes").write_text(str(LIMIT_BYTES))
    except OSError as error:
        pytest.skip(f"needs root and control groups of version 1: {error}")
    yield group
    group.rmdir()


def test_ranks_end_with_a_special_code_if_the_kernel_ended_one_for_its_memory(small_group):
    def enter_group() -> None:
        (small_group / "cgroup.procs").write_text(str(os.getpid()))

    command = [sys.executable, "-m", "hpcrl.job.ranks", "2", "0", "2", sys.executable, "-c", HUNGRY]
    assert subprocess.run(command, preexec_fn=enter_group, check=False).returncode == EXIT_OUT_OF_MEMORY
    killed = [*command[:-1], "import os, sys, time; sys.argv[1] == '1' and os.kill(os.getpid(), 9); time.sleep(60)"]
    assert subprocess.run(killed, preexec_fn=enter_group, check=False).returncode == 128 + 9


def test_a_kill_is_noticed_once() -> None:
    counts = iter([2, 2, 3, 3])
    watch = KillWatch(lambda: next(counts))
    assert [watch.has_killed() for _ in range(3)] == [False, True, False]
    assert not KillWatch(lambda: None).has_killed()
