"""Render one screen of a campaign, from 80x24 up.

render_screen, render_frame         the screen of a snapshot, and a frame as long as its texts
render_header, render_notes         its parts that pages share
format_state, finite_values, format_step_count, format_clock_time, format_date, format_shares    parts that lines share
shorten_middle                      a text that fits a line, with its end
find_low_shares, find_failing       the domains that need a look
DEFAULT_HEIGHT, MIN_TITLED_HEIGHT, NOTE_WIDTH, ComponentForm, STATE_STYLES, SEVERITY_STYLES    sizes and colours
MAX_SHOWN_ADVISORIES, MAX_SHOWN_PROBLEMS, MAX_FRAME_NOTES, LOAD_COLUMNS    limits, and columns
"""

import datetime
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

from rich.console import Console, ConsoleOptions, Group, OverflowMethod, RenderableType, RenderResult
from rich.progress_bar import ProgressBar
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from hpcrl.hardware.loop_model import BUSY_LOOP_SHARE
from hpcrl.monitor.advisories import Advisory
from hpcrl.monitor.job_state import FINAL_STATES, CampaignState
from hpcrl.monitor.progress import MAX_RECENT_REWARDS
from hpcrl.monitor.screen_parts import FittedScreen, FittedTable, LongLines, WidthChoice
from hpcrl.monitor.snapshot import (
    CampaignSnapshot,
    ComponentView,
    DomainView,
    JobView,
    RoleView,
    find_bottleneck,
    measure_change,
)
from hpcrl.spool.outcome import (
    ABORTED,
    FAILURES,
    MAX_FAILED_SHARE,
    OUTCOME_REWARD_ERROR,
    format_failed,
    measure_failures,
    measure_outcomes,
)
from hpcrl.spool.token_fates import MIN_TRAINED_SHARE, explain_untrained
from hpcrl.system.terminal import Sparkline, escape_to_one_line, format_duration

ComponentForm = Literal["titles", "column"]
"""The form of components: a line above the roles of each, or a column."""
DEFAULT_HEIGHT = 24
MIN_TITLED_HEIGHT = 30
"""The height of screens from which on each component has a line; on lower ones they have a column."""
NOTE_WIDTH = 70
"""The characters of a note on a line of a screen of 80 columns."""
STATE_STYLES = {
    "planned": "dim",
    "queued": "yellow",
    "running": "green",
    "draining": "yellow",
    "done": "bold green",
    "failed": "bold red",
    "stopped": "bold yellow",
    "unknown": "magenta",
}

SEVERITY_STYLES = {"critical": "bold red", "warning": "yellow", "notice": "dim"}
MAX_SHOWN_ADVISORIES, MAX_SHOWN_PROBLEMS, MAX_FRAME_NOTES = 3, 2, 12
LOAD_COLUMNS = ("busy", "queue", "tokens/s", "kv", "version")


def render_screen(snapshot: CampaignSnapshot, *, height: int = DEFAULT_HEIGHT) -> RenderableType:
    """Render one screen; recent notes fill the lines that are left."""
    return FittedScreen(
        lambda long_lines: _render_parts(
            snapshot, long_lines=long_lines, components="titles" if height >= MIN_TITLED_HEIGHT else "column"
        ),
        lambda num_lines: render_notes(snapshot, max_lines=num_lines, long_lines="cut"),
        height=height,
        kept="end",
    )


def render_frame(snapshot: CampaignSnapshot) -> RenderableType:
    """Render one frame of any height, with every text whole."""
    notes = render_notes(snapshot, max_lines=MAX_FRAME_NOTES, long_lines="wrapped")
    parts = [*_render_parts(snapshot, long_lines="wrapped", components="titles"), notes]
    return Group(*(Group(part, "") for part in parts[:-1]), notes)


