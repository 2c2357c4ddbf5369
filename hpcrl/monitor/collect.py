"""Read what is new in a campaign directory, and in squeue, into a `CampaignSnapshot`.

    SnapshotCollector(campaign_dir, query=make_slurm_query(campaign_dir)).poll()      no server, no port, no writes

A look alone, which whoever watches does often, costs a tenth of a snapshot where there are many workers.

    SnapshotCollector    reads a campaign again and again
    make_slurm_query     ask the Slurm of a campaign's site
    SlurmQuery           a function that asks Slurm about jobs
    SLURM_INTERVAL_S     time between two queries

A directory that is incomplete, torn or partly unreadable gives a snapshot of what is known; what could not be read is
in `detail.problems`.
"""

import contextlib
import os
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from hpcrl.campaign_dir.event_log import EVENT_SUFFIX, EventReader
from hpcrl.campaign_dir.paths import SPOOLS, CampaignDir, SpoolName, parse_job
from hpcrl.errors import HpcrlError, SlurmError
from hpcrl.monitor.advisories import Advisory, HealthFacts, find_advisories
from hpcrl.monitor.count_lines import CountSampling, CountThinning, drop_superseded
from hpcrl.monitor.job_state import (
    FINAL_STATES,
    CampaignState,
    JobRecord,
    describe_lost_jobs,
    describe_lost_steps,
    judge_jobs,
    read_ended_jobs,
    read_jobs,
    read_json_as,
    select_slurm_ids,
)
from hpcrl.monitor.progress import COUNTS, CampaignProgress
from hpcrl.monitor.snapshot import (
    CampaignSnapshot,
    CampaignSummary,
    PlanSummary,
    RecipeSummary,
    SnapshotInputs,
    build_snapshot,
)
from hpcrl.plan.records import read_site
from hpcrl.slurm.next_job import find_last_step
from hpcrl.slurm.status import UNKNOWN, JobStatus, query_job_states
from hpcrl.slurm.submit import make_site_environment
from hpcrl.spool.listing import SegmentListing, count_trajectories
from hpcrl.system.file_watch import PathWatch

SLURM_INTERVAL_S = 30.0
ADVISORY_INTERVAL_S = 2.0
"""The age of advisories up to which they are shown again, if no step was made: they cost more than the rest."""

SlurmQuery = Callable[[Sequence[str]], dict[str, JobStatus]]


def make_slurm_query(campaign_dir: CampaignDir) -> SlurmQuery:
    """Return a function that asks the Slurm of a campaign's site; SlurmError if its record cannot be read."""

    def query(ids: Sequence[str]) -> dict[str, JobStatus]:
        try:
            site = read_site(campaign_dir, skips_unknown=True)
        except HpcrlError as error:
            raise SlurmError(str(error)) from error
        return query_job_states(ids, env=os.environ | make_site_environment(site))

    return query


