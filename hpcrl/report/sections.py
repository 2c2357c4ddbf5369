"""The sections of a campaign's page, each from its figures; charts are in `page`.

write_summary     advisories and key figures
write_problems    what could not be read
write_roles, write_jobs, write_workers    where the time went
write_engines     the health of each engine
write_rewards     the rewards of each domain
write_failures    outcomes and faults
write_provenance  what the campaign was made from
"""

import itertools
from collections.abc import Sequence

from hpcrl.monitor.advisories import Advisory
from hpcrl.report.figures import CampaignReport, EngineFigures, RoleFigures
from hpcrl.report.markup import esc, format_number, format_share, format_time, write_bar, write_table
from hpcrl.spool.outcome import FAILURES, format_failed
from hpcrl.system.terminal import format_duration

MARK_SHARE = 0.006
"""The width of a mark in a bar."""
MAX_ENGINES = 1000
"""The rows of the table of engines: those that were least busy."""


def write_summary(report: CampaignReport) -> str:
    return _write_advisories(report.advisories) + _write_tiles(report) + write_problems(report.problems)


def _write_advisories(advisories: Sequence[Advisory]) -> str:
    if not advisories:
        return '<p class="fine">No rule found anything wrong.</p>'
    return f'<ol class="advisories">{"".join(map(_write_advisory, advisories))}</ol>'


def _write_advisory(advisory: Advisory) -> str:
    is_share = advisory.unit.startswith("share")
    show = format_share if is_share else format_duration if advisory.unit == "s" else format_number
    unit = "" if advisory.unit == "s" else f" ({esc(advisory.unit)})"
    return (
        f'<li class="{esc(advisory.severity)}"><p class="found"><span class="severity">{esc(advisory.severity)}'
        f"</span>{esc(advisory.text)}</p><dl>"
        f"<dt>Figure</dt><dd>{show(advisory.figure)}, threshold {show(advisory.threshold)}{unit}</dd>"
        f"<dt>Likely cause</dt><dd>{esc(advisory.cause)}</dd>"
        f"<dt>What to do</dt><dd>{esc(advisory.remedy)}</dd></dl></li>"
    )


def _write_tiles(report: CampaignReport) -> str:
    figures = report.key_figures
    tiles = [
        ("Steps", format_number(figures.step), f"of {figures.num_steps:,}" if figures.num_steps is not None else "")
    ]
    if figures.reward_last is not None:
        more = f"from {format_number(figures.reward_first)}, best {format_number(figures.reward_best)}"
        tiles.append(("Reward", format_number(figures.reward_last), more))
    if figures.evaluation_last is not None:
        tiles.append(
            ("Held out", format_number(figures.evaluation_last), f"best {format_number(figures.evaluation_best)}")
        )
    failed = format_failed(num_failed=figures.num_failed, num_lost=figures.num_faulted)
    ended = f"{failed}, {figures.num_aborted:,} aborted"
    tiles += [
        ("Episodes", format_number(figures.num_episodes), ended),
        ("Tokens generated", format_number(figures.num_tokens), f"{format_number(figures.tokens_per_s)} a second"),
        (
            "Tokens of steps",
            format_number(figures.num_trained_tokens),
            f"of {format_number(figures.num_fit_tokens)} fit to train on, "
            f"{format_share(figures.trained_share)} of those generated",
        ),
        ("Time", format_duration(figures.wall_s), f"{format_duration(figures.queued_s)} in the queue"),
        ("Node-hours", format_number(figures.node_hours), f"{format_number(figures.gpu_hours)} GPU-hours"),
    ]
    items = "".join(
        f'<li><span class="label">{esc(label)}</span><span class="value">{esc(value)}</span>'
        f'<span class="more">{esc(more)}</span></li>'
        for label, value, more in tiles
    )
    return f'<ul class="tiles">{items}</ul>'


def write_problems(problems: Sequence[str]) -> str:
    if not problems:
        return ""
    items = "".join(f"<li>{esc(problem)}</li>" for problem in problems)
    return f'<details><summary>Could not be read: {len(problems)}</summary><ul class="small">{items}</ul></details>'


