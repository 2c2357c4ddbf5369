"""Recipe, site and plan of a campaign are read as they were written, or refused with one line."""

from pathlib import Path

import msgspec
import pytest

from hpcrl.campaign_dir.paths import CampaignDir
from hpcrl.errors import CampaignError
from hpcrl.plan.plan import make_plan
from hpcrl.plan.records import read_plan, read_recipe, read_site
from tests.support.plans import make_recipe, make_site


@pytest.fixture
def campaign(tmp_path: Path) -> CampaignDir:
    campaign = CampaignDir(tmp_path)
    recipe, site = make_recipe(), make_site()
    campaign.recipe.write_bytes(msgspec.json.encode(recipe))
    campaign.site.write_bytes(msgspec.json.encode(site))
    campaign.plan.write_bytes(make_plan(recipe, site).to_json())
    return campaign


def test_they_are_read_as_they_were_written(campaign: CampaignDir) -> None:
    recipe, site = make_recipe(), make_site()
    assert read_recipe(campaign) == recipe
    assert read_site(campaign) == site
    assert read_plan(campaign) == make_plan(recipe, site)


def test_a_key_that_was_renamed_since_gets_its_new_name_in_the_message(campaign: CampaignDir) -> None:
    table = msgspec.json.decode(campaign.recipe.read_bytes())
    table["router"]["reluctance"] = table["router"].pop("mismatch_penalty")
    campaign.recipe.write_bytes(msgspec.json.encode(table))
    with pytest.raises(CampaignError, match=r"'router.reluctance' is now called 'router.mismatch_penalty'"):
        read_recipe(campaign)


@pytest.mark.parametrize("damage", [b"", b'{"name": "x"', b"\xff\xfe", b"[]", b'{"scheduler": "pbs"}'])
def test_a_damaged_file_is_named_in_one_line(campaign: CampaignDir, damage: bytes) -> None:
    campaign.site.write_bytes(damage)
    with pytest.raises(CampaignError, match="the campaign is damaged or was made by another version") as error:
        read_site(campaign)
    assert str(campaign.site) in str(error.value)
    assert "\n" not in str(error.value)


def test_a_missing_file_is_named(campaign: CampaignDir) -> None:
    campaign.plan.unlink()
    with pytest.raises(CampaignError, match=r"plan\.json cannot be read .*No such file"):
        read_plan(campaign)
