"""Replay scripts on a fleet of simulated engines in virtual time, under a policy.

    WorkerFleet      the numbers of workers by GPU, and their slots
    replay           runs scripts to their ends under a policy -> Run
    Run, WorkerResult      the result, and that of one worker
    crowded_time_s   the time of a trajectory from start to end in a batch of others like it

Every policy gets the same scripts and the same engines, which keep KV between turns. hpcrl's router runs as it does in
a campaign: several env workers, endpoint files, cached loads. Its rivals are given exact loads, without delay.
"""

import asyncio
import random
import tempfile
from contextlib import AsyncExitStack
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Literal

from bench.routing.policies import Chosen, Policy, Scripted, Spell, Sticky
from bench.routing.workload import Script
from hpcrl.campaign_dir.endpoints import EndpointReader, EngineEndpoint, announce_endpoint
from hpcrl.config.recipe import RouterConfig
from hpcrl.engines.base import GenerateRequest
from hpcrl.engines.sim.engine import SimEngine, SimSettings
from hpcrl.hardware.cost_model import ModelShape, WorkerSpeed, estimate_speed
from hpcrl.hardware.gpus import GPU_CATALOGUE
from hpcrl.rollout.routing.decision import sample_two
from hpcrl.rollout.routing.router import Router
from hpcrl.testing.virtual_time import run_virtual

PolicyName = Literal["router", "round-robin", "least-loaded", "power of two", "sticky", "sticky by load"]
MODEL_8B = ModelShape(num_layers=36, num_heads=32, num_kv_heads=8, head_dim=128, num_dense=8_190_000_000)
NUM_HOSTS = 4
LONGEST_REPLY = 8192
"""The limit that every turn asks for: no policy knows how long replies will be."""


@dataclass(frozen=True, kw_only=True)
class WorkerFleet:
    """Workers by GPU, one GPU each."""

    workers: dict[str, int]
    shape: ModelShape = MODEL_8B
    max_batch: int = 32
    tokens_per_step: int = 2048
    in_flight: int | None = None
    """Trajectories at once; None: enough to fill all slots while some of them wait for their environments."""

    def num_running(self, scripts: list[Script]) -> int:
        if self.in_flight is not None:
            return self.in_flight
        first = self.pace(next(iter(self.workers)))
        times_s = [crowded_time_s(script, first, batch=self.max_batch) for script in scripts]
        idle = sum(call.pause_s for script in scripts for call in script.calls) / sum(times_s)
        return int(self.max_batch * sum(self.workers.values()) / (1 - idle))

    def num_kept(self, scripts: list[Script]) -> int:
        """Return how many of these trajectories fit into the KV of all workers at their full lengths."""
        room = sum(num * self.pace(gpu).kv_tokens for gpu, num in self.workers.items())
        ends = [script.calls[-1].num_prompt + script.calls[-1].num_new for script in scripts]
        return int(room / (sum(ends) / len(ends)))

    def pace(self, gpu: str) -> WorkerSpeed:
        return estimate_speed(GPU_CATALOGUE[gpu], shape=self.shape)


@dataclass(frozen=True, kw_only=True)
class Run:
    """The result of a replay."""

    makespan_s: float
    mean_s: float
    """The mean time of a trajectory from start to end."""
    prefilled_share: float
    """The share of prompt tokens whose KV had to be computed."""
    last_started_s: float
    """The time when the last trajectory started; the drain follows."""
    workers: list["WorkerResult"]


@dataclass(frozen=True, kw_only=True)
class WorkerResult:
    """The turns and times of one worker."""

    gpu: str
    turns: list[tuple[int, int]]
    """The turns that it was sent, as (number of the script, turn)."""
    before: Spell
    drain: Spell


def replay(scripts: list[Script], fleet: WorkerFleet, *, policy: PolicyName, rules: RouterConfig | None = None) -> Run:
    """Run all scripts, `fleet.num_running` at a time; the next starts when one ends."""
    with tempfile.TemporaryDirectory(prefix="hpcrl-bench-") as directory:
        return run_virtual(_replay(scripts, fleet, policy, rules or RouterConfig(), Path(directory)))


