"""The jobs that follow this one: they wait in Slurm's queue while it runs, and start however it ends.

So a campaign continues even if no process was left to ask for it: the walltime was over, the job was preempted, its
nodes failed. A job that is not needed is cancelled; if it starts all the same, it sees that and ends. A driver queues
the next job; where nodes may not submit jobs, the login node queues all of a chain at once.

    queue_next_job           queue the job after this one, unless there is one
    queue_all_next_jobs      queue all jobs that may follow, from the login node
    try_queue_next_jobs      queue the next jobs from a driver: emit the result; a refusal is not an error
    list_next_jobs           the jobs that wait for this one
    cancel_next_jobs         remove them from the queue
    avoid_nodes              let them avoid nodes that failed
    allow_more_jobs          raise the number of jobs that may follow
    count_jobs_left          that number
    claim_job_dir            make the directory of a job that is submitted
    campaign_outcome         the outcome of a campaign, if no job is to follow this one
    has_more_steps, find_last_step, has_checkpoint   what a campaign still has to do, by its newest checkpoint
    query_end_state          ask Slurm how a job ended
    SUBMISSION_TIMEOUT_S     the time limit of a submission
    UNCERTAIN_CAUSES         causes that Slurm may correct
"""

import contextlib
import os
import time
from collections.abc import Callable, Mapping

import msgspec

from hpcrl.campaign_dir.checkpoints import list_saved_steps
from hpcrl.campaign_dir.event_log import EventReader
from hpcrl.campaign_dir.events import CampaignEvent, CheckpointSaved, FaultReported, JobOutcome, NextJobQueued
from hpcrl.campaign_dir.job_end import EndCause, read_job_end
from hpcrl.campaign_dir.paths import CampaignDir, JobDir
from hpcrl.campaign_dir.workers import WorkerPlace
from hpcrl.config.site import Site
from hpcrl.errors import HpcrlError, LostAnswerError, SlurmError
from hpcrl.plan.layout import JobLayout
from hpcrl.plan.plan import NUM_AHEAD, Plan
from hpcrl.plan.records import read_plan, read_recipe
from hpcrl.slurm import commands
from hpcrl.slurm.component_jobs import (
    cancel_component_jobs,
    list_start_dependencies,
    queue_component_jobs,
    read_component_ids,
)
from hpcrl.slurm.end_policy import UNCOUNTED_CAUSES, SavedProgress, decide_campaign_end, name_slurm_cause
from hpcrl.slurm.script import list_excluded_nodes, list_requests, make_job_script, make_mark
from hpcrl.slurm.status import UNKNOWN, query_job_states
from hpcrl.slurm.submit import SubmittedJob, record_submission
from hpcrl.system.file_watch import retry_passing
from hpcrl.system.files import make_private_dir, publish_file, read_json, remove_path

UNCERTAIN_CAUSES: frozenset[EndCause] = frozenset({"unknown", "cancellation", "infrastructure"})
"""The causes that a job records that Slurm may correct afterwards."""

SUBMISSION_TIMEOUT_S = 600.0
"""The time after which no process submits a job any more; sbatch and the search for its job take half of it at most."""


def queue_next_job(
    job: JobDir, *, plan: Plan, site: Site, waits_for: str, env: Mapping[str, str] | None = None
) -> str | None:
    """Queue the job after `job` and return its id; None if there is one already or no more jobs are allowed.

    `waits_for` is the id of the job that it waits for, or several with colons between them.

    Raise SlurmError if Slurm refuses it. A job that may be queued without an answer keeps its directory: it could not
    start without, and a later try finds it by its mark.
    """
    num_left = count_jobs_left(job)
    next_job = job.next_job
    if num_left < 1:
        return None
    if not claim_job_dir(next_job):
        return None
    may_be_queued = next_job.script.exists()
    try:
        make_private_dir(next_job.logs)
        publish_file(next_job.chain_marker, str(num_left - 1))
        publish_file(next_job.script, make_job_script(plan, job=next_job, site=site), mode=0o700)
        queue_component_jobs(next_job, plan=plan, site=site, waits_for=waits_for, env=env)
        dependency = f"--dependency={','.join([f'afterany:{waits_for}', *list_start_dependencies(next_job)])}"
        id = commands.queue_script(next_job.script, dependency, mark=make_mark(next_job), env=env)
    except BaseException as error:
        if may_be_queued or isinstance(error, LostAnswerError):
            with contextlib.suppress(OSError):  # then it can be taken over after a while
                publish_file(next_job.unanswered, "")
        else:
            _cancel_components(next_job, env=env)
            remove_path(next_job.root)
        raise
    try:
        record_submission(SubmittedJob(id=id, scheduler="slurm", time=time.time()), job=next_job)
    except OSError:  # a job that is not recorded could not be cancelled later
        commands.cancel_jobs([id, *read_component_ids(next_job)], env=env)
        remove_path(next_job.root)
        raise
    return id


