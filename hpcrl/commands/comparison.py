"""Compare two campaigns: their figures side by side, and the settings in which they differ: `hpcrl compare`.

show_comparison         prints it
compare_campaigns       makes it
CampaignComparison, ComparedFigure, ComparedSetting    its parts, also the contract of `hpcrl compare --json`
"""

import argparse
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from hpcrl.campaign import directory
from hpcrl.campaign.fixed_settings import find_differences, split_entry
from hpcrl.campaign_dir.paths import CampaignDir
from hpcrl.config.toml import flatten_table
from hpcrl.errors import CampaignError
from hpcrl.monitor.collect import SnapshotCollector, make_slurm_query
from hpcrl.monitor.snapshot import CampaignSnapshot, measure_change
from hpcrl.system.files import read_json
from hpcrl.system.terminal import (
    escape_to_one_line,
    format_number,
    make_console,
    print_json,
    print_note,
    show_wait,
)

_MIN_TABLE_WIDTH = 40


class ComparedFigure(msgspec.Struct, frozen=True, kw_only=True):
    """A figure of both campaigns; null where one does not have it."""

    name: str
    first: float | str | None
    second: float | str | None


class ComparedSetting(msgspec.Struct, frozen=True, kw_only=True):
    """A setting of the recipe, or of the site, in which they differ; null where one does not have it."""

    setting: str
    first: Any
    second: Any


class CampaignComparison(msgspec.Struct, frozen=True, kw_only=True):
    """Two campaigns side by side."""

    first: str
    second: str
    figures: list[ComparedFigure]
    settings: list[ComparedSetting] | None
    """None if the recipe or site of one cannot be read."""


def compare_campaigns(first: CampaignDir, second: CampaignDir) -> CampaignComparison:
    """Compare two campaigns, which may run, by their events and records."""
    both = [dict(_list_figures(_take_snapshot(campaign))) for campaign in (first, second)]
    names = list(dict.fromkeys([*both[0], *both[1]]))
    settings = [_read_settings(campaign) for campaign in (first, second)]
    known = [one for one in settings if one is not None]
    return CampaignComparison(
        first=first.name,
        second=second.name,
        figures=[ComparedFigure(name=name, first=both[0].get(name), second=both[1].get(name)) for name in names],
        settings=_list_differences(known) if len(known) == len(settings) else None,
    )


def _list_differences(settings: Sequence[dict[str, Any]]) -> list[ComparedSetting]:
    return [
        ComparedSetting(setting=name, first=values[0], second=values[1]) for name, values in find_differences(settings)
    ]


def run_compare(arguments: argparse.Namespace) -> int:
    first, second = map(directory.find_campaign, arguments.campaigns)
    if first.root == second.root:
        raise CampaignError(f"compare {first.name} with another campaign: both names are of {first.root}")
    show_comparison(first, second, as_json=arguments.json)
    return 0


def show_comparison(first: CampaignDir, second: CampaignDir, *, as_json: bool) -> None:
    """Print a comparison: figures, then settings that differ."""
    with show_wait(f"the events of {first.name} and {second.name} are read"):
        found = compare_campaigns(first, second)
    if as_json:
        print_json(found)
        return
    console = make_console()
    figures = ((one.name, _show(one.first), _show(one.second)) for one in found.figures)
    _print_rows(console, ("", found.first, found.second), figures)
    console.print()
    if found.settings is None:
        return
    if not found.settings:
        console.print("recipes and sites are the same")
        return
    rows = list(_list_rows(found.settings))
    title = "one setting differs" if len(rows) == 1 else f"{len(rows)} settings differ"
    _print_rows(console, (title, found.first, found.second), rows)


def _list_rows(settings: Sequence[ComparedSetting]) -> Iterator[tuple[str, str, str]]:
    """Yield a row for each setting; a partition or a kind of GPU that only one site has is one row."""
    entries: dict[str, list[ComparedSetting]] = {}
    for one in settings:
        entries.setdefault(split_entry(one.setting)[0], []).append(one)
    for entry, ones in entries.items():
        sides = ([one.first for one in ones], [one.second for one in ones])
        is_defined = [len(ones) == 1 or any(value is not None for value in values) for values in sides]
        if all(is_defined):
            yield from ((one.setting, _show_setting(one.first), _show_setting(one.second)) for one in ones)
        else:
            first, second = ("defined" if is_it else "-" for is_it in is_defined)
            yield entry, first, second


