"""Roles prefill and decode: serve an engine over HTTP and keep it at the newest version of the weights.

    run                serve until the job ends
    serve_engine       the same as a coroutine
    open_engine        the engine that the recipe names
    make_vllm_launch   the options of a worker's vLLM server
    WorkerEngine       the interface of the served engine
    WeightFollower     keep an engine at the newest version
    LoadReporter       report the load of an engine
    EngineWork         note whether it generates
    FAULT_PAUSE_S, MAX_BEHIND_S, LEAST_BYTES_PER_S, STALL_SHARE, LOAD_SAMPLE_INTERVAL_S, LOAD_REPORT_INTERVAL_S,
    MAX_LOADS_PER_S, IDLE_REPORT_INTERVAL_S, WORK_INTERVAL_S   constants

A prefill worker computes the KV of prompts and hands it to decode workers. A decode worker generates tokens, from that
KV or from its own prefill; where the plan has no prefill workers it always is its own.
"""

import asyncio
import contextlib
import dataclasses
import importlib
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from importlib.util import find_spec
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Protocol

from aiohttp import ClientSession

from hpcrl.campaign_dir import endpoints
from hpcrl.campaign_dir.endpoints import EngineEndpoint
from hpcrl.campaign_dir.events import EngineCounted, FaultReported, TransportChanged, VersionLoaded
from hpcrl.campaign_dir.paths import make_worker_name
from hpcrl.campaign_dir.workers import WorkerPlace
from hpcrl.config.published_adapters import publishes_adapters
from hpcrl.config.recipe import EngineConfig
from hpcrl.config.site import OUR_CONNECTOR, Site
from hpcrl.engines.base import LoadFigures, SleepingEngine, TokenGenerator, UpdatableEngine
from hpcrl.engines.http import ServedEngine, make_client_session, make_kv_fetcher, serve_over_http
from hpcrl.engines.node_socket import serve_over_socket
from hpcrl.errors import EngineError, HpcrlError, WeightsError
from hpcrl.hardware.memory_model import GIB
from hpcrl.models.model_config import read_model_config
from hpcrl.plan.demand import compute_version_bytes
from hpcrl.plan.plan import RolePlan
from hpcrl.roles.context import ROLE_ROUND_INTERVAL_S, WorkerContext
from hpcrl.roles.gpu_shifts import EngineShift, open_engine_shift
from hpcrl.rollout.tasks import stable_hash
from hpcrl.system import network
from hpcrl.system.file_watch import LONG_PAUSE_S, WatchedValue
from hpcrl.system.files import expand_path
from hpcrl.system.garbage import pause_collection
from hpcrl.system.network import current_node
from hpcrl.system.pulse import expect_nothing, expect_work, note_work
from hpcrl.system.wakeups import WakeEvent
from hpcrl.weights.stores.file_store import FileStore
from hpcrl.weights.stores.store import NewestSource, WeightSource
from hpcrl.weights.stores.window_store import WindowStore
from hpcrl.weights.versions import Transport, VersionManifest, find_newest_version, read_transport, write_transport
from hpcrl.weights.window.file import make_window_key

if TYPE_CHECKING:
    from hpcrl.engines.vllm.server import VllmLaunch


FAULT_PAUSE_S = 1.0
MAX_BEHIND_S, LEAST_BYTES_PER_S, STALL_SHARE = 30.0, 0.5e9, 1 / 3
"""An engine that has loaded nothing for longer than the first, and than the bytes of a version take at this rate, asks
for files: half a terabyte takes minutes to get into a window and to all nodes. Soon after this share of the time after
which a job without progress ends, it asks in any case."""
LOAD_SAMPLE_INTERVAL_S, LOAD_REPORT_INTERVAL_S = 1.0, 10.0
MAX_LOADS_PER_S = 20
"""The load reports of all engines of a role together: of very many, each reports more rarely."""
IDLE_REPORT_INTERVAL_S = 60.0
"""The time between two load reports of an engine that stays idle."""
WORK_INTERVAL_S = 5.0


class WorkerEngine(ServedEngine, UpdatableEngine, SleepingEngine, Protocol):
    """The engine of a prefill or decode worker: it answers requests, loads new weights and reports its failure."""

    async def wait_until_failed(self) -> None:
        """Wait until the engine fails, and raise the cause."""


