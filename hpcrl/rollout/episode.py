"""Run one episode: reset, then generate and step, turn by turn, to a trajectory exact to the token.

    ConversationLayout        what an episode needs of the chat layout
    EpisodeLimits             how long, how far and how stale an episode may be
    EpisodeEnding             how it ended
    failure_ending, late_ending, refuse_faults    make that of a failure, and check who failed
    run_episode               runs it; an error in its environment or its engines is a status, not an exception
    loop_time, retry_pause_s  the event loop's time, and the pause before a new attempt

Token ids are appended as received and never made from text again, unless the environment has thoughts left out of later
prompts: what follows such a change is another row of the record. After an infrastructure fault the episode starts
again, following a pause; if no attempt succeeds, its status is `env-fault`. An action that the environment rejects is
an ordinary step; one that it answers too late, or with an invalid reward, ends the episode with an outcome that the
domain's settings score (hpcrl.spool.outcome). Only cancelling ends an episode without a trajectory: the caller knows
why. Time is that of the event loop, so an episode runs in virtual time as it does in real time.
"""

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from hpcrl.config.recipe import MAX_REWARD
from hpcrl.engines.base import Completion, GenerateRequest
from hpcrl.envs.base import Env, Step, TaskPrompt
from hpcrl.errors import ConfigError, EngineError, EnvFault, PolicyFailure
from hpcrl.rollout.tasks import AgentTask, stable_hash
from hpcrl.rollout.thoughts import AnswerReader, ShortHistory
from hpcrl.rollout.turn import TurnGenerator, generate_turn
from hpcrl.spool.ids import make_attempt_id, make_request_id
from hpcrl.spool.outcome import (
    OUTCOME_MAX_TURNS,
    OUTCOME_OVERFLOW,
    OUTCOME_REWARD_ERROR,
    OUTCOME_TIMEOUT,
    OUTCOME_UNPLAYED,
    is_too_old,
)
from hpcrl.spool.record import ConversationRow, EpisodeTurn, Trajectory
from hpcrl.spool.routed_experts import join_experts, place_span
from hpcrl.spool.status import EpisodeStatus

T = TypeVar("T")
ENV_CLOSE_TIMEOUT_S = 5.0
"""The time that an environment may take to close before it is abandoned."""
MAX_ATTEMPT_PAUSE_S = 60.0


class ConversationLayout(Protocol):
    """A protocol for laying out a conversation in tokens; `hpcrl.models.chat_layout.ChatLayout` is one."""

    @property
    def stop_token_ids(self) -> Sequence[int]: ...

    def first_turn(self, observation: str) -> list[int]: ...

    def first_messages(self, messages: Sequence[Mapping[str, Any]], *, tools: Sequence[Any]) -> list[int]: ...

    def next_turn(self, observation: str, *, generated: Sequence[int]) -> list[int]: ...

    def decode(self, token_ids: Sequence[int]) -> str: ...


class EpisodeLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits on an episode's turns, tokens, staleness and time; the fields are those of the recipe."""

    max_turns: int
    max_new_tokens: int
    context_length: int
    """The number of tokens that the model can see; an episode that would need more is truncated."""
    max_lag: int
    temperature: float = 1.0
    top_p: float = 1.0
    create_timeout_s: float = 60.0
    reset_timeout_s: float = 60.0
    step_timeout_s: float = 60.0
    episode_timeout_s: float = 3600.0
    """The limit for all attempts together, generation included."""
    env_retries: int = 2
    faults: frozenset[str] = frozenset()
    """The outcomes of the policy's failures that this domain treats as faults."""
    records_experts: bool = False
    """Ask engines for the experts that tokens were sent to, which training replays."""
    first_pause_s: float = 0.5
    """The pause before the first new attempt after a fault; it doubles each time."""


