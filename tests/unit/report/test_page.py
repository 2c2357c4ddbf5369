"""The page of a report: what it admits, and what it does with hostile text."""

import base64
import hashlib
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from hpcrl.report.builder import build_document
from hpcrl.report.figures import SampledTrajectory, SampledTurn, TrajectoryFigures
from hpcrl.report.page import ASSETS, UPLOT_VERSION, render_page
from tests.support.synthetic import SyntheticCampaign
from tests.unit.report.test_builder import play

HOSTILE = "<script>alert(1)</script></script><img src=x onerror=alert(2)>\x1b[31m\u202e\"'&]]>"


def hostile_trajectories(campaign: object) -> TrajectoryFigures:
    turn = SampledTurn(role=HOSTILE, text=HOSTILE, fate=HOSTILE, versions=HOSTILE)
    names = dict.fromkeys(("id", "domain", "group", "status", "outcome", "producer", "note"), HOSTILE)
    numbers = {"num_tokens": 1, "num_turns": 1, "start_version": 0, "end_version": 1, "created": 1e300}
    one = SampledTrajectory(**names, **numbers, chosen=["best"], reward=float("nan"), conversation=[turn])
    return TrajectoryFigures(
        num=1, num_groups=1, num_flat_groups=0, sampled=[one], groups=[], charts=[], problems=[HOSTILE]
    )


@pytest.fixture
def page(tmp_path: Path) -> str:
    campaign = SyntheticCampaign(tmp_path / "lakes")
    play(campaign).close()
    return render_page(build_document([campaign.directory], read_trajectories=hostile_trajectories))


class TagCollector(HTMLParser):
    """Collects the tags of a page with their attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))


def list_tags(page: str) -> list[tuple[str, dict[str, str | None]]]:
    collector = TagCollector()
    collector.feed(page)
    return collector.tags


def test_the_page_loads_nothing(page: str) -> None:
    for tag, attributes in list_tags(page):
        assert tag not in ("link", "img", "iframe", "object", "embed", "base")
        assert "src" not in attributes
        assert not str(attributes.get("href", "#")).startswith(("http", "//", "javascript"))


def test_the_page_has_no_inline_handlers_and_no_inline_styles(page: str) -> None:
    names = {name for _, attributes in list_tags(page) for name in attributes}
    assert "style" not in names
    assert [name for name in names if name.startswith("on")] == []


def test_hostile_text_is_text(page: str) -> None:
    assert len([tag for tag, _ in list_tags(page) if tag == "script"]) == 3
    assert "<img" not in page
    assert "\x1b" not in page
    assert "\u202e" not in page
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in page


def test_the_policy_admits_the_scripts_and_styles_of_the_page_alone(page: str) -> None:
    policy = next(a["content"] for tag, a in list_tags(page) if a.get("http-equiv") == "Content-Security-Policy")
    assert policy is not None
    assert "unsafe" not in policy
    bodies = re.findall(r"<(?:script|style)>(.*?)</(?:script|style)>", page, flags=re.DOTALL)
    assert len(bodies) == 3
    for body in bodies:
        assert f"'sha256-{base64.b64encode(hashlib.sha256(body.encode()).digest()).decode()}'" in policy


def test_every_chart_has_a_table_and_a_label(page: str) -> None:
    charts = [attributes for _, attributes in list_tags(page) if "data-chart" in attributes]
    assert charts
    assert all(attributes["aria-label"] for attributes in charts)
    assert page.count("<summary>Table: ") == len(charts)


def test_the_chart_library_has_its_version_and_its_licence() -> None:
    assert f"(v{UPLOT_VERSION})" in (ASSETS / "uPlot.iife.min.js").read_text()[:300]
    assert (ASSETS / "uPlot.LICENSE.txt").read_text().startswith("The MIT License")
