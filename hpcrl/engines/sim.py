"""The simulated engine: no model, but an engine's life, as long as the cost model says that it would take.

    SimEngine     a Generator, Streamer and Updatable; what it says is drawn from the request's seed and prompt
    SimSettings   how large it is, and how fast its time goes

Continuous batching with chunked prefill, a bounded KV cache, KV kept between the turns of a trajectory, a waiting
queue by priority. It asks its event loop for the time: on hpcrl.simulate.clock a fleet's hour takes seconds, exactly.
"""

import asyncio
import heapq
import math
import secrets
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import msgspec
import xxhash

from hpcrl.cost import Pace
from hpcrl.engines.base import LOCAL, Completion, FetchKv, GenerateRequest, KvHandle, LoadFigures, Part, joined
from hpcrl.engines.check import check
from hpcrl.engines.simbatch import SimBatch, SimRow, drawn_reply
from hpcrl.errors import EngineError, EngineRefusedError, WeightsError
from hpcrl.weights.store import WeightSource

LINK_BYTES_PER_S = 25e9
"""Between two workers (one 200 Gbit/s port), for handed-over KV and for new weights."""


@dataclass(frozen=True, kw_only=True)
class SimSettings:
    """How large a simulated engine is."""

    vocabulary: int = 32000
    context_length: int = 131072
    max_batch: int = 64
    max_waiting: int | None = None
    """More are refused; None: all wait."""
    tokens_per_step: int = 2048
    """Decoded and prefilled in one step, at most."""
    time_scale: float = 1.0
    """Seconds that a simulated second takes."""


class _Kv(msgspec.Struct, frozen=True, kw_only=True):
    """What stands for KV on its way to another engine."""

    version: int
    token_ids: list[int]


