"""Whole campaigns whose trainer runs out of memory: lower limits, recorded for every later job, and never a loop."""

import os
from pathlib import Path

import msgspec
import pytest

from hpcrl.campaign_dir.paths import CampaignDir
from hpcrl.campaign_dir.train_limits import TrainLimits
from tests.support.campaigns import SIMULATED, events_of, hpcrl, num_consumed_groups, outcome, steps
from tests.support.memory_losses import LIMIT_VARIABLE, RANK_VARIABLE

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600), pytest.mark.usefixtures("own_code")]

SHORT_OF_MEMORY = (*SIMULATED, "-s", 'train.pipeline.loss.function="tests.support.memory_losses:raise_above"')
TWO_RANKS = ("-s", "resources.train.num_workers=2", "-s", 'train.sharding="full"')


def submit(name: str, *settings: str, check: bool = True) -> CampaignDir:
    """Submit a campaign on this machine and wait for its end."""
    done = hpcrl("submit", "quickstart", "--site", "local", "--name", name, *settings, "--watch", check=False)
    campaign = CampaignDir(Path(os.environ["HPCRL_HOME"]) / "campaigns" / name)
    assert not check or done.returncode == 0, done.stdout + done.stderr
    return campaign


def limits_of(campaign: CampaignDir) -> TrainLimits:
    return msgspec.json.decode(campaign.train_limits.read_bytes(), type=TrainLimits)


def test_all_ranks_repeat_a_step_with_half_the_micro_batch_after_one_of_them_ran_out_of_memory(
    campaigns: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(LIMIT_VARIABLE, "15")
    monkeypatch.setenv(RANK_VARIABLE, "1")
    campaign = submit("half", *SHORT_OF_MEMORY, *TWO_RANKS)
    (shortage,) = events_of(campaign, "out-of-memory")
    assert (shortage["step"], shortage["rank"], shortage["max_row_tokens"]) == (1, 1, None)
    assert shortage["num_rows"] > 1
    assert (
        shortage["tokens_per_micro_batch"] == shortage["num_tokens"] // 2 == limits_of(campaign).tokens_per_micro_batch
    )
    assert "it continues from the last checkpoint with train.tokens_per_micro_batch =" in shortage["reason"]
    assert [step["step"] for step in steps(campaign)] == [1, 2, 3, 4]
    assert num_consumed_groups(campaign) == 4 * 2
    assert {step["num_rows"] for step in steps(campaign)} == {8}
    assert not events_of(campaign, "rows-skipped")


def test_a_trainer_that_still_runs_out_of_memory_fails_once_and_a_later_job_has_the_recorded_limits(
    campaigns: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(LIMIT_VARIABLE, "7")
    campaign = submit("short", *SHORT_OF_MEMORY, check=False)
    first, second = events_of(campaign, "out-of-memory")
    ended = outcome(campaign)
    assert ended["outcome"] == "failed"
    assert ended["reason"] == second["reason"] == limits_of(campaign).failure
    assert f"after it had set train.tokens_per_micro_batch = {first['num_tokens'] // 2}" in ended["reason"]
    for change in ("train.tokens_per_micro_batch = 78 at the most", "(resources.train.mem_gib_per_worker)"):
        assert change in ended["reason"]
    assert not steps(campaign)
    monkeypatch.setenv(LIMIT_VARIABLE, "30")
    hpcrl("resume", "short", "--watch")
    assert len(events_of(campaign, "out-of-memory")) == 2
    assert [step["step"] for step in steps(campaign)] == [1, 2, 3, 4]
    assert not list(campaign.root.glob("jobs/002*"))
