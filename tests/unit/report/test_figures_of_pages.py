"""Each cell of a page has the figure of its column; evaluations, starts and workers are where they belong."""

import re
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from hpcrl.campaign_dir.events import (
    EngineCounted,
    EvaluationFinished,
    FaultReported,
    JobEnded,
    JobStarted,
    VersionPublished,
    WorkerFailed,
    WorkerRestarted,
    WorkerStarted,
)
from hpcrl.monitor.advisories import Advisory
from hpcrl.report.builder import build_report
from hpcrl.report.charts import MAX_DOMAIN_LINES, build_histogram
from hpcrl.report.conversation_html import write_groups
from hpcrl.report.figures import CampaignReport, RoleFigures, SampledGroup, WorkerFigures
from hpcrl.report.sections import (
    MARK_SHARE,
    write_engines,
    write_failures,
    write_jobs,
    write_roles,
    write_summary,
    write_workers,
)
from hpcrl.report.trajectories import read_trajectories
from tests.support.synthetic import T0, SyntheticCampaign
from tests.support.trajectories import make_lake_trajectory
from tests.unit.report.test_builder import add_segment


@pytest.fixture
def campaign(tmp_path: Path) -> Iterator[SyntheticCampaign]:
    campaign = SyntheticCampaign(tmp_path / "lakes")
    campaign.submit()
    campaign.now += 100
    yield campaign
    campaign.close()


def report_on(campaign: SyntheticCampaign) -> CampaignReport:
    return build_report(campaign.directory, read_trajectories=read_trajectories)


def read_cells(text: str) -> list[list[str]]:
    """Return the text of the cells of each row."""
    rows = re.findall(r"<tr>(<td.*?)</tr>", text, re.DOTALL)
    return [
        [re.sub(r"<[^>]*>", "", cell) for cell in re.findall(r"<td[^>]*>(.*?)</td>", row, re.DOTALL)] for row in rows
    ]


def test_evaluations_are_at_the_step_of_their_version_and_all_are_shown(campaign: SyntheticCampaign) -> None:
    campaign.start()
    for version, step in ((1, 1), (2, 4)):
        campaign.emit("train-0", VersionPublished(version=version, step=step, wall_s=0.1))
    for step in range(1, 7):
        campaign.now += 10
        campaign.step(step + 10) if step > 4 else None
    for number, version in enumerate((0, 2, 2)):
        campaign.emit("env-0", EvaluationFinished(number=number, version=version, reward_mean=0.1 + number))
    (chart,) = report_on(campaign).reward_charts
    values = next(one.values for one in chart.series if one.name == "held-out evaluation")
    shown = [(x, value) for x, value in zip(chart.x, values, strict=True) if value is not None]
    assert shown == [(0, 0.1), (4, 1.1), (4, 2.1)]


def test_an_engine_starts_from_the_start_of_its_job_to_its_first_load(campaign: SyntheticCampaign) -> None:
    campaign.emit("driver", JobStarted(slurm_id="1"))
    campaign.now += 30
    campaign.emit("decode-0", WorkerStarted(pid=1))
    campaign.now += 15
    campaign.emit("decode-0", EngineCounted(window_s=10.0, busy_share=0.2))
    campaign.now += 5
    campaign.emit("driver", JobEnded(outcome="done"))
    campaign.outcome("done")
    (role,) = [one for one in report_on(campaign).roles if one.role == "decode"]
    shares = (role.starting_share, role.busy_share, role.waiting_share, role.idle_share)
    assert shares == pytest.approx((35 / 50, 2 / 50, 13 / 50, 0.0))


def test_a_restarted_engine_is_idle_until_its_launch_and_then_starts(campaign: SyntheticCampaign) -> None:
    campaign.emit("driver", JobStarted(slurm_id="1"))
    campaign.emit("decode-0", WorkerStarted(pid=1))
    campaign.now += 10
    campaign.emit("driver", WorkerFailed(of="decode-0", reason="gone"))
    campaign.now += 20
    campaign.emit("driver", WorkerRestarted(of="decode-0"))
    campaign.now += 30
    campaign.emit("decode-0", WorkerStarted(pid=2))
    campaign.now += 40
    campaign.emit("decode-0", EngineCounted(window_s=40.0, busy_share=0.5))
    campaign.emit("driver", JobEnded(outcome="done"))
    campaign.outcome("done")
    report = report_on(campaign)
    (role,) = [one for one in report.roles if one.role == "decode"]
    assert (role.starting_share, role.idle_share) == (pytest.approx(0.3), pytest.approx(0.2))
    assert [one.num_failures for one in report.workers if one.worker == "decode-0"] == [1]


