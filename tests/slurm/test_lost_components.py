"""Nodes of campaigns whose components are separate jobs fail, in a separate lab."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.campaigns import events_of, hpcrl, outcome, steps, until
from tests.support.lab_campaigns import list_faults, list_saved_steps, lose, start
from tests.support.lab_tools import Lab, running_lab

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(600)]


@pytest.fixture
def lab(needs_slurm: None, tmp_path: Path) -> Iterator[Lab]:
    """A separate lab, which may lose a node."""
    with running_lab(tmp_path.parent) as lab:
        yield lab


SEPARATE = ("-s", "job.layout=multi-job", "-s", "resources.prefill.num_workers=0")


def test_the_job_of_a_component_that_lost_its_node_is_not_started_again_and_the_next_one_avoids_the_node(
    lab: Lab, campaigns: Path
) -> None:
    campaign, _ = start(campaigns, "d", *SEPARATE, "-s", "job.num_jobs=2")
    ids = campaign.job(0).component_jobs.read_text().split()
    until(campaign.job(1).submission.exists, what="the next jobs are queued")
    made = len(steps(campaign))
    lose(lab, "decode1")
    end = outcome(campaign)
    assert (end["outcome"], end["cause"], end["nodes"]) == ("drained", "node-failure", ["decode1"])
    assert list_saved_steps(campaign)[-1] >= made
    until(lambda: any(step["job"] == 1 for step in steps(campaign)), what="the next jobs make steps")
    nodes = [event["nodes"] for event in events_of(campaign, "layout")]
    assert [decode for _, decode, _ in nodes] == [["decode1"], ["decode2"]]
    assert not set(ids) & set(lab.run("squeue", "-h", "-o", "%A").split()), "none that Slurm has queued again is left"
    hpcrl("stop", "d", "--now")


@pytest.mark.long
def test_a_component_continues_without_the_node_that_holds_its_job(lab: Lab, campaigns: Path) -> None:
    two = ("-s", "resources.decode.num_workers=2", "-s", "resources.decode.gpus_per_worker=4")
    campaign, _ = start(campaigns, "n", *SEPARATE, *two, "-s", "job.survive_node_loss=true")
    lose(lab, "decode1")
    until(lambda: "decode continues without decode1" in list_faults(campaign), what="the node is left out")
    made = len(steps(campaign))
    until(lambda: len(steps(campaign)) > made + 1, what="steps are made without it")
    hpcrl("stop", "n")
    assert outcome(campaign)["outcome"] == "stopped"
    until(lambda: lab.run("squeue", "-h") == "", what="all jobs have ended", timeout_s=60)
