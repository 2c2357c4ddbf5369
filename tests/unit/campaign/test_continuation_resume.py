"""What stops a campaign from being resumed, such as a job whose guardian was killed and whose driver still drains."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpcrl.campaign import continuation, running_jobs
from hpcrl.campaign.request import load_request
from hpcrl.campaign.submission import write_description
from hpcrl.campaign_dir.paths import CampaignDir
from hpcrl.campaign_dir.train_progress import TrainProgress, write_train_progress
from hpcrl.commands import monitoring, removal
from hpcrl.commands.monitoring import final_summary
from hpcrl.errors import CampaignError, SlurmError
from hpcrl.monitor.job_state import judge_jobs, read_jobs
from hpcrl.slurm.submit import SubmittedJob, record_submission
from hpcrl.system.files import make_private_dir, publish_json, read_json
from hpcrl.system.processes import read_start_ticks
from tests.support.campaigns import until

FAKE = Path(__file__).parents[2] / "support" / "fakes" / "squeue"
ON_FAKES = ("site.account=m1", 'site.exports=["FAKE_SLURM"]')
PROGRAM = """
import os, signal, sys, threading, time
from pathlib import Path
from hpcrl.campaign_dir import event_log
from hpcrl.campaign_dir.event_log import EventLog
from hpcrl.campaign_dir.job_end import JobEnd
from hpcrl.campaign_dir.paths import CampaignDir
from hpcrl.campaign_dir.workers import WorkerPlace
from hpcrl.job import guardian
from hpcrl.job.guardian import run_guarded, send_outcome

event_log.BEAT_INTERVAL_S = guardian.CLOSE_GRACE_S = 1.0
campaign = CampaignDir(Path(sys.argv[1]))
place = WorkerPlace(campaign.job(0), "node0")

def beat(log):
    while True:
        log.beat()
        time.sleep(0.05)

def drive(outcome_fd, pulse):
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM, signal.SIGUSR1])
    log = EventLog.open(campaign, "env", 0, job=0, role="env")
    threading.Thread(target=beat, args=(log,), daemon=True).start()
    print("ready", flush=True)
    signal.sigwait([signal.SIGTERM])  # the guardian has ended
    Path(sys.argv[2]).write_text(str(os.getpid()))
    signal.sigwait([signal.SIGUSR1])  # it has drained
    send_outcome(JobEnd(outcome="drained", cause="cancellation"), outcome_fd=outcome_fd, job=place.job)
    return 0

