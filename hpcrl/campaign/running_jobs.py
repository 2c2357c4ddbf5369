"""The jobs of a campaign that Slurm has: their states, and how to stop them.

read_submission      the recorded submission of a job
find_job_states      the states of all jobs without a recorded end
find_job_state       the state of one job
find_live_job        a job that may run though a later one has ended
find_orphaned_job    a job whose processes run though its first one has ended
describe_next_start  where a campaign continues, for users
stop_gracefully, stop_now    end a campaign, with a checkpoint or without
STOP_TIMEOUT_S, STOP_POLL_INTERVAL_S    the time that a job gets to end, and between two looks at it
"""

import contextlib
import os
import time
from collections.abc import Iterable

from hpcrl.campaign import directory
from hpcrl.campaign_dir.event_log import EventReader
from hpcrl.campaign_dir.events import StepFinished
from hpcrl.campaign_dir.paths import CampaignDir, JobDir
from hpcrl.config.site import Site
from hpcrl.errors import SlurmError
from hpcrl.monitor.job_state import (
    ALIVE_WITHIN_S,
    FINAL_JOB_STATES,
    await_new_beat,
    describe_resume,
    find_last_beat,
    judge_jobs,
    read_heartbeats,
    read_jobs,
    select_slurm_ids,
)
from hpcrl.plan.records import read_record, read_site
from hpcrl.slurm import next_job
from hpcrl.slurm import submit as slurm
from hpcrl.slurm.component_jobs import cancel_component_jobs
from hpcrl.slurm.status import ACTIVE, UNKNOWN, WAITING, JobStatus, query_job_states
from hpcrl.system.files import publish_file, publish_json
from hpcrl.system.processes import is_alive

STOP_TIMEOUT_S = 30.0
STOP_POLL_INTERVAL_S = 0.2


def read_submission(job: JobDir) -> slurm.SubmittedJob:
    """Read the recorded submission of a job."""
    return read_record(job.submission, slurm.SubmittedJob)


def find_job_states(jobs: Iterable[JobDir], site: Site) -> dict[JobDir, str]:
    """Ask the scheduler once for the states of jobs: queued, running, gone or unknown.

    Jobs that were never submitted, and those whose end is recorded, are left out. One that Slurm does not list any more
    is gone if a later one has started, which waited for its end.
    """
    every = [job for job in jobs if job.submission.exists()]
    states = _ask_job_states([job for job in every if not job.outcome.exists()], site)
    last = max((job.number for job in every if states.get(job, "running") == "running"), default=0)
    return {job: "gone" if state == "unknown" and job.number < last else state for job, state in states.items()}


def find_live_job(campaign: CampaignDir, *, before: int) -> tuple[JobDir, str] | None:
    """Return the first job with a number below `before` that may still run or start, with its state; None without."""
    if not before:
        return None
    states = find_job_states(directory.list_jobs(campaign), read_site(campaign, skips_unknown=True))
    return next(((job, state) for job, state in states.items() if job.number < before and state != "gone"), None)


def find_orphaned_job(campaign: CampaignDir) -> JobDir | None:
    """Return the newest job if its processes send heartbeats though no end of it is recorded; None if they do not.

    Its first process was killed, or the record of its submission is damaged: no scheduler has it then. Only a
    heartbeat that changes shows this, as clocks differ: a silence is waited for.
    """
    job = campaign.job(max(campaign.job_numbers(), default=0))
    if job.outcome.exists():
        return None
    silence_s = max(time.time() - find_last_beat(job), 0.0)
    is_beating = await_new_beat(job, timeout_s=ALIVE_WITHIN_S - silence_s, is_over=job.outcome.exists)
    return job if is_beating else None


def find_job_state(job: JobDir, site: Site) -> str:
    """Ask the scheduler for the state of a submitted job: queued, running, gone or unknown."""
    return _ask_job_states([job], site)[job]


def _ask_job_states(jobs: Iterable[JobDir], site: Site) -> dict[JobDir, str]:
    records = {job: read_submission(job) for job in jobs}
    ids = [record.id for record in records.values() if record.scheduler != "local"]
    statuses = _query_states(ids, site) if ids else {}
    return {job: _describe_state(record, statuses.get(record.id)) for job, record in records.items()}


def describe_next_start(campaign: CampaignDir, subject: str, *, job: JobDir | None = None) -> str:
    """Describe where `subject`, a command or a new job, continues a campaign after the jobs that it had before."""
    events = EventReader.for_role(campaign.events, "train").poll()
    steps = [event for event in events if isinstance(event, StepFinished) and (job is None or event.job < job.number)]
    last_step = max(steps, key=lambda event: (event.job, event.time, event.step)).step if steps else 0
    return describe_resume(subject, saved_step=next_job.find_last_step(campaign), last_step=last_step)


def _describe_state(record: slurm.SubmittedJob, status: JobStatus | None) -> str:
    if status is None:
        return "running" if is_alive(record.pid, record.start_ticks) else "gone"
    match status.state:
        case state if state in WAITING:
            return "queued"
        case state if state in ACTIVE:
            return "running"
        case state if state == UNKNOWN:
            return "unknown"
    return "gone"


