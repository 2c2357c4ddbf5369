"""Show a campaign on a terminal: one screen from 80x24 up, or plain lines without a terminal.

watch_campaign      show a campaign until it ends
pace_looks, pay_for_look, choose_pause, SnapshotSource    look at it as often as is cheap
show_frames         show its snapshots on a terminal, one after another
show_snapshot       print one frame
describe_changes    the plain lines between two snapshots: pure
print_campaigns, survey_campaigns, CampaignLine    all campaigns, from their jobs' files and one query per Slurm
render_campaigns    their list
MAX_STEPS_PER_LINE, LINES_PER_CAMPAIGN, LINES_PER_START    how much is printed
MIN_TABLE_WIDTH    how reasons are listed
FRAME_INTERVAL_S, CLOCK_INTERVAL_S, MAX_PAUSE_S, MAX_LOOK_SHARE, MAX_CLOCK_SHARE, MAX_NEWS_SHARE    how often
"""

import contextlib
import io
import itertools
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Protocol

import msgspec
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from hpcrl.campaign_dir.campaign_format import describe_newer_format
from hpcrl.campaign_dir.job_end import MAX_REASON_CHARS
from hpcrl.campaign_dir.paths import CampaignDir
from hpcrl.config.site import Site
from hpcrl.errors import SlurmError
from hpcrl.monitor.advisories import describe_advisory
from hpcrl.monitor.collect import SnapshotCollector
from hpcrl.monitor.job_state import (
    FINAL_STATES,
    CampaignState,
    JobRecord,
    describe_lost_jobs,
    judge_jobs,
    read_ended_jobs,
    read_heartbeats,
    read_jobs,
    read_json_as,
    select_slurm_ids,
)
from hpcrl.monitor.keys import KeyReader, open_keys
from hpcrl.monitor.pages import CampaignPages
from hpcrl.monitor.screen import (
    find_failing,
    find_low_shares,
    format_clock_time,
    format_date,
    format_state,
    format_step_count,
    render_frame,
)
from hpcrl.monitor.snapshot import CampaignSnapshot, CampaignSummary, measure_change
from hpcrl.slurm.status import JobStatus, query_job_states
from hpcrl.slurm.submit import make_site_environment
from hpcrl.spool.outcome import format_failed
from hpcrl.system.terminal import PIPE_WIDTH, escape_to_one_line, make_console, print_json


class CampaignLine(msgspec.Struct, frozen=True, kw_only=True):
    """A line of `hpcrl ls`, and an object of `hpcrl ls --json`."""

    name: str
    site: str | None
    state: CampaignState
    created: float | str | None
    reason: str = ""
    """The reason for its state; empty for one that is done and has trained everything."""
    is_partial: bool = False
    """It made every step, but a domain trained nothing."""


def survey_campaigns(campaign_dirs: Iterable[CampaignDir], *, problems: list[str]) -> list[CampaignLine]:
    """Return a line for each campaign, in order; files and queries that fail are added to `problems`."""
    jobs: dict[CampaignDir, list[JobRecord]] = {}
    for campaign_dir in campaign_dirs:
        unreadable: list[str] = []
        jobs[campaign_dir] = read_jobs(campaign_dir, problems=unreadable)
        problems += [f"campaign {campaign_dir.name}: {problem}" for problem in unreadable]
    statuses = _query_statuses(jobs, problems)
    return [
        _read_campaign_line(campaign_dir, jobs[campaign_dir], statuses.get(campaign_dir, {}), problems)
        for campaign_dir in jobs
    ]