async def serve_engine(context: WorkerContext) -> None:
    """Open the engine, wait for the first version, and serve until the job ends; further nodes only run processes."""
    if context.index % context.role_plan.nodes_per_engine:
        await _run_engine_part(context)
        return
    weights = context.campaign.weights
    place = context.place
    window = WindowStore(make_window_key(place.campaign, node=place.node), job=place.job)
    source = NewestSource(window, FileStore(weights, watch_s=LONG_PAUSE_S))
    shift = open_engine_shift(context)
    with context.open_wakeups() as wakeups:
        _import_engine(context.recipe.engine)
        if not await context.await_model(wakeups):
            return
        if shift is not None and not await _start_first_shift(shift, context, source, wakeups):
            return
        expect_work("not become ready to generate", max(context.recipe.engine.start_timeout_s, context.stall_s))
        async with (
            make_client_session(context.certificate) as session,
            open_engine(context, source, session=session, shift=shift) as engine,
        ):
            expect_nothing()  # the trainer may warm up for hours
            first = await _await_first_version(context, source, wakeups)
            if first is None:
                return
            expect_work("not become ready to generate", max(context.recipe.engine.start_timeout_s, context.stall_s))
            follower = WeightFollower(engine, source, context, wakeups=wakeups, shift=shift)
            await follower.load(first)
            await _announce_and_follow(engine, follower, context)


async def _start_first_shift(
    shift: EngineShift, context: WorkerContext, source: WeightSource, wakeups: WakeEvent
) -> bool:
    """Leave the GPUs to the trainer until there are weights to serve; return False if the job ends before."""
    expect_nothing()
    return await _await_first_version(context, source, wakeups) is not None and await shift.start(wakeups)


def _import_engine(engine: EngineConfig) -> None:
    """Import the slow packages of an engine while the trainer imports its own and makes the model."""
    if engine.backend == "embedded":
        with pause_collection():
            importlib.import_module("hpcrl.engines.embedded.engine")


def open_engine(
    context: WorkerContext, source: WeightSource, *, session: ClientSession, shift: EngineShift | None = None
) -> AbstractAsyncContextManager[WorkerEngine]:
    """Open the engine that the recipe names; only the packages of that engine are imported.

    `shift` is that of GPUs which the trainer has too.
    """
    match context.recipe.engine.backend:
        case "embedded":
            return _open_embedded_engine(context, source, session=session)
        case "vllm":
            return _open_vllm_engine(context, session=session, shift=shift)
        case "sim":
            return _open_simulated_engine(context, source, session=session)


def _open_embedded_engine(
    context: WorkerContext, source: WeightSource, *, session: ClientSession
) -> AbstractAsyncContextManager[WorkerEngine]:
    with pause_collection():
        from hpcrl.engines.embedded.engine import EmbeddedEngine, load_model

    return EmbeddedEngine(
        load_model(context.campaign.model),
        store=source,
        max_batch=context.recipe.engine.max_batch,
        fetch_kv=make_kv_fetcher(session),
        records_experts=context.recipe.train.router_replay,
    )


def _open_simulated_engine(
    context: WorkerContext, source: WeightSource, *, session: ClientSession
) -> AbstractAsyncContextManager[WorkerEngine]:
    from hpcrl.engines.sim.engine import make_sim_engine

    engine = context.recipe.engine
    return make_sim_engine(
        context.campaign.model,
        engine,
        gpu=context.choose_simulated_gpu(engine),
        num_gpus=context.role_plan.gpus_per_worker,
        store=source,
        fetch_kv=make_kv_fetcher(session),
    )


async def _run_engine_part(context: WorkerContext) -> None:
    from hpcrl.engines.vllm.engine_part import run_part

    await run_part(_make_own_launch(context), is_ending=lambda: context.draining)


def _open_vllm_engine(
    context: WorkerContext, *, session: ClientSession, shift: EngineShift | None
) -> AbstractAsyncContextManager[WorkerEngine]:
    from hpcrl.engines.vllm.engine import VllmEngine

    launch = dataclasses.replace(_make_own_launch(context), shift_fd=None if shift is None else shift.fd)
    return VllmEngine(launch, place=context.place, session=session)


