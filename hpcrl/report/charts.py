"""Make the charts of a campaign from its history. Pure.

build_reward_charts, build_stability_charts, build_time_charts, build_staleness_charts, build_engine_charts
thin_points, thin_chart     means of neighbours, so that a chart of any length has few points
smooth_values   the moving mean that is drawn over raw values
build_histogram    counts of values as bars
MAX_POINTS      the most points of a chart
"""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean

import msgspec

from hpcrl.campaign_dir.events import StepFinished
from hpcrl.report.figures import ChartSeries, ReportChart
from hpcrl.report.history import CampaignHistory
from hpcrl.report.markup import format_number
from hpcrl.system.json_numbers import finite_or_none

MAX_POINTS = 400
NUM_HISTOGRAM_BARS = 20
MAX_DOMAIN_LINES = 6
MAX_LAGS = 100
_LAG = re.compile(r"-?\d{1,9}", re.ASCII)


def build_reward_charts(history: CampaignHistory) -> list[ReportChart]:
    """Return the reward of training, each domain's, and that of evaluations, by step."""
    steps = _known_steps(history)
    if not steps and not history.evaluations:
        return []
    evaluations: dict[int, list[float | None]] = {}
    for one in history.evaluations.values():
        evaluations.setdefault(history.find_evaluation_step(one), []).append(finite_or_none(one.reward_mean))
    raw = {step.step: step.reward_mean for step in steps}
    # Each evaluation has its place: a second one of a step follows at the same number.
    places = [
        (number, index)
        for number in sorted(raw.keys() | evaluations.keys())
        for index in range(max(len(evaluations.get(number, [])), 1))
    ]
    numbers = [number for number, _ in places]
    raw_values = [None if index else finite_or_none(raw.get(number)) for number, index in places]
    series = [
        ChartSeries(name="each step", values=raw_values, style="faint"),
        ChartSeries(name="moving mean", values=smooth_values(raw_values)),
    ]
    domains = sorted(history.domain_rewards)
    if len(domains) > 1:
        for domain in domains[:MAX_DOMAIN_LINES]:
            sums = history.domain_rewards[domain]
            means = [
                sums[number][0] / sums[number][1] if not index and sums.get(number, [0, 0])[1] else None
                for number, index in places
            ]
            series.append(ChartSeries(name=domain, values=smooth_values(means)))
    if evaluations:
        values = [evaluations[number][index] if number in evaluations else None for number, index in places]
        series.append(ChartSeries(name="held-out evaluation", values=values, style="points"))
    left_out = len(domains) - MAX_DOMAIN_LINES
    note = f"{left_out} more domains are in the table below." if left_out > 0 else ""
    return [_make_chart("reward", "Mean reward", "step", "reward", numbers, series, note=note)]


def build_stability_charts(history: CampaignHistory) -> list[ReportChart]:
    """Return what shows whether training is stable, by step."""
    steps = _known_steps(history)
    wanted = (
        ("kl", "Log-prob mismatch (KL)", "nats a token", {
            "to the acting policy": "kl", "without lag": "kl_fresh", "to the reference": "kl_reference",
        }),
        ("entropy", "Entropy", "nats a token", {"entropy": "entropy"}),
        ("grad-norm", "Gradient norm", "norm before clipping", {"gradient norm": "grad_norm"}),
        ("clip", "Clipped and truncated", "share of tokens", {
            "clipped": "clip_fraction", "truncated importance ratio": "is_truncated_fraction",
        }),
        ("ratio", "Importance ratio", "ratio", {
            "5th percentile": "is_ratio_p05", "median": "is_ratio_p50", "95th percentile": "is_ratio_p95",
        }),
        ("loss", "Loss", "loss", {"policy": "loss", "value": "value_loss"}),
        ("replay", "Experts replayed", "share of tokens", {"the engine's experts": "replayed_fraction"}),
    )  # fmt: skip
    charts = [_chart_of_steps(steps, name, title, unit, fields) for name, title, unit, fields in wanted]
    return [chart for chart in charts if chart is not None]


def build_time_charts(history: CampaignHistory) -> list[ReportChart]:
    """Return the time of steps."""
    fields = {"training": "step_s", "waiting for trajectories": "wait_s"}
    chart = _chart_of_steps(_known_steps(history), "step-time", "Time of a step", "seconds", fields)
    return [chart] if chart is not None else []


def build_staleness_charts(history: CampaignHistory) -> list[ReportChart]:
    """Return how old the trajectories were that were trained on."""
    lags: Counter[int] = Counter()
    for step in history.steps.values():
        lags.update({int(lag): num for lag, num in step.lags.items() if _LAG.fullmatch(lag)})
    charts = []
    if lags:
        keys = list(range(min(lags), max(lags) + 1)[:MAX_LAGS])
        series = [ChartSeries(name="trajectories", values=[float(lags[key]) for key in keys], style="bars")]
        charts.append(
            ReportChart(
                id="lags", title="Lag of trained trajectories", x_label="versions behind", y_label="trajectories",
                x=[float(key) for key in keys], series=series, kind="category", labels=[str(key) for key in keys],
            )
        )  # fmt: skip
    chart = _chart_of_steps(
        _known_steps(history), "lag", "Lag by step", "versions", {"mean": "lag_mean", "largest": "lag_max"}
    )
    return charts + ([chart] if chart is not None else [])


