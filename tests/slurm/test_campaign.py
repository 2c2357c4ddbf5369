"""The whole campaign as a heterogeneous job on a real Slurm: every role on its own partition, nothing left behind."""

import json
from pathlib import Path

import pytest

from hpcrl.campaign_dir.paths import CampaignDir
from tests.support.campaigns import SIMULATED, events_of, hpcrl, outcome, snapshot, steps, until
from tests.support.doc_blocks import TUTORIAL, follow_page
from tests.support.lab_tools import Lab
from tests.support.report_pages import check_reports, write_report

pytestmark = [pytest.mark.slurm, pytest.mark.mpi, pytest.mark.timeout(600)]


def states(lab: Lab, job_id: str) -> dict[str, str]:
    """Return the state of every component in the accounting, by its partition."""
    rows = lab.run("sacct", "-n", "-P", "-X", "-j", job_id, "--format=Partition,State").splitlines()
    return dict(row.split("|") for row in rows)


def cores_of(lab: Lab, job_id: str) -> dict[str, set[int]]:
    """Return the numbers of cores that each component, and each step on it, had in the accounting."""
    rows = [row.split("|") for row in lab.run("sacct", "-n", "-P", "-j", job_id, "--format=JobID,AllocCPUS").split()]
    found: dict[str, set[int]] = {}
    for id, num in rows:
        found.setdefault(id.partition(".")[0], set()).add(int(num))
    return found


def test_the_lab_of_the_tutorial_gives_what_it_shows_on_separate_partitions_with_weights_by_mpi(
    lab: Lab, campaigns: Path, tmp_path: Path
) -> None:
    """The report of a finished campaign, in a browser; of one that runs and of one that crashed: test_job_ends.py."""
    assert follow_page(TUTORIAL / "lab.md", lambda words: hpcrl(*words).stdout) == 4
    campaign = CampaignDir(campaigns / "lab-1")
    seen = snapshot("lab-1")
    assert seen["state"] == "done"
    assert len(seen["jobs"][0]["components"]) == 4
    assert sum(seen["reward_mean"][-3:]) / 3 > sum(seen["reward_mean"][:3]) / 3 + 0.3
    where = {event["role"]: event["node"].rstrip("0123456789") for event in events_of(campaign, "worker-started")}
    assert where.pop("reward", "env") == "env", "env workers score nearly all: a reward worker may find nothing to do"
    assert where == {"env": "env", "prefill": "prefill", "decode": "decode", "train": "train"}
    expected = dict.fromkeys(("env", "prefill", "decode", "train"), "COMPLETED")
    until(lambda: states(lab, seen["jobs"][0]["id"]) == expected, what="sacct shows every component COMPLETED")
    num_cores = cores_of(lab, seen["jobs"][0]["id"])
    assert len(num_cores) == 4
    assert all(len(nums) == 1 for nums in num_cores.values()), "steps overlap: with fewer cores each has the first ones"
    assert [event["transport"] for event in events_of(campaign, "transport")] == ["files", "mpi"]
    carried = events_of(campaign, "courier")
    assert {(event["node"], *event["to"]) for event in carried} == {("train1", "prefill1", "decode1")}
    assert all(event["bytes"] > 0 and event["wall_s"] > 0 for event in carried)
    assert {event["node"] for event in events_of(campaign, "loaded")} == {"prefill1", "decode1"}
    assert lab.list_shared_memory() == {}
    check_reports({"Done": write_report("lab-1", tmp_path / "finished.html")})
    hpcrl("extend", "lab-1", "--steps", "44")
    assert outcome(campaign, 1)["outcome"] == "done"
    assert [step["step"] for step in steps(campaign)] == list(range(1, 45)), "job 1 starts from step 40"


def test_the_first_gpu_node_of_the_tutorial_is_described_and_planned_as_shown(in_lab: Lab, home: Path) -> None:
    assert follow_page(TUTORIAL / "gpu-node.md", lambda words: hpcrl(*words).stdout) == 3


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


def test_a_cluster_that_was_just_described_runs_the_quickstart_stored_elsewhere_and_by_files_where_it_has_no_couriers(
    in_lab: Lab, campaigns: Path, tmp_path: Path
) -> None:
    hpcrl("site", "new", "mine", "--detect")
    elsewhere = tmp_path / 'my "scratch" space'
    elsewhere.mkdir()
    settings = (f"site.campaigns_dir={elsewhere}", "site.mpi.couriers=false", "job.num_jobs=2", "train.num_steps=3")
    settings += ("site.network.tls=true",)
    options = [option for setting in settings for option in ("-s", setting)]
    hpcrl("submit", "quickstart", "--site", "mine", "--watch", "--name", "e", *SIMULATED, *options)
    campaign = CampaignDir(campaigns / "e")
    assert (campaigns / "e").is_symlink()
    assert (elsewhere / "e" / "campaign.json").is_file()
    assert campaign.certificate.stat().st_mode & 0o777 == 0o600
    assert [event["transport"] for event in events_of(campaign, "transport")] == ["files"]
    nodes = {event["role"]: event["node"] for event in events_of(campaign, "worker-started")}
    assert {event["node"] for event in events_of(campaign, "loaded")} == {nodes["prefill"], nodes["decode"]}
    assert nodes["train"] not in {nodes["prefill"], nodes["decode"]}
    assert events_of(campaign, "follower"), "a second job was queued"
    until(lambda: in_lab.run("squeue", "-h") == "", what="it does not wait behind a campaign that is done")
    seen = snapshot("e")
    assert (seen["state"], seen["step"], campaign.job_numbers()) == ("done", 3, [0])
    assert {component["partition"] for component in seen["jobs"][0]["components"]} == {"env", "decode", "h100"}
