"""The events of a campaign, one struct a kind; emitters construct them, and readers get them back.

CampaignEvent   the base of all events
make_segment_scored   make the event of a scored segment
build_line      make the line of an event
parse_event     read a line of an event file; None for torn, foreign or newer lines
is_known_event  whether this version has a kind
describe_event  describe the event to a person, if it is worth a line
NonNegativeCount, SmallInteger, UnixTime    field types
JobOutcome      the ways a job ends

The structs below the base are the kinds, such as StepFinished. A struct's tag is the kind's name on disk, its fields
are the keys of the line, in order. A field that is UNSET is left out; unknown keys are skipped.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

NonNegativeCount = Annotated[int, Meta(ge=0, lt=2**53)]
SmallInteger = Annotated[int, Meta(gt=-(2**53), lt=2**53)]
UnixTime = Annotated[float, Meta(gt=0, lt=1e11)]
JobOutcome = Literal["done", "failed", "stopped", "drained", "cut"]
"""The ways a job ends; a campaign whose last job was drained, or was cut off before that, has more to do."""


class CampaignEvent(msgspec.Struct, frozen=True, kw_only=True, tag_field="event"):
    """The fields of every line. The event log fills them in; an emitter leaves them out."""

    time: UnixTime = 0.0
    job: NonNegativeCount = 0
    role: str = ""
    worker: str = ""
    node: str | None = None
    partition: str | None = None


class JobStarted(CampaignEvent, frozen=True, kw_only=True, tag="job-started"):
    slurm_id: str | None = None
    """None on a machine without a scheduler."""
    end_time: UnixTime | None = None
    """End of the allocation."""


class JobEnded(CampaignEvent, frozen=True, kw_only=True, tag="job-ended"):
    outcome: str
    reason: str = ""


class NextJobQueued(CampaignEvent, frozen=True, kw_only=True, tag="follower"):
    """The job that follows this one waits in Slurm's queue."""

    slurm_id: str
    number: NonNegativeCount


class DrainStarted(CampaignEvent, frozen=True, kw_only=True, tag="draining"):
    reason: str = ""
    grace_s: float | None = None


class WorkerStarted(CampaignEvent, frozen=True, kw_only=True, tag="worker-started"):
    pid: SmallInteger | None = None
    gpus: list[str] = []


class WorkerRestarted(CampaignEvent, frozen=True, kw_only=True, tag="worker-restarted"):
    of: str | None = None
    """The worker concerned, with its job (`000-decode-0`) or without; None: the writer of the event."""


class WorkerEnded(CampaignEvent, frozen=True, kw_only=True, tag="worker-ended"):
    reason: str = ""


class WorkerFailed(CampaignEvent, frozen=True, kw_only=True, tag="worker-failed"):
    of: str | None = None
    """The worker concerned, as in WorkerRestarted."""
    reason: str = ""


class EventsLost(CampaignEvent, frozen=True, kw_only=True, tag="events-lost"):
    """Events of the writer could not be written, and too many waited."""

    num: NonNegativeCount
    reason: str = ""


class RewardJobsScaled(CampaignEvent, frozen=True, kw_only=True, tag="reward-jobs"):
    """A reward job was added, or all reward jobs are ended."""

    num: NonNegativeCount
    waiting: NonNegativeCount = 0
    """Segments that wait for a reward job."""


class EpisodesCounted(CampaignEvent, frozen=True, kw_only=True, tag="episodes"):
    """The counts of one env worker; all but `running` increase until its process ends."""

    running: NonNegativeCount = 0
    done: NonNegativeCount = 0
    truncated: NonNegativeCount = 0
    aborted_stale: NonNegativeCount = 0
    aborted_redundant: NonNegativeCount = 0
    env_fault: NonNegativeCount = 0
    policy_fault: NonNegativeCount = 0
    num_tokens: NonNegativeCount = 0
    turns: NonNegativeCount = 0
    remote_prefills: NonNegativeCount = 0
    outcomes: dict[str, dict[str, NonNegativeCount]] = {}
    """Ended episodes by domain and outcome (hpcrl.spool.outcome)."""
    token_fates: dict[str, dict[str, NonNegativeCount]] = {}
    """Tokens generated in ended episodes, by domain and what became of them: `trained` if they were left to training,
    else the reason: a status (`aborted-stale`, ...), or why a turn is masked (`spool.record.MASK_REASONS`)."""
    lengths: dict[str, dict[str, NonNegativeCount]] = {}
    """The lengths of ended episodes by status (`spool.episode_lengths.LengthCounts`)."""
    loop_share: float = 0.0
    """The share of a core that the worker's event loop has used since the counts before."""
    loop_delay_s: float = 0.0
    """The longest that anything waited for the loop in this time."""


