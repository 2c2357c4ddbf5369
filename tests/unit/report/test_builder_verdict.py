"""The verdict and the state of a report: what is damaged, unread or untrained is never all well."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from hpcrl.report.builder import build_document, build_report
from hpcrl.report.page import render_page
from hpcrl.report.trajectories import read_trajectories
from tests.support.synthetic import SyntheticCampaign
from tests.support.trajectories import make_lake_trajectory
from tests.unit.report.test_builder import add_segment, play


@pytest.fixture
def campaign(tmp_path: Path) -> Iterator[SyntheticCampaign]:
    campaign = SyntheticCampaign(tmp_path / "lakes", num_steps=20)
    yield play(campaign)
    campaign.close()


def describe(campaign: SyntheticCampaign) -> str:
    return build_report(campaign.directory, read_trajectories=read_trajectories).verdict


def test_a_damaged_segment_is_in_the_verdict(campaign: SyntheticCampaign) -> None:
    add_segment(campaign.directory, make_lake_trajectory(1, 0, reward=1.0))
    (campaign.directory.spool("scored") / "000-env-0-00000009-1-0123abcd.h5").write_bytes(b"not a segment" * 300)
    verdict = describe(campaign)
    assert "nothing needs attention" not in verdict
    assert verdict.endswith("; its records are damaged: `hpcrl traj verify lakes`.")


def test_a_record_that_cannot_be_read_is_in_the_verdict(campaign: SyntheticCampaign) -> None:
    campaign.directory.recipe.write_text("{")
    verdict = describe(campaign)
    assert "nothing needs attention" not in verdict
    assert verdict.endswith("; 1 thing could not be read.")


def test_a_campaign_that_did_not_train_everything_is_partial(campaign: SyntheticCampaign) -> None:
    campaign.outcome("done", "every step was made", untrained=["domain taxi: all 20 episodes failed"])
    document = build_document([campaign.directory], read_trajectories=read_trajectories)
    (report,) = document.campaigns
    assert (report.state, report.is_partial) == ("done", True)
    assert report.verdict.startswith("Done in part after 20 of 20 steps")
    page = render_page(document)
    assert '<span class="pill state-partial">partial</span>' in page
    assert ".state-partial" in page
