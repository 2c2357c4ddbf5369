"""How many workers prefill and how many decode, and when one changes over. Pure.

Strain, strain   which role is overloaded, and since when; with hysteresis
to_flip          the worker that changes over once a strain has lasted
split            prefill and decode workers out of so many, by the time that a turn takes of each
to_grow          the role that should have a worker more, beyond a band of +-10 %
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Role = Literal["prefill", "decode"]
OTHER: dict[Role, Role] = {"prefill": "decode", "decode": "prefill"}
ENTER = 4.0
"""A role is strained when its workers have this many times the load of the other's ..."""
LEAVE = 1.5
"""... and remains so until they have less than this."""
LEAST_LOAD = 2.0
"""Requests a worker; below that nobody is strained."""
SUSTAINED_S = 30.0
BAND = 0.10
"""Sizes change when more than this share of the workers is in the wrong role."""


@dataclass(frozen=True)
class Strain:
    """A role that has been overloaded against the other."""

    role: Role
    since: float


def strain(loads: Mapping[Role, float], *, before: Strain | None, now: float) -> Strain | None:
    """The strain now, given the mean load of a worker of each role."""
    role: Role
    for role in ("prefill", "decode"):
        continues = before is not None and before.role == role
        ratio = loads[role] / max(loads[OTHER[role]], 0.1)
        if loads[role] >= LEAST_LOAD and ratio >= (LEAVE if continues else ENTER):
            return before if continues else Strain(role, now)
    return None


def to_flip(strained: Strain | None, workers: Mapping[Role, Mapping[str, float]], *, now: float) -> str | None:
    """The least loaded worker of the other role, if the strain has lasted and it is not the last of its role."""
    if strained is None or now - strained.since < SUSTAINED_S:
        return None
    others = workers[OTHER[strained.role]]
    return min(sorted(others), key=others.__getitem__) if len(others) > 1 else None


def split(num_workers: int, *, prefill_s: float, decode_s: float) -> tuple[int, int]:
    """Prefill and decode workers, at least one of each, so that both are as busy, given what a turn takes of each."""
    assert num_workers >= 2, f"{num_workers} workers cannot be split"
    prefill = round(num_workers * prefill_s / (prefill_s + decode_s))
    prefill = min(max(prefill, 1), num_workers - 1)
    return prefill, num_workers - prefill


def to_grow(workers: tuple[int, int], *, prefill_s: float, decode_s: float) -> Role | None:
    """The role that should have a worker more, of (prefill, decode), by what a turn takes of each; None if in the band.

    Both follow from one signal: the tokens/s that are decoded say how many turns there are, hence how many prompts.
    """
    prefill, _ = split(sum(workers), prefill_s=prefill_s, decode_s=decode_s)
    off = prefill - workers[0]
    if abs(off) < 1 or abs(off) <= BAND * sum(workers):
        return None
    return "prefill" if off > 0 else "decode"
