"""Outages of judges, as files that all processes of a worker see: a call that failed in one is repeated, not scored.

JudgeOutages   the marks of one worker
"""

import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Self

from hpcrl.system.variables import JUDGE_OUTAGES_VARIABLE

MARGIN_S = 0.1
"""A failure that is marked this much earlier than a call may still belong to it."""


class JudgeOutages:
    """The marks of judges that are gone, and of requests that failed."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    @classmethod
    def from_environment(cls) -> Self | None:
        """Return the marks of this worker; None if its campaign has no judges."""
        directory = os.environ.get(JUDGE_OUTAGES_VARIABLE)
        return None if directory is None else cls(Path(directory))

    def mark_gone(self, name: str) -> None:
        """Mark that no engine of a judge can be called."""
        self._gone_path(name).touch()

    def mark_back(self, name: str) -> None:
        """Mark that one can be called again."""
        if self._gone_path(name).exists():
            self.note_failure(name)  # before: a call of just now may have failed for it
            self._gone_path(name).unlink(missing_ok=True)

    def note_failure(self, name: str) -> None:
        """Note that a request to a judge has just failed for no fault of the request."""
        path, now = self._failed_path(name), time.time_ns()
        path.touch()
        os.utime(path, ns=(now, now))  # the clock of a file system is coarser

    def find_gone(self, names: Iterable[str]) -> list[str]:
        """Return those of the judges that are gone now."""
        return [name for name in names if self._gone_path(name).exists()]

    def have_failed_since(self, names: Iterable[str], since: float) -> bool:
        """Return whether one of the judges is gone, or failed at this time (seconds since the epoch) or later."""
        return any(self._gone_path(name).exists() or self._read_time(name) >= since - MARGIN_S for name in names)

    def _read_time(self, name: str) -> float:
        try:
            return self._failed_path(name).stat().st_mtime
        except FileNotFoundError:
            return float("-inf")

    def _gone_path(self, name: str) -> Path:
        return self._directory / f"{name}.gone"

    def _failed_path(self, name: str) -> Path:
        return self._directory / f"{name}.failed"