def write_roles(roles: Sequence[RoleFigures]) -> str:
    rows = []
    for role in roles:
        shares = [
            ("busy", role.busy_share or 0.0), ("waiting", role.waiting_share or 0.0),
            ("starting", role.starting_share), ("up", _measure_up(role)), ("idle", role.idle_share),
        ]  # fmt: skip
        ends = list(itertools.accumulate(share for _, share in shares))
        parts = [(end - share, end, name) for (name, share), end in zip(shares, ends, strict=True)]
        label = ", ".join(f"{name} {format_share(share)}" for name, share in shares if share)
        if role.done_by:
            rows.append([esc(role.role), f"in {esc(role.done_by)}", *["-"] * 6])
            continue
        rows.append(
            [
                esc(role.role), format_number(role.num_workers), format_number(role.node_hours),
                write_bar(parts, f"{role.role}: {label}", name="shares"),
                format_share(role.busy_share), format_share(role.waiting_share), format_share(role.starting_share),
                format_share(role.idle_share),
            ]
        )  # fmt: skip
    heads = ["role", "workers", "node-hours", "share of the time", "busy", "waiting", "starting", "held idle"]
    legend = "".join(
        f'<li><svg viewBox="0 0 20 10" aria-hidden="true"><rect class="{name}" width="20" height="10"/></svg>'
        f"{text}</li>"
        for name, text in (
            ("busy", "busy"), ("waiting", "waiting for work"), ("starting", "starting"), ("up", "up, not measured"),
            ("idle", "held without a live worker"),
        )
    )  # fmt: skip
    table = write_table("The time of each role's workers", heads, rows, numbers=(1, 2, 4, 5, 6, 7), is_full=True)
    return f'<ul class="legend">{legend}</ul>{table}'


def _measure_up(role: RoleFigures) -> float:
    """Return the share in which workers were up whose work is not measured."""
    return max(1 - role.idle_share - role.starting_share, 0.0) if role.busy_share is None else 0.0


def write_jobs(report: CampaignReport) -> str:
    times = [time for job in report.jobs for time in (job.queued, job.started, job.ended) if time is not None]
    low, high = min(times, default=0.0), max(times, default=1.0)

    def place(time: float) -> float:
        return (time - low) / max(high - low, 1e-9)

    rows = []
    for job in report.jobs:
        parts = []
        if job.queued is not None and job.started is not None:
            parts.append((place(job.queued), place(job.started), "queued"))
        if job.started is not None and job.ended is not None:
            parts.append((place(job.started), place(job.ended), "failed" if job.state == "failed" else "up"))
        steps = f"{job.first_step} to {job.last_step}" if job.first_step is not None else "none"
        ran = job.ended - job.started if job.started is not None and job.ended is not None else None
        waited = job.started - job.queued if job.started is not None and job.queued is not None else None
        rows.append(
            [
                format_number(job.number), esc(job.id), esc(job.state),
                write_bar(parts, f"job {job.number}: waited {format_duration(waited)}, ran {format_duration(ran)}"),
                format_duration(waited), format_duration(ran), steps, esc(job.reason),
            ]
        )  # fmt: skip
    heads = ["job", "id", "state", "timeline", "queued", "ran", "steps", "reason"]
    return "<h4>Chain of jobs</h4>" + write_table("Jobs of the campaign", heads, rows, numbers=(4, 5), is_full=True)


def write_workers(report: CampaignReport) -> str:
    """Return the Gantt chart: a thin row for each worker, in an area that can be scrolled."""
    low = min(start for row in report.workers for start, _ in row.times)
    high = max(end for row in report.workers for _, end in row.times)
    length_s = max(high - low, 1e-9)
    rows = []
    for row in report.workers:
        parts = [((start - low) / length_s, (end - low) / length_s, "up") for start, end in row.times]
        marks = [((time - low) / length_s, (time - low) / length_s + MARK_SHARE, "failed") for time in row.failures]
        label = f"{row.role} {row.worker}: up for {format_duration(row.up_s)} since {format_time(row.times[0][0])}"
        name = esc(row.worker) if row.num == 1 else f"{esc(row.role)}: {esc(row.worker)}"
        rows.append(
            [
                f"<code>{name}</code>", esc(row.node or "-"), write_bar(parts + marks, label),
                format_duration(row.up_s), format_number(row.num_failures) if row.num_failures else "",
            ]
        )  # fmt: skip
    heads = ["worker", "node", "timeline", "up for", "failures"]
    num = sum(row.num for row in report.workers)
    each = "" if num == len(report.workers) else ", several in a row"
    caption = f"When each of {num:,} workers was up{each}: {format_time(low)} to {format_time(high)} UTC"
    table = write_table(caption, heads, rows, numbers=(3, 4), is_tall=True, is_full=True, is_thin=True)
    return f"<h4>Workers</h4>{table}"


