"""The figures of reports, from directories written by real event logs and spools."""

import contextlib
import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import h5py  # noqa: TID251
import msgspec
import pytest

from hpcrl.campaign_dir.events import (
    CheckpointSaved,
    EngineCounted,
    EpisodesCounted,
    EvaluationFinished,
    FaultReported,
    JobEnded,
    LayoutChosen,
    SegmentScored,
    StepFinished,
    TrainingResumed,
    VersionLoaded,
    WorkerEnded,
    WorkerFailed,
    WorkerStarted,
)
from hpcrl.campaign_dir.paths import CampaignDir
from hpcrl.monitor import count_lines
from hpcrl.report import __main__ as command
from hpcrl.report.builder import build_document, build_report
from hpcrl.report.charts import MAX_POINTS, build_histogram, smooth_values, thin_points
from hpcrl.report.comparison import MAX_SITE_ROWS
from hpcrl.report.figures import CampaignReport, ChartSeries, ReportComparison, ReportDocument, TrajectoryFigures
from hpcrl.report.page import render_page
from hpcrl.report.sections import MAX_ENGINES, write_engines, write_rewards
from hpcrl.report.trajectories import read_trajectories
from hpcrl.spool.record import EpisodeTurn
from hpcrl.spool.segment import write_segment
from hpcrl.system.files import make_private_dir, publish_json
from tests.support.synthetic import T0, SyntheticCampaign
from tests.support.trajectories import make_lake_trajectory, make_trajectory

STEP_S = 10.0
NUM_STEPS = 20


@pytest.fixture
def campaign(tmp_path: Path) -> Iterator[SyntheticCampaign]:
    campaign = SyntheticCampaign(tmp_path / "lakes", num_steps=NUM_STEPS)
    yield campaign
    campaign.close()


def play(campaign: SyntheticCampaign) -> SyntheticCampaign:
    """Make a campaign of two domains that makes all its steps: 10 s each, of which 4 s are waiting."""
    campaign.submit_local()
    campaign.now += 5
    campaign.start()
    for number in range(1, NUM_STEPS + 1):
        campaign.now = T0 + 5 + number * STEP_S
        counts = EpisodesCounted(
            running=8, done=16 * number, num_tokens=160 * number, turns=16 * number,
            outcomes={"lake": {"finished": 8 * number}, "taxi": {"finished": 7 * number, "exit": number}},
            token_fates={"lake": {"trained": 90 * number, "sampling": 10 * number}},
        )  # fmt: skip
        campaign.emit("env-0", counts)
        rewards = {"lake": [0.05 * number] * 8, "taxi": [0.0, 0.1] * 4}
        campaign.emit("reward-0", SegmentScored(num=16, rewards=rewards))
        load = {"busy_share": 0.6, "running": 3.0, "waiting": 0.5, "kv_share": 0.25, "num_tokens": 80}
        campaign.emit("decode-0", EngineCounted(window_s=STEP_S, **load))
        campaign.emit("decode-0", VersionLoaded(version=number, stall_s=0.2))
        figures = {
            "num_tokens": 100,
            "kl": 0.01,
            "entropy": 1.0,
            "grad_norm": 0.5,
            "step_s": 6.0,
            "wait_s": 4.0,
            "lags": {"0": 4, "1": 12},
        }
        campaign.emit("train-0", StepFinished(step=number, version=number, reward_mean=0.05 * number, **figures))
        campaign.now += 0.1
        if number % 10 == 0:
            campaign.emit("train-0", CheckpointSaved(step=number))
            campaign.emit("env-0", EvaluationFinished(number=number, version=number, reward_mean=0.04 * number))
    campaign.emit("env-0", FaultReported(what="env-fault", detail="no such file", domain="taxi", id="taxi/1/0"))
    campaign.emit("decode-0", WorkerFailed(reason="killed by signal 9"))
    campaign.emit("driver", JobEnded(outcome="done", reason="every training step was made"))
    campaign.outcome("done", "every training step was made")
    return campaign


def add_segment(campaign: CampaignDir, *trajectories: object, spool: str = "scored", number: int = 0) -> None:
    write_segment(campaign.spool(spool) / f"000-env-0-{number:08d}-{len(trajectories)}-0123abcd.h5", trajectories)


def report_on(campaign: SyntheticCampaign) -> CampaignReport:
    return build_report(campaign.directory, read_trajectories=read_trajectories)


def test_a_job_that_was_queued_while_another_ran_has_waited_since_the_end_of_that(campaign: SyntheticCampaign) -> None:
    campaign.submit(1)
    play(campaign)
    campaign.now += 15
    campaign.start(job=1)
    report = report_on(campaign)
    assert report.key_figures.queued_s == pytest.approx(5 + 15)
    assert [job.started - job.queued for job in report.jobs] == [pytest.approx(5), pytest.approx(15)]


