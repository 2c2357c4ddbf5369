"""Campaigns that are continued with changes, and ones that get more steps or jobs."""

import errno
import json
import os
import re
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from hpcrl.campaign import continuation, running_jobs, submission
from hpcrl.campaign.request import load_request
from hpcrl.campaign.running_jobs import stop_gracefully, stop_now
from hpcrl.campaign.submission import claim_job, queue_next_jobs, start_job, write_description
from hpcrl.campaign_dir.event_log import EventLog
from hpcrl.campaign_dir.events import CheckpointSaved
from hpcrl.campaign_dir.paths import CampaignDir
from hpcrl.campaign_dir.train_limits import make_recipe_digest
from hpcrl.campaign_dir.workers import WorkerPlace
from hpcrl.errors import CampaignError, ConfigError, SlurmError
from hpcrl.plan.records import read_plan, read_recipe, read_site
from hpcrl.slurm import next_job
from hpcrl.slurm.script import make_mark
from hpcrl.slurm.submit import SubmittedJob, record_submission
from hpcrl.system.files import make_private_dir, publish_json, read_json
from hpcrl.system.processes import read_start_ticks

RECIPE = 'extends = "quickstart"\nname = "mine"\n[train]\nnum_steps = 10\n[job]\nnum_jobs = {num_jobs}\n'
PROGRAMS = {
    "sbatch": 'n=$(cat {d}/n); n=$((n + 1)); echo $n > {d}/n; echo "$n|PENDING" >> {d}/queue\n'
    'case "$*" in *--parsable*) echo $n ;; *) echo "Submitted batch job $n" ;; esac',
    "squeue": 'case "$*" in *%k*) exit 0 ;; esac\n'
    'while IFS="|" read -r id state; do echo "$id|$id|$state|env|||(null)|None"; done < {d}/queue',
    "scancel": "true",
    "srun": "true",
    "sacct": "true",
}


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Fakes of Slurm's programs with a queue: a line `id|STATE` a job; calls are recorded."""
    folder = make_private_dir(tmp_path / "bin")
    (folder / "n").write_text("70")
    (folder / "queue").touch()
    for name, body in PROGRAMS.items():
        (folder / name).write_text(
            f'#!/bin/sh\necho {name} "$@" >> {folder}/calls\n{body.replace("{d}", str(folder))}\n'
        )
        (folder / name).chmod(0o700)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return folder


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "mine.toml"
    path.write_text(RECIPE.format(num_jobs=1))
    return path


def submitted(tmp_path: Path, recipe: Path, *settings: str, site: str = "perlmutter") -> CampaignDir:
    """A campaign with a first job, as `hpcrl submit` leaves it."""
    campaign = CampaignDir(make_private_dir(tmp_path / "c"))
    own = ("site.account=m1",) if site == "perlmutter" else ()
    request = load_request(str(recipe), site=site, settings=(*own, *settings))
    write_description(campaign, request)
    job = claim_job(campaign, 0)
    queue_next_jobs(job, request, start_job(job, request))
    return campaign


def ended(campaign: CampaignDir, slurm: Path, outcome: str, *, step: int) -> None:
    """Let every job have ended, the last with this outcome and a checkpoint of this step."""
    number = campaign.job_numbers()[-1]
    publish_json(campaign.job(number).outcome, {"outcome": outcome, "reason": "so it is", "time": 0.0})
    make_private_dir(campaign.checkpoints / f"{number + 1:06d}-step-{step:06d}")
    (slurm / "queue").write_text("")


def runs(slurm: Path, *ids: int) -> None:
    """Let these jobs run; others wait."""
    rows = [row.partition("|") for row in (slurm / "queue").read_text().splitlines()]
    (slurm / "queue").write_text("".join(f"{id}|{'RUNNING' if int(id) in ids else state}\n" for id, _, state in rows))


def queued(slurm: Path) -> list[str]:
    return [call for call in (slurm / "calls").read_text().splitlines() if call.startswith("sbatch")]


