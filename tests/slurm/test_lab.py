"""The lab as a Slurm: het jobs, GPUs, accounting, limits, preemption, and nothing left of a job."""

import os
import socket
import struct
import subprocess
from pathlib import Path

import pytest

from hpcrl.errors import LabError
from hpcrl.lab import lab as labs
from hpcrl.lab.conf import LabCluster, NodeGroup
from tests.support.lab_tools import Lab, until

pytestmark = pytest.mark.slurm

HET_JOB = """\
#SBATCH --partition=train --nodes=2 --ntasks-per-node=1 --gres=gpu:2 --mem=1G --time=5
#SBATCH hetjob
#SBATCH --partition=decode --nodes=1 --ntasks=1 --gres=gpu:h20:4 --mem=1G --time=5
#SBATCH hetjob
#SBATCH --partition=env --nodes=3 --ntasks-per-node=1 --mem=1G --time=5
unset CUDA_VISIBLE_DEVICES  # component 0's, and it would leak into components without GPUs
srun --het-group=0,1,2 bash -c 'echo "$SLURMD_NODENAME ${CUDA_VISIBLE_DEVICES:-none}" > "seen.$SLURMD_NODENAME"'
"""


@pytest.fixture(scope="module")
def het_job(lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    folder = tmp_path_factory.mktemp("het")
    job = lab.submit(folder, HET_JOB)
    lab.wait_accounted(job, "COMPLETED", "COMPLETED", "COMPLETED")
    return job, folder


def test_every_component_of_a_het_job_is_accounted_on_its_own_nodes(lab: Lab, het_job: tuple[str, Path]) -> None:
    job, _ = het_job
    rows = {row["JobID"]: row for row in lab.accounted(job)}
    assert {name: row["NodeList"] for name, row in rows.items()} == {
        f"{job}+0": "train[1-2]",
        f"{job}+1": "decode1",
        f"{job}+2": "env[1-3]",
    }
    assert [row["Partition"] for row in rows.values()] == ["train", "decode", "env"]


def test_the_lab_has_the_slurm_that_the_page_on_versions_names_as_tested(lab: Lab) -> None:
    major, minor, *_ = lab.run("sinfo", "--version").split()[-1].split(".")
    page = Path(__file__).parents[2] / "docs" / "versions.md"
    assert f"| {major}.{minor}, Debian 12's, in the lab " in page.read_text()


def test_gpus_are_counted_in_the_accounts(lab: Lab, het_job: tuple[str, Path]) -> None:
    job, _ = het_job
    assert "gres/gpu=4" in lab.accounted(job)[0]["AllocTRES"]


def test_one_step_spans_the_components_and_sees_its_gpus(het_job: tuple[str, Path]) -> None:
    _, folder = het_job
    seen = dict(path.read_text().split() for path in folder.glob("seen.*"))
    gpus = {name.rstrip("123"): num for name, num in seen.items()}
    assert len(seen) == 6
    assert gpus == {"train": "0,1", "decode": "0,1,2,3", "env": "none"}


@pytest.mark.parametrize("mpi", ["pmi2", "pmix"])
def test_mpi_type_launches_steps(lab: Lab, mpi: str) -> None:
    if mpi == "pmix" and not list(Path("/usr/lib").rglob("libpmix.so")):
        pytest.skip("no libpmix.so: apt-get install libpmix-dev")
    assert sorted(lab.run("srun", f"--mpi={mpi}", "-N2", "-n2", "printenv", "SLURM_PROCID").split()) == ["0", "1"]


def test_job_without_mem_leaves_the_node_to_others(lab: Lab, tmp_path: Path) -> None:
    jobs = [lab.submit(tmp_path, "sleep 60", "--nodelist=env1") for _ in range(2)]
    for job in jobs:
        lab.wait_state(job, "RUNNING")
    lab.run("scancel", *jobs)


def test_job_over_the_time_limit_is_refused(lab: Lab, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="time limit"):
        lab.submit(tmp_path, "true", "--time=2-00:00:00")


def test_job_with_an_empty_environment_still_finds_the_lab(lab: Lab, tmp_path: Path) -> None:
    job = lab.submit(tmp_path, "/usr/bin/srun -n1 /bin/echo found", "--export=NONE")
    lab.wait_accounted(job, "COMPLETED")
    assert (tmp_path / "out").read_text() == "found\n"


def test_higher_tier_preempts_and_the_job_is_queued_again(lab: Lab, tmp_path: Path) -> None:
    low = lab.submit(tmp_path, "exec sleep 300", "--partition=preempt", "--nodes=3", "--exclusive", "--requeue")
    lab.wait_state(low, "RUNNING")
    high = lab.submit(tmp_path, "true", "--partition=env", "--nodes=3", "--exclusive")
    lab.wait_accounted(high, "COMPLETED")
    until(lambda: "PREEMPTED" in [row["State"] for row in lab.accounted(low, "--duplicates")])
    lab.wait_state(low, "PENDING")
    lab.run("scancel", low)


def test_nothing_of_a_cancelled_job_stays(lab: Lab, tmp_path: Path) -> None:
    """Not even a process that called setsid and lost its parent stays."""
    sleep = f"sleep 600.{os.getpid()}"
    job = lab.submit(tmp_path, f"setsid {sleep} & (setsid --fork {sleep}); {sleep}")
    until(lambda: len(_running(sleep)) == 3)
    lab.run("scancel", job)
    until(lambda: not _running(sleep))


def test_requeued_job_runs_again(lab: Lab, tmp_path: Path) -> None:
    job = lab.submit(tmp_path, "echo >>runs; [ $(wc -l <runs) -gt 1 ] || sleep 300", "--requeue")
    until((tmp_path / "runs").exists)
    lab.run("scontrol", "requeue", job)
    lab.wait_accounted(job, "COMPLETED")


def test_daemons_listen_on_loopback_only(lab: Lab) -> None:
    addresses = {address for daemon in labs.status(lab.state_dir).daemons for address in _listens(daemon.pid)}
    assert addresses == {"127.0.0.1"}


def test_state_is_private(lab: Lab) -> None:
    assert lab.state_dir.stat().st_mode & 0o777 == 0o700
    secrets = [path for path in lab.state_dir.rglob("*") if path.name in ("key", "slurmdbd.conf", "lab.json")]
    assert {path.stat().st_mode & 0o777 for path in secrets} == {0o600}


def test_up_again_leaves_the_lab_alone(lab: Lab) -> None:
    before = labs.status(lab.state_dir)
    again = labs.up(lab.state_dir, cluster=lab.cluster)
    assert again.was_up
    assert again.daemons == before.daemons
    assert "was up already" in str(again)


def test_up_with_other_nodes_is_refused(lab: Lab) -> None:
    other = LabCluster(groups=(NodeGroup(name="n", num_nodes=1),), default="n")
    with pytest.raises(LabError, match="other nodes"):
        labs.up(lab.state_dir, cluster=other)


def test_down_from_within_a_job_of_the_lab_is_refused(in_lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURMD_NODENAME", "env1")
    with pytest.raises(LabError, match="leave the job first"):
        labs.down(in_lab.state_dir)


def _running(command: str) -> list[str]:
    found = subprocess.run(["pgrep", "-fx", command], capture_output=True, text=True, check=False)
    return found.stdout.split()


def _listens(pid: int) -> list[str]:
    """Return the addresses of the TCP sockets on which a process listens; IPv6 ones as /proc shows them."""
    inodes = {str(fd.readlink()) for fd in Path(f"/proc/{pid}/fd").iterdir() if fd.is_symlink()}
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in inodes:
                raw = fields[1].partition(":")[0]
                found.append(socket.inet_ntoa(struct.pack("<I", int(raw, 16))) if table == "tcp" else raw)
    return found