def test_tokens_of_a_step_that_changed_nothing_or_was_rolled_back_are_not_trained(campaign: SyntheticCampaign) -> None:
    campaign.submit_local()
    campaign.start()
    for step, skipped in ((1, None), (2, "no trainable tokens"), (3, None)):
        campaign.emit("train-0", StepFinished(step=step, version=step, num_tokens=100, skipped=skipped))
    campaign.emit("train-0", TrainingResumed(step=2, version=2))
    assert report_on(campaign).key_figures.num_trained_tokens == 100


def test_each_job_of_a_chain_counts_with_the_nodes_that_it_had(campaign: SyntheticCampaign) -> None:
    gpus, planned, more = [0, 4], [2, 5], [3, 1]
    components = [
        {"index": index, "nodes": num, "gpus_per_node": each, "roles": [role]}
        for index, (role, num, each) in enumerate(zip(("env", "train"), planned, gpus, strict=True))
    ]
    roles = [{"role": role, "component": index, "num_workers": 1} for index, role in enumerate(("env", "train"))]
    publish_json(campaign.directory.plan, {"layout": "hetjob", "components": components, "roles": roles})
    for number, counts in ((0, None), (1, more)):
        campaign.submit(number)
        campaign.start(job=number)
        if counts:
            nodes = [[f"c{index}n{node}" for node in range(num)] for index, num in enumerate(counts)]
            campaign.emit("driver", LayoutChosen(layout="hetjob", nodes=nodes), job=number)
        campaign.now += 3600
        campaign.emit("driver", JobEnded(outcome="drained"), job=number)
        campaign.outcome("drained", number=number)
    report = report_on(campaign)
    assert report.key_figures.node_hours == pytest.approx(2 + 5 + 3 + 1)
    assert report.key_figures.gpu_hours == pytest.approx(4 * (5 + 1))
    assert {role.role: role.node_hours for role in report.roles} == pytest.approx({"env": 2 + 3, "train": 5 + 1})


def test_rewards_of_every_domain_are_shown_and_those_of_steps_that_are_repeated_do_not_count(
    campaign: SyntheticCampaign,
) -> None:
    campaign.submit()
    campaign.start()
    domains = [f"domain-{index}" for index in range(8)]

    def play_step(number: int, reward: float) -> None:
        campaign.step(number)
        campaign.now += 1
        campaign.emit("reward-0", SegmentScored(num=8, rewards={domain: [reward] for domain in domains}))
        campaign.now += 1

    for number in (1, 2, 3):
        play_step(number, 0.5)
    campaign.emit("train-0", TrainingResumed(step=1, version=1))
    campaign.now += 1
    play_step(2, 0.25)
    campaign.emit("env-0", EvaluationFinished(number=0, reward_mean=0.7, domains={"domain-7": 0.7, "held-out": 0.8}))
    report = report_on(campaign)
    (chart,) = report.reward_charts
    assert [one.values for one in chart.series if one.name == "domain-0"] == [[None, 0.375, 0.375]]
    assert "2 more domains" in chart.note
    found = {one.domain: (one.num_scored, one.recent, one.evaluation) for one in report.rewards}
    assert found["domain-6"] == (4, pytest.approx(0.4375), None)
    assert found["domain-7"] == (4, pytest.approx(0.4375), 0.7)
    assert found["held-out"] == (0, None, 0.8)
    table = write_rewards(report)
    assert all(domain in table for domain in found)


def test_a_page_of_many_long_campaigns_stays_small(tmp_path: Path) -> None:
    campaigns = [SyntheticCampaign(tmp_path / f"one-{number}", num_steps=1000) for number in range(8)]
    for campaign in campaigns:
        campaign.submit()
        campaign.start()
        for number in range(1, 1001):
            campaign.step(number)
            campaign.now += 1
        campaign.close()
    document = build_document([one.directory for one in campaigns], read_trajectories=read_trajectories)
    assert {len(chart.x) for one in document.campaigns for chart in one.stability_charts} == {167}
    (alone,) = build_document([campaigns[0].directory], read_trajectories=read_trajectories).campaigns
    assert {len(chart.x) for chart in alone.stability_charts} == {334}
    assert len(render_page(document)) < 5_000_000