class EngineCounted(CampaignEvent, frozen=True, kw_only=True, tag="engine"):
    """The load of one engine worker since the event before."""

    window_s: float
    """The time that it covers."""
    version: NonNegativeCount = 0
    busy_share: float = 0.0
    """The share of this time in which at least one request ran."""
    running: float = 0.0
    """Requests that ran, on average."""
    waiting: float = 0.0
    """Requests that waited in the engine, on average."""
    num_places: SmallInteger | None = None
    """The most requests that it runs at once."""
    kv_share: float | None = None
    """The share of its KV memory in use, on average; None if the engine does not report it."""
    num_tokens: NonNegativeCount = 0
    """Tokens generated in this time."""
    num_prefix_queries: NonNegativeCount | None = None
    """Prompt tokens looked up in its prefix cache in this time; None if the engine does not report it."""
    num_prefix_hits: NonNegativeCount | None = None
    """The tokens of them whose KV was there."""
    num_preemptions: NonNegativeCount | None = None
    """Requests that lost their KV to others in this time, and were computed again."""


class TasksRestarted(CampaignEvent, frozen=True, kw_only=True, tag="tasks-restarted"):
    """An env worker starts the groups again that ran when its earlier run ended."""

    num: NonNegativeCount


class TaskFailed(CampaignEvent, frozen=True, kw_only=True, tag="task-failed"):
    """A task was abandoned, since its group was started too often and never finished."""

    id: str
    """The group."""
    domain: str = ""
    seed: int = 0
    place: SmallInteger | None = None
    """Its place in the sequence of the domain's rows, if the domain has `tasks`."""
    reason: str = ""


class CurriculumUpdated(CampaignEvent, frozen=True, kw_only=True, tag="curriculum"):
    """The curriculum changed the weights of the domains."""

    weights: dict[str, float]


class ParsersChosen(CampaignEvent, frozen=True, kw_only=True, tag="parsers"):
    """An env worker chose how answers to agent programs are read (docs/agents.md)."""

    tool_parser: str
    reasoning_parser: str
    reason: str = ""


class TurnRouted(CampaignEvent, frozen=True, kw_only=True, tag="route"):
    """The router's decision about one turn; a sample of them is written."""

    id: str
    """Id of the request."""
    domain: str = ""
    prefill: str | None = None
    """The worker that computes the prompt for `decode`; None if `decode` does."""
    decode: str | None = None
    reason: str = ""
    wait_s: float = 0.0
    serve_s: float = 0.0
    is_home: bool = False
    num_cached: NonNegativeCount = 0
    """The prompt tokens whose KV `decode` should have."""


class SegmentScored(CampaignEvent, frozen=True, kw_only=True, tag="scored"):
    """A segment of trajectories was scored."""

    segment: str = ""
    num: NonNegativeCount = 0
    """Trajectories that have a reward."""
    reward_mean: float | None = None
    rewards: dict[str, list[float]] = {}
    """Rewards by domain."""
    reward_errors: dict[str, NonNegativeCount] = {}
    """The number of them that are `on_reward_error`, since the reward function failed, by domain."""
    replaced_outcomes: dict[str, dict[str, NonNegativeCount]] = {}
    """The outcomes that these had as they were played, by domain; older campaigns lack them."""
    reward_faults: dict[str, dict[str, NonNegativeCount]] = {}
    """The outcomes as played of trajectories that got no reward, since its function failed, by domain."""


class VersionPublished(CampaignEvent, frozen=True, kw_only=True, tag="published"):
    version: NonNegativeCount
    step: NonNegativeCount = 0
    wall_s: float | None = None
    stall_s: float | None = None
    """Time that training was paused for it."""


class VersionDelivered(CampaignEvent, frozen=True, kw_only=True, tag="courier"):
    """The couriers delivered a version to the windows of all other nodes."""

    version: NonNegativeCount
    bytes: NonNegativeCount = 0
    """Size of the version."""
    sent_bytes: NonNegativeCount = 0
    """Bytes sent to each node."""
    wall_s: float | None = None
    codec: str = ""
    reason: str = ""
    """Reason for this codec."""
    to: list[str] = []
    sources: list[str] = []


