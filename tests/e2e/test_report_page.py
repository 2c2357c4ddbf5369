"""Reports in a real browser: of a campaign while it runs, after its driver was killed, and after its end."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hpcrl.report.page import find_chromium
from tests.e2e.conftest import CrashedCampaign

pytestmark = [
    pytest.mark.browser,
    pytest.mark.e2e,
    pytest.mark.skipif(find_chromium() is None, reason="Chromium is missing: apt-get install chromium"),
]
VIEWS = ((400, "light"), (1280, "dark"))
"""Widths and colour schemes: no layout depends on the colours."""
COUNT_CHARTS = "[...document.querySelectorAll('[data-chart]')].map(one => one.querySelectorAll('canvas').length)"
MEASURE_OVERFLOW = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
OPEN_ALL = "document.querySelectorAll('details').forEach(one => { one.open = true; })"
FIND_VIOLATIONS = """
axe.run({resultTypes: ['violations']}).then(found => found.violations.map(
    one => one.id + ': ' + one.nodes.slice(0, 3).map(node => node.html).join(' ')))
"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api")
    with playwright.sync_playwright() as started:
        opened = started.chromium.launch(executable_path=find_chromium(), args=["--no-sandbox"])
        yield opened
        opened.close()


@pytest.fixture(scope="module")
def axe() -> str:
    package = pytest.importorskip("axe_playwright_python")
    return (Path(package.__file__).parent / "axe.min.js").read_text()


@pytest.fixture(scope="module")
def reports(crashed: CrashedCampaign) -> dict[str, Path]:
    return crashed.reports


@pytest.mark.parametrize(("width", "scheme"), VIEWS)
@pytest.mark.parametrize("state", ["running", "crashed", "finished"])
def test_a_report_is_drawn_fits_and_is_accessible(
    reports: dict[str, Path], browser: Any, axe: str, state: str, width: int, scheme: str
) -> None:
    assert reports[state].stat().st_size < 5_000_000
    messages: list[str] = []
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
    page = context.new_page()
    page.on("console", lambda message: messages.append(message.text))
    page.on("pageerror", lambda error: messages.append(str(error)))
    page.goto(reports[state].as_uri())
    charts = page.evaluate(COUNT_CHARTS)
    assert len(charts) >= 5
    assert set(charts) == {1}
    page.evaluate(OPEN_ALL)
    assert page.evaluate(MEASURE_OVERFLOW) == 0
    assert messages == []
    session = context.new_cdp_session(page)  # the page's policy admits no script, not even that of a test
    session.send("Runtime.evaluate", {"expression": axe})
    found = session.send(
        "Runtime.evaluate", {"expression": FIND_VIOLATIONS, "awaitPromise": True, "returnByValue": True}
    )
    assert found["result"]["value"] == []
    context.close()


def test_the_state_of_a_campaign_is_the_first_word_of_its_report(reports: dict[str, Path], browser: Any) -> None:
    page = browser.new_page()
    leads = {}
    for state, path in reports.items():
        page.goto(path.as_uri())
        leads[state] = page.locator(".lead").inner_text().split()[0]
    assert leads == {"running": "Running:", "crashed": "Failed", "finished": "Done"}


def test_charts_are_read_with_the_arrow_keys(reports: dict[str, Path], browser: Any) -> None:
    page = browser.new_page()
    page.goto(reports["finished"].as_uri())
    page.locator("[data-chart]").first.focus()
    page.keyboard.press("ArrowRight")
    page.wait_for_function("document.querySelector('.readout').textContent.startsWith('step ')")


def test_trajectories_are_sorted_and_filtered(reports: dict[str, Path], browser: Any) -> None:
    page = browser.new_page()
    page.goto(reports["finished"].as_uri())
    page.get_by_role("button", name="reward").click()
    values = page.locator("#c1-table tbody td[data-value]:nth-child(5)").evaluate_all(
        "cells => cells.map(cell => cell.dataset.value).filter(value => value !== '').map(Number)"
    )
    assert values == sorted(values)
    page.get_by_label("Chosen as").select_option("best")
    assert page.locator("#c1-table tbody tr:visible").count() == 3
