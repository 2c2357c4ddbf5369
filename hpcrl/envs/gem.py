"""The environments of GEM (gem-llm), by their ids.

Gem  one environment
"""

from typing import Any

import gem

from hpcrl.envs.base import Step
from hpcrl.envs.random_state import IsolatedRandom
from hpcrl.errors import ConfigError


class Gem:
    """The environment `id`, such as "game:GuessTheNumber-v0-easy"; the other options are passed to gem.make."""

    def __init__(self, *, id: str, **options: Any) -> None:
        self._id = id
        self._random = IsolatedRandom()
        try:
            with self._random.activate():
                self._env = gem.make(id, **options)
        except (ValueError, TypeError, KeyError) as error:
            raise ConfigError(f"Gem: id = {id!r} with options {options!r}: {error}") from error

    async def reset(self, seed: int) -> str:
        self._random.seed(seed)
        with self._random.activate():
            observation, _ = self._env.reset(seed=seed)
        return str(observation)

    async def step(self, action: str) -> Step:
        with self._random.activate():
            observation, reward, terminated, truncated, _ = self._env.step(action)
        return Step(observation=str(observation), reward=float(reward), done=bool(terminated or truncated))

    async def close(self) -> None:
        """Do nothing: all state is in this object."""
