"""Real campaigns in which something is wrong: their advisories name it."""

import json
from pathlib import Path

import pytest

from hpcrl.campaign_dir.paths import CampaignDir
from hpcrl.monitor import advisories
from hpcrl.monitor.collect import SnapshotCollector
from tests.support.campaigns import SIMULATED, hpcrl, snapshot, until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600), pytest.mark.usefixtures("own_code")]


def test_a_reward_without_signal_episodes_that_are_cut_off_and_a_dying_environment_are_named(
    campaigns: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All rewards are 0, simulated agents rarely reach the goal before max_turns, a lake in ten cannot be made."""
    del campaigns
    monkeypatch.chdir(tmp_path)
    lake = ("reward=tests.support.odd_rewards:of_nothing", "env=tests.support.mortal_lake:MortalLake")
    settings = _set(*(f"domains.lake.{part}" for part in lake), "train.num_steps=32")
    done = hpcrl("submit", "quickstart", "--site", "local", "--watch", "--name", "a", *SIMULATED, *settings)
    expected = {"reward-stalled", "flat-groups", "truncation", "env-faults"}
    assert {advisory["name"] for advisory in snapshot("a")["advisories"]} >= expected
    hpcrl("report", "a")
    (report,) = json.loads((tmp_path / "a-report.json").read_text())["campaigns"]
    assert {advisory["name"] for advisory in report["advisories"]} >= expected
    assert "one reward for all their episodes" in done.stdout


def test_a_trainer_that_waits_for_slow_moves_engines_without_work_and_log_probs_of_other_weights_are_named(
    campaigns: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Simulated engines keep their log-probs whatever the trainer learns; the balance is judged by seconds here."""
    monkeypatch.setattr(advisories, "MIN_STEADY_S", 15.0)
    monkeypatch.setattr(advisories, "MIN_ENGINE_WINDOW_S", 15.0)
    settings = ("train.num_steps=100000", "train.learning_rate=0.02", "rollout.max_running=8")
    slow = "domains.lake.env=tests.support.slow_lake:SlowLake"
    hpcrl("submit", "quickstart", "--site", "local", "--name", "b", *SIMULATED, *_set(*settings, slow))
    collector = SnapshotCollector(CampaignDir(campaigns / "b"), query=lambda ids: {})
    found: set[tuple[str, str]] = set()

    def is_found() -> bool:
        found.update((advisory.name, advisory.subject) for advisory in collector.poll().advisories)
        return found >= {("logprob-mismatch", ""), ("trainer-waits", "train"), ("engines-idle", "decode")}

    until(is_found, what=lambda: f"its illnesses are named: {found}")
    hpcrl("stop", "b")
    assert "logprob-mismatch" in {advisory["name"] for advisory in snapshot("b")["advisories"]}


def _set(*settings: str) -> tuple[str, ...]:
    return tuple(part for setting in settings for part in ("-s", setting))
