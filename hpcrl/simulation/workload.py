"""The episodes that a simulation plays: drawn from distributions of the recipe, or recorded ones.

    EpisodeScript, TurnScript    an episode, and one of its turns
    EpisodeSource                draws the episode of a task
    LatencySettings              the times of environments, which no recipe has
    DrawnEpisodes                by distributions of the recipe
    RecordedEpisodes             recorded ones, in a seeded order
    fit_episodes                 cut them where the recipe would end them
    read_traces                  those of a CSV file with a row for each call of the model
    TRACE_COLUMNS                its columns, with the names that they may have

Lengths in characters count as a quarter in tokens. The gap between two recorded calls is the environment's time and
the model's; the latter counts as RECORDED_TOKENS_PER_S, unless the file has `env_s`.
"""

import csv
import random
from collections import Counter
from collections.abc import Sequence
from itertools import accumulate, pairwise
from math import exp
from pathlib import Path
from typing import NamedTuple, Protocol

from hpcrl.config.recipe import ConfigTable, Recipe
from hpcrl.errors import ConfigError
from hpcrl.system.csv_tables import guess_table_fault, refuse_bad_table
from hpcrl.system.files import find_input
from hpcrl.system.terminal import print_note

CHARS_PER_TOKEN = 4
RECORDED_TOKENS_PER_S = 100.0
TRACE_COLUMNS: dict[str, tuple[str, ...]] = {
    "session": ("session", "episode"),
    "t_s": ("t_s",),
    "prompt": ("prompt_tokens", "input_chars"),
    "reply": ("reply_tokens", "output_chars"),
}
_LARGEST = 1e9
_LATEST = 1e11
"""Times may count from 1970, in seconds."""


class TurnScript(NamedTuple):
    """One turn."""

    num_fresh: int
    """Tokens that the observation adds to the conversation."""
    num_reply: int
    env_s: float
    """The time of the environment after it."""


class EpisodeScript(NamedTuple):
    """One episode."""

    reset_s: float
    turns: tuple[TurnScript, ...]


MAX_CUT_SHARE = 0.1
"""The share of drawn episodes that may end early without a word."""


class EpisodeSource(Protocol):
    """The source of episodes."""

    def draw(self, domain: str, *, seed: str) -> EpisodeScript:
        """Return an episode of a domain; the same for the same seed."""


class LatencySettings(ConfigTable, frozen=True, kw_only=True):
    """The distributions that a recipe does not have; all are lognormal."""

    env_s: float = 1.0
    """The mean time of a step of the environment."""
    env_sigma: float = 1.0
    """The sigma of its logarithm."""
    reset_s: float = 1.0
    """The mean time to create and reset an environment."""
    length_sigma: float = 0.8
    """The sigma of the logarithm of lengths."""


class DrawnEpisodes:
    """Episodes by the recipe's usual lengths, with a number of turns up to `max_turns`, each as likely."""

    def __init__(self, recipe: Recipe, latencies: LatencySettings, *, seed: int = 0) -> None:
        self._seed = seed
        self._recipe = recipe
        self._latencies = latencies
        self._num_drawn, self._num_cut = 0, 0

    def describe_cuts(self) -> list[str]:
        """Return a line for the episodes so far that ended early, if they are many."""
        if self._num_cut <= MAX_CUT_SHARE * self._num_drawn:
            return []
        return [
            f"{self._num_cut / self._num_drawn:.0%} of the episodes end early, since they fill the context of "
            f"{self._recipe.max_context} tokens: set usual_prompt_tokens and usual_reply_tokens of the domains, or "
            "--traces"
        ]

    def draw(self, domain: str, *, seed: str) -> EpisodeScript:
        """Draw one; it ends early where the conversation fills the context."""
        draw, settings = random.Random(f"{self._seed} {seed}"), self._latencies
        table = self._recipe.domains[domain]
        limit = table.max_new_tokens or self._recipe.rollout.max_new_tokens
        usual, room = table.usual_reply_tokens or limit, self._recipe.max_context or _LARGEST
        turns: list[TurnScript] = []
        self._num_drawn += 1
        for _ in range(draw.randint(1, table.max_turns)):
            fresh = max(1, round(_draw_lognormal(draw, table.usual_prompt_tokens, settings.length_sigma)))
            if not turns:  # a longer first prompt is never played
                fresh = min(fresh, max(1, int(room) - 1))
            reply = min(limit, max(1, round(_draw_lognormal(draw, usual, settings.length_sigma))))
            room -= fresh + reply
            if room < 0 and turns:
                self._num_cut += 1
                break
            turns.append(TurnScript(fresh, reply, _draw_lognormal(draw, settings.env_s, settings.env_sigma)))
        return EpisodeScript(_draw_lognormal(draw, settings.reset_s, settings.env_sigma), tuple(turns))