def _render_parts(
    snapshot: CampaignSnapshot, *, long_lines: LongLines, components: ComponentForm
) -> list[RenderableType]:
    is_cut = long_lines == "cut"
    parts = [render_header(snapshot, long_lines=long_lines)]
    if advisories := snapshot.advisories[:MAX_SHOWN_ADVISORIES]:
        parts.append(Group(*(_render_advisory(advisory, long_lines=long_lines) for advisory in advisories)))
    parts += [
        _render_curves(snapshot),
        _render_roles(snapshot, form=components),
        _render_figures(snapshot, long_lines=long_lines),
    ]
    if problems := snapshot.detail.problems[:MAX_SHOWN_PROBLEMS]:
        overflow: OverflowMethod = "ellipsis" if is_cut else "fold"
        parts.append(
            Group(
                *(Text(escape_to_one_line(one), style="magenta", overflow=overflow, no_wrap=is_cut) for one in problems)
            )
        )
    return parts


def _render_advisory(advisory: Advisory, *, long_lines: LongLines) -> Text:
    is_cut = long_lines == "cut"
    line = Text(style=SEVERITY_STYLES[advisory.severity], no_wrap=is_cut, overflow="ellipsis" if is_cut else "fold")
    return line.append(f"{advisory.severity:<8}  ").append(escape_to_one_line(advisory.text))


def finite_values(series: Sequence[float | None]) -> list[float]:
    return [value for value in series if value is not None and abs(value) < float("inf")]


def format_step_count(snapshot: CampaignSnapshot) -> str:
    return f"{snapshot.step:,}/{snapshot.num_steps:,}" if snapshot.num_steps is not None else f"{snapshot.step:,}"


def format_clock_time(time: float) -> str:
    return _format_time(time, "%H:%M:%S")


def format_date(time: float) -> str:
    return _format_time(time, "%Y-%m-%d %H:%M")


def _format_time(time: float, form: str) -> str:
    try:
        return datetime.datetime.fromtimestamp(time).strftime(form)
    except (OverflowError, OSError, ValueError):  # a damaged record may have any number
        return "?"


def format_state(state: CampaignState, *, is_partial: bool) -> Text:
    """Format the state of a campaign; one that made every step and trained a part is partial."""
    return Text("partial", style="bold yellow") if is_partial else Text(state, style=STATE_STYLES[state])


def render_header(snapshot: CampaignSnapshot, *, long_lines: LongLines = "wrapped") -> RenderableType:
    detail = snapshot.detail
    top = Table.grid(padding=(0, 1, 0, 0), pad_edge=False, expand=True)
    top.add_column(ratio=1, no_wrap=True, overflow="ellipsis")
    top.add_column(justify="right", no_wrap=True)
    title = Text(escape_to_one_line(snapshot.name), style="bold")
    where = escape_to_one_line(f"  {snapshot.recipe or '?'} on {snapshot.site or '?'}")
    state = format_state(snapshot.state, is_partial=snapshot.is_partial)
    top.add_row(title.append(where, style="not bold dim"), state)
    no_job = "no job is known" if snapshot.state == "unknown" else "no job yet"
    facts = [f"job {detail.job_id}" if detail.job_id else no_job]
    if len(snapshot.jobs) > 1 and (job := _find_shown_job(snapshot)):
        facts[0] += f" (number {job.number + 1})"
    if detail.elapsed_s is not None:
        facts.append(f"{_format_elapsed(detail.elapsed_s)} elapsed")
    if detail.left_s is not None:
        facts.append(f"{_format_elapsed(detail.left_s)} left")
    if detail.start_estimate is not None:
        facts.append(f"starts about {format_date(detail.start_estimate)} (Slurm's estimate)")
    is_cut = long_lines == "cut"
    line = Text("   ".join(facts), style="dim", no_wrap=is_cut, overflow="ellipsis")
    lines: list[RenderableType] = [top, WidthChoice(line, narrow=Text(line.plain, style="dim"))]
    if detail.reason:
        lines.append(Text(escape_to_one_line(detail.reason), style=state.style))
    return Group(*lines)


