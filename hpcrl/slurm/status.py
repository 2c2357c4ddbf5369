"""The state of jobs: one squeue for all of them, one sacct for those that squeue no longer lists.

query_job_states           ask Slurm; a job without an answer is "unknown", which is not "failed"
JobStatus                  the state of one job
ComponentStatus            the state of one of its components
parse_queue, parse_ended   parse the two text formats (JSON changes between Slurm versions)
join_component_jobs        a job and those of its further components, where these are separate
combine_states             the state of a heterogeneous job from those of its components
query_failed_nodes         ask sinfo which nodes take no job
query_lost_nodes           ask sinfo which nodes run nothing
query_restarted_nodes      ask scontrol which nodes have started again
explain_reason             why a job waits or ended, in plain words
UNKNOWN, WAITING, ACTIVE, ENDED, NOT_LISTED   states, and the reason of a job that no command lists

States are Slurm's names in lower case. squeue is authoritative for jobs that wait or run; sacct lags behind it and may
be disabled, so it is used only for jobs that have ended.
"""

import datetime
import re
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from hpcrl.slurm.commands import TIMED_OUT, run_slurm, try_slurm

_NODES_TAKEN = "nodes that it needs are down, drained or reserved (often: for maintenance)"
_REASONS = {
    "Priority": "jobs of higher priority are ahead of it",
    "Resources": "it is next and waits for nodes to become free",
    "Dependency": "it waits for another job to end",
    "DependencyNeverSatisfied": "the job it waits for can never satisfy it: cancel it",
    "BeginTime": "its earliest start time has not come (a requeued job waits about two minutes)",
    "JobHeldUser": "it is held: `scontrol release` releases it",
    "JobHeldAdmin": "an administrator holds it",
    "job_requeued_in_held_state": "it was queued again, and is held: `scontrol release` releases it",
    "launch_failed_requeued_held": "its start failed, and it is held: `scontrol release` releases it",
    "PartitionDown": "its partition is down",
    "PartitionInactive": "its partition is inactive",
    "PartitionNodeLimit": "it asks for more nodes than its partition allows",
    "PartitionTimeLimit": "it asks for more time than its partition allows",
    "ReqNodeNotAvail": _NODES_TAKEN,
    "Nodes": _NODES_TAKEN,  # a whole sentence: "Nodes required for job are DOWN, DRAINED or reserved ..."
    "NodeDown": "a node that it needs is down",
    "PartitionConfig": "it asks for more than any node of its partition has",
    "Reservation": "it waits for its reservation to start",
    "ReservationDeleted": "its reservation was deleted",
    "Licenses": "it waits for a licence",
    "InvalidAccount": "its account is not valid here",
    "InvalidQOS": "its QOS is not valid here",
    "QOSNotAllowed": "its QOS is not allowed for this account or partition",
    "AccountNotAllowed": "its account is not allowed in this partition",
    "BurstBufferResources": "it waits for room in the burst buffer",
    "BurstBufferStageIn": "its files are copied into the burst buffer",
    "JobArrayTaskLimit": "too many tasks of its array are running",
    "BadConstraints": "no node satisfies its constraints",
    "Cleaning": "its earlier run is being cleaned up",
    "Prolog": "the nodes are being prepared",
    "JobLaunchFailure": "Slurm could not start its batch script, or a signal killed it",
    "NonZeroExitCode": "it ended with a non-zero exit code",
}
_LIMIT_REASONS = (
    # Slurm composes these names (QOSMaxJobsPerUserLimit, AssocGrpGRESMinutes, ...), so prefixes are compared.
    ("QOSMax", "you are at a limit of its QOS"),
    ("QOSGrp", "all users of its QOS together are at a limit"),
    ("QOSMin", "it asks for less than its QOS requires"),
    ("QOS", "a limit of its QOS"),
    ("AssocGrp", "its account is at a limit"),
    ("AssocMax", "you are at a limit of its account"),
    ("Assoc", "a limit of its account"),
    ("MaxMemPerLimit", "it asks for more memory per node or core than is allowed"),
    ("Max", "you are at a limit of its account"),  # MaxCpuPerAccount, MaxJobsPerAccount
)


