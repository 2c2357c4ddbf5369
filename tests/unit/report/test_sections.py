"""Failed episodes are counted once: report, monitor, advisories and their JSON have one number."""

import io
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console  # noqa: TID251

from hpcrl.campaign_dir.events import EpisodesCounted, FaultReported, JobEnded, SegmentScored, StepFinished, WorkerEnded
from hpcrl.monitor.collect import SnapshotCollector
from hpcrl.monitor.screen import render_screen
from hpcrl.monitor.snapshot import CampaignSnapshot, encode_snapshot
from hpcrl.monitor.view import describe_changes
from hpcrl.report.builder import build_document, build_report
from hpcrl.report.figures import CampaignReport, TrajectoryFigures
from hpcrl.report.markup import write_bar
from hpcrl.report.page import render_page
from hpcrl.report.sections import write_failures, write_jobs, write_provenance, write_roles, write_summary
from hpcrl.spool.outcome import FAILURES, OUTCOMES, is_failure, measure_failures
from hpcrl.system.files import publish_json
from hpcrl.system.terminal import format_duration
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


NOTHING = TrajectoryFigures(num=0, num_groups=0, num_flat_groups=0, sampled=[], groups=[], charts=[], problems=[])


def report_on(campaign: SyntheticCampaign) -> CampaignReport:
    return build_report(campaign.directory, read_trajectories=lambda _: NOTHING)


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


def test_the_chain_of_jobs_has_a_bar_for_the_time_of_each_in_the_queue_and_its_run(tmp_path: Path) -> None:
    campaign = SyntheticCampaign(tmp_path / "chain")
    for number, outcome in enumerate(("drained", "failed")):
        campaign.submit(number)
        campaign.now += 100
        campaign.start(job=number)
        campaign.now += 300
        campaign.emit("driver", JobEnded(outcome=outcome), job=number)
        campaign.outcome(outcome, number=number)
    campaign.close()
    table = write_jobs(report_on(campaign))
    for number, parts in enumerate(
        ([(0.0, 0.125, "queued"), (0.125, 0.5, "up")], [(0.5, 0.625, "queued"), (0.625, 1.0, "failed")])
    ):
        assert write_bar(parts, f"job {number}: waited {format_duration(100)}, ran {format_duration(300)}") in table


def test_an_advisory_has_its_figure_and_its_threshold(campaign: SyntheticCampaign) -> None:
    fail_all(campaign, as_fault=False)
    report = report_on(campaign)
    advisory = next(one for one in report.advisories if one.subject == "lake")
    page = write_summary(report)
    assert f"<dd>{advisory.figure:g}, threshold {advisory.threshold:g} ({advisory.unit})</dd>" in page


def test_the_resolved_recipe_is_a_table_of_all_settings(campaign: SyntheticCampaign) -> None:
    table = write_provenance(report_on(campaign))
    for key, value in (("name", "&quot;quickstart&quot;"), ("train.num_steps", "10"), ("seed", "0")):
        assert f"<td><code>{key}</code></td><td><code>{value}</code></td>" in table


def score_in_env(campaign: SyntheticCampaign) -> None:
    campaign.now += 60
    campaign.emit("env-0", EpisodesCounted(running=4, done=8, num_tokens=80))
    campaign.emit("env-0", SegmentScored(num=8, rewards={"lake": [1.0] * 8}))
    campaign.now += 60
    campaign.emit("env-0", EpisodesCounted(running=4, done=16, num_tokens=160))


def test_a_reward_role_whose_work_env_workers_do_has_no_share_of_their_nodes(tmp_path: Path) -> None:
    campaign = SyntheticCampaign(tmp_path / "lakes")
    campaign.submit_local()
    campaign.start()
    score_in_env(campaign)
    campaign.emit("reward-0", WorkerEnded())
    campaign.outcome("failed", "a node failed")
    campaign.close()
    report = report_on(campaign)
    roles = {role.role: role for role in report.roles}
    assert look(campaign).roles["reward"].done_by == roles["reward"].done_by == "env"
    assert (roles["reward"].node_hours, roles["reward"].idle_share, roles["reward"].num_workers) == (0.0, 0.0, 0)
    assert '<td>reward</td><td class="num">in env</td>' in write_roles(report.roles)
    assert "reward-0" in [row.worker for row in report.workers]


@pytest.mark.parametrize(("is_in_env", "share_of_env"), [(False, 0.5), (True, 1.0)])
def test_env_workers_that_score_have_all_of_the_nodes_of_both_roles(
    tmp_path: Path, is_in_env: bool, share_of_env: float
) -> None:
    campaign = SyntheticCampaign(tmp_path / "lakes")
    component = {"index": 0, "partition": "env", "nodes": 4, "roles": ["env", "reward"]}
    roles = [{"role": role, "component": 0, "num_workers": 1} for role in ("env", "reward")]
    publish_json(campaign.directory.plan, {"layout": "hetjob", "components": [component], "roles": roles})
    campaign.submit_local()
    campaign.start()
    campaign.now += 3600
    if is_in_env:
        score_in_env(campaign)
    campaign.emit("driver", JobEnded(outcome="done"))
    campaign.outcome("done")
    campaign.close()
    report = report_on(campaign)
    (env,) = [role for role in report.roles if role.role == "env"]
    assert report.key_figures.node_hours >= 4
    assert env.node_hours == pytest.approx(share_of_env * report.key_figures.node_hours)


def test_episodes_are_at_least_the_trajectories_that_are_kept(campaign: SyntheticCampaign) -> None:
    campaign.emit("env-0", EpisodesCounted(done=90, env_fault=2))
    nothing = TrajectoryFigures(
        num=110, num_kept=100, num_groups=0, num_flat_groups=0, sampled=[], groups=[], charts=[], problems=[]
    )
    report = build_report(campaign.directory, read_trajectories=lambda _: nothing)
    assert (report.key_figures.num_episodes, report.key_figures.num_uncounted) == (100, 10)
    assert "10 more episodes have a trajectory" in write_failures(report)
    assert "more episode" not in write_failures(report_on(campaign))


def test_tokens_of_steps_and_tokens_fit_to_train_on_have_their_own_words(campaign: SyntheticCampaign) -> None:
    campaign.emit("env-0", EpisodesCounted(done=8, num_tokens=1000, token_fates={"lake": {"trained": 900, "cut": 100}}))
    campaign.emit("train-0", StepFinished(step=1, version=1, num_tokens=700))
    report = report_on(campaign)
    tile = write_summary(report).partition("Tokens of steps")[2].partition("</li>")[0]
    assert ">700<" in tile
    assert "of 900 fit to train on, 90% of those generated" in tile
    page = render_page(build_document([campaign.directory], read_trajectories=lambda _: NOTHING))
    fates = page.partition("What became of generated tokens")[2].partition("</table>")[0]
    assert "fit to train on" in fates
    assert "trained" not in fates
