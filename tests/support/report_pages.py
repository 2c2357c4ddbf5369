"""Reports in a real browser.

open_browser        start Chromium
write_report        write that of a campaign
check_page          check all of a report with one width and colours
open_page           open it, and check that it has no message
check_drawing, check_access    charts and width; accessibility
read_drawings, find_misdrawn   what is drawn of each series, and where that is not its values
DrawnSeries         a series and its pixels
check_reports       check several, and the state that each names
read_state          read that state
needs_chromium      a mark for tests
"""

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from hpcrl.report.page import find_chromium
from tests.support.campaigns import hpcrl

MISSING = "Chromium is missing: apt-get install chromium"
needs_chromium = pytest.mark.skipif(find_chromium() is None, reason=MISSING)
VIEWS = ((400, "light"), (1280, "dark"))
"""Widths and colour schemes: no layout depends on the colours."""
LOAD_TIMEOUT_MS = 120_000
MIN_CHARTS = 5
MAX_BYTES = 5_000_000
READ_DRAWINGS = """
() => {
    const charts = JSON.parse(document.getElementById('chart-data').textContent);
    const read = name => {
        const hex = getComputedStyle(document.documentElement).getPropertyValue(name).trim().slice(1);
        return [0, 2, 4].map(start => parseInt(hex.slice(start, start + 2), 16));
    };
    return [...document.querySelectorAll('[data-chart]')].map(element => {
        const chart = charts[Number(element.dataset.chart)];
        const images = [...element.querySelectorAll('canvas')].map(canvas =>
            canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height));
        const num_drawn = images.filter(image => image.data.some(value => value > 0)).length;
        const {data: pixels, width} = images[0];
        let number = 0;
        return {num_drawn, series: chart.series.map(series => {
            const color = read(series.style === 'faint' ? '--faint' : '--s' + number++ % 8), columns = {};
            for (let at = 0; at < pixels.length; at += 4) {
                if (pixels[at + 3] < 250) continue;
                if (color.some((part, place) => Math.abs(pixels[at + place] - part) > 8)) continue;
                const x = at / 4 % width, y = Math.floor(at / 4 / width);
                columns[x] = [columns[x] ? columns[x][0] : y, y];
            }
            const {name, style, values} = series;
            return {chart: element.closest('[id]').id, name, style, values, x: chart.x,
                    num_bars: chart.series.filter(one => one.style === 'bars').length,
                    columns: Object.entries(columns).map(([x, ends]) => [Number(x), ...ends])};
        })};
    });
}
"""
MAX_MISSED_PIXELS = 4
BAR_WIDTH = 0.85
"""The width of the bars of all series, by the distance of their values."""
MEASURE_OVERFLOW = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
OPEN_ALL = "document.querySelectorAll('details').forEach(one => { one.open = true; })"
FIND_VIOLATIONS = """
axe.run({resultTypes: ['violations']}).then(found => found.violations.map(
    one => one.id + ': ' + one.nodes.slice(0, 3).map(node => node.html).join(' ')))
"""


@dataclass(frozen=True, kw_only=True)
class DrawnSeries:
    """A series of a chart, and the pixels of its colour."""

    chart: str
    name: str
    style: str
    x: list[float]
    values: list[float | None]
    num_bars: int = 1
    """The series of bars in its chart."""
    columns: list[tuple[int, int, int]]
    """A place from the left, and the highest and the lowest pixel there, both from the top."""

    @property
    def bar_width(self) -> float:
        return BAR_WIDTH / max(self.num_bars, 1)

    def list_points(self) -> list[tuple[float, float]]:
        """List the places and values of what has a pixel."""
        points = [(x, value) for x, value in zip(self.x, self.values, strict=True) if value is not None]
        return [(x, value) for x, value in points if value] if self.style == "bars" else points


@contextlib.contextmanager
def open_browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api")
    with playwright.sync_playwright() as started:
        opened = started.chromium.launch(executable_path=find_chromium(), args=["--no-sandbox"])
        yield opened
        opened.close()


def write_report(name: str, path: Path) -> Path:
    hpcrl("report", name, "-o", str(path))
    return path


def check_page(path: Path, browser: Any, *, width: int, scheme: str) -> None:
    """Check that a report is drawn without a message, fits the width, and has no violation that axe finds."""
    with open_page(path, browser, width=width, scheme=scheme) as page:
        check_drawing(page)
        check_access(page)


