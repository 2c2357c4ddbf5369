"""Play an episode in its domain: turn by turn in an environment, or with an agent program."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from hpcrl.config.recipe import DomainConfig, Recipe
from hpcrl.envs.base import Env, TaskFields, is_program, make_program
from hpcrl.rollout.agents.program import run_program
from hpcrl.rollout.agents.server import ModelProxy
from hpcrl.rollout.episode import ConversationLayout, EpisodeLimits, run_episode
from hpcrl.rollout.tasks import AgentTask
from hpcrl.rollout.turn import StreamingGenerator
from hpcrl.spool.record import Trajectory


@dataclass(kw_only=True)
class EpisodePlayer:
    """Plays episodes; holds what all episodes of an env worker have in common."""

    recipe: Recipe
    layout: ConversationLayout
    policy: StreamingGenerator
    context_length: int
    newest_version: Callable[[], int]
    producer: str
    proxy: ModelProxy | None = None
    """The endpoint for agent programs, if there are any."""

    async def play(
        self,
        domain: DomainConfig,
        task: AgentTask,
        index: int,
        *,
        make_env: Callable[[], Awaitable[Env]],
        limits: EpisodeLimits,
        read_fields: Callable[[], TaskFields | None] = lambda: None,
    ) -> Trajectory:
        """Play an episode to its end and return its trajectory."""
        if domain.python is None and is_program(domain.env):
            assert self.proxy is not None
            return await run_program(
                task,
                index=index,
                make_program=lambda: make_program(domain.env, domain.options, what=f"the environment of {task.domain}"),
                read_fields=read_fields,
                proxy=self.proxy,
                limits=limits,
                newest_version=self.newest_version,
                producer=self.producer,
            )
        return await run_episode(
            task,
            index=index,
            make_env=make_env,
            layout=self.layout,
            policy=self.policy,
            limits=limits,
            newest_version=self.newest_version,
            producer=self.producer,
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
            # The pool applies the domain's own limit, from the moment when the environment may start.
            create_timeout_s=domain.episode_timeout_s,
            reset_timeout_s=domain.reset_timeout_s,
            step_timeout_s=domain.step_timeout_s,
            episode_timeout_s=domain.episode_timeout_s,
            env_retries=domain.env_retries,
        )
