"""Gymnasium's FrozenLake, Taxi and Blackjack as text: one letter is an action, a few characters are an observation.

    FrozenLake     walk over the ice to the goal: L D R U
    Taxi           drive a passenger to their destination: L D R U, P picks up, X sets down
    Blackjack      get closer to 21 than the dealer: H draws a card, S stops
    goal_and_way   a reward function: the environment's rewards, as two parts
    success        a reward function: 1 if the task was solved, else 0
    TransitionTable, count_actions_to_goal  Gymnasium's transitions, and distances in them
    GOAL_SHARE, MAX_LAKE_SIZE  constants

The first valid letter of the model's text is the action (either case); without one the turn is wasted and costs
INVALID_COST. Blackjack earns what Gymnasium pays, -1 to 1. In the others a solved episode earns 1: half for progress
on the way, half for arriving. The way is counted in actions by breadth-first search over Gymnasium's transition
table, and each turn earns the change it made, so that a tiny model learns from the first step.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from functools import cache, lru_cache
from string import ascii_lowercase
from typing import Any, Literal

from gymnasium.envs.toy_text.blackjack import BlackjackEnv
from gymnasium.envs.toy_text.frozen_lake import MAPS, FrozenLakeEnv, generate_random_map
from gymnasium.envs.toy_text.taxi import TaxiEnv

from hpcrl.envs.base import INVALID_COST, Step, quick_reward
from hpcrl.errors import ConfigError
from hpcrl.spool.record import Trajectory

GOAL_SHARE = 0.5
MAX_LAKE_SIZE = 20

TransitionTable = Mapping[int, Mapping[int, Sequence[tuple[float, int, float, bool]]]]
"""Gymnasium's `P`: state -> action -> [(probability, next state, reward, whether the episode ends there)]."""


@quick_reward
def success(trajectory: Trajectory) -> float:
    """Return 1 if the task was solved, else 0: only the turn that arrives earns more than GOAL_SHARE."""
    return float(any(turn.reward > GOAL_SHARE for turn in trajectory.turns))


@quick_reward
def goal_and_way(trajectory: Trajectory) -> dict[str, float]:
    """Return the environment's rewards as a part for arriving and a part for the way (less invalid turns)."""
    goal = GOAL_SHARE * success(trajectory)
    return {"goal": goal, "way": float(sum(turn.reward for turn in trajectory.turns)) - goal}


def count_actions_to_goal(table: TransitionTable) -> dict[int, int]:
    """Return the fewest actions from each state to success, without states that cannot reach it."""
    before: dict[int, set[int]] = {}
    winning = set()
    for state, actions in table.items():
        for outcomes in actions.values():
            for _, after, reward, ends in outcomes:
                if not ends:
                    before.setdefault(after, set()).add(state)
                elif reward > 0:
                    winning.add(state)
    fewest = dict.fromkeys(winning, 1)
    queue = deque(winning)
    while queue:
        state = queue.popleft()
        for earlier in before.get(state, ()):
            if earlier not in fewest:
                fewest[earlier] = fewest[state] + 1
                queue.append(earlier)
    return fewest


class _TableWalk:
    """One episode in a transition table, rewarded by the progress on the way to the goal."""

    def __init__(self, env: Any, *, letters: str, fewest: Mapping[int, int], seed: int) -> None:
        self._env = env
        self._letters = letters
        self._fewest = fewest
        self.state, _ = env.reset(seed=seed)
        self._at_start = fewest[self.state]
        self._progress = 0.0

    def parse_action(self, text: str) -> int | None:
        """Return the action of the first valid letter of `text`."""
        return next((self._letters.index(letter) for letter in text.upper() if letter in self._letters), None)

    def take_action(self, action: int) -> tuple[float, bool]:
        """Take an action; returns the reward and whether the episode has ended."""
        self.state, reward, ended, _, _ = self._env.step(action)
        solved = ended and reward > 0
        progress = 1.0 if solved else self._measure_progress()
        change, self._progress = progress - self._progress, progress
        return (1 - GOAL_SHARE) * change + GOAL_SHARE * solved, ended

    def _measure_progress(self) -> float:
        """Return the progress: 1 at the goal; 0 at the start, farther away, and where the goal is out of reach."""
        if self.state not in self._fewest:
            return 0.0
        return max(0.0, 1 - self._fewest[self.state] / self._at_start)


