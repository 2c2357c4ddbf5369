"""The sync mode where things fail: a campaign completes without some rewards and without its weight window."""

from pathlib import Path

import pytest

from hpcrl.campaign_dir.paths import CampaignDir
from hpcrl.system.files import make_private_dir
from hpcrl.system.network import current_node
from hpcrl.weights.versions import list_versions
from hpcrl.weights.window.file import make_window_key
from tests.support.campaigns import SIMULATED, events_of, hpcrl, snapshot, steps

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600), pytest.mark.usefixtures("own_code")]


def test_a_sync_campaign_completes_though_rewards_fail_and_weights_go_by_files(campaigns: Path, tmp_path: Path) -> None:
    """Each batch also has a spare group."""
    reward = "domains.lake.reward=tests.support.odd_rewards:of_every_other_group"
    failing = ("-s", reward, "-s", "domains.lake.on_reward_error=fault")
    mode = ("-s", "rollout.mode=sync", "-s", "rollout.spare_groups=1")
    campaign = CampaignDir(make_private_dir(campaigns) / "f")
    in_the_way = make_window_key(campaign, node=current_node()).path
    in_the_way.symlink_to(tmp_path)  # as if another user had taken the name
    try:
        hpcrl("submit", "quickstart", "--site", "local", "--watch", "--name", "f", *SIMULATED, *failing, *mode)
    finally:
        in_the_way.unlink()
    assert snapshot("f")["state"] == "done"
    made = steps(campaign)
    assert [step["num_trajectories"] for step in made] == [8] * 4
    assert max(step["lag_max"] for step in made) == 0
    faults = [event["id"] for event in events_of(campaign, "fault")]
    assert faults, "rewards failed"
    assert all(int(name.split("/")[1]) % 2 for name in faults)
    assert [event["transport"] for event in events_of(campaign, "transport")] == ["window", "files"]
    assert "another user has this name" in events_of(campaign, "transport")[-1]["reason"]
    assert list_versions(campaign.weights)[-1] == 4
    assert {event["version"] for event in events_of(campaign, "loaded")} & {1, 2, 3, 4}
