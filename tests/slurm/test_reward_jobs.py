"""The reward jobs on a real Slurm: they run while there is work and end after it, and nothing is lost with one."""

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from hpcrl.campaign_dir.paths import CampaignDir
from hpcrl.spool.listing import SegmentListing
from hpcrl.system.processes import read_start_ticks
from tests.support.campaigns import SIMULATED, events_of, hpcrl, outcome, processes_of, snapshot, steps, until
from tests.support.lab_tools import Lab

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(600)]

ELASTIC = (*SIMULATED, "-s", "reward.placement=elastic", "-s", "reward.idle_s=3", "-s", "reward.patience_s=300")
ENV_NODES = {"env1", "env2", "env3"}
NO_MPI = ("-s", "site.mpi.flavour=none")


def slow(seconds: float) -> tuple[str, ...]:
    """Return the settings of a reward that takes this long for each trajectory."""
    reward = "domains.lake.reward=tests.support.odd_rewards:after"
    return ("-s", reward, "-s", f"domains.lake.reward_options.seconds={seconds}")


@pytest.fixture
def our_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let campaigns find the rewards of the tests."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))


def reward_jobs(lab: Lab, *states: str) -> dict[str, str]:
    """Return the nodes of the jobs on the preemptible partition, by id; of all jobs, or of those in these states."""
    rows = [row.split("|") for row in lab.run("squeue", "-h", "-o", "%A|%T|%N", "--partition=preempt").splitlines()]
    return {id: node for id, state, node in rows if not states or state in states}


def ended(campaign: CampaignDir) -> str:
    """Return how the campaign's job ended; reward jobs start slowly on a busy machine."""
    until(campaign.job(0).outcome.exists, what="the job has ended", timeout_s=400)
    return str(outcome(campaign)["outcome"])


def is_scored(campaign: CampaignDir) -> Callable[[], bool]:
    """Return a check that every played segment has been scored."""
    spools = [SegmentListing(campaign.spool(name)) for name in ("rollouts", "scored")]
    return lambda: len({frozenset(spool.name_set()) for spool in spools}) == 1


def driver_of(campaign: CampaignDir, job: int = 0) -> int:
    """Return the driver's process."""
    mark = f"hpcrl.job.driver\0{campaign.root}\0{job}\0".encode()
    found = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit() and _is(entry, mark)]
    return max(found, key=lambda pid: (read_start_ticks(pid) or 0, pid))  # the guardian started before it


def _is(entry: Path, mark: bytes) -> bool:
    try:
        return (entry / "cmdline").read_bytes().endswith(mark)
    except OSError:
        return False


def test_a_segment_of_a_preempted_reward_job_is_still_scored_and_one_without_work_ends_while_the_campaign_continues(
    lab: Lab, campaigns: Path, our_code: None, tmp_path: Path
) -> None:
    settings = (*ELASTIC, *slow(0.1), "-s", "train.num_steps=100000", *NO_MPI)  # Slurm may preempt late
    hpcrl("submit", "quickstart", "--site", "lab", "--name", "i", *settings)
    campaign = CampaignDir(campaigns / "i")
    until(
        lambda: bool(events_of(campaign, "scored")) and bool(reward_jobs(lab, "RUNNING")),
        what="a reward job is at work",
    )
    preempt_reward_job(lab, tmp_path)
    num = len(events_of(campaign, "scored"))
    until(lambda: len(events_of(campaign, "scored")) > num + 2, what="segments are scored after that")
    trainer = [event for event in events_of(campaign, "worker-started") if event["role"] == "train"]
    os.kill(trainer[-1]["pid"], signal.SIGSTOP)  # nothing is consumed any more, so that in the end nothing is played
    try:
        until(is_scored(campaign), what="every segment is scored, those of the preempted job too")
        until(lambda: not reward_jobs(lab), what="no reward job is left", timeout_s=60)
        assert not campaign.job(0).outcome.exists()
        assert snapshot("i")["state"] == "running"
    finally:
        os.kill(trainer[-1]["pid"], signal.SIGCONT)
    num = len(steps(campaign))
    until(lambda: len(steps(campaign)) > num + 2, what="training continues, with a new reward job")
    hpcrl("stop", "--now", "i")
    until(lambda: not reward_jobs(lab), what="no reward job is left", timeout_s=60)
    faults = [fault["detail"] for fault in events_of(campaign, "fault") if fault["what"] == "reward"]
    assert all("loss of manager" in fault for fault in faults), "a segment was sent to a reward job that was ending"
    scored = [event["segment"] for event in events_of(campaign, "scored")]
    assert len(scored) == len(set(scored)), "a segment is scored once"
    made = [step["step"] for step in steps(campaign)]
    assert made == list(range(1, len(made) + 1))
    scored_on = {(event["partition"], event["node"]) for event in events_of(campaign, "scored")}
    assert {partition for partition, _ in scored_on} == {"preempt"}
    assert {node for _, node in scored_on} <= ENV_NODES
    assert [event["transport"] for event in events_of(campaign, "transport")][-1] == "tcp"
    assert any("the site has no MPI" in str(event["reason"]) for event in events_of(campaign, "transport"))


def preempt_reward_job(lab: Lab, folder: Path) -> None:
    """Let Slurm preempt a reward job; one that ends for another reason meanwhile is followed by another try."""
    until(lambda: _try_preemption(lab, folder), what="a reward job was preempted")


def _try_preemption(lab: Lab, folder: Path) -> bool:
    """Take the CPUs of the node of a reward job until it is gone; return whether Slurm preempted it."""
    running = reward_jobs(lab, "RUNNING")
    if not running:
        return False
    victim, node = next(iter(running.items()))
    rest = 16 - int(lab.run("squeue", "-h", "-o", "%C", "--partition=env", f"--nodelist={node}") or 0)
    greedy = ("--partition=env", f"--nodelist={node}", f"--cpus-per-task={rest}", "--mem=100M", "--time=5")
    taker = lab.submit(folder, "sleep 60", *greedy)
    try:
        until(lambda: victim not in reward_jobs(lab, "RUNNING", "PENDING"), what=f"the reward job {victim} has ended")
        return lab.accounted(victim, "-D")[0]["State"].startswith("PREEMPTED")
    finally:
        lab.run("scancel", taker)  # else it starts once the campaign has ended, and looks like a process of it


def test_a_killed_driver_leaves_no_reward_job_in_the_queue(
    lab: Lab, campaigns: Path, our_code: None, home: Path
) -> None:
    lab.run("scontrol", "update", "PartitionName=preempt", "State=DOWN")  # what is submitted there waits
    try:
        hpcrl("submit", "quickstart", "--site", "lab", "--name", "k", *ELASTIC, *slow(0.01))
        campaign = CampaignDir(campaigns / "k")
        until(lambda: bool(reward_jobs(lab, "PENDING")), what="a reward job waits")
        os.kill(driver_of(campaign), signal.SIGKILL)
        assert ended(campaign) == "failed"
        until(lambda: not reward_jobs(lab), what="it was taken out of the queue", timeout_s=60)
        until(lambda: not processes_of(home), what="no process is left", timeout_s=60)
    finally:
        lab.run("scontrol", "update", "PartitionName=preempt", "State=UP")
