"""The state of a job and of its campaign.

    read_jobs, JobRecord         one record a job, from files only
    select_slurm_ids             ids of the jobs that Slurm must be asked about
    read_ended_jobs             the jobs, read once more where Slurm has just ended one
    judge_jobs, JobVerdict       the states of jobs and campaign; enough for `hpcrl ls`, which reads no events
    read_heartbeats, find_last_beat, await_new_beat, read_json_as        files
    derive_job_state, derive_campaign_state, derive_component_state, JobFacts    the states from known facts: pure
    CampaignState, JobState, UnfinishedState  the states, as below
    FINAL_STATES, FINAL_JOB_STATES  the states of a campaign, and of a job, that has ended
    describe_resume              where the next job starts, for users
    describe_lost_steps          the steps that the events lack
    describe_lost_jobs           why nothing is known about the jobs of a campaign that has results
    ALIVE_WITHIN_S               the age of a heartbeat

    "planned"   no job yet                    "done"      every step was trained
    "queued"    waits in Slurm's queue        "stopped"   stopped by a user, or its time was up; resume continues it
    "running"   its driver works              "failed"    it ended by itself, with an error
    "draining"  completes what is started     "unknown"   cannot be determined now; unknown is not failed

A job has one more state: drained, which counts as stopped in a campaign that has no next job.
"""

import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

import msgspec

from hpcrl.campaign_dir.events import JobOutcome
from hpcrl.campaign_dir.job_end import EndCause, JobEnd
from hpcrl.campaign_dir.paths import CampaignDir, JobDir, make_worker_name, parse_job
from hpcrl.monitor.progress import JobProgress
from hpcrl.slurm.component_jobs import read_component_ids
from hpcrl.slurm.next_job import find_last_step
from hpcrl.slurm.status import ACTIVE, ENDED, UNKNOWN, WAITING, JobStatus, join_component_jobs
from hpcrl.slurm.submit import SubmittedJob
from hpcrl.system.json_records import decode_record
from hpcrl.system.processes import is_alive, return_false

CampaignState = Literal["planned", "queued", "running", "draining", "done", "failed", "stopped", "unknown"]
UnfinishedState = Literal["running", "draining", "queued", "unknown"]
"""The states of a job that may still end otherwise; a campaign has the first that one of its jobs has."""
JobState = UnfinishedState | JobOutcome

FINAL_STATES: frozenset[str] = frozenset({"done", "failed", "stopped"})
FINAL_JOB_STATES: frozenset[str] = frozenset(get_args(JobOutcome))
_UNFINISHED_STATES: tuple[UnfinishedState, ...] = get_args(UnfinishedState)
_STATE_BY_OUTCOME: dict[str, JobState] = {outcome: outcome for outcome in get_args(JobOutcome)}
_ENDING_CAUSES: frozenset[EndCause] = frozenset({"user-code", "memory-limits"})
"""The causes that would end another job too."""


@dataclass(frozen=True, kw_only=True)
class JobFacts:
    """The known facts about one job."""

    outcome: str | None = None
    """The outcome that its driver wrote, if it has ended."""
    damage: str = ""
    """The reason why the file of its outcome cannot be read."""
    reason: str = ""
    slurm: str | None = None
    """State reported by Slurm; None for a local job."""
    slurm_reason: str = ""
    guardian_alive: bool | None = None
    """For a local job: its first process, the guardian, exists; None: it cannot be seen from here."""
    silence_s: float | None = None
    """The time without a heartbeat of any of its processes; None if none has sent one at all."""
    end_requested: bool = False
    """The campaign was asked to stop, or the job to drain, or the job reported that it drains."""
    saved_step: int = 0
    """The step of the campaign's newest checkpoint; 0 without one."""
    last_step: int = 0
    """The newest step that was made, as far as it is known."""

    @property
    def has_heartbeat(self) -> bool:
        """Return whether a process of the job has sent a heartbeat recently."""
        return self.silence_s is not None and self.silence_s < ALIVE_WITHIN_S

    @property
    def resume_hint(self) -> str:
        return describe_resume("`hpcrl resume`", saved_step=self.saved_step, last_step=self.last_step)


