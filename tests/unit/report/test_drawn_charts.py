"""The charts of a report as Chromium draws them: their ticks, and a page with 1,000 workers and engines."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from hpcrl.campaign_dir.events import EngineCounted
from hpcrl.report.builder import build_document
from hpcrl.report.figures import ChartSeries, EngineFigures, ReportChart, ReportDocument
from hpcrl.report.gantt import build_gantt
from hpcrl.report.page import render_page
from hpcrl.report.trajectories import read_trajectories
from tests.support.report_pages import check_drawing, needs_chromium, open_browser
from tests.support.report_pages import open_page as open_report
from tests.support.synthetic import T0, SyntheticCampaign
from tests.unit.report.test_builder import play
from tests.unit.report.test_gantt import make_spans

pytestmark = [pytest.mark.browser, needs_chromium]

RECORD_LABELS = """
const fillText = CanvasRenderingContext2D.prototype.fillText;
CanvasRenderingContext2D.prototype.fillText = function (text, x, y) {
    const width = this.measureText(text).width;
    const start = this.textAlign === 'center' ? x - width / 2 : this.textAlign === 'right' ? x - width : x;
    (this.canvas.labels = this.canvas.labels || []).push({text, start, end: start + width, width: this.canvas.width});
    return fillText.apply(this, arguments);
};
"""
READ_LABELS = """
id => [...document.getElementById(id).querySelectorAll("canvas")].flatMap(canvas => canvas.labels || [])
"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with open_browser() as opened:
        yield opened


@pytest.fixture
def document(tmp_path: Path) -> ReportDocument:
    campaign = SyntheticCampaign(tmp_path / "lakes", num_steps=20)
    play(campaign)
    campaign.emit("decode-0", EngineCounted(window_s=1.0, kv_share=0.0))
    campaign.close()
    return build_document([campaign.directory], read_trajectories=read_trajectories)


def open_page(browser: Any, document: ReportDocument, path: Path, charts: list[ReportChart], *, width: int) -> Any:
    """Open a page that has these charts, and records the labels that are drawn."""
    campaign = msgspec.structs.replace(document.campaigns[0], engine_charts=charts)
    path.write_text(render_page(msgspec.structs.replace(document, campaigns=[campaign])))
    page = browser.new_page(viewport={"width": width, "height": 900})
    page.add_init_script(RECORD_LABELS)
    page.goto(path.as_uri())
    page.wait_for_function("[...document.querySelectorAll('[data-chart] canvas')].every(one => one.labels)")
    return page


def make_chart(name: str, values: list[float | None], times: list[float]) -> ReportChart:
    return ReportChart(
        id=name, title=name, x_label="time", y_label="share", x=times, kind="time",
        series=[ChartSeries(name="decode", values=values)],
    )  # fmt: skip


@pytest.mark.parametrize("width", [400, 1280])
def test_the_ticks_of_time_are_whole_seconds_and_none_is_cut(
    browser: Any, document: ReportDocument, tmp_path: Path, width: int
) -> None:
    charts = [
        make_chart(f"span-{span_s}", [0.2, 0.3], [T0 + 7, T0 + 7 + span_s])
        for span_s in (0, 0.4, 1, 7, 100, 3700, 90_000, 5 * 86400, 90 * 86400)
    ]
    page = open_page(browser, document, tmp_path / "r.html", charts, width=width)
    for chart in charts:
        labels = page.evaluate(READ_LABELS, f"c1-{chart.id}")
        ticks = [one["text"] for one in labels if re.fullmatch(r"\d\d:\d\d(:\d\d)?|\d\d-\d\d", one["text"])]
        assert ticks, chart.id
        assert len(labels) == len(ticks) + sum(one["text"].replace(".", "").isdigit() for one in labels), chart.id
        assert all(one["start"] >= 0 and one["end"] <= one["width"] for one in labels), chart.id


def test_figures_that_are_zero_all_the_time_have_an_axis_with_zero_alone(
    browser: Any, document: ReportDocument, tmp_path: Path
) -> None:
    chart = make_chart("kv", [0.0, 0.0, None], [T0, T0 + 60, T0 + 120])
    page = open_page(browser, document, tmp_path / "r.html", [chart], width=1280)
    labels = page.evaluate(READ_LABELS, "c1-kv")
    assert [one["text"] for one in labels if ":" not in one["text"]] == ["0"]


def test_a_page_with_a_thousand_workers_and_engines_is_drawn(
    browser: Any, document: ReportDocument, tmp_path: Path
) -> None:
    engines = [
        EngineFigures(
            engine=f"decode-{index}", role="decode", node=f"n{index}", up_s=60.0, busy_share=0.5, running=3.0,
            waiting=0.0, kv_share=0.25, kv_most=0.5, tokens_per_s=1234.0, prefix_hit_share=None, num_preemptions=0,
        )
        for index in range(1000)
    ]  # fmt: skip
    workers = build_gantt(make_spans(1000, num_jobs=4))
    campaign = msgspec.structs.replace(document.campaigns[0], engines=engines, workers=workers)
    path = tmp_path / "r.html"
    path.write_text(render_page(msgspec.structs.replace(document, campaigns=[campaign])))
    with open_report(path, browser, width=400, scheme="light") as page:
        check_drawing(page)
