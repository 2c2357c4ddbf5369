"""Campaigns on a lab that are ended in some way."""

import contextlib
import json
import sys
from pathlib import Path

import psutil

from hpcrl.campaign_dir.paths import CampaignDir
from hpcrl.lab import outages
from tests.support.campaigns import CALM, SIMULATED, events_of, hpcrl, snapshot, steps, until
from tests.support.lab_tools import Lab

ENDLESS = (*CALM, "-s", "train.num_steps=100000", "-s", "train.checkpoint_every_steps=100000")
"""A campaign that makes a checkpoint only when it drains."""

PREEMPTIBLE = ("-s", "site.partitions.h100.slurm_partition=spare", "-s", "job.layout=hetstep")
"""A campaign of the site lab-hetstep whose nodes a job of the partition h100 may take: Slurm preempts a heterogeneous
job only if it may preempt all its components."""


def start(campaigns: Path, name: str, *settings: str, site: str = "lab") -> tuple[CampaignDir, str]:
    """Submit a campaign and wait for its first steps; return it with the id of its job."""
    hpcrl("submit", "quickstart", "--site", site, "--name", name, *SIMULATED, *ENDLESS, *settings)
    campaign = CampaignDir(campaigns / name)
    until(lambda: len(steps(campaign)) > 2, what="steps are made")
    return campaign, snapshot(name)["jobs"][0]["id"]


def list_saved_steps(campaign: CampaignDir) -> list[int]:
    return [event["step"] for event in events_of(campaign, "checkpoint")]


def find_batch_processes(campaign: CampaignDir) -> list[psutil.Process]:
    """Return the guardian and the driver of the first job."""
    mark = ["hpcrl.job.driver", str(campaign.root), "0"]
    found = [one for one in psutil.process_iter(["cmdline"]) if (one.info["cmdline"] or [])[-3:] == mark]
    return sorted(found, key=lambda one: one.ppid() in {other.pid for other in found})


def await_end(lab: Lab, campaign: CampaignDir) -> str:
    """Wait until Slurm has ended the first job; return its state in the accounting."""
    id = json.loads(campaign.job(0).submission.read_text())["id"]
    until(lambda: id not in lab.run("squeue", "-h", "-o", "%A"), what="the job has left the queue", timeout_s=60)
    states = ["RUNNING"]  # accounting lags behind the queue

    def is_accounted() -> bool:
        states.append(lab.accounted(id)[0]["State"].split()[0])
        return states[-1] != "RUNNING"

    until(is_accounted, what="the end of the job is accounted", timeout_s=60)
    return states[-1]


def kill_batch_processes(lab: Lab, campaign: CampaignDir) -> None:
    """Kill the guardian and the driver of the first job, and wait until the nodes are free and clean."""
    kill_guardian_first(campaign)
    await_end(lab, campaign)
    await_clean_nodes(lab, campaign)


def kill_guardian_first(campaign: CampaignDir) -> None:
    """Kill the guardian and the driver of the first job."""
    guardian, driver = find_batch_processes(campaign)
    driver.suspend()  # it must not end anything
    guardian.kill()
    driver.wait(60)


def await_clean_nodes(lab: Lab, campaign: CampaignDir) -> None:
    """Wait until no node keeps shared memory of a job whose guardian and driver were killed.

    A step cleans up after SIGTERM. At times one gets none: an srun that is killed with the batch script has another
    process, which kills its step if it is faster than Slurm. Then the next step on the node cleans up.
    """
    with contextlib.suppress(AssertionError):
        until(lambda: lab.list_shared_memory() == {}, what="steps without a driver clean up", timeout_s=20)
    for node in lab.list_shared_memory():
        clean = (sys.executable, "-m", "hpcrl.job.step", str(campaign.job(0).root))
        lab.run("srun", "-p", node.rstrip("0123456789"), "-w", node, *clean)
    assert lab.list_shared_memory() == {}


def list_faults(campaign: CampaignDir) -> list[str]:
    return [event["detail"] for event in events_of(campaign, "fault")]


def lose(lab: Lab, node: str) -> None:
    """Kill the node's daemon and everything it has started, and inform Slurm, which notices only after a minute."""
    outages.break_part(lab.state_dir, node)
    lab.run("scontrol", "update", f"nodename={node}", "state=down", "reason=test")
