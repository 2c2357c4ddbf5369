"""Campaigns whose components are separate jobs, on a real Slurm: they meet, wait for each other, and end together."""

from pathlib import Path

import pytest

from hpcrl.campaign_dir.paths import CampaignDir
from tests.support.campaigns import events_of, hpcrl, outcome, snapshot, steps, until
from tests.support.lab_campaigns import await_clean_nodes, kill_guardian_first, list_saved_steps, start
from tests.support.lab_tools import Lab

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(600)]

SEPARATE = ("-s", "job.layout=multi-job")


def list_component_ids(campaign: CampaignDir, *, job: int = 0) -> list[str]:
    return campaign.job(job).component_jobs.read_text().split()


def list_queue(lab: Lab) -> dict[str, str]:
    """Return the state of each job in the queue."""
    rows = lab.run("squeue", "-h", "-o", "%A %T").splitlines()
    return dict(row.split() for row in rows)


def test_separate_jobs_train_together_and_the_next_ones_continue_when_one_is_cancelled(
    lab: Lab, campaigns: Path
) -> None:
    campaign, first = start(campaigns, "s", *SEPARATE, "-s", "job.num_jobs=2")
    ids = list_component_ids(campaign)
    assert [event["layout"] for event in events_of(campaign, "layout")] == ["multi-job"]
    parts = {component["partition"]: component for component in snapshot("s")["jobs"][0]["components"]}
    assert {name: part["nodes"] for name, part in parts.items()} == {
        "env": ["env1"],
        "prefill": ["prefill1"],
        "decode": ["decode1"],
        "train": ["train1"],
    }
    assert {part["state"] for part in parts.values()} == {"running"}
    until(lambda: len(events_of(campaign, "courier")) > 1, what="versions are sent from job to job")
    assert [event["transport"] for event in events_of(campaign, "transport")] == ["files", "tcp"]
    until(campaign.job(1).submission.exists, what="the next jobs are queued")
    states = list_queue(lab)
    assert [states[id] for id in (first, *ids)] == ["RUNNING"] * 4
    assert [states[id] for id in list_component_ids(campaign, job=1)] == ["PENDING"] * 3
    made = len(steps(campaign))
    lab.run("scancel", ids[1])
    end = outcome(campaign)
    assert (end["outcome"], end["cause"]) == ("drained", "cancellation")
    assert list_saved_steps(campaign)[-1] >= made
    until(lambda: any(step["job"] == 1 for step in steps(campaign)), what="the next jobs make steps")
    numbers = [step["step"] for step in steps(campaign)]
    assert numbers == sorted(set(numbers)), "no step was lost or made twice"
    [row] = lab.wait_accounted(ids[2], "COMPLETED")
    assert row["NodeList"] == "train1"
    hpcrl("stop", "s", "--now")
    until(lambda: list_queue(lab) == {}, what="all jobs have ended", timeout_s=60)


def test_what_starts_first_waits_for_the_others_and_is_stopped_while_it_waits(
    lab: Lab, campaigns: Path, tmp_path: Path
) -> None:
    hog = lab.submit(tmp_path, "sleep 600", "--partition=decode", "--nodes=2", "--exclusive")
    lab.wait_state(hog, "RUNNING")
    hpcrl("submit", "quickstart", "--site", "lab", "--name", "w", *SEPARATE)
    campaign = CampaignDir(campaigns / "w")
    _, decode, train = list_component_ids(campaign)
    until(campaign.job(0).component_lease(3).exists, what="the trainer's job has its node")
    [job] = snapshot("w")["jobs"]
    states = list_queue(lab)
    assert (states[decode], states[train], states[job["id"]]) == ("PENDING", "RUNNING", "PENDING")
    assert job["state"] == "queued", "the driver's job starts last"
    assert job["reason"].startswith("waiting for nodes (decode: ")
    assert [part["state"] for part in job["components"]] == ["queued", "running", "queued", "running"]
    hpcrl("stop", "w")
    until(lambda: list(list_queue(lab)) == [hog], what="the jobs of the campaign have ended", timeout_s=60)

    hpcrl("submit", "quickstart", "--site", "lab", "--name", "x", *SEPARATE)
    other = CampaignDir(campaigns / "x")
    until(other.job(0).component_lease(3).exists, what="the trainer's job has its node")
    lab.run("scancel", hog)
    until(lambda: bool(steps(other)), what="steps are made")
    hpcrl("stop", "x", "--now")
    until(lambda: list_queue(lab) == {}, what="all jobs have ended", timeout_s=60)


def test_jobs_of_components_end_by_themselves_when_the_driver_and_its_guardian_were_killed(
    lab: Lab, campaigns: Path
) -> None:
    campaign, _ = start(campaigns, "k", *SEPARATE)
    kill_guardian_first(campaign)
    until(lambda: list_queue(lab) == {}, what="all jobs have ended", timeout_s=120)
    await_clean_nodes(lab, campaign)  # steps in the jobs of components go on until those end
    assert not campaign.job(0).list_leases()


def test_a_checkpoint_is_saved_when_the_job_of_the_driver_is_cancelled(lab: Lab, campaigns: Path) -> None:
    campaign, first = start(campaigns, "c", *SEPARATE)
    made = len(steps(campaign))
    lab.run("scancel", first)
    end = outcome(campaign)
    assert (end["outcome"], end["cause"]) == ("drained", "cancellation")
    assert list_saved_steps(campaign)[-1] >= made
    until(lambda: list_queue(lab) == {}, what="all jobs have ended", timeout_s=60)


def test_jobs_queued_ahead_continue_after_a_preemption_of_one_and_the_stopped_campaign_is_resumed(
    lab: Lab, campaigns: Path
) -> None:
    ahead = ("-s", "site.nodes_may_submit=false", "-s", "job.num_jobs=2", "-s", "resources.prefill.num_workers=0")
    campaign, _ = start(campaigns, "p", *SEPARATE, *ahead, "-s", "site.partitions.prefill.slurm_partition=spare")
    assert campaign.job_numbers() == [0, 1], "the login node has queued them all"
    ids, made = list_component_ids(campaign), len(steps(campaign))
    node = lab.run("squeue", "-h", "-j", ids[-1], "-o", "%N")
    lab.run("sbatch", "-p", node.rstrip("012"), "-w", node, "--exclusive", "--mem=0", "-o/dev/null", "--wrap=true")
    end = outcome(campaign)
    assert (end["outcome"], end["cause"]) == ("drained", "preemption")
    assert list_saved_steps(campaign)[-1] >= made
    await_steps(campaign, job=1)
    numbers = [step["step"] for step in steps(campaign)]
    assert numbers == sorted(set(numbers)), "no step was lost or made twice"
    assert not set(ids) & set(list_queue(lab)), "the one that Slurm has queued again was cancelled"
    hpcrl("stop", "p")
    assert outcome(campaign, 1)["outcome"] == "stopped"
    until(lambda: list_queue(lab) == {}, what="all jobs have ended", timeout_s=60)
    hpcrl("resume", "p")
    assert campaign.job_numbers() == [0, 1, 2, 3], "with those that may follow it"
    await_steps(campaign, job=2)
    hpcrl("stop", "p", "--now")
    until(lambda: list_queue(lab) == {}, what="all jobs have ended", timeout_s=60)


def await_steps(campaign: CampaignDir, *, job: int) -> None:
    until(lambda: any(step["job"] == job for step in steps(campaign)), what=f"job {job} makes steps")