def describe_resume(subject: str, *, saved_step: int, last_step: int = 0) -> str:
    """Describe where a command or a job continues a campaign, and how many steps it makes again if that is known."""
    if not saved_step:
        return f"without a checkpoint, {subject} starts at step 0"
    num_again = max(last_step - saved_step, 0)
    steps = "1 step is" if num_again == 1 else f"{num_again:,} steps are"
    return f"{subject} continues from step {saved_step:,}" + (f" ({steps} made again)" if num_again else "")


def describe_lost_steps(*, saved_step: int, last_step: int) -> str | None:
    """Describe the steps that are missing in the events of a campaign that has ended; None if none is known to be.

    A step is reported before its checkpoint is made. While a job runs, a file system may show them in another order.
    """
    if saved_step <= last_step:
        return None
    found = f"it ends at step {last_step:,}" if last_step else "it has none"
    return f"events/ lacks steps: {found}, and a checkpoint is of step {saved_step:,}"


def derive_job_state(facts: JobFacts) -> tuple[JobState, str]:
    """Return the state of one job, and the reason if it is known."""
    if facts.outcome is not None:
        return _STATE_BY_OUTCOME.get(facts.outcome, "unknown"), facts.reason
    return _derive_local_state(facts) if facts.slurm is None else _derive_slurm_state(facts, facts.slurm)


def derive_campaign_state(jobs: Sequence[JobState], *, stop_requested: bool) -> CampaignState:
    """Return the state of a campaign from those of its jobs, oldest first: of an unfinished job, else of the last."""
    for state in _UNFINISHED_STATES:
        if state in jobs:
            return state
    if not jobs:
        return "stopped" if stop_requested else "planned"
    match jobs[-1]:
        case "done" | "failed" as verdict:
            return verdict
        case _:
            return "stopped"


def derive_component_state(slurm: str) -> JobState:
    """Return the state of a component, in the states of jobs."""
    if slurm in ACTIVE:
        return "running"
    if slurm in WAITING:
        return "queued"
    ended: dict[str, JobState] = {"completed": "done", "cancelled": "stopped"}
    return ended.get(slurm, "failed") if slurm in ENDED else "unknown"


def _derive_local_state(facts: JobFacts) -> tuple[JobState, str]:
    if facts.guardian_alive is False:
        return "failed", f"{facts.damage or 'it ended without an outcome, as after `kill -9`'}; {facts.resume_hint}"
    if facts.guardian_alive or facts.has_heartbeat:
        return _running_or_draining(facts)
    return "unknown", "it runs on another machine and has sent no heartbeat recently"


def _derive_slurm_state(facts: JobFacts, slurm: str) -> tuple[JobState, str]:
    if slurm in ENDED:
        return _explain_slurm_end(facts, slurm)
    if facts.has_heartbeat or slurm in ACTIVE:  # a heartbeat is newer than Slurm's answer
        return _running_or_draining(facts)
    if slurm in WAITING:
        return "queued", facts.slurm_reason
    why = f"Slurm reports the state {slurm}" if slurm != UNKNOWN else "Slurm cannot be queried here"
    silence = f"; its processes have been silent for {facts.silence_s / 60:,.0f} min" if facts.silence_s else ""
    return "unknown", (facts.slurm_reason or why) + silence


def _running_or_draining(facts: JobFacts) -> tuple[JobState, str]:
    if facts.end_requested:
        return "draining", facts.reason
    return "running", facts.slurm_reason if facts.slurm in ACTIVE else ""


