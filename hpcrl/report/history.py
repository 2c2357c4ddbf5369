"""Fold the events of a campaign into what its report shows besides the monitor's figures: series, spans, work of roles.

CampaignHistory   the fold
WorkerSpan        a time in which a worker was up
BinnedSeries      sums by time, in bins that grow with the time covered
RoleWork          the worker-seconds of a role
EngineTotals        the load of an engine
"""

from dataclasses import dataclass, field

from hpcrl.campaign_dir.events import (
    CampaignEvent,
    EngineCounted,
    EpisodesCounted,
    EvaluationFinished,
    JobEnded,
    JobStarted,
    SegmentScored,
    StepFinished,
    VersionLoaded,
    VersionPublished,
    WorkerEnded,
    WorkerFailed,
    WorkerRestarted,
    WorkerStarted,
)
from hpcrl.campaign_dir.paths import drop_job, make_worker_name, parse_role
from hpcrl.monitor.count_lines import MAX_CROWDED_INTERVAL_S
from hpcrl.monitor.progress import CampaignProgress, name_subject

MAX_BINS = 240
MAX_COUNT_GAP_S = 1.2 * MAX_CROWDED_INTERVAL_S
"""The longest time between two counts of an env worker for which the first one holds."""


@dataclass
class WorkerSpan:
    """A time in which a worker was up."""

    worker: str
    role: str
    node: str
    job: int
    start: float
    end: float
    ending: str = ""
    """`failed`, `ended`, or "" while nothing reports its end."""


@dataclass
class RoleWork:
    """The worker-seconds of a role that are known, over all its workers and jobs."""

    busy_s: float = 0.0
    starting_s: float = 0.0
    launch_s: float = 0.0
    """Time from the launch of a process to its first event, before which it has no span."""
    num_tokens: int = 0
    pause_s: float = 0.0
    """Time without generation while weights were loaded."""
    num_pauses: int = 0


@dataclass
class EngineTotals:
    """The load of one engine over all jobs; what is an average is summed with the seconds that it holds for."""

    role: str
    node: str
    window_s: float = 0.0
    busy_s: float = 0.0
    running_s: float = 0.0
    waiting_s: float = 0.0
    kv_s: float = 0.0
    kv_window_s: float = 0.0
    """The part of the time in which the use of its KV memory was reported."""
    kv_most: float = 0.0
    num_tokens: int = 0
    num_prefix_queries: int | None = None
    num_prefix_hits: int | None = None
    num_preemptions: int | None = None

    def add(self, event: EngineCounted) -> None:
        """Add the load of a time."""
        self.node = event.node or self.node
        self.window_s += event.window_s
        self.busy_s += event.window_s * event.busy_share
        self.running_s += event.window_s * event.running
        self.waiting_s += event.window_s * event.waiting
        self.num_tokens += event.num_tokens
        if event.kv_share is not None:
            self.kv_s += event.window_s * event.kv_share
            self.kv_window_s += event.window_s
            self.kv_most = max(self.kv_most, event.kv_share)
        for name in ("num_prefix_queries", "num_prefix_hits", "num_preemptions"):
            if (num := getattr(event, name)) is not None:
                setattr(self, name, (getattr(self, name) or 0) + num)