def test_couriers_that_are_restarted_have_no_row_without_a_name(campaign: SyntheticCampaign) -> None:
    campaign.start()
    campaign.emit("courier-train1", WorkerStarted(pid=1))
    campaign.emit("driver", WorkerFailed(of="couriers", reason="a peer left"))
    campaign.emit("driver", WorkerRestarted(of="couriers"))
    report = report_on(campaign)
    assert "couriers" not in [one.worker for one in report.workers]
    assert [one.what for one in report.failures] == ["couriers"]


def test_a_histogram_names_the_domains_that_it_leaves_out() -> None:
    counts = {f"d{index}": {1.0: 1} for index in range(MAX_DOMAIN_LINES + 2)}
    chart = build_histogram("lengths", "Lengths", "tokens", counts)
    assert chart is not None
    assert chart.note == "Left out: d6, d7."


def test_the_time_of_a_role_has_its_shares_in_their_columns() -> None:
    role = RoleFigures(
        role="decode", num_workers=3, node_hours=2.5, busy_share=0.4, waiting_share=0.3, starting_share=0.2,
        idle_share=0.11, tokens_per_s=None, num_pauses=0, pause_s=0.0,
    )  # fmt: skip
    assert read_cells(write_roles([role])) == [["decode", "3", "2.5", "", "40%", "30%", "20%", "11%"]]


def test_an_engine_has_its_figures_in_their_columns_and_charts(campaign: SyntheticCampaign) -> None:
    campaign.start()
    for kv_share, window_s in ((0.5, 10.0), (0.9, 30.0), (None, 40.0)):
        load = EngineCounted(
            window_s=window_s, busy_share=0.25, running=4, waiting=2, kv_share=kv_share, num_tokens=800,
            num_prefix_queries=100, num_prefix_hits=60, num_preemptions=1,
        )  # fmt: skip
        campaign.emit("decode-0", load)
    report = report_on(campaign)
    assert read_cells(write_engines(report.engines)) == [
        ["decode-0", "decode0", "25%", "30", "4", "2", "80%", "90%", "60%", "3"]
    ]
    (chart,) = [one for one in report.engine_charts if one.id == "engine-kv"]
    assert chart.series[0].values == [pytest.approx(0.8)]


def test_an_advisory_has_its_cause_and_its_remedy(campaign: SyntheticCampaign) -> None:
    advisory = Advisory(
        name="n", severity="warning", text="t", figure=2.0, threshold=1.0, unit="steps", cause="the cause",
        remedy="the remedy",
    )  # fmt: skip
    text = write_summary(msgspec.structs.replace(report_on(campaign), advisories=[advisory]))
    assert "<dt>Likely cause</dt><dd>the cause</dd><dt>What to do</dt><dd>the remedy</dd>" in text


def test_a_job_has_its_wait_and_its_run_in_their_columns(campaign: SyntheticCampaign) -> None:
    campaign.start()
    campaign.now += 300
    campaign.emit("driver", JobEnded(outcome="done"))
    campaign.outcome("done")
    (row,) = read_cells(write_jobs(report_on(campaign)))
    assert (row[4], row[5]) == ("2 min", "5 min")


def test_failures_are_marked_at_their_times(campaign: SyntheticCampaign) -> None:
    worker = WorkerFigures(
        worker="env-0", role="env", node="n0", num=1, times=[(T0, T0 + 100)], failures=[T0 + 25, T0 + 75],
        num_failures=2, up_s=100.0,
    )  # fmt: skip
    text = write_workers(msgspec.structs.replace(report_on(campaign), workers=[worker]))
    marks = re.findall(r'class="failed" x="([\d.]+)" y="0" width="([\d.]+)"', text)
    assert marks == [("250.0", f"{1000 * MARK_SHARE:.1f}"), ("750.0", f"{1000 * MARK_SHARE:.1f}")]


def test_a_fault_has_its_node(campaign: SyntheticCampaign) -> None:
    campaign.start()
    campaign.emit("env-0", FaultReported(what="env-fault", detail="gone", domain="lake"))
    (row,) = read_cells(write_failures(report_on(campaign)))
    assert row[:4] == ["env-fault", "lake", "env0", "1"]


def test_each_attempt_of_a_group_has_its_own_reward(campaign: SyntheticCampaign) -> None:
    rewards = (0.25, 1.0)
    add_segment(campaign.directory, *(make_lake_trajectory(1, index, reward=one) for index, one in enumerate(rewards)))
    groups: list[SampledGroup] = read_trajectories(campaign.directory).groups
    shown = re.findall(r'<p class="small"><b>([\d.]+)</b>', write_groups(groups[:1]))
    assert sorted(shown) == ["0.25", "1"]
