"""Write a report as one HTML page: no server, no network, no style or script but its own. Everything shown is escaped.

render_page     the page
is_page         whether a file is one
write_picture   a PNG of the top of a page, by a Chromium that is installed here, for slides
find_chromium   this program

A chart is drawn by uPlot from numbers in the page, and has a table of the same numbers. The page works without its
script too, then without drawings. Its policy (CSP) admits this script and these styles by their hashes, and no others.
"""

import base64
import hashlib
import itertools
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from hpcrl.errors import CampaignError
from hpcrl.report.conversation_html import write_conversation, write_groups, write_trajectory_table
from hpcrl.report.figures import CampaignReport, ReportChart, ReportComparison, ReportDocument
from hpcrl.report.markup import esc, format_number, format_share, format_time, write_table
from hpcrl.report.sections import (
    write_engines,
    write_failures,
    write_jobs,
    write_problems,
    write_provenance,
    write_rewards,
    write_roles,
    write_summary,
    write_workers,
)
from hpcrl.spool.token_fates import TRAINED
from hpcrl.system.terminal import format_duration

ASSETS = Path(__file__).parent / "assets"
UPLOT_VERSION = "1.6.32"
_GENERATOR = '<meta name="generator" content="hpcrl '
_HEAD_BYTES = 4096
"""The start of a page, with its generator."""
NUM_COLORS = 8
CHROMIUM_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
PICTURE_TIMEOUT_S = 120.0
WIDTH_PX, HEIGHT_PX = 1280, 1600


