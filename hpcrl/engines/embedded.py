"""The embedded engine: a transformers causal LM in this process, on CPU or one GPU, with continuous batching.

    load_model        the model of a directory, ready to generate
    EmbeddedEngine    requests come and go as asyncio calls; one thread of its own does the torch work, a step at a
                      time, and everything that changes the batch happens between two steps

The batch itself is hpcrl.engines.batch.
"""

import asyncio
import time
from bisect import insort
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import torch
from transformers import AutoModelForCausalLM

from hpcrl.engines.base import (
    LOCAL,
    Completion,
    FetchKv,
    GenerateRequest,
    KvHandle,
    LoadFigures,
    Part,
    joined,
)
from hpcrl.engines.batch import Batch, Row
from hpcrl.engines.check import check
from hpcrl.engines.kv import KvShelf, RowKv, pack, unpack
from hpcrl.errors import EngineError, WeightsError
from hpcrl.weights.store import WeightSource

T = TypeVar("T")


def load_model(directory: Path, *, device: str | None = None) -> Any:
    """The causal LM in `directory`, in float32: what the trainer publishes, bit for bit."""
    place = device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        model = AutoModelForCausalLM.from_pretrained(
            directory,
            dtype=torch.float32,
            attn_implementation="sdpa",
            local_files_only=True,
        )
    except (OSError, ValueError) as error:
        raise EngineError(f"no causal LM can be loaded from {directory}: {error}") from error
    return model.to(place).eval().requires_grad_(False)