def test_jobs_before_a_change_of_layout_and_workers_count_as_they_were(campaign: SyntheticCampaign) -> None:
    component = {"index": 0, "nodes": 1, "gpus_per_node": 4, "roles": ["env", "train"]}
    roles = [{"role": role, "component": 0, "num_workers": num} for role, num in (("env", 8), ("train", 1))]
    publish_json(campaign.directory.plan, {"layout": "colocated", "components": [component], "roles": roles})
    for number, nodes, num_workers, hours in ((0, [["a"] * 16, ["b"] * 16], 1, 10.0), (1, [["c"]], 8, 0.1)):
        campaign.submit(number)
        campaign.start(job=number)
        campaign.emit("driver", LayoutChosen(layout="any", nodes=nodes), job=number)
        for index in range(num_workers):
            campaign.emit(f"env-{index}", WorkerStarted(pid=1), job=number)
        campaign.now += hours * 3600
        for index in range(num_workers):
            campaign.emit(f"env-{index}", WorkerEnded(reason="the job is ending"), job=number)
        campaign.emit("driver", JobEnded(outcome="drained"), job=number)
        campaign.outcome("drained", number=number)
    report = report_on(campaign)
    assert report.key_figures.node_hours == pytest.approx(320.1, abs=0.1)
    assert report.key_figures.gpu_hours == pytest.approx(4 * 320.1, abs=1)
    env = next(role for role in report.roles if role.role == "env")
    assert env.node_hours == pytest.approx(160.05, abs=0.1)
    assert env.idle_share == pytest.approx(0.0, abs=0.01)


def test_the_key_figures_are_those_of_the_events(campaign: SyntheticCampaign) -> None:
    figures = report_on(play(campaign)).key_figures

    assert (figures.step, figures.num_steps) == (20, 20)
    assert figures.reward_first == pytest.approx(0.15)
    assert figures.reward_last == pytest.approx(0.9)
    assert (figures.evaluation_last, figures.evaluation_best) == (pytest.approx(0.8), pytest.approx(0.8))
    assert (figures.num_episodes, figures.num_tokens) == (320, 3200)
    assert figures.trained_share == pytest.approx(0.9)
    assert figures.num_trained_tokens == 20 * 100
    assert (figures.wall_s, figures.queued_s) == (pytest.approx(200.1), pytest.approx(5.0))


def test_the_verdict_is_one_sentence_about_state_reward_and_findings(campaign: SyntheticCampaign) -> None:
    report = report_on(play(campaign))
    assert report.verdict == (
        "Done after 20 of 20 steps; the reward rose from 0.150 to 0.900; held-out tasks give 0.800; "
        "nothing needs attention."
    )


@pytest.mark.parametrize(
    ("rewards", "words"),
    [
        ([0.5] * 10 + [0.5 + 1e-7] * 10, "the reward did not change: 0.500;"),
        ([0.5, 0.4, 0.6, 0.4, 0.6] * 4, "the reward did not change: 0.500;"),
        (
            [0.4, 0.6, 0.5, 0.6, 0.4, *[0.3, 0.7] * 5, 0.4, 0.6, 0.45, 0.7, 0.6],
            "the reward did not change beyond its noise: 0.500, then 0.550;",
        ),
        ([0.1, 0.1, 0.4, 0.4], "the reward rose from 0.100 to 0.400;"),
        ([0.9, 0.9, 0.9, 0.1, 0.1, 0.1], "the reward fell from 0.900 to 0.100;"),
        ([0.3], "the reward is 0.300;"),
    ],
)
def test_a_change_of_the_reward_is_one_that_can_be_seen_beyond_its_noise(
    campaign: SyntheticCampaign, rewards: list[float], words: str
) -> None:
    campaign.submit_local()
    campaign.start()
    for step, reward in enumerate(rewards, start=1):
        campaign.now += 1
        campaign.step(step, reward=reward)
    assert words in report_on(campaign).verdict


def test_the_verdict_of_a_campaign_that_failed_has_no_claim_that_nothing_needs_attention(
    campaign: SyntheticCampaign,
) -> None:
    play(campaign).outcome("failed", "the driver was killed by signal 9")
    verdict = report_on(campaign).verdict
    assert verdict.startswith("Failed after 20 of 20 steps")
    assert "needs attention" not in verdict


def test_the_time_of_roles_is_divided_into_shares(campaign: SyntheticCampaign) -> None:
    roles = {role.role: role for role in report_on(play(campaign)).roles}

    assert roles["train"].busy_share == pytest.approx(120 / 200, rel=0.01)
    assert roles["decode"].busy_share == pytest.approx(0.6, rel=0.01)
    assert roles["decode"].pause_s == pytest.approx(0.2)
    assert roles["reward"].busy_share is None
    for role in roles.values():
        if role.busy_share is not None:
            shares = (role.busy_share, role.waiting_share or 0.0, role.starting_share, role.idle_share)
            assert sum(shares) == pytest.approx(1.0)


def test_rewards_are_charted_by_domain_and_with_evaluations(campaign: SyntheticCampaign) -> None:
    (chart,) = report_on(play(campaign)).reward_charts
    series = {one.name: one.values for one in chart.series}

    assert chart.x == [float(number) for number in range(21)][1 if chart.x[0] else 0 :]
    assert series["each step"][-1] == pytest.approx(1.0)
    assert series["held-out evaluation"][-1] == pytest.approx(0.8)
    assert {"lake", "taxi"} <= series.keys()