class FrozenLake:
    """A lake to cross: reach the goal G over the ice F without falling into a hole H.

    map       "4x4", "8x8", rows such as ["SFF", "FHF", "FFG"], or "random": a new lake of `size` x `size` by seed
    start     "fixed": at S; "random": by seed on any ice from which the goal can be reached
    slippery  a move may end to either side instead
    show      "position": observations are the position (b1: column b, row 1); "lake": the first one also shows the
              lake, which a random lake needs
    """

    letters = "LDRU"

    def __init__(
        self,
        *,
        map: str | Sequence[str] = "4x4",
        size: int = 4,
        start: Literal["fixed", "random"] = "fixed",
        slippery: bool = False,
        show: Literal["lake", "position"] = "lake",
    ) -> None:
        if start not in ("fixed", "random"):
            raise ConfigError(f"FrozenLake: start = {start!r}: it must be 'fixed' or 'random'")
        if show not in ("lake", "position"):
            raise ConfigError(f"FrozenLake: show = {show!r}: it must be 'lake' or 'position'")
        if not 2 <= size <= MAX_LAKE_SIZE:
            raise ConfigError(f"FrozenLake: size = {size}: a random lake must be 2 to {MAX_LAKE_SIZE} cells wide")
        self._rows = None if map == "random" else _check_rows(map)
        self._size = size
        self._start = start
        self._slippery = slippery
        self._show = show

    async def reset(self, seed: int) -> str:
        self._lake = self._rows or tuple(generate_random_map(size=self._size, seed=seed))
        fewest = _count_lake_actions(self._lake)
        rows = _mark_all_starts(self._lake, fewest) if self._start == "random" else list(self._lake)
        env = FrozenLakeEnv(desc=rows, is_slippery=self._slippery)
        self._walk = _TableWalk(env, letters=self.letters, fewest=fewest, seed=seed)
        seen = "/".join(self._lake).replace("S", "F") + " " if self._show == "lake" else ""
        return seen + self._describe_place()

    async def step(self, action: str) -> Step:
        chosen = self._walk.parse_action(action)
        if chosen is None:
            return Step(observation=f"?{self._describe_place()}", reward=-INVALID_COST)
        reward, ended = self._walk.take_action(chosen)
        return Step(observation=self._describe_place(), reward=reward, done=ended)

    async def close(self) -> None:
        """Do nothing: all state is in this object."""

    def _describe_place(self) -> str:
        row, column = divmod(self._walk.state, len(self._lake[0]))
        return f"{ascii_lowercase[column]}{row + 1}"


def _check_rows(lake: str | Sequence[str]) -> tuple[str, ...]:
    """Return the rows of a lake; raises ConfigError unless it has one width, a start, and a goal within reach."""
    if isinstance(lake, str) and lake not in MAPS:
        names = ", ".join(sorted(MAPS))
        raise ConfigError(f"FrozenLake: map = {lake!r}: it must be one of {names}, random, or a list of rows")
    rows = tuple(MAPS[lake] if isinstance(lake, str) else lake)
    cells = "".join(rows)
    if len({len(row) for row in rows}) != 1 or len(rows) > MAX_LAKE_SIZE or not 1 <= len(rows[0]) <= MAX_LAKE_SIZE:
        raise ConfigError(
            f"FrozenLake: map = {rows!r}: rows must have one length, and at most {MAX_LAKE_SIZE} rows and columns"
        )
    if set(cells) - set("SFHG") or cells.count("S") != 1:
        raise ConfigError(f"FrozenLake: map = {rows!r}: use the letters F H G, and S (the start) exactly once")
    if cells.index("S") not in _count_lake_actions(rows):
        raise ConfigError(f"FrozenLake: map = {rows!r}: no G can be reached from S: open a way")
    return rows


