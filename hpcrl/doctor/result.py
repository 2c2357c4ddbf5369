"""The record of one check.

CheckResult     its name, state, what was found, and what to change
pass_check, warn_of, fail_check, leave_unknown   make one
"""

from typing import Literal

import msgspec

CheckState = Literal["ok", "warning", "failed", "unknown"]


class CheckResult(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The result of one check."""

    name: str
    state: CheckState
    found: str
    """The value that was seen."""
    change: str = ""
    """What to change, and where; empty if nothing."""
    place: str = ""
    """The partition of the node that was checked; empty for the login node."""


def pass_check(name: str, found: str) -> CheckResult:
    """Return a result in order."""
    return CheckResult(name=name, state="ok", found=found)


def warn_of(name: str, found: str, change: str) -> CheckResult:
    """Return a result with which campaigns run, but not well or not everywhere."""
    return CheckResult(name=name, state="warning", found=found, change=change)


def fail_check(name: str, found: str, change: str) -> CheckResult:
    """Return a result with which a campaign fails."""
    return CheckResult(name=name, state="failed", found=found, change=change)


def leave_unknown(name: str, why: str) -> CheckResult:
    """Return the result of a check that could not be made."""
    return CheckResult(name=name, state="unknown", found=why)