def test_a_resumed_campaign_has_the_settings_that_were_changed(tmp_path: Path, slurm: Path, recipe: Path) -> None:
    campaign = submitted(tmp_path, recipe)
    ended(campaign, slurm, "drained", step=4)
    notes: list[str] = []
    settings = ("job.walltime_min=90", "train.num_steps=20", "site.account=m2")
    continuation.resume(str(campaign.root), settings=settings, show_note=notes.append)
    assert read_recipe(campaign).train.num_steps == 20
    assert read_plan(campaign).cost.walltime_min == 90
    assert read_site(campaign).account == "m2"
    (script,) = campaign.job(1).root.glob("*_submission.sh")
    assert "--time=01:30:00" in script.read_text()
    assert "--account=m2" in script.read_text()
    assert "changed: train.num_steps = 20 (was 10)" in notes
    assert 'changed: site.account = "m2" (was "m1")' in notes
    (change,) = read_json(campaign.manifest)["changes"]
    assert (change["job"], change["changed"]["train.num_steps"]) == (1, [10, 20])


def test_changes_last(tmp_path: Path, slurm: Path, recipe: Path) -> None:
    campaign = submitted(tmp_path, recipe)
    ended(campaign, slurm, "drained", step=4)
    continuation.resume(str(campaign.root), settings=("train.num_steps=20",))
    ended(campaign, slurm, "drained", step=8)
    notes: list[str] = []
    continuation.resume(str(campaign.root), show_note=notes.append)
    assert (notes, read_recipe(campaign).train.num_steps) == ([], 20)


@pytest.mark.parametrize(
    ("setting", "what"),
    [
        ("rollout.group_size=16", r"rollout.group_size = 16 \(was \d+\) cannot change .*in flight"),
        ("seed=5", "seed = 5 .* were drawn with it"),
        ("model.tiny.num_layers=3", "model.tiny.num_layers = 3 .* checkpoints are of this model"),
        ("train.lora_rank=4", "train.lora_rank = 4"),
        ("resources.env.num_workers=3", "3 env workers in place of .*set resources.env.num_workers = "),
        ('domains.other.env="hpcrl.envs.digits:Digits"', "a campaign keeps its domains|cannot"),
        ("train.num_step=5", "did you mean 'num_steps'"),
        ("train.num_steps=many", "train.num_steps"),
    ],
)
def test_what_a_campaign_cannot_take_over_is_refused_and_nothing_is_changed(
    tmp_path: Path, slurm: Path, recipe: Path, setting: str, what: str
) -> None:
    campaign = submitted(tmp_path, recipe)
    ended(campaign, slurm, "drained", step=4)
    before = {path: path.read_bytes() for path in campaign.root.iterdir() if path.is_file()}
    with pytest.raises((CampaignError, ConfigError), match=what):
        continuation.resume(str(campaign.root), settings=(setting,))
    assert {path: path.read_bytes() for path in campaign.root.iterdir() if path.is_file()} == before
    assert campaign.job_numbers() == [0]


def test_a_refused_job_leaves_the_records_as_they_were(tmp_path: Path, slurm: Path, recipe: Path) -> None:
    campaign = submitted(tmp_path, recipe)
    ended(campaign, slurm, "drained", step=4)
    before = campaign.recipe.read_bytes(), campaign.manifest.read_bytes()
    (slurm / "sbatch").write_text("#!/bin/sh\necho 'sbatch: error: Invalid account' >&2\nexit 1\n")
    with pytest.raises(SlurmError, match="nvalid account"):
        continuation.resume(str(campaign.root), settings=("train.num_steps=20",))
    assert (campaign.recipe.read_bytes(), campaign.manifest.read_bytes()) == before
    assert campaign.job_numbers() == [0]


