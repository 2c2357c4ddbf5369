"""The embedded engine: a transformers causal LM in this process, on CPU or one GPU, with continuous batching.

    load_model      load the model of a directory, ready to generate
    EmbeddedEngine  an asyncio API; a separate thread does the torch work, one step at a time

Requests are queued in hpcrl.engines.request_loop; the batch is in hpcrl.engines.embedded.batch.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import torch
from transformers import AutoModelForCausalLM

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
from hpcrl.engines.embedded.batch import RunningBatch, RunningRequest
from hpcrl.engines.embedded.grammar import GrammarCompiler
from hpcrl.engines.embedded.kv_cache import HandoverStore, RowKv, pack_kv, unpack_kv
from hpcrl.engines.request_checks import check_asks_for_tokens, check_scored_tokens, check_tokenizer_fits
from hpcrl.engines.request_loop import LoopHooks, RequestLoop
from hpcrl.engines.version_gate import VersionGate, make_aborted_completion
from hpcrl.errors import EngineError, EngineRequestError, WeightsError
from hpcrl.models.weight_files import read_stored_tensors
from hpcrl.spool.routed_experts import ExpertSpan, make_span
from hpcrl.weights.stores.store import WeightSource

T = TypeVar("T")


def load_model(directory: Path, *, device: str | None = None) -> Any:
    """Load the causal LM in `directory` in float32, bit for bit as the trainer publishes it."""
    place = device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        check_tokenizer_fits(directory)
        model = AutoModelForCausalLM.from_pretrained(
            directory,
            dtype=torch.float32,
            attn_implementation="sdpa",
            local_files_only=True,
            use_safetensors=True,
        )
    except (OSError, ValueError) as error:
        raise EngineError(f"no causal LM can be loaded from {directory}: {error}") from error
    except RuntimeError as error:  # the log has transformers' table of what does not fit
        raise EngineError(f"the weights in {directory} do not fit its config.json: download both again") from error
    return model.to(place).eval().requires_grad_(False)


class EmbeddedEngine:
    """An InferenceEngine, UpdatableEngine and SleepingEngine, used as `async with EmbeddedEngine(...) as engine`."""

    def __init__(
        self,
        model: Any,
        *,
        store: WeightSource | None,
        max_batch: int = 64,
        version: int = 0,
        fetch_kv: FetchKv | None = None,
        prefix_bytes: int = 256 << 20,
        max_handover_bytes: int = 1 << 30,
        handover_ttl_s: float = 60.0,
        records_experts: bool = False,
    ) -> None:
        """Make an engine; with `records_experts` requests may ask for the experts that tokens were sent to."""
        model_dir = Path(model.name_or_path)
        self._batch = RunningBatch(
            model,
            version=version,
            prefix_bytes=prefix_bytes,
            stored=read_stored_tensors(model, model_dir),
            records_experts=records_experts,
        )
        self._records_experts = records_experts
        self._compiler = GrammarCompiler(model_dir / "tokenizer.json", vocabulary=self._batch.vocabulary_size)
        self._store = store
        self._max_batch = max_batch
        self._fetch_kv = fetch_kv
        self._handover_store = HandoverStore(ttl_s=handover_ttl_s, max_bytes=max_handover_bytes)
        self._request_loop = RequestLoop(LoopHooks(can_step=self._can_step, step=self._step, drop=self._drop))
        self._loading = asyncio.Lock()
        self._gate = VersionGate(version)
        self._is_asleep = False
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="engine")

    async def __aenter__(self) -> Self:
        self._request_loop.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._request_loop.stop()
        self._thread.shutdown()

    @property
    def version(self) -> int:
        return self._batch.version

    async def wait_until_failed(self) -> None:
        """Wait until the engine fails, and raise the error; its worker exits with it and is restarted."""
        await self._request_loop.wait_until_failed()

    # ---- TokenGenerator, TokenStreamer and TokenScorer

    async def generate(self, request: GenerateRequest) -> Completion:
        check_asks_for_tokens(request)
        if not await self._gate.pass_through(request):
            return make_aborted_completion()
        row = self._admit_request(request, max_new_tokens=request.max_new_tokens)
        await self._request_loop.finish(row, request, prepare=partial(self._prepare_row, row, request))
        return join_chunks([_make_chunk(row, 0, _count_generated(row))])

    def stream(self, request: GenerateRequest) -> AsyncGenerator[CompletionChunk, None]:
        check_asks_for_tokens(request)
        return self._gate.stream(request, self._stream_now)

    def _stream_now(self, request: GenerateRequest) -> AsyncGenerator[CompletionChunk, None]:
        row = self._admit_request(request, max_new_tokens=request.max_new_tokens)
        prepare = partial(self._prepare_row, row, request)
        return self._request_loop.stream(
            row, request, count_generated=_count_generated, make_chunk=_make_chunk, prepare=prepare
        )

    async def prefill(self, request: GenerateRequest) -> KvHandle:
        """Compute the KV of all tokens but the last, and hold it until it is fetched or expires."""
        if not await self._gate.pass_through(request):
            raise EngineError(f"prefill of request {request.request_id!r} was aborted")
        row = self._admit_request(request, max_new_tokens=0)
        await self._request_loop.finish(row, request)
        if row.kv is None or row.finish_reason == "aborted":
            raise EngineError(f"prefill of request {request.request_id!r} was aborted")
        name = self._handover_store.put(row.kv)
        return KvHandle(url=LOCAL_URL_PREFIX + name, token="", version=row.kv.version, num_tokens=len(row.kv.token_ids))

    async def compute_logprobs(self, token_ids: Sequence[int]) -> list[float]:
        """Return the log-prob of each token after the first, computed between two steps of generation."""
        batch = self._batch
        check_scored_tokens(token_ids, context_length=batch.context_length, vocabulary=batch.vocabulary_size)
        async with self._request_loop.between_steps:
            return await self._in_thread(lambda: batch.compute_logprobs(token_ids))

    async def take_kv(self, name: str) -> bytes | None:
        """Return the KV of a handle of this engine, once."""
        kv = self._handover_store.take(name)
        return None if kv is None else await asyncio.to_thread(pack_kv, kv)

    async def abort(self, request_id: str) -> None:
        self._gate.abort(request_id)
        await self._request_loop.abort(request_id)

    async def load_figures(self) -> LoadFigures:
        return LoadFigures(
            version=self._batch.version,
            num_running=len(self._batch.rows),
            num_waiting=self._request_loop.num_waiting + self._gate.num_waiting,
            num_generated_tokens=self._batch.num_generated,
            running_tokens=sum(len(row.token_ids) for row in self._batch.rows),
            num_places=self._max_batch,
            is_asleep=self._is_asleep,
        )

    # ---- UpdatableEngine

    async def load_version(self, version: int) -> float:
        """Load a version: generation only pauses to switch and to finish.

        The weights are found and checked while generation continues with the old ones, and copied while it continues
        with the new ones; until then they are used where they are stored. The next step recomputes the KV.
        """
        store = self._store
        if store is None:
            raise WeightsError(f"version {version} cannot be loaded: the weights of this engine never change")
        async with self._loading:
            with ExitStack() as reading:
                tensors = await asyncio.to_thread(reading.enter_context, store.read_version(version))
                async with self._request_loop.between_steps:
                    started_s = time.monotonic()
                    if version < self.version:
                        raise WeightsError(
                            f"version {version} is older than {self.version}, which is loaded: never go back"
                        )
                    is_intact = partial(store.is_intact, version)
                    borrowed = await self._in_thread(
                        lambda: self._batch.load(tensors, version=version, is_intact=is_intact)
                    )
                    stall_s = time.monotonic() - started_s
                self._gate.open_for(version)
                self._request_loop.wake()
                async with self._request_loop.between_steps:
                    pass  # the first step recomputes all KV, with the memory bandwidth to itself
                await asyncio.to_thread(borrowed.copy)
                async with self._request_loop.between_steps:
                    started_s = time.monotonic()
                    await self._in_thread(lambda: self._batch.finish_load(borrowed))
                    stall_s += time.monotonic() - started_s
            return stall_s

    # ---- SleepingEngine

    async def sleep(self) -> None:
        async with self._loading, self._request_loop.between_steps:
            self._is_asleep = True
            self._handover_store.clear()
            await self._in_thread(self._batch.sleep)

    async def wake_weights(self) -> None:
        """Do nothing: a version is loaded in host memory, where it is, and then moved."""

    async def resume(self) -> None:
        async with self._loading, self._request_loop.between_steps:
            await self._in_thread(self._batch.wake)
            self._is_asleep = False
        self._request_loop.wake()

    # ---- requests

    def _admit_request(self, request: GenerateRequest, *, max_new_tokens: int) -> RunningRequest:
        """Return the row of a request; raises EngineError, with the reason, if it cannot be served."""
        self._request_loop.admit(
            request,
            max_new_tokens=max_new_tokens,
            context_length=self._batch.context_length,
            vocabulary=self._batch.vocabulary_size,
        )
        if request.experts_from is not None and not self._records_experts:
            raise EngineRequestError(
                f"request {request.request_id!r} asks for experts, which this engine does not record"
            )
        return RunningRequest(
            token_ids=list(request.token_ids),
            num_prompt=len(request.token_ids),
            max_new_tokens=max_new_tokens,
            temperature=request.temperature,
            seed=request.seed,
            stop_token_ids=frozenset(request.stop_token_ids),
            top_p=request.top_p,
            top_k=request.top_k,
            top_logprobs=request.top_logprobs,
            keep_kv_s=request.keep_kv_s,
            experts_from=request.experts_from,
        )

    async def _prepare_row(self, row: RunningRequest, request: GenerateRequest) -> None:
        if request.structure is not None:
            row.matcher = await asyncio.to_thread(self._compiler.compile, request)
        row.kv = await self._take_handed_over_kv(request.kv) if request.kv else None

    async def _take_handed_over_kv(self, handle: KvHandle) -> RowKv | None:
        """Return the KV of a handle, or None if that fails for any reason: the prompt is then computed here."""
        if handle.version != self.version:
            return None
        if handle.url.startswith(LOCAL_URL_PREFIX):
            return self._handover_store.take(handle.url.removeprefix(LOCAL_URL_PREFIX))
        if self._fetch_kv is None:
            return None
        try:
            return await asyncio.to_thread(unpack_kv, await self._fetch_kv(handle))
        except EngineError:
            return None

    # ---- steps

    def _can_step(self) -> bool:
        """Return whether there is work; there is none while the weights are torn or asleep."""
        return not (self._batch.is_torn or self._is_asleep) and bool(self._request_loop.num_waiting or self._batch.rows)

    async def _step(self) -> list[RunningRequest]:
        room = self._max_batch - len(self._batch.rows)
        joining = [self._request_loop.take_waiting() for _ in range(min(room, self._request_loop.num_waiting))]
        return await self._in_thread(lambda: self._batch.advance(joining))

    async def _drop(self, rows: Collection[RunningRequest]) -> None:
        await self._in_thread(lambda: self._batch.drop(rows))

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)


def _count_generated(row: RunningRequest) -> int:
    return len(row.versions)  # the last of a row's lists to grow


def _make_chunk(row: RunningRequest, start: int, end: int) -> CompletionChunk:
    """Return the generated tokens `start` to `end` of a row."""
    return CompletionChunk(
        token_ids=row.token_ids[row.num_prompt + start : row.num_prompt + end],
        logprobs=row.logprobs[start:end],
        versions=row.versions[start:end],
        finish_reason=row.finish_reason,
        remote_prefill=row.remote_prefill,
        top=row.top[start:end],
        experts=_list_experts(row, start, end),
    )


def _list_experts(row: RunningRequest, start: int, end: int) -> list[ExpertSpan]:
    """Return the experts that are known with the generated tokens `start` to `end`."""
    if row.experts_from is None:
        return []
    first = row.num_prompt + start - 1 if start else row.experts_from
    experts = row.experts.read(first, row.num_prompt + end - 1)
    return [make_span(first, experts)] if len(experts) else []
