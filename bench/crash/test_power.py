"""Campaigns continue after power losses and lose nothing: fewer of them than the benchmark makes."""

from pathlib import Path

from bench.crash import power
from bench.crash.campaign import Losses


def test_a_campaign_continues_after_power_losses_and_loses_nothing(tmp_path: Path) -> None:
    assert power.run_power_losses(tmp_path, num_losses=3, seed=20260101) == Losses()
