"""Run a campaign of one real env worker, with simulated engines and a trainer that only takes time.

    RollingSetting   the parameters of a run
    run              runs it in virtual time -> Outcome
    run_all          runs several, one process for each, the same number at once as there are cores

The env worker is that of a real campaign: admission, task queue, pools, episodes, groups, ledger, journal, router. Its
spool is in memory; its trainer chooses groups as the real one does.
"""

import asyncio
import contextlib
import multiprocessing
import os
import random
import tempfile
import time
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from itertools import count, pairwise
from pathlib import Path
from statistics import mean
from typing import Any, NoReturn, TypeVar

import msgspec

from bench.rolling.world import Lengths, Lockstep, Plays, RollingWorld
from bench.routing.fleet import MODEL_8B
from hpcrl.campaign_dir.endpoints import EndpointReader, EngineEndpoint, announce_endpoint
from hpcrl.campaign_dir.event_log import EventLog
from hpcrl.campaign_dir.paths import CampaignDir, make_worker_name
from hpcrl.config.recipe import DomainConfig, RolloutMode
from hpcrl.config.site import load_site
from hpcrl.engines.base import Completion, CompletionChunk, GenerateRequest, KvHandle, LoadFigures
from hpcrl.engines.sim.engine import SimEngine, SimSettings
from hpcrl.envs.base import Env
from hpcrl.hardware.cost_model import estimate_speed
from hpcrl.hardware.gpus import GPU_CATALOGUE
from hpcrl.learn.group_choice import GroupChoice, choose_groups
from hpcrl.plan.plan import make_plan
from hpcrl.roles.context import WorkerContext
from hpcrl.roles.env import EnvWorker, make_env_worker
from hpcrl.rollout.flow_control import HoldWatch, SettledCount, SettledWriter
from hpcrl.rollout.rollout_spool import RolloutSpool
from hpcrl.rollout.routing.router import Router
from hpcrl.spool.record import Trajectory
from hpcrl.spool.status import EpisodeStatus
from hpcrl.spool.writer import BatchLimits
from hpcrl.system.files import publish_json
from hpcrl.testing.memory import MemorySpool, MemorySpoolReader, MemorySpoolWriter
from hpcrl.testing.recipes import load_recipe
from hpcrl.testing.virtual_time import run_virtual
from hpcrl.weights import versions

T = TypeVar("T")

LOOK_S = 0.1
ENV_WORKER = "env-0"
"""The interval at which the trainer looks for a batch."""
CONTEXT = 131072
LONGEST_REPLY = 8192
RECIPE = """
name = "bench"
description = "The campaign of bench.rollout."

[model.tiny]

[domains.world]
env = "bench.rolling.world:RollingWorld"
max_turns = 10000
step_timeout_s = 100000.0
episode_timeout_s = 100000.0

[rollout]
group_size = {group_size}
redundancy = {redundancy}
{late}
spare_groups = {spare_groups}
mode = "{mode}"
max_lag = {max_lag}
max_running = {max_running}
max_new_tokens = {longest_reply}

[train]
num_steps = {num_steps}
groups_per_step = {groups_per_step}
learning_rate = 1e-3

[job]
walltime_min = 30
stall_timeout_min = 10_000
"""


@dataclass(frozen=True, kw_only=True)
class RollingSetting:
    """The parameters of a run."""

    plays: Plays
    num_steps: int
    mode: RolloutMode = "async"
    lockstep: bool = False
    """True if every turn of a batch waits for the slowest of its episodes."""
    groups_per_step: int = 32
    group_size: int = 8
    redundancy: int = 0
    late_after_s: float | None = None
    spare_groups: int = 0
    max_running: int = 256
    max_lag: int = 1
    train_s: float = 0.0
    reward_s: float = 0.0
    """The time to score each trajectory on separate workers, which are always sufficient."""
    reward_in_place_s: float = 0.0
    """The time to score each trajectory in the place of its episode."""
    num_gpus: int = 4
    max_batch: int = 64
    """The places of each engine; together they have one for every running episode."""
    broken: Callable[[int], bool] = lambda _: False
    """Returns True for an environment that hangs in reset, by the order in which they are made."""


@dataclass
class Outcome:
    """The result of a run."""

    step_ends: list[float] = field(default_factory=list)
    """The time at which each training step ended."""
    endings: Counter[EpisodeStatus] = field(default_factory=Counter)
    num_generated: int = 0
    """Tokens of groups in which nothing runs any more."""
    num_kept: int = 0
    """Those of them that were trained on, or may still be."""
    cpu_s: float = 0.0
    """The CPU time of this process for the run."""

    @property
    def step_s(self) -> float:
        """The mean time of a step, without the first, in which the campaign starts up."""
        return mean(self.steps_s)

    @property
    def steps_s(self) -> list[float]:
        return [end - before for before, end in pairwise(self.step_ends)]

    @property
    def thrown_share(self) -> float:
        return 1 - self.num_kept / self.num_generated


def run(setting: RollingSetting) -> Outcome:
    """Run one setting in virtual time."""
    started_at = time.process_time()
    outcome = run_virtual(_steps(setting))
    outcome.cpu_s = time.process_time() - started_at
    return outcome


