"""Settings and outages of a lab: a node that is booted again, a controller that falls silent."""

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from hpcrl.errors import LabError
from hpcrl.lab import lab as labs
from hpcrl.lab import outages
from hpcrl.lab.conf import LabCluster, NodeGroup
from hpcrl.system.processes import is_zombie
from tests.support.lab_tools import Lab, running_cluster, until

pytestmark = pytest.mark.slurm

SMALL_CLUSTER = LabCluster(groups=(NodeGroup(name="n", num_nodes=2),), default="n", num_cpus=2, binds_cpus=True)


@pytest.fixture(scope="module")
def small_lab(needs_slurm: None) -> Iterator[Lab]:
    """A lab of two nodes with other settings."""
    cluster = replace(SMALL_CLUSTER, kill_wait_s=3, over_time_limit_min=2, requeues=False)
    with running_cluster(cluster) as lab:
        yield lab


def test_settings_of_slurm_are_those_of_the_cluster(small_lab: Lab) -> None:
    config = dict(
        line.split("=", 1) for line in small_lab.run("scontrol", "show", "config").splitlines() if "=" in line
    )
    found = {name.strip(): value.strip() for name, value in config.items()}
    assert (found["KillWait"], found["OverTimeLimit"], found["JobRequeue"]) == ("3 sec", "2 min", "0")


def test_steps_are_bound_to_cpus_where_nodes_have_no_more_of_them_than_the_machine(small_lab: Lab) -> None:
    bound = small_lab.run("srun", "-N1", "-n2", "-c1", "--mem=50", "sh", "-c", "taskset -pc $$")
    assert sorted(line.rpartition(": ")[2] for line in bound.splitlines()) == ["0", "1"]


def test_a_silent_controller_answers_once_it_is_restored(small_lab: Lab) -> None:
    outages.break_part(small_lab.state_dir, "slurmctld")
    assert labs.status(small_lab.state_dir).nodes == (), "no answer"
    outages.restore_part(small_lab.state_dir, "slurmctld")
    assert {node.name for node in labs.status(small_lab.state_dir).nodes} == {"n1", "n2"}


def test_a_node_that_is_booted_again_has_lost_its_processes(small_lab: Lab, tmp_path: Path) -> None:
    job = small_lab.submit(tmp_path, "echo $$ > pid; exec sleep 600", "--mem=50", "-w", "n1")
    until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text() != "")
    pid = int((tmp_path / "pid").read_text())
    outages.break_part(small_lab.state_dir, "n1")
    assert is_zombie(pid)
    status = labs.status(small_lab.state_dir)
    assert (status.is_up, status.has_controller) == (False, True)
    assert "is up without some nodes" in str(status)
    assert f"export HPCRL_LAB={small_lab.state_dir}" in small_lab.run(sys.executable, "-m", "hpcrl.cli", "lab", "env")
    outages.restore_part(small_lab.state_dir, "n1")
    assert labs.status(small_lab.state_dir).is_up
    small_lab.run("srun", "-w", "n1", "-n1", "--mem=50", "true")
    small_lab.run("scancel", job)


def test_an_unknown_part_is_refused_with_those_that_there_are(small_lab: Lab) -> None:
    with pytest.raises(LabError, match=r"no node 'n7': it has slurmctld, n1, n2"):
        outages.break_part(small_lab.state_dir, "n7")