def _make_own_launch(context: WorkerContext) -> "VllmLaunch":
    """Return the options of this worker's vLLM server, or of its part of one."""
    from hpcrl.engines.vllm.engine_group import EngineGroup

    node_rank = context.index % context.role_plan.nodes_per_engine
    interface, host = network.find_interface(context.site.list_interfaces(context.partition))
    first = make_worker_name(context.job.number, context.role, context.index - node_rank)
    launch = make_vllm_launch(
        context.recipe.engine,
        role=context.role_plan,
        partition=context.partition,
        site=context.site,
        place=context.place,
        log=context.job.log(f"{context.role}-{context.index}-vllm"),
        host=host,
        has_handover=context.plan.has_role("prefill"),
        lora_rank=_find_lora_rank(context),
    )
    group = None
    if context.role_plan.nodes_per_engine > 1:
        num_nodes = context.role_plan.nodes_per_engine
        group = EngineGroup(directory=context.job.engine_groups, name=first, num_nodes=num_nodes)
    return dataclasses.replace(
        launch,
        seed=stable_hash(context.recipe.seed, first, bits=31),  # engines with one seed would draw the same answers
        reports_experts=context.recipe.train.router_replay,
        group=group,
        interface=interface,
        node_rank=node_rank,
    )


def _find_lora_rank(context: WorkerContext) -> int:
    """Return the rank of adapters that engines are sent; 0 if they are sent whole weights."""
    recipe, path = context.recipe, context.recipe.model.path
    # The campaign's link to the model may not be there yet.
    fields = {} if path is None else read_model_config(Path(path) / "config.json").fields
    return recipe.train.lora_rank if publishes_adapters(recipe, fields) else 0


def make_vllm_launch(
    engine: EngineConfig,
    *,
    role: RolePlan,
    partition: str,
    site: Site,
    place: WorkerPlace,
    log: Path,
    host: str,
    has_handover: bool = True,
    lora_rank: int = 0,
) -> "VllmLaunch":
    """Return the options of a worker's vLLM server, from the plan; other nodes reach this one at `host`.

    A `lora_rank` above 0 is that of the adapters which are its versions.
    One pool of engines hands no KV over, and a connector would only cost time and space.
    """
    from hpcrl.engines.vllm.kv_connectors import choose_connector
    from hpcrl.engines.vllm.kv_files import choose_parent, name_job_directory
    from hpcrl.engines.vllm.server import VllmLaunch

    inference = site.choose_inference(partition)
    has_network = bool(role.gpus_per_worker and site.network.fabric)
    connector = choose_connector(
        inference.kv_connector if has_handover else None,
        has_network=has_network,
        has_package=lambda name: find_spec(name) is not None,
    )
    launch = dataclasses.replace(
        VllmLaunch.from_config(engine, role=role, model=place.campaign.model, log=log, lora_rank=lora_rank),
        kv_connector=connector,
        kv_options=inference.kv_options,
        host=host,
        node=place.node,
    )
    if connector is None or (connector == OUR_CONNECTOR and role.nodes_per_engine > 1):  # its files are on one node
        return dataclasses.replace(launch, kv_connector=None)
    if connector != OUR_CONNECTOR:
        return dataclasses.replace(launch, kv_address=network.find_free_address(host))
    asked = None if inference.kv_dir is None else str(expand_path(inference.kv_dir))
    parent = choose_parent(asked, beside="" if site.scheduler == "local" else str(place.campaign.root))
    return dataclasses.replace(
        launch,
        kv_dir=parent / name_job_directory(place.job.root) / log.stem,
        kv_disk_bytes=int(inference.kv_disk_gib * GIB),
    )


async def _announce_and_follow(engine: WorkerEngine, follower: "WeightFollower", context: WorkerContext) -> None:
    """Start the servers, announce their endpoint, load new versions until the job ends, then shut them down."""
    token = endpoints.make_token()
    url, runner = await serve_over_http(
        engine, host=context.find_address(), token=token, certificate=context.certificate
    )
    role = context.role_plan
    async with serve_over_socket(engine, token=token) as socket:
        endpoint = EngineEndpoint(
            role=context.role,
            worker=context.name,
            node=current_node(),
            url=url,
            token=token,
            job=context.job.number,
            gpu=context.choose_gpu(context.recipe.engine),
            num_gpus=role.gpus_per_engine,
            socket=socket,
        )
        endpoints.announce_endpoint(context.campaign.endpoints, endpoint)
        context.make_sender("env").wake()
        expect_work("generated nothing for the requests that it runs", context.stall_s)
        reporter = LoadReporter(engine, context.events.emit, num_engines=role.num_workers)
        reporting = asyncio.create_task(reporter.report(), name="load of the engine")
        try:
            await follower.follow(engine=engine)
        finally:
            reporting.cancel()
            endpoints.withdraw_endpoint(context.campaign.endpoints, context.name)
            await runner.cleanup()


