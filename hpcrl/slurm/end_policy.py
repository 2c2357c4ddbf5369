"""The policy for the end of a job, by its cause. Pure: one table, and the functions that read it.

EndPolicy, POLICIES     the row of a cause, and all rows
SavedProgress             what a job and its campaign have saved
decide_campaign_end     the outcome of a campaign that no job is to continue
name_slurm_cause        the cause of a state of Slurm
FailureRecord, find_bad_nodes    failures, and the nodes to which they point
"""

from collections import Counter
from collections.abc import Collection, Mapping
from typing import NamedTuple

from hpcrl.campaign_dir.events import JobOutcome
from hpcrl.campaign_dir.job_end import EndCause, JobEnd

ANY_NUMBER = 10**6
MIN_BAD_FAILURES = 3
"""The failures that make a node the likely cause, if at least half of the nodes of its role have none."""


class EndPolicy(NamedTuple):
    """The way in which a campaign continues after a job that ended for one cause."""

    is_followed: bool = True
    """False if no other job could do better, or none is wanted."""
    max_idle: int = 1
    """The number of jobs in a row that made no checkpoint and are still followed, if the campaign has one."""
    max_first: int = 1
    """The same while the campaign has none."""
    advice: str = ""
    """The settings to change, once the campaign has ended for this cause."""


_MORE_TIME = "raise job.walltime_min, or lower train.checkpoint_every_steps or train.groups_per_step"
_MORE_CHECKPOINTS = "lower train.checkpoint_every_steps or train.groups_per_step"

POLICIES: dict[EndCause, EndPolicy] = {
    "complete": EndPolicy(is_followed=False),
    "user-request": EndPolicy(is_followed=False),
    "goal-reached": EndPolicy(is_followed=False),
    "budget-used": EndPolicy(is_followed=False),
    "memory-limits": EndPolicy(is_followed=False),
    "walltime": EndPolicy(advice=_MORE_TIME),
    "cancellation": EndPolicy(advice=_MORE_TIME),
    "unknown": EndPolicy(advice=_MORE_TIME),
    "preemption": EndPolicy(max_idle=2, max_first=2, advice=f"{_MORE_CHECKPOINTS}, or use other partitions"),
    "node-failure": EndPolicy(max_idle=3, max_first=2, advice="report these nodes to the site"),
    "out-of-memory": EndPolicy(max_first=0, advice="raise mem_gib_per_worker of the role that was ended"),
    "user-code": EndPolicy(max_idle=0, max_first=0),
    "infrastructure": EndPolicy(max_idle=2, max_first=0),
    # It has cost nothing: the number of jobs is limit enough, unless the campaign has never worked.
    "not-started": EndPolicy(max_idle=ANY_NUMBER, max_first=0),
    "missing-nodes": EndPolicy(max_idle=ANY_NUMBER, max_first=ANY_NUMBER),  # the queue was long: the next may have luck
}
UNCOUNTED_CAUSES: frozenset[EndCause] = frozenset({"not-started", "missing-nodes"})
"""A job that ended so had no chance to make a checkpoint: it is not counted as one without."""


class SavedProgress(NamedTuple):
    """The checkpoints that there were when a job ended."""

    number: int
    """The number of the job."""
    num_idle: int
    """Jobs in a row that made no checkpoint, up to this one, in the chain that a user has started."""
    has_checkpoint: bool
    """True if any job of the campaign has made one."""


def decide_campaign_end(end: JobEnd | None, cause: EndCause, progress: SavedProgress) -> tuple[JobOutcome, str] | None:
    """Return the outcome of a campaign whose last job ended so, and why; None if another job is to continue it."""
    policy = POLICIES[cause]
    reason = end.reason if end is not None else ""
    if not policy.is_followed:
        return (end.outcome if end is not None else "failed"), reason
    max_idle = policy.max_idle if progress.has_checkpoint else policy.max_first
    if progress.num_idle <= max_idle or progress.num_idle == 0:
        return None
    if progress.num_idle == 1:
        return "failed", "; ".join(part for part in (reason or _describe_silence(cause), policy.advice) if part)
    first, last = progress.number - progress.num_idle + 1, progress.number
    jobs = f"jobs {first} and {last}" if progress.num_idle == 2 else f"jobs {first} to {last}"
    how = f": {reason}" if end is not None else f", the last without an outcome{_name_cause(cause)}"
    return "failed", f"{jobs} ended without a checkpoint{how}" + (f"; {policy.advice}" if policy.advice else "")


def _describe_silence(cause: EndCause) -> str:
    return f"the job ended without an outcome{_name_cause(cause)}"


def _name_cause(cause: EndCause) -> str:
    return "" if cause == "unknown" else f" ({cause.replace('-', ' ')})"


_CAUSE_BY_STATE: dict[str, EndCause] = {
    "timeout": "walltime",
    "deadline": "walltime",
    "preempted": "preemption",
    "node_fail": "node-failure",
    "boot_fail": "node-failure",
    "launch_failed": "not-started",
    "out_of_memory": "out-of-memory",
    "cancelled": "cancellation",
}


def name_slurm_cause(state: str) -> EndCause:
    """Return why a job ended that Slurm lists in this state."""
    return _CAUSE_BY_STATE.get(state, "unknown")


class FailureRecord(NamedTuple):
    """One failure of a worker or a worker pool."""

    role: str
    node: str


def find_bad_nodes(failures: Collection[FailureRecord], nodes_by_role: Mapping[str, Collection[str]]) -> list[str]:
    """Return the nodes that fail where others of the same role work: what fails everywhere is not a node's fault."""
    found = set()
    for role, nodes in nodes_by_role.items():
        counts = Counter(failure.node for failure in failures if failure.role == role and failure.node in nodes)
        bad = {node for node, num in counts.items() if num >= MIN_BAD_FAILURES}
        if 2 * len(counts) <= len(nodes):
            found |= bad
    return sorted(found)
