"""Weights that an engine cannot load: a fault, except where the job is about to end."""

import asyncio

import pytest

from hpcrl.campaign_dir.event_log import EventReader
from hpcrl.campaign_dir.events import EngineCounted
from hpcrl.campaign_dir.paths import CampaignDir
from hpcrl.engines.base import LoadFigures
from hpcrl.errors import WeightsError
from hpcrl.roles import serve
from hpcrl.roles.serve import LOAD_REPORT_INTERVAL_S, LoadReporter, WeightFollower
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


def test_the_load_of_an_engine_is_one_event_a_window():
    now, emitted = [0.0], []
    reporter = LoadReporter(None, emitted.append, clock=lambda: now[0])

    for second, num_running in enumerate([0, 4, 2, 2]):
        now[0] = second * LOAD_REPORT_INTERVAL_S / 3
        figures = LoadFigures(
            version=2, num_running=num_running, num_waiting=1, num_generated_tokens=100 * second, running_tokens=30,
            free_kv_tokens=70, num_places=8,
        )  # fmt: skip
        reporter.add_sample(figures)

    assert emitted == [
        EngineCounted(
            window_s=10.0,
            version=2,
            busy_share=0.75,
            running=2.0,
            waiting=1.0,
            num_places=8,
            kv_share=0.3,
            num_tokens=300,
        )
    ]