async def _await_first_version(
    context: WorkerContext, source: WeightSource, wakeups: WakeEvent
) -> VersionManifest | None:
    """Wait until the trainer has published the initial weights; None if the job ends before."""
    while not context.draining:
        if (newest := await asyncio.to_thread(source.newest)) is not None:
            return newest
        await wakeups.wait(ROLE_ROUND_INTERVAL_S)
    return None


class EngineWork:
    """The work of an engine: while it runs requests, it generates tokens."""

    def __init__(self, *, has_tokens: bool) -> None:
        """Take whether its requests lead to tokens here: a prefill worker's do so elsewhere."""
        self._has_tokens = has_tokens
        self._num_generated = -1
        self._next_look = float("-inf")

    async def look(self, engine: WorkerEngine) -> None:
        """Note work if the engine has generated a token, or has nothing to do."""
        now = time.monotonic()
        if now < self._next_look:
            return
        self._next_look = now + WORK_INTERVAL_S
        with contextlib.suppress(EngineError):
            figures = await engine.load_figures()
            if not self._has_tokens or not figures.num_running or figures.num_generated_tokens != self._num_generated:
                note_work()
            self._num_generated = figures.num_generated_tokens


class WeightFollower:
    """The follower that keeps an engine at the newest version."""

    def __init__(
        self,
        engine: UpdatableEngine,
        source: WeightSource,
        context: WorkerContext,
        *,
        wakeups: WakeEvent,
        shift: EngineShift | None = None,
    ) -> None:
        """Follow the versions of a source; `shift` is that of GPUs which the trainer has too."""
        self._engine = engine
        self._shift = shift
        self._source = source
        self._context = context
        self._wakeups = wakeups
        self._loaded = -1
        self._behind_since: float | None = None
        travel_s = min(compute_version_bytes(context.recipe) / LEAST_BYTES_PER_S, STALL_SHARE * context.stall_s)
        self._max_behind_s = MAX_BEHIND_S + travel_s
        self._sender = context.make_sender("env")
        weights = context.campaign.weights
        self._work = EngineWork(has_tokens=context.role != "prefill")
        self._published = WatchedValue(weights, lambda: find_newest_version(weights), longest_s=MAX_BEHIND_S / 3)

    async def follow(self, *, engine: WorkerEngine) -> None:
        """Load new versions until the job ends. If the engine fails, raise the cause: the worker is then restarted."""
        failed = asyncio.create_task(engine.wait_until_failed(), name="engine failed")
        while not self._context.draining:
            if failed.done():
                failed.result()
            if self._shift is not None and self._shift.is_requested:
                await self._leave_gpus(engine, self._shift)
            await self._load_newest()
            await asyncio.to_thread(self._check_lag)
            await self._work.look(engine)
            await self._wakeups.wait(ROLE_ROUND_INTERVAL_S)
        failed.cancel()

    async def _load_newest(self) -> None:
        newest = await asyncio.to_thread(self._source.newest)
        if newest is not None and newest.version > self._loaded:
            await self.load(newest)

    async def _leave_gpus(self, engine: WorkerEngine, shift: EngineShift) -> None:
        """Leave the GPUs to the trainer until it has left them, and continue with the newest version."""
        expect_work("not left its GPUs to the trainer", self._context.stall_s)
        await engine.sleep()
        shift.end()
        if not await shift.start(self._wakeups):
            return
        expect_work("not become ready to generate again", self._context.stall_s)
        await engine.wake_weights()
        await self._load_newest()
        await engine.resume()
        expect_work("generated nothing for the requests that it runs", self._context.stall_s)

    async def load(self, manifest: VersionManifest) -> None:
        """Load a version; if it cannot be loaded, the current one stays in use, and the newest is tried next."""
        started = time.monotonic()
        try:
            stall_s = await self._engine.load_version(manifest.version)
        except WeightsError as error:
            newest = await asyncio.to_thread(self._source.newest)
            if newest is None or newest.version <= manifest.version:  # otherwise a newer one replaced it meanwhile
                await asyncio.sleep(FAULT_PAUSE_S)
                if not self._context.draining:  # a trainer that has ended leaves no window behind
                    self._context.events.emit(FaultReported(what="weights", detail=str(error)))
            return
        self._loaded, self._behind_since = manifest.version, None
        self._sender.wake()
        wall_s = round(time.monotonic() - started, 4)
        self._context.events.emit(VersionLoaded(version=manifest.version, wall_s=wall_s, stall_s=round(stall_s, 4)))

    def _check_lag(self) -> None:
        """Request transport by files, which every worker can read, if a published version does not arrive in time."""
        weights, published = self._context.campaign.weights, self._published.poll()
        if published is None or published <= self._loaded:
            self._behind_since = None
            return
        self._behind_since = self._behind_since or time.monotonic()
        if time.monotonic() - self._behind_since <= self._max_behind_s:
            return
        transport = read_transport(weights)
        if transport is not None and transport.name != "files":
            waited = f"has waited {self._max_behind_s:.0f} s for version {published} by {transport.name}"
            reason = f"{self._context.name} {waited}"
            write_transport(weights, Transport(name="files", reason=reason))
            self._context.events.emit(TransportChanged(transport="files", reason=reason))


