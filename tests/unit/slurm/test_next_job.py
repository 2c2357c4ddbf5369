"""The job that follows another: when there is one, and when it has nothing to do."""

import json
import os
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import msgspec
import pytest

from hpcrl.campaign import submission
from hpcrl.campaign.request import CampaignRequest, load_request
from hpcrl.campaign_dir.event_log import EventLog
from hpcrl.campaign_dir.events import CampaignEvent, CheckpointSaved, NextJobQueued
from hpcrl.campaign_dir.job_end import EndCause, JobEnd
from hpcrl.campaign_dir.paths import CampaignDir, JobDir
from hpcrl.campaign_dir.workers import WorkerPlace
from hpcrl.errors import SlurmError
from hpcrl.slurm import commands, next_job
from hpcrl.slurm.script import EXCLUSION_S, list_excluded_nodes, make_mark
from hpcrl.system.files import make_private_dir, publish_json


@pytest.fixture
def asked() -> CampaignRequest:
    return load_request("quickstart", site="perlmutter", settings=("site.account=m1", "job.num_jobs=3"))


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Fakes of Slurm's commands that record how they are called."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, answer in (("sbatch", "echo 4712"), ("scancel", "true")):
        (folder / name).write_text(f'#!/bin/sh\necho {name} "$@" >> {folder}/calls\n{answer}\n')
        (folder / name).chmod(0o700)
    (folder / "queue").touch()
    (folder / "squeue").write_text(f"#!/bin/sh\ncat {folder}/queue\n")
    (folder / "squeue").chmod(0o700)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return folder


def follow(campaign: CampaignDir, number: int, asked: CampaignRequest) -> str | None:
    return next_job.queue_next_job(campaign.job(number), plan=asked.plan, site=asked.site, waits_for="4711")


def ended(campaign: CampaignDir, number: int, outcome: str, reason: str = "so it is") -> JobDir:
    make_private_dir(campaign.job(number).root)
    publish_json(campaign.job(number).outcome, {"outcome": outcome, "reason": reason, "time": 0.0})
    return campaign.job(number)


def ended_for(campaign: CampaignDir, number: int, cause: EndCause, *, nodes: tuple[str, ...] = ()) -> JobDir:
    make_private_dir(campaign.job(number).root)
    end = JobEnd(outcome="failed", reason="so it is", cause=cause, nodes=list(nodes), time=time.time())
    campaign.job(number).outcome.write_bytes(end.encode())
    if number:
        campaign.job(number).chain_marker.write_text("9")
    return campaign.job(number)


def checkpointed(campaign: CampaignDir, number: int) -> None:
    EventLog(campaign.events / f"{number:03d}-train-0.jsonl", job=number).emit(CheckpointSaved(step=1))


def test_jobs_follow_one_another_up_to_the_number_in_the_recipe(
    campaign: CampaignDir, slurm: Path, asked: CampaignRequest
) -> None:
    assert follow(campaign, 0, asked) == "4712"
    assert follow(campaign, 0, asked) is None, "there is one"
    assert (slurm / "calls").read_text() == (f"sbatch --parsable --dependency=afterany:4711 {campaign.job(1).script}\n")
    assert json.loads(campaign.job(1).submission.read_text())["id"] == "4712"
    assert f"hpcrl.job.driver {campaign.root} 1" in campaign.job(1).script.read_text()
    assert follow(campaign, 1, asked) == "4712"
    assert follow(campaign, 2, asked) is None, "three in a row"


def try_queue_next_jobs(campaign: CampaignDir, number: int, asked: CampaignRequest) -> list[CampaignEvent]:
    """Let the driver of a job queue the next ones twice; return what it reports."""
    reported: list[CampaignEvent] = []
    place = WorkerPlace(campaign.job(number), "node0")
    for _ in range(2):
        next_job.try_queue_next_jobs(place, plan=asked.plan, site=asked.site, slurm_id="4711", emit=reported.append)
    return reported