def _cancel_components(job: JobDir, *, env: Mapping[str, str] | None) -> None:
    """Cancel what was queued for a job that was refused; one that is left finds no job that it is for, and ends."""
    with contextlib.suppress(SlurmError):
        cancel_component_jobs(job, env=env)


def claim_job_dir(job: JobDir) -> bool:
    """Make the directory of a new job; return False if another process is submitting it, or has.

    A process that was killed meanwhile leaves a directory without a submission: its time is over after a while. One
    whose submission was not answered has left a directory that the next process takes over as it is.
    """
    try:
        job.root.mkdir(mode=0o700)
    except FileExistsError:
        with contextlib.suppress(FileNotFoundError):
            job.unanswered.unlink()  # which only one process can
            return not job.submission.exists()
        if job.submission.exists() or _is_being_submitted(job):  # a clock that was set back makes it one of the future
            return False
        remove_path(job.root)
        job.root.mkdir(mode=0o700)
    return True


def queue_all_next_jobs(job: JobDir, *, plan: Plan, site: Site, slurm_id: str, env: Mapping[str, str]) -> list[str]:
    """Queue all jobs that may follow `job`, and return their ids.

    Each waits for all before it: if some of them are cancelled, the first of the others does not start beside `job`.
    """
    ids = [slurm_id]
    while (id := queue_next_job(job, plan=plan, site=site, waits_for=":".join(reversed(ids)), env=env)) is not None:
        ids.append(id)
        job = job.next_job
    return ids[1:]


def try_queue_next_jobs(
    place: WorkerPlace,
    *,
    plan: Plan,
    site: Site,
    slurm_id: str | None,
    emit: Callable[[CampaignEvent], None],
    env: Mapping[str, str] | None = None,
) -> None:
    """Queue the next jobs if this node may; otherwise the login node has, or a user has to resume the campaign.

    The one after the next is for a next job that has no driver, as on a broken node; if the next job is cancelled, it
    waits for this one all the same, and another one follows it. A site may refuse it.
    """
    if slurm_id is None or not site.nodes_may_submit:
        return
    job, waits_for, is_first, num_ahead = place.job, slurm_id, True, 0
    while waits_for and num_ahead < NUM_AHEAD:
        try:
            id = queue_next_job(job, plan=plan, site=site, waits_for=waits_for, env=env)
            job = job.next_job
            known = id or _read_id(job)
            if id is None and known and _is_gone(known):
                continue  # it waited for this job, and was cancelled
            num_ahead += 1
            waits_for = f"{known}:{slurm_id}" if known else ""
        except (HpcrlError, OSError) as error:
            if is_first:
                emit(FaultReported(what="chain", detail=f"no job follows this one: {error}"))
            return
        if id is not None:
            emit(NextJobQueued(slurm_id=id, number=job.number))
        is_first = False


def _is_gone(slurm_id: str) -> bool:
    """Return whether Slurm no longer has a job; False if it does not answer."""
    live = commands.query_live_jobs([slurm_id])
    return live is not None and slurm_id not in live


def _read_id(job: JobDir) -> str | None:
    """Return the id of a job; None if it was not submitted, or is just being."""
    return str(read_json(job.submission)["id"]) if job.submission.exists() else None


def allow_more_jobs(job: JobDir, num: int, *, plan: Plan) -> Plan:
    """Raise the number of jobs that may follow `job`, the last of its chain; return the plan with that number."""
    if job.chain_marker.exists():
        publish_file(job.chain_marker, str(count_jobs_left(job) + num))
        return plan
    plan = msgspec.structs.replace(plan, num_jobs=plan.num_jobs + num)
    publish_file(job.campaign.plan, plan.to_json())
    return plan


def list_next_jobs(job: JobDir) -> list[JobDir]:
    """Return the jobs that were queued to follow `job` and have not started, oldest first."""
    later = (job.campaign.job(number) for number in job.campaign.job_numbers() if number > job.number)
    waiting = []
    for next_job in later:
        if not next_job.chain_marker.exists() or next_job.outcome.exists():
            break
        if not _has_started(next_job):
            waiting.append(next_job)
    return waiting


def cancel_next_jobs(job: JobDir, *, env: Mapping[str, str] | None = None) -> None:
    """Cancel the jobs that wait for `job`, which still runs, and remove their files.

    Raise SlurmError if Slurm does not answer.
    """
    queued = {next_job: _find_queued_id(next_job, env=env) for next_job in reversed(list_next_jobs(job))}
    component_ids = [id for next_job in queued for id in read_component_ids(next_job)]
    commands.cancel_jobs([*(id for id in queued.values() if id is not None), *component_ids], env=env)
    for next_job, id in queued.items():
        if id is not None or not _is_being_submitted(next_job):
            remove_path(next_job.root)


