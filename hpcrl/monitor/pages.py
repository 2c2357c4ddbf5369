"""Render the page of a campaign that a key has chosen; none is taller than the terminal.

CampaignPages        renders the pages of a campaign, and reads what they show besides the snapshot
find_newest_log      the log of a role that was written last
TrajectoryListing    the newest trajectories, listed by another process
LIST_INTERVAL_S, LOG_INTERVAL_S    how often they are read
"""

import math
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Literal

import msgspec
from rich.console import Group, RenderableType
from rich.text import Text

from hpcrl.campaign_dir.paths import CampaignDir
from hpcrl.errors import CampaignError
from hpcrl.monitor.advisories import Advisory
from hpcrl.monitor.collect import SnapshotCollector
from hpcrl.monitor.keys import HELP_LINES, KEY_HINT, KeyReader
from hpcrl.monitor.log_tail import ROLE_LOGS, list_role_logs, read_last_lines
from hpcrl.monitor.screen import SEVERITY_STYLES, render_header, render_notes, render_screen
from hpcrl.monitor.screen_parts import FittedScreen, FittedTable
from hpcrl.monitor.snapshot import CampaignSnapshot
from hpcrl.monitor.workers import RoleWorkers, list_workers
from hpcrl.spool.list_line import ListLine
from hpcrl.system.terminal import (
    STATUS_STYLES,
    escape_to_one_line,
    format_age,
    format_number,
    format_versions,
)

LIST_INTERVAL_S = 10.0
"""The age of the list of trajectories from which on it is read again while it is shown."""
LOG_INTERVAL_S = 5.0
"""The time between two searches for the log of a role that was written last."""
_WORKER_COLUMNS = ("busy", "running", "queue", "tokens/s", "kv", "version", "step", "done", "faulted", "loop")
_TRAJECTORY_COLUMNS = ("reward", "turns", "tokens", "age", "versions")
_MAX_PROBLEM_CHARS = 500


