"""Weights that an engine cannot load: a fault, except where the job is about to end."""

import asyncio

import pytest

from hpcrl.campaign_dir.event_log import EventReader
from hpcrl.campaign_dir.paths import CampaignDir
from hpcrl.errors import WeightsError
from hpcrl.roles import serve
from hpcrl.roles.serve import WeightFollower
from hpcrl.system.files import make_private_dir
from hpcrl.weights.versions import VersionManifest
from tests.support.plans import make_recipe
from tests.support.workers import make_worker_context


class BrokenEngine:
    """An engine whose weights are gone."""

    async def load_version(self, version: int) -> float:
        raise WeightsError(f"version {version} is not available")


class EmptySource:
    """A source without any version, as after the trainer's end."""

    def newest(self) -> None:
        return None


@pytest.mark.parametrize("is_ending", [False, True])
def test_a_version_that_cannot_be_loaded_is_a_fault_unless_the_job_ends(tmp_path, monkeypatch, is_ending):
    monkeypatch.setattr(serve, "FAULT_PAUSE_S", 0.01)
    campaign = CampaignDir(tmp_path)
    for directory in (campaign.events, campaign.job(0).root):
        make_private_dir(directory)
    context = make_worker_context(campaign, "decode", make_recipe())
    if is_ending:
        context.job.drain.write_text("every training step was made")
    follower = WeightFollower(BrokenEngine(), EmptySource(), context)
    asyncio.run(follower.load(VersionManifest(version=3, step=3, checksums={}, created=0.0)))
    faults = [event.detail for event in EventReader(campaign.events).poll()]
    assert faults == ([] if is_ending else ["version 3 is not available"])
