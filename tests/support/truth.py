"""Learn in one process, from a seed: episodes of the embedded engine, steps with a lag of exactly `alpha` versions.

Lesson      a domain and its training settings
learned     mean rewards of every step's batch under the policy that acted
at_random   the mean reward of random letters in the same tasks
"""

import asyncio
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import torch

from hpcrl.config.recipe import TinyModel, TrainConfig
from hpcrl.engines.embedded.engine import EmbeddedEngine, load_model
from hpcrl.envs.arithmetic import Arithmetic
from hpcrl.envs.base import Env
from hpcrl.envs.gymnasium_text import FrozenLake
from hpcrl.models.chat_layout import load_chat_layout
from hpcrl.models.tiny import make_tiny_model
from hpcrl.rollout.episode import EpisodeLimits, run_episode
from hpcrl.rollout.tasks import AgentTask
from hpcrl.spool.record import Trajectory
from hpcrl.testing.memory import MemoryStore
from hpcrl.trainers.torch import TorchTrainer
from hpcrl.weights.versions import WeightVersion

GROUP = 8


@dataclass(frozen=True, kw_only=True)
class Lesson:
    """A domain to learn and its training settings."""

    make: Callable[[], Env]
    letters: str
    """The letters that random play draws from."""
    max_turns: int
    num_steps: int
    groups: int
    bar: float
    """Mean reward that neither random play nor an untrained model reaches."""
    train: dict[str, object] = field(default_factory=dict)


LAKE = Lesson(
    make=lambda: FrozenLake(map=["SFF", "FHF", "FFG"], start="random", show="position"),
    letters="LDRU",
    max_turns=6,
    num_steps=40,
    groups=6,
    bar=0.5,
    train={"learning_rate": 5e-3},
)
LAKE_4X4 = Lesson(
    make=lambda: FrozenLake(map="4x4", start="random", show="position"),
    letters="LDRU",
    max_turns=10,
    num_steps=60,
    groups=12,
    bar=0.5,
    train={"learning_rate": 4e-3},
)
SUMS = Lesson(
    make=lambda: Arithmetic(num_terms=2, max_operand=2, operators="+"),
    letters="0123456789=calc+-* ",
    max_turns=2,
    num_steps=60,
    groups=12,
    bar=0.25,
    train={"learning_rate": 3e-3, "entropy_coef": 0.01},
)


def learned(lesson: Lesson, directory: Path, *, alpha: int, correction: str = "token", seed: int = 0) -> list[float]:
    """Return the mean reward of each step's batch, in the order of sampling."""
    torch.set_num_threads(1)
    return asyncio.run(_learned(lesson, directory, alpha=alpha, correction=correction, seed=seed))


async def _learned(lesson: Lesson, directory: Path, *, alpha: int, correction: str, seed: int) -> list[float]:
    if not directory.exists():
        make_tiny_model(directory, TinyModel(), seed=seed)
    settings = {"num_steps": lesson.num_steps, "groups_per_step": lesson.groups, "correction": correction}
    trainer = TorchTrainer(directory, TrainConfig(**{**settings, **lesson.train}), seed=seed)
    store, rewards, waiting = MemoryStore(), [], deque[list[Trajectory]]()
    store.publish(trainer.tensors(), WeightVersion(version=0, step=0))
    async with EmbeddedEngine(load_model(directory), store=store, max_batch=lesson.groups * GROUP) as engine:
        for step in range(lesson.num_steps):
            waiting.append(await _batch(lesson, engine, load_chat_layout(directory), step=step, seed=seed))
            rewards.append(_mean(waiting[-1]))
            if len(waiting) > alpha:
                version = engine.version
                metrics = trainer.train_step(waiting.popleft(), step=version + 1, version=version)
                assert metrics.skipped is None, metrics.skipped
                assert metrics.lag_max == min(alpha, version)
                store.publish(trainer.tensors(), WeightVersion(version=version + 1, step=version + 1))
                await engine.load_version(version + 1)
    return rewards


async def _batch(lesson: Lesson, engine: EmbeddedEngine, chat: object, *, step: int, seed: int) -> list[Trajectory]:
    """Sample complete groups with the engine's version."""
    limits = EpisodeLimits(max_turns=lesson.max_turns, max_new_tokens=1, context_length=256, max_lag=99)

    async def made() -> Env:
        return lesson.make()

    def episode(number: int, index: int) -> object:
        return run_episode(
            AgentTask(domain="truth", number=number, seed=seed * 1_000_000 + number),
            index=index,
            make_env=made,
            layout=chat,
            policy=engine,
            limits=limits,
            newest_version=lambda: engine.version,
            producer="000-env-0",
        )

    numbers = range(step * lesson.groups, (step + 1) * lesson.groups)
    played = await asyncio.gather(*(episode(number, index) for number in numbers for index in range(GROUP)))
    assert {one.status for one in played} <= {"done", "truncated"}
    return [msgspec.structs.replace(one, reward=sum(turn.reward for turn in one.turns)) for one in played]


def _mean(batch: list[Trajectory]) -> float:
    return sum(one.reward for one in batch) / len(batch)


def at_random(lesson: Lesson, *, num_episodes: int = 400, seed: int = 0) -> float:
    """Return the mean reward of random letters."""
    dice = random.Random(seed)

    async def one(number: int) -> float:
        env, total = lesson.make(), 0.0
        await env.reset(number)
        for _ in range(lesson.max_turns):
            step = await env.step(dice.choice(lesson.letters))
            total += step.reward
            if step.done:
                break
        return total

    async def played() -> float:
        return sum([await one(number) for number in range(num_episodes)]) / num_episodes

    return asyncio.run(played())
