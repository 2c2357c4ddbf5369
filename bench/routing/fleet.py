"""A fleet of simulated engines in virtual time, the policies that share it out, and what no policy can beat.

    Fleet           how many workers of which GPU, with how many slots
    replay          run scripts to their ends under a policy -> Run
    lower_bound_s   max(work / capacity per pool, the longest trajectory)
    settled_bound_s the same where every trajectory stays with one kind of GPU
    crowded_s       the longest trajectory in full batches

Every policy sees the same scripts and the same engines, which keep KV between turns. hpcrl's router runs as it does in
a campaign: several env hosts, endpoint files, cached loads. Its rivals are given exact loads, without delay.
"""

import asyncio
import random
import tempfile
from collections.abc import AsyncGenerator, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Literal, Protocol

import msgspec

from bench.routing.workload import Script
from hpcrl.cost import ModelShape, Pace, pace
from hpcrl.endpoints import Endpoint, announce
from hpcrl.engines.base import Completion, GenerateRequest, KvHandle, LoadFigures, Part
from hpcrl.engines.sim import SimEngine, SimSettings
from hpcrl.hardware import GPUS
from hpcrl.recipe import Routing
from hpcrl.rollout.router import Router
from hpcrl.rollout.routing import two_of
from hpcrl.simulate.clock import run_virtual

PolicyName = Literal["router", "round-robin", "least-loaded", "power of two"]
MODEL_8B = ModelShape(num_layers=36, num_heads=32, num_kv_heads=8, head_dim=128, num_dense=8_190_000_000)
NUM_HOSTS = 4
LONGEST_REPLY = 8192
"""What every turn asks for at most: nobody is told how long replies will be."""


@dataclass(frozen=True, kw_only=True)
class Fleet:
    """Workers by GPU, one GPU each."""

    workers: dict[str, int]
    shape: ModelShape = MODEL_8B
    max_batch: int = 32
    in_flight: int | None = None
    """Trajectories; None: as many as fill all slots while some of them wait for their environments."""

    def num_running(self, scripts: list[Script]) -> int:
        if self.in_flight is not None:
            return self.in_flight
        first = self.pace(next(iter(self.workers)))
        lives = [_crowded_s(script, first, batch=self.max_batch) for script in scripts]
        idle = sum(call.pause_s for script in scripts for call in script.calls) / sum(lives)
        return int(self.max_batch * sum(self.workers.values()) / (1 - idle))

    def num_kept(self, scripts: list[Script]) -> int:
        """How many of these trajectories the KV of all workers holds at their full lengths."""
        room = sum(num * self.pace(gpu).kv_tokens for gpu, num in self.workers.items())
        ends = [script.calls[-1].num_prompt + script.calls[-1].num_new for script in scripts]
        return int(room / (sum(ends) / len(ends)))

    def pace(self, gpu: str) -> Pace:
        return pace(GPUS[gpu], shape=self.shape)


@dataclass(frozen=True, kw_only=True)
class Run:
    """What came of a replay."""

    makespan_s: float
    mean_s: float
    """A trajectory from its begin to its end."""
    prefilled_share: float
    """Of the prompt tokens, those whose KV had to be computed."""
    busy: dict[str, float]
    """Share of the time in which a worker had something to do, by GPU."""


class Policy(Protocol):
    async def generate(self, request: GenerateRequest) -> Completion: ...


class Scripted:
    """A simulated engine whose replies are as long as the script says."""

    def __init__(self, engine: SimEngine) -> None:
        self.engine = engine
        self.num_ours = 0
        self.num_prompt_tokens = 0

    async def generate(self, request: GenerateRequest) -> Completion:
        num_new = int(request.request_id.rpartition("/")[2])
        self.num_ours += 1
        self.num_prompt_tokens += len(request.token_ids)
        try:
            return await self.engine.generate(msgspec.structs.replace(request, max_new_tokens=num_new))
        finally:
            self.num_ours -= 1

    def stream(self, request: GenerateRequest) -> AsyncGenerator[Part, None]:
        return self.engine.stream(request)

    async def prefill(self, request: GenerateRequest) -> KvHandle:
        return await self.engine.prefill(request)

    async def abort(self, request_id: str) -> None:
        await self.engine.abort(request_id)

    async def load_figures(self) -> LoadFigures:
        return await self.engine.load_figures()


