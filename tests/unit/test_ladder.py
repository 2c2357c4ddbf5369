"""The couriers' step is started again alone, within a budget; then versions go by files."""

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpcrl.campaign_dir.paths import JobDir
from hpcrl.config.site import Mpi
from hpcrl.job import courier_step as module
from hpcrl.job.courier_step import RESTARTS, RETURNS, TRIES, Couriers, Way, rungs
from hpcrl.system.files import private_dir
from hpcrl.weights.couriers.protocol import Standing
from hpcrl.weights.versions import Rung, RungName, WeightVersion, announce, set_rung
from tests.campaigns import until

FILES = Rung(rung="files", reason="starting")
SAY = """
import sys, time
from pathlib import Path
from hpcrl.campaign_dir.paths import JobDir
from hpcrl.weights.couriers.protocol import Standing
where = JobDir(Path(sys.argv[1])).couriers(sys.argv[2].removeprefix("--life="))
"""
SERVE = (
    SAY
    + """
Standing(ready=True, reason='all here').write(where)
for _ in range(6000):
    Standing.beat(where)
    time.sleep(0.1)
"""
)
MUTE = SAY + "Standing(ready=True, reason='all here').write(where); time.sleep(600)"
SERVE_AND_GIVE_UP = (
    SAY
    + """
Standing(ready=True, reason='all here').write(where)
time.sleep(1)
Standing(ready=False, reason='rank 2 on n2 is stuck').write(where); sys.exit(1)
"""
)
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
    monkeypatch.setattr(module, "PAUSE_S", 0.0)
    begun: list[Couriers] = []
    yield begun
    for couriers in begun:
        couriers._end()


def start(begun: list[Couriers], job: JobDir, *programs: str) -> Couriers:
    """A ladder of these programs."""
    names: tuple[RungName, ...] = ("mpi", "tcp")
    ways = [
        Way(rung=name, command=[sys.executable, "-c", program, str(job.root)])
        for name, program in zip(names, programs, strict=False)
    ]
    couriers = Couriers(job=job, weights=private_dir(job.root / "weights"), ways=ways, rung=FILES)
    begun.append(couriers)
    couriers.start()
    return couriers


def serving(couriers: Couriers, rung: RungName = "mpi") -> None:
    until(lambda: couriers.tend() is None and couriers.rung.rung == rung, what=f"the rung is {rung}", timeout_s=60)


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
    serving(couriers)
    assert couriers.rung.reason == "all here"


def test_a_step_that_ends_is_started_again_with_its_reason(started: list[Couriers], job: JobDir) -> None:
    couriers = start(started, job, GIVE_UP)
    assert failures(couriers, number=1) == ["rank 2 on n2 is stuck"]
    assert couriers.running
    assert couriers.rung == FILES


