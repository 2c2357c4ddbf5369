"""Simulated engines whose replies have the lengths of a script, and simple policies that choose among them.

Scripted   an engine whose replies have the scripted lengths, with counters of its work
Spell      the work of an engine in some time
Policy     a protocol for whatever serves turns
Chosen     a policy that chooses the next engine by a function
Sticky     a policy that keeps every trajectory on the engine that it was first given
"""

from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from typing import Protocol

import msgspec

from hpcrl.engines.base import Completion, CompletionChunk, GenerateRequest, KvHandle, LoadFigures
from hpcrl.engines.sim.engine import SimEngine


@dataclass(frozen=True, kw_only=True)
class Spell:
    """The work of a worker in some time."""

    num_generated: int
    standing_s: float
    prompts_s: float
    replies_s: float

    @property
    def busy_s(self) -> float:
        return self.standing_s + self.prompts_s + self.replies_s

    def __sub__(self, earlier: "Spell") -> "Spell":
        return Spell(
            num_generated=self.num_generated - earlier.num_generated,
            standing_s=self.standing_s - earlier.standing_s,
            prompts_s=self.prompts_s - earlier.prompts_s,
            replies_s=self.replies_s - earlier.replies_s,
        )


class Policy(Protocol):
    async def generate(self, request: GenerateRequest) -> Completion: ...


class Scripted:
    """A simulated engine whose replies have the scripted lengths."""

    def __init__(self, engine: SimEngine, *, gpu: str) -> None:
        self.engine = engine
        self.gpu = gpu
        self.num_ours = 0
        self.num_prompt_tokens = 0
        self.turns: list[tuple[int, int]] = []

    def spent(self) -> Spell:
        """Return its work so far."""
        spent = self.engine.batch.spent
        return Spell(
            num_generated=self.engine.batch.num_generated,
            standing_s=spent.base_s,
            prompts_s=spent.prompts_s,
            replies_s=spent.replies_s,
        )

    async def generate(self, request: GenerateRequest) -> Completion:
        _, number, turn, num_new = request.request_id.split("/")
        self.turns.append((int(number), int(turn)))
        self.num_ours += 1
        self.num_prompt_tokens += len(request.token_ids)
        try:
            return await self.engine.generate(msgspec.structs.replace(request, max_new_tokens=int(num_new)))
        finally:
            self.num_ours -= 1

    def stream(self, request: GenerateRequest) -> AsyncGenerator[CompletionChunk, None]:
        return self.engine.stream(request)

    async def prefill(self, request: GenerateRequest) -> KvHandle:
        return await self.engine.prefill(request)

    async def abort(self, request_id: str) -> None:
        await self.engine.abort(request_id)

    async def load_figures(self) -> LoadFigures:
        return await self.engine.load_figures()


class Chosen:
    """A policy that chooses the next engine by a function."""

    def __init__(self, choose: Callable[[], Scripted]) -> None:
        self._choose = choose

    async def generate(self, request: GenerateRequest) -> Completion:
        return await self._choose().generate(request)


class Sticky:
    """A policy that gives each trajectory to an engine that a function chooses, and keeps it there."""

    def __init__(self, choose: Callable[[], Scripted]) -> None:
        self._choose = choose
        self._homes: dict[str, Scripted] = {}

    async def generate(self, request: GenerateRequest) -> Completion:
        if request.trajectory not in self._homes:
            self._homes[request.trajectory] = self._choose()
        return await self._homes[request.trajectory].generate(request)
