"""The facts that the driver watches: requests to end the job, and failures that repeat.

EndRequests         signals, notices of SIGTERM, a user's stop file and the end of the walltime
DrainRequest        the reason to drain, and the time for it
plan_termination    the request of a job that received SIGTERM
FileOutage          errors of the file system that pass
LookInterval        the time between two looks
RestartBudget       the failures of each worker, pool and segment in the last hour
find_quorum         the workers of a role without which the job ends
measure_use, UsedHours    what an earlier job has used
CampaignUse, find_campaign_use    what the campaign has used and reached, for its limits
LastStepWatch       whether a trainer that has ended is done
DrainMargin         the time that a job needs to drain, learned from its trainer
CLOSE_RESERVE_S, MAX_CLOSE_SHARE, MARGIN_FACTOR, NUM_STEPS, READ_INTERVAL_S, REQUEST_PAUSE_S, BUDGET_PERIOD_S,
MAX_RECORDS, CONFIRM_TIMEOUT_S   constants
"""

import math
import signal
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from hpcrl.campaign_dir.event_log import EVENT_SUFFIX, EventReader
from hpcrl.campaign_dir.events import CampaignEvent, CheckpointSaved, JobStarted, StepFinished
from hpcrl.campaign_dir.job_end import EndCause, JobEnd, JobError, read_job_end
from hpcrl.campaign_dir.paths import CampaignDir, JobDir, make_worker_name
from hpcrl.config.recipe import LimitsConfig
from hpcrl.job.batch_log import note_in_log
from hpcrl.job.driver_pulse import FORWARDED_SIGNALS
from hpcrl.job.guardian import CLOSE_GRACE_S
from hpcrl.monitor.job_state import find_last_beat
from hpcrl.plan.plan import Plan
from hpcrl.slurm import next_job
from hpcrl.slurm.end_policy import FailureRecord
from hpcrl.system.exit_codes import EXIT_DONE, EXIT_FAILED
from hpcrl.system.file_watch import PATIENCE_S, NameWatch, is_outage
from hpcrl.system.processes import MAX_RESTARTS

CLOSE_RESERVE_S = 12.0
"""Time that is kept, of what is left after SIGTERM, to end all processes and record the outcome."""
MAX_CLOSE_SHARE = 0.4
"""The most of a short time that is kept for that."""
MAX_DRAIN_SHARE = 0.5
"""The most of a walltime that is learned as the time to drain: the rest is for steps."""
MARGIN_FACTOR = 1.3
"""The next step may be longer than the longest seen."""
NUM_STEPS = 20
"""The number of the last steps that count."""
READ_INTERVAL_S = 5.0
SIGNAL_EARLY_S = 60.0
"""Slurm may send the signal before the walltime so much earlier than it was asked to."""
REQUEST_PAUSE_S = 0.5
"""The longest time between two looks for requests to end a job."""
BUDGET_PERIOD_S = 3600.0
"""Failures that are older do not count: what leaks and ends once in hours works."""
MAX_RECORDS = 10_000
CONFIRM_TIMEOUT_S = 20.0
"""The longest time until the driver's node sees the checkpoint of a trainer that is done."""


