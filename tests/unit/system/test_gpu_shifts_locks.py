"""GPUs are used by the trainer or by engines, whatever ends them."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpcrl.system.gpu_shifts import ShiftLocks

HOLD = """
import subprocess, sys, time
from pathlib import Path
from hpcrl.system.gpu_shifts import ShiftLocks
locks = ShiftLocks(Path(sys.argv[1]))
assert all(getattr(locks, take)() for take in sys.argv[2].split(","))
child = subprocess.Popen(["sleep", "600"], pass_fds=(locks.fd,)) if "child" in sys.argv else None
print(child.pid if child else 0, flush=True)
time.sleep(600)
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "shifts"


@pytest.fixture
def trainer(path: Path) -> Iterator[ShiftLocks]:
    locks = ShiftLocks(path)
    yield locks
    locks.close()


@pytest.fixture
def engines(path: Path) -> Iterator[list[ShiftLocks]]:
    found = [ShiftLocks(path) for _ in range(2)]
    yield found
    for locks in found:
        locks.close()


def hold(path: Path, takes: str, *words: str) -> tuple["subprocess.Popen[str]", int]:
    """Start a process that takes locks; return it and its child, if it has one."""
    process = subprocess.Popen([sys.executable, "-c", HOLD, path, takes, *words], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, int(process.stdout.readline())


def test_engines_are_awake_together_and_the_trainer_alone(trainer: ShiftLocks, engines: list[ShiftLocks]) -> None:
    assert all(engine.try_start_serving() for engine in engines)
    assert trainer.request()
    assert all(engine.is_requested() for engine in engines)
    assert not trainer.try_start_training()
    engines[0].end_serving()
    assert not engines[0].try_start_serving(), "the trainer has asked for the GPUs"
    assert not trainer.try_start_training()
    engines[1].end_serving()
    assert trainer.try_start_training()
    trainer.end_training()
    assert all(engine.try_start_serving() for engine in engines)


def test_no_engine_wakes_while_a_rank_is_on_a_gpu(path: Path, trainer: ShiftLocks, engines: list[ShiftLocks]) -> None:
    rank = ShiftLocks(path)
    assert rank.enter_rank()
    assert not engines[0].try_start_serving()
    assert trainer.request()
    assert trainer.try_start_training(), "the engine that looked has left nothing locked"
    trainer.end_training()
    rank.leave_rank()
    assert engines[0].try_start_serving()
    rank.close()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
@pytest.mark.parametrize("takes", ["request,try_start_training", "request", "enter_rank"])
def test_engines_do_not_wait_for_a_trainer_that_was_killed(
    path: Path, engines: list[ShiftLocks], number: int, takes: str
) -> None:
    process, _ = hold(path, takes)
    assert not engines[0].try_start_serving()
    process.send_signal(number)
    process.wait()
    assert engines[0].try_start_serving()


def test_the_trainer_waits_for_the_server_of_an_engine_that_was_killed(path: Path, trainer: ShiftLocks) -> None:
    process, server = hold(path, "try_start_serving", "child")
    assert trainer.request()
    process.kill()
    process.wait()
    assert not trainer.try_start_training(), "the server is still on the GPU"
    os.kill(server, signal.SIGKILL)
    while not trainer.try_start_training():
        pass


def test_a_file_in_place_of_a_link_is_not_followed(tmp_path: Path, path: Path) -> None:
    path.symlink_to(tmp_path / "other")
    with pytest.raises(OSError, match="symbolic"):
        ShiftLocks(path)
    assert not (tmp_path / "other").exists()
