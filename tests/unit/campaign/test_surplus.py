"""What `hpcrl gc` lists and removes: only what no resume needs, also while a campaign runs."""

import os
from pathlib import Path

import pytest

from hpcrl.campaign import surplus
from hpcrl.campaign.directory import reserve_campaign
from hpcrl.campaign.request import load_request
from hpcrl.campaign.submission import write_description
from hpcrl.campaign_dir.paths import CampaignDir
from hpcrl.cli import main
from hpcrl.system.files import make_private_dir, publish_json
from hpcrl.system.processes import read_start_ticks
from hpcrl.weights.versions import version_dir

GONE = 2**22 - 1
"""A pid that no process has: the largest is one less."""


def add_job(campaign: CampaignDir, number: int, *, pid: int) -> None:
    job = campaign.job(number)
    make_private_dir(job.parsl / "000").joinpath("parsl.log").write_text("x" * 100)
    make_private_dir(job.logs).joinpath("train-0.log").write_text("kept")
    record = {
        "id": f"local-{pid}",
        "scheduler": "local",
        "pid": pid,
        "start_ticks": read_start_ticks(pid) or 1,
        "time": 1.0,
    }
    publish_json(job.submission, record)


def add_file(path: Path, *, age_s: float = 0.0) -> Path:
    make_private_dir(path.parent)
    path.write_text("x" * 1000)
    then = path.stat().st_mtime - age_s
    os.utime(path, (then, then))
    return path


@pytest.fixture
def campaign(home: Path) -> CampaignDir:
    """A campaign with one ended job, versions of the weights, a checkpoint, segments and what was never finished."""
    request = load_request("quickstart", site="local")
    made = reserve_campaign("c", stem="quickstart", site=request.site)
    write_description(made, request)
    add_job(made, 0, pid=GONE)
    for version in (3, 4, 5):
        add_file(version_dir(made.weights, version) / "model.safetensors")
    add_file(made.weights / "newest.json")
    add_file(made.checkpoints / "000001-step-000010" / "checkpoint.json")
    for name in ("rollouts", "scored", "archive"):
        add_file(made.spool(name) / "000-env-0-000001-8-abcdef01.h5")
    for age_s in (0.0, 2 * surplus.MIN_AGE_S):
        add_file(made.checkpoints / f".{age_s:.0f}.0123456789ab.tmp", age_s=age_s)
    return made


def list_files(campaign: CampaignDir) -> set[str]:
    return {str(path.relative_to(campaign.root)) for path in campaign.root.rglob("*") if path.is_file()}


def test_nothing_is_removed_before_it_is_asked_for(campaign: CampaignDir, capsys: pytest.CaptureFixture[str]) -> None:
    before = list_files(campaign)
    assert main(["gc", "c"]) == 0
    printed = capsys.readouterr().out
    assert "c: old versions of the weights: 2, 2 KiB" in printed
    assert "`hpcrl gc c --yes` removes it" in printed
    assert main(["gc", "--archive"]) == 0
    assert "`hpcrl gc --archive --yes` removes it" in capsys.readouterr().out
    assert list_files(campaign) == before


def test_what_a_campaign_without_a_job_does_not_need_is_removed(campaign: CampaignDir) -> None:
    before = list_files(campaign)
    assert main(["gc", "--yes"]) == 0
    assert before - list_files(campaign) == {
        "jobs/000/parsl/000/parsl.log",
        "weights/v00000003/model.safetensors",
        "weights/v00000004/model.safetensors",
        "checkpoints/.7200.0123456789ab.tmp",
    }


def test_a_job_whose_end_is_recorded_keeps_nothing(campaign: CampaignDir) -> None:
    publish_json(campaign.job(0).outcome, {"outcome": "done", "reason": "", "time": 1.0})
    assert "old versions of the weights" in [part.kind for part in surplus.find_surplus(campaign)]


def test_of_a_campaign_that_runs_only_the_traces_of_earlier_jobs_are_removed(campaign: CampaignDir) -> None:
    add_job(campaign, 1, pid=os.getpid())
    before = list_files(campaign)
    assert main(["gc", "c", "--yes"]) == 0
    assert before - list_files(campaign) == {"jobs/000/parsl/000/parsl.log"}


def test_a_job_that_is_submitted_just_now_keeps_the_weights(campaign: CampaignDir) -> None:
    make_private_dir(campaign.job(1).root)
    assert [part.kind for part in surplus.find_surplus(campaign)] == ["files of ended jobs for their own processes"]


def test_the_archive_is_removed_only_if_it_is_named(campaign: CampaignDir) -> None:
    kept = {part.kind for part in surplus.find_surplus(campaign)}
    named = {part.kind for part in surplus.find_surplus(campaign, with_archive=True)}
    assert named - kept == {"trajectories in the archive"}


def test_what_cannot_be_removed_is_named(campaign: CampaignDir, capsys: pytest.CaptureFixture[str]) -> None:
    parts = surplus.find_surplus(campaign)
    held = surplus.SurplusPart(campaign=campaign, kind="held", paths=(Path("/proc/1/stat"),), num_bytes=0)
    assert surplus.remove_surplus([held, *parts]) == ["/proc/1/stat: Operation not permitted"]
    assert surplus.find_surplus(campaign) == [], "all else is gone"


def test_a_campaign_that_cannot_be_read_does_not_keep_others_from_being_cleaned(
    campaign: CampaignDir, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = CampaignDir(home / "campaigns" / "broken")
    make_private_dir(broken.root)
    publish_json(broken.manifest, {"name": "broken", "created": 1.0})
    assert main(["gc"]) == 0
    printed = capsys.readouterr()
    assert "campaign broken is left alone: " in printed.err
    assert "c: old versions of the weights" in printed.out