def _read_campaign_line(
    campaign_dir: CampaignDir, jobs: list[JobRecord], statuses: Mapping[str, JobStatus], problems: list[str]
) -> CampaignLine:
    jobs = read_ended_jobs(jobs, statuses)
    unreadable: list[str] = []
    summary = read_json_as(campaign_dir.manifest, CampaignSummary, unreadable)
    problems += [f"campaign {campaign_dir.name}: {problem}" for problem in unreadable]
    problems += filter(None, [describe_newer_format(campaign_dir)])
    if summary is None:
        summary = CampaignSummary(name=campaign_dir.name)
    # Heartbeats matter only for a job that has no outcome yet.
    heartbeats = read_heartbeats(campaign_dir.events) if any(job.outcome is None for job in jobs) else {}
    state, verdicts = judge_jobs(
        campaign_dir, jobs, statuses=statuses, events={}, heartbeats=heartbeats, now=time.time()
    )
    end = verdicts[-1].record.outcome if verdicts and state == "done" else None
    is_partial = end is not None and end.is_partial
    is_early = end is not None and end.likely_cause == "goal-reached"  # before its last step
    reason = verdicts[-1].reason if verdicts and (state != "done" or is_partial or is_early) else ""
    if state == "unknown" and not verdicts:
        reason = describe_lost_jobs(campaign_dir)
    return CampaignLine(
        name=campaign_dir.name,
        site=summary.site,
        state=state,
        created=summary.created,
        reason=reason,
        is_partial=is_partial,
    )


def _query_statuses(
    jobs: Mapping[CampaignDir, list[JobRecord]], problems: list[str]
) -> dict[CampaignDir, dict[str, JobStatus]]:
    """Query each Slurm once for all its campaigns (the lab's Slurm is not the machine's)."""
    queries: dict[str | None, tuple[Site, dict[CampaignDir, list[str]]]] = {}
    for campaign_dir, records in jobs.items():
        ids = select_slurm_ids(records)
        site = read_json_as(campaign_dir.site, Site, problems) if ids else None
        if site is not None:
            queries.setdefault(site.slurm_conf, (site, {}))[1][campaign_dir] = ids
    statuses: dict[CampaignDir, dict[str, JobStatus]] = {}
    for site, ids_by_campaign in queries.values():
        try:
            answer = query_job_states(
                [*itertools.chain(*ids_by_campaign.values())], env=os.environ | make_site_environment(site)
            )
        except SlurmError as error:
            problems.append(str(error))
            continue
        statuses |= {campaign_dir: {job: answer[job] for job in ids} for campaign_dir, ids in ids_by_campaign.items()}
    return statuses


MAX_STEPS_PER_LINE = 25
LINES_PER_CAMPAIGN = 20
LINES_PER_START = 8
MIN_TABLE_WIDTH = 80
"""The width from which on the list of campaigns has a column of reasons."""
FRAME_INTERVAL_S = 0.25
"""The shortest time between two looks at a campaign."""
MAX_LOOK_SHARE = 0.0125
"""The share of a core that looks may use: those at many workers that write all the time are rarer."""
MAX_PAUSE_S = 5.0
CLOCK_INTERVAL_S = 1.0
"""The shortest time between two drawings of a screen on which little but counts and the clock has changed."""
MAX_CLOCK_SHARE, MAX_NEWS_SHARE = 0.005, 0.05
"""The share of a core that such drawings may use, and that those of news may: a step, a note, a worker that ended."""


def watch_campaign(
    collector: SnapshotCollector,
    *,
    console: Console,
    until_done: bool,
    interval_s: float = FRAME_INTERVAL_S,
    traj_command: Sequence[str] = (),
) -> CampaignSnapshot:
    """Show a campaign until it ends (or forever); q or Ctrl-C stop watching, not the campaign.

    The command lists its newest trajectories as JSON, for the page that shows them.
    """
    _replace_unprintable(console)
    pages = CampaignPages(collector, traj_command=traj_command)
    with open_keys(is_wanted=console.is_terminal) as keys, contextlib.closing(pages):
        snapshots = pace_looks(collector, interval_s=interval_s, wait=keys.wait, until_done=until_done)
        return show_frames(snapshots, console, keys, pages) if console.is_terminal else _show_lines(snapshots, console)


