"""The record of one check, its print, and what a user's own site file records of it.

DoctorReport    all checks of a site, as JSON
CheckResult     its name, state, what was found, and what to change
pass_check, warn_check, fail_check, leave_unknown   make one
print_results   show them
write_facts     record in the user's own site file that a site was checked, and what its nodes showed
"""

import re
import tomllib
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any, Literal

import msgspec

from hpcrl.config.toml import format_toml, user_folder
from hpcrl.system.files import make_private_dir, publish_file
from hpcrl.system.terminal import print_line

MARKS = {"ok": "ok      ", "warning": "warning ", "failed": "FAILED  ", "unknown": "unknown "}
INTERNET_REACHED = "reached"
"""The value of the check `internet` where there is a way."""
CheckState = Literal["ok", "warning", "failed", "unknown"]


class CheckResult(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The result of one check."""

    name: str
    state: CheckState
    found: str
    """The value that was seen."""
    change: str = ""
    """The change to make, and where; empty if there is none."""
    place: str = ""
    """The partition of the node that was checked; empty for the login node."""


class DoctorReport(msgspec.Struct, frozen=True, kw_only=True):
    """All checks of a site, as `hpcrl doctor --json` prints them."""

    site: str
    time: float
    results: list[CheckResult]


def pass_check(name: str, found: str) -> CheckResult:
    """Return a result in order."""
    return CheckResult(name=name, state="ok", found=found)


def warn_check(name: str, found: str, change: str) -> CheckResult:
    """Return a result with which campaigns run, but not well or not everywhere."""
    return CheckResult(name=name, state="warning", found=found, change=change)


def fail_check(name: str, found: str, change: str) -> CheckResult:
    """Return a result with which a campaign fails."""
    return CheckResult(name=name, state="failed", found=found, change=change)


def leave_unknown(name: str, why: str) -> CheckResult:
    """Return the result of a check that could not be made."""
    return CheckResult(name=name, state="unknown", found=why)


def print_results(results: Sequence[CheckResult]) -> None:
    """Print a line for each result, and one for what to change."""
    width = max((len(_name(result)) for result in results), default=0)
    for result in results:
        print_line(f"{MARKS[result.state]} {_name(result):<{width}}  {result.found}")
        if result.change:
            print_line(f"{'':9} {'':<{width}}  -> {result.change}")


def _name(result: CheckResult) -> str:
    return f"{result.name} ({result.place})" if result.place else result.name


def write_facts(name: str, results: Sequence[CheckResult], *, today: date, knows_internet: bool = True) -> Path | None:
    """Set `verified`, `checked_on` and what nodes showed in the user's file of a site, and leave the rest of it.

    That is `nodes_may_submit`, and the way to the internet unless the site file has it. With a failure, only a
    `verified` that is there is taken back.
    """
    path = user_folder("sites") / f"{name}.toml"
    has_failed = any(result.state == "failed" for result in results)
    if has_failed and not (path.exists() and re.search(r"^verified\s*=\s*true", path.read_text(), re.MULTILINE)):
        return None
    facts: dict[str, Any] = {"verified": not has_failed, "checked_on": today.isoformat()}
    submissions = [result for result in results if result.name == "submission" and result.state != "unknown"]
    if submissions and not has_failed:
        facts["nodes_may_submit"] = all("accepted" in result.found for result in submissions)
    make_private_dir(path.parent)
    text = path.read_text() if path.exists() else f'extends = "{name}"\n'
    reached = {result.found for result in results if result.name == "internet"}
    if not knows_internet and len(reached) == 1 and "network" not in tomllib.loads(text):
        facts["network.internet_on_compute"] = "yes" if reached == {INTERNET_REACHED} else "no"
    publish_file(path, _set_keys(text, facts))
    return path


def _set_keys(text: str, facts: dict[str, Any]) -> str:
    """Replace keys of the top level, which ends at the first table, or add them at the end of it."""
    found = re.search(r"^\s*\[", text, re.MULTILINE)
    top, tables = (text[: found.start()], text[found.start() :]) if found else (text, "")
    for key in facts:
        top = re.sub(rf"^{re.escape(key)}\s*=.*\n", "", top, flags=re.MULTILINE)
    written = format_toml("Written by `hpcrl doctor --job`.", facts, {})
    top = top.replace("# Written by `hpcrl doctor --job`.\n", "")
    merged = f"{top.rstrip()}\n{written}\n{tables}".lstrip() if tables else f"{top.rstrip()}\n{written}".lstrip()
    tomllib.loads(merged)
    return merged
