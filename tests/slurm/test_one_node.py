"""Small jobs on the lab: one or two nodes whose GPUs the trainer and the engines share, four or two."""

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


@pytest.mark.parametrize("sharding", ["none", "full"])
def test_a_trainer_and_engines_share_two_nodes(lab: Lab, campaigns: Path, sharding: str) -> None:
    more = ("-s", "resources.train.num_workers=4", "-s", "resources.decode.num_workers=4")
    settings = (*TWO_AND_TWO, *more, "-s", f"train.sharding={sharding}")
    hpcrl("submit", "quickstart", "--site", "lab", "--watch", "--name", "m", *SIMULATED, *settings)
    campaign, seen = CampaignDir(campaigns / "m"), snapshot("m")
    assert seen["state"] == "done"
    assert [event["transport"] for event in events_of(campaign, "transport")] == ["files"]
    started = events_of(campaign, "worker-started")
    for role, gpus in {"train": ["0", "1"], "decode": ["2", "3"]}.items():
        places = sorted((event["node"], *event["gpus"]) for event in started if event["role"] == role)
        assert places == [(node, gpu) for node in ("prefill1", "prefill2") for gpu in gpus]
    loaded = {event["node"]: event["version"] for event in events_of(campaign, "loaded")}
    last = max(event["version"] for event in events_of(campaign, "published"))
    assert set(loaded) == {"prefill1", "prefill2"}
    assert min(loaded.values()) > last / 2, "engines of both nodes follow the weights"


@pytest.mark.parametrize("mode", ["async", "sync"])
def test_a_trainer_and_two_engines_use_two_gpus_in_turns(lab: Lab, campaigns: Path, mode: str) -> None:
    """By the site file no partition has more than one node to give, with two GPUs."""
    limits = [
        f"site.partitions.{name}.{limit}"
        for name in ("prefill", "decode", "train")
        for limit in ("gpus_per_node=2", "max_nodes=1")
    ]
    two = [word for limit in limits for word in ("-s", limit)]
    mode_words = ("-s", f"rollout.mode={mode}")
    hpcrl(
        "submit", "quickstart", "--site", "lab", "--watch", "--name", "t", *SIMULATED, *TWO_AND_TWO, *two, *mode_words
    )
    campaign, seen = CampaignDir(campaigns / "t"), snapshot("t")
    assert seen["state"] == "done"
    started = events_of(campaign, "worker-started")
    gpus = {role: sorted(event["gpus"] for event in started if event["role"] == role) for role in ("train", "decode")}
    assert gpus == {"train": [["0"], ["1"]], "decode": [["0"], ["1"]]}
    assert {shift.role for shift in list_shifts(campaign)} == {"train", "decode"}
    assert find_overlaps(campaign) == []
    lab.wait_accounted(seen["jobs"][0]["id"], "COMPLETED")