def explain_reason(reason: str) -> str:
    """Return Slurm's reason in plain words; an unknown reason is returned unchanged."""
    word = re.split(r"[,:(\s]|_(?=required_)", reason.strip("() "), maxsplit=1)[0]
    if word in _REASONS:
        return _REASONS[word]
    for start, words in _LIMIT_REASONS:
        if word.startswith(start):
            return f"{words} ({word})"
    return reason


UNKNOWN = "unknown"
NOT_LISTED = "neither squeue nor sacct lists it"
"""The reason of a job that is unknown though both answered."""
WAITING = frozenset({"pending", "requeued", "requeue_fed", "requeue_hold", "special_exit", "reconfig_fail"})
ACTIVE = frozenset(
    {"running", "completing", "configuring", "suspended", "stopped", "signaling", "stage_out", "resizing"}
)
ENDED = (
    # Worst first: when one component fails, Slurm cancels the others, and the cause is reported.
    "out_of_memory", "node_fail", "boot_fail", "launch_failed", "preempted", "timeout", "deadline", "failed", "revoked",
    "cancelled", "completed",
)  # fmt: skip

_FAILED = ("down", "fail", "drain", "unknown", "error", "power")
"""The states of a node on which no job starts; a `*` after any state: it does not respond."""
_QUEUE_FORMAT = "%i|%A|%T|%P|%S|%e|%N|%r"
_ENDED_FORMAT = "JobIDRaw,JobID,State,ExitCode,Partition,NodeList"
_COMPONENT_ID = re.compile(r"(?P<leader>\d+)(?:\+(?P<index>\d+))?")


class ComponentStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The state of one component of a job; a plain job has one component, with index 0."""

    id: str
    """The component's own id, without `+`: component 1 of job 123 may be 124."""
    index: int
    state: str
    partition: str
    nodes: str = ""
    """The nodes in Slurm's notation: `gpu[01-02]`; empty before the job starts."""
    reason: str = ""
    """Slurm's name for why it waits or ended; empty if there is none."""
    start: float | None = None
    """Start time; while it waits, Slurm's estimate, if there is one."""
    end: float | None = None
    """End time, or when its time limit will end it."""
    exit_code: int | None = None


class JobStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The state of one job and of its components."""

    id: str
    state: str
    """The result of `combine_states`; "unknown" when Slurm did not answer."""
    components: list[ComponentStatus] = []
    reason: str = ""
    """The reason that it waits, ended or is unknown, in plain words."""
    start: float | None = None
    end: float | None = None


@dataclass(frozen=True)
class _CommandAnswer:
    """The output of one Slurm command."""

    text: str
    problem: str = ""
    """The error of a command that did not answer; else empty."""


def query_job_states(ids: Sequence[str], *, env: Mapping[str, str], timeout_s: float = 10.0) -> dict[str, JobStatus]:
    """Return the state of every job in `ids`, with at most two commands of at most `timeout_s` seconds each."""
    numbers = [job for job in dict.fromkeys(ids) if job.isascii() and job.isdigit()]
    states = {job: JobStatus(id=job, state=UNKNOWN, reason=f"{job!r} is not a Slurm job id") for job in ids}
    if not numbers:
        return states
    queue = _query_slurm(_make_queue_command(numbers), env, timeout_s=timeout_s)
    found = parse_queue(queue.text)
    missing = [job for job in numbers if job not in found]
    if missing:
        ended = _try_query(_make_ended_command(missing), env, timeout_s=timeout_s)
        found |= parse_ended(ended.text)
        why = queue.problem or ended.problem or NOT_LISTED
        found |= {job: JobStatus(id=job, state=UNKNOWN, reason=why) for job in missing if job not in found}
    return states | {job: found[job] for job in numbers}


def query_failed_nodes(nodes: Sequence[str], *, env: Mapping[str, str], timeout_s: float = 10.0) -> list[str]:
    """Return the nodes that Slurm reports as down, failed, drained or silent; none without an answer."""
    states = _query_node_states(nodes, env, timeout_s=timeout_s)
    return [node for node in nodes if states.get(node, "").endswith("*") or states.get(node, "").startswith(_FAILED)]


def query_lost_nodes(nodes: Sequence[str], *, env: Mapping[str, str], timeout_s: float = 10.0) -> list[str]:
    """Return the nodes that Slurm reports as down; none without an answer. One that drains still runs its jobs."""
    states = _query_node_states(nodes, env, timeout_s=timeout_s)
    return [node for node in nodes if states.get(node, "").startswith("down")]


def _query_node_states(nodes: Sequence[str], env: Mapping[str, str], *, timeout_s: float) -> dict[str, str]:
    if not nodes:
        return {}
    command = ["sinfo", "--noheader", "--Node", f"--nodes={','.join(nodes)}", "--format=%N %T"]
    rows = (line.split() for line in _try_query(command, env, timeout_s=timeout_s).text.splitlines())
    return {row[0]: row[1] for row in rows if len(row) == 2}


def query_restarted_nodes(
    nodes: Sequence[str], *, since: float, env: Mapping[str, str], timeout_s: float = 10.0
) -> list[str]:
    """Return the nodes that were booted after a time, or whose slurmd was started then; none without an answer."""
    if not nodes:
        return []
    command = ["scontrol", "--oneliner", "show", "node", ",".join(nodes)]
    found = []
    for line in _try_query(command, env, timeout_s=timeout_s).text.splitlines():
        fields = dict(word.split("=", 1) for word in line.split() if "=" in word)
        starts = [_parse_time(fields.get(name, "")) for name in ("BootTime", "SlurmdStartTime")]
        if any(start is not None and start > since for start in starts):
            found.append(fields.get("NodeName", ""))
    return [node for node in nodes if node in found]


def parse_queue(text: str) -> dict[str, JobStatus]:
    """Parse squeue's lines to jobs by the id of their leader."""
    components: dict[str, list[ComponentStatus]] = {}
    for line in text.splitlines():
        fields = line.strip().split("|", 7)
        found = _COMPONENT_ID.fullmatch(fields[0])
        if found is None or len(fields) < 8:
            continue
        _, own_id, state, partition, start, end, nodes, reason = fields
        component = ComponentStatus(
            id=own_id,
            index=int(found["index"] or 0),
            state=state.lower(),
            partition=partition,
            nodes=_parse_optional_text(nodes),
            reason=_parse_optional_text(reason),
            start=_parse_time(start),
            end=_parse_time(end),
        )
        components.setdefault(found["leader"], []).append(component)
    return {job: _make_job_status(job, parts) for job, parts in components.items()}


def parse_ended(text: str) -> dict[str, JobStatus]:
    """Parse sacct's lines to ended jobs by the id of their leader; its lines about other jobs may be out of date."""
    components: dict[str, list[ComponentStatus]] = {}
    for line in text.splitlines():
        fields = line.strip().split("|")
        found = _COMPONENT_ID.fullmatch(fields[1]) if len(fields) >= 6 else None
        if found is None:
            continue
        own_id, _, state, exit_code, partition, nodes = fields[:6]
        component = ComponentStatus(
            id=own_id,
            index=int(found["index"] or 0),
            state=_parse_state(state),  # CANCELLED by 1000
            partition=partition,
            nodes=_parse_optional_text(nodes),
            exit_code=_parse_exit_code(exit_code),
        )
        components.setdefault(found["leader"], []).append(component)
    jobs = {job: _make_job_status(job, parts) for job, parts in components.items()}
    return {job: status for job, status in jobs.items() if status.state in ENDED}


def combine_states(states: Iterable[str]) -> str:
    """Return the state of a job from those of its components, component 0 first.

    The batch script runs on component 0, so a job whose component 0 completed is complete, whatever else was lost.
    """
    listed = list(states)
    if any(state in ACTIVE for state in listed):
        return "completing" if "completing" in listed and "running" not in listed else "running"
    if any(state in WAITING for state in listed):
        return "pending"
    if listed and listed[0] == "completed":
        return "completed"
    if not listed or any(state not in ENDED for state in listed):
        return UNKNOWN
    return min(listed, key=ENDED.index)


