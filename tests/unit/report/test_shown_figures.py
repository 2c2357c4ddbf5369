"""Each figure of a report is the one of its name: every field has another value here."""

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from hpcrl.campaign_dir.events import StepFinished
from hpcrl.report.builder import build_document, build_report
from hpcrl.report.comparison import RESULT_LABELS
from hpcrl.report.conversation_html import write_conversation
from hpcrl.report.figures import CampaignReport, KeyFigures, RoleFigures, TrajectoryFigures
from hpcrl.report.trajectories import MAX_TOKENS, MAX_UNLIKELY_PER_TURN, read_trajectories
from hpcrl.spool.record import EpisodeTurn
from hpcrl.system.files import publish_json
from tests.support.synthetic import SyntheticCampaign
from tests.support.trajectories import make_lake_trajectory, make_trajectory
from tests.unit.report.test_builder import add_segment, play

NUM_STEPS = 3
FIGURES = [
    name
    for name in StepFinished.__struct_fields__
    if name not in {*StepFinished.__struct_fields__[:6], "step", "version", "skipped", "lags", "times", "lengths"}
    and not name.startswith(("num_", "too_long"))
]
CHARTED = {
    "kl": {"to the acting policy": "kl", "without lag": "kl_fresh", "to the reference": "kl_reference"},
    "entropy": {"entropy": "entropy"},
    "grad-norm": {"gradient norm": "grad_norm"},
    "clip": {"clipped": "clip_fraction", "truncated importance ratio": "is_truncated_fraction"},
    "ratio": {"5th percentile": "is_ratio_p05", "median": "is_ratio_p50", "95th percentile": "is_ratio_p95"},
    "loss": {"policy": "loss", "value": "value_loss"},
    "replay": {"the engine's experts": "replayed_fraction"},
    "step-time": {"training": "step_s", "waiting for trajectories": "wait_s"},
    "lag": {"mean": "lag_mean", "largest": "lag_max"},
}
"""The field of each series of each chart."""


@pytest.fixture
def campaign(tmp_path: Path) -> Iterator[SyntheticCampaign]:
    campaign = SyntheticCampaign(tmp_path / "lakes", num_steps=NUM_STEPS)
    yield campaign
    campaign.close()


def report_on(campaign: SyntheticCampaign) -> CampaignReport:
    return build_report(campaign.directory, read_trajectories=read_trajectories)


def number_figure(name: str, step: int) -> int:
    return 100 * (FIGURES.index(name) + 1) + step


@pytest.fixture
def charts(campaign: SyntheticCampaign) -> dict[str, dict[str, list[float | None]]]:
    """Return the series of all charts by step of a campaign whose figures all differ."""
    campaign.submit_local()
    campaign.start()
    for step in range(1, NUM_STEPS + 1):
        campaign.now += 10
        figures = {name: number_figure(name, step) for name in FIGURES}
        campaign.emit("train-0", msgspec.convert({"event": "step", "step": step, **figures}, StepFinished))
    report = report_on(campaign)
    shown = [*report.reward_charts, *report.stability_charts, *report.time_charts, *report.staleness_charts]
    assert all(chart.x == [1.0, 2.0, 3.0] for chart in shown)
    return {chart.id: {series.name: series.values for series in chart.series} for chart in shown}


@pytest.mark.parametrize("chart", CHARTED)
def test_each_series_of_a_chart_has_the_figures_of_its_name(
    charts: dict[str, dict[str, list[float | None]]], chart: str
) -> None:
    expected = {
        name: [number_figure(field, step) for step in range(1, NUM_STEPS + 1)] for name, field in CHARTED[chart].items()
    }
    assert charts[chart] == expected


def test_the_chart_of_rewards_has_the_mean_reward_of_each_step(
    charts: dict[str, dict[str, list[float | None]]],
) -> None:
    assert charts["reward"]["each step"] == [number_figure("reward_mean", step) for step in (1, 2, 3)]
    assert charts.keys() == {"reward", *CHARTED}


@pytest.fixture
def shown(campaign: SyntheticCampaign) -> TrajectoryFigures:
    logprobs, versions = [0.0] * 11, [0] * 11
    logprobs[4:7], logprobs[10] = [-0.25, -1.5, -3.5], -0.125
    versions[4:7], versions[10] = [3, 3, 4], 5
    add_segment(campaign.directory, make_lake_trajectory(1, 0, reward=0.75, logprobs=logprobs, versions=versions))
    return read_trajectories(campaign.directory)


def test_a_trajectory_has_its_log_probs_versions_and_rewards(shown: TrajectoryFigures) -> None:
    first, second = (turn for turn in shown.sampled[0].conversation if turn.role == "assistant")
    assert [token.logprob for token in first.tokens] == [-0.25, -1.5, -3.5]
    assert [token.version for token in first.tokens] == [3, 3, 4]
    assert [(token.logprob, token.version) for token in second.tokens] == [(-0.125, 5)]
    assert [(turn.reward, turn.versions, turn.num_tokens) for turn in (first, second)] == [
        (0.25, "3-4", 3),
        (0.5, "5", 1),
    ]
    assert [(turn.generate_s, turn.step_s) for turn in (first, second)] == [(0.4, 0.05), (0.2, 0.05)]
    assert shown.sampled[0].reward == 0.75