def test_the_next_job_and_the_one_after_it_are_queued_and_reported_once(
    campaign: CampaignDir, slurm: Path, asked: CampaignRequest
) -> None:
    (slurm / "queue").write_text("4712 PENDING\n")
    queued = try_queue_next_jobs(campaign, 0, asked)
    assert [(event.slurm_id, event.number) for event in queued if isinstance(event, NextJobQueued)] == [
        ("4712", 1),
        ("4712", 2),
    ]
    assert len(queued) == 2
    assert [call.split()[2] for call in (slurm / "calls").read_text().splitlines()] == [
        "--dependency=afterany:4711",
        "--dependency=afterany:4712:4711",
    ]
    assert try_queue_next_jobs(campaign, 1, asked) == [], "three in a row"


def test_a_site_that_refuses_the_job_after_the_next_hinders_nothing(
    campaign: CampaignDir, slurm: Path, asked: CampaignRequest
) -> None:
    works = (slurm / "sbatch").read_text()
    refuse = 'case "$*" in *afterany:4712*) echo QOSMaxSubmitJobPerUserLimit >&2; exit 1 ;; esac'
    (slurm / "sbatch").write_text(works.replace("#!/bin/sh\n", f"#!/bin/sh\n{refuse}\n", 1))
    (slurm / "queue").write_text("4712 PENDING\n")
    (queued,) = try_queue_next_jobs(campaign, 0, asked)
    assert isinstance(queued, NextJobQueued)
    assert campaign.job_numbers() == [0, 1]


def test_another_job_follows_in_place_of_one_that_was_cancelled(
    campaign: CampaignDir, slurm: Path, asked: CampaignRequest
) -> None:
    number_them = f"n=$(($(cat {slurm}/n || echo 4711) + 1)); echo $n > {slurm}/n; echo $n PENDING >> {slurm}/queue"
    (slurm / "sbatch").write_text(f"#!/bin/sh\n{number_them}; echo $n\necho $* >> {slurm}/calls\n")
    next_job.allow_more_jobs(campaign.job(0), 1, plan=asked.plan)
    queued = try_queue_next_jobs(campaign, 0, asked)
    assert [event.number for event in queued if isinstance(event, NextJobQueued)] == [1, 2]
    (slurm / "queue").write_text("4713 PENDING\n")
    (third,) = try_queue_next_jobs(campaign, 0, asked)
    assert isinstance(third, NextJobQueued)
    assert third.number == 3
    assert "--dependency=afterany:4713:4711 " in (slurm / "calls").read_text().splitlines()[-1]


def test_a_refused_job_leaves_nothing_and_may_be_tried_again(
    campaign: CampaignDir, slurm: Path, asked: CampaignRequest
) -> None:
    works = (slurm / "sbatch").read_text()
    (slurm / "sbatch").write_text("#!/bin/sh\necho no more jobs >&2; exit 1\n")
    with pytest.raises(SlurmError, match="no more jobs"):
        follow(campaign, 0, asked)
    assert campaign.job_numbers() == [0]
    (slurm / "sbatch").write_text(works)
    assert follow(campaign, 0, asked) == "4712"