def test_an_edited_file_of_the_recipe_is_used_only_if_it_is_accepted(tmp_path: Path, slurm: Path, recipe: Path) -> None:
    campaign = submitted(tmp_path, recipe)
    ended(campaign, slurm, "drained", step=4)
    recipe.write_text(RECIPE.format(num_jobs=4))
    notes: list[str] = []
    continuation.resume(str(campaign.root), show_note=notes.append)
    assert notes == ["what was submitted has changed since, and is not used without --accept: job.num_jobs = 4 (was 1)"]
    assert read_plan(campaign).num_jobs == 1
    ended(campaign, slurm, "drained", step=8)
    continuation.resume(str(campaign.root), accept=True)
    assert (read_plan(campaign).num_jobs, read_recipe(campaign).job.num_jobs) == (4, 4)


def test_a_record_that_was_edited_by_hand_is_refused_until_it_is_accepted(
    tmp_path: Path, slurm: Path, recipe: Path
) -> None:
    campaign = submitted(tmp_path, recipe)
    ended(campaign, slurm, "drained", step=4)
    record = json.loads(campaign.recipe.read_text())
    record["job"]["walltime_min"] = 120
    campaign.recipe.write_text(json.dumps(record))
    with pytest.raises(CampaignError, match=r"recipe.json in .* edited .*--accept"):
        continuation.resume(str(campaign.root))
    continuation.resume(str(campaign.root), accept=True)
    assert read_plan(campaign).cost.walltime_min == 120
    ended(campaign, slurm, "drained", step=8)
    continuation.resume(str(campaign.root))


def test_records_of_another_version_are_read_without_what_this_one_does_not_know(
    tmp_path: Path, slurm: Path, recipe: Path
) -> None:
    campaign = submitted(tmp_path, recipe)
    ended(campaign, slurm, "drained", step=4)
    record, plan = json.loads(campaign.recipe.read_text()), json.loads(campaign.plan.read_text())
    record["train"]["magic"] = 1
    record["router"]["reluctance"] = record["router"].pop("mismatch_penalty", None) or 2.5
    record["resources"]["decode"]["num_workers"] = 0
    del plan["layout"]
    campaign.recipe.write_text(json.dumps(record))
    campaign.plan.write_text(json.dumps(plan))
    with pytest.raises(
        CampaignError, match=r"another version of hpcrl: `hpcrl resume c --accept` reads it .*train.magic is dropped"
    ):
        continuation.resume(str(campaign.root))
    notes: list[str] = []
    continuation.resume(str(campaign.root), accept=True, show_note=notes.append)
    assert "recipe.json: train.magic is dropped" in notes
    assert "recipe.json: router.reluctance is now router.mismatch_penalty" in notes
    assert 'recipe.json: resources.decode.num_workers = 0 is now "auto"' in notes
    assert read_recipe(campaign).resources.decode.num_workers == "auto"
    assert read_plan(campaign).layout == "hetjob"


@pytest.mark.parametrize("damage", [b"", b"{", b"[]", b'{"train": 5}', b"\xff\xfe"])
def test_a_damaged_record_is_refused_also_with_accept(tmp_path: Path, slurm: Path, recipe: Path, damage: bytes) -> None:
    campaign = submitted(tmp_path, recipe)
    ended(campaign, slurm, "drained", step=4)
    campaign.recipe.write_bytes(damage)
    with pytest.raises(CampaignError, match=r"recipe.json cannot be read"):
        continuation.resume(str(campaign.root), accept=True)


def test_a_campaign_that_is_done_is_resumed_only_with_more_steps(tmp_path: Path, slurm: Path, recipe: Path) -> None:
    campaign = submitted(tmp_path, recipe)
    ended(campaign, slurm, "done", step=10)
    with pytest.raises(CampaignError, match=r"is done.*hpcrl extend c --steps N"):
        continuation.resume(str(campaign.root))
    message = continuation.extend(str(campaign.root), steps=15)
    assert message == "campaign c: job 72 continues up to step 15"
    assert read_recipe(campaign).train.num_steps == 15


