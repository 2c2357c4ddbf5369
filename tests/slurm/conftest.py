"""A lab for the tests of this folder: one for each session, in its own directory, removed afterwards."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from hpcrl.lab import lab as labs
from tests.support.campaigns import end_campaigns, until
from tests.support.lab_tools import Lab, running_lab


@pytest.fixture(scope="session")
def needs_slurm() -> None:
    if missing := labs.find_missing_commands():
        pytest.skip(f"the lab needs {', '.join(missing)}: apt-get install {labs.APT_PACKAGES}")


@pytest.fixture(scope="session")
def lab(needs_slurm: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """The lab: strict where this user may have one."""
    with running_lab(tmp_path_factory.getbasetemp()) as lab:
        yield lab


@pytest.fixture
def in_lab(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> Lab:
    """The lab, with the environment of this process set to use it."""
    for name, value in labs.make_environment(lab.state_dir).items():
        monkeypatch.setenv(name, value)
    return lab


@pytest.fixture
def campaigns(lab: Lab, home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Send campaigns of this home to the suite's lab; check afterwards that no job and no process is left."""
    monkeypatch.setenv("HPCRL_LAB", str(lab.state_dir))
    yield home / "campaigns"
    end_campaigns(home)
    until(lambda: lab.run("squeue", "-h") == "", what="the queue is empty", timeout_s=60)
    assert lab.list_shared_memory() == {}, "nothing is left in the shared memory of any node"
