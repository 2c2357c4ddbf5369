"""Campaigns that continue in job after job on a real Slurm, without a user."""

import signal
from pathlib import Path

import psutil
import pytest

from hpcrl.campaign_dir.paths import CampaignDir
from hpcrl.testing.event_lines import read_events
from tests.support.campaigns import SIMULATED, hpcrl, outcome, snapshot, steps, until
from tests.support.lab_tools import Lab

pytestmark = [pytest.mark.slurm, pytest.mark.mpi, pytest.mark.timeout(900)]


def has_stepped(run: CampaignDir, *, job: int) -> bool:
    """True once a step was made in this job."""
    return any(step["job"] == job for step in steps(run))


def follower(run: CampaignDir, *, job: int) -> str:
    """Return the Slurm id of the job that waits for this one, once it is queued."""

    def queued() -> list[str]:
        return [e["slurm_id"] for e in read_events(run.events) if e["event"] == "follower" and e["job"] == job]

    until(lambda: bool(queued()), what=f"a job follows job {job}")
    return queued()[0]


def kill_driver(run: CampaignDir, *, job: int) -> None:
    """Kill the batch script's process and its child: no process is left to record how the job ended."""
    mark = ["hpcrl.job.driver", str(run.root), str(job)]
    for process in psutil.process_iter(["cmdline"]):
        if (process.info["cmdline"] or [])[-3:] == mark:
            process.send_signal(signal.SIGKILL)


def test_a_campaign_continues_after_its_walltime_and_after_a_kill(lab: Lab, campaigns: Path) -> None:
    endless = ("-s", "train.num_steps=100000", "-s", "train.checkpoint_every_steps=1", "-s", "job.num_jobs=3")
    hpcrl("submit", "quickstart", "--site", "lab", "--name", "n", *SIMULATED, *endless)
    run = CampaignDir(campaigns / "n")
    second = follower(run, job=0)
    until(lambda: has_stepped(run, job=0), what="the first job makes steps")
    seen = snapshot("n")
    assert (seen["state"], [job["state"] for job in seen["jobs"]]) == ("running", ["running", "queued"])
    assert seen["jobs"][1]["id"] == second
    lab.run("scancel", "--batch", "--signal=USR2", seen["jobs"][0]["id"])  # as Slurm does when the time is nearly over
    assert outcome(run, 0)["outcome"] == "drained"
    third = follower(run, job=1)
    until(lambda: has_stepped(run, job=1), what="the second job makes steps")
    made = [step["step"] for step in steps(run)]
    assert made == sorted(set(made)), "no step was lost or made twice"
    kill_driver(run, job=1)
    until(lambda: has_stepped(run, job=2), what="the third job makes steps")
    assert not run.job(1).outcome.exists()
    assert snapshot("n")["jobs"][2]["id"] == third
    hpcrl("stop", "n")
    assert outcome(run, 2)["outcome"] == "stopped"
    assert run.job_numbers() == [0, 1, 2], "three in a row"
    states = [job["state"] for job in snapshot("n")["jobs"]]
    assert states == ["drained", "failed", "stopped"]
