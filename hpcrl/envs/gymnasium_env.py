"""The environments of Gymnasium by their ids, those of other packages included, as text.

    GymnasiumEnv    one environment

An observation is what the environment draws as text (the render mode "ansi"), else its value. The action is the last
one that the model's text has: the name or the number of a discrete action, a list of numbers, or the text itself.
Without one the turn is wasted and costs INVALID_COST.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from hpcrl.envs.base import INVALID_COST, Step
from hpcrl.envs.random_state import IsolatedRandom
from hpcrl.errors import ConfigError


class GymnasiumEnv:
    """The environment `id`, such as "CliffWalking-v1" or "my_package:Maze-v0"; gymnasium.make gets all other options.

    actions      names of discrete actions, in their order, such as ["up", "right", "down", "left"]; else their numbers
    instruction  the first line of the first observation, in place of the one that lists the actions
    """

    def __init__(self, *, id: str, actions: Sequence[str] = (), instruction: str | None = None, **options: Any) -> None:
        self._random = IsolatedRandom()
        try:
            with self._random.activate():
                self._env = gymnasium.make(id, **options)
                if "render_mode" not in options and "ansi" in self._env.metadata.get("render_modes", ()):
                    self._env.close()
                    self._env = gymnasium.make(id, render_mode="ansi", **options)
        except (gymnasium.error.Error, ImportError, ValueError, TypeError) as error:
            raise ConfigError(f"GymnasiumEnv: id = {id!r} with options {options!r}: {error}") from error
        self._draws = self._env.render_mode == "ansi"
        self._actions = _ActionReader(self._env.action_space, names=actions)
        self._instruction = self._actions.describe() if instruction is None else instruction

    async def reset(self, seed: int) -> str:
        self._random.seed(seed)
        with self._random.activate():
            seen, _ = self._env.reset(seed=seed)
            self._seen = self._describe(seen)
        return f"{self._instruction}\n{self._seen}" if self._instruction else self._seen

    async def step(self, action: str) -> Step:
        chosen = self._actions.read(action)
        if chosen is None:
            return Step(observation=f"{self._actions.describe()}\n{self._seen}", reward=-INVALID_COST)
        with self._random.activate():
            seen, reward, terminated, truncated, _ = self._env.step(chosen)
            self._seen = self._describe(seen)
        return Step(observation=self._seen, reward=float(reward), done=bool(terminated or truncated))

    async def close(self) -> None:
        self._env.close()

    def _describe(self, seen: Any) -> str:
        drawn = self._env.render() if self._draws else None
        return drawn.rstrip() if isinstance(drawn, str) else _describe_value(seen)


class _ActionReader:
    """A reader of the actions of a space in texts."""

    def __init__(self, space: Any, *, names: Sequence[str]) -> None:
        self._space = space
        self._numbers: Mapping[str, int] = {}
        match space:
            case spaces.Discrete():
                start, num = int(space.start), int(space.n)
                if names and (len(names) != num or len({name.lower() for name in names}) != num):
                    raise ConfigError(f"GymnasiumEnv: actions = {list(names)!r}: give {num} different names")
                names = names or [str(start + index) for index in range(num)]
                self._numbers = {name.lower(): start + index for index, name in enumerate(names)}
                words = "|".join(map(re.escape, sorted(self._numbers, key=len, reverse=True)))
                self._pattern = re.compile(rf"(?<![\w-])(?:{words})(?!\w|\.\d)", re.IGNORECASE)
                self._form = f"one of {', '.join(names)}"
            case spaces.MultiDiscrete() | spaces.MultiBinary() | spaces.Box() if len(space.shape) == 1:
                self._pattern = re.compile(r"\[[^\[\]]*\]")
                example = np.zeros(space.shape, space.dtype)
                if isinstance(space, spaces.Box):
                    example = example.clip(space.low, space.high)
                self._form = f"a list of {space.shape[0]} numbers, such as {example.tolist()}"
            case spaces.Text():
                self._form = f"a text of {space.min_length} to {space.max_length} characters"
            case _:
                raise ConfigError(f"GymnasiumEnv: actions of the space {space} cannot be read from a text")
        if names and not self._numbers:
            raise ConfigError(f"GymnasiumEnv: actions = {list(names)!r}: the actions of {space} have no names")

    def describe(self) -> str:
        """Return the sentence that describes an action."""
        return f"An action is {self._form}."

    def read(self, text: str) -> Any:
        """Return the last action in the text, or None."""
        if isinstance(self._space, spaces.Text):
            return text if self._space.contains(text) else None
        found = self._pattern.findall(text)
        if not found:
            return None
        if self._numbers:
            return self._numbers[found[-1].lower()]
        try:
            action = np.array(json.loads(found[-1]), dtype=self._space.dtype)
        except (ValueError, TypeError, OverflowError):
            return None
        return action if self._space.contains(action) else None


def _describe_value(value: Any) -> str:
    """Return a value of an observation space as JSON, or as Python shows it."""

    def convert(one: Any) -> Any:
        if isinstance(one, np.ndarray | np.generic):
            return one.tolist()
        raise TypeError

    try:
        return value if isinstance(value, str) else json.dumps(value, default=convert)
    except (TypeError, ValueError):
        return str(value)
