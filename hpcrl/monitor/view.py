"""A campaign on a terminal: one screen from 80x24 up, or plain lines where there is no terminal.

watch(collector, ...)        again and again       changes(old, new)    the plain lines: pure
show_once(snapshot, ...)     one frame             list_campaigns(runs) what `hpcrl ls` prints

All campaigns at a glance: their jobs' files and one question per Slurm, no events.
"""

import io
import itertools
import os
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence

import msgspec
from rich.console import Console, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from hpcrl.campaign_dir.paths import RunDir
from hpcrl.config.site import Site
from hpcrl.errors import SlurmError
from hpcrl.monitor.collect import Collector
from hpcrl.monitor.job_state import JobRecord, State, asked_of_slurm, beats, judge, read_as, read_jobs
from hpcrl.monitor.screen import HEIGHT, STYLES, clock, date, known, render, steps
from hpcrl.monitor.snapshot import Campaign, Snapshot
from hpcrl.slurm.status import JobStatus, job_states
from hpcrl.slurm.submit import site_environment


class Listed(msgspec.Struct, frozen=True, kw_only=True):
    """A line of `hpcrl ls`, and an object of `hpcrl ls --json`."""

    name: str
    site: str | None
    state: State
    created: float | str | None


def survey(runs: Iterable[RunDir], *, problems: list[str]) -> list[Listed]:
    """The campaigns in `runs`, in their order; what could not be read or asked is added to `problems`."""
    jobs = {run: read_jobs(run, problems=problems) for run in runs}
    statuses = _statuses(jobs, problems)
    return [_listed(run, jobs[run], statuses.get(run, {}), problems) for run in jobs]


def _listed(run: RunDir, jobs: list[JobRecord], statuses: Mapping[str, JobStatus], problems: list[str]) -> Listed:
    campaign = read_as(run.campaign, Campaign, problems) or Campaign(name=run.name)
    # Signs of life are only of use for a job that has not left its outcome.
    pulse = beats(run.events) if any(job.outcome is None for job in jobs) else {}
    state, _ = judge(run, jobs, statuses=statuses, events={}, beats=pulse, now=time.time())
    return Listed(name=campaign.name, site=campaign.site, state=state, created=campaign.created)


def _statuses(jobs: Mapping[RunDir, list[JobRecord]], problems: list[str]) -> dict[RunDir, dict[str, JobStatus]]:
    """What Slurm says, asked once for all campaigns of one Slurm (the lab is another than the machine's own)."""
    asked: dict[str | None, tuple[Site, dict[RunDir, list[str]]]] = {}
    for run, records in jobs.items():
        ids = asked_of_slurm(records)
        site = read_as(run.site, Site, problems) if ids else None
        if site is not None:
            asked.setdefault(site.slurm_conf, (site, {}))[1][run] = ids
    found: dict[RunDir, dict[str, JobStatus]] = {}
    for site, ids_of in asked.values():
        try:
            answer = job_states([*itertools.chain(*ids_of.values())], env=os.environ | site_environment(site))
        except SlurmError as error:
            problems.append(str(error))
            continue
        found |= {run: {job: answer[job] for job in ids} for run, ids in ids_of.items()}
    return found


ENDED = frozenset({"done", "failed", "stopped"})
LINE_EVERY_STEPS = 25
LINES_PER_CAMPAIGN = 20


def watch(collector: Collector, *, console: Console, until_done: bool, interval_s: float = 1.0) -> Snapshot:
    """Show a campaign until it ends (or for ever); Ctrl-C stops the watching and not the campaign."""
    snapshots = _polled(collector, until_done=until_done, interval_s=interval_s)
    _never_choke(console)
    show = _show_live if console.is_terminal else _show_lines
    return show(snapshots, console)


def show_once(snapshot: Snapshot, *, console: Console) -> None:
    """Print one frame."""
    _never_choke(console)
    console.print(render(snapshot, height=max(console.height - 1, HEIGHT - 1)))  # a prompt follows


