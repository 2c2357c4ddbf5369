"""The job that follows another: when there is one, and when it has nothing to do."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hpcrl.campaign import lifecycle
from hpcrl.campaign_dir.event_log import EventLog
from hpcrl.campaign_dir.events import CampaignEvent, CheckpointSaved, NextJobQueued
from hpcrl.campaign_dir.paths import CampaignDir, JobDir
from hpcrl.campaign_dir.workers import WorkerPlace
from hpcrl.errors import SlurmError
from hpcrl.slurm import next_job
from hpcrl.system.files import make_private_dir, publish_json


@pytest.fixture
def asked() -> lifecycle.CampaignRequest:
    return lifecycle.load_request("quickstart", site="perlmutter", settings=("site.account=m1", "job.num_jobs=3"))


@pytest.fixture
def run(home: Path, tmp_path: Path, asked: lifecycle.CampaignRequest) -> CampaignDir:
    """A campaign with a first job."""
    made = CampaignDir(make_private_dir(tmp_path / "c"))
    lifecycle._write_description(made, asked)
    lifecycle._make_job_dir(made, 0)
    return made


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Fakes of Slurm's commands that record how they are called."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, answer in (("sbatch", "echo 4712"), ("scancel", "true")):
        (folder / name).write_text(f'#!/bin/sh\necho {name} "$@" >> {folder}/calls\n{answer}\n')
        (folder / name).chmod(0o700)
    (folder / "squeue").symlink_to("/bin/true")  # the queue is empty
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return folder


def follow(run: CampaignDir, number: int, asked: lifecycle.CampaignRequest) -> str | None:
    return next_job.queue_next_job(run.job(number), plan=asked.plan, site=asked.site, slurm_id="4711")


def ended(run: CampaignDir, number: int, outcome: str, reason: str = "so it is") -> JobDir:
    make_private_dir(run.job(number).root)
    publish_json(run.job(number).outcome, {"outcome": outcome, "reason": reason, "time": 0.0})
    return run.job(number)


def checkpointed(run: CampaignDir, number: int) -> None:
    EventLog(run.events / f"{number:03d}-train-0.jsonl", job=number).emit(CheckpointSaved(step=1))


def test_jobs_follow_one_another_up_to_the_number_in_the_recipe(
    run: CampaignDir, slurm: Path, asked: lifecycle.CampaignRequest
) -> None:
    assert follow(run, 0, asked) == "4712"
    assert follow(run, 0, asked) is None, "there is one"
    assert (slurm / "calls").read_text() == (f"sbatch --parsable --dependency=afterany:4711 {run.job(1).script}\n")
    assert json.loads(run.job(1).submission.read_text())["id"] == "4712"
    assert f"hpcrl.job.driver {run.root} 1" in run.job(1).script.read_text()
    assert follow(run, 1, asked) == "4712"
    assert follow(run, 2, asked) is None, "three in a row"


def test_a_queued_job_is_reported_once(run: CampaignDir, slurm: Path, asked: lifecycle.CampaignRequest) -> None:
    reported: list[CampaignEvent] = []
    place = WorkerPlace(run.job(0), "node0")
    for _ in range(2):
        next_job.try_follow(place, plan=asked.plan, site=asked.site, slurm_id="4711", emit=reported.append)
    (queued,) = reported
    assert isinstance(queued, NextJobQueued)
    assert (queued.slurm_id, queued.number) == ("4712", 1)


def test_a_refused_job_leaves_nothing_and_may_be_tried_again(
    run: CampaignDir, slurm: Path, asked: lifecycle.CampaignRequest
) -> None:
    works = (slurm / "sbatch").read_text()
    (slurm / "sbatch").write_text("#!/bin/sh\necho no more jobs >&2; exit 1\n")
    with pytest.raises(SlurmError, match="no more jobs"):
        follow(run, 0, asked)
    assert run.job_numbers() == [0]
    (slurm / "sbatch").write_text(works)
    assert follow(run, 0, asked) == "4712"


def test_a_waiting_job_is_cancelled_and_its_files_removed(
    run: CampaignDir, slurm: Path, asked: lifecycle.CampaignRequest
) -> None:
    next_job.cancel_next_jobs(run.job(0))
    assert not (slurm / "calls").exists()
    follow(run, 0, asked)
    next_job.cancel_next_jobs(run.job(0))
    assert (slurm / "calls").read_text().endswith("scancel 4712\n")
    assert run.job_numbers() == [0]


def test_a_job_that_a_user_submitted_is_never_cancelled(run: CampaignDir, slurm: Path) -> None:
    lifecycle._make_job_dir(run, 1)
    next_job.cancel_next_jobs(run.job(0))
    assert run.job_numbers() == [0, 1]
    assert not (slurm / "calls").exists()


@pytest.mark.parametrize(
    ("outcome", "with_checkpoint", "ends"),
    [
        ("done", True, "done"),
        ("stopped", True, "stopped"),
        ("drained", False, None),
        ("cut", False, None),
        ("failed", False, "failed"),
        ("failed", True, None),
    ],
)
def test_a_campaign_continues_if_there_is_more_to_do_and_progress(
    run: CampaignDir, asked: lifecycle.CampaignRequest, outcome: str, with_checkpoint: bool, ends: str | None
) -> None:
    if with_checkpoint:
        checkpointed(run, 0)
    if outcome == "done":
        make_private_dir(run.checkpoints / f"000001-step-{asked.recipe.train.num_steps:06d}")
    found = next_job.campaign_outcome(ended(run, 0, outcome))
    assert found == (None if ends is None else (ends, "so it is"))


def test_a_job_that_made_every_step_is_followed_if_the_campaign_was_extended_meanwhile(
    run: CampaignDir, asked: lifecycle.CampaignRequest
) -> None:
    make_private_dir(run.checkpoints / f"000001-step-{asked.recipe.train.num_steps - 1:06d}")
    assert next_job.campaign_outcome(ended(run, 0, "done")) is None


def test_all_jobs_of_a_chain_are_cancelled_the_last_first(
    run: CampaignDir, slurm: Path, asked: lifecycle.CampaignRequest
) -> None:
    ids = next_job.queue_chain(run.job(0), plan=asked.plan, site=asked.site, slurm_id="4711")
    assert (ids, run.job_numbers()) == (["4712", "4712"], [0, 1, 2])
    next_job.cancel_next_jobs(run.job(0))
    assert (slurm / "calls").read_text().endswith("scancel 4712 4712\n")
    assert run.job_numbers() == [0]


def test_jobs_that_are_killed_are_followed_until_two_in_a_row_made_no_checkpoint(run: CampaignDir) -> None:
    assert next_job.campaign_outcome(run.job(0)) is None
    make_private_dir(run.job(1).root)
    assert next_job.campaign_outcome(run.job(1)) is None, "a user submitted it, and may have fixed the cause"
    run.job(1).chain_marker.write_text("1")
    found = next_job.campaign_outcome(run.job(1))
    assert found is not None
    assert found[0] == "failed"
    assert found[1].startswith(
        "jobs 0 and 1 ended without a checkpoint, the last without an outcome; raise job.walltime"
    )
    checkpointed(run, 0)
    assert next_job.campaign_outcome(run.job(1)) is None
    run.stop.touch()
    assert next_job.campaign_outcome(run.job(1)) == ("stopped", "a user asked for it (hpcrl stop)")


@pytest.mark.parametrize("how", ["cut", "drained"])
def test_a_campaign_ends_with_advice_when_two_jobs_in_a_row_had_no_time_for_a_checkpoint(
    run: CampaignDir, how: str
) -> None:
    assert next_job.campaign_outcome(ended(run, 0, how)) is None
    make_private_dir(run.job(1).logs)
    run.job(1).chain_marker.write_text("1")
    found = next_job.campaign_outcome(ended(run, 1, how))
    assert found is not None
    assert "jobs 0 and 1 ended without a checkpoint: so it is; raise job.walltime_min" in found[1]
    checkpointed(run, 1)
    assert next_job.campaign_outcome(run.job(1)) is None


def test_a_job_that_starts_with_nothing_to_do_ends_at_once(run: CampaignDir, asked: lifecycle.CampaignRequest) -> None:
    ended(run, 0, "done", "every training step was made")
    make_private_dir(run.checkpoints / f"000001-step-{asked.recipe.train.num_steps:06d}")
    make_private_dir(run.job(1).logs)
    run.job(1).chain_marker.write_text("1")
    subprocess.run([sys.executable, "-m", "hpcrl.job.driver", str(run.root), "1"], check=True, timeout=60)
    recorded = json.loads(run.job(1).outcome.read_text())
    assert (recorded["outcome"], recorded["reason"]) == ("done", "every training step was made")
    assert not (run.events / "001-train-0.jsonl").exists()
