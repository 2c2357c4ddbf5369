"""A teacher as an engine: a judge scores the tokens that the student generated, when their trajectory is rewarded.

make_teacher_caller   what the process of rewards calls for each trajectory
score_tokens          the log-probs of the trained tokens, by the engines of a judge
apply_teacher_score   returns a trajectory with them, or as a fault of the infrastructure
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp
import msgspec
import numpy as np
from numpy.typing import NDArray

from hpcrl.envs.judge_access import LOGPROBS_PATH, JudgeAccess, find_judge
from hpcrl.errors import EngineError
from hpcrl.rollout.rewards import RewardCaller, RewardScore, as_fault
from hpcrl.spool.record import TRAINABLE, Trajectory
from hpcrl.spool.rows import expand_row, list_spans


@dataclass(frozen=True)
class TeacherCaller(RewardCaller):
    """A caller whose scores are the log-probs of a trajectory's tokens."""

    def read_scores(self, value: Any, trajectories: Sequence[Trajectory]) -> list[RewardScore]:
        return [RewardScore(column=value.tobytes()) for _ in trajectories]


def make_teacher_caller(judge: str) -> TeacherCaller:
    """Return what asks the judge with this name."""
    return TeacherCaller(function=functools.partial(score_tokens, judge=judge), takes_list=False, is_async=True)


async def score_tokens(trajectory: Trajectory, *, judge: str) -> NDArray[np.float32]:
    """Return the log-prob of each entry of `token_ids` that is trained; NaN for others."""
    access, found = find_judge(judge), np.full(len(trajectory), np.nan, np.float32)
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as session:
        for number, span in enumerate(list_spans(trajectory)):
            row = expand_row(trajectory, number)
            if row.loss_mask[:1].any():
                found[span.start] = 0.0  # no step trains it: nothing is before it
            trained = np.flatnonzero(row.loss_mask[1:]) + 1
            if len(trained):
                logprobs = await _request_logprobs(session, access, row.token_ids[: trained[-1] + 1].tolist())
                found[span.start - span.shares + trained] = np.asarray(logprobs)[trained - 1]
    return found


async def _request_logprobs(session: aiohttp.ClientSession, access: JudgeAccess, token_ids: list[int]) -> list[float]:
    """Return the log-prob of each token after the first; raise EngineError if the judge does not give them."""
    headers = {"Authorization": f"Bearer {access.api_key}", "Content-Type": "application/json"}
    body = msgspec.json.encode({"token_ids": token_ids})
    async with session.post(access.url + LOGPROBS_PATH, data=body, headers=headers) as answer:
        data = await answer.read()
    if answer.status != 200:
        raise EngineError(f"judge {access.model} answered {answer.status}: {data[:500].decode(errors='replace')}")
    logprobs = msgspec.json.decode(data, type=dict[str, list[float]])["logprobs"]
    if len(logprobs) != len(token_ids) - 1:
        raise EngineError(f"judge {access.model} scored {len(logprobs)} of {len(token_ids) - 1} tokens")
    return logprobs


def apply_teacher_score(trajectory: Trajectory, score: RewardScore, *, judge: str) -> Trajectory:
    """Return a trajectory with the log-probs of its trained tokens; without them it is a fault, and not trained."""
    if trajectory.status not in TRAINABLE:
        return trajectory
    if score.error:
        return as_fault(msgspec.structs.replace(trajectory, reward=None), f"teacher.judge = {judge!r}: {score.error}")
    return msgspec.structs.replace(trajectory, teacher_logprobs=np.frombuffer(score.column, np.float32))
