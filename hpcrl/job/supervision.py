"""The facts that the driver watches: requests to end the job, and failures that repeat.

EndRequests     signals, a user's stop file and the end of the walltime
DrainRequest    the reason to drain, and the time for it
RestartBudget   the failures of each worker, pool and segment
TERM_GRACE_S   constant
"""

import signal
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from hpcrl.errors import HpcrlError
from hpcrl.job.guardian import CLOSE_GRACE_S
from hpcrl.system.processes import MAX_RESTARTS

TERM_GRACE_S = 20.0
"""Time to drain after SIGTERM: Slurm kills 30 s after it."""


@dataclass(frozen=True, kw_only=True)
class DrainRequest:
    """The reason why a job is to drain, and the time that it may take."""

    reason: str
    grace_s: float
    is_at_walltime: bool = False
    """True if the campaign is to continue in the next job."""


@dataclass
class EndRequests:
    """The requests to end one job: SIGINT at once, all others by draining it."""

    stop: Path
    """A file that a user makes (hpcrl stop)."""
    drain_s: float
    is_cancelled: bool = False
    is_terminated: bool = False
    is_near_end: bool = False

    def listen(self) -> None:
        """Take the signals of this process as requests."""
        signal.signal(signal.SIGTERM, self._on_term)
        signal.signal(signal.SIGINT, self._on_cancel)
        signal.signal(signal.SIGUSR2, self._on_near_end)

    def find_drain(self, *, now: float, end_time: float) -> DrainRequest | None:
        """Return the request to drain, if there is one; both times are seconds since the epoch."""
        if self.stop.exists():
            return DrainRequest(reason="a user asked for it (hpcrl stop)", grace_s=self.drain_s)
        if self.is_terminated:
            return DrainRequest(reason="it received SIGTERM", grace_s=TERM_GRACE_S)
        if self.is_near_end or now > end_time - self.drain_s:
            grace_s = max(end_time - now - CLOSE_GRACE_S, 1.0)
            return DrainRequest(reason="its walltime is nearly over", grace_s=grace_s, is_at_walltime=True)
        return None

    def _on_cancel(self, *_: object) -> None:
        self.is_cancelled = True

    def _on_term(self, *_: object) -> None:
        self.is_terminated = True

    def _on_near_end(self, *_: object) -> None:
        self.is_near_end = True


class RestartBudget:
    """The failures in one job, by the name of what failed; `logs` is where their causes are."""

    def __init__(self, logs: Path) -> None:
        self._logs = logs
        self._failures: Counter[str] = Counter()

    def count_failure(self, name: str, reason: str) -> None:
        """Raise once something has failed too often: nodes are not held for work that cannot run."""
        self._failures[name] += 1
        if self._failures[name] > MAX_RESTARTS:
            times = f"{name} failed {self._failures[name]} times"
            raise HpcrlError(f"{times}, the last time with: {reason}; the logs are in {self._logs}")

    def is_used_up(self, name: str) -> bool:
        """Return whether the next failure would be one too many."""
        return self._failures[name] >= MAX_RESTARTS