def run_all(settings: Sequence[RollingSetting]) -> list[Outcome]:
    """Run several side by side; in virtual time that slows none of them down."""
    return run_side_by_side([partial(run, setting) for setting in settings])


def run_side_by_side(calls: Sequence[Callable[[], T]]) -> list[T]:
    """Run calls in processes, one a core at once; the processes may start others."""
    global _calls
    _calls = calls
    context = multiprocessing.get_context("fork")  # forked: plays are functions in functions
    with ProcessPoolExecutor(os.cpu_count(), mp_context=context) as pool:
        return list(pool.map(_run_number, range(len(calls))))


_calls: Sequence[Callable[[], Any]] = ()


def _run_number(number: int) -> Any:
    return _calls[number]()


async def _steps(setting: RollingSetting) -> Outcome:
    async with opened(setting) as stage:
        trainer = RollingTrainer(setting, stage)
        training = asyncio.create_task(trainer.run())
        await asyncio.wait({training, stage.living}, return_when=asyncio.FIRST_COMPLETED)
        await training if training.done() else stage.living.result()
        outcome = trainer.outcome
        outcome.endings = stage.host.accounts.groups.endings.copy()
        under_way = {episode.rpartition("/")[0] for episode in stage.host.runner.running}
        ended = {name: num for name, num in stage.num_generated.items() if name.rpartition("/")[0] not in under_way}
        outcome.num_generated = sum(ended.values())
        outcome.num_kept = sum(ended.get(name, 0) for name in stage.sealed() - trainer.thrown)
    return outcome


@dataclass
class RollingStage:
    """A running env worker with its spool and engines."""

    host: EnvWorker
    campaign: CampaignDir
    spool: MemorySpool
    engines: list[SimEngine]
    num_generated: Counter[str]
    """Tokens by episode."""
    living: "asyncio.Task[None]"

    def sealed(self) -> set[str]:
        """Return the episodes whose trajectories are in the spool."""
        return {packed.id for packed in self.spool.durable}


@contextlib.asynccontextmanager
async def opened(setting: RollingSetting) -> AsyncIterator[RollingStage]:
    """Run an env worker and its engines until the end of the block."""
    async with contextlib.AsyncExitStack() as stack:
        root = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="hpcrl-bench-")))
        context = make_context(root, setting)
        num_tokens: Counter[str] = Counter()
        engines, router = await open_engines(stack, setting, context, num_tokens=num_tokens)
        spool = MemorySpool()
        host = make_env_worker(
            context, router=router, layout=Lengths(), rollouts=_in(spool, context), open_env=_opener(setting)
        )
        living = asyncio.create_task(host.run_until_drained(), name="host")
        yield RollingStage(
            host=host, campaign=context.campaign, spool=spool, engines=engines, num_generated=num_tokens, living=living
        )
        context.end_requested.set()
        await living


async def open_engines(
    stack: contextlib.AsyncExitStack, setting: RollingSetting, context: WorkerContext, *, num_tokens: Counter[str]
) -> tuple[list[SimEngine], Router]:
    """Start the engines of a setting, and the router to them; tokens are counted by episode."""
    engines = [await stack.enter_async_context(_engine(setting)) for _ in range(setting.num_gpus)]
    served = {f"000-decode-{index}": CountingEngine(engine, num_tokens) for index, engine in enumerate(engines)}
    for name in served:
        endpoint = EngineEndpoint(role="decode", worker=name, node="n", url=name, token="t", gpu="h800", num_gpus=1)
        announce_endpoint(context.campaign.endpoints, endpoint)
    one = estimate_speed(GPU_CATALOGUE["h800"], shape=MODEL_8B)
    endpoints = EndpointReader(context.campaign.endpoints, job=0)
    router = Router(endpoints, connect=lambda at: served[at.worker], seed=0, speed_of=lambda _: one)
    return engines, await stack.enter_async_context(router)


def _engine(setting: RollingSetting) -> SimEngine:
    settings = SimSettings(max_batch=setting.max_batch, context_length=CONTEXT)
    return SimEngine(estimate_speed(GPU_CATALOGUE["h800"], shape=MODEL_8B), settings=settings)


def _in(spool: MemorySpool, context: WorkerContext) -> RolloutSpool:
    clock = asyncio.get_running_loop().time
    writer = MemorySpoolWriter(spool, batching=BatchLimits(max_age_s=LOOK_S), clock=clock)
    return RolloutSpool(writer, count_sealed=lambda: {ENV_WORKER: len(spool.durable)}, emit=context.events.emit)


def _opener(setting: RollingSetting) -> Callable[[str, DomainConfig], Awaitable[Env]]:
    numbers, lockstep = count(), Lockstep() if setting.lockstep else None

    async def open_env(_: str, __: DomainConfig) -> Env:
        number = next(numbers)
        if setting.broken(number):
            return Hanging()
        return RollingWorld(setting.plays, random.Random(number), last_s=setting.reward_in_place_s, lockstep=lockstep)

    return open_env


