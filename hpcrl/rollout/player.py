"""One episode played in a domain: turn by turn, or as an agent program wants it."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from hpcrl.config.recipe import Domain, Recipe
from hpcrl.envs.base import Env, is_program, make_program
from hpcrl.rollout.agents.program import run_program
from hpcrl.rollout.agents.server import Proxy
from hpcrl.rollout.episode import Layout, Limits, run_episode
from hpcrl.rollout.tasks import Task
from hpcrl.rollout.turn import Policy
from hpcrl.spool.record import Trajectory


@dataclass(kw_only=True)
class Player:
    """What all episodes of an env host have in common."""

    recipe: Recipe
    layout: Layout
    policy: Policy
    context_length: int
    newest_version: Callable[[], int]
    producer: str
    proxy: Proxy | None = None
    """Of agent programs, if there are any."""

    async def play(
        self, domain: Domain, task: Task, index: int, *, make_env: Callable[[], Awaitable[Env]], limits: Limits
    ) -> Trajectory:
        """Play it to its end, whatever that is."""
        if is_program(domain.env):
            assert self.proxy is not None
            return await run_program(
                task,
                index=index,
                make_program=lambda: make_program(domain.env, domain.options, what=f"the environment of {task.domain}"),
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

    def limits(self, domain: Domain) -> Limits:
        """Of an episode of training."""
        rollout = self.recipe.rollout
        return Limits(
            max_turns=domain.max_turns,
            max_new_tokens=domain.max_new_tokens or rollout.max_new_tokens,
            context_length=self.context_length,
            max_lag=rollout.max_lag,
            temperature=rollout.temperature,
            create_timeout_s=domain.episode_timeout_s,  # the pool keeps the domain's own, from its turn to start
            reset_timeout_s=domain.reset_timeout_s,
            step_timeout_s=domain.step_timeout_s,
            episode_timeout_s=domain.episode_timeout_s,
            env_retries=domain.env_retries,
        )
