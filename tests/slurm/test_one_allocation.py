"""A site without heterogeneous jobs, on the lab: one plain allocation, its nodes distributed to the roles."""

from pathlib import Path

import pytest

from hpcrl.campaign_dir.paths import CampaignDir
from tests.support.campaigns import CALM, SIMULATED, events_of, hpcrl, outcome, processes_of, snapshot, steps, until
from tests.support.lab_tools import Lab

pytestmark = [pytest.mark.slurm, pytest.mark.mpi, pytest.mark.timeout(600)]

SPLIT = ("-s", "resources.prefill.num_workers=1")
NODES = {"env": "prefill1", "prefill": "prefill2", "decode": "train1", "train": "train2", "reward": "prefill1"}
"""The four nodes of the partition h100, in the order in which Slurm lists them."""


def test_a_site_without_het_jobs_trains_in_one_allocation_and_is_stopped_resumed_and_ended_at_once(
    lab: Lab, campaigns: Path, home: Path
) -> None:
    endless = (*CALM, "-s", "train.num_steps=100000")
    hpcrl("submit", "quickstart", "--site", "lab-hetstep", "--name", "o", *SIMULATED, *SPLIT, *endless)
    campaign = CampaignDir(campaigns / "o")
    until(lambda: len(events_of(campaign, "courier")) > 1, what="versions were carried")
    hpcrl("stop", "o")
    assert outcome(campaign)["outcome"] == "stopped"
    assert [event["layout"] for event in events_of(campaign, "layout")] == ["hetstep"]
    assert [event["transport"] for event in events_of(campaign, "transport")] == ["files", "mpi"]
    carried = events_of(campaign, "courier")
    assert {(event["node"], *event["to"]) for event in carried} == {("train2", "prefill2", "train1")}
    nodes = {event["role"]: event["node"] for event in events_of(campaign, "worker-started")}
    assert NODES | nodes == NODES
    assert set(nodes) >= {"env", "prefill", "decode", "train"}, "quick rewards need no worker"
    [job] = snapshot("o")["jobs"]
    assert [component["nodes"] for component in job["components"]] == [
        [NODES[role]] for role in ("env", "prefill", "decode", "train")
    ]
    [row] = lab.wait_accounted(job["id"], "COMPLETED")
    assert (row["Partition"], row["NodeList"]) == ("h100", "prefill[1-2],train[1-2]")
    made = len(steps(campaign))
    hpcrl("resume", "o")
    until(lambda: len(steps(campaign)) > made, what="the second job makes steps")
    hpcrl("stop", "o", "--now")
    until(lambda: not processes_of(home), what="no process is left", timeout_s=60)
    assert [job["state"] for job in snapshot("o")["jobs"]] == ["stopped", "stopped"]
    numbers = [step["step"] for step in steps(campaign)]
    assert numbers == sorted(set(numbers)), "no step was lost or made twice"


def test_a_dry_run_of_one_allocation_asks_slurm_and_queues_nothing(lab: Lab, campaigns: Path) -> None:
    printed = hpcrl("submit", "quickstart", "--site", "lab-hetstep", "--dry-run").stdout
    assert "to start at" in printed
    assert lab.run("squeue", "-h") == ""
    assert list(campaigns.iterdir()) == []
