"""Role reward: tasks of one shard of the spool "rollouts"; each writes the scored twins of its segments.

    score                  one task: the segments of a shard, also those that are sealed meanwhile
    ScoringSession         the segments that a task has under way
    RepeatedFaults         the failures of rewards, of which few are reported
    ELASTIC_INDEX_OFFSET   the first index of workers in reward jobs
    MAX_SESSION_S, MAX_IDLE_S, MAX_LINGER_S, RECEIVE_TIMEOUT_S, MAX_REASONS    limits

All calls of reward functions of a worker run at the same time, also those of several segments, in processes that are
killed when they hang (`hpcrl.rollout.reward_process`). Where there is a worker for each shard, a task takes segments
for as long as there are some, and env workers wake it; where reward jobs may be fewer, it leaves what takes long to a
later task. A task may run twice (a lost worker, a preempted node): the twin has one name, and is complete or absent.
"""

import functools
import math
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, cast

import msgspec

from hpcrl.campaign_dir.events import FaultReported, SegmentScored, WorkerStarted, make_segment_scored
from hpcrl.campaign_dir.paths import CampaignDir
from hpcrl.errors import HpcrlError, RewardError, SpoolError
from hpcrl.monitor.notes import make_cause
from hpcrl.roles.context import WorkerContext, make_judge_report, open_context, redirect_output
from hpcrl.rollout.judges.proxy import open_judge_proxy
from hpcrl.rollout.reward_process import RewardProcess, SegmentScores
from hpcrl.rollout.rewards import RewardScore, apply_score
from hpcrl.rollout.teacher_scores import apply_teacher_score
from hpcrl.spool.listing import SegmentListing, find_shard, quarantine_segment
from hpcrl.spool.outcome import name_outcome
from hpcrl.spool.record import TRAINABLE, Trajectory
from hpcrl.spool.segment import is_out_of_reach, read_segment
from hpcrl.spool.writer import MAX_WRITE_PAUSE_S, MIN_WRITE_PAUSE_S, derive_segment
from hpcrl.system.file_watch import retry_passing
from hpcrl.system.processes import MAX_RESTARTS
from hpcrl.system.pulse import expect_nothing, expect_work, note_work
from hpcrl.system.variables import PARTITION_VARIABLE
from hpcrl.system.wakeups import WakeListener

ELASTIC_INDEX_OFFSET = 1_000_000
"""Workers in reward jobs are numbered from here on: Parsl numbers the blocks of each pool from 0."""
MAX_SESSION_S = 30.0
"""A task starts no more segments after this time where there are reward jobs, so that a worker serves every shard."""
MAX_IDLE_S = 60.0
"""The time that a task waits for more segments where each shard has a worker: env workers wake it."""
MAX_LINGER_S = 5.0
"""The further time that it waits for those under way. Their scores are computed all the same: its next task
writes them, unless another worker was faster."""
RECEIVE_TIMEOUT_S = 0.2
MAX_REASONS = 256


def score(campaign: str, job_number: int, segments: list[str], shard: int, num_shards: int) -> None:
    """Score these segments, and those of their shard that are sealed meanwhile."""
    context = _open_reward_context(campaign, job_number)
    faults = _open_faults(campaign, job_number)
    session = ScoringSession(context, _open_reward_process(campaign, job_number), faults)
    listings = [SegmentListing(context.campaign.spool(name)) for name in ("scored", "rollouts")]
    has_own_worker = context.plan.reward_jobs is None
    ends_at = time.monotonic() + (math.inf if has_own_worker else MAX_SESSION_S)
    idle_until = 0.0
    listener = _open_reward_listener(campaign, job_number)
    expect_work("stood in the writing of one segment", context.stall_s)
    try:
        session.start(segments)
        while session.under_way or (time.monotonic() < idle_until and not context.draining):
            note_work()
            if session.under_way and has_own_worker:
                idle_until = time.monotonic() + MAX_IDLE_S
            session.receive(listener)
            now = time.monotonic()
            if now > ends_at + MAX_LINGER_S:
                return
            if now < ends_at and not context.draining:
                scored, sealed = retry_passing(lambda: [listing.name_set() for listing in listings])
                session.start([one for one in sealed - scored if find_shard(one, num_shards=num_shards) == shard])
    except HpcrlError as error:
        raise RuntimeError(str(error)) from None  # a plain exception reaches the driver whatever packages it has
    finally:
        expect_nothing()


