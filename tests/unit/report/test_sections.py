"""Failed episodes are counted once: report, monitor, advisories and their JSON have one number."""

import io
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console  # noqa: TID251

from hpcrl.campaign_dir.events import EpisodesCounted, FaultReported, SegmentScored
from hpcrl.monitor.collect import SnapshotCollector
from hpcrl.monitor.screen import render_screen
from hpcrl.monitor.snapshot import CampaignSnapshot, encode_snapshot
from hpcrl.monitor.view import describe_changes
from hpcrl.report.builder import build_report
from hpcrl.report.figures import CampaignReport, TrajectoryFigures
from hpcrl.report.sections import write_failures, write_summary
from hpcrl.spool.outcome import FAILURES, OUTCOMES, is_failure, measure_failures
from tests.support.synthetic import SyntheticCampaign

NUM_COUNTED, NUM_FAILED = 320, 360
"""The episodes whose end the env worker has reported, and those whose rewards failed."""


@pytest.fixture
def campaign(tmp_path: Path) -> Iterator[SyntheticCampaign]:
    campaign = SyntheticCampaign(tmp_path / "lakes")
    campaign.submit_local()
    campaign.start()
    yield campaign
    campaign.close()


def fail_all(campaign: SyntheticCampaign, *, as_fault: bool) -> None:
    """Let all rewards of a domain fail, of which the reward worker reports the 1st, 10th and 100th."""
    counts = {"done": NUM_COUNTED, "outcomes": {"lake": {"finished": NUM_COUNTED}}}
    campaign.emit("env-0", EpisodesCounted(**counts))
    for start in range(0, NUM_FAILED, 40):
        failed = {"lake": {"finished": 40}}
        scored = {"rewards": {"lake": [0.0] * 40}, "reward_errors": {"lake": 40}, "replaced_outcomes": failed}
        event = SegmentScored(reward_faults=failed) if as_fault else SegmentScored(num=40, **scored)
        campaign.emit("reward-0", event)
        for num in (1, 10, 100):
            if start < num <= start + 40:
                fault = FaultReported(what="reward", detail=f"lake/{num}/0: nan", domain="lake", num=num)
                campaign.emit("reward-0", fault)


def look(campaign: SyntheticCampaign) -> CampaignSnapshot:
    return SnapshotCollector(campaign.directory, query=lambda ids: {}, clock=lambda: campaign.now).poll()


def report_on(campaign: SyntheticCampaign) -> CampaignReport:
    nothing = TrajectoryFigures(num=0, num_groups=0, num_flat_groups=0, sampled=[], groups=[], charts=[], problems=[])
    return build_report(campaign.directory, read_trajectories=lambda _: nothing)


@pytest.mark.parametrize("as_fault", [True, False])
def test_rewards_that_all_fail_are_one_number_everywhere(campaign: SyntheticCampaign, as_fault: bool) -> None:
    fail_all(campaign, as_fault=as_fault)
    snapshot, report = look(campaign), report_on(campaign)
    printed = json.loads(encode_snapshot(snapshot))
    console = Console(file=io.StringIO(), width=120, height=40)
    with console.capture() as capture:
        console.print(render_screen(snapshot, height=40))
    screen, lines = capture.get(), "\n".join(describe_changes(None, snapshot))
    shown = "360 failed" if as_fault else "360 failed (360 of them scored)"

    assert (printed["episodes"]["failed"], printed["domains"]["lake"]["failed"]) == (360, 360)
    assert (report.key_figures.num_failed, report.failed) == (360, {"lake": 360})
    assert sum(printed["accounts"].values()) == 360
    assert report.key_figures.num_episodes + report.key_figures.num_faulted == 360
    assert shown in screen
    assert shown in lines
    assert shown in write_summary(report)
    assert "360 of 360 episodes failed" in report.verdict
    (advisory,) = [one for one in report.advisories if one.subject == "lake"]
    assert (advisory.name, advisory.figure) == ("domain-fails", 360)
    assert "all 360 rewards failed" in advisory.text
    assert advisory.text in screen
    assert report.outcomes["lake"] == {"env-fault" if as_fault else "reward-error": 360}


def test_a_fault_that_is_reported_rarely_has_the_number_of_its_reports(campaign: SyntheticCampaign) -> None:
    fail_all(campaign, as_fault=False)
    report = report_on(campaign)
    assert [(one.what, one.num, one.is_least) for one in report.failures] == [("reward", 100, True)]
    assert "100 or more" in write_failures(report)


def test_faults_of_several_workers_and_of_a_worker_that_started_again_are_added(campaign: SyntheticCampaign) -> None:
    for worker, num in (("reward-0", 1), ("reward-0", 10), ("reward-1", 1), ("reward-0", 1), ("reward-0", 10)):
        campaign.emit(worker, FaultReported(what="reward", detail=f"lake/{num}/0: nan", domain="lake", num=num))
    assert [one.num for one in report_on(campaign).failures] == [21]


@pytest.mark.parametrize("outcome", ["timeout", "exit", "env-fault", "policy-fault"])
def test_every_kind_of_failure_is_counted_in_the_same_places(campaign: SyntheticCampaign, outcome: str) -> None:
    is_lost = outcome.endswith("fault")
    counts = {outcome.replace("-", "_"): 20} if is_lost else {"done": 20}
    campaign.emit("env-0", EpisodesCounted(**counts, outcomes={"lake": {outcome: 20}}))
    snapshot, figures = look(campaign), report_on(campaign).key_figures
    assert (snapshot.episodes.failed, snapshot.domains["lake"].failed, figures.num_failed) == (20, 20, 20)
    assert (snapshot.episodes.faulted, figures.num_faulted) == ((20, 20) if is_lost else (0, 0))


def test_an_older_campaign_whose_events_have_no_outcomes_has_its_lost_episodes(campaign: SyntheticCampaign) -> None:
    campaign.emit("env-0", EpisodesCounted(done=9, env_fault=2, policy_fault=1))
    episodes = look(campaign).episodes
    assert (episodes.done, episodes.faulted, episodes.failed) == (9, 3, 3)


def test_the_report_names_the_outcomes_that_it_counts_as_failed(campaign: SyntheticCampaign) -> None:
    fail_all(campaign, as_fault=False)
    assert f"failed: {', '.join(FAILURES)}<" in write_failures(report_on(campaign))
    assert list(FAILURES) == [name for name in OUTCOMES if is_failure(name)]


def test_the_share_of_failures_leaves_out_what_training_aborted() -> None:
    assert measure_failures({"finished": 6, "exit": 3, "env-fault": 1, "aborted-redundant": 90}) == 0.4
