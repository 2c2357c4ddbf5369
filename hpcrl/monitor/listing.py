"""All campaigns at a glance: their jobs' files and one question per Slurm, no events."""

import itertools
import os
import time
from collections.abc import Iterable, Mapping

import msgspec

from hpcrl.errors import SlurmError
from hpcrl.monitor.build import Campaign
from hpcrl.monitor.jobs import JobRecord, asked_of_slurm, beats, judge, read_as, read_jobs
from hpcrl.monitor.state import State
from hpcrl.rundir import RunDir
from hpcrl.site import Site
from hpcrl.slurm.status import JobStatus, job_states
from hpcrl.slurm.submit import site_environment


class Listed(msgspec.Struct, frozen=True, kw_only=True):
    """A line of `hpcrl ls`, and an object of `hpcrl ls --json`."""

    name: str
    site: str | None
    state: State
    created: float | str | None


def survey(runs: Iterable[RunDir], *, problems: list[str]) -> list[Listed]:
    """The campaigns in `runs`, in their order; what could not be read or asked is added to `problems`."""
    jobs = {run: read_jobs(run, problems=problems) for run in runs}
    statuses = _statuses(jobs, problems)
    return [_listed(run, jobs[run], statuses.get(run, {}), problems) for run in jobs]


def _listed(run: RunDir, jobs: list[JobRecord], statuses: Mapping[str, JobStatus], problems: list[str]) -> Listed:
    campaign = read_as(run.campaign, Campaign, problems) or Campaign(name=run.name)
    # Signs of life are only of use for a job that has not left its outcome.
    pulse = beats(run.events) if any(job.outcome is None for job in jobs) else {}
    state, _ = judge(run, jobs, statuses=statuses, events={}, beats=pulse, now=time.time())
    return Listed(name=campaign.name, site=campaign.site, state=state, created=campaign.created)


def _statuses(jobs: Mapping[RunDir, list[JobRecord]], problems: list[str]) -> dict[RunDir, dict[str, JobStatus]]:
    """What Slurm says, asked once for all campaigns of one Slurm (the lab is another than the machine's own)."""
    asked: dict[str | None, tuple[Site, dict[RunDir, list[str]]]] = {}
    for run, records in jobs.items():
        ids = asked_of_slurm(records)
        site = read_as(run.site, Site, problems) if ids else None
        if site is not None:
            asked.setdefault(site.slurm_conf, (site, {}))[1][run] = ids
    found: dict[RunDir, dict[str, JobStatus]] = {}
    for site, ids_of in asked.values():
        try:
            answer = job_states([*itertools.chain(*ids_of.values())], env=os.environ | site_environment(site))
        except SlurmError as error:
            problems.append(str(error))
            continue
        found |= {run: {job: answer[job] for job in ids} for run, ids in ids_of.items()}
    return found