class RepeatedFaults:
    """The trajectories of a worker that could not be scored: each reason is reported the 1st, 10th, 100th time.

    Reasons that differ only in quoted texts and numbers are one; every trajectory's record has its own.
    """

    def __init__(self, emit: Callable[[FaultReported], None]) -> None:
        self._emit = emit
        self._counts: Counter[tuple[str, ...]] = Counter()

    def add(self, what: Literal["reward", "judge"], trajectory: Trajectory, reason: str) -> None:
        """Count a trajectory, and report it if its reason is due."""
        key = (trajectory.domain, *make_cause(reason))
        if key not in self._counts and len(self._counts) >= MAX_REASONS:
            key = (trajectory.domain, "")
        self._counts[key] += 1
        num = self._counts[key]
        if num == 10 ** (len(str(num)) - 1):
            detail = f"{trajectory.id}: {reason}"
            self._emit(FaultReported(what=what, detail=detail, id=trajectory.id, domain=trajectory.domain, num=num))


class ScoringSession:
    """The segments that a task has under way."""

    def __init__(self, context: WorkerContext, process: RewardProcess, faults: RepeatedFaults) -> None:
        self._context = context
        self._process = process
        self._faults = faults
        self._sender = context.make_sender("train")
        self._rollouts, self._scored = (context.campaign.spool(name) for name in ("rollouts", "scored"))
        self._seen: set[str] = set()
        self._num_restarts = 0
        self.under_way: set[str] = set()

    def start(self, segments: list[str]) -> None:
        """Start to score segments; one that was retired, quarantined or scored elsewhere needs nothing."""
        for name in sorted(set(segments) - self._seen):
            self._seen.add(name)
            if self._needs_twin(name):
                self.under_way.add(name)
                self._request([name])

    def receive(self, listener: WakeListener | None = None) -> None:
        """Wait a moment for the scores of a segment, which may be of an earlier task, and write its twin.

        The wait ends early when another process wakes this one.
        """
        try:
            answer = self._process.receive(RECEIVE_TIMEOUT_S, wake=listener)
        except RewardError as error:
            self._restart(error)
            return
        if answer is not None:
            name = Path(answer.segment).name
            self._write_twin(name, answer)
            self.under_way.discard(name)
            if answer.error:  # if it is neither gone nor quarantined, it is started again
                self._seen.discard(name)

    def _needs_twin(self, name: str) -> bool:
        return retry_passing(lambda: (self._rollouts / name).exists() and not (self._scored / name).exists())

    def _request(self, segments: list[str]) -> None:
        try:
            for name in segments:
                self._process.request(self._rollouts / name)
        except RewardError as error:
            self._restart(error)

    def _restart(self, error: RewardError) -> None:
        """Request again all that is under way, of another process."""
        self._num_restarts += 1
        if self._num_restarts > MAX_RESTARTS:
            raise error
        self._context.events.emit(FaultReported(what="reward", detail=str(error)))
        self._request(sorted(self.under_way))

    def _write_twin(self, name: str, answer: SegmentScores) -> None:
        """Write the scored twin of a segment; wait while the disk is full, quarantine the segment if it is damaged."""
        source, context = self._rollouts / name, self._context
        if answer.error:
            _check_segment(source, context)
            return
        if context.recipe.judge and _has_error(answer) and context.is_ending():
            return  # a judge may have ended before this worker: the next job scores the segment
        pause_s = MIN_WRITE_PAUSE_S
        while self._needs_twin(name):
            note_work()
            counts = _ScoredCounts()
            scores = zip(answer.scores, answer.teacher or [None] * len(answer.scores), strict=True)
            apply_next = functools.partial(self._apply_next, scores, counts)
            try:
                derive_segment(source, self._scored, apply_next, compression=context.recipe.spool.compression)
                self._sender.wake()
            except SpoolError as error:
                pause_s = _handle_spool_error(error, source, context, pause_s=pause_s)
                continue
            context.events.emit(counts.summarise(name))

    def _apply_next(
        self,
        scores: Iterator[tuple[RewardScore | None, RewardScore | None]],
        counts: "_ScoredCounts",
        trajectory: Trajectory,
    ) -> Trajectory:
        """Return the trajectory with the next score, and that of the teacher; report those that failed."""
        score, taught = next(scores)
        domain = self._context.recipe.domains.get(trajectory.domain)
        if trajectory.status not in TRAINABLE or domain is None:
            return trajectory
        scored = apply_score(trajectory, domain, score)
        if taught is not None and scored.status in TRAINABLE:
            scored = apply_teacher_score(scored, taught, judge=self._context.recipe.teacher_name)
            if taught.error:
                self._faults.add("judge", trajectory, scored.extra["fault"])
                return scored
        has_failed = score is not None and bool(score.error)
        if scored.reward is not None:
            counts.add(scored, played=trajectory if has_failed else None)
        elif has_failed:
            counts.add_fault(trajectory)
        if has_failed:
            self._faults.add("reward", trajectory, scored.extra["fault" if scored.reward is None else "reason"])
        return scored


