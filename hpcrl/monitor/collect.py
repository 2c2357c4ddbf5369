"""Reads a campaign directory (and squeue) again and again, each time only what is new, into a `Snapshot`.

Collector(rundir, ask=slurm_at(site)).poll() -> Snapshot      no server, no port, nothing written

A directory that is half written, torn or partly out of reach gives a snapshot with what can be known, and says in
`detail.problems` what could not be read.
"""

import os
import time
from collections.abc import Callable, Sequence
from typing import Any

from hpcrl.campaign_dir.event_log import EventReader
from hpcrl.campaign_dir.paths import SPOOLS, RunDir
from hpcrl.config.site import Site
from hpcrl.errors import SlurmError
from hpcrl.monitor.job_state import JobRecord, asked_of_slurm, judge, read_as, read_jobs
from hpcrl.monitor.progress import Progress
from hpcrl.monitor.snapshot import Campaign, Facts, Plan, Recipe, Snapshot, build
from hpcrl.slurm.status import UNKNOWN, JobStatus, job_states
from hpcrl.slurm.submit import site_environment
from hpcrl.spool.listing import num_trajectories

SLURM_EVERY_S = 30.0

Ask = Callable[[Sequence[str]], dict[str, JobStatus]]


def slurm_at(site: Site) -> Ask:
    """Asks the Slurm of a site."""
    return lambda ids: job_states(ids, env=os.environ | site_environment(site))


class Collector:
    """What has been read of one campaign so far."""

    def __init__(self, rundir: RunDir, *, ask: Ask, clock: Callable[[], float] = time.time) -> None:
        self._rundir = rundir
        self._ask = ask
        self._clock = clock
        self._reader = EventReader(rundir.events)
        self._progress = Progress()
        self._jobs: dict[int, JobRecord] = {}
        self._statuses: dict[str, JobStatus] = {}
        self._asked_at = float("-inf")
        self._no_answer: list[str] = []
        self._written: dict[str, Any] = {}

    def poll(self) -> Snapshot:
        """Read what is new."""
        now = self._clock()
        problems: list[str] = []
        # Jobs before events: what a driver wrote before it left its outcome is then read together with it.
        jobs = read_jobs(self._rundir, known=self._jobs, problems=problems)
        self._jobs = {job.number: job for job in jobs}
        self._read_events(problems)
        self._ask_slurm(asked_of_slurm(jobs), now)
        state, verdicts = judge(
            self._rundir,
            jobs,
            statuses=self._statuses,
            events=self._progress.jobs,
            beats=self._reader.touched,
            now=now,
        )
        facts = Facts(
            now=now,
            directory=self._rundir.name,
            campaign=self._read_once("campaign", Campaign, problems),
            recipe=self._read_once("recipe", Recipe, problems),
            plan=self._read_once("plan", Plan, problems) or Plan(),
            state=state,
            verdicts=verdicts,
            progress=self._progress,
            beats=self._reader.touched,
            durable={name: self._num_durable(name, problems) for name in SPOOLS},
            num_settled=self._num_settled(problems),
            problems=[*problems, *self._no_answer],
        )
        return build(facts)

    def _read_events(self, problems: list[str]) -> None:
        directory = self._rundir.events
        if directory.exists() and not os.access(directory, os.R_OK | os.X_OK, effective_ids=True):
            problems.append(f"{directory.name}/ cannot be read: permission denied")
        self._progress.add_all(self._reader.poll())
        problems += [f"{name} cannot be read: {why}" for name, why in self._reader.unreadable.items()]

    def _ask_slurm(self, ids: Sequence[str], now: float) -> None:
        """At most every half minute, once for all; where Slurm cannot be asked its jobs are unknown."""
        if not ids or now - self._asked_at < SLURM_EVERY_S:
            return
        self._asked_at = now
        try:
            self._statuses |= self._ask(ids)
            self._no_answer = []
        except SlurmError as error:
            self._statuses |= {
                job: JobStatus(id=job, state=UNKNOWN, reason="Slurm cannot be asked here") for job in ids
            }
            self._no_answer = [str(error)]

    def _read_once(self, name: str, kind: type[Any], problems: list[str]) -> Any:
        """A file that is written once: looked for until it is there."""
        if name not in self._written:
            value = read_as(getattr(self._rundir, name), kind, problems)
            if value is None:
                return None
            self._written[name] = value
        return self._written[name]

    def _num_settled(self, problems: list[str]) -> int:
        settled = read_as(self._rundir.settled, dict[str, int], problems)
        return settled.get("num", 0) if settled else 0

    def _num_durable(self, spool: str, problems: list[str]) -> int:
        try:
            return num_trajectories(self._rundir.spool(spool))
        except FileNotFoundError:
            return 0
        except OSError as error:
            problems.append(f"spool {spool} cannot be read: {error.strerror}")
            return 0
