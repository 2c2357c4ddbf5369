"""Faults that `hpcrl doctor --job` finds on a node."""

import json
import math
import os
from pathlib import Path

import pytest

from hpcrl.doctor import node_checks as checks
from hpcrl.doctor.node_job import run_node_jobs
from tests.support.plans import make_site


def test_an_interface_that_a_partition_lacks_is_a_fault() -> None:
    result = checks.check_interface(["hsn9"])
    assert (result.state, "hsn9" in result.found) == ("failed", True)
    assert checks.check_interface(["lo"]).state == "ok"


def test_a_machine_without_the_gpus_of_its_site_file_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "list_own_gpus", lambda: (None, []))
    found = {
        one.name: one for one in checks.run_machine_checks(make_site("workstation"), folder=tmp_path, has_engine=False)
    }
    assert (found["gpus"].state, found["shared-memory"].state) == ("failed", "ok")
    assert "0 GPUs, and the site file has 4" in found["gpus"].found
    local = {one.name: one for one in checks.run_machine_checks(make_site("local"), folder=tmp_path, has_engine=False)}
    assert local["gpus"].state == "ok"
    assert "engine" not in local


def test_fewer_cpus_than_asked_for_are_hardware_threads() -> None:
    assert "threads_per_core = 2" in checks.check_cores(2, 4).change
    assert checks.check_cores(4, 2).state == "ok"


def test_shared_memory_that_is_small_or_cannot_be_written_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "cannot be written" in checks.check_shared_memory(tmp_path / "absent").found
    monkeypatch.setattr(checks, "MIN_SHARED_MEMORY_GIB", 1e9)
    assert checks.check_shared_memory(tmp_path).state == "warning"


def test_a_low_limit_of_open_files_is_found() -> None:
    assert checks.check_open_files(256, 1024).state == "warning"
    assert checks.check_open_files(1024, 1 << 20).state == "ok"


def test_a_node_without_a_sandbox_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "neither bwrap nor apptainer" in checks.check_namespaces().found
    (tmp_path / "bwrap").write_text("#!/bin/sh\necho 'No permissions to create new namespace' >&2; exit 1\n")
    (tmp_path / "bwrap").chmod(0o700)
    assert "No permissions to create new namespace" in checks.check_namespaces().found


def test_a_directory_of_temporary_files_that_is_missing_is_a_fault(tmp_path: Path) -> None:
    assert checks.check_temporary_files(str(tmp_path / "absent")).state == "failed"
    assert checks.check_temporary_files(str(tmp_path)).state == "ok"


@pytest.mark.parametrize(
    ("environ", "variable", "state"),
    [
        ({}, None, "warning"),
        ({"ROCR_VISIBLE_DEVICES": "0"}, None, "ok"),
        ({"ROCR_VISIBLE_DEVICES": "0"}, "CUDA_VISIBLE_DEVICES", "failed"),
        ({"CUDA_VISIBLE_DEVICES": "0,1,2,3"}, None, "failed"),
    ],
)
def test_the_variable_that_names_the_gpus_is_checked(environ: dict[str, str], variable: None, state: str) -> None:
    assert checks.check_devices(environ, variable, 1).state == state


def test_a_gpu_driver_that_fails_excludes_the_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert checks.check_gpu_driver().state == "unknown"
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\nexit 9\n")
    (tmp_path / "nvidia-smi").chmod(0o700)
    assert "exclude the node" in checks.check_gpu_driver().change


@pytest.mark.parametrize(
    ("stated", "is_open", "state"),
    [("yes", False, "failed"), ("no", True, "warning"), ("no", False, "ok"), ("unknown", True, "ok")],
)
def test_an_offline_node_of_a_site_with_internet_is_a_fault(stated: str, is_open: bool, state: str) -> None:
    assert checks.check_internet(make_site("lab", f"network.internet_on_compute={stated}"), is_open).state == state


def test_nodes_that_may_not_submit_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    (tmp_path / "sbatch").write_text("#!/bin/sh\necho 'sbatch: error: Access denied' >&2; exit 1\n")
    (tmp_path / "sbatch").chmod(0o700)
    assert checks.check_submission(make_site("lab"), tmp_path / "x").change == "set nodes_may_submit = false"
    assert checks.check_submission(make_site("lab", "nodes_may_submit=false"), tmp_path / "x").state == "ok"


def test_a_job_is_tried_without_the_variables_of_the_job_that_tries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.delenv("SLURM_CONF", raising=False)
    for name in ("SLURM_JOB_ID", "SLURM_NTASKS", "SBATCH_PARTITION"):
        monkeypatch.setenv(name, "1")
    (tmp_path / "sbatch").write_text("#!/bin/sh\n! env | grep -E '^(SLURM|SBATCH)_' >&2\n")
    (tmp_path / "sbatch").chmod(0o700)
    assert checks.check_submission(make_site("lab"), tmp_path / "x").state == "ok"


