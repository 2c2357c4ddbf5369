"""The state of a job and of its campaign from what is known of them: pure.

    planned   no job yet                      done      every step was trained
    queued    waits in Slurm's queue          stopped   somebody stopped it, or its time was up: resume goes on
    running   its driver works                failed    it ended by itself, and not well
    draining  ends what it has begun          unknown   nobody can tell now; unknown is not failed

A job has one state more: drained, which is stopped in a campaign that has no next job.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from hpcrl.slurm.status import ACTIVE, ENDED, WAITING

State = Literal["planned", "queued", "running", "draining", "done", "failed", "stopped", "unknown"]
JobState = Literal["queued", "running", "draining", "drained", "done", "failed", "stopped", "unknown"]

GO_ON = "`hpcrl resume` goes on from the last checkpoint"
_GOING_ON: tuple[Literal["running", "draining", "queued", "unknown"], ...] = (
    "running",
    "draining",
    "queued",
    "unknown",
)
_OUTCOMES: dict[str, JobState] = {"done": "done", "failed": "failed", "stopped": "stopped", "drained": "drained"}


@dataclass(frozen=True, kw_only=True)
class JobFacts:
    """All that is known of one job."""

    outcome: str | None = None
    """What its driver left behind, if it has ended."""
    reason: str = ""
    slurm: str | None = None
    """What Slurm says; None for a job that Slurm has nothing to do with."""
    slurm_reason: str = ""
    process: bool | None = None
    """Of a local job: is its driver's process there? None: it cannot be seen from here."""
    beating: bool = False
    """A process of the job has shown a sign of life just now."""
    asked_to_end: bool = False
    """The campaign was asked to stop, or the job to drain, or it said that it does."""


def job_state(facts: JobFacts) -> tuple[JobState, str]:
    """The state of one job, and the reason if there is one to give."""
    if facts.outcome is not None:
        return _OUTCOMES.get(facts.outcome, "unknown"), facts.reason
    return _local_state(facts) if facts.slurm is None else _slurm_state(facts, facts.slurm)


def campaign_state(jobs: Sequence[JobState], *, stop: bool) -> State:
    """The state of a campaign from those of its jobs, oldest first: what goes on now, else how the last one ended."""
    for state in _GOING_ON:
        if state in jobs:
            return state
    if not jobs:
        return "stopped" if stop else "planned"
    match jobs[-1]:
        case "done" | "failed" as verdict:
            return verdict
        case _:
            return "stopped"


def component_state(slurm: str) -> JobState:
    """A component's state, in the words of jobs."""
    if slurm in ACTIVE:
        return "running"
    if slurm in WAITING:
        return "queued"
    ended: dict[str, JobState] = {"completed": "done", "cancelled": "stopped"}
    return ended.get(slurm, "failed") if slurm in ENDED else "unknown"


def _local_state(facts: JobFacts) -> tuple[JobState, str]:
    if facts.process is False:
        return "failed", f"its driver was killed; {GO_ON}"
    if facts.process or facts.beating:
        return _alive(facts)
    return "unknown", "it runs on another machine and has shown no sign of life for a while"


def _slurm_state(facts: JobFacts, slurm: str) -> tuple[JobState, str]:
    if slurm in ENDED:
        return _ended_by_slurm(facts, slurm)
    if facts.beating or slurm in ACTIVE:  # a heartbeat is newer than Slurm's answer
        return _alive(facts)
    if slurm in WAITING:
        return "queued", facts.slurm_reason
    return "unknown", facts.slurm_reason or f"Slurm calls it {slurm}"


def _alive(facts: JobFacts) -> tuple[JobState, str]:
    return ("draining", facts.reason) if facts.asked_to_end else ("running", "")


def _ended_by_slurm(facts: JobFacts, slurm: str) -> tuple[JobState, str]:
    """A job that ended without a word of its driver."""
    if slurm == "cancelled":
        return "stopped", "it was cancelled"
    words = {
        "completed": "its driver was killed",
        "failed": "its batch script failed before the driver could say why",
        "out_of_memory": "Slurm ended it: out of memory",
        "node_fail": "Slurm ended it: a node failed",
        "timeout": "Slurm ended it: its time was up before it had drained",
        "preempted": "Slurm ended it: preempted by another job",
    }
    why = words.get(slurm, f"Slurm ended it: {slurm.replace('_', ' ')}")
    detail = f" ({facts.slurm_reason})" if facts.slurm_reason else ""
    return "failed", f"{why}{detail}; {GO_ON}"
