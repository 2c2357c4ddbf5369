"""Faults that `hpcrl doctor` finds on the login node."""

import os
from collections.abc import Iterable
from pathlib import Path

import pytest

from hpcrl.config.site import Site
from hpcrl.doctor import login_checks as checks
from hpcrl.doctor.login_checks import SlurmAnswers
from hpcrl.doctor.result import CheckResult
from tests.support.plans import make_site

CONFIG = {"SLURM_VERSION": "24.05.1", "KillWait": "30", "AccountingStorageEnforce": "associations,limits,qos"}
FIELDS = {"State": "UP", "MaxTime": "1-00:00:00", "GraceTime": "60"}
NODES = {
    name: [(16, 16_384, gpu, num)]
    for name, gpu, num in (
        ("env", "", 0),
        ("prefill", "h100", 4),
        ("decode", "h20", 4),
        ("train", "h100", 4),
        ("preempt", "", 0),
    )
}
SOUND = SlurmAnswers(
    config=CONFIG, partitions={name: FIELDS for name in NODES}, nodes=NODES, accounts=["physics"], qos=["normal"]
)


def answers(**changes: object) -> SlurmAnswers:
    return SlurmAnswers(**{**vars(SOUND), **changes})  # type: ignore[arg-type]


def with_partition(name: str, **changes: str) -> SlurmAnswers:
    return answers(partitions={**SOUND.partitions, name: {**FIELDS, **changes}})


def with_nodes(name: str, *kind: object) -> SlurmAnswers:
    return answers(nodes={**NODES, name: [kind]})


def find_faults(results: Iterable[CheckResult]) -> str:
    """Return the faults and what to change, one a line."""
    return "\n".join(
        f"{result.state} {result.name}: {result.found} -> {result.change}" for result in results if result.change
    )


def compare(seen: SlurmAnswers, *settings: str) -> str:
    site = make_site("lab", *settings)
    found = [
        *checks.check_version(seen, site),
        *checks.check_partitions(seen, site),
        *checks.check_accounts(seen, site),
    ]
    return find_faults(
        [*found, *checks.check_names(seen, site), checks.check_kill_wait(seen), *checks.check_grace(seen, site)]
    )


def test_a_site_that_is_as_described_has_no_faults() -> None:
    assert compare(SOUND) == ""
    assert compare(SOUND, "account=physics", "partitions.env.qos=normal") == ""


@pytest.mark.parametrize(
    ("seen", "settings", "fault"),
    [
        (answers(partitions={}), (), "failed partition env: Slurm has no partition 'env'"),
        (with_partition("train", State="DOWN"), (), "warning partition train: it is DOWN"),
        (with_partition("train", MaxTime="02:00:00"), (), "set partitions.train.max_walltime_min = 120"),
        (with_nodes("train", 8, 16_384, "h100", 4), (), "lower partitions.train.cores_per_node"),
        (
            SOUND,
            ("partitions.train.threads_per_core=2",),
            "lower partitions.train.cores_per_node (with threads_per_core: 32)",
        ),
        (with_nodes("train", 16, 8192, "h100", 4), (), "set partitions.train.mem_gib_per_node = 8"),
        (with_nodes("train", 16, 16_384, "h100", 2), (), "set partitions.train.gpus_per_node = 2"),
        (with_nodes("train", 16, 16_384, "", 0), (), "failed partition train: Slurm reports no node with GPUs"),
        (with_nodes("train", 16, 16_384, "h200", 4), (), "set partitions.train.gres_type = 'h200'"),
        (SOUND, ("account=chemistry",), "failed account: 'chemistry' is not yours, or has expired"),
        (SOUND, ("account_required=true",), 'failed account: none is given -> write account = "..."'),
        (SOUND, ("partitions.train.qos=fast",), "failed partitions.train.qos: Slurm has no 'fast'"),
        (SOUND, ("partitions.train.reservation=course",), "failed partitions.train.reservation: Slurm has no 'course'"),
        (SOUND, ('licenses=["scratch:1"]',), "failed licenses: Slurm has no 'scratch'"),
        (answers(config={**CONFIG, "KillWait": "5 sec"}), (), "warning kill-wait: KillWait = 5 s"),
        (with_partition("preempt", GraceTime="0"), (), "warning grace preempt: GraceTime = 0"),
        (answers(config={"SLURM_VERSION": "21.08.8", "KillWait": "30"}), (), "older than slurm_min = 22.05"),
        (SOUND, ("mpi.srun_type=pmix",), "a step of one component may hang in a heterogeneous job before 25.5.0"),
    ],
)
def test_what_slurm_reports_otherwise_is_named_with_the_key_to_change(
    seen: SlurmAnswers, settings: tuple[str, ...], fault: str
) -> None:
    assert fault in compare(seen, *settings)