class SnapshotCollector:
    """The collector of one campaign; it keeps what has been read so far."""

    def __init__(
        self,
        campaign_dir: CampaignDir,
        *,
        query: SlurmQuery,
        clock: Callable[[], float] = time.time,
        progress: CampaignProgress | None = None,
        job_interval_s: float = 0.0,
    ) -> None:
        """Read a campaign into `progress`, an empty one, for callers that count more than a snapshot has.

        The records of jobs change rarely: they are read again after `job_interval_s` at the earliest.
        """
        self.campaign_dir = campaign_dir
        self._inputs: SnapshotInputs | None = None
        self._query = query
        self._clock = clock
        self._reader = EventReader(campaign_dir.events, is_sparing=True)
        self._is_watched = progress is None
        self._has_looked = False
        self._has_all_files = True
        """The events of every file could be read at the last look."""
        self._lost_steps: str | None = None
        self._progress = progress if progress is not None else CampaignProgress()
        self._now = clock()
        self._campaign: CampaignSummary | None = None
        self._problems: list[str] = []
        """The problems of the last look."""
        self._job_interval_s, self._next_job_look = job_interval_s, float("-inf")
        self._job_problems: list[str] = []
        self._directory_problems: list[str] = []
        """The reasons why no event can be read; found with the records of jobs."""
        self._jobs: dict[int, JobRecord] = {}
        self._ended_jobs: frozenset[int] = frozenset()
        """The jobs that had ended at the last call; what they wrote has been read."""
        self._statuses: dict[str, JobStatus] = {}
        self._last_query_time = float("-inf")
        self._slurm_problems: list[str] = []
        self._records: dict[str, Any] = {}
        self._record_watches: dict[str, PathWatch] = {}
        self._record_problems: dict[str, list[str]] = {}
        self._spools = {name: SegmentListing(campaign_dir.spool(name)) for name in SPOOLS}
        self._num_durable: Counter[str] = Counter()
        self._advisories: list[Advisory] = []
        self._judged: tuple[CampaignState | None, int] = (None, -1)
        """The state and the number of steps by which the advisories were found."""
        self._judged_at = float("-inf")

    def poll(self) -> CampaignSnapshot:
        """Read what is new, and return the state of the campaign now."""
        self.look()
        return self.build()

    def look(self) -> bool:
        """Read what is new; return whether there is more of it than the counts that workers write all the time."""
        now = self._now = self._clock()
        # Jobs before events: if a driver's outcome is read, the events that it wrote before are read as well.
        jobs = self._find_jobs()
        problems = list(self._job_problems)
        ended = frozenset(job.number for job in jobs if job.outcome is not None)
        self._reader.ended_jobs = ended & self._ended_jobs
        if ended != self._ended_jobs:
            self._reader.expect_change()
        known = {job.number: job for job in jobs}
        has_news, self._jobs, self._ended_jobs = known != self._jobs, known, ended
        self._campaign = self._read_record("manifest", CampaignSummary, problems)
        has_news |= self._read_events(problems, now, created=self._campaign.created if self._campaign else None)
        if self._query_slurm(select_slurm_ids(jobs), now):
            has_news = True
            # An outcome is older than Slurm's answer that its job has ended, and may be newer than the look at jobs.
            settled = {job.number: job for job in read_ended_jobs(jobs, self._statuses)}
            if settled != self._jobs:
                self._jobs = settled
                self._reader.expect_change()
                self._add_events()
        self._problems = problems
        return has_news

    def _find_jobs(self) -> list[JobRecord]:
        """Return the jobs, from their records if it is time to read them."""
        if (turn := time.monotonic()) < self._next_job_look:
            return list(self._jobs.values())
        self._next_job_look = turn + self._job_interval_s
        self._job_problems = []
        jobs = read_jobs(self.campaign_dir, known=self._jobs, problems=self._job_problems)
        self._directory_problems = self._check_events(has_ended=any(job.outcome is not None for job in jobs))
        return jobs

    def _check_events(self, *, has_ended: bool) -> list[str]:
        """Return why no event can be read; a campaign of which no job `has_ended` may not have any yet."""
        directory = self.campaign_dir.events
        if not directory.exists():
            return [f"{directory.name}/ is missing: what the campaign did is not known"] if has_ended else []
        if not os.access(directory, os.R_OK | os.X_OK, effective_ids=True):
            return [f"{directory.name}/ cannot be read: permission denied"]
        return []

    def build(self) -> CampaignSnapshot:
        """Return the state of the campaign by what was read so far."""
        now, problems, jobs = self._now, list(self._problems), list(self._jobs.values())
        state, verdicts = judge_jobs(
            self.campaign_dir,
            jobs,
            statuses=self._statuses,
            events=self._progress.jobs,
            heartbeats=self._reader.touched,
            now=now,
        )
        problems += filter(None, [self._find_lost_steps(state)])
        recipe: RecipeSummary | None = self._read_record("recipe", RecipeSummary, problems)
        inputs = SnapshotInputs(
            now=now,
            directory=self.campaign_dir.name,
            campaign=self._campaign,
            recipe=recipe,
            plan=self._read_record("plan", PlanSummary, problems) or PlanSummary(),
            state=state,
            lost_jobs=describe_lost_jobs(self.campaign_dir) if state == "unknown" and not verdicts else "",
            verdicts=verdicts,
            progress=self._progress,
            heartbeats=self._reader.touched,
            num_durable={name: self._count_durable(name, problems) for name in SPOOLS},
            num_settled=self._read_num_settled(problems),
            problems=[*problems, *self._slurm_problems],
            advisories=self._find_advisories(state, now, recipe=recipe),
        )
        self._inputs = inputs
        return build_snapshot(inputs)

    @property
    def inputs(self) -> SnapshotInputs:
        """Return what the last snapshot was built from."""
        assert self._inputs is not None, "no snapshot was made yet"
        return self._inputs

    def _find_lost_steps(self, state: CampaignState) -> str | None:
        """Describe the steps that the events of an ended campaign lack; new ones are read before they are missed."""
        if state not in FINAL_STATES or not self._has_all_files:
            return None
        saved_step = find_last_step(self.campaign_dir)
        found = describe_lost_steps(saved_step=saved_step, last_step=self._progress.highest_step)
        if found is not None and found != self._lost_steps:
            self._reader.expect_change()
            self._add_events()
            found = describe_lost_steps(saved_step=saved_step, last_step=self._progress.highest_step)
        self._lost_steps = found
        return found

    def _find_advisories(self, state: CampaignState, now: float, *, recipe: RecipeSummary | None) -> list[Advisory]:
        judged = (state, len(self._progress.steps))
        if judged != self._judged or now - self._judged_at >= ADVISORY_INTERVAL_S:
            self._judged, self._judged_at = judged, now
            is_running = state in {"running", "draining"}
            facts = HealthFacts(
                campaign=self.campaign_dir.name,
                progress=self._progress,
                now=now,
                is_running=is_running,
                checkpoint_every=None if recipe is None else recipe.train.checkpoint_every_steps,
                num_steps=None if recipe is None else recipe.train.num_steps,
            )
            self._advisories = find_advisories(facts)
        return self._advisories

    def _read_events(self, problems: list[str], now: float, *, created: float | str | None) -> bool:
        """Read the new events; return whether one of them is more than a count."""
        directory = self.campaign_dir.events
        unread = list(self._directory_problems)
        if not self._is_watched:
            if isinstance(created, float):
                self._reader.choose_lines = _make_thinning(directory, created=created, now=now).choose
        elif not self._has_looked:  # the first look has hours of counts, later ones have seconds
            self._reader.choose_lines = CountSampling(now=now).choose
        else:
            self._reader.choose_lines = drop_superseded
        self._has_looked = True
        has_news = self._add_events()
        unread += [f"{name} cannot be read: {why}" for name, why in self._reader.unreadable.items()]
        problems += [*unread, *self._reader.describe_damage()]
        self._has_all_files = not unread
        return has_news

    def _add_events(self) -> bool:
        """Add the new events to the progress; return whether one of them is more than a count."""
        has_news = False
        for event in self._reader.poll_merged():
            self._progress.add(event)
            has_news = has_news or not isinstance(event, COUNTS)
        return has_news

    def _query_slurm(self, ids: Sequence[str], now: float) -> bool:
        """Ask Slurm about all jobs, at most every half minute; if the query fails, the jobs are unknown.

        Return whether it was asked.
        """
        if not ids or now - self._last_query_time < SLURM_INTERVAL_S:
            return False
        self._last_query_time = now
        try:
            self._statuses |= self._query(ids)
            self._slurm_problems = []
        except SlurmError as error:
            self._statuses |= {
                job: JobStatus(id=job, state=UNKNOWN, reason="Slurm cannot be queried here") for job in ids
            }
            self._slurm_problems = [str(error)]
        return True

    def _read_record(self, name: str, kind: type[Any], problems: list[str]) -> Any:
        """Return the content of a record of the last submission, read again when it has changed."""
        path: Path = getattr(self.campaign_dir, name)
        watch = self._record_watches.setdefault(name, PathWatch(path))
        if watch.has_changed() or name not in self._records:
            found: list[str] = []
            value = read_json_as(path, kind, found)
            self._record_problems[name] = found
            if value is not None:
                self._records[name] = value
        problems += self._record_problems[name]
        return self._records.get(name)

    def _read_num_settled(self, problems: list[str]) -> int:
        settled = read_json_as(self.campaign_dir.settled, _SettledNum, problems)
        return settled.num if settled else 0

    def _count_durable(self, spool: SpoolName, problems: list[str]) -> int:
        try:
            added, removed = self._spools[spool].changes()
        except OSError as error:
            problems.append(f"spool {spool} cannot be read: {error.strerror}")
            return 0
        self._num_durable[spool] += count_trajectories(added) - count_trajectories(removed)
        return self._num_durable[spool]


class _SettledNum(msgspec.Struct, frozen=True, kw_only=True):
    """The part of settled.json that is shown: `hpcrl.rollout.flow_control.SettledCount` has all of it."""

    num: int = 0


def _make_thinning(events: Path, *, created: float, now: float) -> CountThinning:
    """Return the choice of lines by the number and the times of the event files of env workers."""
    paths = list(events.glob(f"*-env-*{EVENT_SUFFIX}"))
    times = [created]
    for path in paths:
        with contextlib.suppress(OSError):  # the reader names it
            times.append(path.stat().st_mtime)
    num_by_job = Counter(parse_job(path.name) for path in paths)
    num_workers = max(num_by_job.values(), default=1)
    return CountThinning(duration_s=max(times) - created, now=now, num_workers=num_workers)
