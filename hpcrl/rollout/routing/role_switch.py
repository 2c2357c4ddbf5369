"""Which workers do the other role's work for now: decided on one env host, read by all.

    read_switched_roles  role by worker, as published
    RoleSwitcher         keeps an env host's workers in their roles; on the leading host it also decides

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

from hpcrl.config.recipe import RouterConfig
from hpcrl.rollout.routing.engines import EngineState, mean_load
from hpcrl.system.files import publish_file

Role = Literal["prefill", "decode"]
OTHER_ROLE: dict[Role, Role] = {"prefill": "decode", "decode": "prefill"}
OVERLOAD_RATIO = 4.0
"""A role is strained when its workers have this many times the load of the other's ..."""
RECOVERY_RATIO = 1.5
"""... and remains so until they have less than this."""
MIN_LOAD = 2.0
"""Requests a worker; below that nobody is strained."""
MIN_OVERLOAD_S = 30.0
SIZE_TOLERANCE = 0.10
"""Sizes change when more than this share of the workers is in the wrong role."""


@dataclass(frozen=True)
class Overload:
    """A role that has been overloaded against the other."""

    role: Role
    since: float


def find_overload(loads: Mapping[Role, float], *, before: Overload | None, now: float) -> Overload | None:
    """The strain now, given the mean load of a worker of each role."""
    role: Role
    for role in ("prefill", "decode"):
        continues = before is not None and before.role == role
        ratio = loads[role] / max(loads[OTHER_ROLE[role]], 0.1)
        if loads[role] >= MIN_LOAD and ratio >= (RECOVERY_RATIO if continues else OVERLOAD_RATIO):
            return before if continues else Overload(role, now)
    return None


def choose_worker_to_switch(
    overload: Overload | None, workers: Mapping[Role, Mapping[str, float]], *, now: float
) -> str | None:
    """The least loaded worker of the other role, if the strain has lasted and it is not the last of its role."""
    if overload is None or now - overload.since < MIN_OVERLOAD_S:
        return None
    others = workers[OTHER_ROLE[overload.role]]
    return min(sorted(others), key=others.__getitem__) if len(others) > 1 else None


def split_workers(num_workers: int, *, prefill_s: float, decode_s: float) -> tuple[int, int]:
    """Prefill and decode workers, at least one of each, so that both are as busy, given what a turn takes of each."""
    assert num_workers >= 2, f"{num_workers} workers cannot be split"
    prefill = round(num_workers * prefill_s / (prefill_s + decode_s))
    prefill = min(max(prefill, 1), num_workers - 1)
    return prefill, num_workers - prefill


def choose_role_to_grow(workers: tuple[int, int], *, prefill_s: float, decode_s: float) -> Role | None:
    """The role that should have a worker more, of (prefill, decode), by what a turn takes of each; None if in the band.

    Both follow from one signal: the tokens/s that are decoded say how many turns there are, hence how many prompts.
    """
    prefill, _ = split_workers(sum(workers), prefill_s=prefill_s, decode_s=decode_s)
    off = prefill - workers[0]
    if abs(off) < 1 or abs(off) <= SIZE_TOLERANCE * sum(workers):
        return None
    return "prefill" if off > 0 else "decode"


def read_switched_roles(path: Path) -> dict[str, Role]:
    """The roles of workers that do not do their own; none where nothing was published."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Role])
    except FileNotFoundError:
        return {}


@dataclass
class RoleSwitcher:
    """The flips of one campaign, as one host sees or makes them."""

    path: Path
    rules: RouterConfig
    is_leader: bool
    """Only one host may."""
    overload: Overload | None = None
    changed_at: float = field(default=float("-inf"))

    async def refresh(self, workers: Iterable[EngineState], *, mean_turn: tuple[float, float], now: float) -> None:
        """Put every worker in the role that was published; on the leading host, publish a change if one is due."""
        switched_roles = await asyncio.to_thread(read_switched_roles, self.path)
        known = list(workers)
        for worker in known:
            worker.role = switched_roles.get(worker.name, worker.endpoint.role)
        if self.is_leader and (name := self.choose_switch(known, mean_turn=mean_turn, now=now)) is not None:
            worker = next(worker for worker in known if worker.name == name)
            worker.role = OTHER_ROLE["prefill" if worker.role == "prefill" else "decode"]
            self.changed_at, self.overload = now, None
            roles_to_publish = {worker.name: worker.role for worker in known if worker.role != worker.endpoint.role}
            await asyncio.to_thread(publish_file, self.path, msgspec.json.encode(roles_to_publish), mode=0o600)

    def choose_switch(self, workers: list[EngineState], *, mean_turn: tuple[float, float], now: float) -> str | None:
        """The worker that should change over now."""
        by_role: dict[Role, list[EngineState]] = {"prefill": [], "decode": []}
        for worker in workers:
            if worker.is_available:
                by_role["prefill" if worker.role == "prefill" else "decode"].append(worker)
        if not all(by_role.values()) or now - self.changed_at < MIN_OVERLOAD_S:
            return None
        self.overload = self._find_overload(by_role, mean_turn=mean_turn, now=now)
        loads = {role: {worker.name: worker.load for worker in found} for role, found in by_role.items()}
        return choose_worker_to_switch(self.overload, loads, now=now)

    def _find_overload(
        self, by_role: dict[Role, list[EngineState]], *, mean_turn: tuple[float, float], now: float
    ) -> Overload | None:
        if self.rules.switch_roles:
            loads = {role: mean_load(found) for role, found in by_role.items()}
            if (found := find_overload(loads, before=self.overload, now=now)) is not None:
                return found
        role = self._choose_role_to_grow(by_role, mean_turn) if self.rules.sizing == "auto" else None
        if role is None:
            return None
        continues = self.overload is not None and self.overload.role == role
        return self.overload if continues else Overload(role, now)

    def _choose_role_to_grow(
        self, by_role: dict[Role, list[EngineState]], mean_turn: tuple[float, float]
    ) -> Role | None:
        """The role that the cost model would give a worker more, for turns like those seen."""
        num_prompt, num_reply = mean_turn
        prefill, decode = by_role["prefill"][0].speed, by_role["decode"][0].speed
        if prefill is None or decode is None or not num_reply:
            return None
        return choose_role_to_grow(
            (len(by_role["prefill"]), len(by_role["decode"])),
            prefill_s=prefill.prefill_s(num_prompt),
            decode_s=decode.reply_s(num_reply, num_context=num_prompt, batch=32),
        )
