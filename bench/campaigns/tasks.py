"""The tasks of bench.whole, as environments of hpcrl and as functions for other trainers; nothing heavy is imported.

OneSum, SlowSums   a sum answered by one token; three of them, whose answers take lognormal times
Essay              an answer of 64 tokens
draw_sum, score_answer, draw_delay_s   what the environments are made of
write_recipe       the recipe of a campaign
"""

import asyncio
import math
import random
from pathlib import Path

from hpcrl.envs.base import Step

MAX_TERM = 4
NUM_TURNS = 3
DELAY_MEAN_S, DELAY_SIGMA = 0.2, 1.0
VALID_REWARD = 0.1
GROUP_SIZE = 8
GROUPS_PER_STEP = 8
LEARNING_RATE = 3e-3
MAX_RUNNING = 128
ESSAY_TOKENS = 64
ENVS = {"one": "OneSum", "slow": "SlowSums", "essay": "Essay"}


def draw_sum(rng: random.Random) -> tuple[str, int]:
    """Draw a question and its answer."""
    first, second = rng.randint(0, MAX_TERM), rng.randint(0, MAX_TERM)
    return f"{first}+{second}=", first + second


def score_answer(answer: str, right: int) -> float:
    """Return 1 for the right digit, a tenth for another one, else 0."""
    text = answer.strip()
    return 1.0 if text == str(right) else VALID_REWARD if text.isdigit() else 0.0


def draw_delay_s(rng: random.Random) -> float:
    return rng.lognormvariate(math.log(DELAY_MEAN_S) - DELAY_SIGMA**2 / 2, DELAY_SIGMA)


class OneSum:
    """One sum, one answer."""

    async def reset(self, seed: int) -> str:
        question, self._right = draw_sum(random.Random(seed))
        return question

    async def step(self, action: str) -> Step:
        return Step(observation="", reward=score_answer(action, self._right), done=True)

    async def close(self) -> None: ...


class SlowSums:
    """Several sums, one a turn; every answer takes a lognormal time, and the sums of a seed are always the same."""

    async def reset(self, seed: int) -> str:
        self._sums, self._delays, self._turn = random.Random(seed), random.Random(), 0
        question, self._right = draw_sum(self._sums)
        return question

    async def step(self, action: str) -> Step:
        await asyncio.sleep(draw_delay_s(self._delays))
        reward = score_answer(action, self._right) / NUM_TURNS
        self._turn += 1
        question, self._right = draw_sum(self._sums)
        return Step(observation=question, reward=reward, done=self._turn == NUM_TURNS)

    async def close(self) -> None: ...


class Essay:
    """A question whose answer is as long as it may be; its reward is the share of digits in it."""

    async def reset(self, seed: int) -> str:
        return draw_sum(random.Random(seed))[0]

    async def step(self, action: str) -> Step:
        return Step(observation="", reward=sum(map(str.isdigit, action)) / max(len(action), 1), done=True)

    async def close(self) -> None: ...


def write_recipe(path: Path, task: str) -> Path:
    """Write the recipe of a task, with settings as a user would choose them."""
    path.write_text(
        f"""
name = "whole"
description = "A campaign of bench.whole."

[model.tiny]

[domains.sums]
env = "bench.campaigns.tasks:{ENVS[task]}"
max_turns = {NUM_TURNS if task == "slow" else 1}

[rollout]
group_size = {GROUP_SIZE}
max_lag = {4 if task == "slow" else 1}
max_running = {512 if task == "slow" else MAX_RUNNING}
max_new_tokens = {ESSAY_TOKENS if task == "essay" else 1}

[spool]
retire_after_s = 100000.0

[train]
num_steps = 1000000
groups_per_step = {GROUPS_PER_STEP}
learning_rate = {LEARNING_RATE}

[job]
walltime_min = 60
"""
    )
    return path
