"""The figures of a report: what its JSON twin contains, and what its page shows. Without numpy.

CampaignReport    one campaign
KeyFigures, JobFigures, RoleFigures, EngineFigures, WorkerFigures, FailureFigures, ProvenanceEntry    its parts
ReportChart, ChartSeries    a chart and its numbers
SampledTrajectory, SampledTurn, SampledToken, SampledGroup, TrajectoryFigures    what was played
ReportDocument    all campaigns of a report, and their comparison
ReportComparison, ComparedValue    the differences of their recipes and results
REPORT_VERSION    the version of the JSON
"""

import msgspec

from hpcrl.monitor.advisories import Advisory

REPORT_VERSION = 2


class ChartSeries(msgspec.Struct, frozen=True, kw_only=True):
    """One line, row of points or row of bars of a chart."""

    name: str
    values: list[float | None]
    """One for each value of x."""
    style: str = "line"
    """`line`, `faint`, `points` or `bars`."""


class ReportChart(msgspec.Struct, frozen=True, kw_only=True):
    """A chart and its numbers."""

    id: str
    title: str
    x_label: str
    y_label: str
    x: list[float]
    series: list[ChartSeries]
    kind: str = "number"
    """The kind of x: `number`, `time` (seconds since the epoch) or `category` (see `labels`)."""
    labels: list[str] = []
    note: str = ""


class KeyFigures(msgspec.Struct, frozen=True, kw_only=True):
    """The figures by which campaigns are compared."""

    step: int
    num_steps: int | None
    version: int
    reward_first: float | None
    """Mean of the first steps, 5 at most."""
    reward_last: float | None
    """Mean of the same number of last steps."""
    reward_noise: float | None
    """The difference of these two that is within the noise from step to step; None of fewer than two steps."""
    reward_best: float | None
    evaluation_last: float | None
    evaluation_best: float | None
    num_episodes: int
    """Episodes to train on: ended by themselves or at a limit, or scored for a failure."""
    num_uncounted: int
    """Episodes among them that have a trajectory, but that no env worker has counted: it was killed before that."""
    num_failed: int
    """Episodes scored for a failure, and those lost to infrastructure, as the monitor counts them."""
    num_faulted: int
    """Episodes lost to infrastructure."""
    num_aborted: int
    num_tokens: int
    num_trained_tokens: int
    """The tokens of the steps that changed the weights."""
    num_fit_tokens: int
    """Generated tokens that are to be trained on, whether a step has used them or not."""
    tokens_per_s: float
    wall_s: float
    """Time that jobs ran."""
    queued_s: float
    """Time that jobs waited in the queue."""
    node_hours: float
    gpu_hours: float
    trained_share: float | None
    """The share of generated tokens that are to be trained on; not all are yet, and flat groups may be dropped."""


