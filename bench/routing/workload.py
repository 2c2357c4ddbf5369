"""Workloads of agents: recorded calls, or synthetic ones of the same shape, as trajectories to replay.

    Script, Call  a trajectory to replay, and one of its turns
    read_calls    scripts from a CSV file with one row per call: family, session, t_s, input_chars, output_chars
    synthetic     seeded: coding (long prompts that grow, short replies), service (short ones), math (long replies)
    TAILS         the kinds of tails that the lengths of synthetic replies and the times of their tools may have
    repeated      any number of trajectories, in a seeded order

Lengths in characters are four times those in tokens. The gap between two recorded calls is the tool's time plus the
model's; the latter is assumed to be that of its reply at 100 tokens/s.
"""

import csv
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import cycle, groupby, islice, pairwise
from operator import itemgetter
from pathlib import Path

from hpcrl.errors import ConfigError

CHARS_PER_TOKEN = 4
RECORDED_TOKENS_PER_S = 100.0
SEED = 20261
MAX_REPLY = 8000
MAX_PROMPT = 60_000


@dataclass(frozen=True, kw_only=True)
class Call:
    """One turn: the lengths of its prompt and reply, and the time of the tool after it."""

    num_prompt: int
    num_new: int
    pause_s: float


@dataclass(frozen=True, kw_only=True)
class Script:
    """One trajectory to replay."""

    domain: str
    calls: tuple[Call, ...]
    forgets: bool = False
    """True if no KV of earlier turns is kept; for bounds only."""

    def num_fresh(self) -> list[int]:
        """Return the number of tokens of each prompt that are not in the conversation before it."""
        if self.forgets:
            return [call.num_prompt for call in self.calls]
        before = [0, *(call.num_prompt + call.num_new for call in self.calls[:-1])]
        return [max(1, call.num_prompt - known) for call, known in zip(self.calls, before, strict=True)]


CALL_COLUMNS = {"family", "session", "t_s", "input_chars", "output_chars"}


def read_calls(path: Path) -> list[Script]:
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    if missing := CALL_COLUMNS - set(rows[0] if rows else ()):
        raise ConfigError(
            f"{path} has no column {', '.join(sorted(missing))}: give recorded calls of the model, as CSV"
        )
    sessions = groupby(rows, key=itemgetter("family", "session"))
    return [_recorded(family, list(calls)) for (family, _), calls in sessions]


def _recorded(family: str, rows: list[dict[str, str]]) -> Script:
    num_new = [_tokens(row["output_chars"]) for row in rows]
    times = [float(row["t_s"]) for row in rows]
    gaps = [later - earlier for earlier, later in pairwise(times)]
    pauses = [max(0.0, gap - num / RECORDED_TOKENS_PER_S) for gap, num in zip(gaps, num_new, strict=False)]
    calls = [
        Call(num_prompt=_tokens(row["input_chars"]), num_new=num, pause_s=pause)
        for row, num, pause in zip(rows, num_new, [*pauses, 0.0], strict=True)
    ]
    return Script(domain=family, calls=tuple(calls))


def _tokens(chars: str) -> int:
    return max(1, int(chars) // CHARS_PER_TOKEN)


def _draw_pareto(draw: random.Random) -> float:
    return min(200.0, draw.paretovariate(1.2)) / 1.8


def _draw_either(draw: random.Random) -> float:
    return draw.choice((0.3, 0.3, 0.3, 6.0))


TAILS: dict[str, Callable[[random.Random], float]] = {
    "none": lambda draw: 1.0,
    "wide lognormal": lambda draw: draw.lognormvariate(0, 1.5),
    "pareto": _draw_pareto,
    "either short or long": _draw_either,
}
"""Factors of lengths and times, with a median of about 1 each."""


def synthetic(num: int = 96, *, seed: int = SEED, tail: str | None = None) -> list[Script]:
    """Make trajectories of three kinds; `tail` scales each reply and each pause by a draw of that kind."""
    draw = random.Random(seed)
    makers = {"coding": _coding, "service": _service, "math": _math}
    scripts = [Script(domain=name, calls=tuple(makers[name](draw))) for name in islice(cycle(makers), num)]
    return scripts if tail is None else [_scale_script(script, TAILS[tail], draw) for script in scripts]


def _scale_script(script: Script, factor: Callable[[random.Random], float], draw: random.Random) -> Script:
    """Scale replies, pauses, and what tools add to the prompts."""
    calls: list[Call] = []
    for call, fresh in zip(script.calls, script.num_fresh(), strict=True):
        before = calls[-1].num_prompt + calls[-1].num_new if calls else 0
        calls.append(
            Call(
                num_prompt=min(MAX_PROMPT, before + max(1, int(fresh * factor(draw)))),
                num_new=min(MAX_REPLY, max(1, int(call.num_new * factor(draw)))),
                pause_s=call.pause_s * factor(draw),
            )
        )
    return replace(script, calls=tuple(calls))


def _coding(draw: random.Random) -> list[Call]:
    """Make calls whose prompts grow by the output of tools, now and then by a whole file."""
    num_prompt, calls = draw.randint(1200, 3000), []
    for _ in range(draw.randint(6, 30)):
        calls.append(_call(draw, num_prompt, median=90, spread=0.5, pause_s=0.3))
        num_prompt += calls[-1].num_new + int(min(8000, draw.lognormvariate(5.0, 1.0)))
    return calls


def _service(draw: random.Random) -> list[Call]:
    num_prompt, calls = draw.randint(10, 60), []
    for _ in range(draw.randint(3, 40)):
        calls.append(_call(draw, num_prompt, median=20, spread=0.8, pause_s=0.3))
        num_prompt += draw.randint(0, 20)
    return calls


def _math(draw: random.Random) -> list[Call]:
    num_prompt, calls = draw.randint(100, 400), []
    for _ in range(draw.randint(1, 4)):
        calls.append(_call(draw, num_prompt, median=1200, spread=0.6, pause_s=0.1))
        num_prompt += calls[-1].num_new + 50
    return calls


def _call(draw: random.Random, num_prompt: int, *, median: float, spread: float, pause_s: float) -> Call:
    num_new = min(MAX_REPLY, max(1, int(median * draw.lognormvariate(0, spread))))
    return Call(num_prompt=num_prompt, num_new=num_new, pause_s=draw.expovariate(1 / pause_s))


def repeated(scripts: list[Script], num: int, *, seed: int = SEED) -> list[Script]:
    """Return `num` scripts, each equally often, shuffled."""
    many = (scripts * -(-num // len(scripts)))[:num]
    random.Random(seed).shuffle(many)
    return many
