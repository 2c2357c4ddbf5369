"""The verdict and the state of a report: what is damaged, unread or untrained is never all well."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from hpcrl.campaign_dir.campaign_format import CAMPAIGN_FORMAT
from hpcrl.campaign_dir.events import JobEnded
from hpcrl.monitor.advisories import Advisory
from hpcrl.monitor.collect import SnapshotCollector
from hpcrl.report.builder import build_document, build_report, describe_verdict
from hpcrl.report.page import render_page
from hpcrl.report.trajectories import read_trajectories
from hpcrl.system.files import publish_json
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


def test_a_notice_is_in_the_verdict(campaign: SyntheticCampaign) -> None:
    report = build_report(campaign.directory, read_trajectories=read_trajectories)
    notice = make_notice()
    snapshot = SnapshotCollector(campaign.directory, query=lambda ids: {}).poll()
    for num, words in ((1, "1 notice, nothing urgent."), (2, "2 notices, nothing urgent.")):
        noticed = msgspec.structs.replace(snapshot, advisories=[notice] * num)
        assert describe_verdict(noticed, report.key_figures).endswith(f"; {words}")


def make_notice() -> Advisory:
    texts = dict.fromkeys(("text", "unit", "cause", "remedy"), "short")
    return Advisory(name="engines-idle", severity="notice", figure=1.0, threshold=0.5, **texts)


def test_a_campaign_that_was_stopped_before_its_last_step_has_steps_left(tmp_path: Path) -> None:
    campaign = SyntheticCampaign(tmp_path / "lakes", num_steps=100)
    campaign.submit_local()
    campaign.start()
    for step in range(1, 4):
        campaign.step(step)
    campaign.emit("driver", JobEnded(outcome="stopped", reason="cancelled by scancel"))
    campaign.outcome("stopped", "cancelled by scancel")
    campaign.close()
    verdict = describe(campaign)
    assert "97 steps are left: `hpcrl resume lakes`" in verdict
    assert "nothing needs attention" not in verdict


def test_what_is_newer_than_this_version_is_among_the_problems(campaign: SyntheticCampaign) -> None:
    record = {"name": "lakes", "site": "lab", "format": CAMPAIGN_FORMAT + 1, "hpcrl": "9.0"}
    publish_json(campaign.directory.manifest, record)
    report = build_report(campaign.directory, read_trajectories=read_trajectories)
    assert any("what is new in it is not shown" in problem for problem in report.problems)
    assert report.verdict.endswith("; 1 thing could not be read.")


def test_events_that_end_before_a_checkpoint_are_in_the_verdict(campaign: SyntheticCampaign) -> None:
    (campaign.directory.checkpoints / "000001-step-000020").mkdir(parents=True)
    assert describe(campaign).endswith("nothing needs attention.")
    (campaign.directory.events / "000-train-0.jsonl").unlink()
    verdict = describe(campaign)
    assert "nothing needs attention" not in verdict
    assert verdict.endswith("; 1 thing could not be read.")


def test_a_campaign_whose_jobs_are_gone_is_unknown_with_the_reason(campaign: SyntheticCampaign) -> None:
    (campaign.directory.checkpoints / "000001-step-000020").mkdir(parents=True)
    shutil.rmtree(campaign.directory.jobs)
    report = build_report(campaign.directory, read_trajectories=read_trajectories)
    assert report.state == "unknown"
    assert report.reason.endswith(f"the records of its jobs are gone: restore {campaign.directory.jobs}")
    assert report.verdict.startswith("In an unknown state after 20 of 20 steps")
    assert "nothing needs attention" not in report.verdict


def test_spools_that_are_gone_are_among_the_problems(campaign: SyntheticCampaign) -> None:
    folder = campaign.directory.spool("scored").parent
    shutil.rmtree(folder)
    report = build_report(campaign.directory, read_trajectories=read_trajectories)
    assert report.problems == [f"the spools are gone: restore {folder}"]
    assert report.verdict.endswith("; 1 thing could not be read.")


@pytest.mark.parametrize("name", ["recipe", "plan", "site"])
def test_a_record_that_is_missing_is_among_the_problems(campaign: SyntheticCampaign, name: str) -> None:
    getattr(campaign.directory, name).unlink()
    report = build_report(campaign.directory, read_trajectories=read_trajectories)
    assert report.problems == [f"{name}.json is missing"]
    assert report.verdict.endswith("; 1 thing could not be read.")
