"""The couriers' step is restarted alone, a limited number of times; then versions are sent by files."""

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from hpcrl.campaign_dir.events import CampaignEvent
from hpcrl.campaign_dir.paths import CampaignDir, JobDir
from hpcrl.campaign_dir.workers import WorkerPlace
from hpcrl.config.site import MpiConfig
from hpcrl.job import courier_step as module
from hpcrl.job.courier_step import (
    MAX_RESTARTS,
    MAX_RETURNS,
    MAX_TRIES,
    CourierSupervisor,
    TransportCommand,
    WeightPlane,
    list_transports,
)
from hpcrl.system.files import make_private_dir
from hpcrl.weights.couriers.protocol import CourierStatus
from hpcrl.weights.versions import (
    Transport,
    TransportName,
    WeightVersion,
    announce_version,
    read_transport,
    write_transport,
)
from tests.support.campaigns import until
from tests.support.plans import plan_recipe

FILES = Transport(name="files", reason="starting")
WRITE_STATUS = """
import sys, time
from pathlib import Path
from hpcrl.campaign_dir.paths import JobDir
from hpcrl.weights.couriers.protocol import CourierStatus
where = JobDir(Path(sys.argv[1])).courier_status(sys.argv[2].removeprefix("--incarnation="))
"""
SERVE = (
    WRITE_STATUS
    + """
CourierStatus(ready=True, reason='all here').write(where)
for _ in range(6000):
    CourierStatus.touch(where)
    time.sleep(0.1)
"""
)
MUTE = WRITE_STATUS + "CourierStatus(ready=True, reason='all here').write(where); time.sleep(600)"
SERVE_AND_FAIL = (
    WRITE_STATUS
    + """
CourierStatus(ready=True, reason='all here').write(where)
time.sleep(1)
CourierStatus(ready=False, reason='rank 2 on n2 is stuck').write(where); sys.exit(1)
"""
)
FAIL = WRITE_STATUS + "CourierStatus(ready=False, reason='rank 2 on n2 is stuck').write(where); sys.exit(1)"
HOPELESS = WRITE_STATUS + "CourierStatus(ready=False, reason='a world of 1', hopeless=True).write(where); sys.exit(1)"
CRASH = "import sys; sys.exit('ImportError: no libmpi')"


@pytest.fixture
def job(tmp_path: Path) -> JobDir:
    made = JobDir(tmp_path / "000")
    made.logs.mkdir(parents=True)
    return made


@pytest.fixture
def started(job: JobDir, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[CourierSupervisor]]:
    """End what a test has started."""
    monkeypatch.setattr(module, "STEP_POLL_INTERVAL_S", 0.0)
    monkeypatch.setattr(module, "MIN_RESTART_INTERVAL_S", 0.0)
    monkeypatch.setattr(module, "RESTART_DELAY_S", 0.0)
    started: list[CourierSupervisor] = []
    yield started
    for couriers in started:
        couriers._end_step()


def start(started: list[CourierSupervisor], job: JobDir, *programs: str) -> CourierSupervisor:
    """Start couriers with these programs as their fallback order."""
    names: tuple[TransportName, ...] = ("mpi", "tcp")
    commands = [
        TransportCommand(transport=name, commands=[[sys.executable, "-c", program, str(job.root)]])
        for name, program in zip(names, programs, strict=False)
    ]
    couriers = CourierSupervisor(
        job=job, weights=make_private_dir(job.root / "weights"), commands=commands, transport=FILES
    )
    started.append(couriers)
    couriers.start()
    return couriers


def serving(couriers: CourierSupervisor, name: TransportName = "mpi") -> None:
    until(lambda: couriers.poll() is None and couriers.transport.name == name, what=f"{name} is in use", timeout_s=60)


def failures(couriers: CourierSupervisor, *, number: int) -> list[str]:
    """Return the next failures, this many."""
    seen: list[str] = []

    def more() -> bool:
        if (wrong := couriers.poll()) is not None:
            seen.append(wrong)
        return len(seen) >= number

    until(more, what=f"{number} failures", timeout_s=30)
    return seen


def test_the_transport_is_mpi_once_couriers_serve(started: list[CourierSupervisor], job: JobDir) -> None:
    couriers = start(started, job, SERVE)
    serving(couriers)
    assert couriers.transport.reason == "all here"


def test_a_step_that_ends_is_started_again_with_its_reason(started: list[CourierSupervisor], job: JobDir) -> None:
    couriers = start(started, job, FAIL)
    assert failures(couriers, number=1) == ["rank 2 on n2 is stuck"]
    assert couriers.is_running
    assert couriers.transport == FILES


