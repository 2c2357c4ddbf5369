"""The vLLM engine: all protocols of `hpcrl.engines.base` with its own vLLM server (hpcrl.engines.vllm.server).

    VllmEngine  the engine
    GENERATE_ROUTE, SWITCH_ROUTE, HANDLE_URL_PREFIX, ENGINE_NAME_PATTERN  names
    UPDATE_TIMEOUT_S, SHORT_TIMEOUT_S, ABORT_RETRY_INTERVAL_S, KV_TTL_S  limits

Token ids go in and token ids come out; vLLM reports which version of the weights generated each. Between pause and
resume the caches are reset and running requests are recomputed, so no token attends to keys and values of other
weights, unless the recipe keeps these. KV is handed over by vLLM's connectors, or by ours
(hpcrl.engines.vllm.kv_files_connector).
"""

import asyncio
import contextlib
import itertools
import logging
import re
import time
from collections.abc import AsyncGenerator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec
from aiohttp import ClientSession

from hpcrl.campaign_dir.workers import WorkerPlace
from hpcrl.engines.base import (
    LOCAL_URL_PREFIX,
    Completion,
    CompletionChunk,
    GenerateRequest,
    KvHandle,
    LoadFigures,
)
from hpcrl.engines.http import fetch_kv_file
from hpcrl.engines.request_checks import check_asks_for_tokens, check_request
from hpcrl.engines.structure import check_structure, read_token_names, write_grammar
from hpcrl.engines.version_gate import VersionGate, make_aborted_completion
from hpcrl.engines.vllm import kv_connectors, kv_files
from hpcrl.engines.vllm.protocol import (
    ADAPTERS_MODEL,
    ExpertForm,
    build_sampling_params,
    make_expert_form,
    parse_chunk,
    parse_completion,
    parse_metrics,
)
from hpcrl.engines.vllm.server import VllmLaunch, VllmServer
from hpcrl.errors import EngineError, EngineRequestError, WeightsError
from hpcrl.models.model_config import read_model_config, read_model_limits

GENERATE_ROUTE = "/inference/v1/generate"
SWITCH_ROUTE = "/hpcrl/switch"
"""The route that we add (hpcrl.engines.vllm.weight_route)."""
UPDATE_TIMEOUT_S = 600.0
"""The time limit of a vLLM worker for loading a version."""
SHORT_TIMEOUT_S = 60.0
ABORT_RETRY_INTERVAL_S = 0.2
"""An abort that overtakes its request has no effect, so it is repeated until the request has ended."""
KV_TTL_S = 120.0
HANDLE_URL_PREFIX = "vllm:"
"""URLs of our handles for vLLM's connectors start with this; the connector's name follows."""
ENGINE_NAME_PATTERN = re.compile(r"[A-Za-z0-9_-]+")
log = logging.getLogger(__name__)


@dataclass(eq=False)
class _ServedRequest:
    """A request in the server, which has another id there, since ours may be reused."""

    name: str
    ended: asyncio.Event = field(default_factory=asyncio.Event)