@dataclass(frozen=True)
class _ScoredCounts:
    """The rewards of one segment, and how often its domains' functions failed."""

    rewards: dict[str, list[float]] = field(default_factory=dict)
    replaced_outcomes: dict[str, Counter[str]] = field(default_factory=dict)
    faults: dict[str, Counter[str]] = field(default_factory=dict)

    def add_fault(self, played: Trajectory) -> None:
        """Count a trajectory that got no reward."""
        self.faults.setdefault(played.domain, Counter())[name_outcome(played.status, played.outcome)] += 1

    def add(self, trajectory: Trajectory, *, played: Trajectory | None) -> None:
        """Count a reward; `played` is the trajectory as it was before, if its function failed."""
        self.rewards.setdefault(trajectory.domain, []).append(cast(float, trajectory.reward))
        if played is not None:
            replaced = self.replaced_outcomes.setdefault(trajectory.domain, Counter())
            replaced[name_outcome(played.status, played.outcome)] += 1

    def summarise(self, segment: str) -> SegmentScored:
        return msgspec.structs.replace(
            make_segment_scored(segment, self.rewards),
            reward_errors={name: replaced.total() for name, replaced in self.replaced_outcomes.items()},
            replaced_outcomes={name: dict(replaced) for name, replaced in self.replaced_outcomes.items()},
            reward_faults={name: dict(failed) for name, failed in self.faults.items()},
        )


def _has_error(answer: SegmentScores) -> bool:
    return any(score is not None and score.error for score in (*answer.scores, *(answer.teacher or ())))


def _check_segment(source: Path, context: WorkerContext) -> None:
    """Read a segment that the process could not read; quarantine it if it is damaged."""
    try:
        if retry_passing(source.exists):
            read_segment(source)
    except SpoolError as error:
        _handle_spool_error(error, source, context, pause_s=MIN_WRITE_PAUSE_S)


def _handle_spool_error(error: SpoolError, source: Path, context: WorkerContext, *, pause_s: float) -> float:
    """Quarantine a damaged segment; for a full or failing disk wait, longer each time. Return the next pause."""
    if not is_out_of_reach(error):
        context.events.emit(FaultReported(what="spool", detail=quarantine_segment(source, str(error))))
        return pause_s
    if context.draining:
        raise RuntimeError(str(error)) from None
    context.events.emit(FaultReported(what="spool", detail=str(error)))
    context.pause(pause_s)
    return min(2 * pause_s, MAX_WRITE_PAUSE_S)


@functools.cache
def _open_reward_context(campaign: str, job_number: int) -> WorkerContext:
    """Open the context of this worker, once; reward workers share a pool, so their index comes from Parsl."""
    campaign_dir = CampaignDir(Path(campaign))
    block, rank = os.environ.get("PARSL_WORKER_BLOCK_ID", "0"), os.environ.get("PARSL_WORKER_RANK", "0")
    index = int(block) * 1000 + int(rank) + ELASTIC_INDEX_OFFSET * (PARTITION_VARIABLE in os.environ)
    redirect_output(campaign_dir.job(job_number), "reward", index)
    context = open_context(campaign_dir, job_number, "reward", index)
    context.events.emit(WorkerStarted(pid=os.getpid(), gpus=[]))
    return context


@functools.cache
def _open_reward_listener(campaign: str, job_number: int) -> WakeListener | None:
    return _open_reward_context(campaign, job_number).open_listener()


@functools.cache
def _open_faults(campaign: str, job_number: int) -> RepeatedFaults:
    return RepeatedFaults(_open_reward_context(campaign, job_number).events.emit)


@functools.cache
def _open_reward_process(campaign: str, job_number: int) -> RewardProcess:
    """Return the process that computes this worker's rewards; it is kept from task to task, as the judges' proxy."""
    context = _open_reward_context(campaign, job_number)
    recipe = context.recipe
    report, certificate = make_judge_report(context), context.certificate
    open_judge_proxy(recipe, context.campaign, job=job_number, report=report, certificate=certificate).__enter__()
    num_cpus = recipe.resources.reward.cpus_per_worker
    return RewardProcess(
        Path(campaign), concurrency=recipe.reward.concurrency, num_cpus=num_cpus, teacher=recipe.teacher_name
    )