class EmbeddedEngine:
    """Use it as `async with EmbeddedEngine(...) as engine`; it is a Generator and an Updatable."""

    def __init__(
        self,
        model: Any,
        *,
        store: WeightSource,
        max_batch: int = 64,
        version: int = 0,
        fetch_kv: FetchKv | None = None,
        prefix_bytes: int = 256 << 20,
        shelf_bytes: int = 1 << 30,
        shelf_ttl_s: float = 60.0,
    ) -> None:
        self._batch = Batch(model, version=version, prefix_bytes=prefix_bytes)
        self._store = store
        self._max_batch = max_batch
        self._fetch_kv = fetch_kv
        self._shelf = KvShelf(ttl_s=shelf_ttl_s, max_bytes=shelf_bytes)
        self._rows: dict[str, Row] = {}
        self._answers: dict[Row, asyncio.Future[None]] = {}
        self._waiting: list[Row] = []
        self._unwanted: set[Row] = set()
        self._paused = False
        self._wake = asyncio.Event()
        self._stepped = asyncio.Event()
        """Set and replaced after every step, for those who tell a turn while it is said."""
        self._between_steps = asyncio.Lock()
        self._loading = asyncio.Lock()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="engine")
        self._loop_task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._loop_task = asyncio.create_task(self._run(), name="engine steps")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._loop_task is not None
        self._loop_task.cancel()
        await asyncio.gather(self._loop_task, return_exceptions=True)
        self._fail_all("the engine was stopped")
        self._thread.shutdown()

    @property
    def version(self) -> int:
        return self._batch.version

    async def failed(self) -> None:
        """Wait until the engine cannot go on, and raise why; a worker ends with it, to be started anew."""
        assert self._loop_task is not None
        await asyncio.shield(self._loop_task)

    # ---- Generator

    async def generate(self, request: GenerateRequest) -> Completion:
        row = self._speaking(request)
        await self._finish(row, request)
        return joined([_said(row, start=0, end=len(row.versions))])

    async def stream(self, request: GenerateRequest) -> AsyncGenerator[Part, None]:
        row = self._speaking(request)
        finish = asyncio.create_task(self._finish(row, request), name=request.request_id)
        told = 0
        try:
            while not finish.done():
                stepped = asyncio.ensure_future(self._stepped.wait())
                await asyncio.wait({finish, stepped}, return_when=asyncio.FIRST_COMPLETED)
                stepped.cancel()
                known = len(row.versions)  # the last of a row's lists to grow
                if known > told and not row.is_done:
                    yield _said(row, start=told, end=known)
                    told = known
            finish.result()
            yield _said(row, start=told, end=len(row.versions))
        finally:
            finish.cancel()
            await asyncio.wait({finish})

    def _speaking(self, request: GenerateRequest) -> Row:
        if request.max_new_tokens < 1:
            raise EngineError(f"max_new_tokens is {request.max_new_tokens}: ask for at least 1")
        return self._admissible(request, max_new_tokens=request.max_new_tokens)

    async def prefill(self, request: GenerateRequest) -> KvHandle:
        """Compute the KV of all tokens but the last, and hold it until it is fetched or has become old."""
        row = self._admissible(request, max_new_tokens=0)
        await self._finish(row, request)
        if row.kv is None or row.finish_reason == "aborted":
            raise EngineError(f"prefill of request {request.request_id!r} was aborted")
        name = self._shelf.put(row.kv)
        return KvHandle(url=LOCAL + name, token="", version=row.kv.version, num_tokens=len(row.kv.token_ids))

    async def take_kv(self, name: str) -> bytes | None:
        """The KV behind a handle of this engine, once."""
        kv = self._shelf.take(name)
        return None if kv is None else await asyncio.to_thread(pack, kv)

    async def abort(self, request_id: str) -> None:
        row = self._rows.get(request_id)
        if row is not None:
            self._drop_soon(row)
            await asyncio.wait([self._answers[row]])

    async def load_figures(self) -> LoadFigures:
        return LoadFigures(
            version=self._batch.version,
            num_running=len(self._batch.rows),
            num_waiting=len(self._waiting),
            num_generated_tokens=self._batch.num_generated,
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
        """Found and checked while generation goes on with the old weights, copied while it goes on with the new ones.

        Until they are copied they are used where they lie. The step after the update computes the KV anew.
        """
        async with self._loading:
            with ExitStack() as reading:
                tensors = await asyncio.to_thread(reading.enter_context, self._store.reading(version))
                async with self._between_steps:
                    began = time.monotonic()
                    if version < self.version:
                        raise WeightsError(
                            f"version {version} is older than {self.version}, which is loaded: never go back"
                        )
                    still = partial(self._store.still, version)
                    loan = await self._in_thread(lambda: self._batch.load(tensors, version=version, still=still))
                    stall_s = time.monotonic() - began
                self._wake.set()
                await asyncio.to_thread(loan.copy)
                async with self._between_steps:
                    began = time.monotonic()
                    await self._in_thread(lambda: self._batch.settle(loan))
                    stall_s += time.monotonic() - began
            return stall_s

    # ---- the life of a request

    async def _finish(self, row: Row, request: GenerateRequest) -> None:
        """Put a request through the batch; a caller that goes away takes it out."""
        answer: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._rows[request.request_id], self._answers[row] = row, answer
        try:
            if request.kv is not None:
                row.kv = await self._handed_over(request.kv)
            if not row.is_done:
                insort(self._waiting, row, key=lambda other: other.priority)  # equals keep their order
                self._wake.set()
            await answer
        finally:
            del self._rows[request.request_id], self._answers[row]
            if not row.is_done:
                self._drop_soon(row)
        if row.failure:
            raise EngineError(f"request {request.request_id!r}: {row.failure}")

    def _admissible(self, request: GenerateRequest, *, max_new_tokens: int) -> Row:
        """The row of a request that can be served; EngineError says what is wrong with any other."""
        if self._loop_task is None or self._loop_task.done():
            raise EngineError("the engine is not running: its worker has to be started anew")
        if request.request_id in self._rows:
            raise EngineError(f"request_id {request.request_id!r} is being served already: give each turn its own")
        context_length, vocabulary = self._batch.context_length, self._batch.num_tokens_known
        check(request, max_new_tokens=max_new_tokens, context_length=context_length, vocabulary=vocabulary)
        return Row(
            token_ids=list(request.token_ids),
            num_prompt=len(request.token_ids),
            max_new_tokens=max_new_tokens,
            temperature=request.temperature,
            seed=request.seed,
            stop_token_ids=frozenset(request.stop_token_ids),
            top_p=request.top_p,
            top_k=request.top_k,
            top_logprobs=request.top_logprobs,
            priority=request.priority,
        )

    async def _handed_over(self, handle: KvHandle) -> RowKv | None:
        """The KV behind a handle, or None: whatever goes wrong with it, the prompt is computed here instead."""
        if handle.version != self.version:
            return None
        if handle.url.startswith(LOCAL):
            return self._shelf.take(handle.url.removeprefix(LOCAL))
        if self._fetch_kv is None:
            return None
        try:
            return await asyncio.to_thread(unpack, await self._fetch_kv(handle))
        except EngineError:
            return None

    def _drop_soon(self, row: Row) -> None:
        self._unwanted.add(row)
        self._wake.set()

    # ---- steps

    async def _run(self) -> None:
        try:
            while True:
                await self._wake.wait()
                self._wake.clear()
                while self._has_work():
                    async with self._between_steps:
                        await self._turn()
        except Exception as error:
            self._fail_all(f"the engine failed with {type(error).__name__}: {error}")
            raise

    def _has_work(self) -> bool:
        return bool(self._unwanted) or (not self._stands_still and bool(self._waiting or self._batch.rows))

    @property
    def _stands_still(self) -> bool:
        """Paused, or without whole weights."""
        return self._paused or self._batch.is_torn

    async def _turn(self) -> None:
        """Drop what nobody wants any more, then, unless paused, one step of the batch."""
        if self._unwanted:
            dropped, self._unwanted = self._unwanted, set()
            self._waiting = [row for row in self._waiting if row not in dropped]
            await self._in_thread(lambda: self._batch.drop(dropped))
            self._answer(dropped)
        if not self._stands_still:
            room = self._max_batch - len(self._batch.rows)
            joining, self._waiting = self._waiting[:room], self._waiting[room:]
            self._answer(await self._in_thread(lambda: self._batch.advance(joining)))
            self._stepped.set()
            self._stepped = asyncio.Event()

    def _answer(self, rows: "list[Row] | set[Row]") -> None:
        for row in rows:
            answer = self._answers.get(row)
            if answer is not None and not answer.done():
                answer.set_result(None)

    def _fail_all(self, why: str) -> None:
        for row in self._answers:
            row.failure = row.failure or why
        self._answer(list(self._answers))

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)


def _said(row: Row, *, start: int, end: int) -> Part:
    """What a row has said, from its token `start` to `end`."""
    return Part(
        token_ids=row.token_ids[row.num_prompt + start : row.num_prompt + end],
        logprobs=row.logprobs[start:end],
        versions=row.versions[start:end],
        finish_reason=row.finish_reason,
        remote_prefill=row.remote_prefill,
        top=row.top[start:end],
    )