@lru_cache(maxsize=256)
def _count_lake_actions(rows: tuple[str, ...]) -> dict[int, int]:
    """Return the fewest actions to the goal on ice that is not slippery; cached, as a group shares its lake."""
    return count_actions_to_goal(FrozenLakeEnv(desc=list(rows), is_slippery=False).P)


def _mark_all_starts(rows: Sequence[str], fewest: Mapping[int, int]) -> list[str]:
    """Mark all ice from which the goal can be reached as a start; Gymnasium draws one of them by seed."""
    width = len(rows[0])
    cells = enumerate("".join(rows).replace("S", "F"))
    marked = "".join("S" if at in fewest else cell for at, cell in cells)
    return [marked[at : at + width] for at in range(0, len(marked), width)]


class Taxi:
    """A taxi in Gymnasium's 5 x 5 city: pick the passenger up, and set them down at their destination.

    An observation such as `c2 R>B LRU` means: the taxi is at column c, row 2; the passenger waits at R and wants to
    go to B; the ways left, right and up are open. `*>B` means that the passenger is in the taxi.
    """

    letters = "DURLPX"
    """The letters in Gymnasium's order of actions."""
    landmarks = "RGYB*"

    async def reset(self, seed: int) -> str:
        self._env = TaxiEnv()
        self._walk = _TableWalk(self._env, letters=self.letters, fewest=_count_taxi_actions(), seed=seed)
        return self._describe_state()

    async def step(self, action: str) -> Step:
        chosen = self._walk.parse_action(action)
        if chosen is None:
            return Step(observation=f"?{self._describe_state()}", reward=-INVALID_COST)
        reward, ended = self._walk.take_action(chosen)
        return Step(observation=self._describe_state(), reward=reward, done=ended)

    async def close(self) -> None:
        """Do nothing: all state is in this object."""

    def _describe_state(self) -> str:
        state = self._walk.state
        row, column, passenger, destination = self._env.decode(state)
        moves = self._env.P[state]
        open_ways = "".join(letter for letter in "LDRU" if moves[self.letters.index(letter)][0][1] != state)
        place = f"{'abcde'[column]}{row + 1}"
        return f"{place} {self.landmarks[passenger]}>{self.landmarks[destination]} {open_ways}"


@cache
def _count_taxi_actions() -> dict[int, int]:
    return count_actions_to_goal(TaxiEnv().P)


class Blackjack:
    """A game of cards up to 21, against a dealer that draws up to 17.

    An observation such as `14 vs 10` is the sum of the player's cards and the dealer's open card; `17* vs 3` has an ace
    that still counts 11.

    natural    pay 1.5 for a win with the first two cards
    """

    letters = "SH"
    """The letters in Gymnasium's order of actions."""

    def __init__(self, *, natural: bool = False) -> None:
        self._natural = natural

    async def reset(self, seed: int) -> str:
        self._env = BlackjackEnv(natural=self._natural)
        seen, _ = self._env.reset(seed=seed)
        self._seen = _describe_hand(seen)
        return self._seen

    async def step(self, action: str) -> Step:
        chosen = next((self.letters.index(letter) for letter in action.upper() if letter in self.letters), None)
        if chosen is None:
            return Step(observation=f"?{self._seen}", reward=-INVALID_COST)
        seen, reward, ended, _, _ = self._env.step(chosen)
        self._seen = _describe_hand(seen)
        return Step(observation=self._seen, reward=float(reward), done=bool(ended))

    async def close(self) -> None:
        """Do nothing: all state is in this object."""


def _describe_hand(seen: tuple[int, int, int]) -> str:
    mine, dealers, usable_ace = seen
    return f"{mine}{'*' * bool(usable_ace)} vs {dealers}"