def _explain_slurm_end(facts: JobFacts, slurm: str) -> tuple[JobState, str]:
    """Explain the end of a job whose driver wrote no outcome, or whose outcome cannot be read."""
    if facts.damage:
        return "failed", f"{facts.damage}; {facts.resume_hint}"
    if slurm == "cancelled":
        return "stopped", "it was cancelled"
    words = {
        "completed": "it ended without an outcome, as after `kill -9`",
        "failed": "its batch script failed before the driver could report a reason",
        "out_of_memory": "Slurm ended it: out of memory",
        "node_fail": "Slurm ended it: a node failed",
        "timeout": "Slurm ended it: its time was up before it was drained",
        "preempted": "Slurm ended it: preempted by another job",
    }
    if slurm == "failed" and facts.silence_s is not None:  # Slurm's reasons are about the start of a batch script
        return "failed", f"its driver ended without reporting a reason, as after `kill -9`; {facts.resume_hint}"
    why = words.get(slurm, f"Slurm ended it: {slurm.replace('_', ' ')}")
    detail = f" ({facts.slurm_reason})" if facts.slurm_reason else ""
    return "failed", f"{why}{detail}; {facts.resume_hint}"


ALIVE_WITHIN_S = 30.0
"""Age of a heartbeat up to which a worker counts as alive.

Workers touch their event file every 10 s (`BEAT_INTERVAL_S`).
"""

BEAT_LOOK_INTERVAL_S = 0.5

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class JobRecord:
    """The content of the directory of one job."""

    dir: JobDir
    submitted: SubmittedJob
    component_ids: list[str] = field(default_factory=list)
    """The ids of the jobs of its further components, where they are separate."""
    guardian_alive: bool | None = None
    """For a local job: its first process, the guardian, exists."""
    outcome: JobEnd | None = None
    damage: str = ""
    """The reason why its outcome cannot be read."""
    drain_requested: bool = False

    @property
    def number(self) -> int:
        return self.dir.number


@dataclass(frozen=True, kw_only=True)
class JobVerdict:
    """The state of one job, and the reason."""

    record: JobRecord
    state: JobState
    reason: str
    slurm: JobStatus | None = None


def read_jobs(
    campaign_dir: CampaignDir, *, known: Mapping[int, JobRecord] = {}, problems: list[str] | None = None
) -> list[JobRecord]:
    """Read the submitted jobs, oldest first, except those in `known` that have an outcome.

    The newest two are always read: Slurm may requeue a job, even while the next one waits for it. What cannot be read
    is added to `problems`.
    """
    problem_list = problems if problems is not None else []
    found = (
        JobDir(path)
        for path in _list_directory(campaign_dir.jobs, problem_list)
        if path.name.isascii() and path.name.isdigit()
    )
    directories = sorted(found, key=lambda directory: directory.number)
    records = []
    for directory in directories:
        known_record = known.get(directory.number)
        is_final = known_record is not None and known_record.outcome is not None and directory not in directories[-2:]
        record = known_record if is_final else _read_job(directory, problem_list)
        if record is not None:
            records.append(record)
    return records


def select_slurm_ids(jobs: Iterable[JobRecord]) -> list[str]:
    """Return the ids of the jobs whose state only Slurm can report."""
    asked = [job for job in jobs if job.outcome is None and job.submitted.scheduler == "slurm"]
    return [id for job in asked for id in (job.submitted.id, *job.component_ids)]


def _find_status(job: JobRecord, statuses: Mapping[str, JobStatus]) -> JobStatus | None:
    """Return what Slurm has reported of a job, with the jobs of its further components."""
    first = statuses.get(job.submitted.id)
    if first is None or not job.component_ids:
        return first
    return join_component_jobs(first, [statuses.get(id, JobStatus(id=id, state=UNKNOWN)) for id in job.component_ids])


def read_ended_jobs(jobs: Iterable[JobRecord], statuses: Mapping[str, JobStatus]) -> list[JobRecord]:
    """Return the jobs, after one more look at those that Slurm reports as ended: they may have just left an outcome."""
    found = []
    for job in jobs:
        status = statuses.get(job.submitted.id)
        is_open_end = job.outcome is None and status is not None and status.state in ENDED
        found.append((_read_job(job.dir, []) if is_open_end else None) or job)
    return found