@dataclass(frozen=True, kw_only=True)
class DrainRequest:
    """The reason why a job is to drain, and the time that it may take."""

    reason: str
    grace_s: float
    cause: EndCause
    kill_time: float = math.inf
    """The time when Slurm kills what is left, in seconds since the epoch, if it will."""
    longest_s: float = 0.0
    """The time for a checkpoint that takes longer than expected, where nothing else ends the job before."""

    @property
    def is_at_walltime(self) -> bool:
        return self.cause == "walltime"


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

    def __post_init__(self) -> None:
        # By listing: the client of a network file system remembers for long that a file is not there.
        self._stops = NameWatch(self.stop.parent, longest_s=REQUEST_PAUSE_S)

    def listen(self) -> None:
        """Take the signals of this process as requests, also those that came before and were blocked."""
        signal.signal(signal.SIGTERM, self._on_term)
        signal.signal(signal.SIGINT, self._on_cancel)
        signal.signal(signal.SIGUSR2, self._on_near_end)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED_SIGNALS)

    def has_termination(self) -> bool:
        """Return whether this process or a step received SIGTERM."""
        return self.is_terminated or self.has_notice()

    def has_notice(self) -> bool:
        """Return whether a step has reported SIGTERM: a file that is opened is asked for from the server."""
        return bool(self.read_notice())

    def read_notice(self) -> str:
        """Return the node of a step that has reported SIGTERM; empty without one."""
        try:
            return self.terminated.read_text()
        except OSError:
            return ""

    def find_drain(self, *, now: float, end_time: float, drain_s: float, kill_wait_s: float) -> DrainRequest | None:
        """Return the request of a user or of the clock to drain; both times are seconds since the epoch."""
        if self.has_stop_request():
            return DrainRequest(reason="a user asked for it (hpcrl stop)", grace_s=drain_s, cause="user-request")
        early_s = end_time - drain_s - now
        is_warned = self.is_near_end and not 0.0 <= early_s <= SIGNAL_EARLY_S
        if is_warned or early_s < 0.0:
            grace_s = max(end_time - now - CLOSE_GRACE_S, 1.0)
            reason, kill_time = "its walltime is nearly over", end_time + kill_wait_s
            return DrainRequest(reason=reason, grace_s=grace_s, cause="walltime", kill_time=kill_time)
        return None

    def has_stop_request(self) -> bool:
        """Return whether a user has made the file; an error ends no job, and the next look is soon."""
        try:
            return self.stop.name in self._stops.names()
        except OSError:
            return False

    def _on_cancel(self, *_: object) -> None:
        self.is_cancelled = True

    def _on_term(self, *_: object) -> None:
        self.is_terminated = True

    def _on_near_end(self, *_: object) -> None:
        self.is_near_end = True


def plan_termination(
    running_end: float | None, *, now: float, drain_s: float, kill_wait_s: float, cause: EndCause
) -> DrainRequest:
    """Return how a job drains that received SIGTERM.

    `running_end` is when it will end, by Slurm's present answer: in the grace time of a preemption it still runs until
    then. If it is ending already, `kill_wait_s` are left.
    """
    if running_end is None or running_end <= now:
        kill_time, longest_s = now + kill_wait_s, kill_wait_s
    else:
        kill_time, longest_s = running_end, min(running_end - now, max(drain_s, kill_wait_s))
    reserve_s = min(CLOSE_RESERVE_S, MAX_CLOSE_SHARE * longest_s)
    reason = f"it received SIGTERM ({cause})"
    return DrainRequest(reason=reason, grace_s=longest_s - reserve_s, cause=cause, kill_time=kill_time)


def find_quorum(num_workers: int, *, share: float) -> int:
    """Return the least number of workers of a role with which the job continues."""
    return max(math.ceil(num_workers * share), 1)


class UsedHours(NamedTuple):
    """The use of earlier jobs of a campaign."""

    node_hours: float = 0.0
    gpu_hours: float = 0.0


def measure_use(job: JobDir, *, plan: Plan) -> UsedHours:
    """Return what an earlier job has used; one without a record of its sizes had those of `plan`."""
    end = read_job_end(job)
    hours = _measure_hours(job, end=end)
    num_nodes = plan.num_nodes if end is None or end.num_nodes is None else end.num_nodes
    num_gpus = plan.num_gpus if end is None or end.num_gpus is None else end.num_gpus
    return UsedHours(hours * num_nodes, hours * num_gpus)


def _measure_hours(job: JobDir, *, end: JobEnd | None) -> float:
    """Return how long an earlier job has run, by the record of its end or its events; 0 if it never started."""
    if end is not None and end.run_s is not None:
        return end.run_s / 3600
    name = make_worker_name(job.number, "driver")
    events = EventReader(job.campaign.events, pattern=f"{name}{EVENT_SUFFIX}").poll()
    start = next((event.time for event in events if isinstance(event, JobStarted)), None)
    if start is None:
        return 0.0
    return max((end.time if end is not None else find_last_beat(job)) - start, 0.0) / 3600


