"""Reports in a real browser: of a campaign while it runs, after its driver was killed, and after its end."""

import base64
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hpcrl.report.page import HEIGHT_PX, WIDTH_PX, write_picture
from tests.e2e.conftest import CrashedCampaign
from tests.support.report_pages import (
    MEASURE_OVERFLOW,
    VIEWS,
    check_page,
    needs_chromium,
    open_browser,
    open_page,
    read_state,
)

MIN_COLOURS = 20
COUNT_COLOURS = """
() => {
    const image = document.images[0];
    const canvas = new OffscreenCanvas(image.naturalWidth, image.naturalHeight);
    const context = canvas.getContext('2d');
    context.drawImage(image, 0, 0);
    const pixels = new Uint32Array(context.getImageData(0, 0, canvas.width, canvas.height).data.buffer);
    return new Set(pixels).size;
}
"""
pytestmark = [pytest.mark.browser, pytest.mark.e2e, pytest.mark.timeout(600), needs_chromium]


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


def test_a_picture_of_a_report_is_drawn_beside_it(reports: dict[str, Path], browser: Any, tmp_path: Path) -> None:
    """The picture is as wide as a slide, in two pixels for one, and not of one colour."""
    page = tmp_path / "slide.html"
    page.write_bytes(reports["finished"].read_bytes())
    picture = page.with_suffix(".png")
    write_picture(page, picture)
    head = picture.read_bytes()[:24]
    assert head[:8] == b"\x89PNG\r\n\x1a\n"
    assert struct.unpack(">II", head[16:]) == (2 * WIDTH_PX, 2 * HEIGHT_PX)
    shown = browser.new_page()
    shown.set_content(f'<img src="data:image/png;base64,{base64.b64encode(picture.read_bytes()).decode()}">')
    shown.wait_for_function("document.images[0].complete")
    assert shown.evaluate(COUNT_COLOURS) > MIN_COLOURS


def test_charts_are_read_with_the_arrow_keys(reports: dict[str, Path], browser: Any) -> None:
    page = browser.new_page()
    page.goto(reports["finished"].as_uri())
    page.locator("[data-chart]").first.focus()
    page.keyboard.press("ArrowRight")
    page.wait_for_function("document.querySelector('.readout').textContent.startsWith('step ')")


def test_the_longest_name_of_a_domain_fits_the_width(reports: dict[str, Path], browser: Any) -> None:
    with open_page(reports["finished"], browser, width=400, scheme="light") as page:
        page.evaluate("document.querySelectorAll('.filters option').forEach(one => { one.text = 'w'.repeat(64); })")
        assert page.evaluate(MEASURE_OVERFLOW) == 0


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