def judge_jobs(
    campaign_dir: CampaignDir,
    jobs: Iterable[JobRecord],
    *,
    statuses: Mapping[str, JobStatus],
    events: Mapping[int, JobProgress],
    heartbeats: Mapping[str, float],
    now: float,
) -> tuple[CampaignState, list[JobVerdict]]:
    """Return the state of a campaign and of each of its jobs."""
    stop_requested = campaign_dir.stop.exists()
    last_beats: dict[str, float] = {}
    for name, beat in heartbeats.items():
        job_name = parse_job(name)
        last_beats[job_name] = max(beat, last_beats.get(job_name, 0.0))
    find_saved_step = cache(partial(find_last_step, campaign_dir))  # it reads a directory, and few reasons need it
    last_step = next(
        (events[number].last_step for number in sorted(events, reverse=True) if events[number].last_step), 0
    )
    verdicts = []
    for job in jobs:
        status = _find_status(job, statuses)
        progress = events.get(job.number, JobProgress())
        facts = _collect_job_facts(
            job,
            progress,
            status,
            last_beat=last_beats.get(make_worker_name(job.number)),
            now=now,
            stop_requested=stop_requested,
        )
        state, reason = derive_job_state(facts)
        if job.outcome is None and state == "failed":
            facts = replace(facts, saved_step=find_saved_step(), last_step=last_step)
            state, reason = derive_job_state(facts)
        verdicts.append(JobVerdict(record=job, state=state, reason=reason, slurm=status))
    verdicts = list(_settle_followed(verdicts))
    if not verdicts and campaign_dir.has_results():  # `describe_lost_jobs` has the reason
        return "unknown", verdicts
    state_of_campaign = derive_campaign_state([verdict.state for verdict in verdicts], stop_requested=stop_requested)
    end = verdicts[-1].record.outcome if verdicts else None
    may_continue = state_of_campaign == "failed" and end is not None and end.likely_cause not in _ENDING_CAUSES
    if verdicts and (state_of_campaign == "stopped" or may_continue):
        is_used_up = end is not None and end.likely_cause == "budget-used"
        hint = describe_resume("`hpcrl resume`", saved_step=find_saved_step(), last_step=last_step)
        if is_used_up:
            hint = f"`hpcrl resume {campaign_dir.name} -s limits.KEY=VALUE` raises it"
        reason = "; ".join(part for part in (verdicts[-1].reason, hint) if part)
        verdicts[-1] = replace(verdicts[-1], reason=reason)
    return state_of_campaign, verdicts


def _settle_followed(verdicts: Sequence[JobVerdict]) -> Iterator[JobVerdict]:
    """Yield the verdicts, of which an unknown job counts as ended if a later one has an outcome: one runs at a time."""
    last_ended = max((one.record.number for one in verdicts if one.record.outcome is not None), default=-1)
    for verdict in verdicts:
        if verdict.state == "unknown" and verdict.record.number < last_ended:
            yield replace(verdict, state="failed", reason=f"it ended without an outcome; {verdict.reason}")
        else:
            yield verdict


def describe_lost_jobs(campaign_dir: CampaignDir) -> str:
    """Describe why nothing is known about the jobs of a campaign that has results."""
    problems: list[str] = []
    read_jobs(campaign_dir, problems=problems)
    lost = problems[0] if problems else f"the records of its jobs are gone: restore {campaign_dir.jobs}"
    return f"campaign {campaign_dir.name!r} has results, and {lost}"


def read_heartbeats(directory: Path) -> dict[str, float]:
    """Return the time when each process last wrote or touched its event file, by the file's name without .jsonl."""
    heartbeats = {}
    for path in _list_directory(directory, []):  # an unreadable directory has no heartbeats
        if path.suffix == ".jsonl":
            try:
                heartbeats[path.stem] = path.stat().st_mtime
            except OSError:  # removed or unreadable: no heartbeat
                continue
    return heartbeats


def find_last_beat(job: JobDir) -> float:
    """Return the time of the last heartbeat of any process of a job; 0 without one."""
    beats = read_heartbeats(job.campaign.events)
    return max((beat for name, beat in beats.items() if name.startswith(make_worker_name(job.number))), default=0.0)