def write_engines(engines: Sequence[EngineFigures]) -> str:
    """Return the table of engines."""
    if not engines:
        return ""
    shown = sorted(engines, key=lambda one: one.busy_share)[:MAX_ENGINES] if len(engines) > MAX_ENGINES else engines
    rows = [
        [
            f"<code>{esc(one.engine)}</code>", esc(one.node or "-"), format_share(one.busy_share),
            format_number(one.tokens_per_s), format_number(one.running), format_number(one.waiting),
            format_share(one.kv_share), format_share(one.kv_most), format_share(one.prefix_hit_share),
            format_number(one.num_preemptions),
        ]
        for one in shown
    ]  # fmt: skip
    heads = ["engine", "node", "busy", "tokens/s", "running", "waiting", "KV", "KV most", "prefix hits", "preempted"]
    those = f"{len(shown):,} least busy of {len(engines):,}" if shown is not engines else f"{len(engines):,}"
    caption = f"Health of the engines ({those}), each on average while it was up"
    table = write_table(caption, heads, rows, numbers=range(2, len(heads)), is_tall=True, is_full=True)
    note = (
        "Busy: the share of time with at least one request. KV: the share of KV memory in use. "
        "Prefix hits: the share of prompt tokens whose KV was in the prefix cache. "
        "Preempted: requests that lost their KV to others. A dash: the engine does not report it."
    )
    return f'{table}<p class="soft small">{note}</p>'


# ---- failures


def write_rewards(report: CampaignReport) -> str:
    """Write the rewards of each domain, if there are several, or evaluations."""
    if len(report.rewards) < 2 and all(one.evaluation is None for one in report.rewards):
        return ""
    rows = [
        [esc(one.domain), format_number(one.num_scored), *map(_format_reward, (one.mean, one.recent, one.evaluation))]
        for one in report.rewards
    ]
    heads = ["domain", "scored", "mean reward", "of the last 256", "last evaluation"]
    return write_table("Rewards by domain", heads, rows, numbers=range(1, len(heads)))


def _format_reward(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def write_failures(report: CampaignReport) -> str:
    text = ""
    if any(report.outcomes.values()):
        names = sorted({name for outcomes in report.outcomes.values() for name in outcomes})
        rows = [
            [
                esc(domain), format_number(report.failed.get(domain, 0)),
                *(format_number(outcomes.get(name, 0)) for name in names),
            ]
            for domain, outcomes in report.outcomes.items()
        ]  # fmt: skip
        heads = ["domain", "failed", *names]
        caption = f"How episodes ended; failed: {', '.join(FAILURES)}"
        text += write_table(caption, heads, rows, numbers=range(1, len(heads)))
    if num := report.key_figures.num_uncounted:
        text += (
            f'<p class="soft small">{num:,} more episode{"s have" if num > 1 else " has"} a trajectory, but no '
            "env worker has counted its end: it was killed before its next count. The number at the top has them.</p>"
        )
    titles = {"infrastructure": "Faults of the infrastructure", "policy": "Faults of the policy and its rewards"}
    for kind, title in titles.items():
        found = [one for one in report.failures if one.kind == kind]
        if found:
            rows = [
                [
                    esc(one.what), esc(one.domain or "-"), esc(one.node or "-"),
                    f"{one.num:,} or more" if one.is_least else format_number(one.num), format_time(one.time),
                    esc(one.newest),
                ]
                for one in found
            ]  # fmt: skip
            heads = ["what", "domain", "node", "number", "newest (UTC)", "newest report"]
            text += f"<h4>{title}</h4>" + write_table(
                f"{title}, by domain and node", heads, rows, numbers=(3,), is_full=True
            )
    if report.failures:
        text += (
            '<p class="soft small">The tables of faults count what workers report: an episode that was tried again may '
            "have several. Of faults that repeat, workers report the 1st, 10th, 100th and so on: there may be more.</p>"
        )
    return text


def write_provenance(report: CampaignReport) -> str:
    facts = "".join(f"<dt>{esc(one.name)}</dt><dd>{esc(one.value)}</dd>" for one in report.provenance)
    rows = [[f"<code>{esc(key)}</code>", f"<code>{esc(value)}</code>"] for key, value in report.recipe.items()]
    settings = write_table("Every setting of the recipe", ["setting", "value"], rows, is_tall=True)
    return f'<dl class="facts">{facts}</dl><details><summary>The recipe as resolved</summary>{settings}</details>'