sys.exit(run_guarded(drive, place))
"""


def test_the_error_for_an_old_key_in_a_stored_recipe_names_the_new_one(tmp_path: Path) -> None:
    campaign = CampaignDir(make_private_dir(tmp_path / "c"))
    write_description(campaign, load_request("quickstart", site="local"))
    recipe = json.loads(campaign.recipe.read_text())
    recipe["router"]["reluctance"] = recipe["router"].pop("mismatch_penalty", 1.0)
    campaign.recipe.unlink()
    campaign.recipe.write_text(json.dumps(recipe))
    with pytest.raises(CampaignError, match=r"router.reluctance is now router.mismatch_penalty"):
        continuation.resume(str(campaign.root))


def test_a_campaign_whose_tasks_were_recorded_elsewhere_is_refused(tmp_path: Path) -> None:
    campaign = CampaignDir(make_private_dir(tmp_path / "c"))
    write_description(campaign, load_request("quickstart", site="local"))
    make_private_dir(campaign.job(0).root)
    campaign.job(0).outcome.write_text(json.dumps({"outcome": "stopped"}))
    campaign.job(0).submission.write_text(
        json.dumps({"id": "local-1", "scheduler": "local", "time": 0.0, "pid": 1, "start_ticks": 0})
    )
    campaign.env_workers.rmdir()
    with pytest.raises(CampaignError, match=r"cannot be continued: it has no .*env-workers.*hpcrl export c --hf DIR"):
        continuation.resume(str(campaign.root))


def test_a_campaign_that_was_not_submitted_to_the_end_is_refused_as_such(tmp_path: Path) -> None:
    """Not as one of an old version, whose model could be exported."""
    campaign = CampaignDir(make_private_dir(tmp_path / "c"))
    campaign.manifest.write_text("{")
    with pytest.raises(CampaignError, match=r"it was not submitted to the end; remove it \(`hpcrl rm c`\)"):
        continuation.resume(str(campaign.root))


@pytest.fixture
def failed(tmp_path: Path) -> CampaignDir:
    """A campaign of 3 steps whose trainer failed for good."""
    campaign = CampaignDir(make_private_dir(tmp_path / "c"))
    write_description(campaign, load_request("quickstart", site="local", settings=("train.num_steps=3",)))
    make_private_dir(campaign.job(0).root)
    campaign.job(0).outcome.write_text(json.dumps({"outcome": "failed"}))
    campaign.job(0).submission.write_text(
        json.dumps({"id": "local-1", "scheduler": "local", "time": 0.0, "pid": 1, "start_ticks": 0})
    )
    write_train_progress(campaign.train_progress, TrainProgress(failure="no reward was ever computed: correct it"))
    return campaign


def test_a_campaign_that_failed_with_all_its_steps_made_is_not_resumed_nor_is_that_advised(
    failed: CampaignDir,
) -> None:
    make_private_dir(failed.checkpoints / "000002-step-000003")
    (line,) = final_summary(failed, state="failed", rewards=[])
    assert "hpcrl logs c" in line
    assert "resume" not in line
    with pytest.raises(CampaignError, match=r"all 3 steps .* no reward was ever computed: correct it"):
        continuation.resume(str(failed.root))
    assert failed.job_numbers() == [0]


def test_a_record_of_the_last_end_that_is_damaged_counts_as_none(
    failed: CampaignDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed.job(0).outcome.write_text('{"outcome": "dr')
    started: list[int] = []
    monkeypatch.setattr(continuation, "start_job", lambda job, _: started.append(job.number))
    monkeypatch.setattr(continuation, "queue_next_jobs", lambda *_, **_options: None)
    continuation.resume(str(failed.root))
    assert started == [1]


def test_a_manifest_without_what_jobs_need_is_damaged(failed: CampaignDir) -> None:
    failed.manifest.write_text('{"created": 1}')
    with pytest.raises(CampaignError, match="is damaged: it lacks what hpcrl writes"):
        continuation.resume(str(failed.root), settings=("job.walltime_min=30",))


def test_records_are_not_rewritten_for_jobs_that_import_another_hpcrl(failed: CampaignDir, tmp_path: Path) -> None:
    other = tmp_path / "checkout"
    make_private_dir(other / "hpcrl")
    (other / "hpcrl" / "__init__.py").touch()
    manifest = read_json(failed.manifest)
    publish_json(failed.manifest, manifest | {"exports": {"PYTHONPATH": f"{tmp_path}:{other}"}})
    before = failed.recipe.read_bytes()
    with pytest.raises(CampaignError, match=rf"its jobs import hpcrl from {other}/hpcrl .* resume it with that one"):
        continuation.resume(str(failed.root), settings=("job.walltime_min=30",))
    assert failed.recipe.read_bytes() == before
    assert failed.job_numbers() == [0]


def test_a_resume_that_another_process_makes_meanwhile_changes_nothing(failed: CampaignDir) -> None:
    make_private_dir(failed.job(1).root)  # it is about to submit it
    before = {path: path.read_bytes() for path in (failed.recipe, failed.manifest, failed.plan)}
    failed.stop.touch()
    with pytest.raises(CampaignError, match="another process is submitting job 1"):
        continuation.resume(str(failed.root), settings=("job.walltime_min=30",))
    assert {path: path.read_bytes() for path in before} == before
    assert failed.stop.exists()
    assert failed.job_numbers() == [0, 1]


def test_a_resume_that_slurm_refuses_leaves_the_request_to_stop(
    failed: CampaignDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **_options: object) -> None:
        raise SlurmError("AssocMaxSubmitJobLimit")

    monkeypatch.setattr(continuation, "start_job", refuse)
    failed.stop.touch()
    with pytest.raises(SlurmError, match="AssocMaxSubmitJobLimit"):
        continuation.resume(str(failed.root))
    assert failed.stop.exists()
    assert failed.job_numbers() == [0]


def test_a_fixed_setting_is_refused_with_the_name_of_the_campaign(failed: CampaignDir) -> None:
    with pytest.raises(CampaignError, match="`hpcrl export c --hf DIR` writes its model, for a new campaign"):
        continuation.resume(str(failed.root), settings=("seed=7",))


def test_a_campaign_that_failed_before_its_last_step_is_resumed(
    failed: CampaignDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_private_dir(failed.checkpoints / "000001-step-000002")
    started: list[int] = []
    monkeypatch.setattr(continuation, "start_job", lambda job, _: started.append(job.number))
    monkeypatch.setattr(continuation, "queue_next_jobs", lambda *_, **_options: None)
    (line,) = final_summary(failed, state="failed", rewards=[])
    assert "hpcrl resume c" in line
    continuation.resume(str(failed.root))
    assert started == [1]


@pytest.mark.parametrize(
    ("outcome", "cause", "advice"),
    [
        ("failed", "user-code", "another job would fail in the same way, so change your code, or a setting"),
        ("failed", "memory-limits", "`hpcrl resume c -s KEY=VALUE`"),
        ("stopped", "budget-used", "raise the limit that was reached: `hpcrl resume c -s limits.KEY=VALUE`"),
        ("failed", "infrastructure", "see `hpcrl logs c`, then `hpcrl resume c`"),
        ("failed", "node-failure", "see `hpcrl logs c`, then `hpcrl resume c`"),
    ],
)
def test_what_is_advised_at_the_end_follows_from_the_cause(
    failed: CampaignDir, monkeypatch: pytest.MonkeyPatch, outcome: str, cause: str, advice: str
) -> None:
    monkeypatch.setattr(monitoring, "_command_name", lambda: "hpcrl")
    failed.job(0).outcome.write_text(json.dumps({"outcome": outcome, "cause": cause}))
    (line,) = final_summary(failed, state=outcome, rewards=[])
    assert advice in line


def test_the_last_lines_of_a_campaign_name_its_report(failed: CampaignDir) -> None:
    (line,) = final_summary(failed, state="failed", rewards=[])
    assert "hpcrl report c" in line
    assert "report c" in "\n".join(final_summary(failed, state="done", rewards=[0.5]))


def test_no_best_episode_is_offered_where_a_domain_trained_nothing(failed: CampaignDir) -> None:
    assert "--best" in "\n".join(final_summary(failed, state="done", rewards=[0.5]))
    text = "\n".join(final_summary(failed, state="done", rewards=[0.0], untrained=["domain lake: all failed"]))
    assert "--best" not in text
    assert "events c --kind fault" in text


def test_the_reason_of_a_campaign_at_its_limit_names_the_setting_that_continues_it(failed: CampaignDir) -> None:
    end = {"outcome": "stopped", "cause": "budget-used", "reason": "it has used 3 node-hours"}
    failed.job(0).outcome.write_text(json.dumps(end))
    _, (verdict,) = judge_jobs(failed, read_jobs(failed), statuses={}, events={}, heartbeats={}, now=0.0)
    assert verdict.reason == "it has used 3 node-hours; `hpcrl resume c -s limits.KEY=VALUE` raises it"


@pytest.mark.parametrize(("cause", "is_hinted"), [("infrastructure", True), ("user-code", False)])
def test_a_failed_campaign_names_where_it_continues_unless_another_job_would_fail_too(
    failed: CampaignDir, cause: str, is_hinted: bool
) -> None:
    failed.job(0).outcome.write_text(json.dumps({"outcome": "failed", "cause": cause, "reason": "it was killed"}))
    make_private_dir(failed.checkpoints / "000001-step-000575")
    _, (verdict,) = judge_jobs(failed, read_jobs(failed), statuses={}, events={}, heartbeats={}, now=0.0)
    assert verdict.reason == "it was killed" + "; `hpcrl resume` continues from step 575" * is_hinted


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Fakes of Slurm's programs, for which job 7 has ended; the next one has the number 8."""
    answers, programs = make_private_dir(tmp_path / "slurm"), make_private_dir(tmp_path / "bin")
    for name in ("sbatch", "srun", "squeue", "sacct", "scancel"):
        (programs / name).symlink_to(FAKE)
    (answers / "squeue.out").write_text("7|7|FAILED|env|2026-11-20T10:00:00|2026-11-20T11:00:00||NonZeroExitCode\n")
    (answers / "sbatch.out").write_text("Submitted batch job 8\n")
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    monkeypatch.setenv("FAKE_SLURM", str(answers))
    return answers