def await_new_beat(job: JobDir, *, timeout_s: float, is_over: Callable[[], bool] = return_false) -> bool:
    """Return whether a process of a job sends a heartbeat: only one that changes shows it, as clocks differ."""
    last = find_last_beat(job)
    deadline = time.monotonic() + timeout_s
    while not is_over() and time.monotonic() < deadline:
        if find_last_beat(job) > last:
            return True
        time.sleep(BEAT_LOOK_INTERVAL_S)
    return False


def read_json_as(path: Path, kind: type[T], problems: list[str], *, place: str = "") -> T | None:
    """Read a JSON file as `kind`; None if it does not exist, or if it is invalid, which is added to `problems`.

    `place` is the directory by which the file is named there.
    """
    try:
        return decode_record(path.read_bytes(), kind)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.MsgspecError) as error:
        problems.append(f"{Path(place) / path.name} cannot be read: {error}")
        return None


def _collect_job_facts(
    job: JobRecord,
    progress: JobProgress,
    status: JobStatus | None,
    *,
    last_beat: float | None,
    now: float,
    stop_requested: bool,
) -> JobFacts:
    silence_s = None if last_beat is None else max(0.0, now - last_beat)
    has_heartbeat = silence_s is not None and silence_s < ALIVE_WITHIN_S
    # A driver emits its end event before it has ended everything, and writes its outcome last. While the job still
    # runs, only the outcome counts.
    still_runs = has_heartbeat or job.guardian_alive is True or (status is not None and status.state in ACTIVE)
    ending: Any = job.outcome or (None if still_runs else progress.end_event)
    facts = JobFacts(
        outcome=ending.outcome if ending else None,
        damage=job.damage,
        reason=ending.reason if ending else progress.drain_reason or "",
        silence_s=silence_s,
        end_requested=stop_requested
        or job.drain_requested
        or progress.drain_reason is not None
        or progress.end_event is not None,
    )
    if job.submitted.scheduler == "slurm":
        state, reason = (status.state, status.reason) if status else (UNKNOWN, "")
        is_old = state in ACTIVE and progress.started_at is not None  # the driver has all nodes since
        return replace(facts, slurm=state, slurm_reason="" if is_old else reason)
    is_remote = bool(progress.node) and _short_hostname(progress.node) != _short_hostname(socket.gethostname())
    return replace(facts, guardian_alive=None if is_remote else job.guardian_alive)


def _short_hostname(node: str) -> str:
    return node.partition(".")[0].lower()


def _read_job(directory: JobDir, problems: list[str]) -> JobRecord | None:
    place = f"{directory.root.parent.name}/{directory.root.name}"
    submitted = read_json_as(directory.submission, SubmittedJob, problems, place=place)
    if submitted is None:
        return None
    # The process is checked before the outcome: a driver that ends normally in between has then written its outcome.
    is_local = submitted.scheduler == "local"
    guardian_alive = is_alive(submitted.pid, submitted.start_ticks) if is_local else None
    # Listing the directory makes an NFS client refresh; opening the name may return a cached "not found".
    present = {path.name for path in _list_directory(directory.root, problems)}
    damage: list[str] = []
    is_there = directory.outcome.name in present
    outcome = read_json_as(directory.outcome, JobEnd, damage, place=place) if is_there else None
    problems += damage
    return JobRecord(
        dir=directory,
        submitted=submitted,
        component_ids=read_component_ids(directory) if directory.component_jobs.name in present else [],
        guardian_alive=guardian_alive,
        outcome=outcome,
        damage="; ".join(damage),
        drain_requested=directory.drain.name in present,
    )


def _list_directory(directory: Path, problems: list[str]) -> list[Path]:
    try:
        return list(directory.iterdir())
    except FileNotFoundError:
        return []
    except OSError as error:
        problems.append(f"{directory.name}/ cannot be read: {error.strerror}")
        return []
