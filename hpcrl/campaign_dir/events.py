"""The events of a campaign: one struct a kind, which emitters construct and all readers get back.

parse(line)     the event in a line of an event file, or None: torn, foreign, or of a newer version
build_line      the line of an event
plain(event)    the event in words, if it is worth a line

A struct's tag is the kind's name on disk, its fields are the keys of the line in their order. A field that is UNSET is
left out; fields that no struct knows are skipped.
"""

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
from msgspec import UNSET, Meta, UnsetType

NonNegativeCount = Annotated[int, Meta(ge=0, lt=2**53)]
UnixTime = Annotated[float, Meta(gt=0, lt=1e11)]


class CampaignEvent(msgspec.Struct, frozen=True, kw_only=True, tag_field="event"):
    """What every line has. The event log fills it in; an emitter leaves it out."""

    time: UnixTime = 0.0
    job: NonNegativeCount = 0
    role: str = ""
    worker: str = ""
    node: str | None = None
    partition: str | None = None


class JobStarted(CampaignEvent, frozen=True, kw_only=True, tag="job-started"):
    slurm_id: str | None = None
    """None on a machine without a scheduler."""
    end_time: float | None = None
    """When the allocation ends."""


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
    pid: int | None = None
    gpus: list[str] = []


class WorkerRestarted(CampaignEvent, frozen=True, kw_only=True, tag="worker-restarted"):
    of: str | None = None
    """The worker that it is about, with its job (`000-decode-0`) or without; None: the one that writes."""


class WorkerEnded(CampaignEvent, frozen=True, kw_only=True, tag="worker-ended"):
    reason: str = ""


class WorkerFailed(CampaignEvent, frozen=True, kw_only=True, tag="worker-failed"):
    of: str | None = None
    """As in WorkerRestarted."""
    reason: str = ""


class RewardJobsScaled(CampaignEvent, frozen=True, kw_only=True, tag="reward-jobs"):
    """A reward job was added, or all of them are ended."""

    num: NonNegativeCount
    waiting: NonNegativeCount = 0
    """Segments that wait for a reward job."""


class EpisodesCounted(CampaignEvent, frozen=True, kw_only=True, tag="episodes"):
    """The counts of one env worker; all but `running` increase for as long as its process lives."""

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
    groups_lost: NonNegativeCount = 0
    replaced: NonNegativeCount = 0
    evicted: NonNegativeCount = 0
    by_domain: dict[str, dict[str, int]] = {}
    """Ended episodes by domain and status."""


class CurriculumUpdated(CampaignEvent, frozen=True, kw_only=True, tag="curriculum"):
    """The curriculum gave new weights of the domains."""

    weights: dict[str, float]


class TurnRouted(CampaignEvent, frozen=True, kw_only=True, tag="route"):
    """The router's decision about one turn; a sample of them is written."""

    id: str
    """The request's."""
    domain: str = ""
    prefill: str | None = None
    """The worker that computes the prompt for `decode`, if another one does."""
    decode: str | None = None
    reason: str = ""
    wait_s: float = 0.0
    serve_s: float = 0.0
    is_home: bool = False


class SegmentScored(CampaignEvent, frozen=True, kw_only=True, tag="scored"):
    """One segment of trajectories has its rewards."""

    segment: str = ""
    num: NonNegativeCount = 0
    """Trajectories that have a reward."""
    reward_mean: float | None = None
    rewards: dict[str, list[float]] = {}
    """By domain."""


class VersionPublished(CampaignEvent, frozen=True, kw_only=True, tag="published"):
    version: NonNegativeCount
    step: NonNegativeCount = 0
    wall_s: float | None = None
    stall_s: float | None = None
    """How long training stood still for it."""


class VersionDelivered(CampaignEvent, frozen=True, kw_only=True, tag="courier"):
    """The couriers have brought a version to the windows of all other nodes."""

    version: NonNegativeCount
    bytes: NonNegativeCount = 0
    """Of the version."""
    sent_bytes: NonNegativeCount = 0
    """Over the wire, to each node."""
    wall_s: float | None = None
    codec: str = ""
    reason: str = ""
    """Why this codec was chosen."""
    to: list[str] = []
    sources: list[str] = []


class VersionLoaded(CampaignEvent, frozen=True, kw_only=True, tag="loaded"):
    version: NonNegativeCount
    wall_s: float | None = None
    stall_s: float | None = None
    """How long the engine generated nothing."""


class RungChanged(CampaignEvent, frozen=True, kw_only=True, tag="rung"):
    """Versions go to the engines in this way from now on."""

    rung: str
    reason: str = ""


class StepFinished(CampaignEvent, frozen=True, kw_only=True, tag="step"):
    """One training step: the fields of `trainers.base.StepMetrics`, which explains them, and two more."""

    step: NonNegativeCount
    version: NonNegativeCount = 0
    skipped: str | None = None
    """Why the weights were left alone."""
    num_trajectories: NonNegativeCount | None = None
    num_groups: NonNegativeCount | None = None
    num_flat_groups: NonNegativeCount | None = None
    num_too_long: NonNegativeCount | None = None
    num_tokens: NonNegativeCount | None = None
    num_padded_tokens: NonNegativeCount | None = None
    reward_mean: float | None = None
    reward_std: float | None = None
    lag_mean: float | None = None
    lag_max: int | None = None
    loss: float | None = None
    grad_norm: float | None = None
    clip_fraction: float | None = None
    is_ratio_mean: float | None = None
    is_truncated_fraction: float | None = None
    kl: float | None = None
    entropy: float | None = None
    step_s: float | None = None
    kl_reference: float | None = None
    is_ratio_p05: float | None = None
    is_ratio_p50: float | None = None
    is_ratio_p95: float | None = None
    value_loss: float | None = None
    learning_rate: float | None = None
    length_mean: float | None = None
    length_max: int | None = None
    lags: dict[str, int] = {}
    imbalance: float | None = None
    tokens_per_s: float | None = None
    times: dict[str, float] = {}
    mfu: float | None = None
    """The share that the step had of what the trainer's GPUs can do; None without GPUs."""
    wait_s: float | None = None
    """How long the trainer waited for trajectories."""