class CampaignUse:
    """The figures of a campaign that its limits are about; `past` is what its earlier jobs have used."""

    def __init__(
        self,
        limits: LimitsConfig,
        poll_events: Callable[[], Iterable[CampaignEvent]],
        *,
        past: UsedHours,
        num_nodes: int,
        num_gpus: int,
        job: int = 0,
        saved_step: int = 0,
    ) -> None:
        """Take the events of the trainer in all jobs, and the step from which this one continues."""
        self._limits = limits
        self._poll_events = poll_events
        self._past = past
        self._num_nodes, self._num_gpus = num_nodes, num_gpus
        self._job, self._saved_step = job, saved_step
        self._steps: dict[int, dict[int, StepFinished]] = {}
        """The steps of each job, by number: in order, as a trainer that starts again makes some of them again."""

    def find_drain(self, *, now: float, job_start: float, drain_s: float) -> DrainRequest | None:
        """Return the request to drain once a limit is reached, or would be while the job drains."""
        for event in self._poll_events():
            if isinstance(event, StepFinished) and (event.job >= self._job or event.step <= self._saved_step):
                steps = self._steps.setdefault(event.job, {})
                while steps and next(reversed(steps)) >= event.step:
                    steps.popitem()
                steps[event.step] = event
        hours = (now + drain_s - job_start) / 3600
        if reason := self._find_goal():
            return DrainRequest(reason=reason, grace_s=drain_s, cause="goal-reached")
        if reason := self._find_budget(hours, now=now):
            return DrainRequest(reason=reason, grace_s=drain_s, cause="budget-used")
        return None

    def _list_steps(self) -> list[StepFinished]:
        """Return the steps of the policy as it is: those that a later job, or a start of a trainer, made again once."""
        found: list[StepFinished] = []
        first = math.inf  # of the later jobs
        for _, steps in sorted(self._steps.items(), reverse=True):
            found += [event for step, event in steps.items() if step < first]
            first = min(first, *steps)
        return sorted(found, key=lambda event: event.step)

    def _find_goal(self) -> str:
        limits = self._limits
        if limits.tokens is None and limits.reward is None:
            return ""
        kept = self._list_steps()
        if limits.tokens is not None:
            num = sum(step.num_tokens or 0 for step in kept)
            if num >= limits.tokens:
                return f"{num} tokens were trained on (limits.tokens = {limits.tokens})"
        if limits.reward is not None:
            rewards = [step.reward_mean for step in kept if step.reward_mean is not None]
            last = rewards[-limits.reward_steps :]
            if len(last) == limits.reward_steps and fmean(last) >= limits.reward:
                return f"the mean reward of {len(last)} steps is {fmean(last):.4g} (limits.reward = {limits.reward:g})"
        return ""

    def _find_budget(self, hours: float, *, now: float) -> str:
        limits = self._limits
        for name, used, limit in (
            ("node", self._past.node_hours + hours * self._num_nodes, limits.node_hours),
            ("gpu", self._past.gpu_hours + hours * self._num_gpus, limits.gpu_hours),
        ):
            if limit is not None and used >= limit:
                return f"the campaign has used its {limit:g} {name}-hours (limits.{name}_hours)"
        if limits.until is not None and now >= datetime.fromisoformat(limits.until).timestamp():
            return f"it is later than {limits.until} (limits.until)"
        return ""


def find_campaign_use(job: JobDir, *, limits: LimitsConfig, plan: Plan) -> CampaignUse:
    """Return the use of a campaign at the start of a job, with the nodes that the plan gives it."""
    uses = [measure_use(job.campaign.job(number), plan=plan) for number in range(job.number)]
    return CampaignUse(
        limits,
        EventReader.for_role(job.campaign.events, "train").poll_merged,
        past=UsedHours(*map(sum, zip(UsedHours(), *uses, strict=True))),
        num_nodes=plan.num_nodes,
        num_gpus=plan.num_gpus,
        job=job.number,
        saved_step=next_job.find_last_step(job.campaign),
    )


