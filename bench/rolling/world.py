"""Environments that only take time, and a chat layout that encodes the length of each reply.

Play, Turn       one episode: the length of each observation and reply, and the time of each step
Plays            a function that makes the play of an episode from its task's seed
plain, recorded  plays of normal step times, and of recorded calls
RollingWorld     an environment that performs a play
Lockstep         makes a batch of worlds wait for its slowest at every turn
Lengths          the layout: the last token of a prompt is the length of the reply
"""

import asyncio
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from bench.routing.workload import Script
from hpcrl.envs.base import Step


@dataclass(frozen=True, kw_only=True)
class Turn:
    """One turn of a play."""

    num_shown: int
    num_generated: int
    step_s: float


@dataclass(frozen=True, kw_only=True)
class Play:
    """One episode."""

    turns: Sequence[Turn]
    reset_s: float = 0.0
    reward: float = 1.0

    @property
    def num_generated(self) -> int:
        return sum(turn.num_generated for turn in self.turns)


Plays = Callable[[int, random.Random], Play]
"""Makes the play of an episode: the seed determines its task, the generator its random times."""


def plain(
    *,
    mean_s: float,
    sigma_s: float,
    num_turns: int = 5,
    reset_s: float = 0.0,
    num_shown: int = 200,
    num_generated: int = 100,
) -> Plays:
    """Return plays of equal turns whose steps take normally distributed times of at least 0."""

    def play(_: int, luck: random.Random) -> Play:
        turns = [
            Turn(num_shown=num_shown, num_generated=num_generated, step_s=max(0.0, luck.gauss(mean_s, sigma_s)))
            for _ in range(num_turns)
        ]
        return Play(turns=turns, reset_s=reset_s)

    return play


def recorded(scripts: Sequence[Script]) -> Plays:
    """Return plays of recorded calls; all episodes of a task replay the same recording."""
    plays = [
        Play(
            turns=[
                Turn(num_shown=fresh, num_generated=call.num_new, step_s=call.pause_s)
                for call, fresh in zip(script.calls, script.num_fresh(), strict=True)
            ]
        )
        for script in scripts
    ]
    return lambda seed, _: plays[seed % len(plays)]


@dataclass
class Lockstep:
    """The worlds that play, and those of them that have finished their step."""

    playing: set["RollingWorld"] = field(default_factory=set)
    arrived: set["RollingWorld"] = field(default_factory=set)
    opened: asyncio.Event = field(default_factory=asyncio.Event)

    async def wait(self, world: "RollingWorld") -> None:
        self.arrived.add(world)
        opened = self.opened
        self.look()
        await opened.wait()

    def look(self) -> None:
        """Let all worlds continue once all have arrived."""
        if self.arrived >= self.playing:
            self.arrived.clear()
            self.opened.set()
            self.opened = asyncio.Event()


class RollingWorld:
    """An environment that performs a play."""

    def __init__(
        self,
        plays: Plays,
        luck: random.Random,
        *,
        last_s: float = 0.0,
        lockstep: Lockstep | None = None,
        note_start: Callable[[int, Play], None] = lambda seed, play: None,
    ):
        """Set the play.

        `last_s` is extra time of the last step, such as that of a reward computed in the episode; `note_start` is
        called with the task's seed and the play when it starts.
        """
        self._plays = plays
        self._luck = luck
        self._last_s = last_s
        self._lockstep = lockstep
        self._note_start = note_start
        self._turns: list[Turn] = []
        self._reward = 1.0

    async def reset(self, seed: int) -> str:
        play = self._plays(seed, self._luck)
        self._note_start(seed, play)
        await asyncio.sleep(play.reset_s)
        self._turns, self._reward = list(play.turns), play.reward
        return self._shown()

    async def step(self, _: str) -> Step:
        turn = self._turns.pop(0)
        if self._lockstep is not None:  # not before: an environment that was prepared ahead plays in the next batch
            self._lockstep.playing.add(self)
        if not self._turns:
            await asyncio.sleep(turn.step_s + self._last_s)
            return Step(observation="", reward=self._reward, done=True)
        await asyncio.sleep(turn.step_s)
        if self._lockstep is not None:
            await self._lockstep.wait(self)
        return Step(observation=self._shown())

    async def close(self) -> None:
        if self._lockstep is not None:
            self._lockstep.playing.discard(self)
            self._lockstep.arrived.discard(self)
            self._lockstep.look()

    def _shown(self) -> str:
        return f"{self._turns[0].num_shown} {self._turns[0].num_generated}"


class Lengths:
    """The layout of an observation of two numbers: its own length, and that of the reply."""

    stop_token_ids: Sequence[int] = ()

    def first_turn(self, observation: str) -> list[int]:
        num_shown, num_generated = map(int, observation.split())
        return [*([1] * (num_shown - 1)), num_generated]

    def first_messages(self, messages: Sequence[Mapping[str, Any]], *, tools: Sequence[Any]) -> list[int]:
        return self.first_turn(str(messages[-1]["content"]))

    def next_turn(self, observation: str, *, generated: Sequence[int]) -> list[int]:
        return self.first_turn(observation)

    def decode(self, token_ids: Sequence[int]) -> str:
        return ""
