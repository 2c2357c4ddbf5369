"""Clusters that are described from what their Slurm prints."""

import os
import socket
import tomllib
from datetime import date
from pathlib import Path
from typing import Any

import pytest

from hpcrl.campaign.request import load_request
from hpcrl.cli import main
from hpcrl.config.site import load_site
from hpcrl.doctor.login_checks import ask_for_answers
from hpcrl.errors import ConfigError, SlurmError
from hpcrl.hardware.gpus import GPU_CATALOGUE
from hpcrl.slurm.site_detection import choose_gpu_name, parse_config, parse_gres, parse_partitions, write_site
from hpcrl.system.files import make_private_dir

CONFIG = """Configuration data as of 2026-11-23T10:00:00
AccountingStorageEnforce = associations,limits
ClusterName             = campus
PreemptType             = preempt/partition_prio
SLURM_VERSION           = 23.11.4
"""
PARTITIONS = """\
PartitionName=std AllocNodes=ALL MaxNodes=8 MaxTime=2-00:00:00 OverSubscribe=EXCLUSIVE PreemptMode=OFF PriorityTier=1 State=UP
PartitionName=short AllocNodes=ALL MaxNodes=UNLIMITED MaxTime=01:00:00 OverSubscribe=EXCLUSIVE PreemptMode=OFF State=UP
PartitionName=gpu AllocNodes=ALL MaxNodes=UNLIMITED MaxTime=UNLIMITED OverSubscribe=NO PreemptMode=REQUEUE PriorityTier=9 State=UP
PartitionName=scavenge AllocNodes=ALL MaxTime=UNLIMITED OverSubscribe=NO PreemptMode=REQUEUE PriorityTier=1 State=UP
PartitionName=old AllocNodes=ALL MaxTime=UNLIMITED OverSubscribe=NO PreemptMode=OFF PriorityTier=1 State=DOWN
"""  # noqa: E501 - as Slurm prints them
NODES = """\
std|40|128|257000|(null)|milan|c[001-040]
short|40|128|257000|(null)|milan|c[001-040]
gpu|4|64|515000|gpu:l40s:8(S:0-1)|l40s|g[01-04]
gpu|2|96|1031000+|gpu:H200:4,nvme:1|h200|g[05-06]
scavenge|4|64|515000|gpu:l40s:8(S:0-1)|l40s|g[01-04]
old|3|16|64000|gpu:k80:2|k80|o[1-3]
"""
FAKE = """#!/bin/sh
case "$(basename "$0") $*" in
"scontrol show config") cat {d}/config ;;
"scontrol show partition -o") cat {d}/partitions ;;
"scontrol show node -o") echo "NodeName=c001 NodeAddr=10.0.0.1" ;;
sinfo*) cat {d}/nodes ;;
sacctmgr*) cat {d}/account ;;
srun*) echo "none pmix pmi2" >&2 ;;
esac
"""


