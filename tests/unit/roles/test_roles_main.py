"""How the process of a step ends, and when a worker that a file system has ended is reported."""

import errno
import subprocess
import sys
from pathlib import Path

import pytest

from hpcrl.errors import SpoolError
from hpcrl.roles.__main__ import await_files

SCRIPT = """
import atexit
import threading
import time
from hpcrl.roles.__main__ import QuickExit

class Resource:
    def __del__(self):
        print("torn down")

resource = Resource()
quick_exit = QuickExit()
atexit.register(print, "handlers ran")
threading.Thread(target=lambda: (time.sleep(0.1), print("threads ended"))).start()
"""


@pytest.mark.parametrize("code", [0, 3])
def test_a_step_ends_with_its_code_after_its_threads_and_handlers_and_without_teardown(code: int) -> None:
    script = f"{SCRIPT}\nquick_exit.code = {code}"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (code, "threads ended\nhandlers ran\n", "")


def test_a_step_that_fails_ends_as_any_process_with_its_traceback() -> None:
    script = f"{SCRIPT}\nraise RuntimeError('no such version')"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "threads ended\nhandlers ran\ntorn down\n")
    assert done.stderr.endswith("RuntimeError: no such version\n")


@pytest.mark.parametrize(("number", "num_looks"), [(errno.EIO, 3), (errno.ESTALE, 3), (errno.EACCES, 0)])
def test_a_worker_that_an_error_of_files_has_ended_waits_until_it_has_passed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, number: int, num_looks: int
) -> None:
    looks: list[Path] = []

    def list_names(path: Path) -> list[Path]:
        looks.append(path)
        if len(looks) < 3:
            raise OSError(number, "away")
        return []

    monkeypatch.setattr(Path, "iterdir", list_names)
    error = SpoolError("a segment cannot be written")
    error.__cause__ = OSError(number, "away")
    await_files(tmp_path, error)
    assert looks == [tmp_path] * num_looks