class StaleDropped(CampaignEvent, frozen=True, kw_only=True, tag="stale"):
    """Trajectories were too old to train on."""

    num: NonNegativeCount
    version: NonNegativeCount = 0
    """The version that they were too old for."""


class EvaluationFinished(CampaignEvent, frozen=True, kw_only=True, tag="evaluation"):
    """The result of a round of held-out tasks; one that is written again has the same number."""

    number: NonNegativeCount
    version: NonNegativeCount = 0
    """The newest weights when it began."""
    reward_mean: float | None = None
    domains: dict[str, float] = {}
    """The mean reward of each."""
    num_episodes: NonNegativeCount = 0
    num_faults: NonNegativeCount = 0
    length_mean: float | None = None
    oldest: int | None = None
    """Of the versions that generated anything."""
    newest: int | None = None


class SegmentsRetired(CampaignEvent, frozen=True, kw_only=True, tag="retired"):
    """Trajectories that nothing needs any more left the spools."""

    num: NonNegativeCount
    num_segments: NonNegativeCount = 0
    archive: str | None = None
    """The archive's segment that holds them now."""


class TrainingResumed(CampaignEvent, frozen=True, kw_only=True, tag="resumed"):
    step: NonNegativeCount
    version: NonNegativeCount = 0
    checkpoint: str = ""
    """Its directory's name."""


class CheckpointSaved(CampaignEvent, frozen=True, kw_only=True, tag="checkpoint"):
    step: NonNegativeCount
    version: NonNegativeCount = 0
    wall_s: float | None = None
    stall_s: float | None = None
    """How long training stood still for it."""


class LayoutChosen(CampaignEvent, frozen=True, kw_only=True, tag="layout"):
    layout: str
    reason: str = ""
    nodes: list[list[str]] = []
    """Of each component."""


class FaultReported(CampaignEvent, frozen=True, kw_only=True, tag="fault"):
    """Something went wrong that does not end the campaign; what else is known of it is set."""

    what: str
    detail: str = ""
    id: str | UnsetType = UNSET
    """The episode that it is about."""
    version: int | UnsetType = UNSET
    domain: str | UnsetType = UNSET
    rank: int | UnsetType = UNSET
    """The courier that holds up the others."""
    at: str | UnsetType = UNSET
    """That courier's node."""
    bucket: int | UnsetType = UNSET
    """The part of the version that it has come to."""
    bytes: int | UnsetType = UNSET
    """What it has of the version."""


# By hand, because msgspec would look at all of a union for every single line.
_EVENT_TYPES: dict[str, type[CampaignEvent]] = {
    str(kind.__struct_config__.tag): kind for kind in CampaignEvent.__subclasses__()
}


def parse_event(line: Mapping[str, Any]) -> CampaignEvent | None:
    """The event in a line; None for one of an unknown kind, or that cannot be read."""
    name = line.get("event")
    kind = _EVENT_TYPES.get(name) if isinstance(name, str) else None
    if kind is None or "time" not in line:
        return None
    try:
        return msgspec.convert(line, kind)
    except msgspec.ValidationError:
        return None


def build_line(event: CampaignEvent, *, time: float, origin: Mapping[str, Any]) -> dict[str, Any]:
    """Build the line of an event that `origin` (job, role, worker, ...) emits; what the event says of itself counts."""
    fields = {name: getattr(event, name) for name in event.__struct_fields__}
    common = {name: fields.pop(name) for name in CampaignEvent.__struct_fields__}
    line = {"time": time, "event": event.__struct_config__.tag, **origin}
    line |= {name: value for name, value in common.items() if value}
    return line | {name: value for name, value in fields.items() if value is not UNSET}


def describe_event(event: CampaignEvent) -> str | None:
    """What a person should read of an event; None for the steady flow."""
    match event:
        case JobStarted():
            return f"job {event.job} started on {event.node or 'its node'}"
        case JobEnded():
            return f"job {event.job} {event.outcome}" + _append_reason(event.reason)
        case DrainStarted():
            return "draining: no new episodes, then a checkpoint" + _append_reason(event.reason)
        case WorkerFailed():
            return f"worker {event.of or event.worker} failed" + _append_reason(event.reason)
        case WorkerRestarted():
            return f"worker {event.of or event.worker} restarted"
        case LayoutChosen():
            return f"layout {event.layout}" + _append_reason(event.reason)
        case RungChanged():
            return f"weights go by {event.rung}" + _append_reason(event.reason)
        case FaultReported():
            return event.what + _append_reason(event.detail)
    return _describe_training_event(event)


def _describe_training_event(event: CampaignEvent) -> str | None:
    match event:
        case TrainingResumed():
            return f"training goes on from the checkpoint of step {event.step}"
        case StepFinished(skipped=str(why)):
            return f"step {event.step} left the weights alone" + _append_reason(why)
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
