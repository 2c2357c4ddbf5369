"""The job that follows this one: it waits in Slurm's queue while this one runs, and starts however this one ends.

So a campaign continues even if no process was left to ask for it: the walltime was over, the job was preempted, its
nodes failed. A job that is not needed is cancelled; if it starts all the same, it sees that and ends.

    queue_next_job    queue the next job, unless there is one
    try_follow        the same for a driver: emit the result; a refusal is not an error
    cancel_next_job   remove the next job from the queue
    campaign_outcome  the outcome of a campaign, if no job is to follow this one
"""

import time
from collections.abc import Callable

from hpcrl.campaign_dir.event_log import EventReader
from hpcrl.campaign_dir.events import CampaignEvent, CheckpointSaved, FaultReported, JobOutcome, NextJobQueued
from hpcrl.campaign_dir.paths import CampaignDir, JobDir
from hpcrl.campaign_dir.train_limits import make_recipe_digest, read_train_limits
from hpcrl.campaign_dir.workers import WorkerPlace
from hpcrl.config.site import Site
from hpcrl.errors import SlurmError
from hpcrl.plan.plan import Plan
from hpcrl.slurm import commands
from hpcrl.slurm.script import make_job_script, make_mark
from hpcrl.slurm.submit import SubmittedJob, record_submission
from hpcrl.system.files import make_private_dir, publish_file, read_json, remove_path


def queue_next_job(job: JobDir, *, plan: Plan, site: Site, slurm_id: str) -> str | None:
    """Queue the job after `job` and return its id; None if there is one already or no more jobs are allowed.

    Raise SlurmError if Slurm refuses it.
    """
    num_left = _count_jobs_left(job, plan)
    next_job = job.next_job
    if num_left < 1 or next_job.root.exists():
        return None
    make_private_dir(next_job.root)
    try:
        make_private_dir(next_job.logs)
        publish_file(next_job.chain_marker, str(num_left - 1))
        publish_file(next_job.script, make_job_script(plan, job=next_job, site=site), mode=0o700)
        id = commands.queue_script(next_job.script, f"--dependency=afterany:{slurm_id}", mark=make_mark(next_job))
    except BaseException:
        remove_path(next_job.root)
        raise
    record_submission(SubmittedJob(id=id, scheduler="slurm", time=time.time()), job=next_job)
    return id


def try_follow(
    place: WorkerPlace, *, plan: Plan, site: Site, slurm_id: str | None, emit: Callable[[CampaignEvent], None]
) -> None:
    """Queue the next job if there is a scheduler; otherwise a user has to resume the campaign."""
    if slurm_id is None:
        return
    try:
        id = queue_next_job(place.job, plan=plan, site=site, slurm_id=slurm_id)
    except (SlurmError, OSError) as error:
        emit(FaultReported(what="chain", detail=f"no job follows this one: {error}"))
    else:
        if id is not None:
            emit(NextJobQueued(slurm_id=id, number=place.job.number + 1))


def cancel_next_job(job: JobDir) -> None:
    """Cancel the job that waits for `job`, which still runs, and remove its files.

    Raise SlurmError if Slurm does not answer.
    """
    next_job = job.next_job
    if not next_job.chain_marker.exists() or next_job.outcome.exists():
        return
    if next_job.submission.exists():
        commands.cancel_jobs([read_json(next_job.submission)["id"]])
    remove_path(next_job.root)


def campaign_outcome(job: JobDir) -> tuple[JobOutcome, str] | None:
    """Return the outcome of a campaign whose job `job` has ended; None if another job is to continue it.

    A job that failed is followed only if it has made a checkpoint; one that was drained, cut off or killed also if the
    job before has: the next one may have more time. It is not followed if its trainer has too little memory in any job.
    """
    if job.campaign.stop.exists():
        return "stopped", "a user asked for it (hpcrl stop)"
    recorded = read_json(job.outcome) if job.outcome.exists() else None
    if recorded is not None and recorded["outcome"] not in ("drained", "cut", "failed"):
        return recorded["outcome"], recorded["reason"]
    if recorded is not None and _is_out_of_memory(job.campaign, recorded["reason"]):
        return "failed", recorded["reason"]
    if _has_checkpoint(job.campaign, job.number):
        return None
    if recorded is not None and recorded["outcome"] == "failed":
        return "failed", recorded["reason"]
    if not job.chain_marker.exists() or _has_checkpoint(job.campaign, job.number - 1):
        return None
    ended = f": {recorded['reason']}" if recorded is not None else ", the last without an outcome"
    return "failed", (
        f"jobs {job.number - 1} and {job.number} ended without a checkpoint{ended}; raise job.walltime_min, or lower "
        "train.checkpoint_every_steps or train.groups_per_step"
    )


def _count_jobs_left(job: JobDir, plan: Plan) -> int:
    """Return how many jobs may follow; a job submitted by hand starts a new count."""
    try:
        return int(job.chain_marker.read_text())
    except FileNotFoundError:
        return plan.num_jobs - 1


def _is_out_of_memory(campaign: CampaignDir, reason: str) -> bool:
    """Return whether this is the reason that the trainer gave when nothing was left to lower."""
    if not campaign.train_limits.exists():
        return False
    limits, _ = read_train_limits(campaign.train_limits, recipe_digest=make_recipe_digest(campaign.recipe))
    return bool(limits.failure) and limits.failure.startswith(reason)


def _has_checkpoint(campaign: CampaignDir, number: int) -> bool:
    events = EventReader.for_role(campaign.events, "train", job=number).poll()
    return any(isinstance(event, CheckpointSaved) for event in events)
