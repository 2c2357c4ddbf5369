"""A real campaign in which something is wrong: its advisories name it, in monitor and report."""

import json
from pathlib import Path

import pytest

from tests.support.campaigns import SIMULATED, hpcrl, snapshot

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600), pytest.mark.usefixtures("own_code")]


def test_a_reward_without_signal_episodes_that_are_cut_off_and_a_dying_environment_are_named(
    campaigns: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All rewards are 0, simulated agents rarely reach the goal before max_turns, a lake in ten cannot be made."""
    del campaigns
    monkeypatch.chdir(tmp_path)
    lake = ("reward=tests.support.odd_rewards:of_nothing", "env=tests.support.mortal_lake:MortalLake")
    settings = (*(part for one in lake for part in ("-s", f"domains.lake.{one}")), "-s", "train.num_steps=32")
    done = hpcrl("submit", "quickstart", "--site", "local", "--watch", "--name", "a", *SIMULATED, *settings)
    expected = {"reward-stalled", "flat-groups", "truncation", "env-faults"}
    assert {advisory["name"] for advisory in snapshot("a")["advisories"]} >= expected
    hpcrl("report", "a")
    (report,) = json.loads((tmp_path / "a-report.json").read_text())["campaigns"]
    assert {advisory["name"] for advisory in report["advisories"]} >= expected
    assert "one reward for all their episodes" in done.stdout
