"""Which workers do the other role's work for now: decided on one env host, read by all.

    read_flips   role by worker, as published
    Flips        keeps an env host's workers in their roles; on the leading host it also decides

A worker that prefills can decode and the other way round; only the routers need to know. The file holds the whole
truth and is replaced as one, so every host sees the old roles or the new ones.

How many workers prefill and how many decode, and when one changes over. Pure.

Strain, strain   which role is overloaded, and since when; with hysteresis
to_flip          the worker that changes over once a strain has lasted
split            prefill and decode workers out of so many, by the time that a turn takes of each
to_grow          the role that should have a worker more, beyond a band of +-10 %
"""

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import msgspec

from hpcrl.config.recipe import Routing
from hpcrl.rollout.routing.engines import Worker, mean_load
from hpcrl.system.files import publish

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


def read_flips(path: Path) -> dict[str, Role]:
    """The roles of workers that do not do their own; none where nothing was published."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Role])
    except FileNotFoundError:
        return {}


@dataclass
class Flips:
    """The flips of one campaign, as one host sees or makes them."""

    path: Path
    rules: Routing
    leads: bool
    """Only one host may."""
    strained: Strain | None = None
    changed_at: float = field(default=float("-inf"))

    async def refresh(self, workers: Iterable[Worker], *, usual_turn: tuple[float, float], now: float) -> None:
        """Put every worker in the role that was published; on the leading host, publish a change if one is due."""
        flipped = await asyncio.to_thread(read_flips, self.path)
        known = list(workers)
        for worker in known:
            worker.role = flipped.get(worker.name, worker.endpoint.role)
        if self.leads and (name := self.due(known, usual_turn=usual_turn, now=now)) is not None:
            worker = next(worker for worker in known if worker.name == name)
            worker.role = OTHER["prefill" if worker.role == "prefill" else "decode"]
            self.changed_at, self.strained = now, None
            away = {worker.name: worker.role for worker in known if worker.role != worker.endpoint.role}
            await asyncio.to_thread(publish, self.path, msgspec.json.encode(away), mode=0o600)

    def due(self, workers: list[Worker], *, usual_turn: tuple[float, float], now: float) -> str | None:
        """The worker that should change over now."""
        by_role: dict[Role, list[Worker]] = {"prefill": [], "decode": []}
        for worker in workers:
            if worker.answers:
                by_role["prefill" if worker.role == "prefill" else "decode"].append(worker)
        if not all(by_role.values()) or now - self.changed_at < SUSTAINED_S:
            return None
        self.strained = self._strain(by_role, usual_turn=usual_turn, now=now)
        loads = {role: {worker.name: worker.load for worker in found} for role, found in by_role.items()}
        return to_flip(self.strained, loads, now=now)

    def _strain(
        self, by_role: dict[Role, list[Worker]], *, usual_turn: tuple[float, float], now: float
    ) -> Strain | None:
        if self.rules.switch_roles:
            loads = {role: mean_load(found) for role, found in by_role.items()}
            if (found := strain(loads, before=self.strained, now=now)) is not None:
                return found
        role = self._short_role(by_role, usual_turn) if self.rules.sizing == "auto" else None
        if role is None:
            return None
        continues = self.strained is not None and self.strained.role == role
        return self.strained if continues else Strain(role, now)

    def _short_role(self, by_role: dict[Role, list[Worker]], usual_turn: tuple[float, float]) -> Role | None:
        """The role that the cost model would give a worker more, for turns like those seen."""
        num_prompt, num_reply = usual_turn
        prefill, decode = by_role["prefill"][0].pace, by_role["decode"][0].pace
        if prefill is None or decode is None or not num_reply:
            return None
        return to_grow(
            (len(by_role["prefill"]), len(by_role["decode"])),
            prefill_s=prefill.prefill_s(num_prompt),
            decode_s=decode.reply_s(num_reply, num_context=num_prompt, batch=32),
        )
