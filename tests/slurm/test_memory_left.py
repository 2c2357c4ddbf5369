"""No node of a strict lab keeps shared memory of a job, however it has ended; test_job_ends.py has the other ends."""

import os
from pathlib import Path

import pytest

from hpcrl.lab import outages
from tests.support.campaigns import events_of, hpcrl, outcome, steps, until
from tests.support.lab_campaigns import await_clean_nodes, await_end, find_batch_processes, start
from tests.support.lab_tools import Lab

pytestmark = [
    *(pytest.mark.slurm, pytest.mark.mpi, pytest.mark.timeout(600)),
    pytest.mark.skipif(os.geteuid() != 0, reason="a strict lab needs root"),
]


def await_no_memory(lab: Lab) -> None:
    until(lambda: lab.list_shared_memory() == {}, what="no node keeps shared memory", timeout_s=60)


def test_no_node_keeps_memory_after_a_crash_of_the_guardian(lab: Lab, campaigns: Path) -> None:
    campaign, _ = start(campaigns, "g")
    guardian, _ = find_batch_processes(campaign)
    guardian.kill()
    await_end(lab, campaign)
    await_clean_nodes(lab, campaign)


def test_the_job_after_a_crash_of_the_node_with_guardian_and_driver_leaves_no_node_with_memory(
    lab: Lab, campaigns: Path
) -> None:
    campaign, _ = start(campaigns, "n", "-s", "job.num_jobs=2")
    (node,) = {event["node"] for event in events_of(campaign, "job-started")}
    assert len(lab.list_shared_memory().keys() - {node}) > 1, "nodes with the trainer and with engines"
    until(campaign.job(1).submission.exists, what="the next job is queued")
    try:
        outages.break_part(lab.state_dir, node)
        lab.run("scontrol", "update", f"nodename={node}", "state=down", "reason=test")
        await_end(lab, campaign)
        made = len(steps(campaign))
        until(lambda: len(steps(campaign)) > made, what="the next job continues the campaign")
        hpcrl("stop", "n")
        assert outcome(campaign, 1)["outcome"] == "stopped"
        await_no_memory(lab)
    finally:
        outages.restore_part(lab.state_dir, node)
        lab.run("scontrol", "update", f"nodename={node}", "state=resume")
