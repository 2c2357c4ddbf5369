"""Role switching: engine workers that serve the other role for now, decided by one env worker and read by all.

    RoleSwitcher             keeps the engine workers in their published roles; on worker 0 it also decides
    read_switched_roles      role by worker, as published
    Overload, find_overload  which Role is overloaded, and since when; with hysteresis
    choose_worker_to_switch  the worker that switches once an overload has lasted
    split_workers            the best split into prefill and decode workers, by the time that a turn takes of each
    choose_role_to_grow      the role that should have one more worker, beyond a band of +-10 %
    OTHER_ROLE               prefill for decode, and the reverse

A worker that prefills can also decode and the other way round; only the routers read which does what. The file has all
switched roles and is replaced as a whole, so every env worker reads the old roles or the new ones.
"""

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import msgspec

from hpcrl.config.recipe import RouterConfig
from hpcrl.rollout.routing.engines import EngineState, mean_load
from hpcrl.system.file_watch import WatchedValue
from hpcrl.system.files import publish_file

Role = Literal["prefill", "decode"]
OTHER_ROLE: dict[Role, Role] = {"prefill": "decode", "decode": "prefill"}
OVERLOAD_RATIO = 4.0
"""A role is overloaded once its workers have this many times the load of the other's ..."""
RECOVERY_RATIO = 1.5
"""... and stays so until they have less than this."""
MIN_LOAD = 2.0
"""The mean number of requests per worker below which no role is overloaded."""
MIN_OVERLOAD_S = 30.0
SIZE_TOLERANCE = 0.10
"""Sizes change when more than this share of the workers is in the wrong role."""


@dataclass(frozen=True)
class Overload:
    """A role that has been overloaded against the other."""

    role: Role
    since: float


def find_overload(loads: Mapping[Role, float], *, before: Overload | None, now: float) -> Overload | None:
    """Return the overload now, given the mean load of a worker of each role."""
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
    """Return the least loaded worker of the other role, if the overload has lasted and it is not the last one there."""
    if overload is None or now - overload.since < MIN_OVERLOAD_S:
        return None
    others = workers[OTHER_ROLE[overload.role]]
    return min(sorted(others), key=others.__getitem__) if len(others) > 1 else None


def split_workers(num_workers: int, *, prefill_s: float, decode_s: float) -> tuple[int, int]:
    """Return numbers of prefill and decode workers, at least 1, that are equally busy given a turn's time on each."""
    assert num_workers >= 2, f"{num_workers} workers cannot be split"
    prefill = round(num_workers * prefill_s / (prefill_s + decode_s))
    prefill = min(max(prefill, 1), num_workers - 1)
    return prefill, num_workers - prefill


def choose_role_to_grow(workers: tuple[int, int], *, prefill_s: float, decode_s: float) -> Role | None:
    """Return which role of (prefill, decode) should have one more worker, by a turn's time on each; None in the band.

    Both loads follow from one signal: the tokens/s decoded give the number of turns, and so that of prompts.
    """
    prefill, _ = split_workers(sum(workers), prefill_s=prefill_s, decode_s=decode_s)
    off = prefill - workers[0]
    if abs(off) < 1 or abs(off) <= SIZE_TOLERANCE * sum(workers):
        return None
    return "prefill" if off > 0 else "decode"


def read_switched_roles(path: Path) -> dict[str, Role]:
    """Read the roles of workers that serve another role than their own; empty if the file is missing."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Role])
    except FileNotFoundError:
        return {}


@dataclass
class RoleSwitcher:
    """The role switches of one campaign, as one env worker reads or decides them."""

    path: Path
    rules: RouterConfig
    is_leader: bool
    """True on the one env worker that decides."""
    overload: Overload | None = None
    changed_at: float = field(default=float("-inf"))

    def __post_init__(self) -> None:
        self.switched_roles = WatchedValue(self.path, lambda: read_switched_roles(self.path))

    async def refresh(self, workers: Iterable[EngineState], *, mean_turn: tuple[float, float], now: float) -> None:
        """Give every worker its published role; on the leader, also publish a switch if one is due."""
        switched_roles = await asyncio.to_thread(self.switched_roles.poll)
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
        """Return the worker that should switch now."""
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
        """Return the role that should have one more worker by the cost model, for turns like the recent ones."""
        num_prompt, num_reply = mean_turn
        prefill, decode = by_role["prefill"][0].speed, by_role["decode"][0].speed
        if prefill is None or decode is None or not num_reply:
            return None
        return choose_role_to_grow(
            (len(by_role["prefill"]), len(by_role["decode"])),
            prefill_s=prefill.prefill_s(num_prompt),
            decode_s=decode.reply_s(num_reply, num_context=num_prompt, batch=32),
        )
