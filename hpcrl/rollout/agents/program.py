"""Run one episode of an agent program, which calls the model itself: the other kind beside hpcrl.rollout.episode.

run_program runs it to the same statuses and outcomes, with the same retries and deadlines. A failed engine is not
recorded as a fault of the environment, nor as a failure of the policy; a program that is stale or cancelled is ended at
once. A program that fails before the model has answered it is a fault: the policy had no part in that.
"""

import asyncio
import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec

from hpcrl.config.recipe import MAX_REWARD
from hpcrl.envs.base import ModelAccess, ProgramEnv, TaskFields
from hpcrl.errors import EngineError, EnvFault, HpcrlError, PolicyFailure
from hpcrl.rollout.agents.episode_record import EpisodeFacts, build_record, measure_engines_s
from hpcrl.rollout.agents.recording import ConversationRecording
from hpcrl.rollout.agents.server import ModelProxy
from hpcrl.rollout.agents.session import ProgramSession
from hpcrl.rollout.episode import (
    EpisodeEnding,
    EpisodeLimits,
    failure_ending,
    late_ending,
    loop_time,
    refuse_faults,
    retry_pause_s,
)
from hpcrl.rollout.rewards import is_infrastructure_error
from hpcrl.rollout.tasks import AgentTask
from hpcrl.spool.ids import make_attempt_id
from hpcrl.spool.outcome import OUTCOME_EXIT, OUTCOME_REWARD_ERROR, OUTCOME_TIMEOUT
from hpcrl.spool.record import Trajectory


async def run_program(
    task: AgentTask,
    *,
    index: int,
    make_program: Callable[[], ProgramEnv],
    proxy: ModelProxy,
    read_fields: Callable[[], TaskFields | None] = lambda: None,
    limits: EpisodeLimits,
    newest_version: Callable[[], int],
    producer: str,
    needed_version: int = 0,
) -> Trajectory:
    """Run the group's episode `index` to its end; its first calls wait for `needed_version`."""
    fault, end = "", loop_time() + limits.episode_timeout_s
    for attempt in range(limits.env_retries + 1):
        if attempt:
            await asyncio.sleep(retry_pause_s(limits.first_pause_s, attempt=attempt, episode=task.episode(index)))
        session = ProgramSession(
            name=make_attempt_id(task.episode(index), attempt),
            trajectory=task.episode(index),
            domain=task.domain,
            seed=task.seed,
            limits=limits,
            recording=ConversationRecording(proxy.template, max_chars=limits.context_length * proxy.max_token_chars),
            newest_version=newest_version,
            start_version=newest_version(),
            needed_version=needed_version,
        )
        started_at = loop_time()
        result = await _run_attempt(make_program, session, proxy, read_fields, seconds=end - loop_time())
        ending = refuse_faults(_conclude_attempt(session, result, is_first=not fault), limits)
        if ending.status in ("env-fault", "policy-fault"):
            fault = ending.reason
        if ending.status != "env-fault" or session.template_fault or loop_time() >= end:
            break  # the template would stop at the same conversation again
    facts = EpisodeFacts(
        id=task.episode(index),
        group=task.group,
        domain=task.domain,
        seed=task.seed,
        status=ending.status,
        outcome=ending.outcome,
        producer=producer,
        start_version=session.start_version,
        started_at=started_at,
        ended_at=loop_time(),
        extra=_describe_attempts(session, ending, fault=fault, num_attempts=attempt + 1),
    )
    build = partial(
        build_record, reward=result if isinstance(result, float) else 0.0, choice=session.trained_conversations
    )
    # In a thread: hundreds of long conversations take seconds.
    return await asyncio.to_thread(build, list(session.recording.turns), facts)


def _describe_attempts(
    session: ProgramSession, ending: EpisodeEnding, *, fault: str, num_attempts: int
) -> dict[str, Any]:
    """Return what the record keeps about the attempts and their requests."""
    found: dict[str, Any] = {"fault": fault, "attempts": num_attempts} if fault else {}
    if ending.outcome and ending.reason:
        found["reason"] = ending.reason
    return found | ({"ignored_fields": session.ignored_fields} if session.ignored_fields else {})


