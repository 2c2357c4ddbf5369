"""The limits of an agent program's sandbox as a whole: forks, memory, disk; what exceeds one is a fault in one line."""

import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from hpcrl.envs.agent import _remove_tree
from hpcrl.envs.isolation.sandbox import find_disk_problem
from hpcrl.envs.isolation.supervisor import measure_tree
from hpcrl.system.processes import list_descendants
from tests.support.programs import needs_bubblewrap, play

SANDBOXES = ["none", pytest.param("bubblewrap", marks=needs_bubblewrap)]
FORK_WITHOUT_END = (
    "ask('a')\nimport time\nfor _ in range(400):\n    if os.fork() == 0:\n        time.sleep(8)\n        os._exit(0)\n"
    "    time.sleep(0.002)\ntime.sleep(8)"
)
"""Bounded by itself, and so are all programs here: a limit that fails must not end the machine."""
X32_MEMFD = 0x40000000 | 319 if platform.machine() == "x86_64" else 279
PRINT_LIMITS = """
import asyncio, sys
from hpcrl.envs.isolation.sandbox import find_disk_problem, find_task_problem
from hpcrl.envs.agent import AgentProgram
from hpcrl.envs.base import ModelAccess
from hpcrl.errors import EnvFault

print(repr(find_disk_problem() + find_task_problem()))
code = "import os, time\\nfor _ in range(400):\\n    if not os.fork(): break\\ntime.sleep(8)"
program = AgentProgram(command=["python", "-c", code], sandbox="bubblewrap", max_processes=64)
access = ModelAccess(url="http://x/v1", socket="/tmp/none", api_key="k", model="m")
try:
    print(asyncio.run(program.run(1, access)))
except EnvFault as fault:
    print(fault)
"""


def fault_of(trajectory):
    """Return why a program was ended that had called the model: a failure of the policy."""
    assert (trajectory.status, trajectory.outcome, trajectory.reward) == ("done", "exit", None)
    return trajectory.extra["reason"]


@pytest.mark.parametrize("sandbox", SANDBOXES)
def test_a_program_that_forks_without_end_is_ended_with_all_its_processes(template, sandbox):
    before = set(list_descendants())  # those of other tests in this process
    fault = fault_of(play(template, FORK_WITHOUT_END, sandbox=sandbox, max_processes=48, timeout_s=20.0))
    assert "the program was ended: it had" in fault
    assert "max_processes = 48" in fault
    assert set(list_descendants()) <= before


@pytest.mark.parametrize("sandbox", SANDBOXES)
def test_the_memory_of_all_processes_together_is_limited(template, sandbox):
    code = (
        "ask('a')\nimport time\nfor _ in range(4):\n"
        "    if os.fork() == 0:\n"
        "        hoard = bytearray(os.urandom(1 << 20)) * 60\n        time.sleep(8)\ntime.sleep(8)"
    )
    fault = fault_of(play(template, code, sandbox=sandbox, max_memory_mb=128))
    assert "MiB of memory, max_memory_mb = 128" in fault


@pytest.mark.parametrize("sandbox", SANDBOXES)
def test_memory_that_no_process_has_alone_counts_too(template, sandbox):
    code = (
        "ask('a')\nimport mmap, time\nhoard = mmap.mmap(-1, 200 << 20)\n"
        "for place in range(0, 200 << 20, 1 << 20): hoard[place:place + (1 << 20)] = b'x' * (1 << 20)\n"
        "time.sleep(8)\nprint(1)"
    )
    fault = fault_of(play(template, code, sandbox=sandbox, max_memory_mb=96))
    assert "MiB of memory, max_memory_mb = 96" in fault


@needs_bubblewrap
def test_memory_that_no_process_shows_cannot_be_had_in_a_sandbox(template):
    code = (
        "ask('a')\nimport ctypes\nlibc = ctypes.CDLL(None, use_errno=True)\ndenied = 0\n"
        "for call in [lambda: libc.memfd_create(b'x', 0), lambda: libc.shmget(0, 4096, 0o1600), "
        f"lambda: libc.syscall(447, 0), lambda: libc.syscall({X32_MEMFD}, b'x', 0)]:\n"
        "    denied += call() == -1 and ctypes.get_errno() == 38\n"
        "print(float(denied))"
    )
    assert play(template, code, sandbox="bubblewrap").turns[-1].reward == 4.0


