"""Reports in a real browser.

open_browser        start Chromium
write_report        write that of a campaign
check_page          check all of a report with one width and colours
open_page           open it, and check that it has no message
check_drawing, check_access    charts and width; accessibility
check_reports       check several, and the state that each names
read_state          read that state
needs_chromium      a mark for tests
"""

import contextlib
from collections.abc import Iterator, Mapping
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
COUNT_DRAWINGS = """
[...document.querySelectorAll('[data-chart]')].map(chart => [...chart.querySelectorAll('canvas')].filter(canvas =>
    canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data.some(value => value > 0)).length)
"""
MEASURE_OVERFLOW = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
OPEN_ALL = "document.querySelectorAll('details').forEach(one => { one.open = true; })"
FIND_VIOLATIONS = """
axe.run({resultTypes: ['violations']}).then(found => found.violations.map(
    one => one.id + ': ' + one.nodes.slice(0, 3).map(node => node.html).join(' ')))
"""


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
    """Check that every chart is drawn, and that the page with all its details fits the width."""
    drawings = page.evaluate(COUNT_DRAWINGS)
    assert len(drawings) >= MIN_CHARTS
    assert set(drawings) == {1}
    page.evaluate(OPEN_ALL)
    assert page.evaluate(MEASURE_OVERFLOW) == 0


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