def _take_snapshot(campaign: CampaignDir) -> CampaignSnapshot:
    """Return the state of a campaign now; what is not known of it is noted."""
    snapshot = SnapshotCollector(campaign, query=make_slurm_query(campaign)).poll()
    unknown = [snapshot.detail.reason] if snapshot.state == "unknown" else []
    for problem in filter(None, [*unknown, *snapshot.detail.problems]):
        print_note(f"{campaign.name}: {problem}")
    return snapshot


def _list_figures(snapshot: CampaignSnapshot) -> Iterator[tuple[str, float | str | None]]:
    yield "state", snapshot.state_word
    yield "jobs", len(snapshot.jobs)
    yield "steps", snapshot.step
    yield from _list_changes("reward", snapshot.reward_mean)
    yield from _list_changes("loss", snapshot.detail.losses)
    scored = [one.reward_mean for one in snapshot.evaluations if one.reward_mean is not None]
    if scored:
        yield "held-out reward, last", scored[-1]
        yield "held-out reward, best", max(scored)
    for name, domain in snapshot.domains.items():
        if domain.reward_recent is not None and len(snapshot.domains) > 1:
            yield f"reward of {name}, recent", domain.reward_recent
        if domain.trained_share is not None:
            yield f"share of tokens to train on, {name}", domain.trained_share
    yield "episodes done", snapshot.episodes.done
    yield "episodes truncated", snapshot.episodes.truncated
    yield "episodes aborted", snapshot.episodes.aborted
    yield "episodes failed", snapshot.episodes.failed
    yield "tokens generated", snapshot.detail.num_tokens
    yield "tokens a second", snapshot.tokens_per_s
    step = snapshot.detail.last_step
    if step is not None:
        yield "lag of the last step", step.lag_mean
        yield "seconds of the last step", step.step_s


def _list_changes(name: str, values: Sequence[float | None]) -> Iterator[tuple[str, float]]:
    if change := measure_change(values):
        yield f"{name}, first steps", change.first
        yield f"{name}, last steps", change.last


def _read_settings(campaign: CampaignDir) -> dict[str, Any] | None:
    """Return the settings of recipe and site; None, with a note, if they cannot be read."""
    try:
        recipe, site = (_read_table(path) for path in (campaign.recipe, campaign.site))
        return dict(flatten_table(recipe)) | dict(flatten_table(site, "site."))
    except (OSError, ValueError) as error:
        print_note(f"recipe or site of {campaign.name} cannot be read, so that settings are not compared: {error}")
        return None


def _read_table(path: Path) -> dict[str, Any]:
    table = read_json(path)
    if not isinstance(table, dict):
        raise ValueError(f"{path.name} is not a table")
    return table


def _print_rows(console: Console, headings: tuple[str, str, str], rows: Iterable[tuple[str, str, str]]) -> None:
    """Print a table, or a line for each row on a terminal that is too narrow for one."""
    if console.width >= _MIN_TABLE_WIDTH:
        console.print(_make_table(headings, rows))
        return
    for name, first, second in (headings, *rows):
        console.print(Text(f"{name}: {first} | {second}" if name else f"{first} | {second}"))


def _make_table(headings: Sequence[str], rows: Iterable[tuple[str, str, str]]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")
    for index, heading in enumerate(headings):
        table.add_column(Text(heading), justify="right" if index else "left", overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))
    return table


def _show_setting(value: Any) -> str:
    """Show a setting as a recipe has it."""
    return msgspec.json.encode(value).decode() if isinstance(value, float) else _show(value)


def _show(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.3f}" if abs(value) < 100 else format_number(value)
    if value is None or isinstance(value, str):
        return escape_to_one_line(value) if value else "-"
    return f"{value:,}" if type(value) is int else msgspec.json.encode(value).decode()