@pytest.fixture
def cluster(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Slurm's programs of a cluster; what they print is in files."""
    folder = make_private_dir(tmp_path / "bin")
    for name in ("scontrol", "sinfo", "sacctmgr", "srun"):
        (folder / name).write_text(FAKE.replace("{d}", str(folder)))
        (folder / name).chmod(0o700)
    for name, text in (("config", CONFIG), ("partitions", PARTITIONS), ("nodes", NODES), ("account", "physics\n")):
        (folder / name).write_text(text)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    for name in ("SCRATCH", "PSCRATCH", "WORK"):
        monkeypatch.delenv(name, raising=False)
    return folder


def describe(name: str = "campus") -> tuple[dict[str, Any], list[str]]:
    path, notes = write_site(name)
    return tomllib.loads(path.read_text()), notes


def test_doctor_reads_what_the_description_of_a_site_is_made_of(cluster: Path) -> None:
    (cluster / "nodes").write_text("std|128|257000|(null)\n")
    answers = ask_for_answers(load_site("local"))
    assert (answers.config, answers.partitions) == (parse_config(CONFIG), parse_partitions(PARTITIONS))
    assert answers.config["SLURM_VERSION"] == "23.11.4"
    assert list(answers.partitions) == ["std", "short", "gpu", "scavenge", "old"]


def test_partitions_are_described_with_their_nodes_limits_and_gpus(cluster: Path) -> None:
    site, notes = describe()
    assert list(site["partitions"]) == ["std", "gpu", "gpu-H200", "scavenge"]
    std, l40s, h200, scavenge = site["partitions"].values()
    assert (std["max_nodes"], std["max_walltime_min"], std["exclusive"], std["preemptible"]) == (8, 2880, True, False)
    assert (l40s["gpu"], l40s["gpus_per_node"], l40s["gres_type"], l40s["mem_gib_per_node"]) == ("l40s", 8, "l40s", 502)
    assert (h200["gpu"], h200["gres_type"], h200["slurm_partition"], h200["max_nodes"]) == ("h200", "H200", "gpu", 2)
    assert [table["unverified"] for table in site["partitions"].values()] == [[], [], [], []]
    assert (scavenge["preemptible"], l40s["preemptible"]) == (True, False)
    assert notes == ["partition short is left out: std has its nodes, for as long"]
    assert (site["account"], site["account_required"], site["slurm_min"]) == ("physics", True, "23.11")


def test_a_recipe_is_planned_on_a_cluster_that_was_just_described(cluster: Path) -> None:
    write_site("campus")
    plan = load_request("quickstart", site="campus").plan
    assert {component.partition for component in plan.components} <= {"std", "gpu", "gpu-H200"}
    [warning] = [line for line in plan.warnings if line.startswith("the facts about campus")]
    assert f"are from sinfo and scontrol on {socket.gethostname()} ({date.today()})" in warning


def test_a_gpu_of_unknown_memory_is_described_for_a_person_to_correct(cluster: Path) -> None:
    (cluster / "nodes").write_text("gpu|4|64|515000|gpu:quantum_x9:8|x|g[01-04]\n" + NODES.splitlines()[0])
    site, notes = describe()
    assert site["partitions"]["gpu"]["gpu"] == "quantum_x9"
    assert site["gpus"]["quantum_x9"] == {"memory_gib": 16}
    assert notes[0].startswith("gpus.quantum_x9: its memory is not known and was set to 16 GiB")
    assert site["partitions"]["gpu"]["unverified"] == ["gpu"]


def test_gpus_without_a_name_are_of_amd_where_only_its_programs_are(
    cluster: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (cluster / "nodes").write_text("gpu|4|64|515000|gpu:2|(null)|g[01-04]\n")
    monkeypatch.setenv("PATH", f"{cluster}:/usr/bin:/bin")
    assert "maker" not in describe("plain")[0]["gpus"]["gpu"]
    for name in ("rocm-smi", "nvidia-smi"):
        (cluster / name).write_text("#!/bin/sh\n")
        (cluster / name).chmod(0o700)
        site, notes = describe(f"with-{name}")
        assert site["gpus"]["gpu"].get("maker") == {"rocm-smi": "amd"}.get(name)
        assert any("maker" in note for note in notes) == (name == "rocm-smi")


def test_where_slurm_names_no_type_none_is_requested(cluster: Path) -> None:
    (cluster / "nodes").write_text("gpu|4|64|515000|gpu:2|(null)|g[01-04]\n")
    site, _ = describe()
    assert "gres_type" not in site["partitions"]["gpu"]
    assert site["partitions"]["gpu"]["gpus_per_node"] == 2


def test_an_account_that_is_required_and_not_known_is_noted(cluster: Path) -> None:
    (cluster / "account").write_text("")
    site, notes = describe()
    assert "account" not in site
    assert notes[0] == "account: the cluster requires one, and none is known: set it"


def test_nodes_that_may_not_submit_are_seen(cluster: Path) -> None:
    (cluster / "partitions").write_text(PARTITIONS.replace("gpu AllocNodes=ALL", "gpu AllocNodes=login[1-2]"))
    assert describe()[0]["nodes_may_submit"] is False


@pytest.mark.parametrize("text", ["", "garbage\n", "a|b|c\n", "std|40|128|257000|(null)|milan\n"])
def test_a_slurm_without_partitions_or_with_garbage_is_refused(cluster: Path, text: str) -> None:
    (cluster / "nodes").write_text(text)
    with pytest.raises(SlurmError, match="no partition that is up"):
        write_site("campus")
    assert not (cluster.parent / "config").exists()


def test_a_site_is_never_overwritten(cluster: Path) -> None:
    write_site("campus")
    with pytest.raises(ConfigError, match="there is a site 'campus' already"):
        write_site("campus")
    with pytest.raises(ConfigError, match="choose a name of at most 64"):
        write_site("../campus")


def test_the_commands_list_show_and_write_sites(cluster: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["site", "new", "campus", "--detect"]) == 0
    assert main(["site", "ls"]) == 0
    assert main(["site", "show", "campus"]) == 0
    out = capsys.readouterr().out
    assert "submit quickstart --site campus --dry-run" in out
    assert "campus         the cluster campus, as its Slurm described it\n" in out
    assert '[partitions.gpu-H200]\nslurm_partition = "gpu"\n' in out
    assert main(["site", "show", "nowhere"]) == 2
    assert load_site("campus").name == "campus"


def test_a_site_file_that_cannot_be_parsed_is_refused_and_not_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "deep.toml"
    path.write_text("x = " + "[" * 2000 + "]" * 2000)
    assert main(["site", "show", str(path)]) == 2
    printed = capsys.readouterr()
    assert (printed.out, "nested" in printed.err) == ("", True)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("(null)", ("", 0)),
        ("gpu:4", ("", 4)),
        ("gpu:a100:4(S:0-1)", ("a100", 4)),
        ("nvme:1,gpu:v100:2(S:0,1),fpga:3", ("v100", 2)),
        ("gpu:a100:many", ("", 0)),
        ("shard:h100:8", ("", 0)),
    ],
)
def test_gpus_in_a_gres(text: str, found: tuple[str, int]) -> None:
    assert parse_gres(text) == found


@pytest.mark.parametrize(
    ("gres_type", "name"),
    [
        ("h100", "h100"),
        ("nvidia_h100_80gb_hbm3", "h100"),
        ("H200", "h200"),
        ("a100", "a100-40"),
        ("nvidia_a100-sxm4-80gb", "a100-80"),
        ("tesla_v100-sxm2-32gb", "v100-32"),
        ("NVIDIA_L40S", "l40s"),
        ("mi300a", "mi300a"),
        ("quadro_rtx_6000", None),
        ("1g.10gb", None),
        ("", None),
    ],
)
def test_the_types_of_slurm_have_names_in_the_catalogue(gres_type: str, name: str | None) -> None:
    assert choose_gpu_name(gres_type) == name
    assert name is None or name in GPU_CATALOGUE
