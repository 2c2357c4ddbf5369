"""The separate jobs of components: their scripts, their ids, and what is refused."""

import os
import time
from pathlib import Path

import pytest

from hpcrl.campaign import submission
from hpcrl.campaign.request import CampaignRequest, load_request
from hpcrl.campaign_dir.job_end import JobEnd
from hpcrl.campaign_dir.paths import CampaignDir
from hpcrl.errors import LostAnswerError, SlurmError
from hpcrl.slurm import component_jobs, next_job
from hpcrl.slurm.component_jobs import queue_component_jobs, read_component_ids
from hpcrl.slurm.script import make_job_script, make_mark
from hpcrl.system.files import make_private_dir
from tests.support.shell_scripts import find_script_problems

SETTINGS = ("site.account=m1", "job.num_jobs=3", "job.layout=multi-job", "resources.prefill.num_workers=1")


@pytest.fixture
def asked() -> CampaignRequest:
    return load_request("quickstart", site="perlmutter", settings=SETTINGS)


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Fakes of Slurm's commands: sbatch numbers jobs from 101 and refuses a script named in the file `refused`."""
    folder = tmp_path / "bin"
    folder.mkdir()
    answer = 'case "$*" in *--parsable*) echo $n;; *) echo "Submitted batch job $n";; esac'
    number = f"n=$(($(cat {folder}/number) + 1)); echo $n > {folder}/number; {answer}"
    refuse = f'case "$*" in *"$(cat {folder}/refused)"*) echo "sbatch: error: not now" >&2; exit 1;; esac'
    programs = dict.fromkeys(("scancel", "scontrol", "srun"), "true")
    programs |= {"sbatch": f"{refuse}\n{number}", "squeue": f"cat {folder}/queue"}
    for name, program in programs.items():
        (folder / name).write_text(f'#!/bin/sh\necho {name} "$@" >> {folder}/calls\n{program}\n')
        (folder / name).chmod(0o700)
    for name, text in (("number", "100\n"), ("refused", "none\n"), ("queue", ""), ("calls", "")):
        (folder / name).write_text(text)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return folder


def list_calls(slurm: Path, name: str) -> list[str]:
    rows = (slurm / "calls").read_text().splitlines()
    return [row.removeprefix(f"{name} ") for row in rows if row.startswith(f"{name} ")]


def list_flags(script: str) -> set[str]:
    return {line.removeprefix("#SBATCH ") for line in script.splitlines() if line.startswith("#SBATCH ")}


def test_each_component_but_the_first_has_a_script_and_is_queued_as_a_job(
    campaign: CampaignDir, asked: CampaignRequest, slurm: Path, tmp_path: Path
) -> None:
    job, plan = campaign.job(0), asked.plan
    queue_component_jobs(job, plan=plan, site=asked.site)
    assert read_component_ids(job) == ["101", "102", "103"]
    first = make_job_script(plan, job=job, site=asked.site)
    assert "hetjob" not in first
    assert set(plan.components[0].slurm_flags) <= list_flags(first)
    scripts = {"first.sh": first}
    for component in plan.components[1:]:
        script = scripts[f"{component.index}.sh"] = job.component_script(component.index).read_text()
        flags = list_flags(script)
        assert set(component.slurm_flags) <= flags
        assert f"--comment={make_mark(job)}:{component.index}" in flags
        assert "--requeue" in flags
        assert not [flag for flag in flags if flag.startswith("--signal")], "the driver watches the time"
        assert script.endswith(f"hpcrl.job.component_holder {campaign.root} 0 {component.index}\n")
    assert find_script_problems(scripts, make_private_dir(tmp_path / "checked")) == ""
    assert len(list_calls(slurm, "squeue")) == 3, "a job of an earlier try is looked for once for each"


def test_where_one_is_refused_those_before_it_are_cancelled(
    campaign: CampaignDir, asked: CampaignRequest, slurm: Path
) -> None:
    (slurm / "refused").write_text("component-3.sh\n")
    with pytest.raises(SlurmError, match="Slurm refused: not now"):
        queue_component_jobs(campaign.job(0), plan=asked.plan, site=asked.site)
    assert list_calls(slurm, "scancel") == ["101 102"]


def test_a_job_of_an_earlier_try_is_cancelled_before_its_component_is_queued_again(
    campaign: CampaignDir, asked: CampaignRequest, slurm: Path
) -> None:
    job = campaign.job(0)
    (slurm / "scancel").write_text(f'#!/bin/sh\necho scancel "$@" >> {slurm}/calls\n: > {slurm}/queue\n')
    (slurm / "queue").write_text(f"77 {make_mark(job)}\n78 {make_mark(job, component=2)}\n")
    queue_component_jobs(job, plan=asked.plan, site=asked.site)
    assert list_calls(slurm, "scancel") == ["78"]
    assert read_component_ids(job) == ["101", "102", "103"]