def test_the_least_likely_tokens_behind_the_first_ones_are_shown_with_their_numbers(
    campaign: SyntheticCampaign,
) -> None:
    logprobs = [-0.01] * 400
    logprobs[370], logprobs[250] = -9.25, -7.5
    long = make_trajectory("lake/1/0", 400, turns=[EpisodeTurn(start=4, end=400)], reward=1.0, logprobs=logprobs)
    add_segment(campaign.directory, long)
    found = read_trajectories(campaign.directory).sampled[0]
    (turn,) = (turn for turn in found.conversation if turn.role == "assistant")
    assert [token.number for token in turn.tokens] == list(range(1, MAX_TOKENS + 1))
    assert len(turn.least_likely) == MAX_UNLIKELY_PER_TURN
    assert [(token.number, token.logprob) for token in turn.least_likely][-2:] == [(247, -7.5), (367, -9.25)]
    text = write_conversation(found, "t0")
    assert "Log-probabilities of the first 160 and the 10 least likely of 396 tokens" in text
    assert "no. 367: -9.25" in text


def test_a_conversation_is_written_with_its_log_probs_versions_and_rewards(shown: TrajectoryFigures) -> None:
    text = write_conversation(shown.sampled[0], "t0")
    written = [one.partition("</small>")[0] for one in text.split("<small>")[1:]]
    assert written == ["-0.25", "-1.50", "-3.50", "-0.12"]
    assert text.count('<span class="some">') == text.count('<span class="rare">') == 1
    for words in ("reward 0.75", "reward 0.25", "reward 0.5", "version 3-4", "version 5"):
        assert words in text


@pytest.fixture
def roles(campaign: SyntheticCampaign) -> dict[str, RoleFigures]:
    """Return the roles of a campaign of 200.1 s, half of whose engines never start."""
    return {role.role: role for role in report_on(play_on_nodes(campaign)).roles}


def play_on_nodes(campaign: SyntheticCampaign) -> SyntheticCampaign:
    components = [
        {"index": 0, "partition": "env", "roles": ["env", "reward"], "nodes": 6},
        {"index": 1, "partition": "gpu", "roles": ["decode"], "nodes": 3, "gpus_per_node": 4},
        {"index": 2, "partition": "gpu", "roles": ["train"], "nodes": 2, "gpus_per_node": 8},
    ]
    roles = [
        {"role": "env", "component": 0, "num_workers": 1},
        {"role": "reward", "component": 0, "num_workers": 1},
        {"role": "decode", "component": 1, "num_workers": 2},
        {"role": "train", "component": 2, "num_workers": 1},
    ]
    publish_json(campaign.directory.plan, {"layout": "hetjob", "components": components, "roles": roles})
    return play(campaign)


def test_hours_of_nodes_and_gpus_are_those_of_the_plan_for_the_time_that_jobs_ran(campaign: SyntheticCampaign) -> None:
    report = report_on(play_on_nodes(campaign))
    assert report.key_figures.wall_s == pytest.approx(200.1)
    assert report.key_figures.node_hours == pytest.approx(11 * 200.1 / 3600)
    assert report.key_figures.gpu_hours == pytest.approx(28 * 200.1 / 3600)
    hours = {role.role: role.node_hours for role in report.roles}
    assert hours == pytest.approx(
        {name: nodes * 200.1 / 3600 for name, nodes in (("env", 3), ("reward", 3), ("decode", 3), ("train", 2))}
    )


@pytest.mark.parametrize(
    ("role", "starting_s", "busy_s", "idle_s", "held_s"),
    [
        ("env", 10.0, 190.0, 0.0, 200.1),  # episodes run from the first counts to the last
        ("decode", 0.0, 120.0, 200.1, 400.2),  # 20 loads of 10 s, 0.6 of them busy; the second engine never starts
        ("train", 0.0, 120.0, 0.0, 200.1),  # 20 steps of 6 s, each after a wait of 4 s
    ],
)
def test_the_time_of_a_role_is_that_of_its_workers(
    roles: dict[str, RoleFigures], role: str, starting_s: float, busy_s: float, idle_s: float, held_s: float
) -> None:
    shown = roles[role]
    waiting_s = held_s - starting_s - busy_s - idle_s
    expected = [one / held_s for one in (starting_s, busy_s, waiting_s, idle_s)]
    shares = [shown.starting_share, shown.busy_share, shown.waiting_share, shown.idle_share]
    assert shares == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("rewards", [(0.9, 0.2), (0.2, 0.9)])
def test_a_comparison_names_the_campaign_with_the_highest_reward_at_the_end(
    tmp_path: Path, rewards: tuple[float, float]
) -> None:
    campaigns = []
    for name, reward in zip(("one", "two"), rewards, strict=True):
        campaign = SyntheticCampaign(tmp_path / name, num_steps=NUM_STEPS)
        campaign.submit_local()
        campaign.start()
        for step, value in enumerate((1.0 - reward, reward), start=1):
            campaign.step(step, reward=value)
        campaign.close()
        campaigns.append(campaign.directory)
    comparison = build_document(campaigns, read_trajectories=read_trajectories).comparison
    assert comparison is not None
    best = "one" if rewards[0] > rewards[1] else "two"
    assert comparison.verdict == f"The recipes are the same. {best} has the highest reward at the end: 0.900."
    results = {one.key: one.values for one in comparison.results}
    assert set(KeyFigures.__struct_fields__) == RESULT_LABELS.keys()
    assert results["reward, last steps"] == [f"{reward:.4g}" for reward in rewards]
