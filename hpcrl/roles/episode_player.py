"""Play an episode in its domain: turn by turn in an environment, or with an agent program.

EpisodePlayer   plays episodes of training
HeldOutPlayer   plays and scores episodes of evaluations
"""

import asyncio
import contextlib
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import msgspec

from hpcrl.config.recipe import DomainConfig, Recipe
from hpcrl.engines.version_gate import MAX_VERSION_WAIT_S
from hpcrl.envs.base import Env, TaskEnv, choose_seed, is_program_domain, make_program
from hpcrl.errors import EnvFault
from hpcrl.roles.context import ROLE_ROUND_INTERVAL_S
from hpcrl.rollout.agents.program import run_program
from hpcrl.rollout.agents.server import ModelProxy
from hpcrl.rollout.episode import ConversationLayout, EpisodeLimits, run_episode
from hpcrl.rollout.rewards import apply_score, list_fault_outcomes, mark_outage, needs_score
from hpcrl.rollout.task_queue import ReadFields, TaskQueue
from hpcrl.rollout.tasks import AgentTask
from hpcrl.rollout.thoughts import AnswerReader
from hpcrl.rollout.trajectory_scorer import TrajectoryScorer
from hpcrl.rollout.turn import StreamingGenerator
from hpcrl.spool.record import Trajectory


def _need_none(_: int) -> int:
    return 0


async def await_version(engine_versions: Callable[[], Sequence[int]], version: int) -> None:
    """Wait until an engine has a version, for a while: the time limits of a program go on while its calls wait."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(MAX_VERSION_WAIT_S):
            while max(engine_versions(), default=version) < version:
                await asyncio.sleep(ROLE_ROUND_INTERVAL_S)


@dataclass(frozen=True, kw_only=True)
class EpisodePlayer:
    """Plays episodes; holds what all episodes of an env worker have in common."""

    recipe: Recipe
    layout: ConversationLayout | None
    """None if all domains are agent programs."""
    policy: StreamingGenerator
    task_queue: TaskQueue
    read_fields: ReadFields
    context_length: int
    newest_version: Callable[[], int]
    producer: str
    read_answer: AnswerReader | None
    """Finds thoughts, for environments that leave them out of later prompts."""
    proxy: ModelProxy | None
    """The endpoint for agent programs, if there are any."""
    engine_versions: Callable[[], Sequence[int]] = list
    """Returns the versions that engines have."""
    find_needed_version: Callable[[int], int] = _need_none
    """Returns the version that an episode for training needs which starts while a version is the newest."""

    async def play_training(self, task: AgentTask, index: int) -> Trajectory:
        """Play an episode for training; one in a separate process waits for a slot."""
        domain = self.recipe.domains[task.domain]
        async with self.task_queue.reserve_slot(task):
            return await self.play(
                task,
                index,
                domain,
                make_env=lambda: self.task_queue.take_env(task),
                limits=self.limits(domain),
                needed_version=self.find_needed_version(self.newest_version()),
            )

    async def play(
        self,
        task: AgentTask,
        index: int,
        domain: DomainConfig,
        *,
        make_env: Callable[[], Awaitable[Env]],
        limits: EpisodeLimits,
        needed_version: int = 0,
    ) -> Trajectory:
        """Play an episode to its end and return its trajectory, whose seed is that of the task's row if it has one."""
        started = time.time()
        trajectory = await self._play_to_end(
            task, index, domain, make_env=make_env, limits=limits, needed_version=needed_version
        )
        return mark_outage(trajectory, domain, since=started)

    async def _play_to_end(
        self,
        task: AgentTask,
        index: int,
        domain: DomainConfig,
        *,
        make_env: Callable[[], Awaitable[Env]],
        limits: EpisodeLimits,
        needed_version: int = 0,
    ) -> Trajectory:
        with contextlib.suppress(EnvFault):  # each attempt of the episode ends with this fault
            task = msgspec.structs.replace(task, seed=choose_seed(task.seed, self.read_fields(task)))
        if is_program_domain(domain):
            assert self.proxy is not None
            await await_version(self.engine_versions, needed_version)
            return await run_program(
                task,
                index=index,
                make_program=lambda: make_program(domain.env, domain.options, what=f"the environment of {task.domain}"),
                read_fields=lambda: self.read_fields(task),
                proxy=self.proxy,
                limits=limits,
                newest_version=self.newest_version,
                producer=self.producer,
                needed_version=needed_version,
            )
        assert self.layout is not None
        return await run_episode(
            task,
            index=index,
            make_env=make_env,
            layout=self.layout,
            policy=self.policy,
            limits=limits,
            newest_version=self.newest_version,
            producer=self.producer,
            read_answer=self.read_answer,
            needed_version=needed_version,
        )

    def limits(self, domain: DomainConfig) -> EpisodeLimits:
        """Return the limits of a training episode."""
        rollout = self.recipe.rollout
        return EpisodeLimits(
            max_turns=domain.max_turns,
            max_new_tokens=domain.max_new_tokens or rollout.max_new_tokens,
            context_length=self.context_length,
            max_lag=rollout.max_lag,
            temperature=rollout.temperature,
            top_p=rollout.top_p,
            # The pool applies the domain's own limit, from the moment when the environment may start.
            create_timeout_s=domain.episode_timeout_s,
            reset_timeout_s=domain.reset_timeout_s,
            step_timeout_s=domain.step_timeout_s,
            episode_timeout_s=domain.episode_timeout_s,
            env_retries=domain.env_retries,
            faults=list_fault_outcomes(domain),
            records_experts=self.recipe.train.router_replay,
        )


@dataclass(frozen=True, kw_only=True)
class HeldOutPlayer:
    """Plays the episodes of evaluations, and scores them: there are few of them, and no spool has them."""

    player: EpisodePlayer
    open_env: Callable[[str, DomainConfig], Awaitable[Env]]
    scorer: TrajectoryScorer
    forget: Callable[[str], None]
    """Called with each episode that has ended."""

    async def play(self, task: AgentTask, index: int, name: str, domain: DomainConfig) -> Trajectory:
        """Play an episode in its own environment: no version is too old for it."""
        recipe = self.player.recipe
        limits = msgspec.structs.replace(
            self.player.limits(domain),
            max_lag=sys.maxsize,
            temperature=recipe.evaluation.temperature,
            records_experts=False,
        )
        try:
            async with self.player.task_queue.reserve_slot(msgspec.structs.replace(task, domain=name)):
                return await self.player.play(
                    task, index, domain, make_env=lambda: self._open_env(task, name, domain), limits=limits
                )
        finally:
            self.forget(task.episode(index))

    async def score(self, name: str, trajectory: Trajectory) -> Trajectory:
        """Return the trajectory with its reward, as in training."""
        domain = self.player.recipe.domains[name]
        if not needs_score(trajectory, domain):
            return apply_score(trajectory, domain, None)
        return apply_score(trajectory, domain, await self.scorer.score(trajectory))

    async def _open_env(self, task: AgentTask, name: str, domain: DomainConfig) -> Env:
        fields = self.player.read_fields(task)
        env = await self.open_env(name, domain)
        return env if fields is None else TaskEnv(env, fields)