def test_a_campaign_whose_first_job_is_refused_leaves_no_jobs_of_components(
    home: Path, tmp_path: Path, asked: CampaignRequest, slurm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SCRATCH", str(tmp_path))
    (slurm / "refused").write_text("submission_file\n")
    with pytest.raises(SlurmError, match="Slurm refused: not now"):
        submission.submit(asked, name="x")
    assert list_calls(slurm, "scancel") == ["101 102 103"]
    assert not list((tmp_path / "hpcrl").iterdir())


def test_all_jobs_of_a_next_job_wait_for_the_running_one_and_are_cancelled_together(
    campaign: CampaignDir, asked: CampaignRequest, slurm: Path
) -> None:
    id = next_job.queue_next_job(campaign.job(0), plan=asked.plan, site=asked.site, waits_for="88")
    assert id == "104"
    queued = list_calls(slurm, "sbatch")
    assert len(queued) == 4
    assert ["--dependency=afterany:88 " in call for call in queued[:3]] == [True] * 3
    assert "--dependency=afterany:88,after:101:102:103 " in queued[3], "the driver starts last"
    next_job.cancel_next_jobs(campaign.job(0))
    assert list_calls(slurm, "scancel") == ["104 101 102 103"]


def test_a_next_job_that_is_refused_leaves_no_jobs_of_components(
    campaign: CampaignDir, asked: CampaignRequest, slurm: Path
) -> None:
    (slurm / "refused").write_text("job.sh\n")
    with pytest.raises(SlurmError):
        next_job.queue_next_job(campaign.job(0), plan=asked.plan, site=asked.site, waits_for="88")
    assert list_calls(slurm, "scancel") == ["101 102 103"]
    assert not campaign.job(1).root.exists()


def test_jobs_of_components_avoid_nodes_by_their_own_ids(
    campaign: CampaignDir, asked: CampaignRequest, slurm: Path
) -> None:
    next_job.queue_next_job(campaign.job(0), plan=asked.plan, site=asked.site, waits_for="88")
    end = JobEnd(outcome="failed", cause="node-failure", nodes=["nid1"], time=time.time())
    campaign.job(0).outcome.write_bytes(end.encode())
    next_job.avoid_nodes(campaign.job(0), plan=asked.plan, site=asked.site)
    updated = [call.split()[1] for call in list_calls(slurm, "scontrol") if "ExcNodeList=nid1" in call]
    assert updated == ["JobId=104", "JobId=101", "JobId=102", "JobId=103"]


def test_the_driver_starts_after_the_jobs_of_components(
    home: Path, tmp_path: Path, asked: CampaignRequest, slurm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SCRATCH", str(tmp_path))
    submission.submit(asked, name="x")
    *_, last = list_calls(slurm, "sbatch")
    assert last.startswith("--dependency=after:101:102:103 ")


@pytest.mark.parametrize("lost", ["submission_file", "component-2.sh"])
def test_a_campaign_whose_submission_had_no_answer_leaves_no_jobs_of_components(
    home: Path, tmp_path: Path, asked: CampaignRequest, slurm: Path, monkeypatch: pytest.MonkeyPatch, lost: str
) -> None:
    monkeypatch.setenv("SCRATCH", str(tmp_path))
    monkeypatch.setattr("hpcrl.slurm.commands.LOOKUP_INTERVAL_S", 0.0)
    (slurm / "refused").write_text(f"{lost}\n")
    text = (slurm / "sbatch").read_text().replace("not now", "Socket timed out on send/recv operation")
    (slurm / "sbatch").write_text(text)
    with pytest.raises(LostAnswerError):
        submission.submit(asked, name="x")
    assert list_calls(slurm, "scancel") == ["101" if lost == "component-2.sh" else "101 102 103"]


def test_a_job_of_an_earlier_try_that_does_not_end_is_not_taken_for_the_new_one(
    campaign: CampaignDir, asked: CampaignRequest, slurm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(component_jobs, "CANCEL_TIMEOUT_S", 0.0)
    (slurm / "queue").write_text(f"78 {make_mark(campaign.job(0), component=1)}\n")
    with pytest.raises(SlurmError, match="has not ended yet"):
        queue_component_jobs(campaign.job(0), plan=asked.plan, site=asked.site)
    assert list_calls(slurm, "sbatch") == []
