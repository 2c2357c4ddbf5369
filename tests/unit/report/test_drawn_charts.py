"""The charts of a report as Chromium draws them: their ticks, and a page with 1,000 workers and engines."""

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from hpcrl.campaign_dir.events import EngineCounted
from hpcrl.report.builder import build_document
from hpcrl.report.figures import ChartSeries, EngineFigures, ReportChart, ReportDocument
from hpcrl.report.gantt import build_gantt
from hpcrl.report.history import WorkerSpan
from hpcrl.report.page import render_page
from hpcrl.report.trajectories import read_trajectories
from tests.support.report_pages import (
    OPEN_ALL,
    check_drawing,
    find_misdrawn,
    needs_chromium,
    open_browser,
    read_drawings,
)
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

READ_COLORS = """
() => {
    const canvases = [...document.querySelectorAll('[data-chart] canvas')];
    const colors = new Set();
    for (const canvas of canvases) {
        const {data} = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height);
        for (let at = 0; at < data.length; at += 4)
            if (data[at + 3] === 255)
                colors.add('#' + [0, 1, 2].map(part => data[at + part].toString(16).padStart(2, '0')).join(''));
    }
    return {colors: [...colors], widest: Math.max(...canvases.map(one => one.width / devicePixelRatio))};
}
"""
RECORD_PRINTED = f"addEventListener('beforeprint', () => {{ window.printed = ({READ_COLORS})(); }})"

READ_BARS = """
() => [...document.querySelectorAll('tr')].filter(row => row.querySelector('code')?.textContent.startsWith('env-')).map(
    row => [...row.querySelectorAll('.up')].map(part => {
        const [all, one] = [part.ownerSVGElement, part].map(element => element.getBoundingClientRect());
        return [(one.left - all.left) / all.width, (one.right - all.left) / all.width];
    }))
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


def test_charts_are_printed_in_colors_for_paper_and_fit_it(
    browser: Any, document: ReportDocument, tmp_path: Path
) -> None:
    path = tmp_path / "r.html"
    path.write_text(render_page(document))
    with open_report(path, browser, width=1280, scheme="dark") as page:
        page.evaluate(RECORD_PRINTED)
        page.pdf(path=str(tmp_path / "r.pdf"))
        printed = page.evaluate("window.printed")
        assert printed["widest"] <= 640
        assert {"#3a414c", "#0b62a4"} <= set(printed["colors"])
        assert not {"#aab4c2", "#6db3f2", "#28303b"} & set(printed["colors"])
        assert "#aab4c2" in page.evaluate(READ_COLORS)["colors"]


@pytest.mark.parametrize("width", [400, 1280])
@pytest.mark.parametrize("style", ["line", "points", "bars"])
def test_a_series_is_drawn_where_its_values_are(
    browser: Any, document: ReportDocument, tmp_path: Path, style: str, width: int
) -> None:
    values = [0.5, 4.0, 1.0, 2.5, 3.0]
    chart = ReportChart(
        id="shape", title="shape", x_label="step", y_label="value", x=[0.0, 1.0, 2.0, 3.0, 4.0],
        kind="category" if style == "bars" else "number", labels=list("abcde"),
        series=[ChartSeries(name="one", values=values, style=style)],
    )  # fmt: skip
    page = open_page(browser, document, tmp_path / "r.html", [chart], width=width)
    (drawn,) = next(series for series in read_drawings(page) if series[0].chart == "c1-shape")
    assert find_misdrawn(drawn) is None
    others: list[list[float]] = [[*values[:-2], 2.0, 3.0], values[::-1], [1.0] * len(values)]
    assert all(find_misdrawn(replace(drawn, values=other)) for other in others)
    assert find_misdrawn(replace(drawn, columns=[])) == "c1-shape: one is not drawn"


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


def test_workers_are_drawn_at_the_times_when_they_were_up(
    browser: Any, document: ReportDocument, tmp_path: Path
) -> None:
    spans = [(0, "env-0", 0, 50), (1, "env-0", 150, 200), (0, "env-1", 100, 150)]
    workers = [
        WorkerSpan(f"{job:03d}-{name}", "env", "n0", job, T0 + start, T0 + end, "ended")
        for job, name, start, end in spans
    ]
    campaign = msgspec.structs.replace(document.campaigns[0], workers=build_gantt(workers))
    path = tmp_path / "r.html"
    path.write_text(render_page(msgspec.structs.replace(document, campaigns=[campaign])))
    with open_report(path, browser, width=1280, scheme="light") as page:
        page.evaluate(OPEN_ALL)
        drawn = [[share for part in row for share in part] for row in page.evaluate(READ_BARS)]
    assert drawn == [pytest.approx([0, 0.25, 0.75, 1], abs=0.01), pytest.approx([0.5, 0.75], abs=0.01)]


@pytest.mark.parametrize("num", [2, 3, 4, 8])
def test_the_bars_of_any_number_of_series_are_side_by_side(
    browser: Any, document: ReportDocument, tmp_path: Path, num: int
) -> None:
    series = [ChartSeries(name=f"domain-{index}", values=[2.0, 2.0, 1.0], style="bars") for index in range(num)]
    chart = ReportChart(
        id="bars", title="bars", x_label="x", y_label="y", x=[0.0, 1.0, 2.0], kind="category", labels=list("abc"),
        series=series,
    )  # fmt: skip
    page = open_page(browser, document, tmp_path / "r.html", [chart], width=1280)
    drawn = next(series for series in read_drawings(page) if series[0].chart == "c1-bars")
    assert [find_misdrawn(one) for one in drawn] == [None] * num
    starts = [one.columns[0][0] for one in drawn]
    assert starts == sorted(set(starts))
