"""A few random faults in a whole campaign."""

from pathlib import Path

import pytest

from bench.chaos import run_chaos


@pytest.mark.timeout(900)
def test_a_campaign_continues_after_random_faults_and_loses_nothing(tmp_path: Path) -> None:
    faults, campaign = run_chaos(tmp_path, num_faults=3, seed=3)
    assert [fault.violations for fault in faults] == [[]] * 3
    assert campaign.acknowledged
    assert campaign.count_lost() == (0, 0)