@contextlib.contextmanager
def open_page(path: Path, browser: Any, *, width: int, scheme: str) -> Iterator[Any]:
    """Open a report, which must have no message for the console."""
    assert path.stat().st_size < MAX_BYTES
    messages: list[str] = []
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
    context.set_default_timeout(LOAD_TIMEOUT_MS)
    page = context.new_page()
    page.on("console", lambda message: messages.append(message.text))
    page.on("pageerror", lambda error: messages.append(str(error)))
    page.goto(path.as_uri())
    yield page
    assert messages == []
    context.close()


def check_drawing(page: Any) -> None:
    """Check that every chart shows its values, and that the page with all its details fits the width."""
    charts = read_drawings(page)
    assert len(charts) >= MIN_CHARTS
    problems = [find_misdrawn(series) for chart in charts for series in _list_visible(chart)]
    assert [problem for problem in problems if problem] == []
    page.evaluate(OPEN_ALL)
    assert page.evaluate(MEASURE_OVERFLOW) == 0


def read_drawings(page: Any) -> list[list[DrawnSeries]]:
    """Read what is drawn of each series of each chart; a chart has one canvas, which is not empty."""
    charts = page.evaluate(READ_DRAWINGS)
    assert {chart["num_drawn"] for chart in charts} == {1}
    return [[DrawnSeries(**series) for series in chart["series"]] for chart in charts]


def find_misdrawn(drawn: DrawnSeries) -> str | None:
    """Find a value that is not at its place; the first and the last, the least and the most are where pixels end."""
    points = drawn.list_points()
    if not points:
        return None
    if not drawn.columns:
        return f"{drawn.chart}: {drawn.name} is not drawn"
    half = drawn.bar_width / 2 if drawn.style == "bars" else 0.0
    left, right = points[0][0] - half, points[-1][0] + half
    first, last = drawn.columns[0][0], drawn.columns[-1][0]
    top, bottom = min(column[1] for column in drawn.columns), max(column[2] for column in drawn.columns)
    most = max(value for _, value in points)
    least = 0.0 if drawn.style == "bars" else min(value for _, value in points)
    ends = {place: (high, low) for place, high, low in drawn.columns}
    for x, value in points:
        place = first + round((x - left) / (right - left) * (last - first)) if right > left else first
        height = top + (most - value) / (most - least) * (bottom - top) if most > least else (top + bottom) / 2
        near = [ends[one] for one in range(place - 2, place + 3) if one in ends]
        high = min((one[0] for one in near), default=-1)
        low = high if drawn.style == "bars" else max((one[1] for one in near), default=-1)
        if not near or not high - MAX_MISSED_PIXELS <= height <= low + MAX_MISSED_PIXELS:
            return f"{drawn.chart}: {drawn.name} at {x:g} is {value:g}: {height:.0f} is not in {high}-{low} at {place}"
    return None


def _list_visible(chart: list[DrawnSeries]) -> list[DrawnSeries]:
    """List the series that nothing hides: the last one, and all bars, which are beside each other."""
    return [series for series in chart[:-1] if series.style == "bars"] + chart[-1:]


def check_access(page: Any) -> None:
    """Check with axe, also the contrast of WCAG AA; it takes ten seconds."""
    session = page.context.new_cdp_session(page)  # the page's policy admits no script, not even that of a test
    session.send("Runtime.evaluate", {"expression": _read_axe()})
    found = session.send(
        "Runtime.evaluate", {"expression": FIND_VIOLATIONS, "awaitPromise": True, "returnByValue": True}
    )
    assert found["result"]["value"] == []


def check_reports(reports: Mapping[str, Path]) -> None:
    """Check reports by the first word of their verdicts: access to each in one view, the first in the first.

    Without Chromium, skip what is left of a test.
    """
    if find_chromium() is None:
        pytest.skip(MISSING)
    with open_browser() as browser:
        for place, (state, path) in enumerate(reports.items()):
            for number, (width, scheme) in enumerate(VIEWS):
                with open_page(path, browser, width=width, scheme=scheme) as page:
                    check_drawing(page)
                    if number == place % len(VIEWS):
                        check_access(page)
            assert read_state(path, browser) == state


def read_state(path: Path, browser: Any) -> str:
    """Return the first word of the verdict of a report."""
    page = browser.new_page()
    page.goto(path.as_uri(), timeout=LOAD_TIMEOUT_MS)
    return str(page.locator(".lead").inner_text().split()[0])


def _read_axe() -> str:
    package = pytest.importorskip("axe_playwright_python")
    return (Path(package.__file__).parent / "axe.min.js").read_text()
