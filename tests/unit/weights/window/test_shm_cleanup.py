"""Files of killed processes in shared memory are removed; live, recent and foreign ones stay."""

import mmap
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from hpcrl.campaign_dir.paths import CampaignDir
from hpcrl.system.files import make_private_dir
from hpcrl.weights.layout import TensorLayout
from hpcrl.weights.window import shm_cleanup
from hpcrl.weights.window.file import SHARED_MEMORY, WindowKey
from hpcrl.weights.window.shm_cleanup import SegmentLedger, remove_orphan_mpi, remove_orphans
from hpcrl.weights.window.window import Window

LAYOUT = TensorLayout.pack([("w", "float32", (4,))])
SEGMENT = """
import sys, time
from multiprocessing import resource_tracker, shared_memory
memory = shared_memory.SharedMemory(create=True, size=8192)
resource_tracker.unregister("/" + memory.name, "shared_memory")  # it would remove the segment, since it is not killed
print(memory.name, flush=True)
time.sleep(1000)
"""
KEEPER = """
import sys, time
from hpcrl.weights.window.shm_cleanup import SegmentLedger
ledger = SegmentLedger()
ledger.record([int(sys.argv[1])])
print("recorded", flush=True)
time.sleep(1000)
"""


@pytest.fixture(autouse=True)
def all_old(monkeypatch: pytest.MonkeyPatch) -> None:
    """Treat every file as old enough."""
    monkeypatch.setattr(shm_cleanup, "MIN_ORPHAN_AGE_S", -1.0)


@pytest.fixture
def started() -> Iterator[Callable[..., "subprocess.Popen[str]"]]:
    """Start programs that print a line when they are ready, and kill them at the end."""
    running: list[subprocess.Popen[str]] = []

    def start(program: str, *arguments: object) -> "subprocess.Popen[str]":
        command = [sys.executable, "-c", program, *map(str, arguments)]
        running.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        return running[-1]

    yield start
    for process in running:
        kill(process)


def kill(process: "subprocess.Popen[str]") -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGKILL)
    process.wait()
    assert process.stdout is not None
    process.stdout.close()


def read_line(process: "subprocess.Popen[str]") -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def window(tmp_path: Path, name: str) -> Window:
    campaign = CampaignDir(tmp_path / name)
    make_private_dir(campaign.root)
    made = Window.create(WindowKey(campaign=campaign.root, node="n", directory=tmp_path), LAYOUT, job=campaign.job(0))
    made.start_version(1, step=1)
    made.commit()
    return made


def test_a_window_that_no_process_has_open_is_removed(tmp_path: Path) -> None:
    made = window(tmp_path, "dead")
    made.close()
    assert remove_orphans(tmp_path) == [made.path.name]
    assert not made.path.exists()


def test_a_window_that_only_a_reader_has_open_stays(tmp_path: Path) -> None:
    made = window(tmp_path, "alive")
    made.close()
    reader = Window.open(WindowKey(campaign=tmp_path / "alive", node="n", directory=tmp_path))
    assert reader is not None
    assert remove_orphans(tmp_path) == []
    with reader.read_version(1):
        pass
    reader.close()
    assert remove_orphans(tmp_path) == [made.path.name]


def test_a_new_window_removes_those_of_killed_processes_and_not_those_of_live_ones(tmp_path: Path) -> None:
    dead, alive = window(tmp_path, "dead"), window(tmp_path, "alive")
    dead.close()
    new = window(tmp_path, "new")
    assert (dead.path.exists(), alive.path.exists(), new.path.exists()) == (False, True, True)
    alive.close()
    new.close()


def test_an_incomplete_window_of_a_killed_process_is_removed(tmp_path: Path) -> None:
    fresh = tmp_path / f"hpcrl-{os.getuid()}-x-0-n.new"
    fresh.write_bytes(b"")
    assert remove_orphans(tmp_path) == [fresh.name]


