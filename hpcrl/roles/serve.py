"""What prefill and decode share: an engine behind an HTTP door, kept at the newest version of the weights.

Role decode: generates tokens, from KV that prefill workers hand over or from its own prefill.

Role prefill: computes the KV of prompts and hands it to decode workers.
"""

import asyncio
import time
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from aiohttp import ClientSession

from hpcrl.campaign_dir import endpoints
from hpcrl.campaign_dir.endpoints import Endpoint
from hpcrl.campaign_dir.events import FaultReported, RungChanged, VersionLoaded
from hpcrl.campaign_dir.workers import WorkerPlace
from hpcrl.config.recipe import Engine
from hpcrl.config.site import Inference
from hpcrl.engines.base import Updatable
from hpcrl.engines.http import ServedEngine, client_session, kv_fetcher, serve
from hpcrl.errors import WeightsError
from hpcrl.plan.plan import RolePlan
from hpcrl.roles.context import Context
from hpcrl.system import network
from hpcrl.system.network import this_node
from hpcrl.weights.file_store import FileStore
from hpcrl.weights.store import Newest, WeightSource
from hpcrl.weights.versions import Manifest, Rung, newest_version, read_rung, set_rung
from hpcrl.weights.window.file import window_key
from hpcrl.weights.window_store import WindowStore

if TYPE_CHECKING:
    from hpcrl.engines.vllm.server import Launch


DEFAULT_SIMULATED = "h100"
POLL_S = 0.1
FAULT_PAUSE_S = 1.0
BEHIND_S = 30.0
"""How long an engine may lag behind a version that exists before it asks for files."""


class WorkerEngine(ServedEngine, Updatable, Protocol):
    """What a prefill or decode worker serves: answers requests, takes new weights, says when it is at its end."""

    async def failed(self) -> None:
        """Wait until the engine cannot go on, and raise why."""


async def serve_engine(context: Context) -> None:
    """Wait for the first version, serve until the job ends."""
    weights = context.run.weights
    place = context.place
    window = WindowStore(window_key(place.campaign, node=place.node), job=place.job)
    source = Newest(window, FileStore(weights))
    first = await _first_version(context, source)
    if first is None:
        return
    async with client_session() as session, engine_of(context, source, session=session) as engine:
        follower = Follower(engine, source, context)
        await follower.take(first)
        await _announced(engine, follower, context)


def engine_of(
    context: Context, source: WeightSource, *, session: ClientSession
) -> AbstractAsyncContextManager[WorkerEngine]:
    """The engine that the recipe names; only what it needs is imported."""
    match context.recipe.engine.backend:
        case "embedded":
            return _embedded(context, source, session=session)
        case "vllm":
            return _vllm(context)
        case "sim":
            return _simulated(context, source, session=session)


def _embedded(
    context: Context, source: WeightSource, *, session: ClientSession
) -> AbstractAsyncContextManager[WorkerEngine]:
    from hpcrl.engines.embedded.engine import EmbeddedEngine, load_model

    return EmbeddedEngine(
        load_model(context.run.model),
        store=source,
        max_batch=context.recipe.engine.max_batch,
        fetch_kv=kv_fetcher(session),
    )


def _simulated(
    context: Context, source: WeightSource, *, session: ClientSession
) -> AbstractAsyncContextManager[WorkerEngine]:
    from hpcrl.engines.sim.engine import simulated

    engine = context.recipe.engine
    return simulated(
        context.run.model,
        gpu=_gpu(context) or "",
        num_gpus=context.role_plan.gpus_per_worker,
        config=Path(engine.sim.config) if engine.sim.config else None,
        speed=engine.sim.speed,
        max_batch=engine.max_batch,
        max_model_len=engine.max_model_len,
        store=source,
        fetch_kv=kv_fetcher(session),
    )


def _gpu(context: Context) -> str | None:
    """What the worker computes on, or pretends to."""
    engine = context.recipe.engine
    role = context.role_plan
    has = context.plan.components[role.component].gpu if role.gpus_per_worker else None
    if engine.backend != "sim":
        return has
    pretended = engine.sim.gpus
    return pretended[context.index % len(pretended)] if pretended else has or DEFAULT_SIMULATED


def _vllm(context: Context) -> AbstractAsyncContextManager[WorkerEngine]:
    from hpcrl.engines.vllm.engine import VllmEngine

    place = context.place
    launch = vllm_launch(
        context.recipe.engine,
        role=context.role_plan,
        inference=context.site.inference,
        place=place,
        log=context.job.log(f"{context.role}-{context.index}-vllm"),
        host=network.address_of(context.site.network.interface),
    )
    return VllmEngine(launch, place=place)


