"""The Gantt chart of workers has all of them, in a bounded number of rows and bytes."""

import re
from pathlib import Path

import msgspec
import pytest

from hpcrl.report.gantt import MAX_BAR_PARTS, MAX_ROWS, build_gantt
from hpcrl.report.history import WorkerSpan
from hpcrl.report.sections import write_workers
from tests.support.synthetic import T0, SyntheticCampaign
from tests.unit.report.test_builder import play, report_on


def make_spans(num: int, *, role: str = "env", per_node: int = 8, num_jobs: int = 1) -> list[WorkerSpan]:
    """Make workers of which each is up for 90 s in each job; the last one fails in the last job."""
    return [
        WorkerSpan(
            f"{job:03d}-{role}-{index}", role, f"n{index // per_node}", job, T0 + 100 * job, T0 + 100 * job + 90,
            "failed" if (job, index) == (num_jobs - 1, num - 1) else "ended",
        )
        for job in range(num_jobs) for index in range(num)
    ]  # fmt: skip


def test_a_thousand_workers_have_a_row_each(tmp_path: Path) -> None:
    campaign = SyntheticCampaign(tmp_path / "lakes")
    report = report_on(play(campaign))
    campaign.close()
    report = msgspec.structs.replace(report, workers=build_gantt(make_spans(1000)))

    text = write_workers(report)

    assert set(re.findall(r"<code>(.*?)</code>", text)) == {f"env-{index}" for index in range(1000)}
    assert "When each of 1,000 workers was up:" in text
    assert len(text) < 700_000


def test_a_campaign_with_many_workers_leaves_none_out(tmp_path: Path) -> None:
    campaign = SyntheticCampaign(tmp_path / "lakes", workers=50)
    campaign.submit_local()
    campaign.start(workers=50)
    campaign.now += 10
    campaign.beat_all()
    workers = report_on(campaign).workers
    campaign.close()
    assert len(workers) == 250
    assert [one.worker for one in workers[:3]] == ["decode-0", "decode-1", "decode-2"]


def test_a_worker_of_many_jobs_has_one_row() -> None:
    rows = build_gantt(make_spans(2, num_jobs=3))
    assert [(one.worker, one.num_failures) for one in rows] == [("env-0", 0), ("env-1", 1)]
    assert rows[0].times == [(T0, T0 + 90), (T0 + 100, T0 + 190), (T0 + 200, T0 + 290)]
    assert rows[1].failures == [T0 + 290]


def test_too_many_workers_share_the_rows_of_their_nodes_and_other_roles_keep_theirs() -> None:
    rows = build_gantt([*make_spans(8 * MAX_ROWS // 2), *make_spans(4, role="train")])
    assert [one.worker for one in rows[-4:]] == [f"train-{index}" for index in range(4)]
    env = [one for one in rows if one.role == "env"]
    assert {one.worker for one in env} == {"8 workers"}
    assert sum(one.num for one in env) == 8 * MAX_ROWS // 2
    assert (env[0].node, env[-1].node, env[-1].num_failures) == ("n0", f"n{MAX_ROWS // 2 - 1}", 1)


@pytest.mark.parametrize("share", [1.0, 0.25])
def test_a_long_chain_of_jobs_is_drawn_in_bounded_parts(share: float) -> None:
    rows = build_gantt(make_spans(1000, num_jobs=50), share=share)
    assert sum(one.num for one in rows) == 1000
    assert sum(len(one.times) + len(one.failures) for one in rows) <= MAX_BAR_PARTS * share
    assert rows[0].up_s > 0


def test_workers_on_too_many_nodes_are_one_row_of_their_role() -> None:
    rows = build_gantt(make_spans(2 * MAX_ROWS, per_node=1))
    assert [(one.worker, one.node) for one in rows] == [("3,000 workers", "3,000 nodes")]


def test_without_workers_there_is_no_chart() -> None:
    assert build_gantt([]) == []
