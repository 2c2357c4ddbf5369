"""Role reward: short tasks, one per sealed segment of "rollouts"; each writes the scored twin of its segment.

A task may run twice (a lost worker, a preempted node): the twin has one name, and is there complete or not at all.
"""

import functools
import math
import os
from collections.abc import Callable
from pathlib import Path

import msgspec

from hpcrl.campaign_dir.events import FaultReported, SegmentScored, WorkerStarted
from hpcrl.campaign_dir.paths import RunDir
from hpcrl.errors import HpcrlError, SpoolError
from hpcrl.roles.context import Context, log_to, open_context
from hpcrl.rollout.rewards import load_reward, parts_of
from hpcrl.spool.listing import quarantine
from hpcrl.spool.record import TRAINABLE, Trajectory
from hpcrl.spool.segment import is_out_of_reach
from hpcrl.spool.writer import FIRST_PAUSE_S, LONGEST_PAUSE_S, derive
from hpcrl.system.variables import PARTITION_VARIABLE

ELASTIC = 1_000_000
"""Workers in jobs of their own are numbered from here on: Parsl numbers the blocks of each pool from 0."""


def score(campaign: str, job_number: int, segment: str) -> None:
    """Score every trajectory of one segment."""
    context = _context(campaign, job_number)
    run = context.run
    pause_s = FIRST_PAUSE_S
    source = run.spool("rollouts") / segment
    while source.exists():  # else it is retired, or in quarantine: there is nothing to do
        rewards: dict[str, list[float]] = {}
        try:
            scorer, compression = _scorer(context, seen=rewards), context.recipe.spool.compression
            derive(source, run.spool("scored"), scorer, compression=compression)
        except SpoolError as error:
            pause_s = _after(error, source, context, pause_s=pause_s)
        except HpcrlError as error:
            raise RuntimeError(str(error)) from None  # a plain exception reaches the driver whatever packages it has
        else:
            given = [reward for domain in rewards.values() for reward in domain]
            mean = sum(given) / len(given) if given else None
            context.events.emit(SegmentScored(segment=segment, num=len(given), reward_mean=mean, rewards=rewards))
            return


def _after(error: SpoolError, source: Path, context: Context, *, pause_s: float) -> float:
    """A disk that is full or fails is asked again, less and less often; a damaged segment is put aside."""
    if not is_out_of_reach(error):
        context.events.emit(FaultReported(what="spool", detail=quarantine(source, str(error))))
        return pause_s
    if context.draining:
        raise RuntimeError(str(error)) from None
    context.events.emit(FaultReported(what="spool", detail=str(error)))
    context.pause(pause_s)
    return min(2 * pause_s, LONGEST_PAUSE_S)


@functools.cache
def _context(campaign: str, job_number: int) -> Context:
    """This worker's own; rewards share a pool, so the index is Parsl's."""
    run = RunDir(Path(campaign))
    block, rank = os.environ.get("PARSL_WORKER_BLOCK_ID", "0"), os.environ.get("PARSL_WORKER_RANK", "0")
    index = int(block) * 1000 + int(rank) + ELASTIC * (PARTITION_VARIABLE in os.environ)
    log_to(run.job(job_number), "reward", index)
    context = open_context(run, job_number, "reward", index)
    context.events.emit(WorkerStarted(pid=os.getpid(), gpus=[]))
    return context


def _scorer(context: Context, *, seen: dict[str, list[float]]) -> Callable[[Trajectory], Trajectory]:
    """The transformation of one trajectory; what cannot be trained on is passed through unscored."""
    rewards = {
        name: load_reward(name, domain, model=context.run.model) for name, domain in context.recipe.domains.items()
    }

    def scored(trajectory: Trajectory) -> Trajectory:
        if trajectory.status not in TRAINABLE:
            return trajectory
        try:
            parts = parts_of(rewards[trajectory.domain](trajectory))
        except Exception as error:  # noqa: BLE001 - a user's reward may raise anything; one episode must not end a run
            return _faulted(trajectory, f"{type(error).__name__}: {error}", context)
        total = math.fsum(parts.values())
        if not math.isfinite(total):
            return _faulted(trajectory, f"it gave {parts!r}, and a reward must be a finite number", context)
        seen.setdefault(trajectory.domain, []).append(total)
        return msgspec.structs.replace(trajectory, reward=total, reward_parts=parts)

    return scored


def _faulted(trajectory: Trajectory, why: str, context: Context) -> Trajectory:
    """Never scored as zero: a reward that failed says nothing about the agent."""
    name = context.recipe.domains[trajectory.domain].reward
    context.events.emit(FaultReported(what="reward", detail=f"{name} on {trajectory.id}: {why}", id=trajectory.id))
    return msgspec.structs.replace(trajectory, status="env-fault")