def test_engines_and_staleness_have_their_numbers(campaign: SyntheticCampaign) -> None:
    report = report_on(play(campaign))
    charts = {chart.id: chart for chart in [*report.engine_charts, *report.staleness_charts]}

    assert charts["engine-tokens"].series[0].values[0] == pytest.approx(8.0)
    assert charts["engine-kv"].series[0].values[0] == pytest.approx(0.25)
    assert charts["lags"].series[0].values == [80.0, 240.0]


def test_a_report_that_leaves_out_counts_shows_the_same(
    campaign: SyntheticCampaign, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An hour, in which an env worker writes its counts each second, and plays for all of it but a quarter."""
    campaign.submit_local()
    campaign.start()
    for second in range(1, 3601):
        campaign.now += 1.0
        running = 4 if second % 400 < 300 else 0
        counts = EpisodesCounted(
            running=running, done=second, num_tokens=10 * second, turns=second,
            outcomes={"lake": {"finished": second}}, token_fates={"lake": {"trained": 10 * second}},
        )  # fmt: skip
        campaign.emit("env-0", counts)
    campaign.emit("driver", JobEnded(outcome="drained"))
    campaign.outcome("drained")
    monkeypatch.setattr(count_lines, "NUM_THINNED", 1 << 40)
    whole = report_on(campaign)
    monkeypatch.undo()
    thinned = report_on(campaign)
    assert thinned.key_figures == whole.key_figures
    for mine, theirs in zip(thinned.roles, whole.roles, strict=True):
        for share in ("busy_share", "waiting_share", "starting_share", "idle_share"):
            assert getattr(mine, share) == pytest.approx(getattr(theirs, share), abs=0.02), (mine.role, share)
    assert {role.role: role.busy_share for role in whole.roles}["env"] == pytest.approx(0.75, abs=0.02)


def test_each_engine_has_its_health(campaign: SyntheticCampaign) -> None:
    play(campaign)
    cache = {"num_prefix_queries": 400, "num_prefix_hits": 300, "num_preemptions": 2}
    for index, kv_share in ((10, 0.5), (10, 0.9), (9, None)):
        load = EngineCounted(
            window_s=STEP_S, busy_share=1.0, running=4.0, waiting=2.0, kv_share=kv_share, num_tokens=50
        )
        campaign.emit(f"decode-{index}", msgspec.structs.replace(load, **(cache if kv_share else {})))

    report = report_on(campaign)

    engines = {one.engine: one for one in report.engines}
    assert list(engines) == ["decode-0", "decode-9", "decode-10"]
    ten, nine = engines["decode-10"], engines["decode-9"]
    assert (ten.running, ten.waiting, ten.tokens_per_s) == (4.0, 2.0, 5.0)
    assert (ten.kv_share, ten.kv_most, ten.prefix_hit_share, ten.num_preemptions) == (pytest.approx(0.7), 0.9, 0.75, 4)
    assert (nine.kv_share, nine.kv_most, nine.prefix_hit_share, nine.num_preemptions) == (None, None, None, None)
    table = write_engines(report.engines)
    assert "<code>decode-10</code>" in table
    assert "75%" in table


def test_the_table_of_very_many_engines_has_those_that_were_least_busy(campaign: SyntheticCampaign) -> None:
    play(campaign)
    (one, *_) = report_on(campaign).engines
    engines = [
        msgspec.structs.replace(one, engine=f"decode-{number}", busy_share=number / 5000)
        for number in reversed(range(MAX_ENGINES + 7))
    ]
    table = write_engines(engines)
    assert f"{MAX_ENGINES:,} least busy of {MAX_ENGINES + 7:,}" in table
    assert table.count("<code>") == MAX_ENGINES
    assert "<code>decode-0</code>" in table
    assert f"decode-{MAX_ENGINES}<" not in table


def test_failures_are_counted_by_domain_and_node(campaign: SyntheticCampaign) -> None:
    failures = {(one.what, one.domain, one.node): one for one in report_on(play(campaign)).failures}

    assert failures["env-fault", "taxi", "env0"].newest == "no such file"
    assert failures["worker decode", "", "decode0"].kind == "infrastructure"


def test_a_worker_has_a_span_with_its_end(campaign: SyntheticCampaign) -> None:
    rows = {one.worker: one for one in report_on(play(campaign)).workers}

    assert (rows["decode-0"].num_failures, rows["env-0"].num_failures) == (1, 0)
    ((start, end),) = rows["env-0"].times
    assert end - start == rows["env-0"].up_s == pytest.approx(200.1)


def test_a_campaign_without_any_step_has_a_report(campaign: SyntheticCampaign) -> None:
    campaign.submit_local()
    report = report_on(campaign)
    assert report.reward_charts == report.stability_charts == []
    assert report.key_figures.reward_last is None


def test_trajectories_are_sampled_by_reward_length_and_failure(campaign: SyntheticCampaign) -> None:
    group = [make_lake_trajectory(1, index, reward=index / 8) for index in range(8)]
    failed = msgspec.structs.replace(
        make_lake_trajectory(2, 0, reward=None), status="env-fault", extra={"fault": "gone"}
    )
    add_segment(campaign.directory, *group)
    add_segment(campaign.directory, failed, number=1)

    found = read_trajectories(campaign.directory)

    assert (found.num, found.num_groups, found.num_flat_groups) == (9, 1, 0)
    chosen = {reason: one for one in reversed(found.sampled) for reason in one.chosen}
    assert chosen["best"].reward == pytest.approx(7 / 8)
    assert chosen["worst"].reward == 0.0
    assert chosen["failed"].note == "gone"
    assert [turn.role for turn in chosen["best"].conversation] == ["user", "assistant", "user", "assistant"]
    assert [len(turn.tokens) for turn in chosen["best"].conversation] == [0, 3, 0, 1]
    assert len(found.groups[0].attempts) == 8


def test_a_retried_episode_and_a_scored_twin_count_once(campaign: SyntheticCampaign) -> None:
    one = make_lake_trajectory(1, 0, reward=1.0)
    add_segment(campaign.directory, one)
    add_segment(campaign.directory, one, number=7, spool="archive")
    assert read_trajectories(campaign.directory).num == 1


def test_a_trajectory_of_five_megabytes_is_shortened(campaign: SyntheticCampaign) -> None:
    huge = make_trajectory("lake/1/0", 1_300_000, reward=1.0)
    add_segment(campaign.directory, huge)

    found = read_trajectories(campaign.directory)

    turns = found.sampled[0].conversation
    assert found.sampled[0].num_tokens == 1_300_000
    assert max(turn.num_left_out for turn in turns) > 1_000_000
    assert sum(len(turn.text) for turn in turns) < 20_000


@pytest.mark.parametrize("group_size", [8, 64])
def test_long_conversations_of_many_domains_leave_room_for_groups_and_for_each_other(
    campaign: SyntheticCampaign, tmp_path: Path, group_size: int
) -> None:
    """30 turns of 1,000 tokens, which are shown as numbers here: 100 kB of text for each trajectory."""
    turns = [EpisodeTurn(start=1000 * turn + 500, end=1000 * (turn + 1)) for turn in range(30)]
    for number, domain in enumerate(f"domain{index}" for index in range(6)):
        members = [
            make_trajectory(f"{domain}/{group}/{index}", 30_000, turns=turns, reward=index / group_size)
            for group in range(3)
            for index in range(group_size)
        ]
        add_segment(campaign.directory, *members, number=number)
    play(campaign)

    found = read_trajectories(campaign.directory)

    assert len(found.groups) >= 6
    assert all(len(attempt.conversation) > 1 for group in found.groups for attempt in group.attempts)
    assert all(len(one.conversation) > 1 for one in found.sampled)
    page = tmp_path / "report.html"
    assert command.main(["-o", str(page), "--", str(campaign.directory.root)]) == 0
    assert page.stat().st_size < 5_000_000


def test_a_damaged_segment_is_named_and_skipped(campaign: SyntheticCampaign) -> None:
    add_segment(campaign.directory, make_lake_trajectory(1, 0, reward=1.0))
    (campaign.directory.spool("scored") / "000-env-0-00000009-1-0123abcd.h5").write_bytes(b"not a segment" * 300)
    found = read_trajectories(campaign.directory)
    assert found.num == 1
    assert any("000-env-0-00000009" in problem for problem in found.problems)


def test_trajectories_are_counted_without_a_look_at_their_tokens(campaign: SyntheticCampaign) -> None:
    path = campaign.directory.spool("scored") / "000-env-0-00000000-1-0123abcd.h5"
    write_segment(path, [make_lake_trajectory(1, 0, reward=1.0)], compression="zstd")
    with h5py.File(path) as file:
        stored = file["token_ids"].id.read_direct_chunk((0,))[1]
    path.write_bytes(path.read_bytes().replace(stored, bytes(len(stored))))
    found = read_trajectories(campaign.directory)
    assert (found.num, found.sampled) == (1, [])
    assert any(path.name in problem for problem in found.problems)


@pytest.mark.parametrize(
    ("counts", "labels"),
    [
        ({3: 5, 5: 2}, ["3", "4", "5"]),
        ({-1: 1, 0: 2, 1: 1}, ["-1", "0", "1"]),
        ({number: 1 for number in range(5, 45)}, ["5 to 6", "7 to 8", "9 to 10"]),
        ({0.5: 1, 0.9: 1}, ["0.5 to 0.52", "0.52 to 0.54", "0.54 to 0.56"]),
        ({0.5: 3}, ["0.5"]),
    ],
)
def test_the_bars_of_a_histogram_hold_all_values_and_whole_numbers_have_whole_bars(counts, labels) -> None:
    chart = build_histogram("lengths", "Lengths", "tokens", {"lake": counts})
    assert chart.labels[:3] == labels
    assert sum(chart.series[0].values) == sum(counts.values())


def test_long_series_are_thinned_to_means_of_neighbours() -> None:
    x = [float(number) for number in range(4 * MAX_POINTS)]
    thin_x, (thin,) = thin_points(x, [ChartSeries(name="y", values=list(x))])
    assert len(thin_x) == MAX_POINTS
    assert thin_x[0] == thin.values[0] == pytest.approx(1.5)


def test_a_moving_mean_skips_what_is_missing() -> None:
    assert smooth_values([1.0, None, 3.0]) == [2.0, None, 2.0]


def test_campaigns_are_compared_with_the_difference_of_their_recipes(tmp_path: Path) -> None:
    campaigns = [SyntheticCampaign(tmp_path / name, num_steps=NUM_STEPS) for name in ("one", "two")]
    for campaign in campaigns:
        play(campaign).close()
    publish_json(campaigns[1].directory.recipe, {"name": "quickstart", "train": {"num_steps": NUM_STEPS}, "seed": 1})
    document = build_document([one.directory for one in campaigns], read_trajectories=read_trajectories)
    assert document.comparison is not None
    assert [(one.key, one.values) for one in document.comparison.settings] == [("seed", ["0", "1"])]
    assert document.comparison.verdict.startswith("The recipes differ in the seed alone.")
    assert len(document.comparison.charts[0].series) == 2


def make_site_record(name: str, *partitions: str, **settings: object) -> dict[str, object]:
    cpu = {"cores_per_node": 64, "mem_gib_per_node": 256}
    return {"name": name, "description": f"the site {name}", "partitions": dict.fromkeys(partitions, cpu)} | settings


def compare_sites(tmp_path: Path, *sites: dict[str, object]) -> ReportComparison:
    campaigns = [SyntheticCampaign(tmp_path / f"of-{number}") for number, _ in enumerate(sites)]
    for campaign, site in zip(campaigns, sites, strict=True):
        publish_json(campaign.directory.site, site)
        campaign.close()
    comparison = build_document([one.directory for one in campaigns], read_trajectories=read_trajectories).comparison
    assert comparison is not None
    return comparison


def test_campaigns_of_different_sites_are_compared_with_what_differs(tmp_path: Path) -> None:
    sites = (
        make_site_record("delta", "cpu", "gpu", account="a"),
        make_site_record("alps", "cpu", "gh200", account="b"),
    )
    found = compare_sites(tmp_path, *sites)
    assert found.verdict == (
        "The recipes are the same; the sites differ (delta, alps), so times and rates are of different machines."
    )
    assert [(one.key, one.values) for one in found.settings] == [
        ("site.name", ['"delta"', '"alps"']),
        ("site.account", ['"a"', '"b"']),
        ("site.partitions.gh200", ["", "defined"]),
        ("site.partitions.gpu", ["defined", ""]),
    ]


def test_a_setting_of_one_site_that_has_changed_is_named(tmp_path: Path) -> None:
    found = compare_sites(tmp_path, make_site_record("delta", "cpu"), make_site_record("delta", "cpu", account="b"))
    assert found.verdict == (
        "The recipes are the same; the settings of site delta differ, which may change times and rates."
    )
    assert [(one.key, one.values) for one in found.settings] == [("site.account", ["", '"b"'])]


def test_sites_with_many_differences_have_a_bounded_table(tmp_path: Path) -> None:
    many = {"environment": {f"NAME_{number}": "1" for number in range(100)}}
    found = compare_sites(tmp_path, make_site_record("delta", "cpu"), make_site_record("delta", "cpu", **many))
    assert len(found.settings) == MAX_SITE_ROWS + 1
    assert found.settings[-1].key == "site: 70 more settings"


# Bad input


def break_events(campaign: CampaignDir) -> None:
    (campaign.events / "000-train-0.jsonl").write_bytes(b'{"time": 1, "event": "step", "step": \xff}\n{"torn')


def break_plan(campaign: CampaignDir) -> None:
    campaign.plan.write_text('{"components": [3, {"nodes": "many"}], "roles": "all"}')


def remove_records(campaign: CampaignDir) -> None:
    for path in (campaign.plan, campaign.recipe, campaign.site):
        path.unlink(missing_ok=True)


def write_newer_version(campaign: CampaignDir) -> None:
    publish_json(
        campaign.plan, {"layout": "mesh", "components": {"a": 1}, "roles": [{"role": "critic", "num_workers": 2}]}
    )
    publish_json(campaign.recipe, {"name": "quickstart", "train": {"num_steps": 4, "future": True}, "worlds": [1, 2]})
    with (campaign.events / "000-env-0.jsonl").open("a") as file:
        file.write('{"time": 1800000001, "event": "teleported", "job": 0, "role": "env", "worker": "000-env-0"}\n')


def replace_records_by_lists(campaign: CampaignDir) -> None:
    for path in (campaign.recipe, campaign.site, campaign.plan, campaign.manifest):
        path.write_text("[]")


def empty_directory(campaign: CampaignDir) -> None:
    for path in campaign.events.iterdir():
        path.unlink()


@pytest.mark.parametrize(
    "damage", [break_events, break_plan, remove_records, replace_records_by_lists, write_newer_version, empty_directory]
)
def test_a_damaged_or_newer_campaign_has_a_report(campaign: SyntheticCampaign, tmp_path: Path, damage) -> None:
    damage(play(campaign).directory)
    page = tmp_path / "report.html"
    assert command.main(["-o", str(page), "--", str(campaign.directory.root)]) == 0
    assert page.stat().st_size < 5_000_000
    msgspec.json.decode(page.with_suffix(".json").read_bytes(), type=ReportDocument)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_an_unreadable_campaign_has_a_report_with_its_problems(campaign: SyntheticCampaign) -> None:
    play(campaign).directory.events.chmod(0)
    try:
        assert report_on(campaign).problems
    finally:
        campaign.directory.events.chmod(0o700)


def test_the_json_twin_has_the_numbers_of_the_page(campaign: SyntheticCampaign, tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    assert command.main(["-o", str(page), "--", str(play(campaign).directory.root)]) == 0
    twin = json.loads(page.with_suffix(".json").read_text())
    text = page.read_text()
    shown = json.loads(text.partition('id="chart-data">')[2].partition("</script>")[0])
    charts = [
        chart for name in twin["campaigns"][0] if name.endswith("_charts") for chart in twin["campaigns"][0][name]
    ]
    assert [chart["id"] for chart in shown] == [chart["id"] for chart in charts]
    assert all(chart in shown for chart in charts)
    assert twin["campaigns"][0]["verdict"] in text


def test_a_report_that_cannot_be_written_is_refused_in_one_line(
    campaign: SyntheticCampaign, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.main(["-o", "/proc/no/report.html", "--", str(campaign.directory.root)]) == 2
    assert capsys.readouterr().err.startswith("hpcrl: /proc/no/report.html cannot be written")


def test_without_h5py_a_report_names_the_package_that_trajectories_need(
    campaign: SyntheticCampaign, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "hpcrl.report.trajectories", None)
    figures: TrajectoryFigures = command._read_trajectories(campaign.directory)
    assert figures.missing[0].startswith("trajectories are not shown")


def test_a_report_replaces_no_device_and_no_foreign_file(
    campaign: SyntheticCampaign, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert command.main(["-o", str(tmp_path / "pipe"), "--", str(campaign.directory.root)]) == 2
    assert "it is not a regular file" in capsys.readouterr().err
    assert stat.S_ISFIFO((tmp_path / "pipe").lstat().st_mode)
    (tmp_path / "q.json").write_text('{"mine": 1}')
    assert command.main(["-o", str(tmp_path / "q.html"), "--", str(campaign.directory.root)]) == 2
    assert "q.json exists and is not a report" in capsys.readouterr().err
    for name, why in (("mine.toml", "mine.toml exists and is not a report"), ("z.json", "z.json cannot be a page")):
        (tmp_path / name).write_text("{}")
        assert command.main(["-o", str(tmp_path / name), "--", str(campaign.directory.root)]) == 2
        assert why in capsys.readouterr().err
        assert (tmp_path / name).read_text() == "{}"
    for _ in range(2):
        assert command.main(["-o", str(tmp_path / "own.html"), "--", str(campaign.directory.root)]) == 0
    words = ["--format", "inspect", "-o", str(tmp_path), "--", str(campaign.directory.root)]
    assert command.main(words) == 2
    assert f"traj export {campaign.directory.name} {tmp_path} --format inspect --force" in capsys.readouterr().err
    assert (tmp_path / "q.json").read_text() == '{"mine": 1}'


def test_a_report_is_written_through_a_link_and_again(campaign: SyntheticCampaign, tmp_path: Path) -> None:
    (tmp_path / "link.html").symlink_to(tmp_path / "real.html")
    for _ in range(2):
        assert command.main(["-o", str(tmp_path / "link.html"), "--", str(campaign.directory.root)]) == 0
    assert (tmp_path / "link.html").is_symlink()
    assert (tmp_path / "real.html").read_text().startswith("<!doctype html>")


def test_the_software_that_was_recorded_is_in_the_provenance(campaign: SyntheticCampaign) -> None:
    manifest = json.loads(campaign.directory.manifest.read_text())
    git = {"recipe": {"directory": "/mine", "commit": "abc1", "changed": True}}
    software = {"python": "3.12.1", "packages": {"torch": "2.9", "vllm": "0.32"}, "git": git}
    publish_json(campaign.directory.manifest, manifest | {"software": software})
    entries = {
        one.name: one.value for one in build_report(campaign.directory, read_trajectories=read_trajectories).provenance
    }
    assert (entries["Python"], entries["packages"]) == ("3.12.1", "torch 2.9, vllm 0.32")
    assert entries["commit of recipe"] == "abc1 with changes (/mine)"


@pytest.mark.parametrize("software", [None, 3, {"git": [], "packages": 4}, {"git": {"recipe": 5}}])
def test_a_campaign_without_recorded_software_has_a_report(campaign: SyntheticCampaign, software: object) -> None:
    manifest = json.loads(campaign.directory.manifest.read_text())
    publish_json(campaign.directory.manifest, manifest | {"software": software})
    assert build_report(campaign.directory, read_trajectories=read_trajectories).provenance


def test_without_chromium_a_report_is_written_and_its_picture_is_refused_in_one_line(
    campaign: SyntheticCampaign, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    page = tmp_path / "report.html"
    assert command.main(["--png", "-o", str(page), "--", str(play(campaign).directory.root)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "--png needs Chromium" in line
    assert page.exists()
    assert not page.with_suffix(".png").exists()


def test_a_picture_of_a_report_is_beside_it(
    campaign: SyntheticCampaign, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """This Chromium only writes the name of the page into the picture."""
    program = make_private_dir(tmp_path / "bin") / "chromium"
    program.write_text(
        '#!/bin/sh\nfor word; do case $word in --screenshot=*) to=${word#*=};; esac; done\necho "$word" >"$to"\n'
    )
    program.chmod(0o700)
    monkeypatch.setenv("PATH", f"{program.parent}:/usr/bin:/bin")
    page = tmp_path / "report.html"
    assert command.main(["--png", "-o", str(page), "--", str(play(campaign).directory.root)]) == 0
    picture = page.with_suffix(".png")
    assert picture.read_text() == f"{page.as_uri()}\n"
    assert capsys.readouterr().out.splitlines()[-1] == str(picture)


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o077, 0o600)])
def test_a_page_and_its_twin_follow_the_umask(
    campaign: SyntheticCampaign, tmp_path: Path, umask: int, mode: int
) -> None:
    before = os.umask(umask)
    try:
        assert command.main(["-o", str(tmp_path / "page.html"), "--", str(campaign.directory.root)]) == 0
    finally:
        os.umask(before)
    for name in ("page.html", "page.json"):
        assert stat.S_IMODE((tmp_path / name).stat().st_mode) == mode


def test_a_page_whose_name_has_no_suffix_gets_one(
    campaign: SyntheticCampaign, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.main(["-o", str(tmp_path / "x"), "--", str(campaign.directory.root)]) == 0
    assert (tmp_path / "x.html").exists()
    assert not (tmp_path / "x").exists()
    assert str(tmp_path / "x.html") in capsys.readouterr().out


def test_groups_whose_attempts_have_one_reward_are_counted_as_flat(campaign: SyntheticCampaign) -> None:
    rewards = {0: (1.0, 1.0), 1: (0.0, 1.0), 2: (0.5, 0.5)}
    trajectories = [
        make_lake_trajectory(group, index, reward=reward)
        for group, both in rewards.items()
        for index, reward in enumerate(both)
    ]
    add_segment(campaign.directory, *trajectories)
    figures = read_trajectories(campaign.directory)
    assert (figures.num_groups, figures.num_flat_groups, figures.num_kept) == (3, 2, 6)
    page = render_page(build_document([campaign.directory], read_trajectories=read_trajectories))
    assert "3 scored groups, 67% of them with one reward" in page


def test_a_picture_is_named_on_a_terminal_while_it_is_drawn(
    campaign: SyntheticCampaign, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[str] = []

    @contextlib.contextmanager
    def note_wait(description: str) -> Iterator[None]:
        shown.append(description)
        yield
        shown.append("done")

    monkeypatch.setattr(command, "show_wait", note_wait)
    monkeypatch.setattr(command, "write_picture", lambda page, picture: shown.append("drawn"))
    page = tmp_path / "page.html"
    assert command.main(["--png", "-o", str(page), "--", str(campaign.directory.root)]) == 0
    assert shown == [f"{page.with_suffix('.png')} is drawn", "drawn", "done"]