@needs_bubblewrap
def test_shared_memory_by_name_is_a_file_of_the_sandbox(template):
    code = (
        "ask('a')\nimport multiprocessing.shared_memory as memory\n"
        "hoard = memory.SharedMemory(create=True, size=8 << 20)\nhoard.buf[:] = b'x' * (8 << 20)\n"
        "facts = os.statvfs('/dev/shm')\nused = (facts.f_blocks - facts.f_bfree) * facts.f_bsize\n"
        "hoard.close()\nhoard.unlink()\nprint(float(used >= 8 << 20))"
    )
    assert play(template, code, sandbox="bubblewrap", max_disk_mb=16).turns[-1].reward == 1.0


def test_memory_that_processes_share_after_a_fork_counts_once(template):
    code = (
        "ask('a')\nimport time\nshared = b'x' * (60 << 20)\nchildren = []\nfor _ in range(4):\n"
        "    if not (child := os.fork()):\n        time.sleep(0.5)\n        os._exit(0)\n    children.append(child)\n"
        "for child in children: os.waitpid(child, 0)\nprint(1)"
    )
    assert play(template, code, max_memory_mb=160).status == "done"


@needs_bubblewrap
def test_a_program_that_fills_its_disk_finds_no_more_space_anywhere(template):
    code = (
        "ask('a')\n"
        "for place in ['.', os.environ['HOME'], '/tmp', '/dev/shm', '/dev', '/', '/episode', '/proc', '/etc']:\n"
        "    try:\n        with open(place + '/big', 'wb') as file:\n"
        "            for _ in range(64): file.write(bytes(1 << 20))\n"
        "    except OSError as error:\n        print(place, error.strerror)\n    else:\n"
        "        print(1.0)\n        break\nelse:\n    raise SystemExit('full')"
    )
    assert find_disk_problem() == ""
    fault = fault_of(play(template, code, sandbox="bubblewrap", max_disk_mb=16))
    assert "full" in fault
    assert "no disk is left of max_disk_mb = 16" in fault


@needs_bubblewrap
def test_a_program_cannot_mount_more_space(template):
    code = "ask('a')\nimport subprocess\nprint(float(subprocess.run(['unshare', '-Ur', 'true']).returncode != 0))"
    assert play(template, code, sandbox="bubblewrap").turns[-1].reward == 1.0


def test_a_program_without_a_sandbox_that_fills_the_disk_is_ended(template):
    code = "ask('a')\nimport time\nfor n in range(64): open(str(n), 'wb').write(bytes(1 << 20))\ntime.sleep(8)"
    assert re.search(r"its files had \d+ MiB, max_disk_mb = 16", fault_of(play(template, code, max_disk_mb=16)))


@pytest.mark.parametrize("sandbox", SANDBOXES)
def test_a_program_that_makes_files_without_end_is_ended(template, sandbox):
    code = "ask('a')\nimport time\nfor n in range(12_000): os.close(os.open(str(n), os.O_CREAT))\ntime.sleep(8)"
    fault = fault_of(play(template, code, sandbox=sandbox, max_disk_mb=8))
    assert re.search(r"it had \d{5} files and directories, and max_disk_mb = 8 allows 10000$", fault)


@needs_bubblewrap
def test_a_judge_has_space_that_the_program_did_not_fill_which_is_reported_once(template, caplog):
    fill = (
        "ask('a')\ntry:\n    with open('big', 'wb') as file:\n"
        "        for _ in range(64): file.write(bytes(1 << 20))\n"
        "except OSError: pass"
    )
    judge = ["python", "-c", "open('own', 'wb').write(bytes(8 << 20))\nopen('/tmp/own', 'w')\nprint(0.5)"]
    for _ in range(2):
        trajectory = play(template, fill, sandbox="bubblewrap", max_disk_mb=16, judge=judge)
        assert (trajectory.extra, trajectory.turns[-1].reward) == ({}, 0.5)
    (line,) = [record.getMessage() for record in caplog.records if "disk" in record.getMessage()]
    assert line.endswith("the program filled its disk: max_disk_mb = 16 (reported once)")


