"""What stops a campaign from being resumed."""

import json
from pathlib import Path

import pytest

from hpcrl.campaign import lifecycle
from hpcrl.campaign_dir.paths import CampaignDir
from hpcrl.errors import CampaignError
from hpcrl.system.files import make_private_dir


def test_the_error_for_an_old_key_in_a_stored_recipe_names_the_new_one(tmp_path: Path) -> None:
    campaign = CampaignDir(make_private_dir(tmp_path / "c"))
    lifecycle._write_description(campaign, lifecycle.load_request("quickstart", site="local"))
    recipe = json.loads(campaign.recipe.read_text())
    recipe["router"]["reluctance"] = recipe["router"].pop("mismatch_penalty", 1.0)
    campaign.recipe.unlink()
    campaign.recipe.write_text(json.dumps(recipe))
    with pytest.raises(CampaignError, match=r"'router.reluctance' is now called 'router.mismatch_penalty'"):
        lifecycle.resume(str(campaign.root))


def test_a_campaign_whose_tasks_were_recorded_elsewhere_is_refused(tmp_path: Path) -> None:
    campaign = CampaignDir(make_private_dir(tmp_path / "c"))
    lifecycle._write_description(campaign, lifecycle.load_request("quickstart", site="local"))
    make_private_dir(campaign.job(0).root)
    campaign.job(0).outcome.write_text(json.dumps({"outcome": "stopped"}))
    campaign.job(0).submission.write_text(
        json.dumps({"id": "local-1", "scheduler": "local", "time": 0.0, "pid": 1, "start_ticks": 0})
    )
    campaign.env_workers.rmdir()
    with pytest.raises(CampaignError, match=r"cannot be resumed: it has no .*env-workers.*hpcrl export c --hf DIR"):
        lifecycle.resume(str(campaign.root))