def vllm_launch(
    engine: Engine, *, role: RolePlan, inference: Inference, place: WorkerPlace, log: Path, host: str
) -> "Launch":
    """What the plan gives a worker, as its vLLM server is told; `host` is where other nodes reach this one."""
    from hpcrl.engines.vllm import kv_connectors as vllm_connectors
    from hpcrl.engines.vllm.server import Launch

    ours = inference.kv_connector == vllm_connectors.OURS
    is_foreign = inference.kv_connector is not None and not ours
    return Launch(
        model=place.campaign.model,
        log=log,
        dtype=engine.dtype,
        max_model_len=engine.max_model_len,
        max_batch=engine.max_batch,
        tensor_parallel=max(role.gpus_per_worker // engine.pipeline_parallel, 1),
        pipeline_parallel=engine.pipeline_parallel,
        num_cpus=role.cpus_per_worker,
        cpu_kv_gib=engine.cpu_kv_gib,
        kv_connector=inference.kv_connector,
        kv_options=inference.kv_options,
        kv_dir=place.job.kv if ours else None,
        kv_address=network.free_address(host) if is_foreign else None,
        start_s=engine.start_timeout_s,
        extra_args=tuple(engine.vllm_args),
    )


async def _announced(engine: WorkerEngine, follower: "Follower", context: Context) -> None:
    """Open the door, say where it is, keep up with the versions, close it."""
    token = endpoints.new_token()
    url, runner = await serve(engine, host=network.address_of(context.site.network.interface), token=token)
    role = context.role_plan
    endpoint = Endpoint(
        role=context.role,
        worker=context.name,
        node=this_node(),
        url=url,
        token=token,
        job=context.job.number,
        gpu=_gpu(context),
        num_gpus=role.gpus_per_worker,
    )
    endpoints.announce(context.run.endpoints, endpoint)
    try:
        await follower.follow(until_failed=engine)
    finally:
        endpoints.withdraw(context.run.endpoints, context.name)
        await runner.cleanup()


async def _first_version(context: Context, source: WeightSource) -> Manifest | None:
    """The trainer publishes the initial weights; None if the job ends before."""
    while not context.draining:
        if (newest := await asyncio.to_thread(source.newest)) is not None:
            return newest
        await asyncio.sleep(POLL_S)
    return None


class Follower:
    """Keeps an engine at the newest version."""

    def __init__(self, engine: Updatable, source: WeightSource, context: Context) -> None:
        self._engine = engine
        self._source = source
        self._context = context
        self._loaded = -1
        self._behind_since: float | None = None

    async def follow(self, *, until_failed: WorkerEngine) -> None:
        """Until the job ends, or the engine does: then this worker ends with its reason, and is begun anew."""
        failed = asyncio.create_task(until_failed.failed(), name="engine failed")
        while not self._context.draining:
            if failed.done():
                failed.result()
            newest = await asyncio.to_thread(self._source.newest)
            if newest is not None and newest.version > self._loaded:
                await self.take(newest)
            await asyncio.to_thread(self._heed_lag)
            await asyncio.sleep(POLL_S)
        failed.cancel()

    async def take(self, manifest: Manifest) -> None:
        """Take a version over; if it cannot be had, the one in use stays, and the newest is tried next."""
        began = time.monotonic()
        try:
            stall_s = await self._engine.load_version(manifest.version)
        except WeightsError as error:
            newest = await asyncio.to_thread(self._source.newest)
            if newest is None or newest.version <= manifest.version:  # else it was only overtaken
                self._context.events.emit(FaultReported(what="weights", detail=str(error)))
                await asyncio.sleep(FAULT_PAUSE_S)
            return
        self._loaded = manifest.version
        wall_s = round(time.monotonic() - began, 4)
        self._context.events.emit(VersionLoaded(version=manifest.version, wall_s=wall_s, stall_s=round(stall_s, 4)))

    def _heed_lag(self) -> None:
        """An engine that does not see what the trainer has long made asks for files, which everybody sees."""
        weights = self._context.run.weights
        made = newest_version(weights)
        if made is None or made <= self._loaded:
            self._behind_since = None
            return
        self._behind_since = self._behind_since or time.monotonic()
        rung = read_rung(weights)
        if time.monotonic() - self._behind_since > BEHIND_S and rung is not None and rung.rung != "files":
            reason = f"{self._context.name} has waited {BEHIND_S:g} s for version {made} on rung {rung.rung}"
            set_rung(weights, Rung(rung="files", reason=reason))
            self._context.events.emit(RungChanged(rung="files", reason=reason))


def run(context: Context) -> None:
    """Serve until the job ends."""
    asyncio.run(serve_engine(context))