class Chosen:
    """A policy that only says which engine is next."""

    def __init__(self, choose: Callable[[], Scripted]) -> None:
        self._choose = choose

    async def generate(self, request: GenerateRequest) -> Completion:
        return await self._choose().generate(request)


def replay(scripts: list[Script], fleet: Fleet, *, policy: PolicyName, rules: Routing | None = None) -> Run:
    """Run all scripts; `fleet.num_running` at a time, each begun as another ends."""
    with tempfile.TemporaryDirectory(prefix="hpcrl-bench-") as directory:
        return run_virtual(_replay(scripts, fleet, policy, rules or Routing(), Path(directory)))


async def _replay(scripts: list[Script], fleet: Fleet, policy: PolicyName, rules: Routing, directory: Path) -> Run:
    loop = asyncio.get_running_loop()
    async with AsyncExitStack() as stack:
        engines: dict[str, Scripted] = {}
        for gpu, num in fleet.workers.items():
            for index in range(num):
                settings = SimSettings(max_batch=fleet.max_batch)
                engine = await stack.enter_async_context(SimEngine(fleet.pace(gpu), settings=settings))
                name = f"000-decode-{gpu}-{index}"
                engines[name] = Scripted(engine)
                announce(
                    directory,
                    Endpoint(role="decode", worker=name, node="n", url=name, token="t", gpu=gpu, num_gpus=1),
                )
        hosts = await _hosts(stack, policy, rules, fleet, engines, directory)
        lives = await _play(scripts, hosts, num_running=fleet.num_running(scripts))
        makespan_s = loop.time()
    return Run(
        makespan_s=makespan_s,
        mean_s=sum(lives) / len(lives),
        prefilled_share=sum(one.engine.batch.num_prefilled for one in engines.values())
        / sum(one.num_prompt_tokens for one in engines.values()),
        busy={
            gpu: sum(one.engine.busy_s for name, one in engines.items() if f"-{gpu}-" in name) / num / makespan_s
            for gpu, num in fleet.workers.items()
        },
    )


async def _hosts(
    stack: AsyncExitStack,
    policy: PolicyName,
    rules: Routing,
    fleet: Fleet,
    engines: dict[str, Scripted],
    directory: Path,
) -> list[Policy]:
    everyone, draw = list(engines.values()), random.Random(1)
    match policy:
        case "round-robin":
            turns = cycle(everyone)
            return [Chosen(lambda: next(turns))]
        case "least-loaded":
            return [Chosen(lambda: min(everyone, key=lambda one: one.num_ours))]
        case "power of two":
            return [Chosen(lambda: min(two_of(everyone, draw=draw), key=lambda one: one.num_ours))]
        case "router":
            routers = [
                Router(
                    directory,
                    connect=lambda endpoint: engines[endpoint.worker],
                    seed=host,
                    rules=rules,
                    pace_of=lambda endpoint: fleet.pace(endpoint.gpu or ""),
                )
                for host in range(NUM_HOSTS)
            ]
            return [await stack.enter_async_context(router) for router in routers]


async def _play(scripts: list[Script], hosts: list[Policy], *, num_running: int) -> list[float]:
    """All scripts, so many at a time; returns how long each took."""
    loop = asyncio.get_running_loop()
    waiting = iter(enumerate(scripts))
    lives = []
    pool = random.Random(0).choices(range(32000), k=1 << 17)

    async def slot() -> None:
        for number, script in waiting:
            began = loop.time()
            await _trajectory(script, number, hosts[number % len(hosts)], pool)
            lives.append(loop.time() - began)

    await asyncio.gather(*(slot() for _ in range(min(num_running, len(scripts)))))
    return lives


async def _trajectory(script: Script, number: int, policy: Policy, pool: list[int]) -> None:
    history: list[int] = []
    name = f"{script.domain}/{number}"
    draw = random.Random(number)
    for turn, call in enumerate(script.calls):
        missing = max(1, call.num_prompt - len(history))
        start = draw.randrange(len(pool) - missing)
        history = history[: call.num_prompt - missing] + pool[start : start + missing]
        request = GenerateRequest(
            request_id=f"{name}/{turn}/{call.num_new}",
            token_ids=history,
            max_new_tokens=LONGEST_REPLY,
            trajectory=name,
            domain=script.domain,
        )
        completion = await policy.generate(request)
        history = history + completion.token_ids
        if call.pause_s:
            await asyncio.sleep(call.pause_s)
    if isinstance(policy, Router):
        policy.forget(name)


