"""The couriers' step is started again alone, within a budget; then versions go by files."""

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpcrl import couriers as module
from hpcrl.couriers import RESTARTS, Couriers, why_not
from hpcrl.rundir import JobDir
from hpcrl.site import Mpi
from hpcrl.weights.versions import Rung
from tests.campaigns import until

FILES = Rung(rung="files", reason="starting")
SAY = """
import sys, time
from pathlib import Path
from hpcrl.weights.transfer import Standing
where = Path(sys.argv[1])
"""
SERVE = SAY + "Standing(ready=True, reason='all here').write(where); time.sleep(600)"
GIVE_UP = SAY + "Standing(ready=False, reason='rank 2 on n2 is stuck').write(where); sys.exit(1)"
HOPELESS = SAY + "Standing(ready=False, reason='a world of 1', hopeless=True).write(where); sys.exit(1)"
CRASH = "import sys; sys.exit('ImportError: no libmpi')"


@pytest.fixture
def job(tmp_path: Path) -> JobDir:
    made = JobDir(tmp_path / "000")
    made.logs.mkdir(parents=True)
    return made


@pytest.fixture
def started(job: JobDir, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Couriers]]:
    """Ends what a test has started."""
    monkeypatch.setattr(module, "LOOK_EVERY_S", 0.0)
    begun: list[Couriers] = []
    yield begun
    for couriers in begun:
        couriers._end()


def start(begun: list[Couriers], job: JobDir, program: str) -> Couriers:
    couriers = Couriers(job=job, command=[sys.executable, "-c", program, str(job.couriers)], rung=FILES)
    begun.append(couriers)
    couriers.start()
    return couriers


def failures(couriers: Couriers, *, number: int) -> list[str]:
    """What goes wrong next, so many times."""
    seen: list[str] = []

    def more() -> bool:
        if (wrong := couriers.tend()) is not None:
            seen.append(wrong)
        return len(seen) >= number

    until(more, what=f"{number} failures", timeout_s=30)
    return seen


def test_the_rung_is_mpi_once_they_serve(started: list[Couriers], job: JobDir) -> None:
    couriers = start(started, job, SERVE)
    until(lambda: couriers.tend() is None and couriers.rung.rung == "mpi", what="the rung is mpi", timeout_s=30)
    assert couriers.rung.reason == "all here"


def test_a_step_that_ends_is_started_again_with_its_reason(started: list[Couriers], job: JobDir) -> None:
    couriers = start(started, job, GIVE_UP)
    assert failures(couriers, number=1) == ["rank 2 on n2 is stuck"]
    assert couriers.running
    assert couriers.rung == FILES


def test_a_step_that_ends_without_a_word_is_quoted(started: list[Couriers], job: JobDir) -> None:
    couriers = start(started, job, CRASH)
    assert failures(couriers, number=1) == ["the step of the couriers ended with code 1: ImportError: no libmpi"]


def test_after_too_many_failures_in_a_row_versions_go_by_files(started: list[Couriers], job: JobDir) -> None:
    couriers = start(started, job, GIVE_UP)
    failures(couriers, number=RESTARTS)
    assert couriers.running
    failures(couriers, number=1)
    assert not couriers.running
    assert couriers.rung == Rung(rung="files", reason="rank 2 on n2 is stuck")


def test_what_would_fail_again_is_not_tried_again(started: list[Couriers], job: JobDir) -> None:
    couriers = start(started, job, HOPELESS)
    assert failures(couriers, number=1) == ["a world of 1"]
    assert not couriers.running
    assert couriers.rung.rung == "files"


def test_couriers_that_have_served_long_have_their_whole_budget(
    started: list[Couriers], job: JobDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "STEADY_S", 0.0)
    couriers = start(started, job, GIVE_UP)
    failures(couriers, number=RESTARTS + 2)
    assert couriers.running


def test_couriers_that_do_not_come_up_are_given_up(
    started: list[Couriers], job: JobDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "STARTUP_S", 0.1)
    couriers = start(started, job, "import time; time.sleep(600)")
    assert failures(couriers, number=1) == ["the couriers did not find each other within 0.1 s"]


@pytest.mark.parametrize(
    ("mpi", "why"),
    [
        (Mpi(), "the site does not ask for couriers"),
        (Mpi(couriers=True), "the site has no MPI"),
        (Mpi(couriers=True, flavour="mpich", world_over_components="no"), "no MPI over several components"),
        (Mpi(couriers=True, flavour="mpich"), "mpi4py is not installed"),
    ],
)
def test_what_keeps_couriers_from_being_started_is_said(mpi: Mpi, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    assert why in (why_not(mpi) or "")
