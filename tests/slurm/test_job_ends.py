"""Every way in which Slurm ends a job: a checkpoint follows, the outcome names what happened, no node keeps memory."""

import json
import os
import signal
from pathlib import Path

import psutil
import pytest

from tests.support.campaigns import outcome, steps, until
from tests.support.lab_campaigns import (
    PREEMPTIBLE,
    await_end,
    find_batch_processes,
    kill_batch_processes,
    list_saved_steps,
    start,
)
from tests.support.lab_tools import Lab
from tests.support.report_pages import check_reports, write_report

pytestmark = [
    *(pytest.mark.slurm, pytest.mark.mpi, pytest.mark.timeout(600)),
    pytest.mark.skipif(os.geteuid() != 0, reason="a strict lab needs root"),
]


def test_a_cancelled_job_saves_its_last_step(lab: Lab, campaigns: Path) -> None:
    campaign, id = start(campaigns, "c")
    lab.run("scancel", id)
    assert await_end(lab, campaign) == "CANCELLED"
    assert (outcome(campaign)["outcome"], outcome(campaign)["cause"]) == ("drained", "cancellation")
    assert list_saved_steps(campaign) == [steps(campaign)[-1]["step"]]
    assert lab.list_shared_memory() == {}


def test_a_job_that_is_preempted_with_a_grace_time_uses_it_for_a_checkpoint(lab: Lab, campaigns: Path) -> None:
    campaign, _ = start(campaigns, "p", *PREEMPTIBLE, site="lab-hetstep")
    taker = lab.run("sbatch", "--parsable", "-p", "h100", "-N4", "--exclusive", "--mem=0", "-o/dev/null", "--wrap=true")
    assert await_end(lab, campaign) in ("PREEMPTED", "COMPLETED"), "it may end within the grace time"
    assert (outcome(campaign)["outcome"], outcome(campaign)["cause"]) == ("drained", "preemption")
    assert campaign.job(0).terminated.read_text(), "Slurm sent SIGTERM to the steps, before the batch script got one"
    assert list_saved_steps(campaign) == [steps(campaign)[-1]["step"]]
    assert lab.list_shared_memory() == {}
    lab.wait_accounted(taker, "COMPLETED")


def test_a_chain_of_jobs_whose_walltime_ends_loses_no_step_and_leaves_no_memory(lab: Lab, campaigns: Path) -> None:
    walltime = ("-s", "job.walltime_min=2", "-s", "job.drain_s=50", "-s", "job.num_jobs=2")
    campaign, _ = start(campaigns, "w", *walltime)
    assert lab.list_shared_memory() != {}, "windows of weights"
    lab.run("scontrol", "update", "PartitionName=decode", "State=DOWN")  # the next job waits
    try:
        assert (outcome(campaign, 0)["outcome"], outcome(campaign, 0)["cause"]) == ("drained", "walltime")
        assert "walltime" in outcome(campaign, 0)["reason"]
        await_end(lab, campaign)
        assert lab.list_shared_memory() == {}
        saved = list_saved_steps(campaign)
    finally:
        lab.run("scontrol", "update", "PartitionName=decode", "State=UP")
    until(lambda: any(step["job"] == 1 for step in steps(campaign)), what="the next job makes steps")
    made = [step["step"] for step in steps(campaign)]
    assert made == list(range(1, len(made) + 1)), "no step was lost or made twice"
    assert saved == [max(step["step"] for step in steps(campaign) if step["job"] == 0)]


def test_nodes_are_left_clean_if_no_process_of_the_batch_step_is_left(lab: Lab, campaigns: Path) -> None:
    campaign, _ = start(campaigns, "k")
    kill_batch_processes(lab, campaign)
    assert not campaign.job(0).outcome.exists()


def test_the_nodes_of_a_driver_that_hangs_are_freed_and_a_queued_job_can_be_changed_to_avoid_nodes(
    lab: Lab, campaigns: Path
) -> None:
    campaign, id = start(campaigns, "h", "-s", "job.num_jobs=2")
    following = json.loads(campaign.job(1).submission.read_text())["id"]
    for index in (0, 2):
        lab.run("scontrol", "update", f"JobId={following}+{index}", f"ExcNodeList=env{index + 1}")
    queued = lab.run("scontrol", "show", "job", following).split()
    excluded = [word.partition("=")[2] for word in queued if word.startswith("ExcNodeList=")]
    assert excluded == ["env1", "(null)", "env3", "(null)"], "of each component alone"
    (_, driver) = find_batch_processes(campaign)
    driver.send_signal(signal.SIGSTOP)
    until(lambda: id not in lab.run("squeue", "-h", "-t", "running,completing", "-o", "%A"), what="the job has ended")
    assert outcome(campaign)["cause"] == "infrastructure"
    assert "the driver has stood still" in outcome(campaign)["reason"]
    assert "in _supervise" in campaign.job(0).log("batch").read_text(), "the stacks of the driver"
    assert "Thread" in campaign.job(0).log("env-0").read_text(), "the stacks of workers"
    assert lab.list_shared_memory() == {}
    assert lab.run("squeue", "-h", "-j", following, "-o", "%A") == "", "a checkpoint to continue from is missing"


def test_a_node_whose_steps_were_killed_is_swept_after_a_crash_of_the_driver_and_reports_before_and_after_are_drawn(
    lab: Lab, campaigns: Path, tmp_path: Path
) -> None:
    campaign, _ = start(campaigns, "s")
    running = write_report("s", tmp_path / "running.html")
    (_, driver) = find_batch_processes(campaign)
    driver.suspend()  # it must not start the steps again
    for process in psutil.process_iter(["cmdline"]):
        is_step = {"hpcrl.job.step", str(campaign.job(0).root)} <= set(process.info["cmdline"] or [])
        if is_step and process.environ().get("SLURMD_NODENAME") == "decode1":
            process.kill()
    driver.kill()
    await_end(lab, campaign)
    assert outcome(campaign)["cause"] == "infrastructure"
    assert lab.list_shared_memory() == {}
    check_reports({"Running:": running, "Failed": write_report("s", tmp_path / "crashed.html")})
