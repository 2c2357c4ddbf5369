"""The couriers of campaigns on the lab: weights are sent over MPI, or by TCP or files where that fails."""

import os
import signal
from pathlib import Path

import psutil
import pytest

from hpcrl.campaign_dir.paths import CampaignDir
from hpcrl.testing.nodes import courier_pids, processes
from hpcrl.weights.versions import list_versions, read_transport
from tests.support.campaigns import CALM, SIMULATED, events_of, hpcrl, outcome, pids_of, snapshot, steps, until
from tests.support.lab_tools import Lab
from tests.support.listening_sockets import choose_exposed, list_listening

pytestmark = [pytest.mark.slurm, pytest.mark.mpi, pytest.mark.timeout(600)]


def transports(campaign: CampaignDir) -> list[object]:
    return [event["transport"] for event in events_of(campaign, "transport")]


def test_a_campaign_whose_mpi_does_not_work_uses_tcp(lab: Lab, campaigns: Path) -> None:
    more = (*CALM, "-s", "site.mpi.srun_type=none", "-s", "train.num_steps=100000")
    hpcrl("submit", "quickstart", "--site", "lab", "--name", "t", *SIMULATED, *more)
    campaign = CampaignDir(campaigns / "t")
    until(lambda: len(events_of(campaign, "courier")) > 1, what="versions were carried", timeout_s=300)
    assert transports(campaign)[-1] == "tcp"
    assert "mpi" not in transports(campaign)
    assert any(
        "a world of 1 where 3 ranks were started" in str(event["reason"]) for event in events_of(campaign, "transport")
    )
    assert {event["node"] for event in events_of(campaign, "courier")} == {"train1"}
    hpcrl("stop", "t", "--now")


def test_a_trainer_on_two_nodes_sends_from_both_after_couriers_or_a_rank_were_killed_and_in_the_next_job(
    lab: Lab, campaigns: Path, home: Path
) -> None:
    ranks = ("-s", "resources.train.num_workers=2", "-s", "resources.train.mem_gib_per_worker=9")
    sharded = ("-s", 'train.sharding="full"', "-s", "train.checkpoint_every_steps=2", "-s", "train.num_steps=100000")
    ranks += ("-s", "job.num_jobs=2")
    hpcrl("submit", "quickstart", "--site", "lab", "--name", "s", *SIMULATED, *CALM, *ranks, *sharded)
    campaign = CampaignDir(campaigns / "s")
    fail_couriers(campaign)
    os.kill(processes(campaign, "hpcrl.roles", "train", by="RANK")["1"], signal.SIGKILL)
    until(lambda: "train-0" in restarted(campaign), what="the trainer is started again")
    before = len(events_of(campaign, "courier"))
    until(lambda: len(events_of(campaign, "courier")) > before + 2, what="versions are carried again")
    found = pids_of(home)
    renamed = [one.pid for one in psutil.process_iter() if one.ppid() in found]  # a new title may hide the environment
    listening = list_listening({*found, *renamed})
    parts = ("hpcrl.roles train", "interchange", "hpcrl.job.worker_pool decode", "hpcrl.weights.couriers")
    assert [part for part in parts if not any(part in words for words in listening)] == []
    exposed = choose_exposed(listening)
    assert all("hpcrl.weights.couriers" in words for words in exposed), "MPI itself chooses one address of the node"
    assert not {"0.0.0.0", "::"} & {address for addresses in exposed.values() for address in addresses}
    assert events_of(campaign, "follower"), "a second job waits"
    hpcrl("stop", "s")
    assert outcome(campaign)["outcome"] == "stopped"
    until(lambda: lab.run("squeue", "-h") == "", what="the job that waited was cancelled")
    assert (snapshot("s")["state"], campaign.job_numbers()) == ("stopped", [0])
    assert max(int(str(event["version"])) for event in events_of(campaign, "published")) in list_versions(
        campaign.weights
    )
    made, before = steps(campaign)[-1]["step"], len(events_of(campaign, "courier"))
    hpcrl("resume", "s")
    until(lambda: len(events_of(campaign, "courier")) > before + 1, what="the next job carries versions")
    hpcrl("stop", "s", "--now")
    assert outcome(campaign, 1)["outcome"] == "stopped"
    assert next(step["step"] for step in steps(campaign) if step["job"] == 1) == made + 1, (
        "no step was lost or made twice"
    )
    carried = events_of(campaign, "courier")
    assert {(event["node"], *event["sources"], *event["to"]) for event in carried} == {
        ("train1", "train1", "train2", "prefill1", "decode1")
    }
    versions = [int(str(event["version"])) for event in carried]
    assert versions == sorted(set(versions))
    assert set(transports(campaign)) == {"files", "mpi"}
    assert transports(campaign)[-1] == "mpi"
    assert lab.list_shared_memory() == {}


def fail_couriers(campaign: CampaignDir) -> None:
    """Kill a courier, then let another stand still: they alone are started again, and send by MPI as before."""
    for number, node in ((signal.SIGKILL, "decode1"), (signal.SIGSTOP, "prefill1")):
        carried = len(events_of(campaign, "courier"))
        until(lambda carried=carried: len(events_of(campaign, "courier")) > carried, what="a version was carried")
        num = len(restarted(campaign))
        os.kill(courier_pids(campaign)[node], number)
        until(lambda num=num: len(restarted(campaign)) > num, what="the couriers were started again")
        carried, made = len(events_of(campaign, "courier")), len(steps(campaign))
        until(
            lambda carried=carried: len(events_of(campaign, "courier")) > carried + 3,
            what=f"versions are carried after {number}",
        )
        assert len(steps(campaign)) > made
    assert {event["of"] for event in events_of(campaign, "worker-failed")} == {"couriers"}
    [fault] = [event for event in events_of(campaign, "fault") if event.get("at") == "prefill1"][:1]
    assert {"rank", "bucket", "bytes"} <= fault.keys()
    transport = read_transport(campaign.weights)
    assert transport is not None
    assert transport.name == "mpi"


def restarted(campaign: CampaignDir) -> list[object]:
    return [event["of"] for event in events_of(campaign, "worker-restarted")]