def test_a_job_that_may_be_queued_though_slurm_is_silent_is_kept_and_cancelled_by_its_mark(
    campaign: CampaignDir, slurm: Path, asked: CampaignRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commands, "LOOKUP_INTERVAL_S", 0.01)
    silence = "Unable to contact slurm controller (connect failure)"
    (slurm / "sbatch").write_text(
        f"#!/bin/sh\ngrep -o 'hpcrl:[0-9a-f]*:[0-9]*' $3 > {slurm}/queued; ln -sf off {slurm}/squeue\n"
        "echo 'sbatch: error: Batch job submission failed: Socket timed out on send/recv operation' >&2; exit 1\n"
    )
    (slurm / "off").write_text(f"#!/bin/sh\necho 'slurm_load_jobs error: {silence}' >&2; exit 1\n")
    (slurm / "off").chmod(0o700)
    for tries in (r"Socket timed out .* the job may still be queued", r"squeue does not answer .* Unable to contact"):
        with pytest.raises(SlurmError, match=tries):
            follow(campaign, 0, asked)
        assert campaign.job(1).script.exists(), "Slurm may start it"
    with pytest.raises(SlurmError, match="squeue does not answer"):
        next_job.cancel_next_jobs(campaign.job(0))
    assert campaign.job(1).script.exists(), "it was not cancelled"
    (slurm / "off").write_text("#!/bin/sh\n")
    next_job.cancel_next_jobs(campaign.job(0))
    assert campaign.job(1).script.exists(), "Slurm may still queue it"
    (slurm / "off").write_text(f"#!/bin/sh\necho 4712+0 $(head -1 {slurm}/queued)\n")
    assert follow(campaign, 0, asked) == "4712", "taken over at once"
    next_job.cancel_next_jobs(campaign.job(0))
    assert (slurm / "calls").read_text() == "scancel 4712\n"
    assert campaign.job_numbers() == [0]


def test_a_job_that_cannot_be_recorded_is_cancelled(campaign: CampaignDir, slurm: Path, asked: CampaignRequest) -> None:
    (slurm / "sbatch").write_text(f"#!/bin/sh\nrm -r {campaign.job(1).root}\necho 4712\n")  # as by `hpcrl stop`
    with pytest.raises(FileNotFoundError):
        follow(campaign, 0, asked)
    assert (slurm / "calls").read_text() == "scancel 4712\n"


def test_the_mark_of_a_job_is_the_same_by_every_path(campaign: CampaignDir, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    same = CampaignDir(tmp_path / "link" / campaign.name)
    assert make_mark(same.job(1)) == make_mark(campaign.job(1))
    assert make_mark(campaign.job(2)) != make_mark(campaign.job(1))


def test_no_second_job_is_queued_while_the_queue_cannot_be_seen(
    campaign: CampaignDir, slurm: Path, asked: CampaignRequest
) -> None:
    (slurm / "squeue").unlink()
    (slurm / "squeue").symlink_to("/bin/false")
    with pytest.raises(SlurmError, match="try again later"):
        follow(campaign, 0, asked)
    assert not (slurm / "calls").exists()
    (slurm / "squeue").unlink()
    (slurm / "squeue").symlink_to("/bin/true")
    assert follow(campaign, 0, asked) == "4712", "as soon as it can"


def test_a_waiting_job_is_cancelled_and_its_files_removed(
    campaign: CampaignDir, slurm: Path, asked: CampaignRequest
) -> None:
    next_job.cancel_next_jobs(campaign.job(0))
    assert not (slurm / "calls").exists()
    follow(campaign, 0, asked)
    next_job.cancel_next_jobs(campaign.job(0))
    assert (slurm / "calls").read_text().endswith("scancel 4712\n")
    assert campaign.job_numbers() == [0]


def test_a_job_that_a_user_submitted_is_never_cancelled(campaign: CampaignDir, slurm: Path) -> None:
    submission.claim_job(campaign, 1)
    next_job.cancel_next_jobs(campaign.job(0))
    assert campaign.job_numbers() == [0, 1]
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
    campaign: CampaignDir, asked: CampaignRequest, outcome: str, with_checkpoint: bool, ends: str | None
) -> None:
    if with_checkpoint:
        checkpointed(campaign, 0)
    if outcome == "done":
        make_private_dir(campaign.checkpoints / f"000001-step-{asked.recipe.train.num_steps:06d}")
    found = next_job.campaign_outcome(ended(campaign, 0, outcome))
    assert found == (None if ends is None else (ends, "so it is"))


