"""The simulated engine: random tokens instead of a model, at the speed that the cost model predicts.

    SimEngine        an InferenceEngine and UpdatableEngine; its tokens depend on the seed and prompt of a request
    SimSettings      its size, and the speed of its time
    make_sim_engine  the engine of a campaign with engine.backend = "sim"
    MIN_TOP_P, MAX_LATENESS_S  constants of the simulation

It has continuous batching with chunked prefill, a bounded KV cache, KV kept between the turns of a trajectory, and a
queue by priority. The structure of an answer is checked, but its tokens are as random as all others. The time is that
of its event loop: on the loop of hpcrl.testing.virtual_time, an hour of a fleet takes seconds.
"""

import asyncio
import math
import secrets
from collections.abc import AsyncGenerator, Collection
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec
import xxhash

from hpcrl.config.recipe import EngineConfig
from hpcrl.engines.base import (
    LOCAL_URL_PREFIX,
    Completion,
    CompletionChunk,
    FetchKv,
    GenerateRequest,
    KvHandle,
    LoadFigures,
    join_chunks,
)
from hpcrl.engines.request_checks import check_asks_for_tokens, check_tokenizer_fits
from hpcrl.engines.request_loop import LoopHooks, RequestLoop
from hpcrl.engines.sim.batch import SimBatch, SimRequest, draw_reply
from hpcrl.engines.structure import check_structure
from hpcrl.engines.version_gate import VersionGate, make_aborted_completion
from hpcrl.errors import EngineError, EngineRefusedError, WeightsError
from hpcrl.hardware.cost_model import LINK_BYTES_PER_S, WorkerSpeed, estimate_speed, read_model_shape
from hpcrl.hardware.gpus import GpuModel
from hpcrl.models.model_config import read_model_config, read_model_limits
from hpcrl.weights.stores.store import WeightSource

MIN_TOP_P = 1e-6
"""Below this there is only one token to sample, for any vocabulary."""
MAX_LATENESS_S = 0.1
"""Timers are compensated for lateness up to this; beyond it the machine is too busy for the engine's clock."""


@dataclass(frozen=True, kw_only=True)
class SimSettings:
    """The size of a simulated engine, and the speed of its time."""

    vocabulary: int = 32000
    context_length: int = 131072
    max_batch: int = 64
    max_waiting: int | None = None
    """More requests are refused; None: all wait."""
    tokens_per_step: int = 2048
    """The most tokens decoded and prefilled in one step."""
    time_scale: float = 1.0
    """Seconds that one simulated second takes."""


def make_sim_engine(
    model: Path,
    engine: EngineConfig,
    *,
    gpu: GpuModel,
    num_gpus: int,
    store: WeightSource | None = None,
    fetch_kv: FetchKv | None = None,
) -> "SimEngine":
    """Return an engine for prompts of the model in `model`, which `engine.sim` may give another model's speed."""
    check_tokenizer_fits(model)
    limits = read_model_limits(model, max_model_len=engine.max_model_len)
    path = Path(engine.sim.config) if engine.sim.config else model / "config.json"
    try:
        worker_speed = estimate_speed(gpu, shape=read_model_shape(read_model_config(path).fields), tp=max(1, num_gpus))
    except (OSError, KeyError, ValueError) as error:
        raise EngineError(
            f"the speed of the model of {path} cannot be estimated ({error!r}): set engine.sim.config"
        ) from error
    if not worker_speed.kv_tokens:
        raise EngineError(f"the model of {path} does not fit into {num_gpus} {gpu.name}: give the worker more GPUs")
    settings = SimSettings(
        vocabulary=limits.vocabulary_size,
        context_length=limits.context_length,
        max_batch=engine.max_batch,
        time_scale=1 / engine.sim.speed,
    )
    return SimEngine(worker_speed, settings=settings, store=store, fetch_kv=fetch_kv)


class _SimKv(msgspec.Struct, frozen=True, kw_only=True):
    """The simulated KV that is sent to another engine."""

    version: int
    token_ids: list[int]