class VersionLoaded(CampaignEvent, frozen=True, kw_only=True, tag="loaded"):
    version: NonNegativeCount
    wall_s: float | None = None
    stall_s: float | None = None
    """Time without generation in the engine."""


class GpuShiftChanged(CampaignEvent, frozen=True, kw_only=True, tag="shift"):
    """A worker took GPUs that the trainer and engines share, or is about to leave them."""

    is_awake: bool
    """False: its state is in host memory."""
    wait_s: float | None = None
    """Time that it waited for the GPUs."""


class TransportChanged(CampaignEvent, frozen=True, kw_only=True, tag="transport"):
    """The transport of versions to the engines has changed."""

    transport: str
    reason: str = ""


class StepFinished(CampaignEvent, frozen=True, kw_only=True, tag="step"):
    """A training step: the fields of `trainers.base.StepMetrics`, which documents them, and three more."""

    step: NonNegativeCount
    version: NonNegativeCount = 0
    skipped: str | None = None
    """Reason for leaving the weights unchanged."""
    num_trajectories: NonNegativeCount | None = None
    num_groups: NonNegativeCount | None = None
    num_flat_groups: NonNegativeCount | None = None
    num_too_long: NonNegativeCount | None = None
    num_tokens: NonNegativeCount | None = None
    num_padded_tokens: NonNegativeCount | None = None
    reward_mean: float | None = None
    reward_std: float | None = None
    lag_mean: float | None = None
    lag_max: SmallInteger | None = None
    loss: float | None = None
    grad_norm: float | None = None
    clip_fraction: float | None = None
    is_ratio_mean: float | None = None
    is_truncated_fraction: float | None = None
    kl: float | None = None
    entropy: float | None = None
    step_s: float | None = None
    kl_fresh: float | None = None
    kl_reference: float | None = None
    is_ratio_p05: float | None = None
    is_ratio_p50: float | None = None
    is_ratio_p95: float | None = None
    value_loss: float | None = None
    learning_rate: float | None = None
    length_mean: float | None = None
    length_max: SmallInteger | None = None
    lags: dict[str, NonNegativeCount] = {}
    imbalance: float | None = None
    tokens_per_s: float | None = None
    times: dict[str, float] = {}
    num_rows: NonNegativeCount | None = None
    too_long_tokens: dict[str, NonNegativeCount] = {}
    replayed_fraction: float | None = None
    mfu: float | None = None
    """Share of the trainer GPUs' peak FLOP/s that the step used; None without GPUs."""
    wait_s: float | None = None
    """Time that the trainer waited for trajectories."""
    lengths: dict[str, NonNegativeCount] = {}
    """The lengths of the episodes that it trained on (`spool.episode_lengths.LengthCounts`)."""


class MemoryRanOut(CampaignEvent, frozen=True, kw_only=True, tag="out-of-memory"):
    """A rank of the trainer ran out of memory; all ranks start again with lower limits, from the last checkpoint."""

    step: NonNegativeCount = 0
    """0 if it is not known."""
    rank: SmallInteger | None = None
    """None if the kernel ended it, and nothing else is known."""
    num_rows: NonNegativeCount = 0
    """The rows of the micro-batch that was being computed; 0 if there was none."""
    num_tokens: NonNegativeCount = 0
    """Its tokens, padding included."""
    tokens_per_micro_batch: SmallInteger | None = None
    """The limit from now on, if it is lower than that of the recipe."""
    max_row_tokens: SmallInteger | None = None
    """The limit from now on, if memory ran out with a single row."""
    reason: str = ""
    """The event and its consequence, for a person."""


class RowsSkipped(CampaignEvent, frozen=True, kw_only=True, tag="rows-skipped"):
    """A step left out the training rows that are longer than the trainer reads."""

    step: NonNegativeCount
    version: NonNegativeCount = 0
    num: NonNegativeCount
    """The rows."""
    num_tokens: NonNegativeCount
    """The tokens that they would have trained."""
    token_counts: dict[str, NonNegativeCount] = {}
    """The same by domain."""
    share: float = 0.0
    """Their share of the tokens that the step would have trained."""
    limit: NonNegativeCount = 0
    """The tokens of the longest row that is trained."""
    reason: str = ""
    """The reason for this limit."""