def test_a_job_that_made_every_step_is_followed_if_the_campaign_was_extended_meanwhile(
    campaign: CampaignDir, asked: CampaignRequest
) -> None:
    make_private_dir(campaign.checkpoints / f"000001-step-{asked.recipe.train.num_steps - 1:06d}")
    assert next_job.campaign_outcome(ended(campaign, 0, "done")) is None


def test_all_jobs_of_a_chain_are_cancelled_the_last_first(
    campaign: CampaignDir, slurm: Path, asked: CampaignRequest
) -> None:
    ids = next_job.queue_all_next_jobs(
        campaign.job(0), plan=asked.plan, site=asked.site, slurm_id="4711", env=os.environ
    )
    assert (ids, campaign.job_numbers()) == (["4712", "4712"], [0, 1, 2])
    next_job.cancel_next_jobs(campaign.job(0))
    assert (slurm / "calls").read_text().endswith("scancel 4712 4712\n")
    assert campaign.job_numbers() == [0]


def test_jobs_that_are_killed_are_followed_until_two_in_a_row_made_no_checkpoint(campaign: CampaignDir) -> None:
    assert next_job.campaign_outcome(campaign.job(0)) is None
    make_private_dir(campaign.job(1).root)
    assert next_job.campaign_outcome(campaign.job(1)) is None, "a user submitted it, and may have fixed the cause"
    campaign.job(1).chain_marker.write_text("1")
    found = next_job.campaign_outcome(campaign.job(1))
    assert found is not None
    assert found[0] == "failed"
    assert found[1].startswith(
        "jobs 0 and 1 ended without a checkpoint, the last without an outcome; raise job.walltime"
    )
    checkpointed(campaign, 0)
    assert next_job.campaign_outcome(campaign.job(1)) is None
    campaign.stop.touch()
    assert next_job.campaign_outcome(campaign.job(1)) == ("stopped", "a user asked for it (hpcrl stop)")


@pytest.mark.parametrize("how", ["cut", "drained"])
def test_a_campaign_ends_with_advice_when_two_jobs_in_a_row_had_no_time_for_a_checkpoint(
    campaign: CampaignDir, how: str
) -> None:
    assert next_job.campaign_outcome(ended(campaign, 0, how)) is None
    make_private_dir(campaign.job(1).logs)
    campaign.job(1).chain_marker.write_text("1")
    found = next_job.campaign_outcome(ended(campaign, 1, how))
    assert found is not None
    assert "jobs 0 and 1 ended without a checkpoint: so it is; raise job.walltime_min" in found[1]
    checkpointed(campaign, 1)
    assert next_job.campaign_outcome(campaign.job(1)) is None


def test_a_job_that_starts_with_nothing_to_do_ends_at_once(campaign: CampaignDir, asked: CampaignRequest) -> None:
    ended(campaign, 0, "done", "every training step was made")
    make_private_dir(campaign.checkpoints / f"000001-step-{asked.recipe.train.num_steps:06d}")
    make_private_dir(campaign.job(1).logs)
    campaign.job(1).chain_marker.write_text("1")
    subprocess.run([sys.executable, "-m", "hpcrl.job.driver", str(campaign.root), "1"], check=True, timeout=60)
    recorded = json.loads(campaign.job(1).outcome.read_text())
    assert (recorded["outcome"], recorded["reason"]) == ("done", "every training step was made")
    assert not (campaign.events / "001-train-0.jsonl").exists()


def test_jobs_that_never_started_end_nothing_that_has_a_checkpoint(campaign: CampaignDir) -> None:
    assert next_job.campaign_outcome(ended_for(campaign, 0, "not-started")) == ("failed", "so it is")
    checkpointed(campaign, 0)
    for number in range(1, 6):
        assert next_job.campaign_outcome(ended_for(campaign, number, "not-started")) is None
    assert next_job.campaign_outcome(ended_for(campaign, 6, "walltime")) is None, (
        "the first that had time for a checkpoint"
    )
    assert next_job.campaign_outcome(ended_for(campaign, 7, "walltime")) is not None


