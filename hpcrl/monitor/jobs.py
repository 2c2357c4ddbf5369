"""What a campaign directory (and this machine) says of its jobs; the edge under `state`.

read_jobs(rundir)       one record a job, from files only
asked_of_slurm(jobs)    ids of the jobs that Slurm must be asked about
judge(rundir, jobs)     their states and the campaign's; enough for `hpcrl ls`, which reads no events
"""

import socket
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from hpcrl.monitor.fold import Job as JobEvents
from hpcrl.monitor.state import GO_ON, JobFacts, JobState, State, campaign_state, job_state
from hpcrl.processes import is_alive
from hpcrl.rundir import JobDir, RunDir
from hpcrl.slurm.status import ACTIVE, JobStatus
from hpcrl.slurm.submit import Submitted

BEAT_S = 30.0
"""Workers touch their event file every 5 s; one that has not for so long is not counted as alive."""

T = TypeVar("T")


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """How a driver ended."""

    outcome: str
    reason: str = ""
    time: float = 0.0


@dataclass(frozen=True, kw_only=True)
class JobRecord:
    """What lies in the directory of one job."""

    dir: JobDir
    submitted: Submitted
    process: bool | None = None
    """Of a local job without an outcome: is its driver there?"""
    outcome: Outcome | None = None
    drain: bool = False

    @property
    def number(self) -> int:
        return self.dir.number


@dataclass(frozen=True, kw_only=True)
class JobVerdict:
    """One job judged."""

    record: JobRecord
    state: JobState
    reason: str
    slurm: JobStatus | None = None


def read_jobs(
    rundir: RunDir, *, known: Mapping[int, JobRecord] = {}, problems: list[str] | None = None
) -> list[JobRecord]:
    """The jobs that were submitted, oldest first; of those in `known`, one that has its outcome is not read again.

    The newest two always are: Slurm may requeue one, also while the next waits for it, and then it runs once more. What
    cannot be read is added to `problems`.
    """
    troubles = problems if problems is not None else []
    found = (JobDir(path) for path in _listing(rundir.jobs, troubles) if path.name.isascii() and path.name.isdigit())
    directories = sorted(found, key=lambda directory: directory.number)
    records = []
    for directory in directories:
        old = known.get(directory.number)
        settled = old is not None and old.outcome is not None and directory not in directories[-2:]
        record = old if settled else _read_job(directory, troubles)
        if record is not None:
            records.append(record)
    return records


def asked_of_slurm(jobs: Iterable[JobRecord]) -> list[str]:
    """Ids of the jobs whose state only Slurm knows."""
    return [job.submitted.id for job in jobs if job.outcome is None and job.submitted.scheduler == "slurm"]


def judge(
    rundir: RunDir,
    jobs: Iterable[JobRecord],
    *,
    statuses: Mapping[str, JobStatus],
    events: Mapping[int, JobEvents],
    beats: Mapping[str, float],
    now: float,
) -> tuple[State, list[JobVerdict]]:
    """The state of a campaign and of each of its jobs."""
    stop = rundir.stop.exists()
    fresh = {name.partition("-")[0] for name, time in beats.items() if now - time < BEAT_S}
    verdicts = []
    for job in jobs:
        status = statuses.get(job.submitted.id)
        told = events.get(job.number, JobEvents())
        facts = _facts(job, told, status, beating=f"{job.number:03d}" in fresh, stop=stop)
        state, reason = job_state(facts)
        verdicts.append(JobVerdict(record=job, state=state, reason=reason, slurm=status))
    whole = campaign_state([verdict.state for verdict in verdicts], stop=stop)
    if whole == "stopped" and verdicts:
        reason = "; ".join(part for part in (verdicts[-1].reason, GO_ON) if part)
        verdicts[-1] = replace(verdicts[-1], reason=reason)
    return whole, verdicts


def beats(directory: Path) -> dict[str, float]:
    """When each process last wrote or touched its event file, by the file's name without .jsonl."""
    found = {}
    for path in _listing(directory, []):  # an unreadable directory shows no life
        if path.suffix == ".jsonl":
            try:
                found[path.stem] = path.stat().st_mtime
            except OSError:  # gone or out of reach: no sign of life
                continue
    return found


def read_as(path: Path, kind: type[T], problems: list[str]) -> T | None:
    """A JSON file as `kind`; None if it is not there yet; what cannot be read is a problem, not the end."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        problems.append(f"{path.name} cannot be read: {error}")
        return None


def _facts(job: JobRecord, told: JobEvents, status: JobStatus | None, *, beating: bool, stop: bool) -> JobFacts:
    # A driver says that it ends before it has ended everything; the outcome is the last that it leaves.
    goes_on = beating or job.process is True or (status is not None and status.state in ACTIVE)
    ended: Any = job.outcome or (None if goes_on else told.ended)
    facts = JobFacts(
        outcome=ended.outcome if ended else None,
        reason=ended.reason if ended else told.draining or "",
        beating=beating,
        asked_to_end=stop or job.drain or told.draining is not None or told.ended is not None,
    )
    if job.submitted.scheduler == "slurm":
        return replace(facts, slurm=status.state if status else "unknown", slurm_reason=status.reason if status else "")
    elsewhere = bool(told.node) and _short(told.node) != _short(socket.gethostname())
    return replace(facts, process=None if elsewhere else job.process)


def _short(node: str) -> str:
    return node.partition(".")[0].lower()


def _read_job(directory: JobDir, problems: list[str]) -> JobRecord | None:
    submitted = read_as(directory.submitted, Submitted, problems)
    if submitted is None:
        return None
    # The process before the outcome: a driver that ends well in between has left its outcome when it is looked for.
    local = submitted.scheduler == "local"
    process = is_alive(submitted.pid, submitted.start_ticks) if local else None
    # Listing the directory makes an NFS client look again, where asking for the name may repeat "not there".
    present = {path.name for path in _listing(directory.root, problems)}
    outcome = read_as(directory.outcome, Outcome, problems) if directory.outcome.name in present else None
    return JobRecord(
        dir=directory,
        submitted=submitted,
        process=process,
        outcome=outcome,
        drain=directory.drain.name in present,
    )


def _listing(directory: Path, problems: list[str]) -> list[Path]:
    try:
        return list(directory.iterdir())
    except FileNotFoundError:
        return []
    except OSError as error:
        problems.append(f"{directory.name}/ cannot be read: {error.strerror}")
        return []
