"""A clock that is set by hours while a campaign runs."""

from pathlib import Path

import pytest

from hpcrl.campaign_dir.paths import CampaignDir
from tests.support.campaigns import CALM, SIMULATED, events_of, hpcrl, outcome, snapshot, steps, until
from tests.support.clocks import JumpingClock

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

HOUR_S = 3600


def test_a_clock_that_jumps_by_hours_ends_and_restarts_nothing(
    campaigns: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = JumpingClock.build(tmp_path)
    if clock is None:
        pytest.skip("no C compiler: the clock of this test cannot be made to jump")
    for name, value in clock.environ.items():
        monkeypatch.setenv(name, value)
    settings = (*SIMULATED, *CALM, "-s", "train.num_steps=100000", "-s", "job.walltime_min=60")
    exports = ("-s", f"site.exports={[*clock.environ]}")
    hpcrl("submit", "quickstart", "--site", "local", "--name", "jumps", *settings, *exports)
    campaign = CampaignDir(campaigns / "jumps")
    until(lambda: len(steps(campaign)) > 2, what="steps are made")
    for hours in (5, -7):
        clock.set_ahead(hours * HOUR_S)
        done = len(steps(campaign))
        until(lambda done=done: len(steps(campaign)) > done + 5, what="steps continue")  # type: ignore[misc]
        assert snapshot("jumps")["state"] == "running"
    hpcrl("stop", "jumps")
    assert outcome(campaign)["outcome"] == "stopped"
    assert outcome(campaign)["run_s"] < HOUR_S
    unwanted = ("worker-failed", "worker-restarted", "fault")
    assert [event for name in unwanted for event in events_of(campaign, name)] == []
    assert [event["reason"] for event in events_of(campaign, "draining")] == ["a user asked for it (hpcrl stop)"]
    made = sorted(step["step"] for step in steps(campaign))
    assert made == list(range(1, len(made) + 1))
    assert len(events_of(campaign, "checkpoint")) > 0