async def run_episode(
    task: AgentTask,
    *,
    index: int,
    make_env: Callable[[], Awaitable[Env]],
    layout: ConversationLayout,
    policy: TurnGenerator,
    limits: EpisodeLimits,
    newest_version: Callable[[], int],
    producer: str,
    read_answer: AnswerReader | None = None,
    needed_version: int = 0,
) -> Trajectory:
    """Run the group's episode `index` to its end; `read_answer` is for environments that leave thoughts out.

    Its first turn waits for `needed_version`, if the engine is about to load it.
    """
    fault = ""
    end = loop_time() + limits.episode_timeout_s
    for attempt in range(limits.env_retries + 1):
        if attempt:
            await asyncio.sleep(retry_pause_s(limits.first_pause_s, attempt=attempt, episode=task.episode(index)))
        builder = _TrajectoryBuilder(task, index=index, producer=producer, start_version=newest_version())
        current = _EpisodeAttempt(
            builder,
            number=attempt,
            layout=layout,
            policy=policy,
            limits=limits,
            newest_version=newest_version,
            read_answer=read_answer,
            needed_version=needed_version,
        )
        env_time = _run_in_env(make_env, current.run, create_timeout_s=limits.create_timeout_s)
        ending = refuse_faults(await _conclude_attempt(env_time, builder, limits, end=end, is_first=not fault), limits)
        if ending.status in ("env-fault", "policy-fault"):
            fault = ending.reason
        if ending.status != "env-fault" or loop_time() >= end:
            break
    return builder.build(ending, fault=fault, attempts=attempt + 1)


class EpisodeEnding(NamedTuple):
    """The way an episode ended."""

    status: EpisodeStatus
    outcome: str = ""
    reason: str = ""
    """The fault, or what exactly the policy failed at."""


async def _conclude_attempt(
    attempt: Coroutine[Any, Any, EpisodeEnding],
    builder: "_TrajectoryBuilder",
    limits: EpisodeLimits,
    *,
    end: float,
    is_first: bool,
) -> EpisodeEnding:
    """Return how an attempt ended; `is_first` is False after an attempt that was a fault."""
    why = f"{builder.id}: no end in episode_timeout_s = {limits.episode_timeout_s:g} s"
    try:
        return await _run_until(end, attempt, why)
    except PolicyFailure as failure:
        return failure_ending(failure)
    except EnvFault as error:
        return EpisodeEnding("env-fault", reason=str(error))
    except _EpisodeTimeoutError as error:
        # Without a turn, or after a fault, it was not the policy that took the time.
        if not builder.num_turns or not is_first:
            return EpisodeEnding("env-fault", reason=str(error))
        return late_ending(str(error), engines_s=limits.episode_timeout_s - builder.env_s, limits=limits)
    except EngineError as error:
        return EpisodeEnding("policy-fault", reason=str(error))


def late_ending(reason: str, *, engines_s: float, limits: EpisodeLimits) -> EpisodeEnding:
    """Return the ending of an episode that took too long: a fault of the engines if it mostly waited for these.

    Overloaded engines would else teach the policy that long episodes are worth nothing.
    """
    if engines_s > limits.episode_timeout_s / 2:
        more = f"{reason}, of which {engines_s:.0f} s were spent waiting for engines: set more, or add engines"
        return EpisodeEnding("policy-fault", reason=more)
    return failure_ending(PolicyFailure(OUTCOME_TIMEOUT, reason))


def refuse_faults(ending: EpisodeEnding, limits: EpisodeLimits) -> EpisodeEnding:
    """Return the ending, or a fault if the domain treats its outcome as one."""
    if ending.outcome not in limits.faults:
        return ending
    return EpisodeEnding("env-fault", reason=ending.reason or f"{ending.outcome}, which the recipe treats as a fault")


def failure_ending(failure: PolicyFailure) -> EpisodeEnding:
    """Return the ending of an episode that the policy made fail; only what took too long was cut off."""
    return EpisodeEnding("truncated" if failure.outcome == OUTCOME_TIMEOUT else "done", failure.outcome, str(failure))


def loop_time() -> float:
    """Return the time of the event loop."""
    return asyncio.get_running_loop().time()


def retry_pause_s(first_s: float, *, attempt: int, episode: str) -> float:
    """Return the wait before new attempt `attempt` (1, 2, ...): it doubles, and varies so that not all coincide."""
    spread = stable_hash(episode, attempt, bits=16) / (1 << 16)
    return float(min(first_s * 2 ** min(attempt - 1, 16), MAX_ATTEMPT_PAUSE_S) * (0.5 + spread))


class _PromptChange(NamedTuple):
    """The prompt of a turn: the first tokens of the conversation so far, and what follows them."""

    num_kept: int
    new_ids: Sequence[int]

    @property
    def num_tokens(self) -> int:
        return self.num_kept + len(self.new_ids)


