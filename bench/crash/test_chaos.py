"""A few random faults in a whole campaign."""

from pathlib import Path

import pytest

from bench.chaos import run_chaos
from bench.faults.places import LocalPlace


@pytest.mark.timeout(900)
def test_a_campaign_continues_after_random_faults_and_loses_nothing(tmp_path: Path) -> None:
    run = run_chaos(tmp_path, LocalPlace(tmp_path), num_faults=3, seed=3)
    assert [fault.violations for fault in run.faults] == [[]] * 3
    assert run.num_acknowledged
    assert run.violations == []
