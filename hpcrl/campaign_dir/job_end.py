"""The end of a job, as its driver or its guardian records it.

EndCause        why a job ended; `hpcrl.slurm.end_policy` has what follows from each cause
JobEnd          the record
JobError        the error that ends a job for such a cause
REASON_DONE    the reason of the end of a campaign that made every step
read_job_end    read it
DrainNotice     the request to drain, for the workers
DrainTime       the time that it leaves
is_sigterm_answered  read whether it answers SIGTERM
read_term_answer     read the first answer, before the request to drain
"""

import math
import time
from collections.abc import Sequence
from typing import Literal

import msgspec

from hpcrl.campaign_dir.events import JobOutcome
from hpcrl.campaign_dir.paths import JobDir
from hpcrl.errors import HpcrlError
from hpcrl.system.file_watch import retry_passing

EndCause = Literal[
    "complete",
    "user-request",
    "goal-reached",
    "budget-used",
    "walltime",
    "preemption",
    "cancellation",
    "node-failure",
    "out-of-memory",
    "memory-limits",
    "user-code",
    "infrastructure",
    "not-started",
    "missing-nodes",
    "unknown",
]
CAUSE_BY_OUTCOME: dict[str, EndCause] = {
    "done": "complete",
    "stopped": "user-request",
    "failed": "user-code",
    "drained": "unknown",
    "cut": "unknown",
}
"""The cause where a record has none."""
MAX_REASON_CHARS = 4000
MAX_LATE_S = 20.0
"""The most by which a request is seen late: files are read again every 15 s. A larger difference is one of clocks."""
REASON_DONE = "every training step was made"


class JobEnd(msgspec.Struct, frozen=True, kw_only=True):
    """The record of an end."""

    outcome: JobOutcome
    reason: str = ""
    cause: EndCause | None = None
    nodes: list[str] = []
    """Nodes on which more than one thing failed: the next job avoids them."""
    untrained: list[str] = []
    """The reasons why domains trained nothing, of a campaign that made every step."""
    time: float = 0.0
    run_s: float | None = None
    """The time for which the job ran, by a clock that does not jump."""
    num_nodes: int | None = None
    """The nodes that the job had; None if its plan could not be read."""
    num_gpus: int | None = None

    @property
    def likely_cause(self) -> EndCause:
        return self.cause or CAUSE_BY_OUTCOME[self.outcome]

    @property
    def is_partial(self) -> bool:
        """Return whether every step was made, but a domain trained nothing."""
        return self.outcome == "done" and bool(self.untrained)

    def encode(self) -> bytes:
        """Return the record for a file; a reason may be as long as the output of a program."""
        return msgspec.json.encode(msgspec.structs.replace(self, reason=self.reason[:MAX_REASON_CHARS]))


class DrainNotice(msgspec.Struct, frozen=True, kw_only=True):
    """The request to drain that a driver publishes for its workers."""

    reason: str
    deadline: float | None = None
    """The time when a worker must have drained, in seconds since the epoch; None without a limit."""
    left_s: float | None = None
    """The time until then when this was published; clocks of nodes differ, and may jump."""
    end_s: float | None = None
    """The time from then in which a running driver ends the job; None if nothing kills the job."""
    answers_sigterm: bool = False
    """True if the driver has seen the SIGTERM that steps have reported: it was alive after that."""


class DrainTime:
    """The time that a request to drain leaves to a worker: no more than the driver gave, whatever their clocks."""

    def __init__(self, job: JobDir) -> None:
        self._job = job
        self._seen: DrainNotice | None = None
        self._deadline = self._end = math.inf
        """The end of the time, and that of the whole job, by the monotonic clock."""

    def read_left(self) -> float:
        """Return how many seconds are left; without end if the request names no limit or cannot be read."""
        return self._deadline - time.monotonic() if self._read_notice() else math.inf

    def is_driver_overdue(self) -> bool:
        """Return whether a running driver would have ended the job by now."""
        return self._read_notice() and time.monotonic() > self._end

    def _read_notice(self) -> bool:
        try:
            notice = msgspec.json.decode(self._job.drain.read_bytes(), type=DrainNotice)
        except (OSError, msgspec.MsgspecError):
            return False
        if notice != self._seen:
            self._seen, self._deadline = notice, time.monotonic() + _find_left(notice)
            self._end = time.monotonic() + (math.inf if notice.end_s is None else notice.end_s)
        return True


def _find_left(notice: DrainNotice) -> float:
    """Return the time that a request leaves now, less that by which it is seen late, if clocks agree on that."""
    left_s = math.inf if notice.left_s is None else notice.left_s
    by_clock_s = math.inf if notice.deadline is None else notice.deadline - time.time()
    if notice.left_s is not None and not 0.0 <= left_s - by_clock_s <= MAX_LATE_S:
        return left_s
    return min(left_s, by_clock_s)


def is_sigterm_answered(job: JobDir) -> bool:
    """Return whether the request to drain answers the SIGTERM that steps have reported; one without a record does."""
    try:
        return msgspec.json.decode(job.drain.read_bytes(), type=DrainNotice).answers_sigterm
    except msgspec.MsgspecError:
        return True


def read_term_answer(job: JobDir) -> DrainNotice | None:
    """Return the answer of a driver to the notice of a step; None before it."""
    try:
        return msgspec.json.decode(job.term_answer.read_bytes(), type=DrainNotice)
    except (OSError, msgspec.MsgspecError):
        return None


class JobError(HpcrlError):
    """A job cannot continue."""

    def __init__(self, message: str, *, cause: EndCause, nodes: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.cause = cause
        self.nodes = list(nodes)


def read_job_end(job: JobDir) -> JobEnd | None:
    """Read how a job ended; None if nothing was recorded, or the record is damaged."""
    try:
        return msgspec.json.decode(retry_passing(job.outcome.read_bytes), type=JobEnd)
    except (FileNotFoundError, msgspec.MsgspecError):
        return None