def test_names_that_slurm_does_not_look_at_are_only_warnings() -> None:
    """As in a lab, or on a cluster that only records accounts."""
    settings = ("account=chemistry", "partitions.train.qos=fast")
    free = answers(config={**CONFIG, "AccountingStorageEnforce": "none"})
    faults = compare(free, *settings).splitlines()
    assert [fault.partition(":")[0] for fault in faults] == ["warning account", "warning partitions.train.qos"]
    without_qos = answers(config={**CONFIG, "AccountingStorageEnforce": "limits"})
    faults = compare(without_qos, *settings).splitlines()
    assert [fault.partition(":")[0] for fault in faults] == ["failed account", "warning partitions.train.qos"]


def test_qos_that_slurm_does_not_list_are_unknown() -> None:
    site = make_site("lab", "partitions.train.qos=fast")
    assert [result.state for result in checks.check_names(answers(qos=[]), site)] == ["unknown"]


def test_a_directory_of_campaigns_that_cannot_be_made_is_a_fault(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert "set campaigns_dir to a directory of yours" in find_faults(
        checks.check_campaigns_dir(tmp_path / "file" / "x")
    )
    assert not [one for one in checks.check_campaigns_dir(tmp_path / "new" / "x") if one.state == "failed"]
    assert not (tmp_path / "new").exists()


def test_a_full_quota_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lfs = tmp_path / "lfs"
    lfs.write_text(f"#!/bin/sh\necho '{tmp_path} 900000 0 1000000 - 99000 0 100000 -'\n")
    lfs.chmod(0o700)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    found = find_faults(checks.check_campaigns_dir(tmp_path / "campaigns"))
    assert "warning free-space: 0.0954 GiB in " in found
    assert "(by `lfs quota" in found
    assert "ask for a higher quota" in found


def test_an_interpreter_without_hpcrl_or_that_does_not_run_is_a_fault(tmp_path: Path) -> None:
    fake = tmp_path / "python"
    fake.write_text("#!/bin/sh\necho \"ModuleNotFoundError: No module named 'hpcrl'\" >&2; exit 1\n")
    fake.chmod(0o700)
    assert "No module named 'hpcrl'" in checks.check_python(str(fake)).found
    assert checks.check_python("/absent/python").state == "failed"


@pytest.mark.parametrize(
    ("text", "state", "words"),
    [
        ("module load x ||", "failed", "syntax error"),
        ("exit 3", "failed", "ends the script with 3"),
        ("no-such-program", "warning", "not found"),
        ("export A=$UNSET", "ok", ""),
    ],
)
def test_a_prologue_is_tried(text: str, state: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "prologue.sh"
    path.write_text(text + "\n")
    result = checks.check_prologue(str(path))
    assert result.state == state
    assert words in result.found
    assert checks.check_prologue(str(tmp_path / "absent.sh")).state == "failed"


def image_site(**settings: str) -> Site:
    return make_site("lab", *(f"{name}={value}" for name, value in settings.items()))


def test_a_missing_image_and_a_missing_program_are_faults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    found = find_faults(checks.check_image(image_site(container="apptainer", image=f"{tmp_path}/x.sif")))
    assert "warning container: apptainer is not on PATH here" in found
    assert "x.sif does not exist -> build it, or correct `image`" in found


def test_a_long_directory_of_temporary_files_is_a_fault() -> None:
    site = make_site("lab", f"temporary_dir=/scratch/{'x' * 40}")
    assert "names of sockets end at 107" in find_faults(checks.check_temporary_dirs(site))
    assert find_faults(checks.check_temporary_dirs(make_site("lab", "temporary_dir=/tmp"))) == ""


def test_a_proxy_that_is_down_is_found() -> None:
    down = make_site("lab", "environment.https_proxy=http://127.0.0.1:9")
    assert "127.0.0.1:9 does not answer here" in find_faults(checks.check_proxy(down))
    assert "no proxy is named" in find_faults(checks.check_proxy(make_site("lab", "network.internet_on_compute=proxy")))


def test_missing_commands_of_slurm_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert checks.check_commands().found == "missing: sbatch, srun, squeue, scancel"
    assert os.environ["PATH"] == str(tmp_path)
