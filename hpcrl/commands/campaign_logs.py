"""Print the logs of a campaign's last job, and its events, oldest first, and follow both: `hpcrl logs`, `hpcrl events`.

show_logs        print the last lines of each log of a role
follow_logs      continue with what is added, until the job ends
list_events      print the newest events, and with `follow` those that are added
format_event     an event as a line for a person, whole or for a terminal
FOLLOW_INTERVAL_S    the time between two looks
MAX_EVENT_LINES      the lines of a terminal that the figures of an event may fill
"""

import argparse
import heapq
import json
import os
import shutil
import sys
import time
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import msgspec

from hpcrl.campaign import directory
from hpcrl.campaign_dir.event_log import EVENT_SUFFIX, EventReader
from hpcrl.campaign_dir.events import CampaignEvent, describe_event, parse_event
from hpcrl.campaign_dir.paths import CampaignDir, JobDir, drop_job, parse_role
from hpcrl.config.toml import suggest_name
from hpcrl.errors import CampaignError, ConfigError
from hpcrl.monitor.log_tail import ROLE_LOGS, list_role_logs, read_from, read_last_lines, split_lines
from hpcrl.system.terminal import (
    escape_to_one_line,
    format_timestamp,
    is_terminal,
    print_json_text,
    print_line,
    print_to_stderr,
    show_wait,
)

FOLLOW_INTERVAL_S = 0.5
MAX_EVENT_LINES = 2
_MAX_SHOWN_VALUES = 8
"""The length up to which a list is shown."""
_COMMON = frozenset({"event", *CampaignEvent.__struct_fields__})


def run_logs(arguments: argparse.Namespace) -> int:
    campaign = directory.find_campaign(arguments.campaign)
    show_logs(campaign, role=arguments.role, num_lines=arguments.lines, follow=arguments.follow)
    return 0


def run_events(arguments: argparse.Namespace) -> int:
    list_events(
        directory.find_campaign(arguments.campaign),
        kinds=arguments.kind,
        roles=arguments.role,
        limit=arguments.limit,
        as_json=arguments.json,
        follow=arguments.follow,
    )
    return 0


def show_logs(campaign: CampaignDir, *, role: str | None, num_lines: int, follow: bool = False) -> None:
    """Print the last lines of each log of a role (None: of all) of the last job that has logs."""
    if num_lines < 0:
        raise ConfigError(f"-n {num_lines}: give the number of lines of each log to show")
    jobs = directory.list_jobs(campaign)
    job = next((job for job in reversed(jobs) if any(job.logs.glob("*.log"))), jobs[-1])  # the last may be queued
    _check_listable(job.logs)
    logs = _find_logs(job, role)
    offsets: dict[Path, int] = {}
    for path in logs:
        lines, offsets[path] = read_last_lines(path, num_lines)
        print_line(f"== {path}" + ("" if offsets[path] else " (empty)"))
        for line in lines:
            print_line(line)
    if follow:
        follow_logs(job, role=role, offsets=offsets)


def follow_logs(job: JobDir, *, role: str | None, offsets: dict[Path, int]) -> None:
    """Print what is added to the logs, also to new ones, until the job has ended."""
    last: Path | None = None
    while True:
        has_ended = job.outcome.exists()
        for path in list_role_logs(job, role):
            text, offsets[path] = read_from(path, offsets.get(path, 0))
            if text and path != last:
                print_line(f"== {path}")
                last = path
            for line in split_lines(text):
                print_line(line)
        if has_ended:
            return
        time.sleep(FOLLOW_INTERVAL_S)


def _find_logs(job: JobDir, role: str | None) -> list[Path]:
    logs = list_role_logs(job, role)
    if logs:
        return logs
    named = {name: other for other, name in ROLE_LOGS.items()}
    stems = {path.stem.rpartition("-")[0] or path.stem for path in job.logs.glob("*.log")}
    present = sorted(named.get(stem, stem) for stem in stems)
    if not present:
        raise CampaignError(f"job {job.number} of {job.campaign.name} has no logs in {job.logs}")
    hint = suggest_name(role or "", present)
    raise CampaignError(
        f"job {job.number} of {job.campaign.name} has no log of {role!r}: {hint}it has {', '.join(present)}"
    )