@needs_bubblewrap
def test_a_program_cannot_touch_its_launcher_nor_process_1(template):
    code = (
        "ask('a')\nimport signal\nbad = []\nfor pid in {1, os.getppid()}:\n"
        "    for name in ['mem', 'fd/0', 'fd/1', 'fd/2', 'environ']:\n"
        "        try:\n            open(f'/proc/{pid}/{name}', 'rb' if name in ('fd/0', 'environ') else 'wb')\n"
        "        except OSError:\n            continue\n        bad.append(name)\n"
        "    for number in signal.valid_signals(): os.kill(pid, number)\n"
        "print(0.5 + len(bad))"
    )
    trajectory = play(template, code, sandbox="bubblewrap")
    assert (trajectory.status, trajectory.turns[-1].reward) == ("done", 0.5)


@pytest.mark.parametrize("body", ["ask('1' * (1 << 20))", "post('/chat/completions', '1' * (10 << 20))"])
def test_a_call_with_a_huge_body_is_refused_and_the_episode_continues(template, body):
    code = (
        f"ask('a')\ntry:\n    {body}\nexcept urllib.error.HTTPError as error:\n"
        "    assert error.code == 400 and b'message' in error.read()\nask('b')\nprint(0.5)"
    )
    trajectory = play(template, code)
    assert "fault" not in trajectory.extra
    assert trajectory.turns[-1].reward == 0.5


def test_a_directory_that_the_program_locked_is_removed(template, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    code = "ask('a')\nos.makedirs('a/b')\nos.chmod('a/b', 0)\nos.chmod('a', 0)\nprint(1)"
    assert play(template, code).status == "done"
    assert not list(tmp_path.glob("hpcrl-agent-*"))


def test_a_deep_directory_is_removed_and_the_reward_stays(template, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    code = "ask('a')\nfor _ in range(3000):\n    os.mkdir('deep')\n    os.chdir('deep')\nprint(0.75)"
    trajectory = play(template, code)
    assert (trajectory.status, trajectory.extra, trajectory.turns[-1].reward) == ("done", {}, 0.75)
    assert not list(tmp_path.glob("hpcrl-agent-*"))


def test_files_that_cannot_be_removed_are_reported_once(tmp_path, monkeypatch, caplog):
    (tmp_path / "rm").write_text("#!/bin/sh\necho \"rm: cannot remove '$3': Device or resource busy\" >&2\nexit 1\n")
    (tmp_path / "rm").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    for number in range(2):
        _remove_tree(tmp_path / f"hpcrl-agent-{number}")
    (line,) = [record.getMessage() for record in caplog.records if "removed" in record.getMessage()]
    assert line.startswith(
        f"{tmp_path}/hpcrl-agent-*: files of ended episodes cannot be removed: Device or resource busy"
    )


def test_a_tree_of_processes_is_measured_with_its_threads():
    code = (
        "import threading, time\n"
        "for _ in range(3): threading.Thread(target=time.sleep, args=(60,)).start()\nprint(flush=True)"
    )
    with subprocess.Popen(["sh", "-c", f"{sys.executable} -c '{code}'; true"], stdout=subprocess.PIPE) as shell:
        shell.stdout.readline()
        num_tasks, num_bytes = measure_tree(shell.pid)
        subprocess.run(["kill", *map(str, list_descendants())], check=True)
    assert num_tasks == 5
    assert 1 << 20 < num_bytes < 1 << 27
    assert measure_tree(shell.pid) == (0, 0)


@needs_bubblewrap
@pytest.mark.skipif(shutil.which("setpriv") is None or os.getuid() != 0, reason="needs root, to become another user")
def test_the_kernel_limits_the_tasks_of_a_user_that_is_not_root():
    python = "/usr/bin/python3"
    packages = Path(msgspec.__file__).parents[1]
    environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": f"{Path(__file__).parents[4]}:{packages}", "TMPDIR": "/tmp"}
    user = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", python, "-c"]
    if subprocess.run([*user, "import msgspec, hpcrl.envs.agent"], env=environment, check=False).returncode:
        pytest.skip("the system's Python cannot import msgspec, or another user cannot read it")
    done = subprocess.run([*user, PRINT_LIMITS], env=environment, capture_output=True, text=True, check=False)
    limits, outcome = done.stdout.splitlines()[-2:]
    assert limits == "''", done.stderr
    assert "max_processes = 64" in outcome
