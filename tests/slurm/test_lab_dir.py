"""The lab's checks of its directory and of processes; these tests need no Slurm."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpcrl.config.site import default_lab_dir
from hpcrl.errors import LabError
from hpcrl.lab import daemons
from hpcrl.lab import lab as labs
from hpcrl.lab.conf import DEFAULT_CLUSTER, LabDir, check_path, reserve_ports
from hpcrl.lab.daemons import LabDaemon, ProcessMarks


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "60"]) as process:
        yield process
        process.kill()


def test_process_that_has_a_recorded_pid_but_another_start_is_spared(sleeper: subprocess.Popen[bytes]) -> None:
    stale = LabDaemon(name="slurmctld", pid=sleeper.pid, ticks=1)
    daemons.end_daemons([stale], marks=ProcessMarks(token="none", conf=Path("/nowhere/slurm.conf")))
    assert sleeper.poll() is None


@pytest.mark.parametrize(
    ("environ", "ours"),
    [
        (b"A=b\0HPCRL_LAB_TOKEN=t0\0", True),
        (b"HPCRL_LAB_TOKEN=t01\0", False),
        (b"SLURM_CONF=/lab/slurm.conf\0", False),
        (b"SLURM_CONF=/lab/slurm.conf\0SLURMD_NODENAME=env1\0", True),
        (b"SLURM_CONF=/lab2/slurm.conf\0SLURMD_NODENAME=env1\0", False),
        (b"", False),
    ],
)
def test_process_is_the_labs_by_its_token_or_as_a_job_of_it(environ: bytes, ours: bool) -> None:
    assert ProcessMarks(token="t0", conf=Path("/lab/slurm.conf")).are_carried_by(environ) is ours


def test_long_state_directory_is_refused_with_the_length_that_works() -> None:
    with pytest.raises(LabError, match=r"at most \d+ leave room"):
        check_path(Path("/tmp") / ("x" * 90), cluster=DEFAULT_CLUSTER)


def test_state_directory_with_a_space_is_refused() -> None:
    with pytest.raises(LabError, match="HPCRL_LAB"):
        check_path(Path("/tmp/my lab"), cluster=DEFAULT_CLUSTER)


def test_directory_with_other_files_is_left_alone_by_down(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years")
    assert not labs.down(tmp_path)
    assert (tmp_path / "thesis.tex").exists()


def test_directory_with_other_files_is_refused_by_up(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(labs, "REQUIRED_COMMANDS", ())
    monkeypatch.setattr(labs, "check_path", lambda *_, **__: None)
    (tmp_path / "thesis.tex").write_text("years")
    with pytest.raises(LabError, match="other files"):
        labs.up(tmp_path)


def test_missing_commands_are_named_with_the_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(labs, "REQUIRED_COMMANDS", ("slurmctld-of-tomorrow",))
    with pytest.raises(LabError, match=r"slurmctld-of-tomorrow: apt-get install .*slurm-wlm"):
        labs.up(Path("/tmp/hpcrl-lab-never"))
    assert not Path("/tmp/hpcrl-lab-never").exists()


def test_ports_are_not_reserved_twice() -> None:
    with reserve_ports(11) as first, reserve_ports(11) as second:
        assert set(first).isdisjoint(second)


def test_status_without_a_lab_is_down(tmp_path: Path) -> None:
    status = labs.status(tmp_path / "lab")
    assert not status.is_up
    assert "is down" in str(status)


def test_environment_points_at_the_state_directory(tmp_path: Path) -> None:
    lab = LabDir(tmp_path)
    assert labs.make_environment(tmp_path) == {"SLURM_CONF": str(lab.conf), "HPCRL_LAB": str(tmp_path)}


def test_default_state_directory_is_one_a_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HPCRL_LAB", raising=False)
    assert str(os.getuid()) in default_lab_dir().name
    monkeypatch.setenv("HPCRL_LAB", "/x/lab")
    assert default_lab_dir() == Path("/x/lab")
