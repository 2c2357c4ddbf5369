"""A preemption on a site that sends jobs the warning that they have asked for, in place of SIGTERM."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.campaigns import outcome, steps
from tests.support.lab_campaigns import PREEMPTIBLE, await_end, list_saved_steps, start
from tests.support.lab_tools import Lab, running_lab

pytestmark = [
    *(pytest.mark.slurm, pytest.mark.mpi, pytest.mark.timeout(600)),
    pytest.mark.skipif(os.geteuid() != 0, reason="a strict lab needs root"),
]


@pytest.fixture
def lab(needs_slurm: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """A separate lab with such a Slurm."""
    with running_lab(tmp_path_factory.getbasetemp(), warns_preempted=True, preempt_grace_s=30) as lab:
        yield lab


def test_a_job_that_is_only_warned_of_its_preemption_saves_its_last_step(lab: Lab, campaigns: Path) -> None:
    campaign, _ = start(campaigns, "p", *PREEMPTIBLE, site="lab-hetstep")
    lab.run("sbatch", "-p", "h100", "-N4", "--exclusive", "--mem=0", "-o/dev/null", "--wrap=true")
    assert await_end(lab, campaign) in ("PREEMPTED", "COMPLETED"), "it may end within the grace time"
    assert (outcome(campaign)["outcome"], outcome(campaign)["cause"]) == ("drained", "preemption")
    assert not campaign.job(0).terminated.read_text(), "no step received a signal"
    assert list_saved_steps(campaign) == [steps(campaign)[-1]["step"]]
