"""A whole campaign that imitates before it learns by reward."""

from pathlib import Path

import pytest

from hpcrl.campaign_dir.paths import CampaignDir
from tests.support.campaigns import hpcrl, steps

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]


def test_a_model_that_was_warmed_up_on_a_file_learns_by_reward_in_the_same_campaign(campaigns: Path) -> None:
    hpcrl("submit", "warmup", "--site", "local", "--watch", "--name", "u", "-s", "train.num_steps=84")
    made = steps(CampaignDir(campaigns / "u"))
    assert [step["step"] for step in made] == list(range(1, 85))
    warmed, learned = made[:60], [step["reward_mean"] for step in made[60:]]
    assert all(step["version"] == 0 for step in warmed[:-1]), "nothing is published before the warm-up is over"
    assert warmed[-1]["loss"] < warmed[0]["loss"] / 4
    first, last = sum(learned[:4]) / 4, sum(learned[-8:]) / 8  # every sum about once, and twice
    assert first > 0.2, "a model without the warm-up answers no sum"
    assert last > first
