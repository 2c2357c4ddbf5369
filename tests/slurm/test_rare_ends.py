"""Rarer events during a job: a lack of memory, a requeue, warnings by signals, an sbatch that times out."""

import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpcrl.campaign_dir.paths import CampaignDir
from hpcrl.lab import outages
from hpcrl.system.files import read_json
from hpcrl.system.memory import KILLED
from tests.support.campaigns import SIMULATED, events_of, hpcrl, outcome, snapshot, steps, until
from tests.support.lab_campaigns import ENDLESS, await_end, kill_batch_processes, list_saved_steps, start
from tests.support.lab_tools import Lab
from tests.support.memory_hog import MEMORY_ROOT, exhaust_memory
from tests.support.memory_losses import FILL_VARIABLE
from tests.support.slow_losses import SLOW_VARIABLE, is_waiting

pytestmark = [
    *(pytest.mark.slurm, pytest.mark.mpi, pytest.mark.timeout(600)),
    pytest.mark.skipif(os.geteuid() != 0, reason="a strict lab needs root"),
]

OWN_CODE = Path(__file__).parents[2]


def test_what_the_kernel_kills_for_its_memory_is_started_again_and_the_reason_is_named(
    lab: Lab, campaigns: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = tmp_path / "fill"
    monkeypatch.setenv("PYTHONPATH", str(OWN_CODE))
    monkeypatch.setenv(FILL_VARIABLE, str(request))
    campaign, _ = start(campaigns, "m", "-s", 'train.pipeline.loss.function="tests.support.memory_losses:fill_memory"')
    request.touch()
    until(lambda: not request.exists(), what="a step fills the memory")
    await_restart(campaign, "train-0")
    reasons = [failure["reason"] for failure in events_of(campaign, "worker-failed")]
    if MEMORY_ROOT.exists():  # otherwise Slurm's watcher ends the step, and srun does not report why
        for worker in ("env-0", "decode-0"):
            exhaust_memory(find_worker_process(campaign, worker))
            await_restart(campaign, worker)
        reasons = [failure["reason"] for failure in events_of(campaign, "worker-failed")]
        assert len(reasons) == 3
        assert all(KILLED in reason for reason in reasons), reasons
        assert reasons[1].endswith(": raise resources.env.mem_gib_per_worker")
        assert reasons[2].endswith(": raise resources.decode.mem_gib_per_worker")
    hpcrl("stop", "m")
    assert outcome(campaign)["outcome"] == "stopped"


def await_restart(campaign: CampaignDir, worker: str) -> None:
    until(
        lambda: worker in [event["of"] for event in events_of(campaign, "worker-restarted")],
        what=f"{worker} is started again",
    )
    made = len(steps(campaign))
    until(lambda: len(steps(campaign)) > made + 1, what="steps are made again")


def find_worker_process(campaign: CampaignDir, worker: str) -> int:
    started = [event for event in events_of(campaign, "worker-started") if event["worker"] == f"000-{worker}"]
    return int(started[-1]["pid"])


def test_a_step_that_does_not_fit_into_what_is_left_is_abandoned_and_the_last_one_is_saved(
    lab: Lab, campaigns: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = tmp_path / "slow"
    monkeypatch.setenv("PYTHONPATH", str(OWN_CODE))
    monkeypatch.setenv(SLOW_VARIABLE, str(slow))
    loss = ("-s", 'train.pipeline.loss.function="tests.support.slow_losses:wait_before"')
    campaign, id = start(campaigns, "a", *loss, "-s", "train.tokens_per_micro_batch=40")
    slow.write_text("2")
    until(lambda: steps(campaign)[-1]["step_s"] > 10, what="a step is slow")
    lab.run("scancel", id)  # KillWait is 10 s here
    assert (outcome(campaign)["outcome"], outcome(campaign)["cause"]) == ("drained", "cancellation")
    assert list_saved_steps(campaign) == [steps(campaign)[-1]["step"]]
    (fault,) = events_of(campaign, "fault")
    assert fault["detail"].startswith(f"step {steps(campaign)[-1]['step'] + 1} was abandoned")


def test_nodes_are_left_clean_if_driver_and_guardian_are_killed_during_a_drain(
    lab: Lab, campaigns: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = tmp_path / "slow"
    monkeypatch.setenv("PYTHONPATH", str(OWN_CODE))
    monkeypatch.setenv(SLOW_VARIABLE, str(slow))
    campaign, _ = start(campaigns, "d", "-s", 'train.pipeline.loss.function="tests.support.slow_losses:wait_before"')
    slow.write_text("60")
    until(lambda: is_waiting(slow), what="the trainer is busy, so that the drain takes a while")
    campaign.stop.touch()
    until(campaign.job(0).drain.exists, what="the job drains")
    kill_batch_processes(lab, campaign)


def test_a_requeue_is_refused_and_where_an_administrator_allows_it_the_job_continues_from_its_checkpoint(
    lab: Lab, campaigns: Path
) -> None:
    campaign, id = start(campaigns, "r")
    refused = lab.try_run("scontrol", "requeue", id)
    assert refused.returncode != 0
    assert "disabled" in refused.stderr
    lab.run("scontrol", "update", f"JobId={id}", "Requeue=1")
    lab.run("scontrol", "requeue", id)
    assert outcome(campaign)["outcome"] == "drained"
    saved = list_saved_steps(campaign)
    until(lambda: len(events_of(campaign, "job-started")) == 2, what="the job runs again")
    until(lambda: steps(campaign)[-1]["step"] > saved[-1] + 1, what="it makes further steps")
    made = [step["step"] for step in steps(campaign)]
    assert made == list(range(1, len(made) + 1)), "no step was lost or made twice"
    assert snapshot("r")["state"] == "running"
    hpcrl("stop", "r")
    assert outcome(campaign)["outcome"] == "stopped"
    assert await_end(lab, campaign) == "COMPLETED"


def test_a_warning_to_steps_drains_the_job(lab: Lab, campaigns: Path) -> None:
    """A warning to the batch script: test_jobs_in_a_row.py."""
    campaign, id = start(campaigns, "w")
    lab.run("scancel", "--signal=USR1", id)
    assert outcome(campaign)["outcome"] == "drained"
    assert list_saved_steps(campaign) == [steps(campaign)[-1]["step"]]
    assert events_of(campaign, "worker-failed") == []
    assert await_end(lab, campaign) == "COMPLETED"


@pytest.fixture
def slow_sbatch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Put an sbatch on PATH that queues the job and then does not answer; return the file that counts its calls."""
    calls, folder = tmp_path / "calls", tmp_path / "programs"
    folder.mkdir()
    program = folder / "sbatch"
    program.write_text(
        f'#!/bin/sh\necho called >> {calls}\n{shutil.which("sbatch")} "$@" > /dev/null\nexec sleep 600\n'
    )
    program.chmod(0o700)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.setenv("HPCRL_SLURM_TIMEOUT_S", "8")
    return calls


def test_a_job_that_was_queued_without_any_answer_starts_and_is_recorded(
    lab: Lab, campaigns: Path, slow_sbatch: Path
) -> None:
    """The driver's sbatch does not answer, nor does squeue after it: only Slurm knows of the next job."""
    squeue = slow_sbatch.parent / "programs" / "squeue"
    refusal = "echo 'slurm_load_jobs error: Unable to contact slurm controller' >&2; exit 1"
    has_called = f"[ $(wc -l < {slow_sbatch}) -ge 2 ]"
    squeue.write_text(
        f'#!/bin/sh\ncase "$SLURMD_NODENAME $*" in [a-z]*%k) if {has_called}; then {refusal}; fi;; esac\n'
        f'exec {shutil.which("squeue")} "$@"\n'
    )
    squeue.chmod(0o700)
    hpcrl("submit", "quickstart", "--site", "lab", "--name", "u", *SIMULATED, *ENDLESS, "-s", "job.num_jobs=2")
    campaign = CampaignDir(campaigns / "u")
    id = read_json(campaign.job(0).submission)["id"]
    until(lambda: bool(events_of(campaign, "fault")), what="the next job counts as refused", timeout_s=120)
    assert not campaign.job(1).submission.exists()
    (following,) = {one.partition("+")[0] for one in lab.run("squeue", "-h", "-o", "%i").split()} - {id}
    until(lambda: len(steps(campaign)) > 2, what="steps are made")
    lab.run("scancel", id)
    until(lambda: any(step["job"] == 1 for step in steps(campaign)), what="the next job makes steps")
    assert read_json(campaign.job(1).submission)["id"] == following
    hpcrl("stop", "u")
    assert outcome(campaign, 1)["outcome"] == "stopped"


def test_jobs_are_found_that_a_silent_controller_queues_later_or_whose_sbatch_timed_out_after_queueing_them(
    lab: Lab, campaigns: Path, slow_sbatch: Path
) -> None:
    """The first is queued once the controller answers again; the driver queues the next one, without an answer."""
    outages.break_part(lab.state_dir, "slurmctld")
    restore = threading.Timer(12.0, outages.restore_part, (lab.state_dir, "slurmctld"))
    restore.start()
    try:
        hpcrl("submit", "quickstart", "--site", "lab", "--name", "s", *SIMULATED, *ENDLESS, "-s", "job.num_jobs=2")
    finally:
        restore.join()
    campaign = CampaignDir(campaigns / "s")
    id = read_json(campaign.job(0).submission)["id"]
    until(campaign.job(1).submission.exists, what="the next job is found")
    following = read_json(campaign.job(1).submission)["id"]
    queued = lab.run("squeue", "-h", "-o", "%i").split()
    assert {name.partition("+")[0] for name in queued} == {id, following}
    assert slow_sbatch.read_text().split() == ["called"] * 2
    until(lambda: len(steps(campaign)) > 2, what="steps are made")
    hpcrl("stop", "s")
    assert outcome(campaign)["outcome"] == "stopped"
    assert len(lab.accounted(id)) == 4, "the components of one job"