def render_page(document: ReportDocument) -> str:
    """Return the page of a report."""
    style = _read_asset("uPlot.min.css") + _read_asset("report.css")
    scripts = [_read_asset("uPlot.iife.min.js"), _read_asset("report.js")]
    writer = _PageWriter(document)
    body = "\n".join(writer.write_body())
    policy = (
        f"default-src 'none'; script-src {' '.join(map(_hash_source, scripts))}; style-src {_hash_source(style)}; "
        "base-uri 'none'; form-action 'none'"
    )
    names = ", ".join(campaign.name for campaign in document.campaigns)
    data = msgspec.json.encode(writer.charts).decode().replace("<", "\\u003c")
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
{_GENERATOR}{esc(document.hpcrl)}, uPlot {UPLOT_VERSION} (MIT)">
<title>{esc(names)}: report of hpcrl</title>
<style>{style}</style>
</head>
<body>
{body}
<script type="application/json" id="chart-data">{data}</script>
<script>{scripts[0]}</script>
<script>{scripts[1]}</script>
</body>
</html>
"""


def is_page(path: Path) -> bool:
    """Return whether a file is a report."""
    with path.open("rb") as file:
        return _GENERATOR.encode() in file.read(_HEAD_BYTES)


def find_chromium() -> str | None:
    """Return the path of a Chromium on PATH."""
    return next((path for path in map(shutil.which, CHROMIUM_NAMES) if path), None)


def write_picture(page: Path, picture: Path) -> None:
    """Write a PNG of the top of a page; refuse without Chromium."""
    program = find_chromium()
    if program is None:
        raise CampaignError(
            f"--png needs Chromium, and none of {', '.join(CHROMIUM_NAMES)} is on PATH: "
            f"open {page} in a browser instead"
        )
    with tempfile.TemporaryDirectory(prefix="hpcrl-chromium-") as profile:
        command = [
            program, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
            "--force-device-scale-factor=2", f"--user-data-dir={profile}", f"--window-size={WIDTH_PX},{HEIGHT_PX}",
            f"--screenshot={picture.absolute()}", page.absolute().as_uri(),
        ]  # fmt: skip
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=PICTURE_TIMEOUT_S, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise CampaignError(f"{program} made no picture of {page}: {error}") from error
    if done.returncode or not picture.exists():
        last = done.stderr.strip().rpartition("\n")[2]
        raise CampaignError(f"{program} made no picture of {page} (exit code {done.returncode}): {last}")


def _read_asset(name: str) -> str:
    return (ASSETS / name).read_text(encoding="utf-8")


def _hash_source(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


class _PageWriter:
    """The body of a page, part by part; its charts are collected on the way."""

    def __init__(self, document: ReportDocument) -> None:
        self._document = document
        self.charts: list[ReportChart] = []

    def write_body(self) -> Iterator[str]:
        """Yield the parts of the page."""
        campaigns = self._document.campaigns
        several = len(campaigns) > 1
        yield '<a class="skip" href="#main">To the report</a>'
        sections = [list(self._write_campaign(one, f"c{number}", several)) for number, one in enumerate(campaigns, 1)]
        if several and self._document.comparison is not None:
            yield self._write_header(" and ".join(one.name for one in campaigns), self._document.comparison.verdict)
            links = [("compare", "Comparison"), *((f"c{number}", one.name) for number, one in enumerate(campaigns, 1))]
            yield _write_contents(links)
            yield '<main id="main" class="wrap">'
            yield from self._write_comparison(self._document.comparison)
        else:
            yield f'<header class="wrap top">{self._write_title(campaigns[0], "h1")}</header>'
            yield _write_contents([(key, text) for key, text, _ in sections[0]])
            yield '<main id="main" class="wrap">'
        for number, (campaign, parts) in enumerate(zip(campaigns, sections, strict=True), 1):
            yield f'<section class="campaign" id="c{number}" aria-label="campaign {esc(campaign.name)}">'
            if several:
                yield self._write_title(campaign, "h2")
            yield from (text if several else _promote_headings(text) for _, _, text in parts)
            yield "</section>"
        yield f'</main><footer class="wrap">{_write_footer(self._document)}</footer>'

    @staticmethod
    def _write_header(title: str, verdict: str) -> str:
        return f'<header class="top wrap"><h1>{esc(title)}</h1><p class="lead">{esc(verdict)}</p></header>'

    @staticmethod
    def _write_title(report: CampaignReport, tag: str) -> str:
        reason = f'<p class="soft">{esc(report.reason)}</p>' if report.reason else ""
        word = "partial" if report.is_partial else report.state
        state = f'<span class="pill state-{esc(word)}">{esc(word)}</span>'
        return f'<{tag}>{esc(report.name)} {state}</{tag}><p class="lead">{esc(report.verdict)}</p>{reason}'

    def _write_campaign(self, report: CampaignReport, key: str, several: bool) -> Iterator[tuple[str, str, str]]:
        """Yield the sections that have data: id, title and HTML."""
        parts = (
            ("summary", "Summary", write_summary(report)),
            ("reward", "Reward", self._write_charts(report.reward_charts, key, is_wide=True) + write_rewards(report)),
            ("stability", "Stability", self._write_charts(report.stability_charts, key)),
            ("time", "Time", self._write_time(report, key)),
            ("staleness", "Staleness", self._write_staleness(report, key)),
            ("engines", "Engines", self._write_engines(report, key)),
            ("failures", "Failures", write_failures(report)),
            ("trajectories", "Trajectories", self._write_trajectories(report, key)),
            ("groups", "Groups", write_groups(report.trajectories.groups)),
            ("provenance", "Provenance", write_provenance(report)),
        )
        titles = {"time": "Where the time went", "failures": "Failures and outcomes", "groups": "Groups side by side"}
        for name, title, text in parts:
            if text:
                head = "" if name == "summary" else f"<h3>{titles.get(name, title)}</h3>"
                yield f"{key}-{name}", title, f'<section id="{key}-{name}">{head}{text}</section>'

    def _write_charts(self, charts: Sequence[ReportChart], key: str, *, is_wide: bool = False) -> str:
        written = [self._write_chart(chart, key) for chart in charts]
        return f'<div class="{"wide" if is_wide else "grid"}">{"".join(written)}</div>' if written else ""

    def _write_chart(self, chart: ReportChart, key: str) -> str:
        number = len(self.charts)
        self.charts.append(chart)
        title = f"{chart.title}, {chart.y_label} by {chart.x_label}"
        note = f'<p class="soft small">{esc(chart.note)}</p>' if chart.note else ""
        return (
            f'<figure class="chart" id="{key}-{esc(chart.id)}"><figcaption><h4>{esc(chart.title)}</h4>'
            f'<span class="soft small">{esc(chart.y_label)} by {esc(chart.x_label)}</span></figcaption>'
            f'<div class="plot" data-chart="{number}" role="img" tabindex="0" '
            f'aria-label="{esc(title)}. {esc(describe_chart(chart))}"></div><p class="readout" role="status"></p>'
            f"{write_legend(chart)}{note}<details><summary>Table: {esc(chart.title)}</summary>"
            f"{write_chart_table(chart)}</details></figure>"
        )

    def _write_time(self, report: CampaignReport, key: str) -> str:
        parts = []
        if report.roles:
            parts.append(write_roles(report.roles))
        if report.jobs:
            parts.append(write_jobs(report))
        parts.append(self._write_charts(report.time_charts, key))
        if report.workers:
            parts.append(write_workers(report))
        return "".join(parts)

    def _write_staleness(self, report: CampaignReport, key: str) -> str:
        text = self._write_charts(report.staleness_charts, key)
        if report.token_fates:
            names = sorted({name for fates in report.token_fates.values() for name in fates})
            labels = ["fit to train on" if name == TRAINED else name for name in names]
            rows = [
                [esc(domain), *(format_number(fates.get(name, 0)) for name in names)]
                for domain, fates in report.token_fates.items()
            ]
            text += write_table(
                "What became of generated tokens", ["domain", *labels], rows, numbers=range(1, len(names) + 1)
            )
        return text

    def _write_engines(self, report: CampaignReport, key: str) -> str:
        text = self._write_charts(report.engine_charts, key) + write_engines(report.engines)
        rows = [
            [
                esc(role.role),
                format_number(role.tokens_per_s),
                format_number(role.num_pauses),
                format_duration(role.pause_s),
            ]
            for role in report.roles
            if role.num_pauses or role.tokens_per_s
        ]
        if rows:
            heads = ["role", "tokens/s", "loads of weights", "mean pause"]
            text += write_table("New weights in the engines", heads, rows, numbers=(1, 2, 3))
        return text

    def _write_trajectories(self, report: CampaignReport, key: str) -> str:
        found = report.trajectories
        if not found.num and not found.problems and not found.missing:
            return ""
        flat = (
            f", {format_share(found.num_flat_groups / found.num_groups)} of them with one reward"
            if found.num_groups
            else ""
        )
        text = (
            f"<p>{found.num:,} trajectories in {found.num_groups:,} scored groups{flat}. "
            f"{len(found.sampled)} are shown: the best, worst, longest, newest and failed ones of each domain, "
            "and some at random.</p>"
        )
        text += write_problems(found.problems)
        text += "".join(f'<p class="soft small">{esc(missing)}</p>' for missing in found.missing)
        text += self._write_charts(found.charts, key)
        if found.sampled:
            text += write_trajectory_table(found.sampled, key)
            text += "<h4>Conversations</h4>"
            text += "".join(write_conversation(one, f"{key}-t{number}") for number, one in enumerate(found.sampled))
        return text

    def _write_comparison(self, comparison: ReportComparison) -> Iterator[str]:
        names = [one.name for one in self._document.campaigns]
        yield '<section id="compare"><h2>Comparison</h2>'
        yield self._write_charts(comparison.charts, "compare", is_wide=True)
        if comparison.settings:
            rows = [
                [
                    f"<code>{esc(one.key)}</code>",
                    *(f"<code>{esc(value)}</code>" for value in one.values),
                ]
                for one in comparison.settings
            ]
            yield write_table("Settings that differ", ["setting", *names], rows)
        rows = [[esc(one.key), *map(esc, one.values)] for one in comparison.results]
        yield write_table("Results", ["figure", *names], rows, numbers=range(1, len(names) + 1))
        yield "</section>"


def _promote_headings(text: str) -> str:
    """Raise the headings of a campaign's sections by one level, where no other heading is above them."""
    raised = text.replace("<h3>", '<h2 class="section">').replace("</h3>", "</h2>")
    return raised.replace("<h4>", '<h3 class="part">').replace("</h4>", "</h3>")