class StepBar(ProgressBar):
    """A bar whose rest is drawn with another character, where others differ from what is done by colour alone."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        rest, style = "." if options.ascii_only else "┄", console.get_style(self.style)
        for part in super().__rich_console__(console, options):
            if isinstance(part, Segment) and part.style == style:
                yield Segment(rest * len(part.text), style)
            else:
                yield part


def _render_curves(snapshot: CampaignSnapshot) -> RenderableType:
    wide, narrow = Table.grid(padding=(0, 2, 0, 0), expand=True), _make_grid(long_lines="wrapped")
    wide.add_column(style="dim", width=8)
    wide.add_column(ratio=1, no_wrap=True)
    wide.add_column(justify="right", no_wrap=True)
    for label, drawing, ends in _list_curves(snapshot):
        wide.add_row(label, drawing, ends)
        narrow.add_row(label, Text(ends))
    return WidthChoice(wide, narrow=narrow)


def _list_curves(snapshot: CampaignSnapshot) -> Iterator[tuple[str, RenderableType, str]]:
    """Yield each curve with its label and its figures."""
    steps = StepBar(total=snapshot.num_steps or 1, completed=snapshot.step)
    left_s = snapshot.detail.training_left_s
    more = f", about {format_duration(left_s)} more" if left_s else ""
    yield "steps", steps, format_step_count(snapshot) + more
    if not snapshot.has_rollouts:
        losses = snapshot.detail.losses
        yield "loss", Sparkline(finite_values(losses)), _format_ends(losses)
        return
    yield "reward", Sparkline(finite_values(snapshot.reward_mean)), _format_ends(snapshot.reward_mean)
    if scored_evaluations := [
        (one.reward_mean, one.version) for one in snapshot.evaluations if one.reward_mean is not None
    ]:
        rewards, (best, version) = [reward for reward, _ in scored_evaluations], max(scored_evaluations)
        yield "held out", Sparkline(rewards), f"{rewards[-1]:.3f}, best {best:.3f} at version {version}"


def _format_ends(series: Sequence[float | None]) -> str:
    change = measure_change(series)
    return f"{change.first:.3f} -> {change.last:.3f}" if change else "no step yet"


def _render_roles(snapshot: CampaignSnapshot, *, form: ComponentForm) -> RenderableType:
    """Render a row for each role, grouped by component."""
    job = _find_shown_job(snapshot)
    components = job.components if job and len(job.components) > 1 else []
    places = {role: part for part in reversed(components) for role in part.roles}
    order = {role: number for number, part in enumerate(components) for role in part.roles}
    workers = "workers" if snapshot.state in FINAL_STATES else "alive"  # after the end none is alive
    rows: list[dict[str, str]] = []
    styles, titles = [], {}
    shown: ComponentView | None = None
    for role in sorted(snapshot.roles, key=lambda role: order.get(role, len(order))):
        view, component = snapshot.roles[role], places.get(role)
        if component is not None and component is not shown:
            shown = component
            titles[len(rows)] = f"component {_describe_component(component)}: {_format_names(component.nodes)}"
        partitions, nodes = _locate_role(snapshot, role)
        where = {"partition": ", ".join(partitions) or "-", "nodes": _format_names(nodes)}
        where |= {"component": _describe_component(component)} if component is not None else {}
        rows.append({"role": f"{role:<8}", workers: _format_workers(snapshot, role), **_format_load(view), **where})
        styles.append({workers: _workers_style(snapshot, role, view)})
    where_column = "component" if form == "column" and components else "partition"
    return FittedTable(
        rows, texts=("role",), numbers=(workers, *LOAD_COLUMNS), last_texts=(where_column, "nodes"), styles=styles,
        titles=titles if form == "titles" else {},
    )  # fmt: skip


def _describe_component(component: ComponentView) -> str:
    state = "" if component.state == "running" else f", {component.state}"
    return f"{component.index}, {component.num_nodes:,} x {component.partition}{state}"


def _format_workers(snapshot: CampaignSnapshot, role: str) -> str:
    """Return how many workers of a role are alive; those for rewards are not, while others score or nothing waits."""
    view = snapshot.roles[role]
    if role == "reward" and not view.alive and not view.queue:
        if view.done_by:
            return f"in {view.done_by}"
        if snapshot.state in {"running", "draining"}:
            return "idle"
    return f"{view.workers}" if snapshot.state in FINAL_STATES else f"{view.alive}/{view.workers}"


def _format_load(view: RoleView) -> dict[str, str]:
    """Return the load of a role by column; what is not known is missing."""
    known = {
        "busy": None if view.busy_share is None else f"{view.busy_share:.0%}",
        "queue": None if view.queue is None else f"{view.queue:,}",
        "tokens/s": None if view.tokens_per_s is None else f"{view.tokens_per_s:,.0f}",
        "kv": None if view.kv_share is None else f"{view.kv_share:.0%}",
        "version": None if view.version is None else f"{view.version}",
    }
    return {name: text for name, text in known.items() if text is not None}


def _workers_style(snapshot: CampaignSnapshot, role: str, view: RoleView) -> str:
    if snapshot.state not in {"running", "draining"}:
        return "dim"
    if view.alive >= view.workers:
        return "green"
    if role == "reward":  # its workers start when there is work
        return "dim"
    return "yellow" if view.alive else "red"


def _find_shown_job(snapshot: CampaignSnapshot) -> JobView | None:
    """Return the job that the screen shows."""
    return next((job for job in snapshot.jobs if job.id == snapshot.detail.job_id), None)


def _locate_role(snapshot: CampaignSnapshot, role: str) -> tuple[list[str], list[str]]:
    """Return partitions and nodes of a role's workers, from their events, else from the role's components."""
    job = _find_shown_job(snapshot)
    components = [part for part in job.components if role in part.roles] if job else []
    role_detail = snapshot.detail.roles.get(role)
    partitions = role_detail.partitions if role_detail else []
    nodes = role_detail.nodes if role_detail else []
    return (
        partitions or sorted({part.partition for part in components}),
        nodes or sorted({node for part in components for node in part.nodes}),
    )


def _make_grid(*, long_lines: LongLines) -> Table:
    """Make a grid of labels and texts."""
    grid = Table.grid(padding=(0, 2, 0, 0), expand=True)
    grid.add_column(style="dim", width=8)
    is_cut = long_lines == "cut"
    grid.add_column(ratio=1, no_wrap=is_cut, overflow="ellipsis" if is_cut else "fold")
    return grid


def _render_figures(snapshot: CampaignSnapshot, *, long_lines: LongLines) -> RenderableType:
    wide, narrow = _make_grid(long_lines=long_lines), _make_grid(long_lines="wrapped")
    for label, text in _iter_figure_rows(snapshot):
        warned = (
            label in ("env loop", "memory")
            or (label == "trained" and find_low_shares(snapshot))
            or (label == "outcomes" and find_failing(snapshot))
        )
        for grid in (wide, narrow):
            grid.add_row(label, Text(escape_to_one_line(text), style="yellow" if warned else ""))
    return WidthChoice(wide, narrow=narrow)


def _iter_figure_rows(snapshot: CampaignSnapshot) -> Iterator[tuple[str, str]]:
    if snapshot.has_rollouts:
        yield from _iter_rollout_rows(snapshot)
    if snapshot.detail.memory:
        yield "memory", snapshot.detail.memory
    if snapshot.detail.last_step is not None:
        yield "learning", "   ".join(_format_learning(snapshot))


def _iter_rollout_rows(snapshot: CampaignSnapshot) -> Iterator[tuple[str, str]]:
    episodes = snapshot.episodes
    failed = format_failed(num_failed=episodes.failed, num_lost=episodes.faulted)
    ended = f"{episodes.done:,} done   {episodes.truncated:,} truncated   {episodes.aborted:,} aborted   {failed}"
    yield "episodes", f"{episodes.running:,} running   {ended}"
    # A start is busy, and no reason to change anything.
    if episodes.loop_share >= BUSY_LOOP_SHARE and episodes.num_kept:
        busy = f"{episodes.loop_share:.0%} of a core, calls wait up to {episodes.loop_delay_s:.2g} s"
        yield "env loop", f"{busy}: raise resources.env.num_workers"
    if len(snapshot.domains) > 1 and (domains := list(_format_domains(snapshot))):
        yield "domains", "   ".join(domains)
    if outcomes := list(_iter_outcomes(snapshot)):
        yield "outcomes", "   ".join(outcomes)
    yield "tokens", "   ".join(_format_tokens(snapshot))
    if snapshot.lengths:
        yield "lengths", "   ".join(_format_lengths(snapshot)) + " tokens"
    if snapshot.failed_tasks:
        newest = snapshot.failed_tasks[-1]
        yield "failed", f"{len(snapshot.failed_tasks):,} tasks abandoned   the last: {newest.group}: {newest.reason}"
    if trained := list(_iter_trained_shares(snapshot)):
        yield "trained", "   ".join(trained)
    yield "waiting", "   ".join(_format_waiting(snapshot))
    yield "weights", "   ".join(_format_weights(snapshot))


def _format_waiting(snapshot: CampaignSnapshot) -> Iterator[str]:
    """Yield what waits between the stages, and the role that the others wait for."""
    yield from (f"{spool.depth:,} in {spool.name}" for spool in snapshot.spools)
    if snapshot.state == "running" and (role := find_bottleneck(snapshot.roles, snapshot.spools)):
        yield f"bottleneck: {role}"


def _format_lengths(snapshot: CampaignSnapshot) -> Iterator[str]:
    """Yield the mean length and the 90th percentile of the episodes started, finished and trained."""
    for name, lengths in snapshot.lengths.items():
        yield f"{name} {lengths.mean:,.0f} (p90 {lengths.p90:,.0f})"


def _format_domains(snapshot: CampaignSnapshot) -> Iterator[str]:
    """Yield the recent reward of each domain, and the number of trajectories scored so far."""
    for name, domain in snapshot.domains.items():
        if domain.reward_recent is not None:
            num_recent = min(domain.scored, MAX_RECENT_REWARDS)
            yield f"{name} {domain.reward_recent:.3f} (last {num_recent:,} of {domain.scored:,})"


def _iter_outcomes(snapshot: CampaignSnapshot) -> Iterator[str]:
    """Yield how the episodes of each domain ended, where not all ended by themselves; what needs attention first."""
    failing = find_failing(snapshot)
    yield from failing
    for name, domain in snapshot.domains.items():
        shares = measure_outcomes(domain.outcomes)
        if set(shares) - {"finished"} and not any(text.startswith(f"{name} ") for text in failing):
            yield f"{name} {format_shares(shares)}"


def find_failing(snapshot: CampaignSnapshot) -> list[str]:
    """Describe the domains most of whose episodes failed."""
    return [
        f"{name} {format_shares(measure_outcomes(_mark_unscored(domain)))}: its program or its reward may be broken"
        for name, domain in snapshot.domains.items()
        if measure_failures(domain.outcomes) > MAX_FAILED_SHARE
    ]


def _mark_unscored(domain: DomainView) -> dict[str, int]:
    """Return the outcomes of a domain; where rewards fail, an episode without one is not known to be good."""
    if not (num_errors := domain.outcomes.get(OUTCOME_REWARD_ERROR)):
        return domain.outcomes
    good = {name: num for name, num in domain.outcomes.items() if name not in (*FAILURES, *ABORTED)}
    marked, num_left = {**domain.outcomes}, max(sum(good.values()) - max(domain.scored - num_errors, 0), 0)
    for name, num in good.items():
        num_moved = min(num, num_left)
        marked |= {name: num - num_moved, "unscored": marked.get("unscored", 0) + num_moved}
        num_left -= num_moved
    return marked


def format_shares(shares: Mapping[str, float]) -> str:
    return ", ".join(f"{share:.1%} {name}" for name, share in shares.items())


def _iter_trained_shares(snapshot: CampaignSnapshot) -> Iterator[str]:
    """Yield the share of each domain's tokens that is trained; of a low one with the reasons, and these first."""
    low_shares = find_low_shares(snapshot)
    yield from low_shares
    for name, domain in snapshot.domains.items():
        if domain.trained_share is not None and domain.trained_share >= MIN_TRAINED_SHARE:
            yield f"{name} {domain.trained_share:.1%} of tokens"