class StaleDropped(CampaignEvent, frozen=True, kw_only=True, tag="stale"):
    """The trainer dropped trajectories that were too old."""

    num: NonNegativeCount
    version: NonNegativeCount = 0
    """The version that they were too old for."""
    token_counts: dict[str, NonNegativeCount] = {}
    """Tokens that would have been trained, by domain."""
    groups: list[str] = []
    """The groups that are lost to training with them; env workers start these again."""


class FlatGroupsDropped(CampaignEvent, frozen=True, kw_only=True, tag="flat"):
    """The trainer dropped groups in which no episode was better than another; others take their place."""

    num: NonNegativeCount
    """Groups dropped since the last such event."""
    version: NonNegativeCount = 0
    domains: dict[str, NonNegativeCount] = {}
    """Their number by domain."""
    groups: list[str] = []
    shares: dict[str, float] = {}
    """The share of flat groups among all that the trainer has seen of these domains since it started."""


class EvaluationFinished(CampaignEvent, frozen=True, kw_only=True, tag="evaluation"):
    """The result of a round of held-out tasks; a repeated event has the same number."""

    number: NonNegativeCount
    version: NonNegativeCount = 0
    """The newest weights at its start."""
    reward_mean: float | None = None
    domains: dict[str, float] = {}
    """Mean reward of each domain."""
    num_episodes: NonNegativeCount = 0
    num_faults: NonNegativeCount = 0
    length_mean: float | None = None
    oldest: SmallInteger | None = None
    """Oldest version that generated any of it."""
    newest: SmallInteger | None = None
    outcomes: dict[str, dict[str, NonNegativeCount]] = {}
    """All episodes that were started, by domain and outcome (hpcrl.spool.outcome)."""


class SegmentsRetired(CampaignEvent, frozen=True, kw_only=True, tag="retired"):
    """The spools released trajectories that no process needs any more."""

    num: NonNegativeCount
    archive: str | None = None
    """The archive's segment that holds them now."""


class TrainingResumed(CampaignEvent, frozen=True, kw_only=True, tag="resumed"):
    step: NonNegativeCount
    version: NonNegativeCount = 0
    checkpoint: str = ""
    """Name of its directory."""


class CheckpointSaved(CampaignEvent, frozen=True, kw_only=True, tag="checkpoint"):
    step: NonNegativeCount
    version: NonNegativeCount = 0
    wall_s: float | None = None
    stall_s: float | None = None
    """Time that training was paused for it."""


class LayoutChosen(CampaignEvent, frozen=True, kw_only=True, tag="layout"):
    layout: str
    reason: str = ""
    nodes: list[list[str]] = []
    """Nodes of each component."""


if TYPE_CHECKING:
    FaultSubject = Literal[
        "chain",
        "checkpoint",
        "courier",
        "env-fault",
        "env-loop",
        "env-paused",
        "evaluation",
        "groups",
        "judge",
        "metrics",
        "node",
        "policy-fault",
        "quorum",
        "records",
        "request",
        "reward",
        "rows",
        "spool",
        "step",
        "train-limits",
        "weights",
        "worker-pool",
    ]
else:
    FaultSubject = str  # emitters use those above; readers also accept those of newer versions


class FaultReported(CampaignEvent, frozen=True, kw_only=True, tag="fault"):
    """A fault that does not end the campaign; details are set where known."""

    what: FaultSubject
    detail: str = ""
    id: str | UnsetType = UNSET
    """The episode concerned."""
    version: SmallInteger | UnsetType = UNSET
    domain: str | UnsetType = UNSET
    rank: SmallInteger | UnsetType = UNSET
    """The courier that holds up the others."""
    at: str | UnsetType = UNSET
    """The node of that courier."""
    bucket: SmallInteger | UnsetType = UNSET
    """The part of the version that it has reached."""
    bytes: SmallInteger | UnsetType = UNSET
    """Bytes of the version that it has received."""
    num: SmallInteger | UnsetType = UNSET
    """The number of faults like this one so far, if only some of them are reported."""


# A dict instead of a union: msgspec would try all of a union for every line.
_EVENT_TYPES: dict[str, type[CampaignEvent]] = {
    str(kind.__struct_config__.tag): kind for kind in CampaignEvent.__subclasses__()
}


