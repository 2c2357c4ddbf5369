"""Slurm's commands: the environment that they inherit, and the errors that they become."""

import subprocess
from pathlib import Path

import pytest

from hpcrl.errors import SlurmError
from hpcrl.slurm import commands
from hpcrl.slurm.commands import (
    ask_slurm,
    cancel_steps,
    expand_nodes,
    limited_command,
    query_live_jobs,
    queue_script,
    run_slurm,
)


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Commands that print their environment."""
    for name in ("sbatch", "squeue"):
        (tmp_path / name).write_text("#!/bin/sh\nenv\n")
        (tmp_path / name).chmod(0o700)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    monkeypatch.delenv("LC_ALL", raising=False)
    return tmp_path


def test_options_in_the_environment_never_reach_a_command(slurm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SBATCH_PARTITION", "stray")
    monkeypatch.setenv("SLURM_CLUSTERS", "green")
    printed = ask_slurm(["sbatch"])
    assert "SBATCH_PARTITION" not in printed
    assert "SLURM_CLUSTERS=green" in printed


def test_variables_of_our_own_job_never_reach_another_one(slurm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "12")
    monkeypatch.setenv("SLURM_MEM_PER_CPU", "1")
    monkeypatch.setenv("SLURM_CONF", "/etc/other.conf")
    printed = ask_slurm(["sbatch"])
    assert "SLURM_MEM_PER_CPU" not in printed
    assert "SLURM_CONF=/etc/other.conf" in printed


def test_sbatch_keeps_the_locale_for_its_job(slurm: Path) -> None:
    assert "LC_ALL=C" in ask_slurm(["squeue"])
    assert "LC_ALL=C" not in ask_slurm(["sbatch"])


def test_submitit_runs_a_command_in_the_same_environment(slurm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SALLOC_ACCOUNT", "stray")
    words = limited_command(["sbatch"], env={"PATH": f"{slurm}:/usr/bin:/bin", "SLURM_CONF": "/x"})
    printed = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    assert "SALLOC_ACCOUNT" not in printed
    assert "SLURM_CONF=/x" in printed


def test_a_refusal_names_the_command_and_its_reason(slurm: Path) -> None:
    (slurm / "squeue").write_text("#!/bin/sh\necho 'slurm_load_jobs error: no permission' >&2; exit 1\n")
    with pytest.raises(SlurmError, match=r"Slurm refused: slurm_load_jobs error: no permission \(the answer of squeue"):
        ask_slurm(["squeue"])


def test_slurm_commands_without_a_cluster_name_the_place_to_run_them(slurm: Path) -> None:
    error = "sbatch: error: _establish_config_source: failed to fetch config"
    (slurm / "sbatch").write_text(f"#!/bin/sh\necho '{error}' >&2; exit 1\n")
    with pytest.raises(SlurmError, match=r"^sbatch finds no cluster here.*run this on a login node"):
        ask_slurm(["sbatch"])


def test_a_command_without_an_answer_is_ended(slurm: Path) -> None:
    (slurm / "squeue").write_text("#!/bin/sh\nexec sleep 1000\n")
    done = run_slurm(["squeue"], timeout_s=0.2)
    assert (done.returncode, done.stderr) == (124, "squeue did not answer within 0.2 s")


@pytest.mark.parametrize(
    ("nodelist", "nodes"), [("", []), ("a", ["a"]), ("r[1-2]n[01,3]", ["r1n01", "r1n3", "r2n01", "r2n3"])]
)
def test_node_lists_become_names(nodelist: str, nodes: list[str]) -> None:
    assert expand_nodes(nodelist) == nodes


TIMED_OUT = "sbatch: error: Batch job submission failed: Socket timed out on send/recv operation"


def write_queue(slurm: Path, *, sbatch: str) -> None:
    """Make a squeue that shows the file `queue`, after one empty look for each line of `looks`, and an sbatch."""
    wait = f"if [ -s {slurm}/looks ]; then sed -i 1d {slurm}/looks; exit; fi"
    (slurm / "squeue").write_text(f"#!/bin/sh\n{wait}\ncat {slurm}/queue\n")
    (slurm / "sbatch").write_text(f"#!/bin/sh\necho called >> {slurm}/calls\n{sbatch}\n")
    (slurm / "queue").touch()


def test_a_job_that_was_queued_though_sbatch_timed_out_is_found(slurm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commands, "LOOKUP_INTERVAL_S", 0.01)
    write_queue(
        slurm,
        sbatch=f"printf '1\\n' > {slurm}/looks; echo '47+0 hpcrl:a:1' > {slurm}/queue; echo '{TIMED_OUT}' >&2; exit 1",
    )
    assert queue_script(slurm / "job.sh", mark="hpcrl:a:1") == "47"
    assert queue_script(slurm / "job.sh", mark="hpcrl:a:1") == "47", "and not queued again"
    assert (slurm / "calls").read_text() == "called\n"


def test_a_submission_that_timed_out_and_queued_nothing_is_an_error(
    slurm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commands, "LOOKUP_INTERVAL_S", 0.01)
    write_queue(slurm, sbatch=f"echo '12 hpcrl:other:1' > {slurm}/queue; echo '{TIMED_OUT}' >&2; exit 1")
    with pytest.raises(SlurmError, match="Socket timed out"):
        queue_script(slurm / "job.sh", mark="hpcrl:a:1")


def test_a_refusal_is_not_looked_for_in_the_queue(slurm: Path) -> None:
    write_queue(slurm, sbatch="echo 'sbatch: error: Invalid account' >&2; exit 1")
    with pytest.raises(SlurmError, match="Invalid account"):
        queue_script(slurm / "job.sh", mark="hpcrl:a:1")


def test_a_squeue_that_cannot_be_started_now_has_not_answered(slurm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(slurm / "nowhere"))
    assert query_live_jobs(["7"]) is None


def test_steps_whose_srun_was_killed_are_ended_by_their_name(slurm: Path) -> None:
    steps = "echo 7.batch batch; echo 8.0 hpcrl-7-train-1; echo 8.1 hpcrl-7-train-10; echo 9.0 hpcrl-7-train-1"
    for name, program in (("squeue", steps), ("scancel", f'echo "$@" >> {slurm}/cancelled')):
        (slurm / name).write_text(f"#!/bin/sh\n{program}\n")
        (slurm / name).chmod(0o700)
    cancel_steps("hpcrl-7-train-2")
    assert not (slurm / "cancelled").exists()
    cancel_steps("hpcrl-7-train-1")
    assert (slurm / "cancelled").read_text() == "8.0 9.0\n"


@pytest.mark.parametrize(
    ("line", "node"),
    [
        ("srun: error: Unable to create step for job 7: Unable to contact slurm controller (connect failure)", None),
        ("srun: error: Task launch for StepId=7.3 failed on node gpu03: Communication connection failure", "gpu03"),
        ("srun: error: Node failure on nid001.cluster", "nid001.cluster"),
        (
            "slurmstepd: error: *** STEP 7.3 ON gpu1 CANCELLED AT 2026-01-01T00:00:00 DUE TO NODE FAILURE, SEE LOG ***",
            "gpu1",
        ),
        ("srun: error: Unable to confirm allocation for job 7: Zero Bytes were transmitted or received", None),
    ],
)
def test_steps_that_slurm_or_a_node_has_failed_are_known_by_the_words_of_srun(line: str, node: str | None) -> None:
    found = commands.find_step_failure(f"srun: Job 7 step creation temporarily disabled, retrying\n{line}\nlast\n")
    assert found == (line, node)


@pytest.mark.parametrize(
    "line",
    [
        "srun: error: gpu1: task 0: Exited with exit code 1",
        "srun: error: gpu[1-2]: tasks 0-1: Killed",
        "slurmstepd: error: *** STEP 7.3 ON gpu1 CANCELLED AT 2026-01-01T00:00:00 ***",
        "slurmstepd: error: Detected 1 oom_kill event in StepId=7.3. Some of the step tasks have been OOM Killed.",
        "ConnectionError: Connection refused",
        "",
    ],
)
def test_steps_that_their_command_has_failed_are_not(line: str) -> None:
    assert commands.find_step_failure(f"{line}\n") is None
