"""The facts that the driver watches: requests to end the job, and failures that repeat.

EndRequests         signals, notices of SIGTERM, a user's stop file and the end of the walltime
DrainRequest        the reason to drain, and the time for it
plan_termination    the request of a job that received SIGTERM
RestartBudget       the failures of each worker, pool and segment
DrainMargin         the time that a job needs to drain, learned from its trainer
CLOSE_RESERVE_S, MAX_CLOSE_SHARE, MARGIN_FACTOR, NUM_STEPS, READ_INTERVAL_S   constants
"""

import math
import signal
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from hpcrl.campaign_dir.events import CampaignEvent, CheckpointSaved, StepFinished
from hpcrl.errors import HpcrlError
from hpcrl.job.guardian import CLOSE_GRACE_S
from hpcrl.system.processes import MAX_RESTARTS

CLOSE_RESERVE_S = 12.0
"""Time that is kept, of what is left after SIGTERM, to end all processes and record the outcome."""
MAX_CLOSE_SHARE = 0.4
"""The most of a short time that is kept for that."""
MARGIN_FACTOR = 1.3
"""The next step may be longer than the longest seen."""
NUM_STEPS = 20
"""The number of the last steps that count."""
READ_INTERVAL_S = 5.0


@dataclass(frozen=True, kw_only=True)
class DrainRequest:
    """The reason why a job is to drain, and the time that it may take."""

    reason: str
    grace_s: float
    is_at_walltime: bool = False
    """True if the campaign is to continue in the next job."""
    kill_time: float = math.inf
    """When Slurm kills what is left, in seconds since the epoch, if it will."""


@dataclass
class EndRequests:
    """The requests to end one job: SIGINT at once, all others by draining it."""

    stop: Path
    """A file that a user makes (hpcrl stop)."""
    terminated: Path
    """The notice of a step that received SIGTERM."""
    is_cancelled: bool = False
    is_terminated: bool = False
    is_near_end: bool = False

    def listen(self) -> None:
        """Take the signals of this process as requests."""
        signal.signal(signal.SIGTERM, self._on_term)
        signal.signal(signal.SIGINT, self._on_cancel)
        signal.signal(signal.SIGUSR2, self._on_near_end)

    def has_termination(self) -> bool:
        """Return whether this process or a step received SIGTERM."""
        return self.is_terminated or self.terminated.exists()

    def find_drain(self, *, now: float, end_time: float, drain_s: float) -> DrainRequest | None:
        """Return the request of a user or of the clock to drain; both times are seconds since the epoch."""
        if self.stop.exists():
            return DrainRequest(reason="a user asked for it (hpcrl stop)", grace_s=drain_s)
        if self.is_near_end or now > end_time - drain_s:
            grace_s = max(end_time - now - CLOSE_GRACE_S, 1.0)
            return DrainRequest(reason="its walltime is nearly over", grace_s=grace_s, is_at_walltime=True)
        return None

    def _on_cancel(self, *_: object) -> None:
        self.is_cancelled = True

    def _on_term(self, *_: object) -> None:
        self.is_terminated = True

    def _on_near_end(self, *_: object) -> None:
        self.is_near_end = True


def plan_termination(running_end: float | None, *, now: float, drain_s: float, kill_wait_s: float) -> DrainRequest:
    """Return how a job drains that received SIGTERM.

    `running_end` is when it will end, by Slurm's present answer: in the grace time of a preemption it still runs until
    then. If it is ending already, `kill_wait_s` are left.
    """
    if running_end is None or running_end <= now:
        kill_time, longest_s = now + kill_wait_s, kill_wait_s
    else:
        kill_time, longest_s = running_end, min(running_end - now, max(drain_s, kill_wait_s))
    reserve_s = min(CLOSE_RESERVE_S, MAX_CLOSE_SHARE * longest_s)
    return DrainRequest(reason="it received SIGTERM", grace_s=longest_s - reserve_s, kill_time=kill_time)


class DrainMargin:
    """A reader of the trainer's events.

    The trainer sees the request to drain between two steps. If it has just started one, it needs the time of a step,
    of publishing, and of a checkpoint.
    """

    def __init__(
        self,
        poll_events: Callable[[], Iterable[CampaignEvent]],
        *,
        least_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Take the newest events of the trainer, and the least time to drain."""
        self._poll_events = poll_events
        self._least_s = least_s
        self._clock = clock
        self._next_read = float("-inf")
        self._step_times: deque[float] = deque(maxlen=NUM_STEPS)
        self._save_times: deque[float] = deque(maxlen=NUM_STEPS)

    def find_seconds(self) -> float:
        """Return how long before its end the job must drain."""
        if self._clock() >= self._next_read:
            self._next_read = self._clock() + READ_INTERVAL_S
            for event in self._poll_events():
                self._note_event(event)
        work_s = max(self._step_times, default=0.0) + max(self._save_times, default=0.0)
        return max(self._least_s, MARGIN_FACTOR * work_s)

    def _note_event(self, event: CampaignEvent) -> None:
        if isinstance(event, StepFinished):
            self._step_times.append((event.step_s or 0.0) + event.times.get("publish", 0.0))
        elif isinstance(event, CheckpointSaved):
            self._save_times.append(event.wall_s or 0.0)


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
