"""The batch modes: a campaign completes, even if rewards fail."""

from pathlib import Path

import pytest

from hpcrl.campaign_dir.event_log import read_events
from hpcrl.campaign_dir.paths import CampaignDir
from tests.support.campaigns import SMALL, hpcrl, snapshot, steps

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600), pytest.mark.usefixtures("own_code")]


@pytest.mark.parametrize(("mode", "most"), [("sync", 0), ("one-step-off", 1)])
def test_a_batch_mode_completes_though_rewards_fail(campaigns: Path, mode: str, most: int) -> None:
    """Each batch also has a spare group."""
    failing = (
        "-s",
        "domains.lake.reward=tests.support.odd_rewards:of_every_other_group",
        "-s",
        f"rollout.mode={mode}",
        "-s",
        "rollout.spare_groups=1",
    )
    hpcrl("submit", "quickstart", "--site", "local", "--watch", "--name", mode, *SMALL, *failing)
    run = CampaignDir(campaigns / mode)
    assert snapshot(mode)["state"] == "done"
    made = steps(run)
    assert [step["num_trajectories"] for step in made] == [8] * 4
    assert max(step["lag_max"] for step in made) <= most
    faults = [event["id"] for event in read_events(run.events) if event["event"] == "fault"]
    assert faults, "rewards failed"
    assert all(int(name.split("/")[1]) % 2 for name in faults)