class RecordedEpisodes:
    """Recorded episodes, any of them for a task of any domain."""

    def __init__(
        self, episodes: Sequence[EpisodeScript], seed: int = 0, *, weights: Sequence[float] | None = None
    ) -> None:
        """Draw each as often as any other, or by `weights`."""
        self._seed = seed
        self._episodes = episodes
        self._sums = list(accumulate(weights if weights is not None else [1.0] * len(episodes)))

    def draw(self, domain: str, *, seed: str) -> EpisodeScript:
        """Choose one."""
        draw = random.Random(f"{self._seed} {domain} {seed}")
        return draw.choices(self._episodes, cum_weights=self._sums)[0]


def _draw_lognormal(draw: random.Random, mean: float, sigma: float) -> float:
    """Draw from the lognormal distribution with this mean."""
    return mean * exp(draw.gauss(-sigma * sigma / 2, sigma)) if mean else 0.0


def read_traces(path: Path, *, skips_invalid: bool = False) -> list[EpisodeScript]:
    """Read recorded episodes; refuse a file that lacks columns or rows, or has values that cannot be.

    With `skips_invalid` calls with such values are left out.
    """
    try:
        with find_input(path).open(newline="", encoding="utf-8-sig") as file, refuse_bad_table(path):
            reader = csv.DictReader(file)
            names = _match_columns(path, reader.fieldnames or ())
            rows = [(number, row) for number, row in enumerate(reader, 2)]
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror}): give a CSV file of recorded episodes") from error
    if not rows:
        raise ConfigError(f"{path} has no rows below its header: give a row for each call of the model")
    rows = _drop_repeated(path, rows)
    calls = []
    for number, row in rows:
        try:
            calls.append(_read_call(path, number, row, names))
        except ConfigError as error:
            if not skips_invalid:
                raise ConfigError(f"{error}, or leave such calls out with --skip-invalid") from None
    if left_out := len(rows) - len(calls):
        print_note(f"{path}: {left_out} of {len(rows)} calls have values that cannot be, and are left out")
    if not calls:
        raise ConfigError(f"{path} has no call of the model whose values can be used")
    sessions: dict[str, list[_RecordedCall]] = {}
    for call in calls:  # those of sessions that ran at the same time may alternate
        sessions.setdefault(call.session, []).append(call)
    return [_make_script(sorted(session, key=lambda call: call.t_s)) for session in sessions.values()]


def fit_episodes(scripts: Sequence[EpisodeScript], recipe: Recipe) -> list[EpisodeScript]:
    """Cut episodes where the recipe would end them: at its longest reply, and where its context is full."""
    longest = max([recipe.rollout.max_new_tokens, *(one.max_new_tokens or 0 for one in recipe.domains.values())])
    context = recipe.max_context or _LARGEST
    fitted = [_fit_script(script, longest=longest, context=context) for script in scripts]
    playable = [script for script in fitted if script.turns]
    if not playable:
        raise ConfigError(
            f"no episode starts with a prompt of less than {context:g} tokens, which is all the model sees"
        )
    if num_cut := sum(one != script for one, script in zip(fitted, scripts, strict=True)):
        print_note(
            f"{num_cut} of {len(scripts)} episodes are longer than the recipe allows (replies of {longest} tokens, "
            f"{context:g} in all): they are cut there, or left out if their first prompt is"
        )
    return playable


