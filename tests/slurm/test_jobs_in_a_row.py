"""Campaigns that continue in job after job on a real Slurm, without a user."""

import contextlib
import signal
from pathlib import Path

import psutil
import pytest

from hpcrl.campaign_dir.paths import CampaignDir
from tests.support.campaigns import CALM, SIMULATED, events_of, hpcrl, outcome, snapshot, steps, until
from tests.support.lab_tools import Lab

pytestmark = [pytest.mark.slurm, pytest.mark.mpi, pytest.mark.timeout(900)]


def has_stepped(campaign: CampaignDir, *, job: int) -> bool:
    """True once a step was made in this job."""
    return any(step["job"] == job for step in steps(campaign))


def follower(campaign: CampaignDir, *, job: int) -> str:
    """Return the Slurm id of the job that waits for this one, once it is queued."""

    def queued() -> list[str]:
        return [e["slurm_id"] for e in events_of(campaign, "follower") if e["number"] == job + 1]

    until(lambda: bool(queued()), what=f"a job follows job {job}")
    return queued()[0]


def kill_driver(campaign: CampaignDir, *, job: int) -> None:
    """Kill the batch script's process and its child: no process is left to record how the job ended."""
    mark = ["hpcrl.job.driver", str(campaign.root), str(job)]
    for process in psutil.process_iter(["cmdline"]):
        if (process.info["cmdline"] or [])[-3:] == mark:
            with contextlib.suppress(psutil.NoSuchProcess):  # the child ends with its parent
                process.send_signal(signal.SIGKILL)


def test_a_campaign_continues_after_its_walltime_and_after_a_kill(lab: Lab, campaigns: Path) -> None:
    endless = (*CALM, "-s", "train.num_steps=100000", "-s", "train.checkpoint_every_steps=1", "-s", "job.num_jobs=3")
    hpcrl("submit", "quickstart", "--site", "lab", "--name", "n", *SIMULATED, *endless)
    campaign = CampaignDir(campaigns / "n")
    second = follower(campaign, job=0)
    until(lambda: has_stepped(campaign, job=0), what="the first job makes steps")
    seen = snapshot("n")
    until(lambda: len(snapshot("n")["jobs"]) == 3, what="the job after the next is queued too")
    seen = snapshot("n")
    assert (seen["state"], [job["state"] for job in seen["jobs"]]) == ("running", ["running", "queued", "queued"])
    assert seen["jobs"][1]["id"] == second
    lab.run("scancel", "--batch", "--signal=USR2", seen["jobs"][0]["id"])  # as Slurm does when the time is nearly over
    assert outcome(campaign, 0)["outcome"] == "drained"
    third = follower(campaign, job=1)
    until(lambda: has_stepped(campaign, job=1), what="the second job makes steps")
    made = [step["step"] for step in steps(campaign)]
    assert made == sorted(set(made)), "no step was lost or made twice"
    kill_driver(campaign, job=1)
    until(lambda: has_stepped(campaign, job=2), what="the third job makes steps")
    assert not campaign.job(1).outcome.exists()
    assert snapshot("n")["jobs"][2]["id"] == third
    hpcrl("stop", "n")
    assert outcome(campaign, 2)["outcome"] == "stopped"
    assert campaign.job_numbers() == [0, 1, 2], "three in a row"
    states = [job["state"] for job in snapshot("n")["jobs"]]
    assert states == ["drained", "failed", "stopped"]


def test_a_campaign_continues_though_its_next_job_never_has_a_driver(lab: Lab, campaigns: Path) -> None:
    endless = (*CALM, "-s", "train.num_steps=100000", "-s", "train.checkpoint_every_steps=1", "-s", "job.num_jobs=3")
    hpcrl("submit", "quickstart", "--site", "lab", "--name", "o", *SIMULATED, *endless)
    campaign = CampaignDir(campaigns / "o")
    second, third = follower(campaign, job=0), follower(campaign, job=1)
    until(lambda: has_stepped(campaign, job=0), what="the first job makes steps")
    lab.run("scancel", second)  # as little is left of one whose node cannot run it
    lab.run("scancel", "--batch", "--signal=USR2", snapshot("o")["jobs"][0]["id"])
    until(lambda: has_stepped(campaign, job=2), what="the third job makes steps")
    assert snapshot("o")["jobs"][2]["id"] == third
    hpcrl("stop", "o")
    assert outcome(campaign, 2)["outcome"] == "stopped"


def test_a_campaign_that_runs_gets_more_steps_in_jobs_that_wait_from_the_start(lab: Lab, campaigns: Path) -> None:
    settings = ("train.num_steps=20", "job.num_jobs=3", "site.nodes_may_submit=false")
    options = [option for setting in settings for option in ("-s", setting)]
    hpcrl("submit", "quickstart", "--site", "lab", "--name", "x", *SIMULATED, *options)
    campaign = CampaignDir(campaigns / "x")
    assert campaign.job_numbers() == [0, 1, 2], "the login node has queued them all"
    until(lambda: has_stepped(campaign, job=0), what="the first job makes steps")
    assert "up to step 23" in hpcrl("extend", "x", "--steps", "23").stdout
    assert outcome(campaign, 0)["outcome"] == "done"
    assert outcome(campaign, 1)["outcome"] == "done"
    made = [(step["job"], step["step"]) for step in steps(campaign)]
    assert made == [*((0, step) for step in range(1, 21)), (1, 21), (1, 22), (1, 23)]
    until(lambda: campaign.job_numbers() == [0, 1], what="the job that is not needed is cancelled")
    assert snapshot("x")["state"] == "done"
    refused = hpcrl("resume", "x", check=False)
    assert (refused.returncode, "hpcrl extend x --steps N" in refused.stderr) == (2, True)
    hpcrl("resume", "x", "-s", "train.num_steps=24", "-s", "job.walltime_min=7")
    assert outcome(campaign, 2)["outcome"] == "done"
    assert steps(campaign)[-1]["step"] == 24
