"""Run one episode of an agent program, which calls the model itself: the other kind beside hpcrl.rollout.episode.

run_program runs it to the same statuses, with the same retries and deadlines. A failed engine is not recorded as a
fault of the environment; a program that is stale or cancelled is ended at once.
"""

import asyncio
import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec

from hpcrl.envs.base import ModelAccess, ProgramEnv, TaskFields
from hpcrl.errors import EnvFault, HpcrlError
from hpcrl.rollout.agents.episode_record import EpisodeFacts, build_record
from hpcrl.rollout.agents.recording import ConversationRecording
from hpcrl.rollout.agents.server import ModelProxy
from hpcrl.rollout.agents.session import ProgramSession
from hpcrl.rollout.episode import EpisodeLimits, loop_time, retry_pause_s
from hpcrl.rollout.tasks import AgentTask
from hpcrl.spool.ids import make_attempt_id
from hpcrl.spool.record import Trajectory
from hpcrl.spool.status import EpisodeStatus


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
) -> Trajectory:
    """Run the group's episode `index` to its end."""
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
            recording=ConversationRecording(proxy.template),
            newest_version=newest_version,
            start_version=newest_version(),
        )
        started_at = loop_time()
        reward, problem = await _run_attempt(make_program, session, proxy, read_fields, seconds=end - loop_time())
        status = _final_status(session, reward)
        fault = problem or fault
        if status != "env-fault" or loop_time() >= end:
            break
    facts = EpisodeFacts(
        id=task.episode(index),
        group=task.group,
        domain=task.domain,
        seed=task.seed,
        status=status,
        producer=producer,
        start_version=session.start_version,
        started_at=started_at,
        ended_at=loop_time(),
        extra=_describe_attempts(session, fault=fault, num_attempts=attempt + 1),
    )
    build = partial(build_record, reward=reward or 0.0, choice=session.trained_conversations)
    # In a thread: hundreds of long conversations take seconds.
    return await asyncio.to_thread(build, list(session.recording.turns), facts)


def _describe_attempts(session: ProgramSession, *, fault: str, num_attempts: int) -> dict[str, Any]:
    """Return what the record keeps about the attempts and their requests."""
    faults = {"fault": fault, "attempts": num_attempts} if fault else {}
    return faults | ({"ignored_fields": session.ignored_fields} if session.ignored_fields else {})


async def _run_attempt(
    make_program: Callable[[], ProgramEnv],
    session: ProgramSession,
    proxy: ModelProxy,
    read_fields: Callable[[], TaskFields | None],
    *,
    seconds: float,
) -> tuple[float | None, str]:
    """Run the program once; return its reward, or None and the fault."""
    token = proxy.open(session)
    try:
        async with asyncio.timeout(seconds):
            access = msgspec.structs.replace(proxy.model_access(token), reward_key=session.reward_key)
            program, fields = make_program(), read_fields()
            printed_reward = await _await_program(program, session, access, fields)
    except TimeoutError:
        return None, f"{session.name}: no end in episode_timeout_s = {session.limits.episode_timeout_s:g} s"
    except HpcrlError as error:
        return None, session.fault or str(error)
    finally:
        await proxy.close(token)
    reward = printed_reward if session.reward is None else session.reward
    if session.is_stale:
        return reward, ""
    problem = getattr(program, "problem", "")
    if not session.recording.turns:
        why = f", {problem}" if problem else ""
        return None, session.fault or f"{session.name}: the program never called the model{why}"
    if problem and session.fault:  # it ended because no engine answered: what it left is not judged
        return None, session.fault
    if reward is None:
        return None, session.fault or f"{session.name}: the program neither printed nor posted a reward"
    return reward, ""


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
        raise EnvFault(f"{session.name}: {type(error).__name__}: {error}") from error
    finally:
        stop_waiter.cancel()
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.wait({running})


def _final_status(session: ProgramSession, reward: float | None) -> EpisodeStatus:
    """Return the status of the ended episode."""
    if session.is_stale:
        return "aborted-stale"
    if reward is None or not session.recording.turns:
        return "policy-fault" if session.fault else "env-fault"
    return "truncated" if session.is_truncated else "done"