def test_a_running_campaign_gets_more_steps_and_a_job_that_makes_them(
    tmp_path: Path, slurm: Path, recipe: Path
) -> None:
    campaign = submitted(tmp_path, recipe)
    runs(slurm, 71)
    digest = make_recipe_digest(campaign.recipe)
    assert continuation.extend(str(campaign.root), steps=30) == "campaign c: up to step 30; job 72 is queued"
    assert read_recipe(campaign).train.num_steps == 30
    assert make_recipe_digest(campaign.recipe) == digest, "limits of the trainer's memory stay"
    assert "--dependency=afterany:71" in queued(slurm)[-1]
    assert campaign.job(1).chain_marker.read_text() == "0"
    assert continuation.extend(str(campaign.root), steps=40) == "campaign c: up to step 40", "job 72 makes them"
    assert continuation.extend(str(campaign.root), jobs=2) == "campaign c: 2 more jobs may follow"
    assert campaign.job(1).chain_marker.read_text() == "2"


def test_fewer_steps_and_a_campaign_that_ends_are_not_extended(tmp_path: Path, slurm: Path, recipe: Path) -> None:
    campaign = submitted(tmp_path, recipe)
    runs(slurm, 71)
    with pytest.raises(ConfigError, match="--steps 9: campaign 'c' has 10 already"):
        continuation.extend(str(campaign.root), steps=9)
    campaign.stop.touch()
    with pytest.raises(CampaignError, match=r"was asked to stop, and its job still runs: repeat this when"):
        continuation.extend(str(campaign.root), steps=30)
    assert read_recipe(campaign).train.num_steps == 10


def test_a_campaign_that_was_stopped_is_resumed_by_an_extension(tmp_path: Path, slurm: Path, recipe: Path) -> None:
    campaign = submitted(tmp_path, recipe)
    ended(campaign, slurm, "stopped", step=4)
    campaign.stop.touch()
    assert continuation.extend(str(campaign.root), steps=30).startswith("campaign c: job 72 continues up to step 30")
    assert not campaign.stop.exists()


def test_a_campaign_whose_checkpoints_are_gone_starts_from_step_0_only_if_that_is_accepted(
    tmp_path: Path, slurm: Path, recipe: Path
) -> None:
    campaign = submitted(tmp_path, recipe)
    ended(campaign, slurm, "drained", step=7)
    (campaign.checkpoints / "000001-step-000007").rmdir()
    make_private_dir(campaign.events)
    EventLog.open(campaign, "train", 0, job=0, role="train").emit(CheckpointSaved(step=7, wall_s=1.0))
    with pytest.raises(CampaignError, match=r"the checkpoint of step 7 is gone, and no other is in .*--accept`"):
        continuation.resume(str(campaign.root))
    assert campaign.job_numbers() == [0]
    make_private_dir(campaign.checkpoints / "000001-step-000005")
    continuation.resume(str(campaign.root))
    assert campaign.job_numbers() == [0, 1], "an older one is there: the job reports what is missing"


def test_a_campaign_that_was_stopped_before_its_first_step_is_continued(
    tmp_path: Path, slurm: Path, recipe: Path
) -> None:
    campaign = submitted(tmp_path, recipe)
    ended(campaign, slurm, "stopped", step=0)
    make_private_dir(campaign.events)
    EventLog.open(campaign, "train", 0, job=0, role="train").emit(CheckpointSaved(step=0, wall_s=1.0))
    continuation.resume(str(campaign.root))
    assert campaign.job_numbers() == [0, 1]


@pytest.mark.parametrize("damage", ["learning_rat = 1", "[train"])
def test_a_recipe_file_that_cannot_be_read_cannot_be_accepted(
    tmp_path: Path, slurm: Path, recipe: Path, damage: str
) -> None:
    campaign = submitted(tmp_path, recipe)
    ended(campaign, slurm, "drained", step=4)
    recipe.write_text(f"{recipe.read_text()}\n{damage}\n")
    with pytest.raises(CampaignError, match="what was submitted cannot be read again: "):
        continuation.resume(str(campaign.root), accept=True)
    notes: list[str] = []
    continuation.resume(str(campaign.root), show_note=notes.append)
    assert notes[0].startswith("what was submitted has changed since, and is not used: ")


