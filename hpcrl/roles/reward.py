"""Role reward: short tasks, one per sealed segment of "rollouts"; each writes the scored twin of its segment.

    score                  one task
    ELASTIC_INDEX_OFFSET   the first index of workers in reward jobs

A task may run twice (a lost worker, a preempted node): the twin has one name and is either complete or absent.
"""

import functools
import math
import os
from collections.abc import Callable
from pathlib import Path

import msgspec

from hpcrl.campaign_dir.events import FaultReported, SegmentScored, WorkerStarted
from hpcrl.campaign_dir.paths import CampaignDir
from hpcrl.errors import HpcrlError, SpoolError
from hpcrl.roles.context import WorkerContext, open_context, redirect_output
from hpcrl.rollout.rewards import load_reward, to_reward_parts
from hpcrl.spool.listing import quarantine_segment
from hpcrl.spool.record import TRAINABLE, Trajectory
from hpcrl.spool.segment import is_out_of_reach
from hpcrl.spool.writer import MAX_PAUSE_S, MIN_PAUSE_S, derive_segment
from hpcrl.system.variables import PARTITION_VARIABLE

ELASTIC_INDEX_OFFSET = 1_000_000
"""Workers in reward jobs are numbered from here on: Parsl numbers the blocks of each pool from 0."""


def score(campaign: str, job_number: int, segment: str) -> None:
    """Score every trajectory of one segment."""
    context = _open_reward_context(campaign, job_number)
    campaign_dir = context.campaign
    pause_s = MIN_PAUSE_S
    source = campaign_dir.spool("rollouts") / segment
    while source.exists():  # otherwise it was retired or quarantined: there is nothing to do
        rewards: dict[str, list[float]] = {}
        try:
            scorer, compression = _make_scorer(context, seen=rewards), context.recipe.spool.compression
            derive_segment(source, campaign_dir.spool("scored"), scorer, compression=compression)
        except SpoolError as error:
            pause_s = _handle_spool_error(error, source, context, pause_s=pause_s)
        except HpcrlError as error:
            raise RuntimeError(str(error)) from None  # a plain exception reaches the driver whatever packages it has
        else:
            given = [reward for domain in rewards.values() for reward in domain]
            mean = sum(given) / len(given) if given else None
            context.events.emit(SegmentScored(segment=segment, num=len(given), reward_mean=mean, rewards=rewards))
            return


def _handle_spool_error(error: SpoolError, source: Path, context: WorkerContext, *, pause_s: float) -> float:
    """Quarantine a damaged segment; for a full or failing disk wait, longer each time. Return the next pause."""
    if not is_out_of_reach(error):
        context.events.emit(FaultReported(what="spool", detail=quarantine_segment(source, str(error))))
        return pause_s
    if context.draining:
        raise RuntimeError(str(error)) from None
    context.events.emit(FaultReported(what="spool", detail=str(error)))
    context.pause(pause_s)
    return min(2 * pause_s, MAX_PAUSE_S)


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


def _make_scorer(context: WorkerContext, *, seen: dict[str, list[float]]) -> Callable[[Trajectory], Trajectory]:
    """Return the function that scores one trajectory; one that cannot be trained on stays unscored."""
    rewards = {
        name: load_reward(name, domain, model=context.campaign.model) for name, domain in context.recipe.domains.items()
    }

    def score_trajectory(trajectory: Trajectory) -> Trajectory:
        if trajectory.status not in TRAINABLE:
            return trajectory
        try:
            parts = to_reward_parts(rewards[trajectory.domain](trajectory))
        except Exception as error:  # noqa: BLE001 - a user's reward may raise anything; one episode must not end a run
            return _mark_faulted(trajectory, f"{type(error).__name__}: {error}", context)
        total = math.fsum(parts.values())
        if not math.isfinite(total):
            return _mark_faulted(trajectory, f"it returned {parts!r}, and a reward must be a finite number", context)
        seen.setdefault(trajectory.domain, []).append(total)
        return msgspec.structs.replace(trajectory, reward=total, reward_parts=parts)

    return score_trajectory


def _mark_faulted(trajectory: Trajectory, reason: str, context: WorkerContext) -> Trajectory:
    """Mark a trajectory whose reward failed; it is never scored as zero, since the agent is not to blame."""
    name = context.recipe.domains[trajectory.domain].reward
    context.events.emit(FaultReported(what="reward", detail=f"{name} on {trajectory.id}: {reason}", id=trajectory.id))
    return msgspec.structs.replace(trajectory, status="env-fault")