class _TrajectoryBuilder:
    """A trajectory in the making."""

    def __init__(self, task: AgentTask, *, index: int, producer: str, start_version: int) -> None:
        self.task = task
        self.id = task.episode(index)
        self.context_ids: list[int] = []
        """The conversation so far, as the model last saw it."""
        self.token_ids: list[int] = []
        self.start_version = start_version
        self.reset_s = 0.0
        self._producer = producer
        self._logprobs: list[float] = []
        self._versions: list[int] = []
        self._mask: list[bool] = []
        self._turns: list[EpisodeTurn] = []
        self._rows: list[ConversationRow] = []
        """The rows before the last, whose end is not known yet."""
        self._shares = 0
        """The tokens that the last row shares with the one before."""
        self._places: list[int] = []
        """The position in the columns of each token of the conversation."""
        self._reports: list[tuple[NDArray[np.intp], NDArray[Any]]] = []
        """The experts that engines reported, with the positions of their tokens."""
        self.num_read = 0
        """The first tokens of the conversation whose experts were reported."""

    @property
    def row(self) -> int:
        """The index of the row that new tokens belong to."""
        return len(self._rows)

    def add_prompt(self, prompt: _PromptChange) -> None:
        """Add tokens that the model was given; another row starts if it was given less than all before."""
        if prompt.num_kept < len(self.context_ids):
            self._rows.append(self._end_row())
            self._shares = prompt.num_kept
            del self.context_ids[prompt.num_kept :], self._places[prompt.num_kept :]
            self.num_read = min(self.num_read, prompt.num_kept)
        num = len(prompt.new_ids)
        self._add(prompt.new_ids, logprobs=[0.0] * num, versions=[0] * num, is_reply=False)

    def change_prompt(self, prompt_ids: Sequence[int]) -> _PromptChange:
        """Return a prompt, given as a whole, as what it keeps of the conversation and what is new."""
        pairs = enumerate(zip(self.context_ids, prompt_ids, strict=False))
        num_kept = next((at for at, (one, other) in pairs if one != other), min(len(self.context_ids), len(prompt_ids)))
        return _PromptChange(num_kept, prompt_ids[num_kept:])

    def _end_row(self) -> ConversationRow:
        parent = len(self._rows) - 1 if self._shares else -1
        return ConversationRow(end=len(self.token_ids), parent=parent, shares=self._shares)

    def add_reply(self, completion: Completion) -> None:
        """Add tokens that the model generated."""
        # Engines may have another version than was the newest at the start: staleness counts from the versions used.
        earlier = [self.start_version] if self._turns else []
        self.start_version = min([*earlier, *completion.versions], default=self.start_version)
        self._add(completion.token_ids, logprobs=completion.logprobs, versions=completion.versions, is_reply=True)
        for span in completion.experts:
            self._reports.append(place_span(span, self._places))
            self.num_read = max(self.num_read, span.end)

    @property
    def num_turns(self) -> int:
        return len(self._turns)

    @property
    def env_s(self) -> float:
        """The time that the environment took."""
        return self.reset_s + sum(turn.step_s for turn in self._turns)

    def add_turn(self, turn: EpisodeTurn) -> None:
        self._turns.append(turn)

    def _add(
        self, token_ids: Sequence[int], *, logprobs: Sequence[float], versions: Sequence[int], is_reply: bool
    ) -> None:
        if not len(token_ids) == len(logprobs) == len(versions):
            raise EngineError(
                f"episode {self.id}: the engine returned {len(token_ids)} tokens, {len(logprobs)} log-probabilities "
                f"and {len(versions)} versions: one of each per token is needed"
            )
        self._places += range(len(self.token_ids), len(self.token_ids) + len(token_ids))
        self.context_ids += token_ids
        self.token_ids += token_ids
        self._logprobs += logprobs
        self._versions += versions
        self._mask += [is_reply] * len(token_ids)

    def build(self, ending: EpisodeEnding, *, fault: str, attempts: int) -> Trajectory:
        faults: dict[str, Any] = {"fault": fault, "attempts": attempts} if fault else {}
        reply_versions = [version for version, is_reply in zip(self._versions, self._mask, strict=True) if is_reply]
        return Trajectory(
            id=self.id,
            group=self.task.group,
            domain=self.task.domain,
            seed=self.task.seed,
            status=ending.status,
            outcome=ending.outcome,
            producer=self._producer,
            created=time.time(),
            start_version=self.start_version,
            end_version=reply_versions[-1] if reply_versions else self.start_version,
            token_ids=np.array(self.token_ids, dtype=np.int32),
            logprobs=np.array(self._logprobs, dtype=np.float32),
            versions=np.array(self._versions, dtype=np.int32),
            loss_mask=np.array(self._mask, dtype=np.bool_),
            experts=join_experts(len(self.token_ids), self._reports),
            turns=self._turns,
            rows=[*self._rows, self._end_row()] if self._rows else [],
            reset_s=self.reset_s,
            extra=faults | ({"reason": ending.reason} if ending.outcome and ending.reason else {}),
        )