async def _replay(
    scripts: list[Script], fleet: WorkerFleet, policy: PolicyName, rules: RouterConfig, directory: Path
) -> Run:
    loop = asyncio.get_running_loop()
    async with AsyncExitStack() as stack:
        engines: dict[str, Scripted] = {}
        for gpu, num in fleet.workers.items():
            for index in range(num):
                settings = SimSettings(max_batch=fleet.max_batch, tokens_per_step=fleet.tokens_per_step)
                engine = await stack.enter_async_context(SimEngine(fleet.pace(gpu), settings=settings))
                name = f"000-decode-{gpu}-{index}"
                engines[name] = Scripted(engine, gpu=gpu)
                announce_endpoint(
                    directory,
                    EngineEndpoint(role="decode", worker=name, node="n", url=name, token="t", gpu=gpu, num_gpus=1),
                )
        hosts = await _hosts(stack, policy, rules, fleet, engines, directory)
        times_s, last_started_s, spent = await _play(
            scripts, hosts, list(engines.values()), num_running=fleet.num_running(scripts)
        )
        makespan_s = loop.time()
    return Run(
        makespan_s=makespan_s,
        mean_s=sum(times_s) / len(times_s),
        prefilled_share=sum(one.engine.batch.num_prefilled for one in engines.values())
        / sum(one.num_prompt_tokens for one in engines.values()),
        last_started_s=last_started_s,
        workers=[
            WorkerResult(gpu=one.gpu, turns=one.turns, before=before, drain=one.spent() - before)
            for one, before in zip(engines.values(), spent, strict=True)
        ],
    )


async def _hosts(
    stack: AsyncExitStack,
    policy: PolicyName,
    rules: RouterConfig,
    fleet: WorkerFleet,
    engines: dict[str, Scripted],
    directory: Path,
) -> list[Policy]:
    everyone, draw = list(engines.values()), random.Random(1)
    turns = cycle(everyone)

    def least_loaded() -> Scripted:
        return min(everyone, key=lambda one: one.num_ours)

    match policy:
        case "round-robin":
            return [Chosen(lambda: next(turns))]
        case "least-loaded":
            return [Chosen(least_loaded)]
        case "power of two":
            return [Chosen(lambda: min(sample_two(everyone, draw=draw), key=lambda one: one.num_ours))]
        case "sticky":
            return [Sticky(lambda: next(turns))]
        case "sticky by load":
            return [Sticky(least_loaded)]
        case "router":
            routers = [
                Router(
                    EndpointReader(directory, job=0),
                    connect=lambda endpoint: engines[endpoint.worker],
                    seed=host,
                    rules=rules,
                    speed_of=lambda endpoint: fleet.pace(endpoint.gpu or ""),
                )
                for host in range(NUM_HOSTS)
            ]
            return [await stack.enter_async_context(router) for router in routers]


async def _play(
    scripts: list[Script], hosts: list[Policy], engines: list[Scripted], *, num_running: int
) -> tuple[list[float], float, list[Spell]]:
    """Run all scripts, `num_running` at a time; return their times, the last one's start, and the work done by then."""
    loop = asyncio.get_running_loop()
    waiting = iter(enumerate(scripts))
    times_s: list[float] = []
    last_started_s, spent = 0.0, [engine.spent() for engine in engines]
    pool = random.Random(0).choices(range(32000), k=1 << 17)

    async def slot() -> None:
        nonlocal last_started_s, spent
        for number, script in waiting:
            started_at = loop.time()
            if number == len(scripts) - 1:
                last_started_s, spent = started_at, [engine.spent() for engine in engines]
            await _trajectory(script, number, hosts[number % len(hosts)], pool)
            times_s.append(loop.time() - started_at)

    await asyncio.gather(*(slot() for _ in range(min(num_running, len(scripts)))))
    return times_s, last_started_s, spent


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


def crowded_time_s(script: Script, one: WorkerSpeed, *, batch: int) -> float:
    """Return the time of a trajectory from start to end in a batch of others like it."""
    return sum(
        call.pause_s
        + one.prefill_s(fresh - 1, num_known=call.num_prompt - fresh)
        + call.num_new * one.decode_s(batch, num_kv=batch * (call.num_prompt + call.num_new / 2))
        for call, fresh in zip(script.calls, script.num_fresh(), strict=True)
    )