def build_engine_charts(history: CampaignHistory) -> list[ReportChart]:
    """Return the load of the engines by role, over time."""
    by_role = {role: series.list_bins() for role, series in sorted(history.engine_series.items())}
    times = sorted({time for bins in by_role.values() for time, _ in bins})
    if not times:
        return []
    charts = []
    for name, title, unit, value, weight in (
        ("engine-tokens", "Tokens of an engine", "tokens/s", "num_tokens", "window_s"),
        ("engine-busy", "Time with a request to run", "share", "busy_s", "window_s"),
        ("engine-running", "Requests that run in an engine", "requests", "running", "window_s"),
        ("engine-waiting", "Requests that wait in an engine", "requests", "waiting", "window_s"),
        ("engine-kv", "KV memory in use", "share", "kv", "kv_window_s"),
    ):
        series = []
        for role, bins in by_role.items():
            values = {time: sums[value] / sums[weight] for time, sums in bins if sums.get(weight)}
            if values:
                series.append(ChartSeries(name=role, values=[values.get(time) for time in times]))
        if series:
            charts.append(_make_chart(name, title, "time", unit, times, series, kind="time"))
    return charts


def build_histogram(name: str, title: str, unit: str, counts: Mapping[str, Mapping[float, int]]) -> ReportChart | None:
    """Return a histogram with a row of bars for each name in `counts`, which count rounded values."""
    values = [value for counted in counts.values() for value in counted]
    if not values:
        return None
    low, high = min(values), max(values)
    is_whole = all(float(value).is_integer() for value in values)
    if is_whole:
        width = -(-(high - low + 1) // NUM_HISTOGRAM_BARS)
        num_bars = int((high - low) // width) + 1
    else:
        num_bars = NUM_HISTOGRAM_BARS if high > low else 1
        width = (high - low) / num_bars or 1.0
    series = []
    left_out = sorted(counts)[MAX_DOMAIN_LINES:]
    for key in sorted(counts)[:MAX_DOMAIN_LINES]:
        bars = [0.0] * num_bars
        for value, num in counts[key].items():
            bars[min(int((value - low) / width), num_bars - 1)] += num
        series.append(ChartSeries(name=key, values=list(bars), style="bars"))
    starts = [low + index * width for index in range(num_bars)]
    last = width - is_whole  # a bar of whole numbers names its last one
    labels = [format_number(start) + f" to {format_number(start + last)}" * bool(last) for start in starts]
    if num_bars == 1 and low == high:
        labels = [format_number(low)]
    return ReportChart(
        id=name, title=title, x_label=unit, y_label="trajectories", x=[float(index) for index in range(num_bars)],
        series=series, kind="category", labels=labels,
        note=f"Left out: {', '.join(left_out)}." if left_out else "",
    )  # fmt: skip


def smooth_values(values: Sequence[float | None]) -> list[float | None]:
    """Return the mean of the values around each one: of a twentieth of all, five at least."""
    known = [index for index, value in enumerate(values) if value is not None]
    reach = max(len(known) // 40, 2)
    smoothed: list[float | None] = [None] * len(values)
    sums = [0.0]
    for index in known:
        sums.append(sums[-1] + (values[index] or 0.0))
    for place, index in enumerate(known):
        start, end = max(place - reach, 0), min(place + reach + 1, len(known))
        smoothed[index] = (sums[end] - sums[start]) / (end - start)
    return smoothed


def thin_chart(chart: ReportChart, *, most: int) -> ReportChart:
    """Return a chart with at most this many points; bars stay."""
    if chart.kind == "category" or len(chart.x) <= most:
        return chart
    x, series = thin_points(chart.x, chart.series, most=most)
    return msgspec.structs.replace(chart, x=x, series=series, note="Each point is the mean of several neighbours.")


def thin_points(
    x: Sequence[float], series: Sequence[ChartSeries], *, most: int = MAX_POINTS
) -> tuple[list[float], list[ChartSeries]]:
    """Return means of neighbouring points, so that at most `most` are left; the last of points that are rare."""
    if len(x) <= most:
        return list(x), list(series)
    size = -(-len(x) // most)
    starts = range(0, len(x), size)
    thin = [
        ChartSeries(
            name=one.name,
            style=one.style,
            values=[_join_values(one.values[start : start + size], style=one.style) for start in starts],
        )
        for one in series
    ]
    return [fmean(x[start : start + size]) for start in starts], thin


def _join_values(values: Iterable[float | None], *, style: str) -> float | None:
    known = [value for value in values if value is not None]
    if not known:
        return None
    return known[-1] if style == "points" else fmean(known)


def _known_steps(history: CampaignHistory) -> list[StepFinished]:
    return list(history.steps.values())


def _chart_of_steps(
    steps: Sequence[StepFinished], name: str, title: str, unit: str, fields: Mapping[str, str]
) -> ReportChart | None:
    series = []
    for label, field in fields.items():
        values = [finite_or_none(getattr(step, field)) for step in steps]
        if any(value is not None for value in values):
            series.append(ChartSeries(name=label, values=values))
    if not series:
        return None
    return _make_chart(name, title, "step", unit, [step.step for step in steps], series)


def _make_chart(
    name: str,
    title: str,
    x_label: str,
    y_label: str,
    x: Sequence[float],
    series: Sequence[ChartSeries],
    *,
    kind: str = "number",
    note: str = "",
) -> ReportChart:
    thin_x, thin = thin_points([float(value) for value in x], series)
    if len(thin_x) < len(x):
        note = f"{note} Each point is the mean of {-(-len(x) // MAX_POINTS)} neighbours.".strip()
    return ReportChart(
        id=name, title=title, x_label=x_label, y_label=y_label, x=thin_x, series=thin, kind=kind, note=note
    )
