"""The whole campaign as a heterogeneous job on a real Slurm: every role on its own partition, nothing left behind."""

import json
from pathlib import Path

import pytest

from hpcrl.campaign_dir.event_log import read_events
from hpcrl.campaign_dir.paths import CampaignDir
from tests.support.campaigns import SMALL, hpcrl, outcome, processes_of, snapshot, steps, until
from tests.support.lab_tools import Lab

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(600)]


def states(lab: Lab, job_id: str) -> dict[str, str]:
    """Return the state of every component in the accounting, by its partition."""
    rows = lab.run("sacct", "-n", "-P", "-X", "-j", job_id, "--format=Partition,State").splitlines()
    return dict(row.split("|") for row in rows)


def test_the_quickstart_learns_on_separate_partitions(lab: Lab, campaigns: Path) -> None:
    hpcrl("submit", "quickstart", "--site", "lab", "--watch", "--name", "q")
    run = CampaignDir(campaigns / "q")
    seen = snapshot("q")
    assert seen["state"] == "done"
    assert len(seen["jobs"][0]["components"]) == 4
    assert sum(seen["reward_mean"][-3:]) / 3 > sum(seen["reward_mean"][:3]) / 3 + 0.3
    where = {e["role"]: e["node"] for e in read_events(run.events) if e["event"] == "worker-started"}
    partitions = {"env": "env", "prefill": "prefill", "decode": "decode", "train": "train", "reward": "env"}
    assert {role: node.rstrip("0123456789") for role, node in where.items()} == partitions
    expected = dict.fromkeys(("env", "prefill", "decode", "train"), "COMPLETED")
    until(lambda: states(lab, seen["jobs"][0]["id"]) == expected, what="sacct shows every component COMPLETED")


def test_a_stopped_job_checkpoints_and_the_campaign_resumes_in_a_new_one(lab: Lab, campaigns: Path) -> None:
    hpcrl("submit", "quickstart", "--site", "lab", "--name", "s", *SMALL, "-s", "train.num_steps=30")
    run = CampaignDir(campaigns / "s")
    until(lambda: len(steps(run)) >= 1, what="a step was made")
    hpcrl("stop", "s")
    assert outcome(run)["outcome"] == "stopped"
    hpcrl("resume", "s", "--watch")
    seen = snapshot("s")
    assert (seen["state"], seen["step"], len(seen["jobs"])) == ("done", 30, 2)
    made = [step["step"] for step in steps(run)]
    assert made == sorted(set(made)), "no step was lost or made twice"


def test_a_waiting_job_is_queued_and_can_be_cancelled(lab: Lab, campaigns: Path) -> None:
    lab.run("scontrol", "update", "PartitionName=decode", "State=DOWN")
    try:
        hpcrl("submit", "quickstart", "--site", "lab", "--name", "w")
        assert snapshot("w")["state"] == "queued"
        listed = json.loads(hpcrl("ls", "--json").stdout)
        assert [(entry["name"], entry["site"], entry["state"]) for entry in listed] == [("w", "lab", "queued")]
        assert "cancelled" in hpcrl("stop", "w").stdout
        assert snapshot("w")["state"] == "stopped"
    finally:
        lab.run("scontrol", "update", "PartitionName=decode", "State=UP")


def test_a_cancelled_job_leaves_nothing_on_any_node(lab: Lab, campaigns: Path, home: Path) -> None:
    hpcrl("submit", "quickstart", "--site", "lab", "--name", "c", *SMALL, "-s", "train.num_steps=1000")
    run = CampaignDir(campaigns / "c")
    until(lambda: len(steps(run)) >= 1, what="a step was made")
    hpcrl("stop", "c", "--now")
    until(lambda: not processes_of(home), what="no process is left", timeout_s=60)
    assert snapshot("c")["state"] == "stopped"


def test_a_dry_run_asks_slurm_and_queues_nothing(lab: Lab, campaigns: Path) -> None:
    printed = hpcrl("submit", "quickstart", "--site", "lab", "--dry-run").stdout
    assert "to start at" in printed
    assert lab.run("squeue", "-h") == ""
    assert list(campaigns.iterdir()) == []


def test_a_refused_job_leaves_nothing_behind(lab: Lab, campaigns: Path) -> None:
    wrong = ("-s", "site.partitions.decode.slurm_partition=nowhere")
    refused = hpcrl("submit", "quickstart", "--site", "lab", *wrong, check=False)
    assert refused.returncode == 2
    assert "Slurm refused: " in refused.stderr
    assert "partition" in refused.stderr
    assert len(refused.stderr.splitlines()) == 1
    assert list(campaigns.iterdir()) == []


def test_a_campaign_is_stored_where_the_site_sets_it_and_is_found_by_name(
    lab: Lab, campaigns: Path, tmp_path: Path
) -> None:
    elsewhere = tmp_path / 'my "scratch" space'
    elsewhere.mkdir()
    hpcrl(
        "submit",
        "quickstart",
        "--site",
        "lab",
        "--watch",
        "--name",
        "e",
        *SMALL,
        "-s",
        f"site.campaigns_dir={elsewhere}",
    )
    assert (campaigns / "e").is_symlink()
    assert snapshot("e")["state"] == "done"
    assert (elsewhere / "e" / "campaign.json").is_file()
