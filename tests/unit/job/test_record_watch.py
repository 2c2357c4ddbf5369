"""Records that were edited by hand are reported, each edit once."""

import pytest

from hpcrl.campaign_dir.events import FaultReported
from hpcrl.campaign_dir.paths import CampaignDir
from hpcrl.job.record_watch import RecordWatch
from hpcrl.plan.records import digest_records
from hpcrl.system.files import publish_json


@pytest.fixture
def campaign(tmp_path):
    campaign = CampaignDir(tmp_path)
    for path in (campaign.recipe, campaign.site, campaign.plan):
        publish_json(path, {"name": path.stem})
    publish_json(campaign.manifest, {"digests": digest_records(campaign)})
    return campaign


def test_each_edit_is_reported_once(campaign):
    reported = []
    watch = RecordWatch(campaign, emit=reported.append)
    watch.look()
    assert reported == []
    publish_json(campaign.recipe, {"name": "edited"})
    watch.look()
    watch.look()
    publish_json(campaign.site, {"name": "edited"})
    watch.look()
    details = [event.detail.partition(" was edited")[0] for event in reported if isinstance(event, FaultReported)]
    assert details == ["recipe.json", "recipe.json and site.json"]


def test_a_manifest_that_cannot_be_read_is_left_to_others(campaign):
    campaign.manifest.write_text("{")
    reported = []
    RecordWatch(campaign, emit=reported.append).look()
    assert reported == []
