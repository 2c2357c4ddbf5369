"""The transport of versions in whole campaigns on this machine: window or files; no window is left behind."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hpcrl.campaign_dir.event_log import read_events
from hpcrl.campaign_dir.paths import CampaignDir
from hpcrl.system.files import make_private_dir, read_json
from hpcrl.system.network import current_node
from hpcrl.weights.versions import list_versions
from hpcrl.weights.window.file import make_window_key
from tests.support.campaigns import SMALL, end_campaigns, hpcrl, outcome, steps, until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]


@pytest.fixture
def runs(home: Path) -> Iterator[Path]:
    """The directory of campaigns; at the end no process and no window of any may be left."""
    yield home / "campaigns"
    end_campaigns(home)
    assert [run.name for run in (home / "campaigns").iterdir() if windows_of(CampaignDir(run))] == []


def windows_of(run: CampaignDir) -> list[str]:
    path = make_window_key(run, node=current_node()).path
    return [found.name for found in path.parent.glob(f"{path.name}*")]


def events_of(run: CampaignDir, name: str) -> list[dict[str, Any]]:
    return [event for event in read_events(run.events) if event["event"] == name]


def pid_of(run: CampaignDir, role: str) -> int:
    return int([event for event in events_of(run, "worker-started") if event["role"] == role][-1]["pid"])


def test_versions_go_by_the_window_and_only_checkpointed_ones_are_in_files(runs: Path) -> None:
    hpcrl("submit", "quickstart", "--site", "local", "--name", "w", "--watch", *SMALL, "-s", "train.num_steps=8")
    run = CampaignDir(runs / "w")
    assert [event["rung"] for event in events_of(run, "rung")] == ["window"]
    assert [event["version"] for event in events_of(run, "published")] == list(range(9))
    assert list_versions(run.weights) == [0, 8]
    assert {event["role"] for event in events_of(run, "loaded") if event["version"] > 0} == {"prefill", "decode"}
    assert events_of(run, "fault") == []
    assert windows_of(run) == []


def test_versions_only_increase_after_killed_engines_and_trainers_restart(runs: Path) -> None:
    hpcrl("submit", "quickstart", "--site", "local", "--name", "k", *SMALL, "-s", "train.num_steps=40")
    run = CampaignDir(runs / "k")
    for role in ("train", "decode", "train", "prefill"):
        done = len(steps(run))
        until(lambda done=done: len(steps(run)) > done + 2, what=f"steps continue before {role} is killed")
        os.kill(pid_of(run, role), signal.SIGKILL)
    assert outcome(run)["outcome"] == "done"
    published = [event["version"] for event in events_of(run, "published")]
    assert published == sorted(set(published))
    assert list_versions(run.weights)[-1] == published[-1]
    for worker in {event["worker"] for event in events_of(run, "loaded")}:
        loaded = [event["version"] for event in events_of(run, "loaded") if event["worker"] == worker]
        assert loaded == sorted(loaded)
    assert windows_of(run) == []


def test_a_killed_driver_leaves_no_window(runs: Path) -> None:
    hpcrl("submit", "quickstart", "--site", "local", "--name", "d", *SMALL, "-s", "train.num_steps=40")
    run = CampaignDir(runs / "d")
    until(lambda: bool(windows_of(run)) and len(steps(run)) >= 1, what="versions go by the window")
    guardian = read_json(run.job(0).submission)["pid"]
    os.kill(int(Path(f"/proc/{guardian}/task/{guardian}/children").read_text().split()[0]), signal.SIGKILL)
    assert outcome(run)["outcome"] == "failed"
    until(lambda: not windows_of(run), what="the window is gone", timeout_s=30)
    hpcrl("resume", "d")
    until(lambda: bool(windows_of(run)), what="the next job has its own window")
    hpcrl("stop", "d", "--now")
    until(lambda: not windows_of(run), what="the window is gone", timeout_s=30)


def test_a_campaign_without_a_window_uses_files_to_the_end(runs: Path, tmp_path: Path) -> None:
    run = CampaignDir(make_private_dir(runs) / "f")
    in_the_way = make_window_key(run, node=current_node()).path
    in_the_way.symlink_to(tmp_path)  # as if another user had taken the name
    try:
        hpcrl("submit", "quickstart", "--site", "local", "--name", "f", "--watch", *SMALL)
    finally:
        in_the_way.unlink()
    assert [event["rung"] for event in events_of(run, "rung")] == ["window", "files"]
    assert "another user has this name" in events_of(run, "rung")[-1]["reason"]
    assert list_versions(run.weights)[-1] == 4
    assert {event["version"] for event in events_of(run, "loaded")} & {1, 2, 3, 4}
