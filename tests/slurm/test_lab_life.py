"""The life of a lab: several at a time, killed at any moment, removed without a trace."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from hpcrl.errors import LabError
from hpcrl.lab import lab as labs
from hpcrl.lab.conf import JOB_IDS_PER_PORT, LabCluster, NodeGroup
from hpcrl.system.processes import is_alive, read_start_ticks
from tests.support.lab_tools import Lab, short_dir, until

pytestmark = pytest.mark.slurm

TINY = LabCluster(groups=(NodeGroup(name="n", num_nodes=1),), default="n")
UP = "import sys; from pathlib import Path; from hpcrl.lab import lab; lab.up(Path(sys.argv[1]))"
ESCAPE = """
import os, pathlib
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        partial = pathlib.Path("pid.partial")
        partial.write_text(str(os.getpid()))
        partial.rename("pid")
        os.execve("/bin/sleep", ["sleep", "600"], {})
"""
"""A process without parent, session or environment of the job."""


@pytest.fixture(scope="module")
def three_ups(needs_slurm: None) -> Iterator[list[labs.LabStatus]]:
    """Start one lab and, at the same time, another one twice."""
    with short_dir() as folder:
        dirs = [folder / "a", folder / "b", folder / "b"]
        try:
            with ThreadPoolExecutor() as pool:
                yield list(pool.map(lambda state_dir: labs.up(state_dir, cluster=TINY), dirs))
        finally:
            for state_dir in dirs:
                labs.down(state_dir)


@pytest.fixture(scope="module")
def two_labs(three_ups: list[labs.LabStatus]) -> tuple[Lab, Lab]:
    return Lab(three_ups[0].state_dir), Lab(three_ups[1].state_dir)


def test_one_of_two_ups_at_once_starts_the_lab_and_the_other_finds_it(three_ups: list[labs.LabStatus]) -> None:
    _, first, second = three_ups
    assert first.daemons == second.daemons
    assert {first.was_up, second.was_up} == {True, False}


def test_two_labs_run_side_by_side(two_labs: tuple[Lab, Lab]) -> None:
    confs = [lab.run("srun", "printenv", "SLURM_CONF") for lab in two_labs]
    assert confs == [str(lab.state_dir / "slurm.conf") for lab in two_labs]


def test_jobs_of_two_labs_have_different_numbers(two_labs: tuple[Lab, Lab]) -> None:
    """MPI worlds of one machine that have the number of their job in common would wait for each other's memory."""
    first, second = (int(lab.run("srun", "printenv", "SLURM_JOB_ID")) for lab in two_labs)
    assert abs(first - second) >= JOB_IDS_PER_PORT


def test_up_restarts_a_lab_without_its_controller(two_labs: tuple[Lab, Lab]) -> None:
    lab, _ = two_labs
    [controller] = [daemon for daemon in labs.status(lab.state_dir).daemons if daemon.name == "slurmctld"]
    os.kill(controller.pid, signal.SIGKILL)
    until(lambda: not labs.status(lab.state_dir).is_up)
    assert "dead: slurmctld" in str(labs.status(lab.state_dir))
    fresh = labs.up(lab.state_dir, cluster=TINY)
    assert fresh.is_up
    assert not fresh.was_up
    assert lab.run("srun", "echo", "again") == "again"


def test_down_leaves_no_process_and_no_file_and_no_other_lab_harmed(two_labs: tuple[Lab, Lab], tmp_path: Path) -> None:
    gone, other = two_labs
    (tmp_path / "escape.py").write_text(ESCAPE)
    gone.submit(tmp_path, f"{sys.executable} {tmp_path}/escape.py & srun sleep 600")
    until((tmp_path / "pid").exists)
    escaped = int((tmp_path / "pid").read_text())
    assert labs.down(gone.state_dir)
    assert not gone.state_dir.exists()
    assert _mentions(gone.state_dir) == []
    assert not is_alive(escaped, read_start_ticks(escaped))
    assert not labs.down(gone.state_dir)
    assert other.run("srun", "echo", "here") == "here"


def test_daemon_that_fails_is_quoted_and_nothing_stays(needs_slurm: None) -> None:
    broken = LabCluster(groups=(NodeGroup(name="n", num_nodes=1),), default="n", mem_mib=-1)
    with short_dir() as folder:
        with pytest.raises(LabError, match=r"slurmctld ended .*\n.*RealMemory"):
            labs.up(folder / "lab", cluster=broken)
        assert not (folder / "lab").exists()
        assert _mentions(folder) == []


@pytest.mark.parametrize("num_daemons", [2, 7])
def test_down_removes_a_lab_whose_start_was_killed(needs_slurm: None, num_daemons: int) -> None:
    with short_dir() as folder:
        state_dir = folder / "lab"
        child = subprocess.Popen([sys.executable, "-c", UP, str(state_dir)], cwd=Path(labs.__file__).parents[2])
        until(lambda: len(labs.status(state_dir).daemons) >= num_daemons)
        child.kill()
        child.wait()
        assert labs.down(state_dir)
        assert not state_dir.exists()
        assert _mentions(state_dir) == []


def _mentions(state_dir: Path) -> list[str]:
    """Return the processes whose command line or environment names the directory."""
    found = []
    for process in Path("/proc").iterdir():
        if process.name.isdigit() and int(process.name) != os.getpid():
            try:
                text = (process / "cmdline").read_bytes() + (process / "environ").read_bytes()
            except OSError:
                continue
            if str(state_dir).encode() in text:
                found.append(process.name)
    return found
