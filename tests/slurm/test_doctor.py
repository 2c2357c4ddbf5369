"""The doctor on a lab: its jobs find faults of nodes, and a sound site becomes a verified one."""

import json
from pathlib import Path

import pytest

from hpcrl.config.site import load_site
from hpcrl.config.toml import user_folder
from tests.support.campaigns import hpcrl, read_json
from tests.support.lab_tools import Lab

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(900)]

FAILING = "#!/bin/sh\necho 'it fails here' >&2; exit 9\n"
BROKEN_PACKAGE = "raise ImportError('libcudart.so.13: cannot open shared object file')\n"


def write_prologue(path: Path, *, programs: tuple[str, ...] = (), packages: tuple[str, ...] = ()) -> str:
    """Write a prologue after which programs and Python packages of a node fail."""
    folder = path.with_suffix("")
    folder.mkdir()
    for name in programs:
        (folder / name).write_text(FAILING)
        (folder / name).chmod(0o700)
    for name in packages:
        (folder / f"{name}.py").write_text(BROKEN_PACKAGE)
    paths = f'export PATH="{folder}:$PATH" PYTHONPATH="{folder}${{PYTHONPATH:+:$PYTHONPATH}}"'
    path.write_text(f"{paths}\n")
    return str(path)


def test_each_of_two_dozen_faults_is_found(in_lab: Lab, campaigns: Path, tmp_path: Path) -> None:
    env = write_prologue(
        tmp_path / "env.sh",
        programs=("bwrap", "sbatch"),
        packages=("h5py",),
    )
    train = write_prologue(tmp_path / "train.sh", programs=("nvidia-smi",))
    decode = write_prologue(tmp_path / "decode.sh", packages=("vllm",))
    leaving = tmp_path / "leaving.sh"
    leaving.write_text("exit 4\n")
    settings = {
        "slurm_min": '"99.5"',
        "environment.https_proxy": "http://127.0.0.1:9",
        "mpi.srun_type": "none",
        "partitions.env.cores_per_node": 999,
        "partitions.env.prologue": env,
        "partitions.prefill.prologue": leaving,
        "partitions.prefill.max_walltime_min": 10**7,
        "partitions.decode.interface": "hsn0",
        "partitions.decode.prologue": decode,
        "partitions.train.gpus_per_node": 9,
        "partitions.train.gpu_variable": "HIP_VISIBLE_DEVICES",
        "partitions.train.prologue": train,
        "partitions.preempt.slurm_partition": "absent",
        "partitions.preempt.account": "absent",
        "partitions.preempt.qos": "absent",
        "partitions.preempt.reservation": "absent",
        "partitions.preempt.image": "/absent/agent.sif",
        "partitions.preempt.python": "/absent/python",
        "partitions.preempt.temporary_dir": f"/scratch/{'x' * 40}",
    }
    options = [word for key, value in settings.items() for word in ("-s", f"{key}={value}")]
    done = hpcrl("doctor", "--site", "lab", "--job", "--json", "--timeout", "300", *options, check=False)
    assert done.returncode == 1, done.stderr
    results = json.loads(done.stdout)["results"]
    faults = {(one.get("place", ""), one["name"]) for one in results if one["state"] in ("warning", "failed")}
    assert faults == {
        ("", "slurm-version"),
        ("", "kill-wait"),
        ("", "proxy"),
        ("", "python"),
        ("", "prologue"),
        ("", "image"),
        ("", "temporary-dir"),
        ("", "account"),
        ("", "partition env"),
        ("", "partition prefill"),
        ("", "partition train"),
        ("", "partition preempt"),
        ("", "partitions.preempt.qos"),
        ("", "partitions.preempt.reservation"),
        ("env", "sandbox"),
        ("env", "submission"),
        ("env", "hdf5"),
        ("prefill", "node-job"),
        ("decode", "interface"),
        ("decode", "engine"),
        ("train", "gpu-variable"),
        ("train", "gpu-driver"),
        ("preempt", "node-job"),
        *((label, name) for label in ("env", "decode", "train") for name in ("mpi", "proxy", "signals")),
    }
    assert all(one["change"] for one in results if one["state"] in ("warning", "failed"))
    assert not list(user_folder("sites").glob("*")), "nothing is verified"


def test_a_sound_site_is_verified_in_the_users_own_file_and_runs_a_campaign(in_lab: Lab, campaigns: Path) -> None:
    done = hpcrl("doctor", "--site", "lab", "--job", "--timeout", "600")
    assert "the site is verified now" in done.stderr
    assert load_site("lab").verified
    assert not list(campaigns.glob("doctor-*"))
    assert done.stdout.count("second node reached") > 0
    assert done.stdout.count("routes (") == 10, "of two nodes each"
    assert done.stdout.count("its log-probs differ from the trainer's by") == 2, "a server for each kind of GPU"
    assert done.stdout.count("a world of 2 on 2 nodes") == 5
    hpcrl("submit", "quickstart", "--site", "lab", "--name", "v", "-s", "train.num_steps=3", "--watch")
    assert read_json(campaigns / "v" / "jobs" / "000" / "outcome.json")["outcome"] == "done"