def find_low_shares(snapshot: CampaignSnapshot) -> list[str]:
    """Describe the domains of whose tokens too few are trained."""
    return [
        f"{name} only {domain.trained_share:.1%} of tokens: {explain_untrained(domain.token_fates)}"
        for name, domain in snapshot.domains.items()
        if domain.trained_share is not None and domain.trained_share < MIN_TRAINED_SHARE
    ]


def _format_tokens(snapshot: CampaignSnapshot) -> Iterator[str]:
    detail = snapshot.detail
    if not detail.num_tokens:
        yield "none yet"
        return
    suffix = "" if snapshot.state in {"running", "draining"} else " on average"
    yield f"{snapshot.tokens_per_s:,.0f}/s{suffix}"
    yield f"{_format_count(detail.num_tokens)} generated"
    if detail.remote_prefill_share is not None:
        yield f"{detail.remote_prefill_share:.0%} of turns prefilled remotely"


def _format_weights(snapshot: CampaignSnapshot) -> Iterator[str]:
    yield f"version {snapshot.version}"
    if snapshot.detail.engine_versions:
        oldest, newest = snapshot.detail.engine_versions
        yield f"engines serve {oldest}" if oldest == newest else f"engines serve {oldest} to {newest}"
    step = snapshot.detail.last_step
    if step is not None and step.lag_mean is not None:
        total = sum(step.lags.values())
        shares = ", ".join(f"{lag}: {num / total:.0%}" for lag, num in step.lags.items()) if total else ""
        yield f"lag {step.lag_mean:.2f}" + (f" ({shares})" if len(step.lags) > 1 else "")


