"""The environments of GEM (gem-llm), by their ids."""

from typing import Any

import gem

from hpcrl.envs.base import Step
from hpcrl.envs.random_state import Chance
from hpcrl.errors import ConfigError


class Gem:
    """Environment `id`, such as "game:GuessTheNumber-v0-easy"; the other options are passed to gem.make."""

    def __init__(self, *, id: str, **options: Any) -> None:
        self._id = id
        self._chance = Chance()
        try:
            with self._chance.own():
                self._env = gem.make(id, **options)
        except (ValueError, TypeError, KeyError) as error:
            raise ConfigError(f"Gem: id = {id!r} with options {options!r}: {error}") from error

    async def reset(self, seed: int) -> str:
        self._chance.seed(seed)
        with self._chance.own():
            observation, _ = self._env.reset(seed=seed)
        return str(observation)

    async def step(self, action: str) -> Step:
        with self._chance.own():
            observation, reward, terminated, truncated, _ = self._env.step(action)
        return Step(observation=str(observation), reward=float(reward), done=bool(terminated or truncated))

    async def close(self) -> None:
        """Nothing to end: all state lies in this object."""
