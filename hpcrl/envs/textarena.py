"""TextArena's games, seen by one player; who plays the others is a function of a name.

    TextArena        one of its games, by id
    random_legal     an opponent: any of the moves that the game offers, by the task's seed

A game is worth what TextArena gives the player in the end, -1 to 1; an invalid move that ends it is worth that too.
"""

import random
import re
from collections.abc import Callable
from typing import Any

import textarena

from hpcrl.config.user_code import load_code
from hpcrl.envs.base import Step
from hpcrl.envs.random_state import IsolatedRandom
from hpcrl.errors import ConfigError

OpponentFunction = Callable[[str, random.Random], str]
"""What another player says to what it sees."""
_OFFERED_MOVES = re.compile(r"Available Moves?:(.*?)(?:\n|$)", re.IGNORECASE)
_MOVE = re.compile(r"\[[^\[\]]+\]")
MAX_OPPONENT_MOVES = 1000
"""Of opponents in a row, before a game that never comes back to the player is given up."""


def find_moves(observation: str) -> list[str]:
    """The moves that the game last offered, with their brackets."""
    offered = _OFFERED_MOVES.findall(observation)
    return _MOVE.findall(offered[-1]) if offered else []


def random_legal(observation: str, draw: random.Random) -> str:
    """Any move that the game offers."""
    return draw.choice(find_moves(observation) or ["[0]"])


class TextArena:
    """Play game `game` as player `seat` of `num_players`.

    game         an id such as "TicTacToe-v0" or "GuessTheNumber-v0"
    opponent     who plays the other seats, as "package.module:name"; those here follow what the game offers
    bracketed    put what the model says into [brackets] where it has none, as a small model may not learn them
    options      passed to textarena.make
    """

    def __init__(
        self,
        *,
        game: str,
        num_players: int = 1,
        seat: int = 0,
        opponent: str = "hpcrl.envs.textarena:random_legal",
        bracketed: bool = False,
        **options: Any,
    ) -> None:
        if not 0 <= seat < num_players:
            raise ConfigError(f"TextArena: seat = {seat}: it is 0 to num_players - 1 = {num_players - 1}")
        self._game = game
        self._num_players = num_players
        self._seat = seat
        self._opponent: OpponentFunction = load_code(opponent, what="TextArena: opponent")
        self._bracketed = bracketed
        self._options = options
        self._random = IsolatedRandom()
        self._make_game()

    async def reset(self, seed: int) -> str:
        self._random.seed(seed)
        self._draw = random.Random(seed)
        with self._random.activate():
            self._env = self._make_game()
            self._env.reset(num_players=self._num_players, seed=seed)
            seen, done = self._play_others()
        if done:
            raise RuntimeError(f"{self._game} ended before the player of seat {self._seat} had a turn")
        self._shown = ""
        return self._new_text(seen)

    async def step(self, action: str) -> Step:
        move = f"[{action.strip()}]" if self._bracketed and not _MOVE.search(action) else action
        with self._random.activate():
            done, _ = self._env.step(move)
            seen = ""
            if not done:
                seen, done = self._play_others()
            if not done:
                return Step(observation=self._new_text(seen))
            rewards, _ = self._env.close()
        reward = float((rewards or {}).get(self._seat, 0.0))
        return Step(observation=f"the game is over: {reward:g}", reward=reward, done=True)

    async def close(self) -> None:
        """Nothing to end: all state lies in this object."""

    def _make_game(self) -> Any:
        try:
            return textarena.make(self._game, **self._options)
        except (ValueError, TypeError) as error:
            raise ConfigError(f"TextArena: game = {self._game!r} with options {self._options!r}: {error}") from error

    def _play_others(self) -> tuple[str, bool]:
        """Let the others play; returns what we see, and whether the game is over."""
        for _ in range(MAX_OPPONENT_MOVES):
            player, seen = self._env.get_observation()
            if player == self._seat:
                return str(seen), False
            done, _ = self._env.step(self._opponent(str(seen), self._draw))
            if done:
                return "", True
        raise RuntimeError(f"{self._game}: {MAX_OPPONENT_MOVES} moves without a turn of seat {self._seat}")

    def _new_text(self, seen: str) -> str:
        """What was not shown yet, of an observation that repeats the whole game."""
        shown, self._shown = self._shown, seen
        return seen.removeprefix(shown).strip() or seen.strip()