def join_component_jobs(first: JobStatus, others: Sequence[JobStatus]) -> JobStatus:
    """Return the status of a job whose further components are separate jobs; if these wait, that is the reason."""
    parts = [
        msgspec.structs.replace(part, index=index)
        for index, status in enumerate(others, 1)
        for part in status.components
    ]
    waiting = {part.partition: part for part in parts if part.state in WAITING}
    components = [*first.components, *parts]
    num_idle = sum(part.state == "running" for part in parts)
    if first.state == "pending" and num_idle and not waiting:
        reason = f"{first.reason}; meanwhile {num_idle} of its jobs hold their nodes"
        return msgspec.structs.replace(first, components=components, reason=reason)
    is_next = all(part.reason == "Dependency" for part in waiting.values())  # they wait for the job before this one
    if first.state not in ("running", "pending") or is_next:
        return msgspec.structs.replace(first, components=components)
    reasons = "; ".join(f"{name}: {explain_reason(part.reason)}" for name, part in waiting.items())
    return msgspec.structs.replace(first, components=components, reason=f"waiting for nodes ({reasons})")


def _make_job_status(job: str, components: list[ComponentStatus]) -> JobStatus:
    ordered = sorted(components, key=lambda component: component.index)
    state = combine_states(component.state for component in ordered)
    starts = [component.start for component in ordered if component.start is not None]
    is_start_known = state != "pending" or len(starts) == len(ordered)
    ends = [component.end for component in ordered if component.end is not None]
    return JobStatus(
        id=job,
        state=state,
        components=ordered,
        reason=_combine_reasons(state, ordered),
        start=max(starts, default=None) if is_start_known else None,  # it starts when its last component can
        end=min(ends, default=None),
    )


def _combine_reasons(state: str, components: list[ComponentStatus]) -> str:
    """Return the distinct reasons, with their partitions if there are several."""
    if state in ACTIVE or state in {"completed", "cancelled"}:  # a cancelled job keeps the reason why it waited
        return ""
    reasons: dict[str, list[str]] = {}
    for component in components:
        if component.state == state or component.state in WAITING:
            words = explain_reason(component.reason)
            reasons.setdefault(words, []).append(component.partition)
    reasons.pop("", None)
    if len(reasons) <= 1:
        return next(iter(reasons), "")
    return "; ".join(f"{'+'.join(partitions)}: {words}" for words, partitions in reasons.items())


def _make_queue_command(ids: Sequence[str]) -> list[str]:
    return ["squeue", "--noheader", "--states=all", f"--jobs={','.join(ids)}", f"--format={_QUEUE_FORMAT}"]


def _make_ended_command(ids: Sequence[str]) -> list[str]:
    arguments = ["--allocations", "--parsable2", "--noheader", f"--jobs={','.join(ids)}"]
    return ["sacct", *arguments, f"--format={_ENDED_FORMAT}"]


def _query_slurm(command: list[str], env: Mapping[str, str], *, timeout_s: float) -> _CommandAnswer:
    return _read_answer(command, run_slurm(command, env=env, timeout_s=timeout_s))


def _read_answer(command: list[str], done: subprocess.CompletedProcess[str]) -> _CommandAnswer:
    complaint = done.stderr.strip()
    if done.returncode == TIMED_OUT:
        return _CommandAnswer("", complaint)
    if done.returncode != 0 and "Invalid job id" not in complaint:  # squeue prints it when no job is listed
        last = complaint.splitlines()[-1] if complaint else f"exit code {done.returncode}"
        return _CommandAnswer("", f"{command[0]}: {last}")
    return _CommandAnswer(done.stdout)


def _try_query(command: list[str], env: Mapping[str, str], *, timeout_s: float) -> _CommandAnswer:
    """Run a command that cannot be started everywhere, nor always: a site without accounting may lack sacct."""
    return _read_answer(command, try_slurm(command, env=env, timeout_s=timeout_s))


def _parse_time(text: str) -> float | None:
    try:
        return datetime.datetime.fromisoformat(text).timestamp()
    except ValueError:  # N/A, Unknown, NONE
        return None


def _parse_exit_code(text: str) -> int | None:
    code = text.partition(":")[0]
    return int(code) if code.isdigit() else None


def _parse_state(text: str) -> str:
    return text.split(maxsplit=1)[0].lower() if text.strip() else UNKNOWN


def _parse_optional_text(text: str) -> str:
    return "" if text in {"None", "(null)", "None assigned", "N/A"} else text
