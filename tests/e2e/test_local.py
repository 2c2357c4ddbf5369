"""Whole campaigns on this machine, with real processes: to the end, killed, stopped, resumed."""

import os
import shutil
import signal
from pathlib import Path

import numpy as np
import psutil
import pytest
from safetensors.numpy import save_file

from hpcrl.campaign_dir.endpoints import list_endpoints
from hpcrl.campaign_dir.paths import CampaignDir
from hpcrl.system.files import read_json
from hpcrl.system.gpu_shifts import ShiftLocks
from hpcrl.weights.versions import list_versions
from tests.support.campaigns import (
    CALM,
    SIMULATED,
    SMALL,
    driver_of,
    events_of,
    hpcrl,
    num_consumed_groups,
    outcome,
    processes_of,
    snapshot,
    steps,
    until,
)
from tests.support.doc_blocks import TUTORIAL, follow_page
from tests.support.shared_gpus import find_overlaps, list_shifts, pretend_gpus

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]


def pid_of(campaign: CampaignDir, role: str) -> int:
    """Return the process of a worker, from its own event."""
    return int([event for event in events_of(campaign, "worker-started") if event["role"] == role][-1]["pid"])


def test_the_laptop_of_the_tutorial_gives_what_it_shows_learns_and_leaves_nothing_running(
    campaigns: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert follow_page(TUTORIAL / "laptop.md", lambda words: hpcrl(*words).stdout) == 8
    campaign = CampaignDir(campaigns / "quickstart-1")
    seen = snapshot("quickstart-1")
    assert seen["state"] == "done"
    assert seen["step"] == seen["num_steps"] == len(seen["reward_mean"])
    assert sum(seen["reward_mean"][-3:]) / 3 > sum(seen["reward_mean"][:3]) / 3 + 0.3
    assert num_consumed_groups(campaign) == seen["step"] * read_json(campaign.recipe)["train"]["groups_per_step"]
    assert [event["transport"] for event in events_of(campaign, "transport")] == ["window"]
    assert [event["version"] for event in events_of(campaign, "published")] == list(range(seen["step"] + 1))
    assert {event["role"] for event in events_of(campaign, "loaded") if event["version"] > 0} == {"decode"}
    assert events_of(campaign, "fault") == []
    assert list_versions(campaign.weights) == [10, 20, 30, 40], "only those of checkpoints are in files"
    assert (campaign.root.stat().st_mode & 0o777) == 0o700
    assert list(campaign.endpoints.iterdir()) == []


SPLIT = ("-s", "resources.prefill.num_workers=1")
JUDGED = (
    *("-s", "judge.grader.tiny.hidden_size=64", "-s", 'domains.lake.judges=["grader"]'),
    *("-s", "domains.lake.reward=tests.support.judged_rewards:ask_for_goal"),
)


@pytest.mark.usefixtures("own_code")
def test_killed_workers_are_replaced_and_versions_only_increase(
    campaigns: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trainer and engines use the same GPUs in turns; none waits for one that was killed there."""
    monkeypatch.setenv("PATH", pretend_gpus(tmp_path / "programs", 3))
    endless = ("-s", "train.num_steps=100000")
    hpcrl("submit", "quickstart", "--site", "local", "--name", "w", *SMALL, *JUDGED, *SPLIT, *endless)
    campaign = CampaignDir(campaigns / "w")
    for role in ("train", "decode", "env", "judge-grader", "prefill", None):
        done = len(steps(campaign))
        what = f"steps continue before {role} is killed" if role else "steps continue after all were killed"
        until(lambda done=done: len(steps(campaign)) > done + 2, what=what)
        if role is not None:
            os.kill(pid_of(campaign, role), signal.SIGKILL)
    hpcrl("stop", "w")
    ended = outcome(campaign)
    assert (ended["outcome"], ended["reason"]) == ("stopped", "a user asked for it (hpcrl stop)")
    log = campaign.job(0).log("batch").read_text().splitlines()
    assert campaign.job(0).log("train-0").read_text().startswith("step 1  version 0  reward ")
    assert log[0] == f"hpcrl: job 0 of {campaign.name} has started"
    assert log[-1] == "hpcrl: job 0 stopped: a user asked for it (hpcrl stop)"
    assert {shift.role for shift in list_shifts(campaign)} == {"train", "prefill"}, "the GPU of decode is its own"
    assert find_overlaps(campaign) == []
    last = steps(campaign)[-1]["step"]
    assert sum(sum(event["reward_errors"].values()) for event in events_of(campaign, "scored")) == 0, "a judge was away"
    assert snapshot("w")["roles"]["judge-grader"] == {"workers": 1, "alive": 0}
    assert num_consumed_groups(campaign) == last * 2
    published = [event["version"] for event in events_of(campaign, "published")]
    assert published == sorted(set(published))
    assert list_versions(campaign.weights)[-1] == published[-1]
    for worker in {event["worker"] for event in events_of(campaign, "loaded")}:
        loaded = [event["version"] for event in events_of(campaign, "loaded") if event["worker"] == worker]
        assert loaded == sorted(loaded)


@pytest.mark.usefixtures("own_code")
def test_a_trainer_that_waits_for_gpus_saves_its_last_step_when_the_job_ends(
    campaigns: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine leaves the GPUs only once it is up, and a large model loads for longer than the job has to drain."""
    monkeypatch.setenv("PATH", pretend_gpus(tmp_path / "programs", 2))
    settings = ("-s", "train.num_steps=100000", "-s", "job.drain_s=20")
    hpcrl("submit", "quickstart", "--site", "local", "--name", "g", *SMALL, *SPLIT, *settings)
    campaign = CampaignDir(campaigns / "g")
    until(lambda: len(steps(campaign)) > 2, what="steps are made")
    (window,) = campaign.job(0).windows.glob("*+shifts")
    engine = ShiftLocks(Path(window.read_text()))
    until(engine.try_start_serving, what="the GPUs are taken as by an engine that starts")
    until(engine.is_requested, what="the trainer wants them")
    done = len(steps(campaign))
    hpcrl("stop", "g")
    ended = outcome(campaign)
    engine.close()
    assert (ended["outcome"], ended["reason"]) == ("stopped", "a user asked for it (hpcrl stop)")
    assert len(steps(campaign)) == done
    assert num_consumed_groups(campaign) == steps(campaign)[-1]["step"] * 2


def test_a_stopped_campaign_resumes_from_a_checkpoint_and_can_be_stopped_without_interchanges(campaigns: Path) -> None:
    settings = ("-s", "train.num_steps=100000", "-s", "site.network.tls=true")
    hpcrl("submit", "quickstart", "--site", "local", "--name", "s", *SIMULATED, *CALM, *settings)
    campaign = CampaignDir(campaigns / "s")
    until(lambda: len(steps(campaign)) >= 1, what="a step was made")
    assert {endpoint.url.partition(":")[0] for endpoint in list_endpoints(campaign.endpoints)} == {"https"}
    assert "is stopping" in hpcrl("stop", "s").stdout
    assert outcome(campaign)["outcome"] == "stopped"
    assert snapshot("s")["state"] == "stopped"
    done = steps(campaign)[-1]["step"]
    hpcrl("resume", "s")
    until(lambda: steps(campaign)[-1]["step"] > done, what="steps continue")
    resumed = [step["step"] for step in steps(campaign)]
    assert resumed == sorted(set(resumed)), "no step was lost or made twice"
    below = psutil.Process(driver_of(campaign, job=1)).children(recursive=True)
    alive = [process for process in below if process.status() != psutil.STATUS_ZOMBIE]
    interchanges = [process for process in alive if any("interchange" in word for word in process.cmdline())]
    assert interchanges
    for process in interchanges:
        process.kill()
    hpcrl("stop", "s", "--now")
    assert outcome(campaign, job=1)["outcome"] in ("stopped", "failed")


def test_the_end_of_the_walltime_drains_the_job(campaigns: Path) -> None:
    settings = ("-s", "job.walltime_min=1", "-s", "job.drain_s=40", "-s", "train.num_steps=1000")
    hpcrl("submit", "quickstart", "--site", "local", "--name", "e", *SIMULATED, *settings)
    campaign = CampaignDir(campaigns / "e")
    ended = outcome(campaign)
    assert ended["outcome"] == "drained"
    assert "walltime" in ended["reason"]
    assert snapshot("e")["state"] == "stopped"
    trained = max((step["step"] for step in steps(campaign)), default=0)  # a slow machine may not reach the first
    assert num_consumed_groups(campaign) == trained * 2


BROKEN = """
name = "broken"
[model]
path = "{model}"
[domains.lake]
env = "hpcrl.envs.gymnasium_text:FrozenLake"
[engine]
backend = "sim"
[rollout]
group_size = 2
[train]
num_steps = 1
groups_per_step = 1
learning_rate = 0.1
"""


def test_a_trainer_that_cannot_start_ends_the_job_with_the_reason(
    campaigns: Path, home: Path, tmp_path: Path, tiny_model_dir: Path
) -> None:
    model = tmp_path / "model"
    shutil.copytree(tiny_model_dir, model)
    save_file({"foreign": np.zeros(2, np.float32)}, model / "model.safetensors")
    recipe = tmp_path / "broken.toml"
    recipe.write_text(BROKEN.format(model=model))
    watched = hpcrl("submit", str(recipe), "--site", "local", "--name", "b", "--watch", check=False)
    assert watched.returncode == 1
    ended = outcome(CampaignDir(campaigns / "b"))
    assert ended["outcome"] == "failed"
    assert "train-0 failed 4 times" in ended["reason"]
    assert "does not have: download the model again" in ended["reason"]
    assert "hpcrl logs b" in watched.stdout
    assert "foreign" in hpcrl("logs", "b", "train").stdout
    until(lambda: not processes_of(home), what="no process is left", timeout_s=30)


def test_a_recipe_that_only_imitates_has_only_a_trainer_and_continues_after_a_signal(
    campaigns: Path, tmp_path: Path
) -> None:
    hpcrl("submit", "sft", "--site", "local", "--name", "i")
    campaign = CampaignDir(campaigns / "i")
    until(lambda: len(steps(campaign)) >= 1, what="a step was made")
    os.kill(read_json(campaign.job(0).submission)["pid"], signal.SIGTERM)
    assert outcome(campaign)["outcome"] == "drained"
    hpcrl("resume", "i")
    assert outcome(campaign, job=1)["outcome"] == "done"
    made = steps(campaign)
    assert [step["step"] for step in made] == list(range(1, 60 * 28 // 16 + 1)), "no step was lost or made twice"
    assert made[-1]["loss"] < made[0]["loss"] / 4
    assert list(snapshot("i")["roles"]) == ["train"]
    assert {event["worker"] for event in events_of(campaign, "worker-started")} == {"000-train-0", "001-train-0"}
    assert events_of(campaign, "published") == []
    assert events_of(campaign, "fault") == []
    hpcrl("export", "i", "--hf", str(tmp_path / "exported"))
    assert (tmp_path / "exported" / "model.safetensors").exists()
