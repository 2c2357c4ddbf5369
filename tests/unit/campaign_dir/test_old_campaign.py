"""A campaign whose recipe.json and site.json have old keys can still be listed, shown, exported, stopped and cleaned.

`old_campaign` was written by hpcrl at commit fd23084: `hpcrl submit quickstart` with one training step. Weights,
checkpoints and logs are left out.
"""

import functools
import json
import operator
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpcrl.campaign import running_jobs
from hpcrl.campaign_dir.events import TransportChanged, parse_event
from hpcrl.campaign_dir.paths import CampaignDir
from hpcrl.cli import main
from hpcrl.config.toml import REMOVED_KEYS, RENAMED_KEYS
from hpcrl.system.processes import read_start_ticks
from tests.support.campaigns import hpcrl

STORED = Path(__file__).with_name("old_campaign")


@pytest.fixture(autouse=True)
def old(home: Path) -> Path:
    return shutil.copytree(STORED, home / "campaigns" / "old")


@pytest.fixture
def running(old: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Let the campaign run: its job has no outcome, and a process that is alive."""
    job = old / "jobs" / "000"
    (job / "outcome.json").unlink()
    with subprocess.Popen(["sleep", "300"], start_new_session=True) as guardian:
        submission = json.loads((job / "submitted.json").read_text())
        submission |= {"pid": guardian.pid, "start_ticks": read_start_ticks(guardian.pid)}
        (job / "submitted.json").write_text(json.dumps(submission))
        yield guardian
        guardian.kill()


def test_the_stored_recipe_has_every_old_key(old: Path) -> None:
    recipe = json.loads((old / "recipe.json").read_text())
    for key in RENAMED_KEYS:
        table, name = key.split(".")
        assert name in recipe[table]


def test_the_stored_site_has_every_old_key(old: Path) -> None:
    site = json.loads((old / "site.json").read_text())
    for key in REMOVED_KEYS:
        *tables, name = key.replace("*", "host").split(".")
        assert name in functools.reduce(operator.getitem, tables, site)


def test_an_old_campaign_is_listed() -> None:
    (listed,) = json.loads(hpcrl("ls", "--json").stdout)
    assert (listed["name"], listed["state"]) == ("old", "done")


def test_an_old_campaign_is_shown() -> None:
    shown = json.loads(hpcrl("monitor", "old", "--json").stdout)
    assert (shown["state"], shown["step"], shown["num_steps"]) == ("done", 1, 1)


def test_trajectories_of_an_old_campaign_are_listed_shown_and_counted() -> None:
    listed = json.loads(hpcrl("traj", "ls", "old", "--json").stdout)
    assert len(listed) == 4
    assert listed[0]["id"] in hpcrl("traj", "show", "old", listed[0]["id"]).stdout
    assert json.loads(hpcrl("traj", "stats", "old", "--json").stdout)
    hpcrl("traj", "verify", "old")


def test_trajectories_of_an_old_campaign_are_exported(tmp_path: Path) -> None:
    hpcrl("traj", "export", "old", str(tmp_path / "old.jsonl"))
    assert len((tmp_path / "old.jsonl").read_text().splitlines()) == 4


def test_every_event_of_an_old_campaign_is_understood() -> None:
    lines = [json.loads(line) for path in STORED.glob("events/*.jsonl") for line in path.read_text().splitlines()]
    events = [parse_event(line) for line in lines]
    assert None not in events
    assert [event.transport for event in events if isinstance(event, TransportChanged)] == ["window"]


def test_a_running_old_campaign_is_asked_to_stop(old: Path, running: subprocess.Popen[bytes]) -> None:
    assert "is stopping" in hpcrl("stop", "old").stdout
    assert CampaignDir(old).stop.exists()
    assert running.poll() is None


def test_a_running_old_campaign_is_ended_at_once(
    running: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(running_jobs, "STOP_TIMEOUT_S", 0.5)  # this guardian ends at once, without an outcome
    assert main(["stop", "old", "--now"]) == 0
    assert "is cancelled" in capsys.readouterr().out
    assert running.wait() < 0


def test_surplus_of_an_old_campaign_is_removed(old: Path) -> None:
    meetings = old / "jobs" / "000" / "parsl"
    meetings.mkdir()
    hpcrl("gc", "old", "--yes")
    assert not meetings.exists()


def refuse(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main([*arguments]) == 2
    return capsys.readouterr().err


def test_every_way_to_continue_an_old_campaign_says_that_only_its_model_can_be_used(
    capsys: pytest.CaptureFixture[str],
) -> None:
    refused = refuse(capsys, "resume", "old")
    assert "`hpcrl export old --hf DIR` writes its model" in refused
    assert refuse(capsys, "extend", "old", "--steps", "2") == refused
    assert refuse(capsys, "resume", "old", "--accept") == refused
    assert refuse(capsys, "resume", "old", "--accept", "-s", "train.num_steps=5") == refused


def test_an_old_campaign_is_neither_resumed_nor_extended_before_all_old_keys_are_accepted(
    old: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    CampaignDir(old).env_workers.mkdir()  # as if it were new enough to record its tasks there
    refused = refuse(capsys, "resume", "old")
    assert refuse(capsys, "extend", "old", "--steps", "2") == refused
    assert "`hpcrl resume old --accept`" in refused
    for key in RENAMED_KEYS:
        assert key in refused
