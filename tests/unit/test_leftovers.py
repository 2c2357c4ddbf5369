"""The check that a test session leaves nothing behind."""

import contextlib
import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from hpcrl.weights.window.shm_cleanup import LEDGER_MAGIC, SegmentLedger
from tests.support import leftovers
from tests.support.leftovers import MARK, LeftoverCheck, Leftovers

USE = """
import mmap, sys
file = open(sys.argv[1], "r+b")
mapped = mmap.mmap(file.fileno(), 0)
file.close()
print("mapped", flush=True)
sys.stdin.read()
"""


OWN = """
import multiprocessing, os, signal, sys
from multiprocessing import connection
from tests.support.leftovers import remove_own

open(connection.arbitrary_address("AF_UNIX"), "w").close()
print(len(os.listdir(os.environ["TMPDIR"])), flush=True)
remove_own()
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_process_that_is_killed_at_its_end_has_removed_its_own_files(tmp_path: Path) -> None:
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", OWN], env=environment, capture_output=True, text=True, check=False)
    assert (done.stdout, done.returncode) == ("1\n", -signal.SIGKILL), done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "shm"
    made.mkdir()
    (made / "psm_before").touch()
    return made


def start(folder: Path) -> LeftoverCheck:
    return LeftoverCheck((folder,), lock=folder.parent / "lock")


@contextlib.contextmanager
def process_that_maps(path: Path, *, is_of_session: bool) -> Iterator[None]:
    """Run a process that has mapped a file; its parent has ended, so that only its environment shows whose it is."""
    environment = {name: value for name, value in os.environ.items() if name != MARK}
    environment |= {MARK: "1"} if is_of_session else {}
    command = ["bash", "-c", '"$@" <&0 &', "bash", sys.executable, "-c", USE, str(path)]
    with subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"mapped\n"
        process.wait()
        yield  # the process ends with its input, which is closed here


def test_what_a_session_leaves_is_named_and_what_was_there_is_not(folder: Path) -> None:
    check = start(folder)
    for name in ("sem.mp-1", "hpcrl-0-ledger-1", "of-another-program"):
        (folder / name).touch()
    assert check.end() == Leftovers((str(folder / "hpcrl-0-ledger-1"), str(folder / "sem.mp-1")))


def test_sessions_that_overlap_do_not_blame_each_other_and_the_last_finds_what_they_left(folder: Path) -> None:
    first, second = start(folder), start(folder)
    (folder / "psm_in_use").touch()
    assert first.end() == Leftovers()
    (folder / "psm_in_use").unlink()
    (folder / "psm_left").touch()
    assert second.end() == Leftovers((str(folder / "psm_left"),), may_be_of_killed=True)


def test_the_last_session_removes_the_lock_file_and_the_folder_of_pytest(folder: Path) -> None:
    made = folder / "pytest-of-someone"
    (made / "pytest-0").mkdir(parents=True)
    (made / "pytest-current").symlink_to(made / "pytest-0")
    first, second = start(folder), start(folder)
    first.end()
    assert (folder.parent / "lock").exists()
    (made / "pytest-0").rmdir()
    second.end()
    assert sorted(path.name for path in folder.parent.rglob("*")) == ["psm_before", "shm"]


def test_the_last_session_keeps_what_failed_tests_left(folder: Path) -> None:
    kept = folder / "pytest-of-someone" / "pytest-0"
    kept.mkdir(parents=True)
    (kept.parent / "pytest-current").symlink_to(kept)
    assert start(folder).end() == Leftovers()
    assert (kept.parent / "pytest-current").resolve() == kept


def test_a_session_that_opens_the_lock_file_before_the_last_one_removes_it_makes_another(folder: Path) -> None:
    lock = folder.parent / "lock"
    with lock.open("wb") as last, ThreadPoolExecutor(1) as thread:
        fcntl.flock(last, fcntl.LOCK_EX)
        next_one = thread.submit(start, folder)
        while not count_opened(lock) > 1:
            time.sleep(0.01)
        lock.unlink()
        fcntl.flock(last, fcntl.LOCK_UN)
        check = next_one.result()
    assert json.loads(lock.read_bytes()) == [str(folder / "psm_before")]
    assert check.end() == Leftovers()


def count_opened(path: Path) -> int:
    """Return how often this process has a file open."""
    return sum(entry.samefile(path) for entry in Path("/proc/self/fd").iterdir() if entry.exists())


def test_a_session_that_starts_later_takes_what_is_there_for_given(folder: Path) -> None:
    first = start(folder)
    (folder / "psm_left").touch()
    assert first.end().lasting == (str(folder / "psm_left"),)
    assert start(folder).end() == Leftovers()


def test_what_a_campaign_beside_the_session_uses_is_not_left_by_the_session(folder: Path) -> None:
    check = start(folder)
    used = folder / "psm_used"
    used.write_bytes(b"x")
    with process_that_maps(used, is_of_session=False):
        assert check.end() == Leftovers()


def test_what_a_process_of_the_session_still_uses_is_left(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leftovers, "END_TIMEOUT_S", 0.0)
    check = start(folder)
    used = folder / "psm_used"
    used.write_bytes(b"x")
    with process_that_maps(used, is_of_session=True):
        assert check.end().lasting == (str(used),)


def test_what_the_ledger_of_a_campaign_beside_the_session_lists_is_not_left_by_the_session(folder: Path) -> None:
    check = start(folder)
    listed, ledger = folder / "sem.mp-listed", folder / f"hpcrl-{os.getuid()}-ledger-1-1"
    listed.touch()
    ledger.write_bytes(LEDGER_MAGIC + f"\n{listed.name} {listed.stat().st_ino}\n".encode())
    with process_that_maps(ledger, is_of_session=False):
        assert check.end() == Leftovers()


def test_what_a_killed_step_left_is_named_though_the_next_step_removes_it(folder: Path) -> None:
    check = start(folder)
    scratch = folder / "hpcrl-scratch"
    scratch.mkdir()
    ledger = SegmentLedger(folder, scratch=scratch)
    assert ledger._fd is not None
    os.close(ledger._fd)  # as its process ends: the lock is gone
    left = check.end()
    assert left.lasting == ()
    assert left.orphans == (str(ledger._path), str(scratch))


def test_a_session_waits_until_the_first_one_has_noted_what_is_there(folder: Path) -> None:
    lock = folder.parent / "lock"
    with lock.open("wb") as first, ThreadPoolExecutor(1) as thread:
        fcntl.flock(first, fcntl.LOCK_EX)
        second = thread.submit(start, folder)
        (folder / "hpcrl-left").touch()
        time.sleep(0.1)
        assert not lock.read_bytes()
        first.write(json.dumps([str(folder / "psm_before")]).encode())
        first.flush()
        fcntl.flock(first, fcntl.LOCK_SH)
        check = second.result()
    assert check.end().lasting == (str(folder / "hpcrl-left"),)


def test_what_torch_compiles_is_in_a_directory_that_the_session_removes() -> None:
    compiled = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"])
    assert compiled.name.startswith("hpcrl-tests-compiled-")
    assert compiled.is_dir()
