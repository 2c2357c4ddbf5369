"""One episode of an agent program, which drives the model itself: the other kind of episode beside rollout.episode.

run_program runs it to the same statuses, with the same retries and deadlines. An engine that failed it is not its
environment's fault; being stale ends the program at once, as does cancelling.
"""

import asyncio
import contextlib
from collections.abc import Callable

from hpcrl.envs.base import ModelDoor, Program
from hpcrl.errors import EnvFault, HpcrlError
from hpcrl.rollout.agents.recording import EpisodeFacts, Recording
from hpcrl.rollout.agents.server import Proxy
from hpcrl.rollout.agents.session import Session
from hpcrl.rollout.episode import Limits, now, pause_s
from hpcrl.rollout.tasks import Task
from hpcrl.spool.ids import make_attempt_id
from hpcrl.spool.record import Trajectory
from hpcrl.spool.status import EpisodeStatus


async def run_program(
    task: Task,
    *,
    index: int,
    make_program: Callable[[], Program],
    proxy: Proxy,
    limits: Limits,
    newest_version: Callable[[], int],
    producer: str,
) -> Trajectory:
    """Run the group's episode `index` to its end."""
    fault, end = "", now() + limits.episode_timeout_s
    for attempt in range(limits.env_retries + 1):
        if attempt:
            await asyncio.sleep(pause_s(limits.first_pause_s, attempt=attempt, episode=task.episode(index)))
        session = Session(
            name=make_attempt_id(task.episode(index), attempt),
            trajectory=task.episode(index),
            domain=task.domain,
            seed=task.seed,
            limits=limits,
            recording=Recording(proxy.template),
            newest=newest_version,
            start_version=newest_version(),
        )
        began = now()
        reward, problem = await _attempt(make_program, session, proxy, seconds=end - now())
        status = _status(session, reward)
        fault = problem or fault
        if status != "env-fault" or now() >= end:
            break
    facts = EpisodeFacts(
        id=task.episode(index),
        group=task.group,
        domain=task.domain,
        seed=task.seed,
        status=status,
        producer=producer,
        start_version=session.start_version,
        began=began,
        ended=now(),
        extra={"fault": fault, "attempts": attempt + 1} if fault else {},
    )
    return session.recording.trajectory(facts, reward=reward or 0.0, choice=session.trains)


async def _attempt(
    make_program: Callable[[], Program], session: Session, proxy: Proxy, *, seconds: float
) -> tuple[float | None, str]:
    """The reward of one run of the program, or what went wrong."""
    token = proxy.open(session)
    try:
        async with asyncio.timeout(seconds):
            said = await _run(make_program(), session, proxy.door(token))
    except TimeoutError:
        return None, f"{session.name}: no end in episode_timeout_s = {session.limits.episode_timeout_s:g} s"
    except HpcrlError as error:
        return None, session.fault or str(error)
    finally:
        proxy.close(token)
    reward = said if session.reward is None else session.reward
    if session.is_stale:
        return reward, ""
    if not session.recording.turns:
        return None, session.fault or f"{session.name}: the program never asked the model anything"
    if reward is None:
        return None, session.fault or f"{session.name}: the program neither printed nor posted a reward"
    return reward, ""


async def _run(program: Program, session: Session, door: ModelDoor) -> float | None:
    """The program, until it ends or is not wanted any more."""
    session.sampling, session.trains = program.sampling, program.trains
    running = asyncio.ensure_future(program.run(session.seed, door))
    over = asyncio.ensure_future(session.over.wait())
    try:
        await asyncio.wait({running, over}, return_when=asyncio.FIRST_COMPLETED)
        return running.result() if running.done() and not session.is_stale else None
    except (HpcrlError, asyncio.CancelledError):
        raise
    except Exception as error:
        raise EnvFault(f"{session.name}: {type(error).__name__}: {error}") from error
    finally:
        over.cancel()
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.wait({running})


def _status(session: Session, reward: float | None) -> EpisodeStatus:
    """How the episode ended."""
    if session.is_stale:
        return "aborted-stale"
    if reward is None or not session.recording.turns:
        return "policy-fault" if session.fault else "env-fault"
    return "truncated" if session.ran_out else "done"
