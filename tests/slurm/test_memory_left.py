"""No node of a strict lab keeps shared memory of a job, however it has ended; test_job_ends.py has the other ends."""

import os
from pathlib import Path

import pytest

from tests.support.campaigns import until
from tests.support.lab_campaigns import await_end, find_batch_processes, start
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
    await_no_memory(lab)
