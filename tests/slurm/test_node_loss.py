"""A node of a running campaign fails with all its processes, in a separate lab: the campaign continues without it."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from hpcrl.campaign_dir.paths import CampaignDir
from hpcrl.lab import outages
from tests.support.campaigns import CALM, SIMULATED, events_of, hpcrl, outcome, steps, until
from tests.support.lab_campaigns import list_faults, lose
from tests.support.lab_tools import Lab, running_lab

pytestmark = [pytest.mark.slurm, pytest.mark.mpi, pytest.mark.timeout(600)]

LOST, KEPT = "decode2", "decode1"


@pytest.fixture
def lab(needs_slurm: None, tmp_path: Path) -> Iterator[Lab]:
    """A separate lab, which may lose a node."""
    with running_lab(tmp_path.parent) as lab:
        yield lab


ENDLESS = (*CALM, "-s", "train.num_steps=100000", "-s", "train.checkpoint_every_steps=5")


def test_a_campaign_continues_without_a_lost_node_and_its_weights_are_still_sent_by_mpi_also_by_a_trainer_booted_again(
    lab: Lab, campaigns: Path
) -> None:
    two = ("-s", "resources.decode.num_workers=2", "-s", "resources.decode.gpus_per_worker=4")
    survives = ("-s", "job.survive_node_loss=true")
    hpcrl("submit", "quickstart", "--site", "lab", "--name", "n", *SIMULATED, *ENDLESS, *survives, *two)
    campaign = CampaignDir(campaigns / "n")

    def carried() -> list[set[str]]:
        return [set(event["to"]) for event in events_of(campaign, "courier")]

    until(lambda: len(carried()) > 1, what="versions were carried")
    assert LOST in carried()[-1]
    lose(lab, LOST)
    until(lambda: bool(carried()) and LOST not in carried()[-1], what="versions go past the lost node")
    made = len(steps(campaign))
    until(lambda: len(steps(campaign)) > made + 6, what="steps are made without it")
    faults = [event["detail"] for event in events_of(campaign, "fault")]
    assert f"decode continues without {LOST}" in faults
    assert [event["transport"] for event in events_of(campaign, "transport")][-1] == "mpi"
    assert "train-0" not in [event["of"] for event in events_of(campaign, "worker-restarted")]
    outages.break_part(lab.state_dir, "train1")
    outages.restore_part(lab.state_dir, "train1")
    until(
        lambda: "train-0" in [event["of"] for event in events_of(campaign, "worker-restarted")],
        what="the driver misses the trainer, and starts it again",
    )
    made = len(steps(campaign))
    until(lambda: len(steps(campaign)) > made + 1, what="steps are made again")
    (failure,) = [event for event in events_of(campaign, "worker-failed") if event["of"] == "train-0"]
    assert "train1 was started again" in failure["reason"]
    hpcrl("stop", "n")
    assert outcome(campaign)["outcome"] == "stopped"


def test_a_campaign_with_one_step_for_a_role_continues_without_lost_nodes(lab: Lab, campaigns: Path) -> None:
    two = ("-s", "resources.decode.num_workers=2", "-s", "resources.decode.gpus_per_worker=4")
    survives = ("-s", "job.survive_node_loss=true", "-s", "site.steps_per=role")
    hpcrl("submit", "quickstart", "--site", "lab", "--name", "t", *SIMULATED, *ENDLESS, *survives, *two)
    campaign = CampaignDir(campaigns / "t")
    until(lambda: len(steps(campaign)) > 6, what="steps are made")
    assert list_pool_logs(campaign, "decode") == ["parsl.decode.block-0.log"], "one step has the pools of both nodes"
    lose(lab, "train1")
    until(lambda: steps(campaign)[-1]["node"] == "train2", what="steps are made on the other node")
    assert "train continues without train1" in list_faults(campaign)
    (kept,) = list_starts(campaign, KEPT)  # Parsl chooses which of the two workers runs there
    lose(lab, LOST)
    until(
        lambda: f"decode continues without {LOST}" in list_faults(campaign),
        what="the job continues without it",
    )
    made = len(steps(campaign))
    until(lambda: len(steps(campaign)) > made + 1, what="steps are made without it")
    assert list_starts(campaign, KEPT) == [kept], "the worker on the other node went on"  # the lost one waits for it
    hpcrl("stop", "t")
    assert outcome(campaign)["outcome"] == "stopped"


def list_starts(campaign: CampaignDir, node: str) -> list[tuple[str, int]]:
    """Return the workers that have started on a node, with their process ids."""
    starts = events_of(campaign, "worker-started")
    return [(event["worker"], event["pid"]) for event in starts if event["node"] == node]


def list_pool_logs(campaign: CampaignDir, role: str) -> list[str]:
    return sorted(path.name for path in campaign.job(0).logs.glob(f"parsl.{role}.block-*"))


def test_a_job_that_slurm_ends_for_a_lost_node_names_it_and_the_next_one_avoids_it(lab: Lab, campaigns: Path) -> None:
    hpcrl("submit", "quickstart", "--site", "lab", "--name", "d", *SIMULATED, *ENDLESS, "-s", "job.num_jobs=1")
    campaign = CampaignDir(campaigns / "d")
    until(lambda: len(steps(campaign)) > 2, what="steps are made")
    outages.break_part(lab.state_dir, KEPT)
    ended = outcome(campaign)
    assert (ended["outcome"], ended["cause"], ended["nodes"]) == ("drained", "node-failure", [KEPT])
    assert f"Slurm reports {KEPT} as down" in ended["reason"]
    hpcrl("resume", "d")
    assert any(f"--exclude={KEPT}" in script.read_text() for script in campaign.job(1).root.glob("*.sh"))
    made = len(steps(campaign))
    until(lambda: len(steps(campaign)) > made, what="steps are made on other nodes")
    hpcrl("stop", "d")  # its end removes what MPI ranks that were killed have left
    outcome(campaign, 1)