def test_jobs_without_a_driver_end_nothing_that_has_a_checkpoint(campaign: CampaignDir) -> None:
    """Nothing records their end: their node was broken, or the file system was away."""
    ended_for(campaign, 0, "walltime")
    checkpointed(campaign, 0)
    for number in range(1, 6):
        make_private_dir(campaign.job(number).root)
        campaign.job(number).chain_marker.write_text("9")
        assert next_job.campaign_outcome(campaign.job(number)) is None
    make_private_dir(campaign.job(5).parsl)
    assert next_job.campaign_outcome(campaign.job(5)) is None, "the first that had a driver"
    for number in (4, 5):
        make_private_dir(campaign.job(number).parsl)
    assert next_job.campaign_outcome(campaign.job(5)) is not None, "two that had one"


def test_slurm_names_the_cause_of_a_job_without_an_outcome(
    campaign: CampaignDir, slurm: Path, asked: CampaignRequest
) -> None:
    follow(campaign, 0, asked)
    checkpointed(campaign, 0)
    (slurm / "squeue").unlink()
    (slurm / "squeue").write_text("#!/bin/sh\necho 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1\n")
    (slurm / "sacct").write_text("#!/bin/sh\necho '4712|4712|NODE_FAIL|1:0|gpu|n1'\n")
    for name in ("squeue", "sacct"):
        (slurm / name).chmod(0o700)
    assert next_job.query_end_state(campaign.job(1)) == "node_fail"
    assert next_job.query_end_state(campaign.job(0)) == "unknown", "it was never submitted"
    for number in (2, 3):
        make_private_dir(campaign.job(number).parsl)
        campaign.job(number).chain_marker.write_text("9")
    assert next_job.campaign_outcome(campaign.job(3), state="node_fail") is None
    assert next_job.campaign_outcome(campaign.job(3), state="timeout") is not None


def test_the_next_job_avoids_nodes_that_failed(campaign: CampaignDir, slurm: Path, asked: CampaignRequest) -> None:
    ended_for(campaign, 0, "node-failure", nodes=("nid1", "nid2"))
    follow(campaign, 0, asked)
    script = campaign.job(1).script.read_text()
    assert script.count("#SBATCH --exclude=nid1,nid2\n") == len(asked.plan.components)
    (slurm / "scontrol").write_text(f'#!/bin/sh\necho scontrol "$@" >> {slurm}/calls\n')
    (slurm / "scontrol").chmod(0o700)
    next_job.avoid_nodes(campaign.job(0), plan=asked.plan, site=asked.site)
    calls = [line for line in (slurm / "calls").read_text().splitlines() if line.startswith("scontrol")]
    indices = range(len(asked.plan.components))
    assert calls == [f"scontrol update JobId=4712+{index} ExcNodeList=nid1,nid2" for index in indices]


def test_no_more_nodes_are_avoided_than_a_partition_can_spare(campaign: CampaignDir, asked: CampaignRequest) -> None:
    ended_for(campaign, 0, "node-failure", nodes=("nid1", "nid2"))
    now = time.time()
    needed = Counter[str]()
    for part in asked.plan.components:
        needed[part.partition] += part.nodes
    trainers = asked.plan.components[asked.plan.role("train").component].partition
    parts = {
        name: msgspec.structs.replace(part, max_nodes=needed[name] + (name != trainers))
        for name, part in asked.site.partitions.items()
        if name in needed
    }
    small = msgspec.structs.replace(asked.site, partitions=parts)
    found = list_excluded_nodes(campaign, plan=asked.plan, site=small, now=now)
    assert found == {name: ["nid1"] * (name != trainers) for name in needed}, "each spares what it can"
    late = list_excluded_nodes(campaign, plan=asked.plan, site=asked.site, now=now + EXCLUSION_S + 60)
    assert not any(late.values())