def list_events(
    campaign: CampaignDir,
    *,
    kinds: Collection[str] = (),
    roles: Collection[str] = (),
    limit: int = 40,
    as_json: bool = False,
    follow: bool = False,
) -> None:
    """Print the newest `limit` events of these kinds and roles (0: all); with `follow`, until the job has ended."""
    if limit < 0:
        raise ConfigError(f"-n {limit}: give the number of events to show, or 0 for all")
    _check_kinds(kinds)
    _check_listable(campaign.events)
    if not follow:  # the role may start later
        _check_roles(campaign, roles)
    reader, shown = EventReader(campaign.events), set[str]()
    with show_wait(f"the events of {campaign.name} are read"):
        newest = _read_newest(reader, kinds=kinds, roles=roles, limit=limit)
    while True:
        has_ended = _has_ended(campaign)
        for line in newest:
            if as_json:
                print_json_text(msgspec.json.encode(line))
            else:
                print_line(format_event(line, width=_read_terminal_width()))
        for name, why in reader.unreadable.items():
            print_to_stderr(f"{name} cannot be read: {why}")
        for damage in reader.describe_damage():
            if damage not in shown:
                print_to_stderr(damage)
                shown.add(damage)
        if not follow or (has_ended and not newest):
            return
        time.sleep(FOLLOW_INTERVAL_S)
        newest = _read_newest(reader, kinds=kinds, roles=roles)


def _has_ended(campaign: CampaignDir) -> bool:
    """Return whether no job of a campaign waits or runs, as far as their records show."""
    numbers = campaign.job_numbers()
    return not numbers or campaign.job(max(numbers)).outcome.exists()


def _read_terminal_width() -> int | None:
    """Return the columns of the terminal that shows stdout; None for a pipe or a file, which have no width."""
    return shutil.get_terminal_size().columns if is_terminal(sys.stdout) else None


def format_event(line: Mapping[str, Any], *, width: int | None = None) -> str:
    """Format an event as one line: time, worker, kind, and what it means or its fields.

    With the width of a terminal, figures beyond a few lines of it are left out. Texts are whole and come first: one may
    be a reason.
    """
    event = parse_event(line)
    text = describe_event(event) if event is not None else None
    when = format_timestamp(_read_time(line))
    head = f"{when}  {line.get('worker') or '?':<16} {line.get('event')!s:<16} "
    num_chars = None if width is None else MAX_EVENT_LINES * width - len(head)
    return escape_to_one_line(head + (text or _format_fields(line, num_chars=num_chars)))


def _format_fields(line: Mapping[str, Any], *, num_chars: int | None) -> str:
    fields = {name: value for name, value in line.items() if name not in _COMMON and value not in (None, "", {}, [])}
    shown = [f"{name}={_format_value(value)}" for name, value in fields.items()]
    text = "  ".join(shown)
    if num_chars is None or len(text) <= num_chars:
        return text
    texts = [part for part, value in zip(shown, fields.values(), strict=True) if isinstance(value, str)]
    figures = [part for part in shown if part not in texts]
    while figures and len("  ".join([*texts, *figures, "..."])) > num_chars:
        figures.pop()
    return "  ".join([*texts, *figures, "..."] if len(texts) + len(figures) < len(shown) else texts)


def _format_value(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    return value if isinstance(value, str) else json.dumps(_shorten_lists(value), ensure_ascii=False)


def _shorten_lists(value: Any) -> Any:
    """Return a value whose long lists are replaced by their lengths: --json has them whole."""
    if isinstance(value, dict):
        return {name: _shorten_lists(part) for name, part in value.items()}
    is_long = isinstance(value, list) and len(value) > _MAX_SHOWN_VALUES
    return f"{len(value):,} values" if is_long else value


def _read_time(line: Mapping[str, Any]) -> float:
    value = line.get("time")
    return float(value) if isinstance(value, int | float) else 0.0


def _read_newest(
    reader: EventReader, *, kinds: Collection[str], roles: Collection[str], limit: int = 0
) -> list[dict[str, Any]]:
    """Return the newest lines (0: all) in order of time; no others are kept in memory."""
    wanted = (
        (_read_time(line), number, line)
        for number, line in enumerate(reader.poll_lines())
        if (not kinds or line.get("event") in kinds) and (not roles or line.get("role") in roles)
    )
    newest = heapq.nlargest(limit, wanted) if limit else sorted(wanted, reverse=True)
    return [line for _, _, line in reversed(newest)]


def _check_listable(folder: Path) -> None:
    """Raise CampaignError for a folder that cannot be listed, which would look like an empty one."""
    try:
        os.scandir(folder).close()
    except FileNotFoundError:  # it may come with the first job
        return
    except OSError as error:
        raise CampaignError(f"{folder} cannot be read: {error.strerror}") from error


def _check_kinds(kinds: Collection[str]) -> None:
    known = sorted(str(kind.__struct_config__.tag) for kind in CampaignEvent.__subclasses__())
    for kind in kinds:
        if kind not in known:
            raise ConfigError(f"no kind of event {kind!r}: {suggest_name(kind, known)}there are {', '.join(known)}")


def _check_roles(campaign: CampaignDir, roles: Collection[str]) -> None:
    names = [path.stem for path in campaign.events.glob(f"*{EVENT_SUFFIX}")]
    present = sorted({parse_role(name) or drop_job(name) for name in names})  # the driver has no number
    for role in roles:
        if present and role not in present:
            raise ConfigError(
                f"no events of role {role!r}: {suggest_name(role, present)}there are {', '.join(present)}"
            )
