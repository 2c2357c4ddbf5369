"""The doctor on a lab: its jobs find faults of nodes, and a sound site becomes a verified one."""

import json
from pathlib import Path

import pytest

from hpcrl.config.site import load_site
from tests.support.campaigns import hpcrl
from tests.support.lab_tools import Lab

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(600)]


def test_jobs_find_the_faults_of_each_partition(in_lab: Lab, campaigns: Path, tmp_path: Path) -> None:
    leaving = tmp_path / "leaving.sh"
    leaving.write_text("exit 4\n")
    done = hpcrl(
        *("doctor", "--site", "lab", "--job", "--json", "--timeout", "200"),
        *("-s", "partitions.decode.interface=hsn0", "-s", "partitions.train.gpu_variable=HIP_VISIBLE_DEVICES"),
        *("-s", f"partitions.prefill.prologue={leaving}", "-s", "partitions.preempt.slurm_partition=absent"),
        *("-s", "mpi.srun_type=none"),
        check=False,
    )
    assert done.returncode == 1, done.stderr
    faults = {
        (one.get("place", ""), one["name"]) for one in json.loads(done.stdout)["results"] if one["state"] == "failed"
    }
    assert faults == {
        ("", "partition preempt"),
        ("", "prologue"),
        ("decode", "interface"),
        ("train", "gpu-variable"),
        ("prefill", "node-job"),
        ("preempt", "node-job"),
        *((label, "mpi") for label in ("env", "decode", "train")),
    }


def test_a_sound_site_is_verified_in_the_users_own_file(in_lab: Lab, campaigns: Path) -> None:
    done = hpcrl("doctor", "--site", "lab", "--job", "--timeout", "200")
    assert "the site is verified now" in done.stderr
    assert load_site("lab").verified
    assert not list(campaigns.glob("doctor-*"))
    assert "to start at" in hpcrl("submit", "quickstart", "--site", "lab", "--dry-run").stdout