@dataclass
class BinnedSeries:
    """Sums by time, in bins that grow with the time covered."""

    width_s: float = 10.0
    start: float | None = None
    bins: dict[int, dict[str, float]] = field(default_factory=dict)

    def add(self, time: float, **values: float) -> None:
        """Add values to the bin of a time."""
        self.start = time if self.start is None else self.start
        index = int((time - self.start) // self.width_s)
        while abs(index) >= MAX_BINS:
            self._double_width()
            index = int((time - self.start) // self.width_s)
        sums = self.bins.setdefault(index, {})
        for name, value in values.items():
            sums[name] = sums.get(name, 0.0) + value

    def _double_width(self) -> None:
        old, self.bins, self.width_s = self.bins, {}, 2 * self.width_s
        for index, sums in old.items():
            joined = self.bins.setdefault(index // 2, {})
            for name, value in sums.items():
                joined[name] = joined.get(name, 0.0) + value

    def list_bins(self) -> list[tuple[float, dict[str, float]]]:
        """Return the middle of each bin with its sums, in order of time."""
        start = self.start or 0.0
        return [(start + (index + 0.5) * self.width_s, self.bins[index]) for index in sorted(self.bins)]


@dataclass
class CampaignHistory(CampaignProgress):
    """The progress of a campaign, and how it came about."""

    spans: list[WorkerSpan] = field(default_factory=list)
    work: dict[str, RoleWork] = field(default_factory=dict)
    engine_series: dict[str, BinnedSeries] = field(default_factory=dict)
    """The load of engines by role."""
    engines: dict[str, EngineTotals] = field(default_factory=dict)
    """The load of each engine, by the worker's name without its job."""
    domain_rewards: dict[str, dict[int, list[float]]] = field(default_factory=dict)
    """The sum and the number of rewards of each domain, by the newest step."""
    version_steps: dict[int, int] = field(default_factory=dict)
    """The step that published each version of the weights."""
    publish_times: list[float] = field(default_factory=list)
    """Seconds in which versions were published."""
    _open_spans: dict[str, WorkerSpan] = field(default_factory=dict)
    _ended_jobs: set[int] = field(default_factory=set)
    """The jobs that have ended; what their workers still report starts nothing."""
    _launched_at: dict[str, float] = field(default_factory=dict)
    """The time when workers were launched again, until they start."""
    _has_started: set[str] = field(default_factory=set)
    _has_worked: set[str] = field(default_factory=set)
    _counted_at: dict[str, tuple[float, int]] = field(default_factory=dict)
    """The time of the newest counts of an env worker, and its running episodes."""

    def add(self, event: CampaignEvent) -> None:
        """Add one event; they come in the order of jobs and time."""
        super().add(event)
        if isinstance(event, WorkerStarted):
            self._note_launch(event)
        subject = _name_worker(event)
        if subject:
            self._extend_span(event, subject)
        match event:
            case EpisodesCounted():
                self._add_episodes(event)
            case SegmentScored():
                step = next(reversed(self.steps), 0)
                for domain, rewards in event.rewards.items():
                    sums = self.domain_rewards.setdefault(domain, {}).setdefault(step, [0.0, 0])
                    sums[0] += sum(rewards)
                    sums[1] += len(rewards)
            case EngineCounted():
                self._add_engine(event)
            case StepFinished():
                self._find_work("train").busy_s += event.step_s or 0.0
                self._note_work(event, before_s=(event.step_s or 0.0) + (event.wait_s or 0.0))
            case _:
                self._add_rare_event(event)

    def _drop_steps_from(self, step: int) -> None:
        super()._drop_steps_from(step)
        for sums in self.domain_rewards.values():
            while sums and next(reversed(sums)) >= step:
                sums.popitem()

    def _add_rare_event(self, event: CampaignEvent) -> None:
        match event:
            case VersionLoaded():
                work = self._find_work(event.role)
                work.pause_s += event.stall_s or 0.0
                work.num_pauses += 1
            case VersionPublished():
                self.version_steps[event.version] = event.step
                if event.wall_s is not None:
                    self.publish_times.append(event.wall_s)
            case JobStarted():  # again, if Slurm has requeued it
                self._ended_jobs.discard(event.job)
                prefix = f"{make_worker_name(event.job)}-"
                self._has_started = {name for name in self._has_started if not name.startswith(prefix)}
            case JobEnded():
                self._ended_jobs.add(event.job)
                for name in [name for name, span in self._open_spans.items() if span.job == event.job]:
                    self._close_span(name, event.time, "ended")

    def find_evaluation_step(self, evaluation: EvaluationFinished) -> int:
        """Return the step whose weights were evaluated; a version that no event names has the number of its step."""
        return self.version_steps.get(evaluation.version, evaluation.version)

    def _note_launch(self, event: WorkerStarted) -> None:
        """Count the time from a worker's launch to its first event; reward workers come and go during a job."""
        launched_at = self._launched_at.pop(event.worker, None)
        if event.worker not in self._has_started:
            started_at = self.jobs[event.job].started_at
            launched_at = max((one for one in (launched_at, started_at) if one is not None), default=None)
        self._has_started.add(event.worker)
        if launched_at is not None and event.role != "reward" and event.worker not in self._open_spans:
            self._find_work(event.role).launch_s += max(event.time - launched_at, 0.0)

    def _find_work(self, role: str) -> RoleWork:
        return self.work.setdefault(role, RoleWork())

    def _extend_span(self, event: CampaignEvent, name: str) -> None:
        is_end = isinstance(event, WorkerEnded | WorkerFailed | WorkerRestarted)
        if isinstance(event, WorkerRestarted):
            self._launched_at[name] = event.time
        span = self._open_spans.get(name)
        if span is None and not is_end and event.job not in self._ended_jobs:
            role = parse_role(name) or event.role
            span = WorkerSpan(name, role, event.node or "", event.job, event.time, event.time)
            self._open_spans[name] = span
            self.spans.append(span)
            self._has_worked.discard(name)
        if span is None:
            return
        span.end = max(span.end, event.time)
        if is_end:
            self._close_span(
                name, event.time, "failed" if isinstance(event, WorkerFailed | WorkerRestarted) else "ended"
            )

    def _close_span(self, name: str, time: float, ending: str) -> None:
        span = self._open_spans.pop(name)
        span.end, span.ending = max(span.end, time), ending

    def _note_work(self, event: CampaignEvent, *, before_s: float = 0.0) -> None:
        """Count the time from a worker's start to its first work, which started `before_s` before the event."""
        span = self._open_spans.get(event.worker)
        if span is not None and event.worker not in self._has_worked:
            self._has_worked.add(event.worker)
            self._find_work(span.role).starting_s += max(event.time - before_s - span.start, 0.0)

    def _add_episodes(self, event: EpisodesCounted) -> None:
        before = self._counted_at.get(event.worker)
        if before is not None and before[1] > 0:
            self._find_work(event.role).busy_s += min(max(event.time - before[0], 0.0), MAX_COUNT_GAP_S)
        self._counted_at[event.worker] = (event.time, event.running)
        if event.running or event.done:
            self._note_work(event)

    def _add_engine(self, event: EngineCounted) -> None:
        name = drop_job(event.worker)
        self.engines.setdefault(name, EngineTotals(event.role, event.node or "")).add(event)
        work = self._find_work(event.role)
        work.busy_s += event.window_s * event.busy_share
        work.num_tokens += event.num_tokens
        self._note_work(event, before_s=event.window_s)
        values = {
            "window_s": event.window_s,
            "busy_s": event.window_s * event.busy_share,
            "running": event.window_s * event.running,
            "waiting": event.window_s * event.waiting,
            "num_tokens": float(event.num_tokens),
        }
        if event.kv_share is not None:
            values |= {"kv": event.window_s * event.kv_share, "kv_window_s": event.window_s}
        self.engine_series.setdefault(event.role, BinnedSeries()).add(event.time, **values)


def _name_worker(event: CampaignEvent) -> str:
    """Return the name of the worker that an event is about; "" for the driver's."""
    is_of_driver = event.role in ("", "driver", "guardian", "couriers")
    return name_subject(event) or ("" if is_of_driver else event.worker)