class Hanging:
    """An environment whose reset never ends."""

    async def reset(self, seed: int) -> str:
        await asyncio.sleep(1e9)
        raise AssertionError("its time is limited")

    async def step(self, action: str) -> NoReturn:
        raise AssertionError("it was never reset")

    async def close(self) -> None: ...


class CountingEngine:
    """A simulated engine that generates the number of tokens that the prompt asks for, and counts them."""

    def __init__(self, engine: SimEngine, num_generated: Counter[str]) -> None:
        self._engine = engine
        self._num_generated = num_generated

    async def generate(self, request: GenerateRequest) -> Completion:
        asked = msgspec.structs.replace(request, max_new_tokens=request.token_ids[-1])
        completion = await self._engine.generate(asked)
        self._num_generated[request.trajectory] += len(completion.token_ids)
        return completion

    def stream(self, request: GenerateRequest) -> AsyncGenerator[CompletionChunk, None]:
        return self._engine.stream(request)

    async def prefill(self, request: GenerateRequest) -> KvHandle:
        return await self._engine.prefill(request)

    async def abort(self, request_id: str) -> None:
        await self._engine.abort(request_id)

    async def load_figures(self) -> LoadFigures:
        return await self._engine.load_figures()


class RollingTrainer:
    """A trainer that consumes batches like the real one, and only takes time."""

    def __init__(self, setting: RollingSetting, stage: RollingStage) -> None:
        self.outcome = Outcome()
        self.thrown: set[str] = set()
        """Trajectories that came too late."""
        self._setting = setting
        self._stage = stage
        self._reader = MemorySpoolReader(stage.spool)
        self._scoring: list[tuple[float, Trajectory]] = []
        self._waiting: list[Trajectory] = []
        self._consumed: set[str] = set()
        self._version = 0
        self._settled_writer = SettledWriter(stage.campaign.settled)

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        while len(self.outcome.step_ends) < self._setting.num_steps:
            choice = self._choose(now=loop.time())
            self._waiting = choice.rest
            self.thrown.update(one.id for one in choice.stale)
            if not choice.chosen:
                self._settle()
                await asyncio.sleep(LOOK_S)
                continue
            await asyncio.sleep(self._setting.train_s)
            self._consumed.update(one.id for one in choice.chosen)
            await self._publish()
            self._settle()
            self.outcome.step_ends.append(loop.time())

    def _choose(self, *, now: float) -> GroupChoice:
        """Choose the next batch among the trajectories that have their reward."""
        self._scoring += [(now + self._setting.reward_s, one) for one in self._reader.poll()]
        scored = [msgspec.structs.replace(one, reward=1.0) for ready, one in self._scoring if ready <= now]
        self._scoring = [(ready, one) for ready, one in self._scoring if ready > now]
        choice = choose_groups(
            [*self._waiting, *scored],
            groups_per_step=self._setting.groups_per_step,
            group_size=self._setting.group_size,
            version=self._version,
            max_lag=self._setting.max_lag,
            consumed=self._consumed,
        )
        if choice.chosen and not HoldWatch().may_publish([self._stage.campaign.hold(0)], version=self._version + 1):
            return choice._replace(chosen=[], rest=[*choice.chosen, *choice.rest])
        return choice

    async def _publish(self) -> None:
        self._version += 1
        versions.announce_version(
            self._stage.campaign.weights, versions.WeightVersion(version=self._version, step=self._version)
        )
        await asyncio.gather(*(engine.load_version(self._version) for engine in self._stage.engines))

    def _settle(self) -> None:
        num = len(self._consumed) + len(self.thrown)
        self._settled_writer.write(SettledCount(num=num, version=self._version, workers={ENV_WORKER: num}))


def make_context(root: Path, setting: RollingSetting, *, job: int = 0) -> WorkerContext:
    """Make a campaign directory with everything that an env worker reads, or continue one in another job."""
    asked = {name: getattr(setting, name) for name in setting.__dataclass_fields__}
    late = "" if setting.late_after_s is None else f"late_after_s = {setting.late_after_s}"
    (root / "bench.toml").write_text(RECIPE.format(**asked, late=late, longest_reply=LONGEST_REPLY))
    recipe, site = load_recipe(str(root / "bench.toml")), load_site("local")
    campaign = CampaignDir(root / "campaign")
    for directory in (
        campaign.events,
        campaign.endpoints,
        campaign.weights,
        campaign.model,
        campaign.env_workers,
        campaign.job(job).root,
    ):
        directory.mkdir(parents=True, exist_ok=True)
    if versions.find_newest_version(campaign.weights) is None:
        publish_json(campaign.model / "config.json", {"max_position_embeddings": CONTEXT})
        versions.announce_version(campaign.weights, versions.WeightVersion(version=0, step=0))
    worker = make_worker_name(job, "env", 0)
    return WorkerContext(
        campaign=campaign,
        job=campaign.job(job),
        role="env",
        index=0,
        recipe=recipe,
        site=site,
        plan=make_plan(recipe, site),
        events=EventLog(campaign.events / f"{worker}.jsonl", job=job, role="env", worker=worker, node="n"),
    )