def show_snapshot(snapshot: CampaignSnapshot, *, console: Console) -> None:
    """Print one frame with every text whole, also where it is longer than the terminal, which scrolls."""
    _replace_unprintable(console)
    if console.is_terminal:
        console.print(render_frame(snapshot))
    else:
        _print_stripped(render_frame(snapshot), console)


def _print_stripped(shown: RenderableType, console: Console) -> None:
    """Print without the blanks that pad tables, which a file need not have."""
    with console.capture() as capture:
        console.print(shown)
    for line in capture.get().splitlines():
        console.print(line.rstrip(), markup=False, highlight=False, soft_wrap=True)


def describe_changes(old: CampaignSnapshot | None, new: CampaignSnapshot) -> list[str]:
    """Return plain lines for what is new: notes, a new state, a line every few steps, new advisories and problems."""
    lines = []
    num_known = old.detail.num_notes if old else 0
    for note in sorted(new.detail.notes, key=lambda note: note.number):
        if note.number > num_known:
            lines.append(f"{format_clock_time(note.time)} {note.line}")
    steps_per_line = max(1, min((new.num_steps or 1) // LINES_PER_CAMPAIGN, MAX_STEPS_PER_LINE))
    weak = _describe_weak_domains(new)
    if old is None or old.state != new.state:
        summary = "  ".join([_format_summary_line(new), *weak.values(), *filter(None, [new.detail.reason])])
        lines.append(f"{format_clock_time(new.detail.now)} {summary}")
    else:
        if old.step // steps_per_line != new.step // steps_per_line or _is_far_from(old, new):
            lines.append(f"{format_clock_time(new.detail.now)} {_format_summary_line(new)}")
        known_weak = _describe_weak_domains(old)
        lines += [
            f"{format_clock_time(new.detail.now)} {text}" for name, text in weak.items() if name not in known_weak
        ]
    known = {(advisory.name, advisory.subject) for advisory in old.advisories} if old else set()
    lines += [
        f"{format_clock_time(new.detail.now)} {advisory.severity}: {describe_advisory(advisory)}"
        for advisory in new.advisories
        if (advisory.name, advisory.subject) not in known
    ]
    lines += [
        f"{format_clock_time(new.detail.now)} {problem}"
        for problem in new.detail.problems
        if old is None or problem not in old.detail.problems
    ]
    return lines


def print_campaigns(
    campaign_dirs: Iterable[CampaignDir], *, as_json: bool, home: str = "", site: str | None = None
) -> int:
    """Print all campaigns, or those of a site, and problems to stderr; without any, where they would be."""
    problems: list[str] = []
    found = survey_campaigns(campaign_dirs, problems=problems)
    lines = [line for line in found if site is None or line.site == site]
    if as_json:
        print_json(lines)
    else:
        _print_list(lines, home=home, site=site)
    for problem in dict.fromkeys(problems):
        print(problem, file=sys.stderr)  # noqa: T201 - beside the answer, not in it
    return 0


def _print_list(lines: Sequence[CampaignLine], *, home: str, site: str | None) -> None:
    longest = max((len(escape_to_one_line(_shorten_reason(line.reason))) for line in lines), default=0)
    console = make_console(pipe_width=PIPE_WIDTH + longest)  # a pipe gets a line for each campaign
    listed = render_campaigns(lines, width=console.width)
    if not lines and site is not None:
        console.print(f"no campaigns of site {escape_to_one_line(site)}: `hpcrl ls` lists all", soft_wrap=True)
    elif not lines:
        place = f" in $HPCRL_HOME ({escape_to_one_line(home)})" if home else ""
        console.print(f"no campaigns yet{place}: `hpcrl submit` starts one", soft_wrap=True)
    elif console.is_terminal:
        console.print(listed, soft_wrap=True)
    else:
        _print_stripped(listed, console)


def _replace_unprintable(console: Console) -> None:
    """Make a terminal show a question mark for a character it does not support, not raise UnicodeEncodeError."""
    if isinstance(console.file, io.TextIOWrapper):
        console.file.reconfigure(errors="replace")


class SnapshotSource(Protocol):
    """A source of the state of a campaign now."""

    def look(self) -> bool: ...

    def build(self) -> CampaignSnapshot: ...


def pace_looks(
    source: SnapshotSource, *, interval_s: float, wait: Callable[[float], None], until_done: bool = False
) -> Iterator[CampaignSnapshot]:
    """Yield the state of a campaign after every look at it: the same one until it has changed, or is old.

    Looks, and states with what the caller does with them, are as frequent as their shares of a core allow.
    """
    look_at = paid_until = due_at = built_at = float("-inf")
    state_s = 0.0
    while True:
        if time.monotonic() >= look_at:  # otherwise a key ended the wait
            started = time.process_time()
            if source.look():
                due_at = min(due_at, built_at + choose_pause(state_s, share=MAX_NEWS_SHARE, interval_s=0.0))
            looked_at = time.monotonic()
            paid_until = pay_for_look(time.process_time() - started, now=looked_at, paid_until=paid_until)
            look_at = max(looked_at + interval_s, paid_until)
        if time.monotonic() >= due_at:
            started = time.process_time()
            snapshot = source.build()
            yield snapshot
            state_s, built_at = time.process_time() - started, time.monotonic()
            due_at = built_at + choose_pause(state_s, share=MAX_CLOCK_SHARE, interval_s=CLOCK_INTERVAL_S)
        else:
            yield snapshot
        if until_done and snapshot.state in FINAL_STATES:
            return
        wait(max(0.0, look_at - time.monotonic()))


def pay_for_look(spent_s: float, *, now: float, paid_until: float) -> float:
    """Return the time until which looks have used their share of a core: one that takes long uses what others left."""
    return max(paid_until, now - MAX_PAUSE_S) + min(spent_s / MAX_LOOK_SHARE, MAX_PAUSE_S)


def choose_pause(spent_s: float, *, share: float, interval_s: float) -> float:
    """Return the time until something is done again that took this CPU time."""
    return max(interval_s, min(spent_s / share, MAX_PAUSE_S))


def show_frames(
    snapshots: Iterator[CampaignSnapshot], console: Console, keys: KeyReader, pages: CampaignPages
) -> CampaignSnapshot:
    first = snapshot = next(snapshots)
    try:
        with Live(console=console, auto_refresh=False) as live:
            drawn, last = None, None
            for snapshot in itertools.chain([first], snapshots):
                shown = (keys.page, keys.num_roles_passed, console.size)
                if snapshot is last and shown == drawn:
                    continue
                height = console.height - 1  # a frame that fills the screen leaves its first line behind
                live.update(pages.render(snapshot, keys=keys, height=height), refresh=True)
                drawn, last = shown, snapshot
    except KeyboardInterrupt:
        _print_still_running(snapshot, console)
    return snapshot


def _show_lines(snapshots: Iterator[CampaignSnapshot], console: Console) -> CampaignSnapshot:
    last: CampaignSnapshot | None = None
    try:
        for snapshot in snapshots:
            for line in describe_changes(last, snapshot) if snapshot is not last else ():
                console.print(escape_to_one_line(line), markup=False, highlight=False, soft_wrap=True)
            last = snapshot
    except KeyboardInterrupt:
        if last is None:
            raise
        _print_still_running(last, console)
    assert last is not None
    return last


def _print_still_running(snapshot: CampaignSnapshot, console: Console) -> None:
    if snapshot.state in FINAL_STATES:
        return
    name = snapshot.name
    line = f"{name} continues: `hpcrl monitor {name}` shows it again, `hpcrl stop {name}` ends it"
    console.print(line, markup=False, highlight=False, soft_wrap=True)


def _format_summary_line(snapshot: CampaignSnapshot) -> str:
    parts = [f"{snapshot.state_word:<8} step {format_step_count(snapshot)}"]
    if reward := measure_change(snapshot.reward_mean):
        parts.append(f"reward {reward.last:.3f}")
    episodes, loss = snapshot.episodes, measure_change(snapshot.detail.losses)
    if starting := _count_starting(snapshot):
        parts.append(f"{starting[0]} of {starting[1]} workers have started")
    elif snapshot.has_rollouts:
        speed = f"{snapshot.tokens_per_s:,.0f} tokens/s"
        parts += [f"version {snapshot.version}", f"{episodes.num_kept:,} episodes", speed]
    elif loss:
        parts.append(f"loss {loss.last:.3f}")
    if episodes.failed:
        parts.append(format_failed(num_failed=episodes.failed, num_lost=episodes.faulted))
    return "  ".join(parts)


def _describe_weak_domains(snapshot: CampaignSnapshot) -> dict[tuple[str, str], str]:
    """Describe the domains that need a look, by what is low and their names: each is a line once."""
    found = {"trained": find_low_shares(snapshot), "outcomes": find_failing(snapshot)}
    return {(what, text.partition(" ")[0]): f"{what}: {text}" for what, texts in found.items() for text in texts}


def _count_starting(snapshot: CampaignSnapshot) -> tuple[int, int] | None:
    """Count the workers that have started, and all; None once all have, or a step was made."""
    roles = [view for role, view in snapshot.roles.items() if role != "reward"]  # these start when there is work
    started, planned = sum(view.alive for view in roles), sum(view.workers for view in roles)
    is_starting = snapshot.state == "running" and not snapshot.step and started < planned
    return (started, planned) if is_starting else None


def _is_far_from(old: CampaignSnapshot, new: CampaignSnapshot) -> bool:
    """Return whether a separate line shows that more workers have started: a few lines for any number of them."""
    before, after = _count_starting(old), _count_starting(new)
    if before is None or after is None:
        return before != after
    return before[0] * LINES_PER_START // before[1] != after[0] * LINES_PER_START // after[1]


def render_campaigns(lines: Sequence[CampaignLine], *, width: int) -> RenderableType:
    """Render the list of campaigns; reasons are a column, or lines below the list if that is too narrow for one."""
    with_reason = [line for line in lines if line.reason]
    if width >= MIN_TABLE_WIDTH:
        return _build_campaign_table(lines, width=width, has_reasons=bool(with_reason))
    below = [Text(escape_to_one_line(f"{line.name}: {_shorten_reason(line.reason)}")) for line in with_reason]
    return Group(_build_campaign_table(lines, width=width), *below)


def _shorten_reason(reason: str) -> str:
    return reason if len(reason) <= MAX_REASON_CHARS else f"{reason[:MAX_REASON_CHARS]}..."


def _build_campaign_table(lines: Sequence[CampaignLine], *, width: int, has_reasons: bool = False) -> RenderableType:
    """Build the list; the date and the site are left out where they do not fit, the name is for the next command."""
    columns = {
        "name": [Text(escape_to_one_line(line.name)) for line in lines],
        "site": [Text(escape_to_one_line(line.site or "?")) for line in lines],
        "state": [format_state(line.state, is_partial=line.is_partial) for line in lines],
        "created": [Text(escape_to_one_line(_format_creation(line))) for line in lines],
    }
    needed = {name: max([len(name), *(text.cell_len for text in texts)]) for name, texts in columns.items()}
    for name in ("created", "site"):
        if not has_reasons and sum(needed.values()) + 2 * (len(needed) - 1) > width:
            del needed[name], columns[name]
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    for name in columns:
        is_whole = name in ("name", "state")
        table.add_column(name, no_wrap=True, overflow="ellipsis", min_width=needed[name] if is_whole else None)
    if has_reasons:
        table.add_column("reason", overflow="fold")
        columns["reason"] = [Text(escape_to_one_line(_shorten_reason(line.reason))) for line in lines]
    for cells in zip(*columns.values(), strict=True):
        table.add_row(*cells)
    return table


def _format_creation(line: CampaignLine) -> str:
    return format_date(line.created) if isinstance(line.created, float) else str(line.created or "?")