def test_a_recently_touched_window_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = window(tmp_path, "young")
    made.close()
    monkeypatch.setattr(shm_cleanup, "MIN_ORPHAN_AGE_S", 3600.0)
    assert remove_orphans(tmp_path) == []
    assert made.path.exists()


def test_several_processes_may_clean_up_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shm_cleanup, "MIN_MPI_AGE_S", -1.0)
    for number in range(300):
        (tmp_path / f"hpcrl-{os.getuid()}-{number}.new").touch()
        (tmp_path / f"mpich_shm_{number}_0").touch()
    with ThreadPoolExecutor(8) as pool:
        for _ in pool.map(lambda _: [remove_orphans(tmp_path), remove_orphan_mpi(tmp_path)], range(8)):
            pass
    assert not list(tmp_path.iterdir())


def test_files_of_other_kinds_and_users_stay(tmp_path: Path) -> None:
    mine = f"hpcrl-{os.getuid()}-"
    foreign = [tmp_path / f"{mine}notes", tmp_path / "psm_12345678", tmp_path / f"hpcrl-{os.getuid() + 1}-c-0-n"]
    for path in foreign:
        path.write_bytes(b"something")
    target = tmp_path / "target"
    target.write_bytes(b"kept")
    (tmp_path / f"{mine}link.new").symlink_to(target)
    assert remove_orphans(tmp_path) == []
    assert all(path.exists() for path in [*foreign, target])


def record_killed(owner: "subprocess.Popen[str]") -> tuple[Path, SegmentLedger]:
    """Record the segment of a process in a ledger, and kill the process."""
    segment = SHARED_MEMORY / read_line(owner)
    ledger = SegmentLedger()
    ledger.record([owner.pid])
    kill(owner)
    return segment, ledger


def test_segments_of_killed_processes_are_removed_by_their_keeper(
    started: "Callable[..., subprocess.Popen[str]]",
) -> None:
    segment, ledger = record_killed(started(SEGMENT))
    assert segment.exists(), "it must outlive its process"
    assert ledger.clear() == [segment.name]
    assert not segment.exists()


def test_segments_of_a_killed_keeper_are_removed_by_the_next_cleanup(
    started: "Callable[..., subprocess.Popen[str]]",
) -> None:
    owner = started(SEGMENT)
    segment = SHARED_MEMORY / read_line(owner)
    keeper = started(KEEPER, owner.pid)
    assert read_line(keeper) == "recorded"
    kill(owner)
    remove_orphans()
    assert segment.exists(), "its keeper is alive"
    kill(keeper)
    remove_orphans()  # unless a step of another test has done it already
    assert not segment.exists()


def test_a_name_that_was_used_again_is_left_alone(
    started: "Callable[..., subprocess.Popen[str]]",
) -> None:
    segment, ledger = record_killed(started(SEGMENT))
    other = segment.with_name(f"{segment.name}.{time.monotonic_ns()}")
    other.write_bytes(b"of another")  # while the first one is there, so that its inode is another
    other.rename(segment)
    assert ledger.clear() == []
    assert segment.read_bytes() == b"of another"
    segment.unlink()


# ---- MPI's segments


@pytest.mark.parametrize("name", ["mpich_shm_9c14bc10_0", "ucx_shm_posix_3d80418a"])
def test_an_mpi_segment_that_no_process_has_mapped_is_removed(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dead, alive, other = tmp_path / name, tmp_path / "mpich_vci_9c14bc10_0", tmp_path / "shm_9c_0"
    for path in (dead, alive, other):
        path.write_bytes(bytes(mmap.PAGESIZE))
    assert remove_orphan_mpi(tmp_path) == [], "they may be about to be mapped"
    monkeypatch.setattr(shm_cleanup, "MIN_MPI_AGE_S", -1.0)
    with alive.open("r+b") as file, mmap.mmap(file.fileno(), 0):
        assert remove_orphan_mpi(tmp_path) == [dead.name]
    assert not dead.exists()
    assert remove_orphan_mpi(tmp_path) == [alive.name]
    assert other.exists()
