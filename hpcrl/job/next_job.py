"""The job that follows this one: it waits in Slurm's queue while this one runs, and begins however this one ends.

So a campaign goes on where nobody was left to say so: its walltime was over, it was preempted, its nodes are gone. What
has nothing to follow is taken back; one that begins all the same sees that, and ends.

    follow      queue the next job, unless there is one
    try_follow  the same for a driver: emits what came of it, and a refusal is no error
    take_back   out of the queue with it
    ending      what a campaign ends with, if no job is to follow this one
"""

import time
from collections.abc import Callable
from typing import Literal

from hpcrl.campaign_dir.event_log import EventReader
from hpcrl.campaign_dir.events import CampaignEvent, CheckpointSaved, FaultReported, NextJobQueued
from hpcrl.campaign_dir.paths import JobDir, RunDir
from hpcrl.campaign_dir.workers import WorkerPlace
from hpcrl.config.site import Site
from hpcrl.errors import SlurmError
from hpcrl.plan.plan import Plan
from hpcrl.slurm import commands
from hpcrl.slurm.script import script_of_job
from hpcrl.slurm.submit import Submitted, record
from hpcrl.system.files import discard, private_dir, publish, read_json

Outcome = Literal["done", "failed", "stopped", "drained"]
"""How a job ends; only a campaign whose last job drained has more to do."""


def follow(run: RunDir, job: JobDir, *, plan: Plan, site: Site, slurm_id: str) -> str | None:
    """Queue the job after `job`; its id, or None if there is one already, or none may be. SlurmError if refused."""
    num_left = _num_left(job, plan)
    following = run.job(job.number + 1)
    if num_left < 1 or following.root.exists():
        return None
    private_dir(following.root)
    try:
        private_dir(following.logs)
        publish(following.follows, str(num_left - 1))
        publish(following.script, script_of_job(plan, run=run, job=following.number, site=site), mode=0o700)
        id = commands.queue(following.script, f"--dependency=afterany:{slurm_id}")
    except BaseException:
        discard(following.root)
        raise
    record(Submitted(id=id, scheduler="slurm", time=time.time()), job=following)
    return id


def try_follow(
    place: WorkerPlace, *, plan: Plan, site: Site, slurm_id: str | None, emit: Callable[[CampaignEvent], None]
) -> None:
    """Queue the next job where there is a scheduler; without it somebody has to resume the campaign."""
    if slurm_id is None:
        return
    try:
        id = follow(place.campaign, place.job, plan=plan, site=site, slurm_id=slurm_id)
    except (SlurmError, OSError) as error:
        emit(FaultReported(what="chain", detail=f"no job follows this one: {error}"))
    else:
        if id is not None:
            emit(NextJobQueued(slurm_id=id, number=place.job.number + 1))


def take_back(run: RunDir, job: JobDir) -> None:
    """Cancel the job that waits for `job`, which still runs, and forget it. SlurmError if Slurm does not answer."""
    following = run.job(job.number + 1)
    if not following.follows.exists() or following.outcome.exists():
        return
    if following.submitted.exists():
        commands.cancel([read_json(following.submitted)["id"]])
    discard(following.root)


def ending(run: RunDir, job: JobDir) -> tuple[Outcome, str] | None:
    """How a campaign ends whose job `job` has ended, if it does; None: another job is to go on.

    A job that failed or was killed is followed as long as something comes of that: the last checkpoint was made by it,
    or, where it could not even say why it ended, by the one before.
    """
    if run.stop.exists():
        return "stopped", "somebody asked for it (hpcrl stop)"
    told = read_json(job.outcome) if job.outcome.exists() else None
    if told is not None and told["outcome"] != "failed":
        return None if told["outcome"] == "drained" else (told["outcome"], told["reason"])
    if _made_checkpoint(run, job.number):
        return None
    if told is not None:
        return "failed", told["reason"]
    if not job.follows.exists() or _made_checkpoint(run, job.number - 1):
        return None
    return "failed", f"jobs {job.number - 1} and {job.number} ended without a word and without a checkpoint"


def _num_left(job: JobDir, plan: Plan) -> int:
    """How many jobs may follow; one that was submitted by hand begins anew to count."""
    try:
        return int(job.follows.read_text())
    except FileNotFoundError:
        return plan.num_jobs - 1


def _made_checkpoint(run: RunDir, number: int) -> bool:
    told = EventReader(run.events, pattern=f"{number:03d}-train-*.jsonl").poll()
    return any(isinstance(event, CheckpointSaved) for event in told)