class SimEngine:
    """An InferenceEngine, UpdatableEngine and SleepingEngine, used as `async with SimEngine(...) as engine`."""

    def __init__(
        self,
        worker_speed: WorkerSpeed,
        *,
        settings: SimSettings = SimSettings(),
        store: WeightSource | None = None,
        version: int = 0,
        fetch_kv: FetchKv | None = None,
    ) -> None:
        self.batch = SimBatch(worker_speed, version=version, tokens_per_step=settings.tokens_per_step)
        self.busy_s = 0.0
        """Simulated seconds in which there was work."""
        self._worker_speed = worker_speed
        self._settings = settings
        self._store = store
        self._fetch_kv = fetch_kv
        self._request_loop = RequestLoop(LoopHooks(can_step=self._can_step, step=self._step, drop=self._drop))
        self._handover_store: dict[str, _SimKv] = {}
        self._gate = VersionGate(version)
        self._is_asleep = False
        self._late_s = 0.0
        """The lateness of the last timer."""

    async def __aenter__(self) -> Self:
        self._request_loop.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._request_loop.stop()

    @property
    def version(self) -> int:
        return self.batch.version

    async def wait_until_failed(self) -> None:
        """Wait until the engine fails, and raise the error."""
        await self._request_loop.wait_until_failed()

    # ---- TokenGenerator and TokenStreamer

    async def generate(self, request: GenerateRequest) -> Completion:
        check_asks_for_tokens(request)
        if not await self._gate.pass_through(request):
            return make_aborted_completion()
        row = self._admit_request(request, max_new_tokens=request.max_new_tokens)
        await self._request_loop.finish(row, request, prepare=partial(self._prepare_kv, row, request))
        return join_chunks([self._make_chunk(row, 0, row.num_generated)])

    def stream(self, request: GenerateRequest) -> AsyncGenerator[CompletionChunk, None]:
        check_asks_for_tokens(request)
        return self._gate.stream(request, self._stream_now)

    def _stream_now(self, request: GenerateRequest) -> AsyncGenerator[CompletionChunk, None]:
        row = self._admit_request(request, max_new_tokens=request.max_new_tokens)
        prepare = partial(self._prepare_kv, row, request)
        return self._request_loop.stream(
            row, request, count_generated=self.batch.count_generated, make_chunk=self._make_chunk, prepare=prepare
        )

    async def prefill(self, request: GenerateRequest) -> KvHandle:
        """Simulate the KV of all tokens but the last, and hold it until it is fetched."""
        if not await self._gate.pass_through(request):
            raise EngineError(f"prefill of request {request.request_id!r} was aborted")
        row = self._admit_request(request, max_new_tokens=0)
        await self._request_loop.finish(row, request)
        if row.finish_reason == "aborted":
            raise EngineError(f"prefill of request {request.request_id!r} was aborted")
        name = secrets.token_urlsafe(16)
        kv = self._handover_store[name] = _SimKv(version=row.version_starts[-1][1], token_ids=row.prompt[:-1])
        return KvHandle(url=LOCAL_URL_PREFIX + name, token="", version=kv.version, num_tokens=len(kv.token_ids))

    async def take_kv(self, name: str) -> bytes | None:
        """Return the simulated KV of a handle of this engine, once."""
        kv = self._handover_store.pop(name, None)
        return None if kv is None else msgspec.json.encode(kv)

    async def abort(self, request_id: str) -> None:
        self._gate.abort(request_id)
        await self._request_loop.abort(request_id)

    async def load_figures(self) -> LoadFigures:
        return LoadFigures(
            version=self.batch.version,
            num_running=len(self.batch),
            num_waiting=self._request_loop.num_waiting + self._gate.num_waiting,
            num_generated_tokens=self.batch.num_generated,
            running_tokens=self.batch.num_kv_tokens,
            free_kv_tokens=self.batch.num_free,
            num_places=self._settings.max_batch,
            is_asleep=self._is_asleep,
            num_prefix_queries=self.batch.num_looked_up,
            num_prefix_hits=self.batch.num_found,
        )

    # ---- UpdatableEngine

    async def load_version(self, version: int) -> float:
        """Pause for as long as the transfer of the weights would take."""
        if self._store is not None:
            await asyncio.to_thread(self._store.check_version, version)
        if version < self.version:
            raise WeightsError(f"version {version} is older than {self.version}, which is loaded: never go back")
        shape = self._worker_speed.shape
        stall_s = shape.num_params * shape.weight_bytes / LINK_BYTES_PER_S
        async with self._request_loop.between_steps:
            await self._sleep_simulated(stall_s)
            self.batch.load(version)
        self._gate.open_for(version)
        self._request_loop.wake()
        return stall_s * self._settings.time_scale

    # ---- SleepingEngine

    async def sleep(self) -> None:
        async with self._request_loop.between_steps:
            self._is_asleep = True

    async def wake_weights(self) -> None:
        """Do nothing: there are none."""

    async def resume(self) -> None:
        self._is_asleep = False
        self._request_loop.wake()

    # ---- requests

    def _admit_request(self, request: GenerateRequest, *, max_new_tokens: int) -> SimRequest:
        """Return the row of a request; raises EngineError, with the reason, if it cannot be served."""
        settings = self._settings
        self._request_loop.admit(
            request,
            max_new_tokens=max_new_tokens,
            context_length=settings.context_length,
            vocabulary=settings.vocabulary,
        )
        if request.structure is not None:
            check_structure(request.structure)
        num_tokens = len(request.token_ids) + max_new_tokens
        if num_tokens > self._worker_speed.kv_tokens:
            raise EngineError(
                f"request {request.request_id!r} needs KV for {num_tokens} tokens, but only "
                f"{self._worker_speed.kv_tokens} fit beside the weights: give the worker more GPUs"
            )
        free = settings.max_batch - len(self.batch)  # requests that will join in the next step do not count as waiting
        if settings.max_waiting is not None and self._request_loop.num_waiting >= settings.max_waiting + free:
            raise EngineRefusedError(f"{self._request_loop.num_waiting} requests wait here already")
        reply, ends_with_stop = draw_reply(
            seed=_derive_reply_seed(request),
            num=max_new_tokens,
            vocabulary=settings.vocabulary,
            stop_token_ids=request.stop_token_ids,
        )
        return SimRequest(
            prompt=list(request.token_ids),
            reply=reply,
            ends_with_stop=ends_with_stop,
            trajectory=request.trajectory,
            keep_kv_s=request.keep_kv_s,
            wants_top=request.top_logprobs > 0,
        )

    async def _prepare_kv(self, row: SimRequest, request: GenerateRequest) -> None:
        row.handed_over = request.kv is not None and await self._take_handed_over_kv(request.kv, row)

    async def _take_handed_over_kv(self, handle: KvHandle, row: SimRequest) -> bool:
        """Fetch handed-over KV; returns False if it cannot be used for any reason: the prompt is computed here."""
        if handle.version != self.version:
            return False
        kv = None
        if handle.url.startswith(LOCAL_URL_PREFIX):
            kv = self._handover_store.pop(handle.url.removeprefix(LOCAL_URL_PREFIX), None)
        elif self._fetch_kv is not None:
            try:
                kv = msgspec.json.decode(await self._fetch_kv(handle), type=_SimKv)
            except (EngineError, msgspec.DecodeError):
                return False
            await self._sleep_simulated(
                len(kv.token_ids) * self._worker_speed.shape.kv_bytes_per_token / LINK_BYTES_PER_S
            )
        return kv is not None and kv.version == self.version and kv.token_ids == row.prompt[:-1]

    def _make_chunk(self, row: SimRequest, start: int, end: int) -> CompletionChunk:
        is_last = row.is_done and end == row.num_generated
        logprob = -math.log(self._settings.vocabulary)
        return CompletionChunk(
            token_ids=row.reply[start:end],
            logprobs=[logprob] * (end - start),
            versions=row.versions(num_generated=end)[start:],
            finish_reason=row.finish_reason if is_last else None,
            remote_prefill=row.handed_over,
            top=[{token: logprob} for token in row.reply[start:end]] if row.wants_top else [],
        )

    # ---- steps

    def _can_step(self) -> bool:
        return not self._is_asleep and bool(self._request_loop.num_waiting or self.batch)

    async def _step(self) -> list[SimRequest]:
        self._admit_waiting()
        seconds = self.batch.start_step()
        self.busy_s += seconds
        await self._sleep_step(seconds)
        return self.batch.end_step(now=self._now)

    async def _drop(self, rows: Collection[SimRequest]) -> None:
        for row in rows:
            if not row.is_done:
                self.batch.drop(row, now=self._now)

    def _admit_waiting(self) -> None:
        """Admit waiting requests in their order, as far as there is room for all that they may generate."""
        while len(self.batch) < self._settings.max_batch and (row := self._request_loop.next_waiting()) is not None:
            if row.num_reserved > self.batch.num_free:
                return
            self.batch.join(self._request_loop.take_waiting(), now=self._now)

    @property
    def _now(self) -> float:
        return asyncio.get_running_loop().time() / self._settings.time_scale

    async def _sleep_simulated(self, seconds: float) -> None:
        await asyncio.sleep(seconds * self._settings.time_scale)

    async def _sleep_step(self, seconds: float) -> None:
        """Sleep for a step, less the lateness of the last timer, so that a thousand short steps take the right time."""
        loop = asyncio.get_running_loop()
        started_s, wanted_s = loop.time(), seconds * self._settings.time_scale - self._late_s
        await asyncio.sleep(max(0.0, wanted_s))
        self._late_s = min(loop.time() - started_s - wanted_s, MAX_LATENESS_S)


def _derive_reply_seed(request: GenerateRequest) -> int:
    """Return a seed from the prompt and, unless only the likeliest token may be sampled, the request's seed."""
    prompt = msgspec.msgpack.encode(request.token_ids)
    is_greedy = request.temperature == 0 or request.top_k == 1 or request.top_p < MIN_TOP_P
    return int(xxhash.xxh3_64_intdigest(prompt, seed=0 if is_greedy else request.seed % 2**64))