def _write_contents(links: Sequence[tuple[str, str]]) -> str:
    items = "".join(f'<li><a href="#{key}">{esc(text)}</a></li>' for key, text in links)
    return f'<nav class="toc" aria-label="Contents"><ul tabindex="0">{items}</ul></nav>'


def _write_footer(document: ReportDocument) -> str:
    return (
        f"Made by hpcrl {esc(document.hpcrl)} on {format_time(document.created)} UTC from the campaign's directory. "
        f"Times are in UTC. Charts: uPlot {UPLOT_VERSION}, MIT licence."
    )


def describe_chart(chart: ReportChart) -> str:
    """Describe a chart in words: where each series starts and ends, and its range."""
    parts = []
    for one in chart.series:
        known = [value for value in one.values if value is not None]
        if not known:
            continue
        low, high = format_number(min(known)), format_number(max(known))
        if one.style == "bars":
            parts.append(f"{one.name}: {format_number(sum(known))} in all, at most {high} in a bar")
        else:
            parts.append(
                f"{one.name}: from {format_number(known[0])} to {format_number(known[-1])}, between {low} and {high}"
            )
    return "; ".join(parts)


def write_legend(chart: ReportChart) -> str:
    numbers = itertools.count()
    items = []
    for one in chart.series:
        name = "cf" if one.style == "faint" else f"c{next(numbers) % NUM_COLORS}"
        shape = {
            "points": '<circle cx="10" cy="5" r="4"/>',
            "bars": '<rect x="4" y="0" width="12" height="10"/>',
        }.get(one.style, '<path d="M0 5H20" stroke-width="3" fill="none"/>')
        items.append(
            f'<li><svg viewBox="0 0 20 10" class="{name}" aria-hidden="true">{shape}</svg>{esc(one.name)}</li>'
        )
    return f'<ul class="legend">{"".join(items)}</ul>'


def write_chart_table(chart: ReportChart) -> str:
    if chart.kind == "category":
        labels = list(chart.labels)
    else:
        labels = [format_time(x) if chart.kind == "time" else format_number(x) for x in chart.x]
    rows = [
        [esc(label), *(format_number(one.values[index]) for one in chart.series)] for index, label in enumerate(labels)
    ]
    heads = [chart.x_label, *(one.name for one in chart.series)]
    return write_table(f"{chart.title}: numbers", heads, rows, numbers=range(1, len(heads)), is_tall=True)
