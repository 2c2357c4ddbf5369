"""Reports in a real browser: of a campaign while it runs, after its driver was killed, and after its end."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import CrashedCampaign
from tests.support.report_pages import VIEWS, check_page, needs_chromium, open_browser, read_state

pytestmark = [pytest.mark.browser, pytest.mark.e2e, needs_chromium]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with open_browser() as opened:
        yield opened


@pytest.fixture(scope="module")
def reports(crashed: CrashedCampaign) -> dict[str, Path]:
    return crashed.reports


@pytest.mark.parametrize(("width", "scheme"), VIEWS)
@pytest.mark.parametrize("state", ["running", "crashed", "finished"])
def test_a_report_is_drawn_fits_and_is_accessible(
    reports: dict[str, Path], browser: Any, state: str, width: int, scheme: str
) -> None:
    check_page(reports[state], browser, width=width, scheme=scheme)


def test_the_state_of_a_campaign_is_the_first_word_of_its_report(reports: dict[str, Path], browser: Any) -> None:
    leads = {state: read_state(path, browser) for state, path in reports.items()}
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