def test_a_recipe_file_that_is_gone_changes_nothing(tmp_path: Path, slurm: Path, recipe: Path) -> None:
    campaign = submitted(tmp_path, recipe)
    ended(campaign, slurm, "drained", step=4)
    recipe.unlink()
    continuation.resume(str(campaign.root), accept=True, show_note=pytest.fail)


def test_without_a_scheduler_further_steps_are_for_a_later_job(tmp_path: Path, recipe: Path) -> None:
    campaign = CampaignDir(make_private_dir(tmp_path / "c"))
    write_description(campaign, load_request(str(recipe), site="local"))
    make_private_dir(campaign.job(0).root)
    alive = SubmittedJob(
        id="local-1", scheduler="local", time=0.0, pid=os.getpid(), start_ticks=read_start_ticks(os.getpid())
    )
    record_submission(alive, job=campaign.job(0))
    message = continuation.extend(str(campaign.root), steps=30)
    assert message == ("campaign c: up to step 30; `hpcrl resume c` makes the further ones when this job has ended")
    with pytest.raises(ConfigError, match="without a scheduler no job follows another"):
        continuation.extend(str(campaign.root), jobs=2)


@pytest.fixture
def chain(tmp_path: Path, slurm: Path, recipe: Path) -> CampaignDir:
    """A campaign of three jobs on a site whose nodes may not submit any: all are queued."""
    recipe.write_text(RECIPE.format(num_jobs=3))
    return submitted(tmp_path, recipe, "site.nodes_may_submit=false")


def test_where_nodes_may_not_submit_all_jobs_are_queued_from_the_login_node(chain: CampaignDir, slurm: Path) -> None:
    assert chain.job_numbers() == [0, 1, 2]
    first, second, third = queued(slurm)
    assert "--dependency" not in first
    assert "--dependency=afterany:71" in second
    assert "--dependency=afterany:72:71 " in third, "it does not start beside the first if the second is cancelled"
    assert [chain.job(number).chain_marker.read_text() for number in (1, 2)] == ["1", "0"]


@pytest.mark.parametrize("stop", [stop_gracefully, stop_now])
@pytest.mark.parametrize("running", [(), (71,), (72,)])
def test_stop_cancels_every_job_that_waits(
    chain: CampaignDir, slurm: Path, stop: object, running: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running_jobs, "STOP_TIMEOUT_S", 0.1)
    if running == (72,):
        publish_json(chain.job(0).outcome, {"outcome": "drained", "reason": "", "time": 0.0})
    runs(slurm, *running)
    assert callable(stop)
    message = stop(str(chain.root))
    cancelled = {
        id for call in (slurm / "calls").read_text().splitlines() if call.startswith("scancel")
        for id in call.split() if id.isdigit() and "--signal" not in call
    }  # fmt: skip
    left = set() if not running or stop is stop_now else {str(running[0])}
    waiting = {"71", "72", "73"} if running != (72,) else {"72", "73"}
    assert cancelled == waiting - left, message
    assert chain.stop.exists()
    assert chain.job_numbers() == ([0, 1] if running == (72,) else [0])


@pytest.mark.parametrize("answers", [True, False])
def test_a_job_that_slurm_no_longer_knows_keeps_stop_and_extend_from_nothing_while_a_later_one_runs(
    chain: CampaignDir, slurm: Path, answers: bool
) -> None:
    """Driver and guardian of the first were killed, it left no outcome, and accounting is off."""
    (slurm / "queue").write_text("72|RUNNING\n73|PENDING\n")
    make_private_dir(chain.job(1).parsl)  # its driver has started
    if answers:
        assert continuation.extend(str(chain.root), jobs=1) == "campaign c: job 74 is queued"
    else:
        (slurm / "squeue").write_text("#!/bin/sh\nexit 1\n")
    message = stop_gracefully(str(chain.root))
    assert ("is stopping" in message) == answers
    calls = (slurm / "calls").read_text().splitlines()
    assert [call for call in calls if call.startswith("scancel") and "72" in call] == [], "it makes a checkpoint"
    assert [call for call in calls if call.startswith("scancel") and "73" in call]
    assert chain.job(1).script.exists()


