"""TextArena's games, seen by one player; a named function plays the others.

    TextArena         one of its games, by id
    OpponentFunction  the type of an opponent
    random_legal      an opponent: any of the moves that the game offers, by the task's seed
    find_moves        the moves that the game offers
    MAX_OPPONENT_MOVES  a limit

The reward is TextArena's final reward of the player, -1 to 1, also if an invalid move ends the game.
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
"""Return an opponent's move for an observation."""
_OFFERED_MOVES = re.compile(r"Available Moves?:(.*?)(?:\n|$)", re.IGNORECASE)
_MOVE = re.compile(r"\[[^\[\]]+\]")
MAX_OPPONENT_MOVES = 1000
"""The most moves of opponents in a row; a game in which the player gets no turn by then fails."""


def find_moves(observation: str) -> list[str]:
    """Return the moves that the game last offered, with their brackets."""
    offered = _OFFERED_MOVES.findall(observation)
    return _MOVE.findall(offered[-1]) if offered else []


def random_legal(observation: str, draw: random.Random) -> str:
    """Return any move that the game offers."""
    return draw.choice(find_moves(observation) or ["[0]"])


class TextArena:
    """The game `game` for player `seat` of `num_players`.

    game         an id such as "TicTacToe-v0" or "GuessTheNumber-v0"
    opponent     a function that plays the other seats, as "package.module:name"; random_legal plays offered moves
    bracketed    put the model's text into [brackets] if it has none, as a small model may not learn them
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
            raise ConfigError(f"TextArena: seat = {seat}: it must be 0 to num_players - 1 = {num_players - 1}")
        self._game = game
        self._num_players = num_players
        self._seat = seat
        self._opponent: OpponentFunction = load_code(opponent, what="TextArena: opponent")
        self._bracketed = bracketed
        self._options = options
        self._random = IsolatedRandom()
        self._make_game()

    async def reset(self, seed: int) -> str | Step:
        self._random.seed(seed)
        self._draw = random.Random(seed)
        with self._random.activate():
            self._env = self._make_game()
            self._env.reset(num_players=self._num_players, seed=seed)
            seen, done = self._play_others()
        if done:
            return Step(observation=f"the game ended before seat {self._seat} had a turn", done=True)
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
        """Do nothing: all state is in this object."""

    def _make_game(self) -> Any:
        try:
            return textarena.make(self._game, **self._options)
        except (ValueError, TypeError) as error:
            raise ConfigError(f"TextArena: game = {self._game!r} with options {self._options!r}: {error}") from error

    def _play_others(self) -> tuple[str, bool]:
        """Play the other seats; returns the player's observation, and whether the game is over."""
        for _ in range(MAX_OPPONENT_MOVES):
            player, seen = self._env.get_observation()
            if player == self._seat:
                return str(seen), False
            done, _ = self._env.step(self._opponent(str(seen), self._draw))
            if done:
                return "", True
        raise RuntimeError(f"{self._game}: {MAX_OPPONENT_MOVES} moves without a turn of seat {self._seat}")

    def _new_text(self, seen: str) -> str:
        """Return the part of an observation that was not shown before; TextArena repeats the whole game."""
        shown, self._shown = self._shown, seen
        return seen.removeprefix(shown).strip() or seen.strip()
