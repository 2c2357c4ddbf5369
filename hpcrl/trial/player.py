"""Play episodes of a recipe's domains in one process: an embedded engine with the initial weights, and no trainer.

play_domains     plays and scores episodes of some domains
DomainTrial      the episodes of one domain
"""

import asyncio
import contextlib
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from hpcrl.campaign_dir.event_log import EventLog
from hpcrl.campaign_dir.paths import CampaignDir
from hpcrl.campaign_dir.workers import EnvWorkerId
from hpcrl.config.recipe import Recipe
from hpcrl.engines.embedded.engine import EmbeddedEngine, load_model
from hpcrl.envs.base import is_program_domain
from hpcrl.envs.pool import open_env
from hpcrl.models.chat_layout import load_chat_layout, load_chat_template
from hpcrl.models.model_config import read_context_length
from hpcrl.models.tiny import make_tiny_model
from hpcrl.plan.records import read_plan, read_recipe, read_site
from hpcrl.roles.context import WorkerContext
from hpcrl.roles.episode_player import EpisodePlayer, HeldOutPlayer
from hpcrl.roles.program_proxy import make_proxy, make_thought_reader
from hpcrl.rollout.agents.server import ModelProxy
from hpcrl.rollout.fault_budget import FaultBudget
from hpcrl.rollout.reward_process import RewardProcess
from hpcrl.rollout.task_queue import TaskQueue
from hpcrl.rollout.task_sets import TaskSets
from hpcrl.rollout.tasks import AgentTask, TaskStream
from hpcrl.rollout.thoughts import AnswerReader
from hpcrl.rollout.trajectory_scorer import TrajectoryScorer
from hpcrl.spool.outcome import name_outcome
from hpcrl.spool.record import TRAINABLE, Trajectory
from hpcrl.system.processes import do_nothing


@dataclass(frozen=True)
class DomainTrial:
    """The episodes of one domain, with their rewards."""

    domain: str
    trajectories: list[Trajectory]

    @property
    def outcomes(self) -> list[str]:
        return [name_outcome(one.status, one.outcome) for one in self.trajectories]


def play_domains(
    campaign: CampaignDir, *, domains: Sequence[str], num_episodes: int, show: Callable[[str], object] = do_nothing
) -> list[DomainTrial]:
    """Play and score episodes of these domains, each of another task; a domain at a time. `show` gets its progress."""
    recipe = read_recipe(campaign)
    if recipe.model.path is None:
        make_tiny_model(campaign.model, recipe.model.tiny, seed=recipe.seed)  # type: ignore[arg-type]
    else:
        campaign.model.symlink_to(recipe.model.path)
    return asyncio.run(_play_domains(_make_context(campaign, recipe), domains, num_episodes, show=show))


def _make_context(campaign: CampaignDir, recipe: Recipe) -> WorkerContext:
    return WorkerContext(
        campaign=campaign,
        job=campaign.job(0),
        role="env",
        index=0,
        recipe=recipe,
        site=read_site(campaign),
        plan=read_plan(campaign),
        events=EventLog.open(campaign, "env", 0, job=0, role="env"),
    )


async def _play_domains(
    context: WorkerContext, domains: Sequence[str], num_episodes: int, *, show: Callable[[str], object]
) -> list[DomainTrial]:
    recipe, campaign = context.recipe, context.campaign
    cpus = context.role_plan.cpus_per_worker
    async with contextlib.AsyncExitStack() as stack:
        engine = EmbeddedEngine(load_model(campaign.model), store=None, max_batch=recipe.engine.max_batch)
        await stack.enter_async_context(engine)
        template = load_chat_template(campaign.model, recipe.model)
        proxy: ModelProxy | None = None
        if any(is_program_domain(recipe.domains[name]) for name in domains):
            proxy = await stack.enter_async_context(make_proxy(context, engine, template=template))
        player = _make_player(context, engine, read_answer=make_thought_reader(context, template), proxy=proxy)
        scorer = TrajectoryScorer(
            RewardProcess(campaign.root, concurrency=recipe.reward.concurrency, num_cpus=cpus, teacher="")
        )
        stack.push_async_callback(player.task_queue.close)
        stack.push_async_callback(scorer.close)
        held_out = HeldOutPlayer(player=player, open_env=open_env, scorer=scorer, forget=lambda episode: None)
        return [await _play_domain(held_out, context, name, num_episodes, show=show) for name in domains]


def _make_player(
    context: WorkerContext, engine: EmbeddedEngine, *, read_answer: AnswerReader, proxy: ModelProxy | None
) -> EpisodePlayer:
    recipe, campaign, role = context.recipe, context.campaign, context.role_plan
    tasks = TaskSets(recipe, EnvWorkerId(0, 1), directory=campaign.tasks)
    has_turns = not all(map(is_program_domain, recipe.domains.values()))
    queue = TaskQueue(
        recipe.domains,
        tasks=TaskStream(EnvWorkerId(0, 1), recipe_seed=recipe.seed, rows=tasks),
        read_fields=tasks.read_fields,
        budget=FaultBudget(max_fault_share=1.0),
        groups_ahead=0,
        episodes_per_group=1,
        cpus=role.cpus_per_worker,
        mem_gib=role.mem_gib_per_worker,
        open_env=open_env,
    )
    return EpisodePlayer(
        recipe=recipe,
        layout=load_chat_layout(campaign.model, recipe.model) if has_turns else None,
        policy=engine,
        task_queue=queue,
        read_fields=tasks.read_fields,
        context_length=read_context_length(campaign.model, max_model_len=recipe.engine.max_model_len),
        newest_version=lambda: engine.version,
        producer=context.name,
        read_answer=read_answer,
        proxy=proxy,
    )


async def _play_domain(
    held_out: HeldOutPlayer, context: WorkerContext, name: str, num_episodes: int, *, show: Callable[[str], object]
) -> DomainTrial:
    """Play one domain's episodes at the same time, sampled as in training."""
    player, recipe = held_out.player, context.recipe
    tasks = TaskSets(recipe, EnvWorkerId(0, 1), directory=context.campaign.tasks, num_drawn={})
    stream = TaskStream(EnvWorkerId(0, 1), recipe_seed=recipe.seed, rows=tasks)
    drawn = [stream.draw({name: 1.0}) for _ in range(num_episodes)]
    numbers = itertools.count(1)

    async def play(task: AgentTask) -> Trajectory:
        trajectory = await player.play_training(task, 0)
        show(f"{name}: {next(numbers)} of {num_episodes} episodes are played")
        return trajectory

    show(f"{name}: the first episodes are played")
    played = await asyncio.gather(*map(play, drawn))
    return DomainTrial(name, [await _score(held_out, name, one) for one in played])


async def _score(held_out: HeldOutPlayer, name: str, trajectory: Trajectory) -> Trajectory:
    scored = await held_out.score(name, trajectory)
    if scored.status in TRAINABLE or scored.reward is None:
        return scored
    return msgspec.structs.replace(scored, reward=None)