def test_a_step_that_ends_at_once_is_started_again_only_after_a_while(
    started: list[Couriers], job: JobDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PAUSE_S", 600.0)
    couriers = start(started, job, GIVE_UP)
    failures(couriers, number=1)
    couriers.tend()
    assert not couriers.running
    assert couriers._start_at == couriers._began + 600
    couriers._start_at -= 600
    couriers.tend()
    assert couriers.running


def test_a_step_that_ends_without_a_word_is_quoted(started: list[Couriers], job: JobDir) -> None:
    couriers = start(started, job, CRASH)
    assert failures(couriers, number=1) == ["the step of the couriers ended with code 1: ImportError: no libmpi"]


def test_a_rung_that_never_served_is_left_for_the_next_one(started: list[Couriers], job: JobDir) -> None:
    couriers = start(started, job, CRASH, SERVE)
    failures(couriers, number=TRIES)
    serving(couriers, "tcp")
    assert couriers.running


def test_ways_past_a_lost_node_are_gone_at_once_also_after_they_were_given_up(
    started: list[Couriers], job: JobDir
) -> None:
    couriers = start(started, job, SERVE, CRASH)
    serving(couriers)
    left = [Way(rung=way.rung, command=[sys.executable, "-B", *way.command[1:]]) for way in couriers.ways]
    before = couriers.life
    couriers.go(couriers.ways)
    assert couriers.life == before, "nothing has changed"
    couriers.ways[0] = Way(rung="mpi", command=[sys.executable, "-c", GIVE_UP, str(job.root)])
    assert couriers._process is not None
    couriers._process.kill()
    failures(couriers, number=RESTARTS + 1)
    assert couriers.rung.rung == "files"
    couriers.go(left)
    serving(couriers)


def test_without_the_lost_node_every_rung_is_tried_again(started: list[Couriers], job: JobDir) -> None:
    couriers = start(started, job, HOPELESS, HOPELESS)
    failures(couriers, number=2)
    assert not couriers.running
    couriers.go([Way(rung=way.rung, command=[sys.executable, "-c", SERVE, str(job.root)]) for way in couriers.ways])
    serving(couriers, "mpi")


def test_a_rung_that_does_not_come_to_serve_without_the_lost_node_is_left_for_the_next_one(
    started: list[Couriers], job: JobDir
) -> None:
    couriers = start(started, job, SERVE)
    serving(couriers)
    programs: list[tuple[RungName, str]] = [("mpi", CRASH), ("tcp", SERVE)]
    couriers.go([Way(rung=name, command=[sys.executable, "-c", text, str(job.root)]) for name, text in programs])
    failures(couriers, number=TRIES)
    serving(couriers, "tcp")


def test_what_would_fail_again_is_not_tried_again(started: list[Couriers], job: JobDir) -> None:
    couriers = start(started, job, HOPELESS, HOPELESS)
    assert failures(couriers, number=2) == ["a world of 1", "a world of 1"]
    assert not couriers.running
    assert couriers.rung == Rung(rung="files", reason="a world of 1")


def test_couriers_that_served_have_a_larger_budget_and_then_versions_go_by_files(
    started: list[Couriers], job: JobDir
) -> None:
    couriers = start(started, job, SERVE, CRASH)
    serving(couriers)
    couriers.ways[0] = Way(rung="mpi", command=[sys.executable, "-c", GIVE_UP, str(job.root)])
    assert couriers._process is not None
    couriers._process.kill()
    failures(couriers, number=RESTARTS)
    assert couriers.running
    failures(couriers, number=1)
    assert not couriers.running
    assert couriers.rung == Rung(rung="files", reason="rank 2 on n2 is stuck")


def test_couriers_that_were_given_up_are_tried_again_a_few_times(
    started: list[Couriers], job: JobDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "RETRY_S", 0.0)
    monkeypatch.setattr(module, "RESTARTS", 0)
    couriers = start(started, job, SERVE_AND_GIVE_UP)
    for _ in range(1 + RETURNS):
        serving(couriers)
        failures(couriers, number=1)
        assert couriers.rung.rung == "files"
    for _ in range(3):
        couriers.tend()
    assert not couriers.running


def test_what_an_earlier_life_says_late_is_not_heard(started: list[Couriers], job: JobDir) -> None:
    couriers = start(started, job, SERVE_AND_GIVE_UP)
    serving(couriers)
    earlier = couriers.life
    failures(couriers, number=1)
    Standing(ready=False, reason="of an earlier life", hopeless=True).write(job.couriers(earlier))
    assert failures(couriers, number=1) == ["rank 2 on n2 is stuck"]
    assert couriers.running


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


def carried(couriers: Couriers, version: int) -> None:
    Standing(ready=True, reason="all here", carried=version).write(couriers.job.couriers(couriers.life))


def test_versions_go_by_couriers_again_once_they_bring_what_an_engine_missed(
    started: list[Couriers], job: JobDir
) -> None:
    couriers = start(started, job, SERVE)
    serving(couriers)
    for turn in range(1, RETURNS + 2):
        announce(couriers.weights, WeightVersion(version=10 * turn, step=turn))
        set_rung(couriers.weights, Rung(rung="files", reason="decode-0 has waited"))
        before = couriers.rung
        carried(couriers, 10 * turn)
        for _ in range(3):
            couriers.tend()
        assert couriers.rung is before, "that version was already made when the engine asked"
        carried(couriers, 10 * turn + 1)
        couriers.tend()
        if turn > RETURNS:
            assert couriers.rung is before
        else:
            assert couriers.rung.rung == "mpi"
            assert f"version {10 * turn + 1}" in couriers.rung.reason
            set_rung(couriers.weights, couriers.rung)
            couriers.tend()


def test_couriers_that_are_gone_are_started_again_though_their_step_does_not_end(
    started: list[Couriers], job: JobDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MUTE_S", 0.5)
    monkeypatch.setattr(module, "ENDING_S", 0.1)
    couriers = start(started, job, MUTE)
    serving(couriers)
    [wrong] = failures(couriers, number=1)
    assert "nothing was heard" in wrong
    assert couriers.running
    assert couriers.rung.rung == "mpi"


def test_every_beat_of_the_couriers_is_heard(started: list[Couriers], job: JobDir) -> None:
    couriers = start(started, job, SERVE)
    serving(couriers)
    for _ in range(3):
        heard = couriers._heard
        until(lambda heard=heard: couriers.tend() is None and couriers._heard > heard, what="a beat was heard")


@pytest.mark.parametrize(
    ("mpi", "above", "why"),
    [
        (Mpi(couriers=False, flavour="mpich"), [], "the site does not want couriers"),
        (Mpi(), ["tcp"], "the site has no MPI"),
        (Mpi(flavour="mpich", world_over_components="no"), ["tcp"], "no MPI over several components"),
        (Mpi(flavour="mpich"), ["tcp"], "mpi4py is not installed"),
    ],
)
def test_what_keeps_mpi_from_being_tried_is_said(
    mpi: Mpi, above: list[str], why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    there, reason = rungs(mpi, layout="hetjob")
    assert there == above
    assert why in reason


def test_mpi_comes_before_tcp(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: True)
    assert rungs(Mpi(flavour="mpich", srun_type="pmi2"), layout="hetjob") == (["mpi", "tcp"], "")


def test_one_allocation_has_mpi_where_components_have_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: True)
    mpi = Mpi(flavour="mpich", srun_type="pmi2", world_over_components="no")
    assert rungs(mpi, layout="hetstep") == (["mpi", "tcp"], "")