def _find_queued_id(job: JobDir, *, env: Mapping[str, str] | None = None) -> str | None:
    """Return the id of a job that was submitted, also if Slurm's answer to that was lost."""
    return _read_id(job) or commands.find_marked_job(make_mark(job), env=env)


def _is_being_submitted(job: JobDir) -> bool:
    """Return whether a process may still submit a job, or Slurm may still queue it."""
    return not job.submission.exists() and abs(time.time() - job.root.stat().st_mtime) < SUBMISSION_TIMEOUT_S


def avoid_nodes(job: JobDir, *, plan: Plan, site: Site) -> None:
    """Let the jobs that wait for `job` avoid the nodes that failed, also those that failed after they were queued.

    Raise SlurmError if Slurm refuses that.
    """
    excluded = list_excluded_nodes(job.campaign, plan=plan, site=site, now=time.time())
    waiting = [next_job for next_job in list_next_jobs(job) if next_job.submission.exists()]
    for part in list_requests(plan):
        nodes = list(dict.fromkeys([*excluded[part.partition], *site.partitions[part.partition].exclude]))
        for next_job in waiting if excluded[part.partition] else ():
            own_id = _find_component_id(next_job, part.index, layout=plan.layout)
            commands.ask_slurm(["scontrol", "update", f"JobId={own_id}", f"ExcNodeList={','.join(nodes)}"])


def _find_component_id(job: JobDir, index: int, *, layout: JobLayout) -> str:
    """Return the id by which Slurm has a component of a job."""
    id = str(read_json(job.submission)["id"])
    return f"{id}+{index}" if layout == "hetjob" else [id, *read_component_ids(job)][index]


def campaign_outcome(job: JobDir, *, state: str = UNKNOWN) -> tuple[JobOutcome, str] | None:
    """Return the outcome of a campaign whose job `job` has ended; None if another job is to continue it.

    `state` is that of the job in Slurm, if it is known: it names the cause where the job could not learn it.
    """
    if job.campaign.stop.exists():
        return "stopped", "a user asked for it (hpcrl stop)"
    end = read_job_end(job)
    cause = end.likely_cause if end is not None else "unknown"
    if cause in UNCERTAIN_CAUSES and (named := name_slurm_cause(state)) != "unknown":
        cause = named
    if cause == "complete" and has_more_steps(job.campaign):
        return None  # the campaign was extended while the job ran
    progress = _read_progress(job)
    if end is None and cause == "unknown" and progress.has_checkpoint and not _has_started(job):
        cause = "not-started"
    return decide_campaign_end(end, cause, progress)


def query_end_state(job: JobDir) -> str:
    """Ask Slurm how a job ended; UNKNOWN without an answer, or for a job of no scheduler."""
    if (id := _read_id(job)) is None:
        return UNKNOWN
    return query_job_states([id], env=os.environ)[id].state


def _read_progress(job: JobDir) -> SavedProgress:
    """Return what a job and those before it have saved; a job that a user has submitted starts a new count."""
    numbers = reversed(job.campaign.job_numbers())
    has_checkpoint = any(_has_saved(job.campaign, number) for number in numbers if number <= job.number)
    num_idle, seen = 0, job
    while not _has_saved(job.campaign, seen.number):
        end = read_job_end(seen)
        was_tried = not has_checkpoint or _has_started(seen) if end is None else end.cause not in UNCOUNTED_CAUSES
        num_idle += was_tried or seen is job
        if not seen.chain_marker.exists() or seen.number == 0:
            break
        seen = job.campaign.job(seen.number - 1)
    return SavedProgress(job.number, num_idle, has_checkpoint)


def _has_started(job: JobDir) -> bool:
    """Return whether a job without an outcome had a driver, which makes this directory first."""
    return job.parsl.exists()


def has_more_steps(campaign: CampaignDir) -> bool:
    """Return whether the recipe has more steps than the newest checkpoint."""
    return find_last_step(campaign) < read_recipe(campaign).train.num_steps


def find_last_step(campaign: CampaignDir) -> int:
    """Return the step of the newest checkpoint; 0 without one."""
    return max(_read_saved_steps(campaign), default=0)


def has_checkpoint(campaign: CampaignDir) -> bool:
    """Return whether there is a checkpoint: a job that drains before its first step saves one of step 0."""
    return bool(_read_saved_steps(campaign))


def _read_saved_steps(campaign: CampaignDir) -> list[int]:
    return retry_passing(lambda: list_saved_steps(campaign.checkpoints))


def count_jobs_left(job: JobDir) -> int:
    """Return how many jobs may follow; a job submitted by hand starts a new count."""
    try:
        return int(retry_passing(job.chain_marker.read_text))
    except FileNotFoundError:
        return read_plan(job.campaign).num_jobs - 1


def _has_saved(campaign: CampaignDir, number: int) -> bool:
    events = EventReader.for_role(campaign.events, "train", job=number).poll()
    return any(isinstance(event, CheckpointSaved) for event in events)