class VllmEngine:
    """A vLLM server that runs during the block of `async with VllmEngine(...) as engine`."""

    def __init__(self, launch: VllmLaunch, *, place: WorkerPlace, session: ClientSession | None = None) -> None:
        """Create the engine; `place` is where vLLM's processes find versions, and `session` fetches KV files."""
        self.version = launch.version
        self._gate = VersionGate(launch.version)
        self.server = VllmServer(launch)
        self._launch = launch
        self._place = place
        self._session = session
        self._served_requests: dict[str, _ServedRequest] = {}
        self._names = itertools.count()
        self._background_tasks: set[asyncio.Task[None]] = set()
        self._switching = asyncio.Lock()
        self._is_asleep = False
        self._is_torn = False
        """True if weights were loaded in part."""
        self._generated_before = 0
        self._pruned_at_s = 0.0
        self._model_name = launch.served_name
        """The adapters, once there are any."""

    async def __aenter__(self) -> Self:
        launch = self._launch
        await self.server.__aenter__()
        try:
            self._limits = read_model_limits(launch.model, max_model_len=launch.max_model_len)
            self._generated_before = (await self._read_server_load()).num_generated_tokens
        except BaseException:
            await self.server.__aexit__(None, None, None)
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for task in self._background_tasks:
            task.cancel()
        await self.server.__aexit__(kind, error, trace)

    async def wait_until_failed(self) -> None:
        """Wait until the server fails, and raise the error; its worker exits with it and is restarted."""
        await self.server.wait_until_failed()

    # ---- TokenGenerator and TokenStreamer

    async def generate(self, request: GenerateRequest) -> Completion:
        check_asks_for_tokens(request)
        experts = self._make_expert_form(request)
        if not await self._gate.pass_through(request):
            return make_aborted_completion()
        with self._track_request(request, max_new_tokens=request.max_new_tokens) as name:
            transfer = await self._receive_handover(request.kv)
            body = await self._make_body(request, name=name, transfer=transfer)
            answer = await self.server.post(GENERATE_ROUTE, body)
        used = _count_handed_over(answer, request.kv) if transfer else 0
        return parse_completion(answer, num_top=request.top_logprobs, remote_prefill=used > 0, experts=experts)

    def stream(self, request: GenerateRequest) -> AsyncGenerator[CompletionChunk, None]:
        check_asks_for_tokens(request)
        return self._gate.stream(request, self._stream_now)

    async def _stream_now(self, request: GenerateRequest) -> AsyncGenerator[CompletionChunk, None]:
        """Yield the chunks of a turn with the version in use; at the end they are compared with vLLM's versions."""
        streamed_versions: list[int] = []
        experts = self._make_expert_form(request)
        with self._track_request(request, max_new_tokens=request.max_new_tokens) as name:
            transfer = await self._receive_handover(request.kv)
            body = await self._make_body(request, name=name, transfer=transfer) | {"stream": True}
            async with contextlib.aclosing(self.server.stream(GENERATE_ROUTE, body)) as events:
                async for event in events:
                    chunk = parse_chunk(event, num_top=request.top_logprobs, experts=experts)
                    streamed_versions += [self.version] * len(chunk.token_ids)
                    if chunk.finish_reason is not None and chunk.versions != streamed_versions:
                        raise EngineError(
                            f"versions {streamed_versions} were streamed, but vLLM reports {chunk.versions}"
                        )
                    yield msgspec.structs.replace(chunk, versions=[self.version] * len(chunk.token_ids))

    async def prefill(self, request: GenerateRequest) -> KvHandle:
        """Compute the KV of all tokens but the last, and store it for a decode engine."""
        connector = self._launch.kv_connector
        if connector is None:
            raise EngineError("this engine hands over no KV: inference.kv_connector is not set")
        kv_name = kv_files.make_handover_name()
        leave = kv_connectors.make_leave_params(kv_name, num_held=request.num_held)
        greedy = msgspec.structs.replace(
            request,
            temperature=0.0,
            max_new_tokens=1,
            stop_token_ids=[],
            top_logprobs=0,
            top_p=1.0,
            top_k=0,
            needs_seed=False,
            structure=None,
            experts_from=None,
        )
        if not await self._gate.pass_through(request):
            raise EngineError(f"prefill of request {request.request_id!r} was aborted")
        with self._track_request(greedy, max_new_tokens=1) as name:
            body = await self._make_body(greedy, name=name, transfer=leave)
            answer = await self.server.post(GENERATE_ROUTE, body)
        done = parse_completion(answer, num_top=0, remote_prefill=False)
        transfer = kv_connectors.read_transfer_params(connector, answer, name=kv_name, address=self._launch.kv_address)
        if done.finish_reason == "aborted":
            raise EngineError(f"prefill of request {request.request_id!r} was aborted")
        self._prune_soon()
        if transfer is None:
            raise EngineError(f"the KV of request {request.request_id!r} was not saved: see {self._launch.log}")
        num_tokens, url = len(request.token_ids) - 1, HANDLE_URL_PREFIX + connector
        if self._launch.kv_dir is not None:
            url, transfer = LOCAL_URL_PREFIX + kv_name, self._describe_files(kv_name)
        return KvHandle(
            url=url,
            token="",
            version=done.versions[0],
            num_tokens=num_tokens,
            transfer=transfer,
        )

    async def take_kv(self, name: str) -> Path | None:
        """Return the KV file of one rank, for an engine on another node."""
        return None if self._launch.kv_dir is None else kv_files.read_shard_name(self._launch.kv_dir, name)

    async def abort(self, request_id: str) -> None:
        self._gate.abort(request_id)
        serving = self._served_requests.get(request_id)
        if serving is not None:
            await self._abort(serving)

    async def load_figures(self) -> LoadFigures:
        figures = await self._read_server_load()
        num_here = len(self._served_requests)
        num_waiting = min(figures.num_waiting, num_here)
        return LoadFigures(
            version=self.version,
            num_running=num_here - num_waiting,
            num_waiting=num_waiting + self._gate.num_waiting,
            num_generated_tokens=figures.num_generated_tokens - self._generated_before,
            running_tokens=round(figures.kv_tokens * figures.kv_used_share),
            free_kv_tokens=round(figures.kv_tokens * (1 - figures.kv_used_share)),
            num_places=self._launch.max_batch,
            is_asleep=self._is_asleep,
            num_prefix_queries=figures.num_prefix_queries,
            num_prefix_hits=figures.num_prefix_hits,
            num_preemptions=figures.num_preemptions,
        )

    # ---- UpdatableEngine

    async def load_version(self, version: int) -> float:
        """Load a version: it is found and checked while generation continues; generation only pauses for the switch."""
        if version < self.version:
            raise WeightsError(f"version {version} is older than {self.version}, which is loaded: never go back")
        await self._prepare_version(version)
        async with self._switching:
            started_s = time.monotonic()
            await self._switch_version(version)
            if not self._is_asleep:
                await self.server.post("/resume", limit_s=SHORT_TIMEOUT_S)
            return time.monotonic() - started_s

    async def _prepare_version(self, version: int) -> None:
        """Prepare the switch; raises WeightsError with the reason of vLLM's worker, and nothing has changed then."""
        place = self._place
        where = {"campaign": str(place.campaign.root), "job": place.job.number, "node": place.node}
        try:
            path = self.server.make_answer_path()
            info = where | {"version": version, "answer": str(path)}
            await self.server.post("/init_weight_transfer_engine", {"init_info": info}, limit_s=UPDATE_TIMEOUT_S)
            problems = await self.server.wait_for_answers(path, limit_s=UPDATE_TIMEOUT_S)
        except EngineError as error:
            raise WeightsError(f"version {version} is not loaded: {error}") from error
        if any(problems):
            raise WeightsError(f"version {version} does not fit and is not loaded: {max(problems)}")

    async def _switch_version(self, version: int) -> None:
        """Pause the server and switch; if that fails it stays paused."""
        self.server.write_version(version)
        keeps_old_kv, has_adapters = self._launch.keeps_old_kv and not self._is_asleep, self._launch.lora_rank > 0
        body = {"version": version, "keeps_old_kv": keeps_old_kv, "has_adapters": has_adapters}
        self._is_torn = True
        try:
            await self.server.post(SWITCH_ROUTE, body, limit_s=UPDATE_TIMEOUT_S)
        except EngineError as error:
            raise WeightsError(
                f"version {version} was loaded in part, the engine waits for another: {error}"
            ) from error
        await asyncio.sleep(0)  # streams first yield chunks of the old version that have just been received
        self.version, self._is_torn = version, False
        self._gate.open_for(version)
        self._model_name = ADAPTERS_MODEL if has_adapters else self._launch.served_name

    # ---- SleepingEngine

    async def sleep(self) -> None:
        """Pause, and leave the memory of the GPUs; the weights are kept in host memory: others may never be loaded."""
        async with self._switching:
            self._is_asleep = True
            await self.server.post("/sleep", limit_s=UPDATE_TIMEOUT_S, level="1", mode="keep")

    async def wake_weights(self) -> None:
        await self.server.post("/wake_up", limit_s=UPDATE_TIMEOUT_S, tags="weights")

    async def resume(self) -> None:
        """Have the memory of KV again, with which vLLM resumes; with weights of two versions it has to restart."""
        if self._is_torn:
            raise EngineError("the server woke with weights of two versions")
        await self.server.post("/wake_up", limit_s=UPDATE_TIMEOUT_S, tags="kv_cache")
        self._is_asleep = False

    # ---- inside

    @contextlib.contextmanager
    def _track_request(self, request: GenerateRequest, *, max_new_tokens: int) -> Iterator[str]:
        """Track a request while it is in the server, and abort it there if the caller is cancelled."""
        if request.request_id in self._served_requests:
            raise EngineError(f"request_id {request.request_id!r} is being served already: use a new id for each turn")
        limits = self._limits
        check_request(
            request,
            max_new_tokens=max_new_tokens,
            context_length=limits.context_length,
            vocabulary=limits.vocabulary_size,
        )
        serving = self._served_requests[request.request_id] = _ServedRequest(str(next(self._names)))
        try:
            yield serving.name
        except BaseException:
            task = asyncio.create_task(self._abort_once(serving), name="abort")
            self._background_tasks.add(task)
            task.add_done_callback(self._background_tasks.discard)
            raise
        finally:
            serving.ended.set()
            del self._served_requests[request.request_id]

    def _make_expert_form(self, request: GenerateRequest) -> ExpertForm | None:
        """Return what the answer to a request has of experts; None if it asks for none."""
        if request.experts_from is None:
            return None
        if not self._launch.reports_experts:
            raise EngineRequestError(
                f"request {request.request_id!r} asks for experts, which this engine does not report"
            )
        fields = read_model_config(self._launch.model / "config.json").fields
        return make_expert_form(fields, start=request.experts_from)

    async def _make_body(
        self, request: GenerateRequest, *, name: str, transfer: dict[str, Any] | None
    ) -> dict[str, Any]:
        grammar = await asyncio.to_thread(self._write_grammar, request) if request.structure else None
        sampling = build_sampling_params(
            request, max_new_tokens=request.max_new_tokens, grammar=grammar, has_seeds=self._launch.has_seeds
        )
        body = {
            "model": self._model_name,
            "request_id": name,
            "token_ids": request.token_ids,
            "sampling_params": sampling,
            "cache_salt": "any version" if self._launch.keeps_old_kv else f"version {self.version}",
            "priority": request.priority,
        }
        return body if transfer is None else body | {"kv_transfer_params": transfer}

    def _write_grammar(self, request: GenerateRequest) -> str:
        assert request.structure is not None
        check_structure(request.structure)
        return write_grammar(
            request.structure,
            token_names=read_token_names(self._launch.model / "tokenizer.json"),
            stop_token_ids=request.stop_token_ids,
            answered=request.token_ids[len(request.token_ids) - request.num_answered :],
        )

    async def _receive_handover(self, handle: KvHandle | None) -> dict[str, Any] | None:
        """Return vLLM's parameters for a handle; None if it is of another version or another kind of engine."""
        if handle is None or handle.version != self.version:
            return None
        if self._launch.kv_dir is not None:
            return await self._receive_files(handle, self._launch.kv_dir)
        if handle.url != f"{HANDLE_URL_PREFIX}{self._launch.kv_connector}":
            return None
        return kv_connectors.make_fetch_params(handle.transfer)

    def _describe_files(self, kv_name: str) -> dict[str, Any]:
        """Return what another engine needs to find the files of a handover."""
        assert self._launch.kv_dir is not None
        return {"name": kv_name, "engine": self._launch.kv_dir.name, "node": self._place.node}

    async def _receive_files(self, handle: KvHandle, kv_dir: Path) -> dict[str, Any] | None:
        """Bring the files of a handover into our directory; None if that fails, and the prompt is computed here."""
        transfer = handle.transfer or {}
        name, engine = transfer.get("name"), transfer.get("engine")
        if not (isinstance(name, str) and kv_files.is_handover_name(name) and isinstance(engine, str)):
            return None
        is_near = transfer.get("node") == self._place.node and ENGINE_NAME_PATTERN.fullmatch(engine) is not None
        for rank in range(self.server.num_ranks):
            source, target = (kv_files.shard_path(one, name, rank=rank) for one in (kv_dir.parent / engine, kv_dir))
            try:
                if is_near:
                    source.rename(target)
                else:
                    await self._fetch_file(f"{handle.url}.{rank}", target, token=handle.token)
            except (OSError, EngineError) as error:
                log.warning("handed-over KV %s is not used, the prompt is computed here: %s", name, error)
                return None
        self._prune_soon()
        return kv_connectors.make_fetch_params({"name": name})

    async def _fetch_file(self, url: str, path: Path, *, token: str) -> None:
        if self._session is None:
            raise EngineError(f"{url} cannot be fetched: this engine has no connections")
        await fetch_kv_file(self._session, url, path, token=token, max_bytes=self._launch.kv_disk_bytes)

    async def _abort(self, serving: _ServedRequest) -> None:
        while not serving.ended.is_set():
            await self._abort_once(serving)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(serving.ended.wait(), ABORT_RETRY_INTERVAL_S)

    async def _abort_once(self, serving: _ServedRequest) -> None:
        with contextlib.suppress(EngineError):  # if the server is gone, the request itself reports that
            name = f"generate-tokens-{serving.name}"
            await self.server.post("/abort_requests", {"request_ids": [name]}, limit_s=SHORT_TIMEOUT_S)

    async def _read_server_load(self) -> Any:
        return parse_metrics(await self.server.get("/metrics", limit_s=SHORT_TIMEOUT_S))

    def _prune_soon(self) -> None:
        """Prune the KV directory in the background, at most once a second."""
        directory, now = self._launch.kv_dir, time.monotonic()
        if directory is None or now - self._pruned_at_s < 1.0:
            return
        self._pruned_at_s = now
        task = asyncio.create_task(_prune_quietly(directory, max_bytes=self._launch.kv_disk_bytes), name="prune")
        self._background_tasks.add(task)
        task.add_done_callback(self._background_tasks.discard)


async def _prune_quietly(directory: Path, *, max_bytes: int) -> None:
    with contextlib.suppress(OSError):  # if it cannot be read, nothing can be saved there, and prefill reports that
        await asyncio.to_thread(kv_files.prune_directory, directory, max_bytes=max_bytes, ttl_s=KV_TTL_S)


def _count_handed_over(answer: Any, handle: KvHandle | None) -> int:
    """Count the tokens of the prefill engine: as our connector reports, else by vLLM's count of cached tokens."""
    params = answer.get("kv_transfer_params") or {}
    if "num_loaded" in params:
        return int(params["num_loaded"])
    details = (answer.get("usage") or {}).get("prompt_tokens_details") or {}
    cached = int(details.get("cached_tokens") or 0)
    return cached if handle is not None and cached >= handle.num_tokens > 0 else 0