# What no policy can beat


def lower_bound_s(scripts: list[Script], fleet: Fleet) -> float:
    """Every turn where it is cheapest, all slots full, no KV computed twice, nothing ever waiting for anything."""
    turns = [turn for script in scripts for turn in _turns_s(script, fleet)]
    return max(_shared_out_s(turns, fleet), max(_alone_s(script, fleet) for script in scripts))


def settled_bound_s(scripts: list[Script], fleet: Fleet) -> float:
    """The bound of schedules that compute no KV twice and hand none over: a trajectory stays with one kind of GPU.

    Its turns are then one piece of work. Fractions of trajectories are still shared out, and KV has room without end,
    so no such schedule is faster; one that moves a trajectory, and computes its prompt anew, may be.
    """
    lives = [
        [sum(turn[number] for turn in _turns_s(script, fleet)) for number in range(len(fleet.workers))]
        for script in scripts
    ]
    return max(_shared_out_s(lives, fleet), max(_alone_s(script, fleet) for script in scripts))


def _shared_out_s(pieces: list[list[float]], fleet: Fleet) -> float:
    """Pieces of work, fractions of them too, shared out between two pools so that both end at once."""
    sizes = list(fleet.workers.values())
    if len(sizes) == 1:
        return sum(piece[0] for piece in pieces) / sizes[0]
    pieces = sorted(pieces, key=lambda piece: piece[0] / piece[1])
    first, second = 0.0, sum(piece[1] for piece in pieces) / sizes[1]
    for here, there in pieces:
        if first + here / sizes[0] >= second - there / sizes[1]:
            share = (second - first) / (here / sizes[0] + there / sizes[1])
            return first + share * here / sizes[0]
        first, second = first + here / sizes[0], second - there / sizes[1]
    return first


def _turns_s(script: Script, fleet: Fleet) -> list[list[float]]:
    """What each turn takes on each kind of GPU."""
    paces = [fleet.pace(gpu) for gpu in fleet.workers]
    return [
        [_turn_s(one, call.num_prompt, fresh, call.num_new, fleet.max_batch) for one in paces]
        for call, fresh in zip(script.calls, script.num_fresh(), strict=True)
    ]


def _turn_s(one: Pace, num_prompt: int, fresh: int, num_new: int, batch: int) -> float:
    return one.prefill_s(fresh - 1, num_known=num_prompt - fresh) + one.reply_s(
        num_new, num_context=num_prompt, batch=batch
    )


def _alone_s(script: Script, fleet: Fleet) -> float:
    """A trajectory that has the better worker for itself."""
    return min(_life_s(script, fleet.pace(gpu), batch=1) for gpu in fleet.workers)


def crowded_s(scripts: list[Script], fleet: Fleet) -> float:
    """What the longest trajectory takes from the first second on, on the best worker, in the full batches that
    `lower_bound_s` reckons the others with: no schedule has both."""
    paces = [fleet.pace(gpu) for gpu in fleet.workers]
    return max(min(_crowded_s(script, one, batch=fleet.max_batch) for one in paces) for script in scripts)


def longest_first(scripts: list[Script], fleet: Fleet) -> list[Script]:
    """In the order in which one would begin them who knew how long they will be."""
    one = fleet.pace(next(iter(fleet.workers)))
    return sorted(scripts, key=lambda script: _crowded_s(script, one, batch=fleet.max_batch), reverse=True)


def _crowded_s(script: Script, one: Pace, *, batch: int) -> float:
    """From begin to end in a batch of others like it."""
    return sum(
        call.pause_s
        + one.prefill_s(fresh - 1, num_known=call.num_prompt - fresh)
        + call.num_new * one.decode_s(batch, num_kv=batch * (call.num_prompt + call.num_new / 2))
        for call, fresh in zip(script.calls, script.num_fresh(), strict=True)
    )


def _life_s(script: Script, one: Pace, *, batch: int) -> float:
    """From begin to end, among `batch` trajectories, if it never waits for its turn."""
    step_s = one.standing_s(batch) * (1 - 1 / batch)
    return sum(
        call.pause_s + _turn_s(one, call.num_prompt, fresh, call.num_new, batch) + step_s * call.num_new
        for call, fresh in zip(script.calls, script.num_fresh(), strict=True)
    )