def test_a_campaign_whose_only_job_slurm_no_longer_knows_is_ended_by_stop_now(
    tmp_path: Path, slurm: Path, recipe: Path
) -> None:
    campaign = submitted(tmp_path, recipe)
    (slurm / "queue").write_text("")
    remedy = "if you know that it(s job)? is gone, `hpcrl stop --now c`"
    with pytest.raises(CampaignError, match=remedy):
        continuation.resume(str(campaign.root))
    with pytest.raises(SlurmError, match=remedy):
        continuation.extend(str(campaign.root), jobs=1)
    assert re.search(remedy, stop_gracefully(str(campaign.root)))
    stop_now(str(campaign.root))
    continuation.resume(str(campaign.root))
    assert campaign.job_numbers() == [0, 1]


def test_a_job_that_ends_while_it_is_stopped_is_no_error(
    tmp_path: Path, slurm: Path, recipe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running_jobs, "STOP_TIMEOUT_S", 0.1)
    campaign = submitted(tmp_path, recipe)
    runs(slurm, 71)
    refuse = 'echo "scancel: error: Kill job error on job id 71: Invalid job id specified" >&2; exit 1'
    (slurm / "scancel").write_text(f'#!/bin/sh\ncase "$*" in *signal*) {refuse} ;; esac\n')
    assert "is cancelled" in stop_now(str(campaign.root))


@pytest.mark.parametrize("words", ["Invalid job id specified", "Job/step already completing or completed"])
def test_stop_now_ends_a_job_that_slurm_no_longer_knows(tmp_path: Path, slurm: Path, recipe: Path, words: str) -> None:
    campaign = submitted(tmp_path, recipe)
    refuse = f'echo "scancel: error: Kill job error on job id 71: {words}" >&2; exit 1'
    (slurm / "scancel").write_text(f"#!/bin/sh\n{refuse}\n")
    unknown = "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1"
    (slurm / "squeue").write_text(f'#!/bin/sh\ncase "$*" in *%k*) exit 0 ;; esac\n{unknown}\n')
    with pytest.raises(CampaignError, match=r"`hpcrl stop --now c` first"):
        continuation.resume(str(campaign.root))
    assert "is cancelled" in stop_now(str(campaign.root))
    continuation.resume(str(campaign.root))
    assert campaign.job_numbers() == [0, 1]