def test_an_image_without_sbatch_shows_nothing_of_the_driver_outside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert checks.check_submission(make_site("lab"), tmp_path / "x", in_image=True).state == "unknown"


def test_a_faster_interface_than_the_one_of_the_host_name_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "find_interface", lambda wanted: ("eth0", "10.0.0.1"))
    monkeypatch.setattr(checks, "find_faster_interface", lambda name: "ib0")
    assert checks.check_interface([]).change.endswith("set network.interface = 'ib0'")
    assert checks.check_interface(["eth0"]).state == "ok", "the site file names it"


def test_a_node_without_sbatch_may_not_submit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    result = checks.check_submission(make_site("lab"), tmp_path / "x")
    assert (result.state, result.change) == ("failed", "set nodes_may_submit = false")


@pytest.mark.parametrize(
    ("printed", "state", "found"),
    [
        ("echo world 2; echo world 2", "ok", "srun --mpi=pmi2: a world of 2 on 1 node"),
        ("echo world 1; echo world 1", "failed", "srun --mpi=pmi2 makes worlds of 1 and 1"),
        ("echo 'srun: error: no plugin' >&2; exit 1", "failed", "srun --mpi=pmi2: srun: error: no plugin"),
        ("exit 1", "failed", "srun --mpi=pmi2: it printed nothing"),
        ("echo \"ModuleNotFoundError: No module named 'mpi4py'\" >&2; exit 1", "warning", "mpi4py is not installed"),
    ],
)
def test_one_world_of_mpi_is_wanted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, printed: str, state: str, found: str
) -> None:
    (tmp_path / "srun").write_text(f"#!/bin/sh\n{printed}\n")
    (tmp_path / "srun").chmod(0o700)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    result = checks.check_mpi(make_site("lab"))
    assert (result.state, result.found) == (state, found)


def test_mpi_that_is_not_used_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert checks.check_mpi(make_site("lab", 'mpi.flavour="none"')).state == "ok"
    assert checks.check_mpi(make_site("lab")).state == "unknown"


@pytest.mark.parametrize(
    ("limit_gib", "asked_gib", "state"),
    [(None, 2, "ok"), (2.0, 2, "ok"), (1.0, 2, "failed"), (1.0, None, "ok")],
)
def test_a_step_that_may_use_less_memory_than_it_asked_for_is_found(
    limit_gib: float | None, asked_gib: int | None, state: str
) -> None:
    limit = None if limit_gib is None else int(limit_gib * 2**30)
    result = checks.check_memory(limit, asked_gib, counts_kills=True)
    assert result.state == state
    assert "does not show what it ends" not in result.found


AGREES = {"version": "9.9", "start_s": 12.0, "num_tokens": 640, "mean_difference": 0.001, "max_difference": 0.01}


@pytest.mark.parametrize(
    ("program", "state", "found"),
    [
        (f"print({json.dumps(AGREES)!r})", "ok", "vLLM 9.9 started in 12 s; its log-probs differ"),
        (f"print({json.dumps(AGREES | {'mean_difference': 0.2})!r})", "failed", "log-probs differ from the trainer's"),
        (f"print({json.dumps(AGREES | {'mean_difference': math.nan})!r})", "failed", "log-probs differ"),
        ("raise SystemExit('hpcrl: no kernel image is available')", "failed", "no kernel image is available"),
        ("import time; time.sleep(60)", "failed", "no vLLM server answered within 2 s"),
    ],
    ids=["agrees", "differs", "nan", "fails", "hangs"],
)
def test_a_server_whose_log_probs_differ_from_the_trainers_is_a_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str, state: str, found: str
) -> None:
    (tmp_path / "a_probe.py").write_text(program)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(checks, "ENGINE_PROBE", "a_probe")
    monkeypatch.setattr(checks, "ENGINE_TIMEOUT_S", 2.0)
    monkeypatch.setattr(checks, "find_installed", lambda requirement: "9.9")
    result = checks.check_engine(tmp_path / "engine")
    assert (result.state, found in result.found) == (state, True), result


def test_a_node_without_vllm_has_the_embedded_engine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(checks, "find_installed", lambda requirement: None)
    result = checks.check_engine(tmp_path)
    assert result.state == "warning"
    assert 'engine.backend = "embedded"' in result.change


def test_a_prologue_that_cannot_be_read_is_a_failed_check_of_the_node_jobs(tmp_path: Path) -> None:
    site = make_site("local", "prologue=/nowhere/prologue.sh")
    (result,) = run_node_jobs(site, folder=tmp_path / "jobs", timeout_s=1)
    assert (result.name, result.state) == ("node-job", "failed")
    assert "/nowhere/prologue.sh" in result.found