def _fit_script(script: EpisodeScript, *, longest: int, context: float) -> EpisodeScript:
    turns, room = [], context
    for turn in script.turns:
        room -= turn.num_fresh
        if room <= 0:
            break
        reply = min(turn.num_reply, longest, int(room))
        turns.append(turn._replace(num_reply=reply))
        room -= reply
    return script._replace(turns=tuple(turns))


class _RecordedCall(NamedTuple):
    """A call of the model."""

    session: str
    t_s: float
    num_prompt: int
    num_reply: int
    env_s: float | None


def _drop_repeated(path: Path, rows: list[tuple[int, dict[str, str]]]) -> list[tuple[int, dict[str, str]]]:
    """Drop rows that repeat an earlier one in all columns: a session makes one call at a time."""
    first_lines: dict[str, int] = {}
    for number, row in rows:
        first_lines.setdefault(str(row), number)
    kept = [(number, row) for number, row in rows if first_lines[str(row)] == number]
    if num_repeated := len(rows) - len(kept):
        line, row = next((number, row) for number, row in rows if first_lines[str(row)] != number)
        print_note(
            f"{path}: {num_repeated} of {len(rows)} rows repeat an earlier one (line {line} is line "
            f"{first_lines[str(row)]}), and count once"
        )
    return kept


def _match_columns(path: Path, given: Sequence[str]) -> dict[str, str]:
    found = {key: next((name for name in names if name in given), None) for key, names in TRACE_COLUMNS.items()}
    if twice := [name for name, num in Counter(given).items() if num > 1]:
        raise ConfigError(f"{path} has two columns {twice[0]!r}: give each name once")
    if missing := [" or ".join(TRACE_COLUMNS[key]) for key, name in found.items() if name is None]:
        if fault := guess_table_fault(given):
            raise ConfigError(f"{path} {fault}")
        raise ConfigError(
            f"{path} has no column {', '.join(missing)}: it has {', '.join(given) or 'none'}; a file of traces has a "
            f"row for each call of the model, with {', '.join(' or '.join(names) for names in TRACE_COLUMNS.values())}"
        )
    return {key: name for key, name in found.items() if name is not None}


def _read_call(path: Path, line: int, row: dict[str, str], names: dict[str, str]) -> _RecordedCall:
    def read(name: str, *, largest: float = _LARGEST) -> float:
        try:
            value = float(row[name])
        except (TypeError, ValueError):
            value = -1.0
        if not 0 <= value < largest:
            number = "a number, 0 or more" if value < 0 else f"a number below {largest:g}"
            raise ConfigError(f"{path}, line {line}: {name} = {row[name]!r}: give {number}")
        return value

    if None in row:
        raise ConfigError(f"{path}, line {line}: it has more values than the header has columns: write 1.5, not 1,5")

    def read_tokens(name: str) -> int:
        return max(1, int(read(name)) // (CHARS_PER_TOKEN if name.endswith("_chars") else 1))

    if not row[names["session"]]:
        raise ConfigError(f"{path}, line {line}: {names['session']} is empty: name the session of the call")
    return _RecordedCall(
        session=f"{row.get('family') or row.get('domain') or ''} {row[names['session']]}",
        t_s=read(names["t_s"], largest=_LATEST),
        num_prompt=read_tokens(names["prompt"]),
        num_reply=read_tokens(names["reply"]),
        env_s=read("env_s") if row.get("env_s") else None,
    )


def _make_script(calls: Sequence[_RecordedCall]) -> EpisodeScript:
    """Make the episode of a session; calls that overlap have no time in between."""
    pauses = []
    for call, later in pairwise(calls):
        gap = later.t_s - call.t_s - call.num_reply / RECORDED_TOKENS_PER_S
        pauses.append(max(0.0, gap) if call.env_s is None else call.env_s)
    pauses.append(calls[-1].env_s or 0.0)
    turns, known = [], 0
    for call, pause in zip(calls, pauses, strict=True):
        turns.append(TurnScript(max(1, call.num_prompt - known), call.num_reply, pause))
        known = max(known, call.num_prompt) + call.num_reply
    return EpisodeScript(0.0, tuple(turns))