def changes(old: Snapshot | None, new: Snapshot) -> list[str]:
    """Plain lines that tell what is new: notes, a new state, and a line every few steps."""
    lines = []
    num_new = new.detail.num_notes - (old.detail.num_notes if old else 0)
    for note in new.detail.notes[-num_new:] if num_new else []:
        lines.append(f"{clock(note.time)} {note.text}")
    every = max(1, min((new.num_steps or 1) // LINES_PER_CAMPAIGN, LINE_EVERY_STEPS))
    if old is None or old.state != new.state or old.step // every != new.step // every:
        lines.append(f"{clock(new.detail.now)} {_in_one_line(new)}")
    return lines


def list_campaigns(runs: Iterable[RunDir], *, as_json: bool) -> int:
    """Print all campaigns, and to stderr what could not be found out."""
    problems: list[str] = []
    listed = survey(runs, problems=problems)
    if as_json:
        sys.stdout.write((msgspec.json.format(msgspec.json.encode(listed), indent=2) + b"\n").decode())
    else:
        console = Console(highlight=False)
        _never_choke(console)
        console.print(_listing(listed) if listed else "no campaigns yet: `hpcrl submit` starts one", soft_wrap=True)
    for problem in dict.fromkeys(problems):
        print(problem, file=sys.stderr)  # noqa: T201 - beside the answer, not in it
    return 0


def _never_choke(console: Console) -> None:
    """A terminal that cannot show a character gets a question mark, not a UnicodeEncodeError."""
    if isinstance(console.file, io.TextIOWrapper):
        console.file.reconfigure(errors="replace")


def _polled(collector: Collector, *, until_done: bool, interval_s: float) -> Iterator[Snapshot]:
    while True:
        snapshot = collector.poll()
        yield snapshot
        if until_done and snapshot.state in ENDED:
            return
        time.sleep(interval_s)


def _show_live(snapshots: Iterator[Snapshot], console: Console) -> Snapshot:
    snapshot = next(snapshots)
    try:
        with Live(render(snapshot, height=console.height), console=console, auto_refresh=False) as live:
            for snapshot in snapshots:
                live.update(render(snapshot, height=console.height), refresh=True)
    except KeyboardInterrupt:
        _say_that_it_goes_on(snapshot, console)
    return snapshot


def _show_lines(snapshots: Iterator[Snapshot], console: Console) -> Snapshot:
    last: Snapshot | None = None
    try:
        for snapshot in snapshots:
            for line in changes(last, snapshot):
                console.print(line, markup=False, highlight=False, soft_wrap=True)
            last = snapshot
    except KeyboardInterrupt:
        if last is None:
            raise
        _say_that_it_goes_on(last, console)
    assert last is not None
    return last


def _say_that_it_goes_on(snapshot: Snapshot, console: Console) -> None:
    if snapshot.state in ENDED:
        return
    name = snapshot.name
    line = f"{name} goes on: `hpcrl monitor {name}` shows it again, `hpcrl stop {name}` ends it"
    console.print(line, markup=False, highlight=False, soft_wrap=True)


def _in_one_line(snapshot: Snapshot) -> str:
    parts = [f"{snapshot.state:<8} step {steps(snapshot)}"]
    rewards = known(snapshot.reward_mean)
    if rewards:
        parts.append(f"reward {rewards[-1]:.3f}")
    episodes = snapshot.episodes
    parts += [f"version {snapshot.version}", f"{episodes.done:,} episodes", f"{snapshot.tokens_per_s:,.0f} tokens/s"]
    if episodes.faulted:
        parts.append(f"{episodes.faulted:,} faulted")
    if snapshot.detail.reason:
        parts.append(snapshot.detail.reason)
    return "  ".join(parts)


def _listing(listed: Sequence[Listed]) -> RenderableType:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    for heading in ("name", "site", "state", "created"):
        table.add_column(heading, no_wrap=True, overflow="ellipsis")
    for line in listed:
        created = date(line.created) if isinstance(line.created, float) else str(line.created or "?")
        state = Text(line.state, style=STYLES[line.state])
        table.add_row(Text(line.name), Text(line.site or "?"), state, created)
    return table