class LoadReporter:
    """The reporter of an engine's load: samples of a time span make one event."""

    def __init__(
        self,
        engine: TokenGenerator,
        emit: Callable[[EngineCounted], None],
        *,
        num_engines: int = 1,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Report for one of several engines."""
        self._engine = engine
        self._emit = emit
        self._clock = clock
        self._samples: list[LoadFigures] = []
        self._started_at = clock()
        self._num_tokens = 0
        self._before: LoadFigures | None = None
        """The figures with which the last event ended."""
        self._interval_s = max(LOAD_REPORT_INTERVAL_S, num_engines / MAX_LOADS_PER_S)
        self._idle_interval_s = max(IDLE_REPORT_INTERVAL_S, self._interval_s)
        self._span_limit_s = self._interval_s

    async def report(self) -> None:
        """Report until cancelled; an engine that does not answer has no load."""
        while True:
            with contextlib.suppress(HpcrlError):
                self.add_sample(await self._engine.load_figures())
            await asyncio.sleep(LOAD_SAMPLE_INTERVAL_S)

    def add_sample(self, figures: LoadFigures) -> None:
        """Add a sample, and emit an event if a time span is over; a long one, of an idle engine, ends with its work."""
        span_s = self._clock() - self._started_at
        is_idle = (
            not figures.num_running and not figures.num_waiting and figures.num_generated_tokens == self._num_tokens
        )
        if not is_idle and self._samples and span_s > self._interval_s:
            self._emit_load(self._samples[-1], span_s=span_s)
            span_s = 0.0
        self._samples.append(figures)
        if span_s >= (self._span_limit_s if is_idle else self._interval_s):
            self._emit_load(figures, span_s=span_s)
            self._span_limit_s = self._idle_interval_s if is_idle else self._interval_s

    def _emit_load(self, newest: LoadFigures, *, span_s: float) -> None:
        """Emit the event of the samples so far, and start over."""
        samples, self._samples, self._started_at = self._samples, [], self._clock()
        num_tokens = max(newest.num_generated_tokens - self._num_tokens, 0)
        self._num_tokens = newest.num_generated_tokens
        before, self._before = self._before, newest
        self._emit(
            EngineCounted(
                window_s=round(span_s, 3),
                version=newest.version,
                busy_share=round(fmean(sample.num_running > 0 for sample in samples), 3),
                running=round(fmean(sample.num_running for sample in samples), 2),
                waiting=round(fmean(sample.num_waiting for sample in samples), 2),
                num_places=newest.num_places,
                kv_share=_measure_kv_share(samples),
                num_tokens=num_tokens,
                num_prefix_queries=_count_since(before, newest, "num_prefix_queries"),
                num_prefix_hits=_count_since(before, newest, "num_prefix_hits"),
                num_preemptions=_count_since(before, newest, "num_preemptions"),
            )
        )


def _count_since(before: LoadFigures | None, newest: LoadFigures, name: str) -> int | None:
    """Return how much a counter has grown; one that starts again counts from zero."""
    num: int | None = getattr(newest, name)
    if num is None:
        return None
    num_before: int = (getattr(before, name) if before is not None else None) or 0
    return num - num_before if num >= num_before else num


def _measure_kv_share(samples: Sequence[LoadFigures]) -> float | None:
    shares = [
        sample.running_tokens / max(sample.running_tokens + sample.free_kv_tokens, 1)
        for sample in samples
        if sample.free_kv_tokens is not None
    ]
    return round(fmean(shares), 3) if shares else None


def run(context: WorkerContext) -> None:
    """Serve until the job ends."""
    asyncio.run(serve_engine(context))