class TrajectoryListing:
    """The newest trajectories, listed by another process: reading them needs packages and takes a while."""

    def __init__(self, command: Sequence[str]) -> None:
        """List with a command that prints JSON; without one nothing is listed."""
        self.lines: list[ListLine] | None = None
        self.problem = "" if command else "no interpreter here reads trajectories: pip install 'hpcrl[local]'"
        self._command = command
        self._process: subprocess.Popen[bytes] | None = None
        self._outputs: list[IO[bytes]] = []
        self._listed_at = -math.inf

    def refresh(self) -> None:
        """Take what the process has listed; start it if the list is old."""
        if self._process is None:
            if self._command and time.monotonic() - self._listed_at > LIST_INTERVAL_S:
                self._start_process()
        elif self._process.poll() is not None:
            self._read_outputs(self._process.returncode)

    def close(self) -> None:
        """End the process, if it still lists."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        for output in self._outputs:
            output.close()

    def _start_process(self) -> None:
        self._listed_at = time.monotonic()
        out, errors = self._outputs = [tempfile.TemporaryFile(), tempfile.TemporaryFile()]  # noqa: SIM115
        try:
            self._process = subprocess.Popen(
                self._command, stdin=subprocess.DEVNULL, stdout=out, stderr=errors, start_new_session=True
            )
        except OSError as error:
            self.problem = f"{self._command[0]} cannot be run here: {error.strerror}"

    def _read_outputs(self, code: int) -> None:
        texts = []
        for output in self._outputs:
            output.seek(0)
            texts.append(output.read())
            output.close()
        lines = texts[1].decode(errors="replace").strip().splitlines()
        self.problem = escape_to_one_line(lines[-1])[:_MAX_PROBLEM_CHARS] if lines else ""
        try:
            self.lines = msgspec.json.decode(texts[0], type=list[ListLine])
        except msgspec.DecodeError:
            self.problem = self.problem or f"the list of trajectories ended with code {code}"
        self._process, self._listed_at = None, time.monotonic()


class CampaignPages:
    """The pages of one campaign."""

    def __init__(self, collector: SnapshotCollector, *, traj_command: Sequence[str] = ()) -> None:
        """Render pages of the campaign of a collector; the command lists its trajectories as JSON."""
        self._collector = collector
        self._listing = TrajectoryListing(traj_command)
        self._log: Path | None = None
        self._log_role = ""
        self._log_found_at = -math.inf

    def render(self, snapshot: CampaignSnapshot, *, keys: KeyReader, height: int) -> RenderableType:
        """Render the page that was chosen; the last line names the keys, if there are any."""
        left = height - keys.has_keys
        if keys.page == "overview":
            page = render_screen(snapshot, height=left)
        else:
            page = self._render_page(snapshot, keys, height=left)
        footer = Text(KEY_HINT, style="dim", no_wrap=True, overflow="ellipsis")
        return Group(page, footer) if keys.has_keys else page

    def close(self) -> None:
        self._listing.close()

    def _render_page(self, snapshot: CampaignSnapshot, keys: KeyReader, *, height: int) -> RenderableType:
        top: list[RenderableType] = [render_header(snapshot)]
        body: list[RenderableType] = []
        kept: Literal["start", "end"] = "start"
        match keys.page:
            case "advisories":
                texts = [_explain_advisory(advisory) for advisory in snapshot.advisories]
                body += texts or [Text("no rule found anything wrong")]
            case "events":
                body.append(render_notes(snapshot, max_lines=height, long_lines="wrapped"))
                kept = "end"
            case "roles":
                role, choice = _choose_role(list(snapshot.roles), keys)
                top.append(choice)
                body += _render_workers(list_workers(self._collector.inputs, role))
            case "logs":
                role, choice = _choose_role([*ROLE_LOGS, *snapshot.roles], keys)
                title, lines = self._read_log(role, num_lines=height)
                top += [choice, Text(title, style="dim", no_wrap=True, overflow="ellipsis")]
                body.append(Text("\n".join(lines), overflow="fold"))
                kept = "end"
            case "trajectories":
                self._listing.refresh()
                body += _render_trajectories(self._listing)
            case _:
                body += map(Text, HELP_LINES)
        return FittedScreen(lambda _: top, lambda _: Group(*body), height=height, kept=kept)

    def _read_log(self, role: str, *, num_lines: int) -> tuple[str, list[str]]:
        """Return the name and the last lines of the log of a role that was written last."""
        if role != self._log_role or time.monotonic() - self._log_found_at > LOG_INTERVAL_S:
            self._log, self._log_role = find_newest_log(self._collector.campaign_dir, role), role
            self._log_found_at = time.monotonic()
        if self._log is None:
            return f"{role} has no log yet", []
        try:
            lines, _ = read_last_lines(self._log, num_lines)
        except CampaignError as error:
            return str(error), []
        return f"{self._log.name}" + ("" if lines else " (empty)"), lines


def find_newest_log(campaign_dir: CampaignDir, role: str) -> Path | None:
    """Return the log of a role in the last job that has logs: of several the one that was written last."""
    for number in reversed(campaign_dir.job_numbers()):
        logs = list_role_logs(campaign_dir.job(number), role)
        if logs:
            return max(logs, key=_read_write_time)
    return None


def _read_write_time(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:  # gone
        return 0.0


def _explain_advisory(advisory: Advisory) -> Text:
    text = Text(f"{advisory.severity}: {escape_to_one_line(advisory.text)}\n", style=SEVERITY_STYLES[advisory.severity])
    figures = f"{advisory.figure:.3g}, threshold {advisory.threshold:.3g} ({advisory.unit})"
    for label, value in (("figure", figures), ("cause", advisory.cause), ("to do", advisory.remedy)):
        text.append(f"  {label:<8}{escape_to_one_line(value)}\n", style="not bold default")
    return text


def _choose_role(roles: Sequence[str], keys: KeyReader) -> tuple[str, Text]:
    """Return the role that is shown, and a line that names all."""
    place = keys.num_roles_passed % len(roles) if roles else 0
    line = Text("n next role:", style="dim")
    for number, role in enumerate(roles):
        line.append(" ").append(f"[{role}]" if number == place else role, style="bold" if number == place else "dim")
    return (roles[place] if roles else ""), line


def _render_workers(found: RoleWorkers) -> Iterator[RenderableType]:
    if not found.workers:
        text = f"no worker of role {found.role} has started" if found.role else "the plan has no roles"
        yield Text(f"{text}: {found.note}" if found.note else text)
        return
    num_alive = sum(view.is_alive for view in found.workers)
    yield Text(f"{num_alive:,} of {len(found.workers):,} workers of role {found.role} are alive")
    if found.num_failures:
        text = f"failures in this job: {found.num_failures:,}; the last: {found.last_failure}"
        yield Text(escape_to_one_line(text), style="red", overflow="fold")
    rows = [{"worker": view.name, "node": view.node, "state": view.state, **view.load} for view in found.workers]
    styles = [{} if view.is_alive else {"state": "red"} for view in found.workers]
    yield FittedTable(rows, texts=("worker", "node", "state"), numbers=_WORKER_COLUMNS, styles=styles)


def _render_trajectories(listing: TrajectoryListing) -> Iterator[RenderableType]:
    if listing.problem:
        yield Text(listing.problem, style="magenta", overflow="fold")
    if listing.lines is None:
        yield Text("" if listing.problem else "the newest trajectories are being read ...")
        return
    if not listing.lines:
        yield Text("no trajectories yet")
        return
    rows = [
        {
            "id": line.id,
            "status": line.status,
            "reward": format_number(line.reward),
            "turns": f"{line.num_turns:,}",
            "tokens": f"{line.num_tokens:,}",
            "age": format_age(line.created),
            "versions": format_versions(line.start_version, line.end_version),
        }
        for line in listing.lines
    ]
    styles = [{"status": STATUS_STYLES.get(line.status, "")} for line in listing.lines]
    yield FittedTable(rows, texts=("id", "status"), numbers=_TRAJECTORY_COLUMNS, styles=styles)