class SimEngine:
    """Use it as `async with SimEngine(...) as engine`."""

    def __init__(
        self,
        pace: Pace,
        *,
        settings: SimSettings = SimSettings(),
        store: WeightSource | None = None,
        version: int = 0,
        fetch_kv: FetchKv | None = None,
    ) -> None:
        self.batch = SimBatch(pace, version=version, tokens_per_step=settings.tokens_per_step)
        self.busy_s = 0.0
        """Simulated seconds in which there was something to do."""
        self._pace = pace
        self._settings = settings
        self._store = store
        self._fetch_kv = fetch_kv
        self._rows: dict[str, SimRow] = {}
        self._answers: dict[SimRow, asyncio.Future[None]] = {}
        self._waiting: list[tuple[int, int, SimRow]] = []
        self._num_come = 0
        self._unwanted: list[SimRow] = []
        self._shelf: dict[str, _Kv] = {}
        self._paused = False
        self._wake = asyncio.Event()
        self._stepped = asyncio.Event()
        self._between_steps = asyncio.Lock()
        self._loop_task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._loop_task = asyncio.create_task(self._run(), name="simulated steps")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._loop_task is not None
        self._loop_task.cancel()
        await asyncio.wait({self._loop_task})
        for row in self._answers:
            row.failure = row.failure or "the engine was stopped"
        self._answer(list(self._answers))

    @property
    def version(self) -> int:
        return self.batch.version

    async def failed(self) -> None:
        """Wait until the engine cannot go on, and raise why."""
        assert self._loop_task is not None
        await asyncio.shield(self._loop_task)

    # ---- Generator and Streamer

    async def generate(self, request: GenerateRequest) -> Completion:
        row = self._speaking(request)
        await self._finish(row, request)
        return joined([self._part(row, start=0, end=row.num_said)])

    async def stream(self, request: GenerateRequest) -> AsyncGenerator[Part, None]:
        row = self._speaking(request)
        finish = asyncio.create_task(self._finish(row, request), name=request.request_id)
        told = 0
        try:
            while not finish.done():
                stepped = asyncio.create_task(self._stepped.wait())
                await asyncio.wait({finish, stepped}, return_when=asyncio.FIRST_COMPLETED)
                stepped.cancel()
                known = self.batch.num_said(row)
                if known > told and not row.is_done:
                    yield self._part(row, start=told, end=known)
                    told = known
            finish.result()
            yield self._part(row, start=told, end=row.num_said)
        finally:
            finish.cancel()
            await asyncio.wait({finish})

    async def prefill(self, request: GenerateRequest) -> KvHandle:
        """Compute the KV of all tokens but the last, and hold it until it is fetched."""
        row = self._admissible(request, max_new_tokens=0)
        await self._finish(row, request)
        if row.finish_reason == "aborted":
            raise EngineError(f"prefill of request {request.request_id!r} was aborted")
        name = secrets.token_urlsafe(16)
        kv = self._shelf[name] = _Kv(version=row.spoken_by[-1][1], token_ids=row.prompt[:-1])
        return KvHandle(url=LOCAL + name, token="", version=kv.version, num_tokens=len(kv.token_ids))

    async def take_kv(self, name: str) -> bytes | None:
        """What stands for the KV behind a handle of this engine, once."""
        kv = self._shelf.pop(name, None)
        return None if kv is None else msgspec.json.encode(kv)

    async def abort(self, request_id: str) -> None:
        row = self._rows.get(request_id)
        if row is not None:
            self._drop_soon(row)
            await asyncio.wait([self._answers[row]])

    async def load_figures(self) -> LoadFigures:
        return LoadFigures(
            version=self.batch.version,
            num_running=len(self.batch),
            num_waiting=len(self._waiting),
            num_generated_tokens=self.batch.num_generated,
            running_tokens=self.batch.num_kv_tokens,
            free_kv_tokens=self.batch.num_free,
        )

    # ---- Updatable

    async def pause(self) -> None:
        self._paused = True
        async with self._between_steps:
            pass

    async def resume(self) -> None:
        self._paused = False
        self._wake.set()

    async def load_version(self, version: int) -> float:
        """Stand still for as long as the weights take over the link."""
        if self._store is not None:
            with await asyncio.to_thread(self._store.reading, version):
                pass  # there is no model to put them into: that they can be read is all
        if version < self.version:
            raise WeightsError(f"version {version} is older than {self.version}, which is loaded: never go back")
        shape = self._pace.shape
        stall_s = shape.num_params * shape.weight_bytes / LINK_BYTES_PER_S
        async with self._between_steps:
            await self._pass(stall_s)
            self.batch.load(version)
        self._wake.set()
        return stall_s * self._settings.time_scale

    # ---- the life of a request

    def _speaking(self, request: GenerateRequest) -> SimRow:
        if request.max_new_tokens < 1:
            raise EngineError(f"max_new_tokens is {request.max_new_tokens}: ask for at least 1")
        return self._admissible(request, max_new_tokens=request.max_new_tokens)

    def _admissible(self, request: GenerateRequest, *, max_new_tokens: int) -> SimRow:
        """The row of a request that can be served; EngineError says what is wrong with any other."""
        settings = self._settings
        if self._loop_task is None or self._loop_task.done():
            raise EngineError("the engine is not running: its worker has to be started anew")
        if request.request_id in self._rows:
            raise EngineError(f"request_id {request.request_id!r} is being served already: give each turn its own")
        check(
            request,
            max_new_tokens=max_new_tokens,
            context_length=settings.context_length,
            vocabulary=settings.vocabulary,
        )
        num_tokens = len(request.token_ids) + max_new_tokens
        if num_tokens > self._pace.kv_tokens:
            raise EngineError(
                f"request {request.request_id!r} needs KV for {num_tokens} tokens, and {self._pace.kv_tokens} fit "
                "beside the weights: give the worker more GPUs"
            )
        free = settings.max_batch - len(self.batch)  # those who wait for the next step only are not in the way
        if settings.max_waiting is not None and len(self._waiting) >= settings.max_waiting + free:
            raise EngineRefusedError(f"{len(self._waiting)} requests wait here already")
        reply, stops = drawn_reply(
            seed=_reply_seed(request),
            num=max_new_tokens,
            vocabulary=settings.vocabulary,
            stop_token_ids=request.stop_token_ids,
        )
        return SimRow(
            prompt=list(request.token_ids),
            reply=reply,
            stops=stops,
            trajectory=request.trajectory,
            keep_kv_s=request.keep_kv_s,
            tells_top=request.top_logprobs > 0,
        )

    async def _finish(self, row: SimRow, request: GenerateRequest) -> None:
        """Put a row through the batch; a caller that goes away takes it out."""
        answer: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._rows[request.request_id], self._answers[row] = row, answer
        try:
            if request.kv is not None:
                row.handed_over = await self._fetched(request.kv, row)
            if not row.is_done:
                self._num_come += 1
                heapq.heappush(self._waiting, (request.priority, self._num_come, row))
                self._wake.set()
            await answer
        finally:
            del self._rows[request.request_id], self._answers[row]
            if not row.is_done:
                self._drop_soon(row)
        if row.failure:
            raise EngineError(f"request {request.request_id!r}: {row.failure}")

    async def _fetched(self, handle: KvHandle, row: SimRow) -> bool:
        """Get handed-over KV; False if it cannot be used, whatever the reason, and the prompt is computed here."""
        if handle.version != self.version:
            return False
        kv = None
        if handle.url.startswith(LOCAL):
            kv = self._shelf.pop(handle.url.removeprefix(LOCAL), None)
        elif self._fetch_kv is not None:
            try:
                kv = msgspec.json.decode(await self._fetch_kv(handle), type=_Kv)
            except (EngineError, msgspec.DecodeError):
                return False
            await self._pass(len(kv.token_ids) * self._pace.shape.kv_bytes_per_token / LINK_BYTES_PER_S)
        return kv is not None and kv.version == self.version and kv.token_ids == row.prompt[:-1]

    def _part(self, row: SimRow, *, start: int, end: int) -> Part:
        is_last = row.is_done and end == row.num_said
        logprob = -math.log(self._settings.vocabulary)
        return Part(
            token_ids=row.reply[start:end],
            logprobs=[logprob] * (end - start),
            versions=row.versions(num_said=end)[start:],
            finish_reason=row.finish_reason if is_last else None,
            remote_prefill=row.handed_over,
            top=[{token: logprob} for token in row.reply[start:end]] if row.tells_top else [],
        )

    def _drop_soon(self, row: SimRow) -> None:
        self._unwanted.append(row)
        self._wake.set()

    # ---- steps

    async def _run(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._unwanted or (not self._paused and (self._waiting or self.batch)):
                async with self._between_steps:
                    await self._turn()

    async def _turn(self) -> None:
        """Drop what nobody wants any more, then, unless paused, one step of the batch."""
        if self._unwanted:
            dropped, self._unwanted = self._unwanted, []
            self._waiting = [entry for entry in self._waiting if entry[2] not in dropped]
            heapq.heapify(self._waiting)
            for row in dropped:
                if not row.is_done:
                    self.batch.drop(row, now=self._now)
            self._answer(dropped)
        if self._paused:
            return
        self._admit()
        if self.batch:
            seconds = self.batch.begin_step()
            self.busy_s += seconds
            await self._pass(seconds)
            done = self.batch.end_step(now=self._now)
            self._stepped.set()
            self._stepped = asyncio.Event()
            self._answer(done)

    def _admit(self) -> None:
        """Let those in that wait, in their order, as far as there is room for all that they may come to say."""
        while self._waiting and len(self.batch) < self._settings.max_batch:
            row = self._waiting[0][2]
            if row.num_reserved > self.batch.num_free:
                return
            heapq.heappop(self._waiting)
            self.batch.join(row, now=self._now)

    def _answer(self, rows: list[SimRow]) -> None:
        for row in rows:
            answer = self._answers.get(row)
            if answer is not None and not answer.done():
                answer.set_result(None)

    @property
    def _now(self) -> float:
        return asyncio.get_running_loop().time() / self._settings.time_scale

    async def _pass(self, seconds: float) -> None:
        await asyncio.sleep(seconds * self._settings.time_scale)


def _reply_seed(request: GenerateRequest) -> int:
    """What the reply depends on: prompt and, unless it is greedy, seed."""
    prompt = msgspec.msgpack.encode(request.token_ids)
    return int(xxhash.xxh3_64_intdigest(prompt, seed=request.seed % 2**64 if request.temperature else 0))