def _format_learning(snapshot: CampaignSnapshot) -> Iterator[str]:
    step = snapshot.detail.last_step
    assert step is not None
    for name in ("loss", "kl", "entropy"):
        value = getattr(step, name)
        if value is not None:
            yield f"{name} {value:.3g}"
    if step.step_s is not None:
        yield f"{step.step_s:.1f} s a step" + (f", {step.wait_s:.1f} s waiting" if step.wait_s is not None else "")


def render_notes(snapshot: CampaignSnapshot, *, max_lines: int, long_lines: LongLines) -> RenderableType:
    grid = _make_grid(long_lines=long_lines)
    notes = snapshot.detail.notes
    newest_bad = next((note for note in reversed(notes) if note.bad), None) if long_lines == "cut" else None
    bad_line = escape_to_one_line(newest_bad.line) if newest_bad else ""
    num_bad_lines = min(len(bad_line) // NOTE_WIDTH + 1, max(max_lines - 1, 1)) if bad_line else 0
    shown = notes[-max(max_lines - max(num_bad_lines - 1, 0), 1) :]
    if newest_bad is not None and newest_bad not in shown:
        shown = [newest_bad, *shown[1:]]
    for note in shown:
        text = Text(escape_to_one_line(note.line), style="red" if note.bad else "")
        if note is newest_bad:  # its end is shown too: the reason is often there
            shortened = shorten_middle(bad_line, num_bad_lines * NOTE_WIDTH)
            text = Text(shortened, style="red", overflow="fold", no_wrap=False)
        grid.add_row(format_clock_time(note.time), text)
    return grid


def shorten_middle(text: str, max_chars: int) -> str:
    """Return a text of `max_chars` characters at most, with its start and its end."""
    if len(text) <= max_chars:
        return text
    num_end = (max_chars - 5) * 2 // 3
    return f"{text[: max_chars - 5 - num_end]} ... {text[len(text) - num_end :]}"


def _format_names(names: Sequence[str]) -> str:
    if len(names) <= 4:
        return " ".join(names) or "-"
    return f"{names[0]} {names[1]} .. {names[-1]} ({len(names):,})"


def _format_count(number: int) -> str:
    for unit, size in (("G", 10**9), ("M", 10**6), ("k", 10**4)):
        if number >= size:
            return f"{number / (1000 if unit == 'k' else size):.1f} {unit}"
    return f"{number:,}"


def _format_elapsed(seconds: float) -> str:
    minutes, whole = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    return (f"{days} d " if days else "") + f"{hours:02d}:{minutes:02d}:{whole:02d}"