class _EpisodeAttempt:
    """One attempt at an episode, from reset to its end."""

    def __init__(
        self,
        builder: _TrajectoryBuilder,
        *,
        number: int,
        layout: ConversationLayout,
        policy: TurnGenerator,
        limits: EpisodeLimits,
        newest_version: Callable[[], int],
        read_answer: AnswerReader | None,
        needed_version: int,
    ) -> None:
        self._builder = builder
        self._needed_version = needed_version
        self._read_answer = read_answer
        self._history: ShortHistory | None = None
        """The conversation of an environment that leaves thoughts out."""
        self._number = number
        self._layout = layout
        self._policy = policy
        self._limits = limits
        self._newest_version = newest_version

    async def run(self, env: Env) -> EpisodeEnding:
        builder, limits = self._builder, self._limits
        started_at = loop_time()
        observation = await _await_env(
            env.reset(builder.task.seed), limits.reset_timeout_s, f"{builder.id}: reset", "reset_timeout_s"
        )
        builder.reset_s = loop_time() - started_at
        if isinstance(observation, Step) and observation.done:
            return EpisodeEnding("aborted-redundant", OUTCOME_UNPLAYED)
        prompt = _PromptChange(0, self._open_conversation(observation))
        if prompt.num_tokens >= limits.context_length:
            raise EnvFault(
                f"{builder.id}: the first observation has {prompt.num_tokens} tokens, "
                f"the model sees {self._num_free_tokens}"
            )
        for turn in range(limits.max_turns):
            if prompt.num_tokens >= limits.context_length:
                return EpisodeEnding("truncated", OUTCOME_OVERFLOW)
            builder.add_prompt(prompt)
            step, completion = await self._run_turn(env, turn)
            if is_too_old(builder.start_version, newest=self._newest_version(), max_lag=limits.max_lag):
                return EpisodeEnding("aborted-stale")
            if step.done:
                return EpisodeEnding("done")
            prompt = self._make_next_prompt(step.observation, completion)
        return EpisodeEnding("truncated", OUTCOME_MAX_TURNS)

    def _open_conversation(self, start: object) -> list[int]:
        """Return the ids of the first turn; messages that the chat template refuses are a fault."""
        if not isinstance(start, TaskPrompt):
            return self._layout.first_turn(_check_text(start, self._builder.id))
        if not start.keep_thoughts:
            assert self._read_answer is not None
            self._history = ShortHistory(start, render=self._layout.first_messages, read_answer=self._read_answer)
        try:
            return self._layout.first_messages(start.messages, tools=start.tools)
        except ConfigError as error:
            raise EnvFault(f"{self._builder.id}: reset: {error}") from error

    def _make_next_prompt(self, observation: str, completion: Completion) -> _PromptChange:
        """Return the prompt of the next turn: all before and the observation, unless a thought is left out."""
        context_ids, generated = self._builder.context_ids, completion.token_ids
        if self._history is not None:
            prompt_ids = context_ids[: len(context_ids) - len(generated)]
            try:
                changed = self._history.add_turn(completion, observation, prompt_ids=prompt_ids)
            except ConfigError as error:
                raise EnvFault(f"{self._builder.id}: keep_thoughts = false: {error}") from error
            if changed is not None:
                return self._builder.change_prompt(changed)
        return _PromptChange(len(context_ids), self._layout.next_turn(observation, generated=generated))

    @property
    def _num_free_tokens(self) -> int:
        return self._limits.context_length - len(self._builder.context_ids)

    async def _run_turn(self, env: Env, turn: int) -> tuple[Step, Completion]:
        """Generate the model's reply and step the environment; return the step and the reply."""
        builder, limits, started_at = self._builder, self._limits, loop_time()
        start = len(builder.token_ids)
        completion = await generate_turn(self._policy, self._make_request(turn))
        builder.add_reply(completion)
        generated_at, reply_ids = loop_time(), completion.token_ids
        stops = self._layout.stop_token_ids
        action = self._layout.decode(reply_ids[:-1] if reply_ids and reply_ids[-1] in stops else reply_ids)
        reward = 0.0
        try:
            what = f"{builder.id}: step {turn}"
            step = await _await_env(env.step(action), limits.step_timeout_s, what, "step_timeout_s")
            step = _check_step(step, builder.id)
            reward = step.reward
        finally:  # also of a turn that made the episode fail
            builder.add_turn(
                EpisodeTurn(
                    start=start,
                    end=len(builder.token_ids),
                    reward=reward,
                    generate_s=generated_at - started_at,
                    step_s=loop_time() - generated_at,
                    remote_prefill=completion.remote_prefill,
                    row=builder.row,
                )
            )
        return step, completion

    def _make_request(self, turn: int) -> GenerateRequest:
        builder, limits = self._builder, self._limits
        return GenerateRequest(
            request_id=make_request_id(make_attempt_id(builder.id, self._number), turn),
            token_ids=list(builder.context_ids),
            max_new_tokens=min(limits.max_new_tokens, self._num_free_tokens),
            temperature=limits.temperature,
            top_p=limits.top_p,
            seed=stable_hash(builder.task.seed, builder.id, self._number, turn, bits=63),
            stop_token_ids=list(self._layout.stop_token_ids),
            min_version=0 if turn else self._needed_version,
            experts_from=builder.num_read if limits.records_experts else None,
        )


