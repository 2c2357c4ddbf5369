"""The tasks of reasoning-gym: generated questions, one answer, and a score by the task's own checker.

ReasoningGym    one of its tasks, by name, with that task's options
extract_answer  the answer in a model's text
"""

import re
from typing import Any

import reasoning_gym

from hpcrl.envs.base import Step
from hpcrl.envs.random_state import IsolatedRandom
from hpcrl.errors import ConfigError

_ANSWER_TAG = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


def extract_answer(text: str) -> str:
    """Return the text in the last <answer> tags, else all of it."""
    tagged = _ANSWER_TAG.findall(text)
    return str(tagged[-1] if tagged else text).strip()


class ReasoningGym:
    """One question of the task `task`; the other options are passed to it."""

    def __init__(self, *, task: str, **options: Any) -> None:
        self._task = task
        self._options = options
        self._random = IsolatedRandom()
        try:
            reasoning_gym.create_dataset(task, size=1, seed=0, **options)
        except (ValueError, TypeError, AssertionError) as error:
            raise ConfigError(f"ReasoningGym: task = {task!r} with options {options!r}: {error}") from error

    async def reset(self, seed: int) -> str:
        self._random.seed(seed)
        with self._random.activate():
            self._dataset = reasoning_gym.create_dataset(self._task, size=1, seed=seed, **self._options)
            self._entry = self._dataset[0]
        return str(self._entry["question"])

    async def step(self, action: str) -> Step:
        with self._random.activate():
            score = float(self._dataset.score_answer(answer=extract_answer(action), entry=self._entry))
        return Step(observation=f"score {score:g}", reward=score, done=True)

    async def close(self) -> None:
        """Do nothing: all state is in this object."""
