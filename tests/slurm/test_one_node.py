"""Small jobs on the lab: one node whose GPUs the trainer and the engines share, four or two."""

from pathlib import Path

import pytest

from hpcrl.campaign_dir.paths import CampaignDir
from tests.support.campaigns import SIMULATED, events_of, hpcrl, snapshot
from tests.support.lab_tools import Lab
from tests.support.shared_gpus import find_overlaps, list_shifts

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(600)]

TWO_AND_TWO = (
    *("-s", "job.layout=colocated", "-s", "resources.env.mem_gib_per_worker=2"),
    *("-s", "resources.train.num_workers=2", "-s", "resources.train.mem_gib_per_worker=2"),
    *("-s", "resources.decode.num_workers=2", "-s", "resources.decode.mem_gib_per_worker=2"),
)


def test_a_trainer_on_two_gpus_and_two_engines_share_one_node(lab: Lab, campaigns: Path) -> None:
    hpcrl("submit", "quickstart", "--site", "lab", "--watch", "--name", "n", *SIMULATED, *TWO_AND_TWO)
    campaign, seen = CampaignDir(campaigns / "n"), snapshot("n")
    assert seen["state"] == "done"
    assert [event["layout"] for event in events_of(campaign, "layout")] == ["colocated"]
    assert [event["transport"] for event in events_of(campaign, "transport")] == ["window"]
    started = events_of(campaign, "worker-started")
    gpus = {role: sorted(event["gpus"] for event in started if event["role"] == role) for role in ("train", "decode")}
    assert gpus == {"train": [["0"], ["1"]], "decode": [["2"], ["3"]]}
    [row] = lab.wait_accounted(seen["jobs"][0]["id"], "COMPLETED")
    assert {event["node"] for event in started} == {row["NodeList"]} == {"prefill1"}


def test_a_trainer_and_two_engines_use_two_gpus_in_turns(lab: Lab, campaigns: Path) -> None:
    """No node has more than two GPUs to give, by the site file."""
    two = [
        words for name in ("prefill", "decode", "train") for words in ("-s", f"site.partitions.{name}.gpus_per_node=2")
    ]
    hpcrl("submit", "quickstart", "--site", "lab", "--watch", "--name", "t", *SIMULATED, *TWO_AND_TWO, *two)
    campaign, seen = CampaignDir(campaigns / "t"), snapshot("t")
    assert seen["state"] == "done"
    started = events_of(campaign, "worker-started")
    gpus = {role: sorted(event["gpus"] for event in started if event["role"] == role) for role in ("train", "decode")}
    assert gpus == {"train": [["0"], ["1"]], "decode": [["0"], ["1"]]}
    assert {shift.role for shift in list_shifts(campaign)} == {"train", "decode"}
    assert find_overlaps(campaign) == []
    lab.wait_accounted(seen["jobs"][0]["id"], "COMPLETED")
