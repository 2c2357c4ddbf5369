"""The jobs of a doctor, before Slurm gets them."""

from pathlib import Path

from hpcrl.doctor.node_job import list_blocked, list_engine_partitions, make_node_script
from tests.support.plans import make_site


def test_a_second_node_is_asked_for_where_a_partition_has_one(tmp_path: Path) -> None:
    def make_script(*settings: str) -> str:
        site = make_site("lab", *settings)
        return make_node_script(site, "train", request=tmp_path / "train.json", log=tmp_path / "log")

    script = make_script()
    assert "#SBATCH --nodes=2" in script
    first, second = (next(line for line in script.splitlines() if f"--relative={node}" in line) for node in (0, 1))
    assert second.endswith(" second &")
    assert script.rstrip().endswith(first), "the job ends with the step of its first node"
    alone = make_script("partitions.train.max_nodes=1")
    assert "#SBATCH --nodes=1" in alone
    assert "--relative=1" not in alone


def test_jobs_in_the_queue_are_blocked_unless_another_one_still_runs() -> None:
    assert list_blocked(["PENDING Resources", ""]) == ["PENDING Resources"]
    assert list_blocked(["PENDING Resources", "RUNNING None"]) == []
    assert list_blocked([]) == []


def test_whole_nodes_are_compared_with_all_their_memory(tmp_path: Path) -> None:
    site = make_site("lab", "partitions.train.exclusive=true")
    script = make_node_script(site, "train", request=tmp_path / "train.json", log=tmp_path / "log")
    assert script.count("--mem=0") == 3


def test_one_partition_of_each_kind_of_gpu_and_python_starts_a_server() -> None:
    assert list_engine_partitions(make_site("lab")) == ["prefill", "decode"]
    assert list_engine_partitions(make_site("lab", "partitions.decode.gpu=h100")) == ["prefill"]
    other = make_site("lab", "partitions.train.python=/opt/python")
    assert list_engine_partitions(other) == ["prefill", "decode", "train"]


def test_jobs_of_the_doctor_have_the_flags_of_every_job(tmp_path: Path) -> None:
    site = make_site("lab", 'licenses=["scratch:1"]', 'job_flags=["--wckey=x"]')
    script = make_node_script(site, "train", request=tmp_path / "train.json", log=tmp_path / "log")
    assert {"#SBATCH --licenses=scratch:1", "#SBATCH --wckey=x"} <= set(script.splitlines())
