"""The couriers of campaigns on the lab: weights are sent over MPI, or by TCP or files where that fails."""

import os
import signal
from pathlib import Path

import pytest

from hpcrl.campaign_dir.event_log import read_events
from hpcrl.campaign_dir.paths import CampaignDir
from hpcrl.testing.nodes import courier_pids, processes
from hpcrl.weights.versions import list_versions, read_transport
from tests.support.campaigns import SMALL, hpcrl, outcome, snapshot, steps, until
from tests.support.lab_tools import Lab

pytestmark = [pytest.mark.slurm, pytest.mark.mpi, pytest.mark.timeout(600)]


def named(run: CampaignDir, name: str) -> list[dict[str, object]]:
    return [event for event in read_events(run.events) if event["event"] == name]


def transports(run: CampaignDir) -> list[object]:
    return [event["rung"] for event in named(run, "rung")]


def test_one_mpi_world_over_the_components_carries_every_version(lab: Lab, campaigns: Path) -> None:
    hpcrl("submit", "quickstart", "--site", "lab", "--watch", "--name", "m", *SMALL)
    run = CampaignDir(campaigns / "m")
    assert snapshot("m")["state"] == "done"
    assert transports(run) == ["files", "mpi"]
    carried = named(run, "courier")
    assert carried
    for event in carried:
        assert event["node"] == "train1"
        assert event["to"] == ["prefill1", "decode1"]
        assert event["bytes"] > 0  # type: ignore[operator]
        assert "wall_s" in event
    where = {event["node"] for event in named(run, "loaded")}
    assert where == {"prefill1", "decode1"}
    assert not [path for path in Path("/dev/shm").iterdir() if f"-{run.name}-" in path.name]


@pytest.mark.parametrize(
    ("setting", "reason"),
    [
        ("site.mpi.srun_type=none", "a world of 1 where 3 ranks were started"),
        ("site.mpi.flavour=none", "the site has no MPI"),
    ],
)
def test_a_campaign_whose_mpi_does_not_work_uses_tcp(lab: Lab, campaigns: Path, setting: str, reason: str) -> None:
    more = ("-s", setting, "-s", "train.num_steps=100000")
    hpcrl("submit", "quickstart", "--site", "lab", "--name", "t", *SMALL, *more)
    run = CampaignDir(campaigns / "t")
    until(lambda: len(named(run, "courier")) > 1, what="versions were carried", timeout_s=300)
    assert transports(run)[-1] == "tcp"
    assert "mpi" not in transports(run)
    assert any(reason in str(event["reason"]) for event in named(run, "rung"))
    assert {event["node"] for event in named(run, "courier")} == {"train1"}
    hpcrl("stop", "t", "--now")


def test_a_site_without_couriers_uses_files(lab: Lab, campaigns: Path) -> None:
    hpcrl("submit", "quickstart", "--site", "lab", "--watch", "--name", "f", *SMALL, "-s", "site.mpi.couriers=false")
    run = CampaignDir(campaigns / "f")
    assert snapshot("f")["state"] == "done"
    assert transports(run) == ["files"]
    assert {event["node"] for event in named(run, "loaded")} == {"prefill1", "decode1"}


@pytest.mark.parametrize(("number", "node"), [(signal.SIGKILL, "decode1"), (signal.SIGSTOP, "prefill1")])
def test_couriers_are_restarted_alone(lab: Lab, campaigns: Path, number: int, node: str) -> None:
    hpcrl("submit", "quickstart", "--site", "lab", "--name", "r", *SMALL, "-s", "train.num_steps=100000")
    run = CampaignDir(campaigns / "r")
    until(lambda: bool(named(run, "courier")), what="a version was carried")
    os.kill(courier_pids(run)[node], number)
    until(lambda: bool(named(run, "worker-restarted")), what="the couriers were started again")
    before = len(named(run, "courier"))
    made = len(steps(run))
    until(lambda: len(named(run, "courier")) > before + 3, what="versions are carried again")
    assert len(steps(run)) > made
    assert {event["of"] for event in named(run, "worker-failed")} == {"couriers"}
    if number == signal.SIGSTOP:
        [fault] = [event for event in named(run, "fault") if event.get("at") == node][:1]
        assert {"rank", "bucket", "bytes"} <= fault.keys()
    transport = read_transport(run.weights)
    assert transport is not None
    assert transport.rung == "mpi"
    hpcrl("stop", "r", "--now")


def test_a_trainer_on_two_nodes_sends_from_both_also_after_one_was_killed(lab: Lab, campaigns: Path) -> None:
    ranks = ("-s", "resources.train.num_workers=2", "-s", "resources.train.gpus_per_worker=4")
    sharded = ("-s", 'train.sharding="full"', "-s", "train.checkpoint_every_steps=2", "-s", "train.num_steps=100000")
    hpcrl("submit", "quickstart", "--site", "lab", "--name", "s", *SMALL, *ranks, *sharded)
    run = CampaignDir(campaigns / "s")
    until(lambda: len(named(run, "courier")) > 2, what="versions were carried", timeout_s=240)
    os.kill(processes(run, "hpcrl.roles", "train", by="RANK")["1"], signal.SIGKILL)
    until(lambda: bool(named(run, "worker-restarted")), what="the trainer is started again", timeout_s=240)
    before = len(named(run, "courier"))
    until(lambda: len(named(run, "courier")) > before + 2, what="versions are carried again", timeout_s=240)
    hpcrl("stop", "s")
    assert outcome(run)["outcome"] == "stopped"
    carried = named(run, "courier")
    assert {(event["node"], *event["sources"], *event["to"]) for event in carried} == {  # type: ignore[misc]
        ("train1", "train1", "train2", "prefill1", "decode1")
    }
    versions = [int(str(event["version"])) for event in carried]
    assert versions == sorted(set(versions))
    assert max(int(str(event["version"])) for event in named(run, "published")) in list_versions(run.weights)
    assert transports(run) == ["files", "mpi"]
    assert not [path for path in Path("/dev/shm").iterdir() if f"-{run.name}-" in path.name]