async def _run_attempt(
    make_program: Callable[[], ProgramEnv],
    session: ProgramSession,
    proxy: ModelProxy,
    read_fields: Callable[[], TaskFields | None],
    *,
    seconds: float,
) -> float | HpcrlError:
    """Run the program once; return its reward, or why there is none."""
    token = proxy.open(session)
    problem = ""
    try:
        async with asyncio.timeout(seconds):
            access = msgspec.structs.replace(proxy.model_access(token), reward_key=session.reward_key)
            program, fields = make_program(), read_fields()
            printed_reward = await _await_program(program, session, access, fields)
            problem = getattr(program, "problem", "")
    except TimeoutError:
        why = f"{session.name}: no end in episode_timeout_s = {session.limits.episode_timeout_s:g} s"
        return _EpisodeLateError(OUTCOME_TIMEOUT, why)
    except HpcrlError as error:
        return error
    finally:
        await proxy.close(token)
    if not session.recording.turns:
        return EnvFault(f"{session.name}: {_describe_silence(session)}{f', {problem}' if problem else ''}")
    if problem and session.fault:  # it ended because no engine answered: what it left is not judged
        return EngineError(session.fault)
    reward = printed_reward if session.reward is None else session.reward
    if reward is None:
        return PolicyFailure(OUTCOME_EXIT, f"{session.name}: the program neither printed nor posted a reward")
    return _check_reward(reward, session.name)


def _describe_silence(session: ProgramSession) -> str:
    """Return why the model has answered nothing."""
    if not session.refusal:
        return "the program never called the model"
    return f"the model answered no call of the program; the last was refused: {session.refusal}"


def _check_reward(reward: object, name: str) -> float | PolicyFailure:
    """Return a reward as a finite number, or the failure that it is."""
    with contextlib.suppress(TypeError, ValueError, OverflowError):
        if abs(number := float(reward)) <= MAX_REWARD:  # type: ignore[arg-type]
            return number
    needed = f"a finite number is needed, {MAX_REWARD:g} at most in size"
    return PolicyFailure(OUTCOME_REWARD_ERROR, f"{name}: the reward is {reward!r:.100}: {needed}")


class _EpisodeLateError(PolicyFailure):
    """The time of the whole episode is used up."""


async def _await_program(
    program: ProgramEnv, session: ProgramSession, access: ModelAccess, fields: TaskFields | None
) -> float | None:
    """Await the program until it ends or the session stops it."""
    session.sampling, session.trained_conversations = program.sampling, program.trains
    running = asyncio.ensure_future(program.run(session.seed, access, **({} if fields is None else {"task": fields})))
    stop_waiter = asyncio.ensure_future(session.stop_event.wait())
    try:
        await asyncio.wait({running, stop_waiter}, return_when=asyncio.FIRST_COMPLETED)
        return running.result() if running.done() and not session.is_stale else None
    except (HpcrlError, asyncio.CancelledError):
        raise
    except Exception as error:
        why = f"{session.name}: {type(error).__name__}: {error}"
        raise (EnvFault(why) if is_infrastructure_error(error) else PolicyFailure(OUTCOME_EXIT, why)) from error
    finally:
        stop_waiter.cancel()
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.wait({running})


def _conclude_attempt(session: ProgramSession, result: float | HpcrlError, *, is_first: bool) -> EpisodeEnding:
    """Return how an attempt ended; `is_first` is False after an attempt that was a fault."""
    if session.is_stale:
        return EpisodeEnding("aborted-stale")
    if isinstance(result, float):
        return EpisodeEnding("truncated" if session.limit else "done", session.limit)
    if session.template_fault:
        return EpisodeEnding("env-fault", reason=session.template_fault)
    if session.fault:
        return EpisodeEnding("policy-fault", reason=session.fault)
    is_late = isinstance(result, _EpisodeLateError)
    if not isinstance(result, PolicyFailure) or not session.recording.turns or (is_late and not is_first):
        return EpisodeEnding("env-fault", reason=str(result))
    if session.limit and result.outcome == OUTCOME_EXIT:  # it was asked to end, and did not end well
        return EpisodeEnding("truncated", session.limit, str(result))
    if is_late:
        return late_ending(str(result), engines_s=measure_engines_s(session.recording.turns), limits=session.limits)
    return failure_ending(result)