def _query_states(ids: list[str], site: Site) -> dict[str, JobStatus]:
    return query_job_states(ids, env=os.environ | slurm.make_site_environment(site))


def stop_gracefully(name: str) -> str:
    """Ask a campaign to make a checkpoint and end, or cancel a job that is only queued. Return a message."""
    campaign = directory.find_campaign(name)
    if (ended := _describe_end(campaign)) is not None:
        if find_orphaned_job(campaign) is not None:
            publish_file(campaign.stop, "")
            return (
                f"campaign {campaign.name}: the first process of its last job was killed, and others of it still run, "
                f"to save a checkpoint: `hpcrl stop --now {campaign.name}` ends them without one"
            )
        return ended
    publish_file(campaign.stop, "")
    job, site = _cancel_waiting(campaign)
    if job.outcome.exists():
        return _end_job(job, site)
    state = find_job_state(job, site)
    if site.scheduler == "slurm" and state == "queued":
        return _end_job(job, site)
    if state == "unknown":
        return (
            f"campaign {campaign.name}: Slurm does not report the state of job {read_submission(job).id}: if it runs, "
            f"it makes a checkpoint and ends; if you know that it is gone, `hpcrl stop --now {campaign.name}`"
        )
    hint = f"`hpcrl monitor {campaign.name}` shows it"
    return f"campaign {campaign.name} is stopping: it makes a checkpoint and ends ({hint})"


def stop_now(name: str) -> str:
    """End a campaign without a checkpoint. Return a message."""
    campaign = directory.find_campaign(name)
    if (ended := _describe_end(campaign)) is not None:
        if (living := find_orphaned_job(campaign)) is not None:
            publish_file(campaign.stop, "")
            publish_file(living.end, "")  # its steps end what they have started
            return f"campaign {campaign.name}: what is left of its last job ends now"
        return ended
    note = ""
    try:
        publish_file(campaign.stop, "")
    except OSError as error:  # a full disk must not keep a job: it ends by a signal
        note = f" (the file {campaign.stop.name} could not be written: {error.strerror})"
    return _end_job(*_cancel_waiting(campaign)) + note


def _describe_end(campaign: CampaignDir) -> str | None:
    """Return the message for a campaign that has ended already; None if any of its jobs may still run, or start.

    The newest may have been cancelled while an earlier one runs.
    """
    jobs = read_jobs(campaign)[-1:]
    if next_job.list_next_jobs(campaign.job(jobs[0].number) if jobs else campaign.job(0)):
        return None
    if jobs and find_live_job(campaign, before=jobs[0].number) is not None:
        return None
    heartbeats = read_heartbeats(campaign.events)
    ids = select_slurm_ids(jobs)
    statuses = _query_states(ids, read_site(campaign, skips_unknown=True)) if ids else {}
    _, verdicts = judge_jobs(campaign, jobs, statuses=statuses, events={}, heartbeats=heartbeats, now=time.time())
    if not verdicts or verdicts[0].state not in FINAL_JOB_STATES:
        return None
    return f"campaign {campaign.name} has ended already ({verdicts[0].state}: {verdicts[0].reason})"


def _cancel_waiting(campaign: CampaignDir) -> tuple[JobDir, Site]:
    """Cancel the jobs that only wait for another one; return the job that is left, the last one if none runs."""
    every, site = directory.list_jobs(campaign), read_site(campaign, skips_unknown=True)
    *_, last = [job for job in every if job.submission.exists()] or every
    states = find_job_states(every, site)
    first = next((job for job, state in states.items() if state != "gone"), last)
    next_job.cancel_next_jobs(first, env=os.environ | slurm.make_site_environment(site))
    return first, site


def _end_job(job: JobDir, site: Site) -> str:
    """End a job without a checkpoint: interrupt it, and cancel it by its recorded id if it does not end."""
    campaign = job.campaign
    if job.outcome.exists():
        resumable = describe_next_start(campaign, f"`hpcrl resume {campaign.name}`")
        return f"campaign {campaign.name}: the job that was to follow is cancelled; {resumable}"
    if find_job_state(job, site) == "running":
        # It may have ended just now; a Slurm that is away refuses the cancellation too.
        with contextlib.suppress(SlurmError):
            slurm.interrupt_job(read_submission(job), site=site)
        deadline = time.monotonic() + STOP_TIMEOUT_S
        while not job.outcome.exists() and time.monotonic() < deadline:
            time.sleep(STOP_POLL_INTERVAL_S)
        if job.outcome.exists():
            resumable = describe_next_start(campaign, f"`hpcrl resume {campaign.name}`")
            return f"campaign {campaign.name}: job {read_submission(job).id} has ended; {resumable}"
    slurm.cancel_job(read_submission(job), site=site)
    cancel_component_jobs(job, env=os.environ | slurm.make_site_environment(site))
    resumable = describe_next_start(campaign, f"`hpcrl resume {campaign.name}`")
    with contextlib.suppress(OSError):
        publish_json(job.outcome, {"outcome": "stopped", "reason": "cancelled (hpcrl stop --now)", "time": time.time()})
    return f"campaign {campaign.name}: job {read_submission(job).id} is cancelled; {resumable}"
