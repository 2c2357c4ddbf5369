"""The events that the monitor understands, and what a person reads of them.

parse(line)     a line of an event file, or None: torn, foreign, or of no use here
plain(event)    the event in words, if it is worth a line
"""

from collections.abc import Mapping
from typing import Annotated, Any, get_args

import msgspec
from msgspec import Meta

Count = Annotated[int, Meta(ge=0, lt=2**53)]
Time = Annotated[float, Meta(gt=0, lt=1e11)]


def _tag(name: str) -> str:
    """WorkerStarted -> worker-started"""
    return "".join(f"-{letter.lower()}" if letter.isupper() else letter for letter in name).lstrip("-")


class _Event(msgspec.Struct, frozen=True, kw_only=True, tag_field="event", tag=_tag):
    """What every line has."""

    time: Time
    job: Count = 0
    role: str = ""
    worker: str = ""
    node: str | None = None
    partition: str | None = None


class JobStarted(_Event, frozen=True, kw_only=True):
    end_time: float | None = None
    """When the allocation ends."""


class JobEnded(_Event, frozen=True, kw_only=True):
    outcome: str
    reason: str = ""


class Draining(_Event, frozen=True, kw_only=True):
    reason: str = ""


class WorkerStarted(_Event, frozen=True, kw_only=True): ...


class WorkerRestarted(_Event, frozen=True, kw_only=True):
    of: str | None = None
    """The worker that it is about, with its job (`000-decode-0`) or without; None: the one that writes."""
    reason: str = ""


class WorkerEnded(_Event, frozen=True, kw_only=True):
    reason: str = ""


class WorkerFailed(_Event, frozen=True, kw_only=True):
    of: str | None = None
    """As in WorkerRestarted."""
    reason: str = ""


class Episodes(_Event, frozen=True, kw_only=True):
    """Of one env worker; all but `running` count up for as long as its process lives."""

    running: Count = 0
    done: Count = 0
    truncated: Count = 0
    aborted_stale: Count = 0
    aborted_redundant: Count = 0
    env_fault: Count = 0
    policy_fault: Count = 0
    num_tokens: Count = 0
    remote_prefills: Count = 0
    turns: Count = 0


class Scored(_Event, frozen=True, kw_only=True):
    """One segment of trajectories has its rewards."""

    rewards: dict[str, list[float]] = {}
    """By domain."""


class Published(_Event, frozen=True, kw_only=True):
    version: Count


class Loaded(_Event, frozen=True, kw_only=True):
    version: Count


class Step(_Event, frozen=True, kw_only=True):
    step: Count
    version: Count = 0
    reward_mean: float | None = None
    num_trajectories: Count = 0
    skipped: str | None = None
    """Why the weights were left alone."""
    loss: float | None = None
    kl: float | None = None
    entropy: float | None = None
    lag_mean: float | None = None
    step_s: float | None = None
    wait_s: float | None = None


class Evaluation(_Event, frozen=True, kw_only=True):
    """Held-out tasks were played; one that is told again has the same number."""

    number: Count
    version: Count = 0
    """The newest weights when it began."""
    reward_mean: float | None = None
    num_episodes: Count = 0
    num_faults: Count = 0


class Retired(_Event, frozen=True, kw_only=True):
    """Trajectories that nothing needs any more left the spools."""

    num: Count
    archive: str | None = None
    """The archive's segment that holds them now."""


class Resumed(_Event, frozen=True, kw_only=True):
    step: Count
    version: Count = 0


class Checkpoint(_Event, frozen=True, kw_only=True):
    step: Count
    version: Count = 0


class Layout(_Event, frozen=True, kw_only=True):
    layout: str
    reason: str = ""
    nodes: list[list[str]] = []
    """Of each component."""


class Rung(_Event, frozen=True, kw_only=True):
    rung: str
    reason: str = ""


class Fault(_Event, frozen=True, kw_only=True):
    what: str
    detail: str = ""


Event = (
    JobStarted
    | JobEnded
    | Draining
    | WorkerStarted
    | WorkerRestarted
    | WorkerEnded
    | WorkerFailed
    | Episodes
    | Scored
    | Published
    | Loaded
    | Step
    | Evaluation
    | Retired
    | Resumed
    | Checkpoint
    | Layout
    | Rung
    | Fault
)


# By hand, because msgspec would look at all of a union for every single line.
_KINDS: dict[str, type[Event]] = {str(kind.__struct_config__.tag): kind for kind in get_args(Event)}


def parse(line: Mapping[str, Any]) -> Event | None:
    """The event in a line; None for one that the monitor has no use for or cannot read."""
    name = line.get("event")
    kind = _KINDS.get(name) if isinstance(name, str) else None
    if kind is None:
        return None
    try:
        return msgspec.convert(line, kind)
    except msgspec.ValidationError:
        return None


def plain(event: Event) -> str | None:
    """What a person should read of an event; None for the steady flow."""
    match event:
        case JobStarted():
            return f"job {event.job} started on {event.node or 'its node'}"
        case JobEnded():
            return f"job {event.job} {event.outcome}" + _because(event.reason)
        case Draining():
            return "draining: no new episodes, then a checkpoint" + _because(event.reason)
        case WorkerFailed():
            return f"worker {event.of or event.worker} failed" + _because(event.reason)
        case WorkerRestarted():
            return f"worker {event.of or event.worker} restarted" + _because(event.reason)
        case Layout():
            return f"layout {event.layout}" + _because(event.reason)
        case Rung():
            return f"weights go by {event.rung}" + _because(event.reason)
        case Fault():
            return event.what + _because(event.detail)
    return _plain_training(event)


def _plain_training(event: Event) -> str | None:
    match event:
        case Resumed():
            return f"training goes on from the checkpoint of step {event.step}"
        case Step(skipped=str(why)):
            return f"step {event.step} left the weights alone" + _because(why)
        case Evaluation(reward_mean=float(mean)):
            return f"evaluation of version {event.version}: mean reward {mean:.3f} in {event.num_episodes} episodes"
        case Evaluation():
            return f"evaluation of version {event.version}: not one of {event.num_faults} episodes could be scored"
        case Checkpoint():
            return f"checkpoint at step {event.step} (version {event.version})"
        case Retired():
            return f"{event.num} trajectories left the spools" + _because(
                f"archived in {event.archive}" * bool(event.archive)
            )
    return None


def _because(reason: str) -> str:
    return f": {reason}" if reason else ""
