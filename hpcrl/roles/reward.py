"""Role reward: short tasks, one per sealed segment of "rollouts"; each writes the scored twin of its segment.

    score                  one task
    ELASTIC_INDEX_OFFSET   the first index of workers in reward jobs

A task may run twice (a lost worker, a preempted node): the twin has one name and is either complete or absent.
"""

import functools
import os
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

from hpcrl.campaign_dir.events import FaultReported, SegmentScored, WorkerStarted
from hpcrl.campaign_dir.paths import CampaignDir
from hpcrl.errors import HpcrlError, SpoolError
from hpcrl.roles.context import WorkerContext, open_context, redirect_output
from hpcrl.rollout.rewards import load_reward, score_trajectory
from hpcrl.spool.listing import quarantine_segment
from hpcrl.spool.record import Trajectory
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
        scored = _ScoredCounts()
        try:
            scorer, compression = _make_scorer(context, seen=scored), context.recipe.spool.compression
            derive_segment(source, campaign_dir.spool("scored"), scorer, compression=compression)
        except SpoolError as error:
            pause_s = _handle_spool_error(error, source, context, pause_s=pause_s)
        except HpcrlError as error:
            raise RuntimeError(str(error)) from None  # a plain exception reaches the driver whatever packages it has
        else:
            context.events.emit(scored.summarise(segment))
            return


@dataclass(frozen=True)
class _ScoredCounts:
    """The rewards of one segment, and how often its domains' functions failed."""

    rewards: dict[str, list[float]] = field(default_factory=dict)
    reward_errors: Counter[str] = field(default_factory=Counter)

    def add(self, trajectory: Trajectory, *, has_failed: bool) -> None:
        self.rewards.setdefault(trajectory.domain, []).append(cast(float, trajectory.reward))
        self.reward_errors[trajectory.domain] += has_failed

    def summarise(self, segment: str) -> SegmentScored:
        given = [reward for domain in self.rewards.values() for reward in domain]
        mean = sum(given) / len(given) if given else None
        return SegmentScored(
            segment=segment,
            num=len(given),
            reward_mean=mean,
            rewards=self.rewards,
            reward_errors={name: num for name, num in self.reward_errors.items() if num},
        )


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


def _make_scorer(context: WorkerContext, *, seen: _ScoredCounts) -> Callable[[Trajectory], Trajectory]:
    """Return the function that scores one trajectory; one that cannot be trained on stays unscored."""
    domains = context.recipe.domains
    rewards = {name: load_reward(name, domain, model=context.campaign.model) for name, domain in domains.items()}

    def score_one(trajectory: Trajectory) -> Trajectory:
        scored = score_trajectory(trajectory, domains[trajectory.domain], rewards[trajectory.domain])
        has_failed = (scored.status, scored.outcome) != (trajectory.status, trajectory.outcome)
        if scored.reward is not None:
            seen.add(scored, has_failed=has_failed)
        if has_failed:
            reason = scored.extra["fault" if scored.reward is None else "reason"]
            context.events.emit(FaultReported(what="reward", detail=f"{trajectory.id}: {reason}", id=trajectory.id))
        return scored

    return score_one