def test_a_full_disk_keeps_no_job_from_being_ended_at_once(
    chain: CampaignDir, slurm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs(slurm, 71)

    def refuse(path: Path, *_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    monkeypatch.setattr(running_jobs, "STOP_TIMEOUT_S", 0.1)
    for name in ("publish_file", "publish_json"):
        monkeypatch.setattr(running_jobs, name, refuse)
    assert re.search(r"job 71 is cancelled.*No space left on device", stop_now(str(chain.root)))
    calls = (slurm / "calls").read_text().splitlines()
    assert [call for call in calls if call.startswith("scancel")] == [
        "scancel 73 72",
        "scancel --batch --signal=INT 71",
        "scancel 71",
    ]


@pytest.mark.parametrize("stop", [stop_gracefully, stop_now])
def test_a_job_that_slurm_has_queued_without_an_answer_is_stopped_after_the_one_before_has_ended(
    tmp_path: Path, slurm: Path, recipe: Path, stop: object
) -> None:
    campaign = submitted(tmp_path, recipe)
    ended(campaign, slurm, "drained", step=4)
    follower = campaign.job(1)
    make_private_dir(follower.root)
    follower.chain_marker.write_text("3")
    for path in (follower.script, follower.unanswered):
        path.touch()
    (slurm / "squeue").write_text(f'#!/bin/sh\ncase "$*" in *%k*) echo 72+0 {make_mark(follower)} ;; esac\n')
    assert callable(stop)
    assert "the job that was to follow is cancelled; `hpcrl resume c` continues from step 4" in stop(str(campaign.root))
    assert (slurm / "calls").read_text().splitlines()[-1] == "scancel 72"
    assert campaign.job_numbers() == [0]
    assert read_json(campaign.job(0).outcome)["outcome"] == "drained"


def test_a_resumed_job_whose_followers_cannot_be_recorded_keeps_its_directory(
    chain: CampaignDir, slurm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended(chain, slurm, "drained", step=4)
    for number in (1, 2):
        make_private_dir(chain.job(number).parsl)
        publish_json(chain.job(number).outcome, {"outcome": "drained", "reason": "", "time": 0.0})

    def refuse(*_: object, **_options: object) -> list[str]:
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    monkeypatch.setattr(submission.next_job, "queue_all_next_jobs", refuse)
    notes: list[str] = []
    continuation.resume(str(chain.root), settings=("train.num_steps=20",), show_note=notes.append)
    assert "0 of 2 jobs that may follow are queued: [Errno 122] Disk quota exceeded" in notes
    assert read_json(chain.job(3).submission)["id"] == "74"
    assert read_recipe(chain).train.num_steps == 20


def test_two_that_extend_at_once_queue_one_job(tmp_path: Path, slurm: Path, recipe: Path) -> None:
    campaign = submitted(tmp_path, recipe)
    runs(slurm, 71)
    make_private_dir(campaign.job(1).root)  # a driver queues it at this moment
    assert continuation.extend(str(campaign.root), jobs=1) == "campaign c: 1 more job may follow"
    assert len(queued(slurm)) == 1


def test_settings_are_compared_one_by_one() -> None:
    class Inner(msgspec.Struct):
        a: int = 1
        table: dict[str, int] = {}

    class Outer(msgspec.Struct):
        inner: Inner
        name: str = "x"

    changes = continuation.list_changes(Outer(Inner()), Outer(Inner(a=2, table={"k": 3})), prefix="site.")
    assert [str(change) for change in changes] == [
        "site.inner.a = 2 (was 1)",
        "site.inner.table = unset (was {})",
        "site.inner.table.k = 3 (was unset)",
    ]


def test_a_checkpoint_that_was_cut_is_not_taken_for_one(tmp_path: Path, slurm: Path, recipe: Path) -> None:
    campaign = submitted(tmp_path, recipe)
    ended(campaign, slurm, "cut", step=4)
    make_private_dir(campaign.checkpoints / ".000002-step-000010.1a2b3c.tmp")
    continuation.resume(str(campaign.root))
    assert campaign.job_numbers() == [0, 1]


def test_a_resume_that_was_killed_blocks_others_only_for_a_while(tmp_path: Path, slurm: Path, recipe: Path) -> None:
    campaign = submitted(tmp_path, recipe)
    ended(campaign, slurm, "drained", step=4)
    make_private_dir(campaign.job(1).root)
    with pytest.raises(CampaignError, match=r"another process is submitting job 1; if it was killed, try again 10 min"):
        continuation.resume(str(campaign.root))
    assert "has ended already" in stop_gracefully(str(campaign.root))
    os.utime(campaign.job(1).root, (0, 0))
    continuation.resume(str(campaign.root))
    assert campaign.job(1).submission.exists()


@pytest.mark.parametrize(("table", "key", "value"), [("", "seed", 99), ("rollout", "group_size", 16)])
def test_what_a_campaign_keeps_is_refused_also_if_it_was_edited_by_hand(
    tmp_path: Path, slurm: Path, recipe: Path, table: str, key: str, value: int
) -> None:
    campaign = submitted(tmp_path, recipe)
    ended(campaign, slurm, "drained", step=4)
    record = json.loads(campaign.recipe.read_text())
    (record[table] if table else record)[key] = value
    campaign.recipe.write_text(json.dumps(record))
    with pytest.raises(CampaignError, match=rf"{key} = {value} .*cannot change in a campaign"):
        continuation.resume(str(campaign.root), accept=True)


def test_an_edited_record_is_not_accepted_by_an_extension(tmp_path: Path, slurm: Path, recipe: Path) -> None:
    campaign = submitted(tmp_path, recipe)
    runs(slurm, 71)
    record = json.loads(campaign.recipe.read_text())
    record["rollout"]["max_lag"] = 7
    campaign.recipe.write_text(json.dumps(record))
    with pytest.raises(CampaignError, match=r"recipe.json in .* edited"):
        continuation.extend(str(campaign.root), steps=30)


@pytest.mark.parametrize("marked", [False, True])
def test_an_extension_that_slurm_refuses_allows_no_more_jobs(
    tmp_path: Path, slurm: Path, recipe: Path, marked: bool
) -> None:
    campaign = submitted(tmp_path, recipe)
    runs(slurm, 71)
    if marked:
        campaign.job(0).chain_marker.write_text("0")
    (slurm / "sbatch").write_text("#!/bin/sh\necho 'sbatch: error: QOSMaxSubmitJobPerUserLimit' >&2\nexit 1\n")
    for _ in range(2):
        with pytest.raises(SlurmError, match="QOSMax"):
            continuation.extend(str(campaign.root), steps=30, jobs=2)
    assert read_plan(campaign).num_jobs == 1
    assert campaign.job(0).chain_marker.exists() == marked
    assert not marked or campaign.job(0).chain_marker.read_text() == "0"


def test_more_jobs_are_for_the_one_that_is_being_submitted(tmp_path: Path, slurm: Path, recipe: Path) -> None:
    campaign = submitted(tmp_path, recipe, "job.num_jobs=3")
    runs(slurm, 71)
    make_private_dir(campaign.job(1).root)
    campaign.job(1).chain_marker.write_text("1")  # a driver queues it at this moment
    continuation.extend(str(campaign.root), jobs=3)
    assert campaign.job(1).chain_marker.read_text() == "4"


def test_an_extension_by_jobs_alone_records_no_steps(tmp_path: Path, slurm: Path, recipe: Path) -> None:
    campaign = submitted(tmp_path, recipe)
    runs(slurm, 71)
    continuation.extend(str(campaign.root), jobs=1)
    assert not any("num_steps" in setting for setting in read_json(campaign.manifest)["source"]["settings"])


@pytest.fixture
def with_cancelled(tmp_path: Path, slurm: Path, recipe: Path) -> CampaignDir:
    """A campaign whose first job runs, has queued two more, and lost the newest to a scancel."""
    recipe.write_text(RECIPE.format(num_jobs=4))
    campaign = submitted(tmp_path, recipe)
    place = WorkerPlace(campaign.job(0), "node0")
    next_job.try_queue_next_jobs(
        place, plan=read_plan(campaign), site=read_site(campaign), slurm_id="71", emit=[].append
    )
    (slurm / "queue").write_text("71|RUNNING\n72|PENDING\n73|CANCELLED\n")
    make_private_dir(campaign.checkpoints / "000001-step-000004")
    return campaign


@pytest.mark.parametrize("stop", [stop_gracefully, stop_now])
def test_a_campaign_whose_newest_job_was_cancelled_is_stopped_all_the_same(
    with_cancelled: CampaignDir, stop: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running_jobs, "STOP_TIMEOUT_S", 0.0)
    assert "has ended already" not in stop(str(with_cancelled.root))
    assert with_cancelled.stop.exists()
    assert with_cancelled.job_numbers() == [0]


def test_no_job_is_started_beside_one_that_runs_though_the_newest_was_cancelled(with_cancelled: CampaignDir) -> None:
    with pytest.raises(CampaignError, match="job 71 is running: `hpcrl monitor"):
        continuation.resume(str(with_cancelled.root), settings=("train.learning_rate=1e-7",))
    assert read_recipe(with_cancelled).train.learning_rate != 1e-7
    assert with_cancelled.job_numbers() == [0, 1, 2]
