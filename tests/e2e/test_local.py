"""Whole campaigns on this machine, with real processes: to the end, killed, stopped, resumed."""

import os
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest

from hpcrl.campaign_dir.paths import CampaignDir
from hpcrl.system.files import read_json
from tests.support.campaigns import (
    SMALL,
    driver_of,
    end_campaigns,
    hpcrl,
    num_consumed_groups,
    outcome,
    processes_of,
    snapshot,
    steps,
    until,
)

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]


@pytest.fixture
def run_of(home: Path) -> Any:
    """The directory of a campaign by name; at the end no process may be left of any."""
    yield lambda name: CampaignDir(home / "campaigns" / name)
    end_campaigns(home)


def pid_of(run: CampaignDir, role: str) -> int:
    """Return the process of a worker, from its own event."""
    from hpcrl.campaign_dir.event_log import read_events

    started = [e for e in read_events(run.events) if e["event"] == "worker-started" and e["role"] == role]
    return int(started[-1]["pid"])


def test_the_quickstart_learns_and_leaves_nothing_running(run_of: Any) -> None:
    output = hpcrl("submit", "quickstart", "--site", "local", "--watch", "--name", "q").stdout
    run = run_of("q")
    seen = snapshot("q")
    assert seen["state"] == "done"
    assert seen["step"] == seen["num_steps"] == len(seen["reward_mean"])
    assert sum(seen["reward_mean"][-3:]) / 3 > sum(seen["reward_mean"][:3]) / 3 + 0.3
    assert "mean reward" in output
    assert str(run.root) in output
    assert num_consumed_groups(run) == seen["step"] * read_json(run.recipe)["train"]["groups_per_step"]
    assert (run.root.stat().st_mode & 0o777) == 0o700
    assert list(run.endpoints.iterdir()) == []


def test_all_processes_of_a_killed_driver_end_and_the_campaign_resumes(run_of: Any, home: Path) -> None:
    hpcrl("submit", "quickstart", "--site", "local", "--name", "k", *SMALL, "-s", "train.checkpoint_every_steps=1")
    run = run_of("k")
    until(lambda: len(steps(run)) >= 1, what="a step was made")
    os.kill(driver_of(run), signal.SIGKILL)
    assert "killed by signal 9" in outcome(run)["reason"]
    until(lambda: not processes_of(home), what="no process is left", timeout_s=30)
    assert snapshot("k")["state"] == "failed"
    hpcrl("resume", "k", "--watch")
    seen = snapshot("k")
    assert (seen["state"], seen["step"], len(seen["jobs"])) == ("done", 4, 2)
    assert num_consumed_groups(run) == 4 * 2  # a group trained on twice would be counted once


def test_a_job_whose_interchanges_were_killed_can_be_stopped(run_of: Any) -> None:
    hpcrl("submit", "quickstart", "--site", "local", "--name", "i", *SMALL, "-s", "train.num_steps=400")
    run = run_of("i")
    until(lambda: len(steps(run)) >= 1, what="a step was made")
    below = psutil.Process(driver_of(run)).children(recursive=True)
    interchanges = [process for process in below if any("interchange" in word for word in process.cmdline())]
    assert interchanges
    for process in interchanges:
        process.kill()
    hpcrl("stop", "--now", "i")
    assert outcome(run)["outcome"] in ("stopped", "failed")


def test_killed_workers_are_replaced(run_of: Any) -> None:
    hpcrl("submit", "quickstart", "--site", "local", "--name", "w", *SMALL, "-s", "train.num_steps=40")
    run = run_of("w")
    for role in ("env", "decode", "train"):
        done = len(steps(run))
        until(lambda done=done: len(steps(run)) > done, what=f"steps continue before {role} is killed")
        os.kill(pid_of(run, role), signal.SIGKILL)
    assert outcome(run)["outcome"] == "done"
    assert [step["step"] for step in steps(run)][-1] == 40
    assert num_consumed_groups(run) == 40 * 2


def test_a_stopped_campaign_makes_a_checkpoint_and_resumes(run_of: Any) -> None:
    hpcrl("submit", "quickstart", "--site", "local", "--name", "s", *SMALL, "-s", "train.num_steps=60")
    run = run_of("s")
    until(lambda: len(steps(run)) >= 1, what="a step was made")
    assert "is stopping" in hpcrl("stop", "s").stdout
    assert outcome(run)["outcome"] == "stopped"
    assert snapshot("s")["state"] == "stopped"
    done = steps(run)[-1]["step"]
    assert done < 60
    hpcrl("resume", "s")
    until(lambda: steps(run)[-1]["step"] > done, what="steps continue")
    resumed = [step["step"] for step in steps(run)]
    assert resumed == sorted(set(resumed)), "no step was lost or made twice"
    hpcrl("stop", "s", "--now")
    assert outcome(run, job=1)["outcome"] == "stopped"


def test_the_end_of_the_walltime_drains_the_job(run_of: Any) -> None:
    settings = ("-s", "job.walltime_min=1", "-s", "job.drain_s=25", "-s", "train.num_steps=1000")
    hpcrl("submit", "quickstart", "--site", "local", "--name", "e", *SMALL, *settings)
    run = run_of("e")
    ended = outcome(run)
    assert ended["outcome"] == "drained"
    assert "walltime" in ended["reason"]
    assert snapshot("e")["state"] == "stopped"
    trained = max((step["step"] for step in steps(run)), default=0)  # a slow machine may not reach the first
    assert num_consumed_groups(run) == trained * 2


BROKEN = """
name = "broken"
[model]
path = "{model}"
[domains.lake]
env = "hpcrl.envs.gymnasium_text:FrozenLake"
[rollout]
group_size = 2
[train]
num_steps = 1
groups_per_step = 1
learning_rate = 0.1
"""


def test_a_trainer_that_cannot_start_ends_the_job_with_the_reason(run_of: Any, home: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")  # it only looks like a model
    recipe = tmp_path / "broken.toml"
    recipe.write_text(BROKEN.format(model=tmp_path))
    watched = hpcrl("submit", str(recipe), "--site", "local", "--name", "b", "--watch", check=False)
    assert watched.returncode == 1
    ended = outcome(run_of("b"))
    assert ended["outcome"] == "failed"
    assert "train-0 failed 4 times" in ended["reason"]
    assert "cannot be loaded" in ended["reason"]
    assert "hpcrl logs b" in watched.stdout
    assert str(tmp_path) in hpcrl("logs", "b", "train").stdout
    until(lambda: not processes_of(home), what="no process is left", timeout_s=30)
