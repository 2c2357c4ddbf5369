"""Which workers do the other role's work for now: decided on one env host, read by all.

    read_flips   role by worker, as published
    Flips        keeps an env host's workers in their roles; on the leading host it also decides

A worker that prefills can decode and the other way round; only the routers need to know. The file holds the whole
truth and is replaced as one, so every host sees the old roles or the new ones.
"""

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from hpcrl.files import publish
from hpcrl.recipe import Routing
from hpcrl.rollout.sizing import OTHER, SUSTAINED_S, Role, Strain, strain, to_flip, to_grow
from hpcrl.rollout.workers import Worker, mean_load


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
        if self.rules.flip:
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