def test_a_step_that_ends_at_once_is_started_again_only_after_a_while(
    started: list[CourierSupervisor], job: JobDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MIN_RESTART_INTERVAL_S", 600.0)
    couriers = start(started, job, FAIL)
    failures(couriers, number=1)
    couriers.poll()
    assert not couriers.is_running
    assert couriers._start_at == couriers._started_at + 600
    couriers._start_at -= 600
    couriers.poll()
    assert couriers.is_running


def test_the_last_line_of_a_step_that_ends_without_a_reason_is_quoted(
    started: list[CourierSupervisor], job: JobDir
) -> None:
    couriers = start(started, job, CRASH)
    assert failures(couriers, number=1) == ["the step of the couriers ended with code 1: ImportError: no libmpi"]


def test_a_transport_that_never_served_is_replaced_by_the_next_one(
    started: list[CourierSupervisor], job: JobDir
) -> None:
    couriers = start(started, job, CRASH, SERVE)
    failures(couriers, number=MAX_TRIES)
    serving(couriers, "tcp")
    assert couriers.is_running


def test_couriers_without_a_lost_node_start_at_once_even_after_they_were_abandoned(
    started: list[CourierSupervisor], job: JobDir
) -> None:
    couriers = start(started, job, SERVE, CRASH)
    serving(couriers)
    left = [
        TransportCommand(transport=one.transport, commands=[[sys.executable, "-B", *one.commands[0][1:]]])
        for one in couriers.commands
    ]
    before = couriers.incarnation
    couriers.replace_commands(couriers.commands)
    assert couriers.incarnation == before, "nothing has changed"
    couriers.commands[0] = TransportCommand(transport="mpi", commands=[[sys.executable, "-c", FAIL, str(job.root)]])
    [step] = couriers._processes
    step.kill()
    failures(couriers, number=MAX_RESTARTS + 1)
    assert couriers.transport.name == "files"
    couriers.replace_commands(left)
    serving(couriers)


def test_without_the_lost_node_every_transport_is_tried_again(started: list[CourierSupervisor], job: JobDir) -> None:
    couriers = start(started, job, HOPELESS, HOPELESS)
    failures(couriers, number=2)
    assert not couriers.is_running
    couriers.replace_commands(
        [
            TransportCommand(transport=one.transport, commands=[[sys.executable, "-c", SERVE, str(job.root)]])
            for one in couriers.commands
        ]
    )
    serving(couriers, "mpi")


def test_a_transport_that_never_serves_without_the_lost_node_is_replaced_by_the_next_one(
    started: list[CourierSupervisor], job: JobDir
) -> None:
    couriers = start(started, job, SERVE)
    serving(couriers)
    programs: list[tuple[TransportName, str]] = [("mpi", CRASH), ("tcp", SERVE)]
    couriers.replace_commands(
        [
            TransportCommand(transport=name, commands=[[sys.executable, "-c", text, str(job.root)]])
            for name, text in programs
        ]
    )
    failures(couriers, number=MAX_TRIES)
    serving(couriers, "tcp")


def test_a_hopeless_transport_is_not_tried_again(started: list[CourierSupervisor], job: JobDir) -> None:
    couriers = start(started, job, HOPELESS, HOPELESS)
    assert failures(couriers, number=2) == ["a world of 1", "a world of 1"]
    assert not couriers.is_running
    assert couriers.transport == Transport(name="files", reason="a world of 1")


def test_couriers_that_served_have_a_larger_budget_and_then_versions_go_by_files(
    started: list[CourierSupervisor], job: JobDir
) -> None:
    couriers = start(started, job, SERVE, CRASH)
    serving(couriers)
    couriers.commands[0] = TransportCommand(transport="mpi", commands=[[sys.executable, "-c", FAIL, str(job.root)]])
    [step] = couriers._processes
    step.kill()
    failures(couriers, number=MAX_RESTARTS)
    assert couriers.is_running
    failures(couriers, number=1)
    assert not couriers.is_running
    assert couriers.transport == Transport(name="files", reason="rank 2 on n2 is stuck")


def test_abandoned_couriers_are_tried_again_a_few_times(
    started: list[CourierSupervisor], job: JobDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "RETURN_INTERVAL_S", 0.0)
    monkeypatch.setattr(module, "MAX_RESTARTS", 0)
    couriers = start(started, job, SERVE_AND_FAIL)
    for _ in range(1 + MAX_RETURNS):
        serving(couriers)
        failures(couriers, number=1)
        assert couriers.transport.name == "files"
    for _ in range(3):
        couriers.poll()
    assert not couriers.is_running


def test_a_late_status_of_an_earlier_incarnation_is_ignored(started: list[CourierSupervisor], job: JobDir) -> None:
    couriers = start(started, job, SERVE_AND_FAIL)
    serving(couriers)
    earlier = couriers.incarnation
    failures(couriers, number=1)
    CourierStatus(ready=False, reason="of an earlier incarnation", hopeless=True).write(job.courier_status(earlier))
    assert failures(couriers, number=1) == ["rank 2 on n2 is stuck"]
    assert couriers.is_running


def test_couriers_that_have_served_long_have_their_whole_budget(
    started: list[CourierSupervisor], job: JobDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "STEADY_AFTER_S", 0.0)
    couriers = start(started, job, FAIL)
    failures(couriers, number=MAX_RESTARTS + 2)
    assert couriers.is_running


def test_couriers_that_do_not_connect_are_abandoned(
    started: list[CourierSupervisor], job: JobDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "STARTUP_TIMEOUT_S", 0.1)
    couriers = start(started, job, "import time; time.sleep(600)")
    assert failures(couriers, number=1) == ["the couriers did not connect to each other within 0.1 s"]


def carried(couriers: CourierSupervisor, version: int) -> None:
    CourierStatus(ready=True, reason="all here", carried=version).write(
        couriers.job.courier_status(couriers.incarnation)
    )


def test_couriers_are_used_again_once_they_deliver_a_later_version(
    started: list[CourierSupervisor], job: JobDir
) -> None:
    couriers = start(started, job, SERVE)
    serving(couriers)
    for turn in range(1, MAX_RETURNS + 2):
        announce_version(couriers.weights, WeightVersion(version=10 * turn, step=turn))
        write_transport(couriers.weights, Transport(name="files", reason="decode-0 has waited"))
        before = couriers.transport
        carried(couriers, 10 * turn)
        for _ in range(3):
            couriers.poll()
        assert couriers.transport is before, "that version was already made when the engine asked"
        carried(couriers, 10 * turn + 1)
        couriers.poll()
        if turn > MAX_RETURNS:
            assert couriers.transport is before
        else:
            assert couriers.transport.name == "mpi"
            assert f"version {10 * turn + 1}" in couriers.transport.reason
            write_transport(couriers.weights, couriers.transport)
            couriers.poll()


def test_silent_couriers_are_restarted_though_their_step_does_not_end(
    started: list[CourierSupervisor], job: JobDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "COURIERS_SILENCE_TIMEOUT_S", 0.5)
    monkeypatch.setattr(module, "END_TIMEOUT_S", 0.1)
    couriers = start(started, job, MUTE)
    serving(couriers)
    [wrong] = failures(couriers, number=1)
    assert "no heartbeat" in wrong
    assert couriers.is_running
    assert couriers.transport.name == "mpi"


def test_every_heartbeat_of_the_couriers_is_seen(started: list[CourierSupervisor], job: JobDir) -> None:
    couriers = start(started, job, SERVE)
    serving(couriers)
    for _ in range(3):
        changed_at = couriers._beat_changed_at
        until(
            lambda changed_at=changed_at: couriers.poll() is None and couriers._beat_changed_at > changed_at,
            what="a heartbeat was seen",
        )


@pytest.mark.parametrize(
    ("mpi", "above", "why"),
    [
        (MpiConfig(couriers=False, flavour="mpich"), [], "the site disables couriers"),
        (MpiConfig(), ["tcp"], "the site has no MPI"),
        (MpiConfig(flavour="mpich", world_over_components="no"), ["tcp"], "no MPI over several components"),
        (MpiConfig(flavour="mpich"), ["tcp"], "mpi4py is not installed"),
    ],
)
def test_the_reason_why_mpi_is_not_tried_is_reported(
    mpi: MpiConfig, above: list[str], why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    there, reason = list_transports(mpi, layout="hetjob")
    assert there == above
    assert why in reason


def test_no_courier_is_started_where_the_plan_has_no_room_for_windows(tmp_path: Path) -> None:
    place = WorkerPlace(job=CampaignDir(tmp_path).job(0), node="n1")
    events: list[CampaignEvent] = []
    plan = msgspec.structs.replace(plan_recipe(site="lab"), has_couriers=False)
    plane = WeightPlane(
        place, plan=plan, find_commands=lambda _: pytest.fail("no command is needed"), emit=events.append
    )
    plane.start(MpiConfig())
    plane.poll()
    transport = read_transport(place.campaign.weights)
    assert transport is not None
    assert transport.name == "files"
    assert "two versions of the weights do not fit" in transport.reason
    assert len(events) == 1


def test_files_that_couriers_will_replace_are_reported_as_such(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CourierSupervisor, "start", lambda _: None)
    place = WorkerPlace(job=CampaignDir(tmp_path).job(0), node="n1")
    plane = WeightPlane(place, plan=plan_recipe(site="lab"), find_commands=lambda _: [], emit=lambda _: None)
    plane.start(MpiConfig(flavour="none"))
    transport = read_transport(place.campaign.weights)
    assert transport is not None
    assert (transport.name, transport.reason.split("; ")[0]) == ("files", "until the couriers have started (tcp)")


def test_mpi_comes_before_tcp(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: True)
    assert list_transports(MpiConfig(flavour="mpich", srun_type="pmi2"), layout="hetjob") == (["mpi", "tcp"], "")


def test_one_allocation_has_mpi_where_components_have_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: True)
    mpi = MpiConfig(flavour="mpich", srun_type="pmi2", world_over_components="no")
    assert list_transports(mpi, layout="hetstep") == (["mpi", "tcp"], "")