class ProvenanceEntry(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    value: str


class JobFigures(msgspec.Struct, frozen=True, kw_only=True):
    """A job of the chain."""

    number: int
    id: str
    state: str
    reason: str
    queued: float | None
    started: float | None
    ended: float | None
    component_nodes: list[int]
    first_step: int | None
    last_step: int | None

    @property
    def num_nodes(self) -> int:
        return sum(self.component_nodes)

    @property
    def run_s(self) -> float:
        """The time for which it ran."""
        return 0.0 if self.started is None or self.ended is None else self.ended - self.started


class RoleFigures(msgspec.Struct, frozen=True, kw_only=True):
    """The use of the time of a role's workers; the shares are of the time that jobs held nodes for them."""

    role: str
    num_workers: int
    node_hours: float
    """The hours of its nodes, divided among the roles that share them."""
    busy_share: float | None
    """None if its work is not measured."""
    waiting_share: float | None
    starting_share: float
    idle_share: float
    """Held without a live worker."""
    tokens_per_s: float | None
    """The rate of all its workers, while they were up."""
    num_pauses: int
    """Loads of new weights."""
    pause_s: float
    """Mean time without generation while weights were loaded."""
    done_by: str = ""
    """The role whose workers do its work, if it has none: rewards may be scored by env workers."""


class EngineFigures(msgspec.Struct, frozen=True, kw_only=True):
    """The load of one engine while it was up, over all jobs; None is what it does not report."""

    engine: str
    """The worker's name without the job."""
    role: str
    node: str
    """The newest one."""
    up_s: float
    busy_share: float
    running: float
    """Requests that ran, on average."""
    waiting: float
    """Requests that waited in it, on average."""
    kv_share: float | None
    """The share of its KV memory in use, on average."""
    kv_most: float | None
    """The largest such share of a report."""
    tokens_per_s: float
    prefix_hit_share: float | None
    """The share of prompt tokens whose KV was in its prefix cache."""
    num_preemptions: int | None
    """Requests that lost their KV to others, and were computed again."""


class WorkerFigures(msgspec.Struct, frozen=True, kw_only=True):
    """A row of the Gantt chart: one worker in all jobs, or those that a node or a role has, if there are too many."""

    worker: str
    """Its name without the job; of several, how many they are."""
    role: str
    node: str
    """Its node, or the number of its nodes."""
    num: int
    """The workers of the row."""
    times: list[tuple[float, float]]
    """The times in which one of them was up; shorter gaps than can be drawn are closed."""
    failures: list[float]
    """The times when one of them failed; of those too near to distinguish, the first."""
    num_failures: int
    up_s: float
    """The time that they were up, added up."""


class FailureFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Reported failures of one kind; an episode that was tried again may have failed more than once."""

    what: str
    kind: str
    """`infrastructure` or `policy`."""
    domain: str
    node: str
    num: int
    is_least: bool
    """Only some are reported, with their number so far: there may be more."""
    newest: str
    time: float


class SampledToken(msgspec.Struct, frozen=True, kw_only=True):
    text: str
    logprob: float
    version: int
    number: int = 0
    """Its place among the tokens that the model generated in this turn, from 1."""


class SampledTurn(msgspec.Struct, frozen=True, kw_only=True):
    """A message of a conversation."""

    role: str
    text: str
    num_left_out: int = 0
    """Characters of the text that are left out."""
    reward: float | None = None
    versions: str = ""
    fate: str = ""
    num_tokens: int = 0
    generate_s: float = 0.0
    step_s: float = 0.0
    tokens: list[SampledToken] = []
    """The first tokens of what the model generated."""
    least_likely: list[SampledToken] = []
    """The tokens with the lowest log-probabilities among those that follow, in their order."""


class SampledTrajectory(msgspec.Struct, frozen=True, kw_only=True):
    """A trajectory that was chosen to be shown."""

    id: str
    chosen: list[str]
    """Reasons for choosing it: best, worst, longest, failed, newest, random."""
    domain: str
    group: str
    status: str
    outcome: str
    reward: float | None
    num_tokens: int
    num_turns: int
    start_version: int
    end_version: int
    created: float
    producer: str
    conversation: list[SampledTurn] = []
    note: str = ""
    """The parts that are not shown, and the reason for a missing text."""


class SampledGroup(msgspec.Struct, frozen=True, kw_only=True):
    """The attempts at one task, side by side."""

    id: str
    chosen: str
    domain: str
    reward_mean: float
    reward_std: float
    attempts: list[SampledTrajectory]


class TrajectoryFigures(msgspec.Struct, frozen=True, kw_only=True):
    """The trajectories in the spools."""

    num: int
    num_groups: int
    num_flat_groups: int
    sampled: list[SampledTrajectory]
    groups: list[SampledGroup]
    charts: list[ReportChart]
    problems: list[str]
    """Segments that could not be read."""
    num_kept: int = 0
    """Trajectories to train on: done or truncated."""
    missing: list[str] = []
    """The reasons why this machine cannot show all of them."""


class DomainRewards(msgspec.Struct, frozen=True, kw_only=True):
    """The rewards of one domain."""

    domain: str
    num_scored: int
    mean: float | None
    """Mean of all scored trajectories."""
    recent: float | None
    """Mean of the last 256."""
    evaluation: float | None
    """Mean of the last evaluation on held-out tasks."""


class CampaignReport(msgspec.Struct, frozen=True, kw_only=True):
    """One campaign."""

    name: str
    state: str
    is_partial: bool
    """It made every step, but a domain trained nothing."""
    reason: str
    verdict: str
    advisories: list[Advisory]
    key_figures: KeyFigures
    provenance: list[ProvenanceEntry]
    reward_charts: list[ReportChart]
    rewards: list[DomainRewards]
    stability_charts: list[ReportChart]
    time_charts: list[ReportChart]
    staleness_charts: list[ReportChart]
    engine_charts: list[ReportChart]
    engines: list[EngineFigures]
    jobs: list[JobFigures]
    roles: list[RoleFigures]
    workers: list[WorkerFigures]
    """All workers, whatever their number."""
    outcomes: dict[str, dict[str, int]]
    """Ended episodes by domain and outcome."""
    failed: dict[str, int]
    """The number of them that failed, by domain."""
    token_fates: dict[str, dict[str, int]]
    failures: list[FailureFigures]
    trajectories: TrajectoryFigures
    recipe: dict[str, str]
    """Every setting by its dotted key, as JSON."""
    problems: list[str]
    """Files that could not be read."""


class ComparedValue(msgspec.Struct, frozen=True, kw_only=True):
    key: str
    values: list[str]
    """One per campaign; "" where it is not set."""


class ReportComparison(msgspec.Struct, frozen=True, kw_only=True):
    """The differences of several campaigns."""

    verdict: str
    settings: list[ComparedValue]
    results: list[ComparedValue]
    charts: list[ReportChart]


class ReportDocument(msgspec.Struct, frozen=True, kw_only=True):
    """All campaigns of a report, and their comparison."""

    report: int
    hpcrl: str
    created: float
    campaigns: list[CampaignReport]
    comparison: ReportComparison | None = None