def make_segment_scored(segment: str, rewards: dict[str, list[float]]) -> SegmentScored:
    """Make the event of a segment from its rewards by domain."""
    given = [reward for domain in rewards.values() for reward in domain]
    mean = sum(given) / len(given) if given else None
    return SegmentScored(segment=segment, num=len(given), reward_mean=mean, rewards=rewards)


def parse_event(line: Mapping[str, Any]) -> CampaignEvent | None:
    """Return the event of a line; None for an unknown kind or an invalid line."""
    name = line.get("event")
    if name == "rung":  # the earlier name of the kind, and of its field
        name = "transport"
        line = {**line, "event": name, "transport": line.get("rung")}
    kind = _EVENT_TYPES.get(name) if isinstance(name, str) else None
    if kind is None or "time" not in line:
        return None
    try:
        return msgspec.convert(line, kind)
    except msgspec.ValidationError:
        return None


def is_known_event(name: object) -> bool:
    """Return whether this version has a kind of event of this name."""
    return isinstance(name, str) and name in _EVENT_TYPES


def build_line(event: CampaignEvent, *, time: float, origin: Mapping[str, Any]) -> dict[str, Any]:
    """Build the line of an event that `origin` (job, role, worker, ...) emits; the event's own fields win."""
    fields = {name: getattr(event, name) for name in event.__struct_fields__}
    common = {name: fields.pop(name) for name in CampaignEvent.__struct_fields__}
    line = {"time": time, "event": event.__struct_config__.tag, **origin}
    line |= {name: value for name, value in common.items() if value}
    return line | {name: value for name, value in fields.items() if value is not UNSET}


def describe_event(event: CampaignEvent) -> str | None:
    """Describe an event to a person; None for the kinds that are too frequent."""
    return _describe_job_event(event) or _describe_worker_event(event) or _describe_progress_event(event)


def _describe_job_event(event: CampaignEvent) -> str | None:
    match event:
        case JobStarted():
            return f"job {event.job} started on {event.node or 'its node'}"
        case JobEnded():
            return f"job {event.job} {event.outcome}" + _append_reason(event.reason)
        case NextJobQueued():
            return f"job {event.number} is queued after job {event.job}, as Slurm job {event.slurm_id}"
        case DrainStarted():
            return "draining: no new episodes, then a checkpoint" + _append_reason(event.reason)
        case LayoutChosen():
            return f"layout {event.layout}" + _append_reason(event.reason)
    return None


def _describe_worker_event(event: CampaignEvent) -> str | None:
    match event:
        case WorkerFailed():
            return f"worker {event.of or event.worker} failed" + _append_reason(event.reason)
        case WorkerRestarted():
            return f"worker {event.of or event.worker} restarted"
        case RewardJobsScaled():
            return (
                f"{event.num} reward jobs, as {event.waiting} segments wait" if event.num else "reward jobs are ended"
            )
        case MemoryRanOut():
            return event.reason or "the trainer ran out of memory"
        case TransportChanged():
            return f"weights go by {event.transport}" + _append_reason(event.reason)
        case FaultReported():
            return event.what + _append_reason(event.detail)
    return None


def _describe_progress_event(event: CampaignEvent) -> str | None:
    match event:
        case EventsLost():
            return f"{event.num} events of {event.worker} could not be written" + _append_reason(event.reason)
        case TasksRestarted():
            return f"{event.num} tasks of {event.worker} that were in flight are started again"
        case TaskFailed():
            return f"task {event.id} was abandoned" + _append_reason(event.reason)
        case TrainingResumed(step=step):
            how = f"continues from the checkpoint of step {step}" if step else "starts again, without a checkpoint"
            return f"training {how}"
        case StepFinished(skipped=str(why)):
            return f"step {event.step} left the weights unchanged" + _append_reason(why)
        case EvaluationFinished(reward_mean=float(mean)):
            return f"evaluation of version {event.version}: mean reward {mean:.3f} in {event.num_episodes} episodes"
        case EvaluationFinished():
            return f"evaluation of version {event.version}: not one of {event.num_faults} episodes could be scored"
        case CheckpointSaved():
            return f"checkpoint at step {event.step} (version {event.version})"
        case SegmentsRetired():
            return f"{event.num} trajectories left the spools" + _append_reason(
                f"archived in {event.archive}" * bool(event.archive)
            )
    return None


def _append_reason(reason: str) -> str:
    return f": {reason}" if reason else ""