class _EpisodeTimeoutError(Exception):
    """The time of the whole episode is used up, so a new attempt is pointless."""


async def _run_until(end: float, attempt: Coroutine[Any, Any, EpisodeEnding], what: str) -> EpisodeEnding:
    """Return an attempt's ending if it ends before `end`, by the loop's time."""
    try:
        async with asyncio.timeout_at(end) as limit:
            return await attempt
    except TimeoutError:
        assert limit.expired(), "an attempt raises only EnvFault or EngineError"
        raise _EpisodeTimeoutError(what) from None


async def _run_in_env(
    make_env: Callable[[], Awaitable[Env]],
    run_attempt: Callable[[Env], Awaitable[EpisodeEnding]],
    *,
    create_timeout_s: float,
) -> EpisodeEnding:
    """Make an environment, run an attempt in it, and close it, whatever happens."""
    env = await _await_env(make_env(), create_timeout_s, "making the environment")
    try:
        return await run_attempt(env)
    finally:
        await _close_quietly(env.close())


async def _await_env(call: Awaitable[T], seconds: float, what: str, setting: str = "") -> T:
    """Return the environment's result; a call that is late or raises is a fault. `setting` names the time limit.

    A late step is a failure of the policy, whose action it is.

    A late call is abandoned, not awaited: code that hangs may also ignore being cancelled.
    """
    task: asyncio.Future[T] = asyncio.ensure_future(call)
    try:
        await asyncio.wait({task}, timeout=seconds)
    finally:
        if not task.done():
            task.cancel()
            task.add_done_callback(_consume_outcome)
    if not task.done():
        why = f"{what}: no answer in {f'{setting} = ' * bool(setting)}{seconds:g} s"
        raise (PolicyFailure(OUTCOME_TIMEOUT, why) if setting == "step_timeout_s" else EnvFault(why))
    try:
        return task.result()
    except EnvFault as error:
        raise EnvFault(f"{what}: {error}") from error
    except (Exception, asyncio.CancelledError) as error:
        raise EnvFault(f"{what}: {type(error).__name__}: {error}") from error


async def _close_quietly(call: Coroutine[Any, Any, None] | Awaitable[None]) -> None:
    """Close an environment within ENV_CLOSE_TIMEOUT_S; a failure here does not change the episode's status."""
    with contextlib.suppress(EnvFault):
        await _await_env(call, ENV_CLOSE_TIMEOUT_S, "closing")


def _consume_outcome(task: "asyncio.Future[Any]") -> None:
    """Retrieve the outcome of an abandoned call, so that asyncio does not log it as never retrieved."""
    if not task.cancelled():
        task.exception()


def _check_text(observation: object, episode: str) -> str:
    if not isinstance(observation, str):
        raise EnvFault(f"{episode}: the observation is of type {type(observation).__name__}: it must be str")
    return observation


def _check_step(step: object, episode: str) -> Step:
    """Return the step if it is valid: a reward that is NaN or text would reach the trainer."""
    if not isinstance(step, Step):
        raise EnvFault(f"{episode}: step returned {type(step).__name__}: it must return hpcrl.envs.base.Step")
    _check_text(step.observation, episode)
    try:
        reward = float(step.reward)
    except (TypeError, ValueError, OverflowError):
        reward = float("nan")
    if not abs(reward) <= MAX_REWARD:  # nor is NaN
        what = f"{episode}: step returned the reward {step.reward!r:.100}"
        why = f"{what}: a finite number is needed, {MAX_REWARD:g} at most in size"
        raise PolicyFailure(OUTCOME_REWARD_ERROR, why)
    return Step(observation=step.observation, reward=reward, done=bool(step.done))