@contextlib.contextmanager
def killed_guardian(directory: Path, *settings: str, site: str) -> Iterator[tuple[CampaignDir, int]]:
    """Make a campaign, start the guardian of its first job, and kill it; yields the driver, which drains the job."""
    campaign, note = CampaignDir(make_private_dir(directory / "c")), directory / "draining"
    write_description(campaign, load_request("quickstart", site=site, settings=settings))
    make_private_dir(campaign.job(0).root)
    command = [sys.executable, "-c", PROGRAM, str(campaign.root), str(note)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as guardian:
        assert guardian.stdout is not None
        assert guardian.stdout.readline() == b"ready\n"
        local = SubmittedJob(
            id="local-7", scheduler="local", time=0.0, pid=guardian.pid, start_ticks=read_start_ticks(guardian.pid)
        )
        record = local if site == "local" else SubmittedJob(id="7", scheduler="slurm", time=0.0)
        record_submission(record, job=campaign.job(0))
        guardian.kill()
    until(lambda: note.exists() and note.read_text() != "", what="the driver drains", timeout_s=30)
    driver = int(note.read_text())
    try:
        yield campaign, driver
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(driver, signal.SIGKILL)


def test_a_job_whose_driver_drains_without_its_guardian_is_not_followed_by_a_second_one(
    tmp_path: Path, slurm: Path
) -> None:
    with killed_guardian(tmp_path, *ON_FAKES, site="perlmutter") as (campaign, driver):
        with pytest.raises(CampaignError, match="of job 7 was killed, and others of it still run"):
            continuation.resume(str(campaign.root))
        assert not (slurm / "sbatch.calls").exists()
        os.kill(driver, signal.SIGUSR1)
        until(campaign.job(0).outcome.exists, what="the driver has drained", timeout_s=30)
        continuation.resume(str(campaign.root))
        assert read_json(campaign.job(1).submission)["id"] == "8"


def test_a_campaign_without_a_scheduler_is_not_resumed_while_a_driver_drains(tmp_path: Path) -> None:
    with killed_guardian(tmp_path, site="local") as (campaign, _):
        with pytest.raises(CampaignError, match="of job local-7 was killed, and others of it still run"):
            continuation.resume(str(campaign.root))
        assert campaign.job_numbers() == [0]


def test_a_campaign_whose_driver_drains_without_its_guardian_is_neither_removed_nor_taken_for_ended(
    tmp_path: Path,
) -> None:
    with killed_guardian(tmp_path, site="local") as (campaign, _):
        with pytest.raises(CampaignError, match=r"processes of job 0 still run: `hpcrl stop --now c` ends them"):
            removal.remove_campaigns([str(campaign.root)], is_agreed=True)
        assert "others of it still run" in running_jobs.stop_gracefully(str(campaign.root))
        assert campaign.stop.exists()
        assert "ends now" in running_jobs.stop_now(str(campaign.root))
        assert campaign.job(0).end.exists()


def test_a_campaign_whose_job_runs_though_its_record_is_damaged_is_neither_removed_nor_taken_for_ended(
    tmp_path: Path,
) -> None:
    with killed_guardian(tmp_path, site="local") as (campaign, _):
        campaign.job(0).submission.write_text('{"id": ')
        with pytest.raises(CampaignError):
            removal.remove_campaigns([str(campaign.root)], is_agreed=True)
        assert campaign.job(0).root.is_dir()


def test_a_job_that_was_killed_as_a_whole_is_resumed_after_a_silence(
    tmp_path: Path, slurm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running_jobs, "ALIVE_WITHIN_S", 1.0)
    with killed_guardian(tmp_path, *ON_FAKES, site="perlmutter") as (campaign, driver):
        os.kill(driver, signal.SIGKILL)
        continuation.resume(str(campaign.root))
        assert len((slurm / "sbatch.calls").read_text().splitlines()) == 1


@pytest.mark.parametrize(
    ("rewards", "learned"),
    [
        ([None, 0.25, 0.5], "mean reward 0.250 -> 0.500 in 3 steps;"),
        ([-0.3, -0.1, 0.9, 0.1], "reward -0.200 -> 0.500 in 4 steps (means of the first and last 2);"),
    ],
)
def test_the_last_line_has_the_means_of_the_first_and_last_steps(
    failed: CampaignDir, rewards: list[float | None], learned: str
) -> None:
    (line,) = final_summary(failed, state="failed", rewards=rewards)
    assert learned in line