class DrainMargin:
    """A reader of the trainer's events.

    The trainer sees the request to drain between two steps. If it has just started one, it needs the time of a step,
    of publishing, and of a checkpoint; if it has just started to write one, that ends before the last one.
    """

    def __init__(
        self,
        poll_events: Callable[[], Iterable[CampaignEvent]],
        *,
        least_s: float,
        most_s: float = math.inf,
        assumed_save_s: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Take the newest events of the trainer, the least time to drain, and the most that is learned.

        Until a checkpoint was measured it takes `assumed_save_s`.

        Without a limit one checkpoint that took very long would let all later jobs drain before their first step.
        """
        self._poll_events = poll_events
        self._least_s, self._most_s, self._assumed_save_s = least_s, most_s, assumed_save_s
        self._looks = LookInterval(READ_INTERVAL_S, clock=clock)
        self._step_times: deque[float] = deque(maxlen=NUM_STEPS)
        self._save_times: deque[float] = deque(maxlen=NUM_STEPS)

    def find_seconds(self) -> float:
        """Return how long before its end the job must drain."""
        if self._looks.is_due():
            for event in self._poll_events():
                self._note_event(event)
        save_s = max(self._save_times, default=self._assumed_save_s)
        work_s = max(max(self._step_times, default=0.0), save_s) + save_s
        return max(self._least_s, min(MARGIN_FACTOR * work_s, self._most_s))

    def note_step(self, seconds: float) -> None:
        """Note the time of a step that has ended."""
        self._step_times.append(seconds)

    def _note_event(self, event: CampaignEvent) -> None:
        if isinstance(event, StepFinished):
            self.note_step((event.step_s or 0.0) + event.times.get("publish", 0.0))
        elif isinstance(event, CheckpointSaved):
            self._save_times.append(event.wall_s or 0.0)


class LastStepWatch:
    """The checkpoint of a campaign's last step, without which its trainer is not done."""

    def __init__(self, campaign: CampaignDir, *, num_steps: int) -> None:
        self._campaign = campaign
        self._num_steps = num_steps
        self._missing_since: float | None = None

    def confirm_done(self, code: int | None) -> int | None:
        """Return the exit code of the trainer; 0 counts only with the checkpoint of the last step.

        srun ends with 0 too when the node of its step was lost. Another node may see a new checkpoint late.
        """
        if code != EXIT_DONE or next_job.find_last_step(self._campaign) >= self._num_steps:
            self._missing_since = None
            return code
        now = time.monotonic()
        self._missing_since = self._missing_since or now
        return EXIT_FAILED if now > self._missing_since + CONFIRM_TIMEOUT_S else None


class FileOutage:
    """A file system that is away, full or read-only: the driver tries again at each turn until its patience ends."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._since: float | None = None

    def note(self, error: OSError) -> None:
        """Note an error; raise it if it does not pass by itself, or lasts too long."""
        now = self._clock()
        if self._since is None:
            note_in_log(f"hpcrl: {error}: tried again")
            self._since = now
        if not is_outage(error) or now - self._since > PATIENCE_S:
            raise error

    def end(self) -> None:
        """Note that the file system works."""
        self._since = None


class LookInterval:
    """The time between two looks at a file on the shared file system."""

    def __init__(self, interval_s: float, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._interval_s = interval_s
        self._clock = clock
        self._next = float("-inf")

    def is_due(self) -> bool:
        """Return whether it is time for a look, which is then made."""
        now = self._clock()
        if now < self._next:
            return False
        self._next = now + self._interval_s
        return True


class RestartBudget:
    """The failures of the last hour, by the name of what failed; `logs` is where their causes are."""

    def __init__(self, logs: Path, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._logs = logs
        self._clock = clock
        self._failures: dict[str, deque[float]] = {}
        self._records: deque[tuple[float, FailureRecord]] = deque(maxlen=MAX_RECORDS)

    def count_failure(self, name: str, reason: str, *, cause: EndCause = "user-code", log: Path | None = None) -> None:
        """Raise JobError once something has failed too often: nodes are not held for work that cannot run."""
        if not self.note_failure(name):
            raise JobError(self.describe(name, reason, log=log), cause=cause)

    def note_failure(self, name: str) -> bool:
        """Count a failure; return False if it is one too many."""
        is_last = self.is_used_up(name)
        self._failures[name].append(self._clock())
        return not is_last

    def describe(self, name: str, reason: str, *, log: Path | None = None) -> str:
        """Return how often something has failed, why, and its log, or where all logs are."""
        times = f"{name} failed {len(self._failures[name])} times in an hour"
        where = f"the logs are in {self._logs}" if log is None else f"its log is {log}"
        return f"{times}, the last time with: {reason}; {where}"

    def is_used_up(self, name: str) -> bool:
        """Return whether the next failure would be one too many."""
        times = self._failures.setdefault(name, deque())
        while times and times[0] <= self._clock() - BUDGET_PERIOD_S:
            times.popleft()
        return len(times) >= MAX_RESTARTS

    def note_node(self, role: str, node: str) -> None:
        """Note on which node something has failed."""
        self._records.append((self._clock(), FailureRecord(role, node)))

    def list_records(self) -> list[FailureRecord]:
        """Return the failures of the last hour whose nodes are known."""
        since = self._clock() - BUDGET_PERIOD_S
        return [record for time_, record in self._records if time_ > since]
