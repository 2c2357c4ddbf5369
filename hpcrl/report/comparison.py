"""Compare campaigns: what their recipes have different, and what came of it. Pure.

compare_reports    the comparison of some reports
RESULT_LABELS      the figures that are compared, as people read them
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from hpcrl.campaign.fixed_settings import find_differences, split_entry
from hpcrl.report.figures import (
    CampaignReport,
    ChartSeries,
    ComparedValue,
    KeyFigures,
    ReportChart,
    ReportComparison,
)
from hpcrl.report.markup import format_share
from hpcrl.system.terminal import format_duration

RESULT_LABELS = {
    "step": "steps made",
    "num_steps": "steps planned",
    "version": "newest version",
    "reward_first": "reward, first steps",
    "reward_last": "reward, last steps",
    "reward_noise": "noise of the reward",
    "reward_best": "best reward of a step",
    "evaluation_last": "last evaluation",
    "evaluation_best": "best evaluation",
    "num_episodes": "episodes",
    "num_uncounted": "of these not counted by a worker",
    "num_failed": "failed episodes",
    "num_faulted": "of these lost to infrastructure",
    "num_aborted": "aborted episodes",
    "num_tokens": "generated tokens",
    "num_trained_tokens": "tokens of steps",
    "num_fit_tokens": "tokens fit to train on",
    "tokens_per_s": "tokens a second",
    "wall_s": "time that jobs ran",
    "queued_s": "time in the queue",
    "node_hours": "node-hours",
    "gpu_hours": "GPU-hours",
    "trained_share": "share of tokens fit to train on",
}


_SITE_NOTES = frozenset({"description", "sources", "verified", "checked_on"})
"""The notes of a site about itself."""
MAX_SITE_ROWS = 30
"""The settings of sites that are listed, besides a row with the number of the others."""


def compare_reports(reports: Sequence[CampaignReport], *, sites: Sequence[Mapping[str, Any]]) -> ReportComparison:
    """Return the settings that differ, the results side by side, and the rewards in one chart.

    `sites` are the settings of each campaign's site by their dotted keys.
    """
    settings = [
        ComparedValue(key=key, values=[value or "" for value in values])
        for key, values in sorted(find_differences([report.recipe for report in reports]))
    ]
    of_sites = _compare_sites(sites)
    results = [
        ComparedValue(key=label, values=[_format(report.key_figures, name) for report in reports])
        for name, label in RESULT_LABELS.items()
    ]
    return ReportComparison(
        verdict=_describe_differences(settings, reports, sites=_describe_sites(sites) if of_sites else ""),
        settings=[*settings, *of_sites],
        results=[result for result in results if any(result.values)],
        charts=_overlay_charts(reports),
    )


def _compare_sites(sites: Sequence[Mapping[str, Any]]) -> list[ComparedValue]:
    """Return the settings in which sites differ; a partition or a GPU that one of them does not have is one row."""
    if not all(sites):  # the problems of a campaign name the record that it lacks
        return []
    known = [{split_entry(key)[0] for key in site} for site in sites]
    rows: dict[str, list[str]] = {}
    names = [site.get("name") for site in sites]
    own_name = [("name", names)] if len(set(map(str, names))) > 1 else []
    for key, values in [*own_name, *find_differences(sites)]:
        entry, is_named = split_entry(key)
        if is_named and not all(entry in one for one in known):
            rows[f"site.{entry}"] = ["defined" if entry in one else "" for one in known]
        elif key not in _SITE_NOTES:
            rows[f"site.{key}"] = ["" if value is None else json.dumps(value) for value in values]
    listed = [ComparedValue(key=key, values=values) for key, values in sorted(rows.items())]
    # The name comes first, as it is what a reader knows.
    listed.sort(key=lambda one: one.key != "site.name")
    if len(listed) > MAX_SITE_ROWS:
        num_left = len(listed) - MAX_SITE_ROWS
        listed[MAX_SITE_ROWS:] = [ComparedValue(key=f"site: {num_left} more settings", values=[""] * len(sites))]
    return listed


def _describe_sites(sites: Sequence[Mapping[str, Any]]) -> str:
    names = list(dict.fromkeys(str(site.get("name", "unknown")) for site in sites))
    if len(names) > 1:
        return f"the sites differ ({', '.join(names)}), so times and rates are of different machines"
    return f"the settings of site {names[0]} differ, which may change times and rates"


def _describe_differences(settings: Sequence[ComparedValue], reports: Sequence[CampaignReport], *, sites: str) -> str:
    names = [one.key for one in settings]
    best = max(reports, key=lambda report: _rank_by_reward(report.key_figures))
    if not names:
        text = "The recipes are the same"
    elif names == ["seed"]:
        text = "The recipes differ in the seed alone"
    elif len(names) == 1:
        text = f"The recipes differ in one setting, {names[0]}"
    else:
        text = f"The recipes differ in {len(names)} settings, so no difference of the results has a single cause"
    if sites:
        text += f"; {sites}"
    if best.key_figures.reward_last is None:
        return f"{text}."
    others = [one.key_figures.reward_last for one in reports if one is not best]
    if any(value is not None and f"{value:.3f}" == f"{best.key_figures.reward_last:.3f}" for value in others):
        return f"{text}. Several end with the highest reward: {best.key_figures.reward_last:.3f}."
    return f"{text}. {best.name} has the highest reward at the end: {best.key_figures.reward_last:.3f}."


def _rank_by_reward(figures: KeyFigures) -> float:
    return figures.reward_last if figures.reward_last is not None else float("-inf")


def _format(figures: KeyFigures, name: str) -> str:
    value = getattr(figures, name)
    if value is None:
        return ""
    if name.endswith("_share"):
        return format_share(value)
    if name in ("wall_s", "queued_s"):
        return format_duration(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:,.4g}" if abs(value) < 1e6 else f"{value:,.0f}"


def _overlay_charts(reports: Sequence[CampaignReport]) -> list[ReportChart]:
    """Return the smoothed reward of each campaign over the same axis."""
    curves: dict[str, dict[float, float]] = {}
    for number, report in enumerate(reports, start=1):
        for chart in report.reward_charts[:1]:
            smooth = next((one for one in chart.series if one.name == "moving mean"), None)
            if smooth is not None:
                name = report.name if report.name not in curves else f"{report.name} ({number})"
                curves[name] = {x: y for x, y in zip(chart.x, smooth.values, strict=True) if y is not None}
    x = sorted({point for curve in curves.values() for point in curve})
    if not x:
        return []
    series = [ChartSeries(name=name, values=[curve.get(point) for point in x]) for name, curve in curves.items()]
    return [
        ReportChart(
            id="compare", title="Reward of each campaign", x_label="step", y_label="mean reward", x=x, series=series
        )
    ]
