"""The HTTP server of an engine, and its client.

    ServedEngine         the engine behind the server
    serve_over_http      POST /generate /stream /prefill /abort, GET /load /kv/NAME; each with the bearer token
    make_prover          a server proves to its clients that it has the token
    RemoteEngine         the client: a TokenGenerator and TokenStreamer
    make_client_session  its connections
    choose_status        the status of an engine's error
    make_kv_fetcher      fetch handed-over KV for an engine that decodes
    fetch_kv_file        the same into a file
    MAX_BODY_BYTES, SHORT_TIMEOUT_S, KV_FETCH_TIMEOUT_S, STATUS_FULL, STATUS_UNFIT  limits and statuses

Bodies are JSON of the structs in hpcrl.engines.base (a stream has one chunk per line); KV is sent as safetensors. A
request that cannot be parsed is answered with 400, one that no engine can serve with 422, one that this engine has no
room for with 503, one that it failed to serve with 500, each with {"error": "one line"}. A request whose client
disconnects is cancelled.
"""

import asyncio
import contextlib
import hmac
import ipaddress
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Protocol, TypeVar

import aiohttp
import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from hpcrl.campaign_dir.endpoints import (
    HELLO_PATH,
    NONCE_HEADER,
    PROOF_HEADER,
    EngineEndpoint,
    make_proof,
)
from hpcrl.engines.base import (
    LOCAL_URL_PREFIX,
    MAX_LOAD_AGE_S,
    Completion,
    CompletionChunk,
    FetchKv,
    GenerateRequest,
    KvHandle,
    LoadFigures,
    TokenGenerator,
    TokenStreamer,
)
from hpcrl.engines.proved_connector import ProvedConnector, UnprovedServerError
from hpcrl.errors import EngineError, EngineRefusedError, EngineRequestError
from hpcrl.system.json_records import decode_record
from hpcrl.system.tls import name_scheme, open_client_tls, open_server_tls

T = TypeVar("T")
MAX_BODY_BYTES = 64 << 20
"""A prompt of a million tokens is under 10 MB of JSON."""
SHORT_TIMEOUT_S = 30.0
"""The time limit of every request but a generation."""
STATUS_FULL = 503
"""The status of a request that may be sent to another engine."""
STATUS_UNFIT = 422
"""The status of a request that no engine can serve."""
KV_FETCH_TIMEOUT_S = 20.0
"""The time limit of a fetch; the engine that decodes then computes the prompt itself."""


class ServedEngine(TokenGenerator, TokenStreamer, Protocol):
    """An engine that can be served: it generates, streams, and hands over the KV it holds."""

    async def take_kv(self, name: str) -> bytes | Path | None:
        """Return the KV of this name, or the file that has it and is removed once it is sent."""


class _AbortRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    request_id: str


class _EmptyAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to a request that returns nothing."""


class _ErrorAnswer(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    error: str
    status: int = 500
    """The status that an error in a stream would have before it started."""


# ---- server


async def serve_over_http(
    engine: ServedEngine,
    *,
    host: str,
    token: str,
    port: int = 0,
    max_load_age_s: float = MAX_LOAD_AGE_S,
    certificate: Path | None = None,
) -> tuple[str, web.AppRunner]:
    """Serve on `host` (port 0: any free one) until the runner's cleanup(); returns the URL for clients."""
    app = web.Application(middlewares=[_require_token(token), _answer_errors], client_max_size=MAX_BODY_BYTES)
    app.on_response_prepare.append(make_prover(token))
    runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=1.0)
    handlers = _EngineHandlers(engine, token=token, max_load_age_s=max_load_age_s)
    app.router.add_get(HELLO_PATH, handlers.hello)
    app.router.add_post("/generate", handlers.generate)
    app.router.add_post("/stream", handlers.stream)
    app.router.add_post("/prefill", handlers.prefill)
    app.router.add_post("/abort", handlers.abort)
    app.router.add_get("/load", handlers.load)
    app.router.add_get("/kv/{name}", handlers.kv)
    await runner.setup()
    try:
        await web.TCPSite(runner, host, port, ssl_context=open_server_tls(certificate)).start()
    except OSError as error:
        await runner.cleanup()
        raise EngineError(f"cannot listen on {host}:{port}: {error.strerror or error}") from error
    handlers.url = f"{name_scheme(certificate)}://{_format_host(host)}:{runner.addresses[0][1]}"
    return handlers.url, runner


class _EngineHandlers:
    """The routes of one engine."""

    def __init__(self, engine: ServedEngine, *, token: str, max_load_age_s: float) -> None:
        self.url = ""
        self._engine, self._token, self._max_load_age_s = engine, token, max_load_age_s
        self._load: tuple[float, LoadFigures] | None = None
        """The last figures, and when they were asked for."""
        self._asking = asyncio.Lock()

    async def hello(self, _: web.Request) -> web.Response:
        return _make_json_response(_EmptyAnswer())

    async def generate(self, http: web.Request) -> web.Response:
        return _make_json_response(await self._engine.generate(await _decode_body(http, GenerateRequest)))

    async def stream(self, http: web.Request) -> web.StreamResponse:
        chunks = self._engine.stream(await _decode_body(http, GenerateRequest))
        response = web.StreamResponse(headers={"Content-Type": "application/x-ndjson"})
        async with contextlib.aclosing(chunks):
            async for chunk in _append_error(chunks):
                if not response.prepared:  # until here a refusal can still have its own status
                    await response.prepare(http)
                await response.write(msgspec.json.encode(chunk) + b"\n")
        return response

    async def prefill(self, http: web.Request) -> web.Response:
        handle = await self._engine.prefill(await _decode_body(http, GenerateRequest))
        if handle.url.startswith(LOCAL_URL_PREFIX):
            url = f"{self.url}/kv/{handle.url.removeprefix(LOCAL_URL_PREFIX)}"
            handle = msgspec.structs.replace(handle, url=url, token=self._token)
        return _make_json_response(handle)

    async def abort(self, http: web.Request) -> web.Response:
        await self._engine.abort((await _decode_body(http, _AbortRequest)).request_id)
        return _make_json_response(_EmptyAnswer())

    async def load(self, _: web.Request) -> web.Response:
        async with self._asking:
            now = time.monotonic()
            if self._load is None or now - self._load[0] >= self._max_load_age_s:
                self._load = now, await self._engine.load_figures()
            return _make_json_response(self._load[1])

    async def kv(self, http: web.Request) -> web.StreamResponse:
        data = await self._engine.take_kv(http.match_info["name"])
        if data is None:
            raise web.HTTPNotFound(text="this KV has been fetched already, or has expired")
        if isinstance(data, Path):
            return await _send_file(http, data)
        return web.Response(body=data, content_type="application/octet-stream")


async def _send_file(http: web.Request, path: Path) -> web.StreamResponse:
    """Send a file and remove it."""
    try:
        response = web.FileResponse(path)
        await response.prepare(http)
    finally:
        with contextlib.suppress(OSError):
            path.unlink()
    return response


async def _append_error(chunks: AsyncIterator[CompletionChunk]) -> AsyncIterator[CompletionChunk | _ErrorAnswer]:
    """Yield the chunks; if the engine fails after the first one, the error is the last line."""
    has_started = False
    try:
        async for chunk in chunks:
            yield chunk
            has_started = True
    except EngineError as error:
        if not has_started:
            raise
        yield _ErrorAnswer(error=str(error), status=choose_status(error))


async def _decode_body(http: web.Request, kind: type[T]) -> T:
    try:
        return decode_record(await http.read(), kind)
    except msgspec.DecodeError as error:
        raise web.HTTPBadRequest(text=f"the body is not a valid {kind.__name__.strip('_')}: {error}") from None


def _make_json_response(value: msgspec.Struct) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), content_type="application/json")


def make_prover(token: str) -> Callable[[web.Request, web.StreamResponse], Awaitable[None]]:
    """Return a function that signs the nonce of a request in the headers of its response."""

    async def prove(http: web.Request, response: web.StreamResponse) -> None:
        if (nonce := http.headers.get(NONCE_HEADER)) is not None:
            response.headers[PROOF_HEADER] = make_proof(token, nonce)

    return prove


def _require_token(token: str) -> Middleware:
    """Return a middleware that rejects requests without the token, which it compares in constant time."""
    expected = f"Bearer {token}".encode()

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        seen = request.headers.get("Authorization", "").encode("utf-8", "surrogateescape")
        if request.path != HELLO_PATH and not hmac.compare_digest(seen, expected):
            return _make_error_response(401, "send the header `Authorization: Bearer` with the endpoint's token")
        return await handler(request)

    return check


@web.middleware
async def _answer_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except EngineError as error:
        return _make_error_response(choose_status(error), str(error))
    except web.HTTPClientError as error:
        return _make_error_response(error.status, error.text or error.reason)


def choose_status(error: EngineError) -> int:
    """Return the status that an error of an engine is answered with."""
    match error:
        case EngineRefusedError():
            return STATUS_FULL
        case EngineRequestError():
            return STATUS_UNFIT
    return 500


def _make_error_response(status: int, why: str) -> web.Response:
    body = msgspec.json.encode(_ErrorAnswer(error=" ".join(why.split())))
    return web.Response(status=status, body=body, content_type="application/json")


def _format_host(host: str) -> str:
    try:
        return f"[{host}]" if ipaddress.ip_address(host).version == 6 else host
    except ValueError:
        return host


# ---- client


def make_client_session(certificate: Path | None = None) -> aiohttp.ClientSession:
    """Return a session with one kept-alive connection for each request in flight.

    With a certificate its servers are reached by TLS, and must have the key of it. A bearer token is sent only to a
    server that has proved, on the same connection, that it has the token.
    """
    return aiohttp.ClientSession(connector=ProvedConnector(open_client_tls(certificate)))


class RemoteEngine:
    """The engine behind an endpoint; every failure is an EngineError that names the worker."""

    def __init__(self, endpoint: EngineEndpoint, session: aiohttp.ClientSession) -> None:
        self.endpoint = endpoint
        self._session = session
        self._headers = {"Authorization": f"Bearer {endpoint.token}"}

    async def generate(self, request: GenerateRequest) -> Completion:
        # The caller limits how long a turn may take: cancelling this disconnects, which aborts the turn on the server.
        return await self._request_answer("POST", "/generate", request, kind=Completion, limit_s=None)

    async def stream(self, request: GenerateRequest) -> AsyncGenerator[CompletionChunk, None]:
        url = self.endpoint.url + "/stream"
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=SHORT_TIMEOUT_S)
        data = msgspec.json.encode(request)
        last: CompletionChunk | None = None
        try:
            async with self._session.post(url, data=data, headers=self._headers, timeout=timeout) as http:
                if http.status >= 400:
                    raise self.make_error(url, http.status, _read_error(await http.read()).error)
                async for line in _read_lines(http.content):
                    last = self._decode_answer(line, kind=CompletionChunk, url=url)
                    yield last
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise self.make_silence(url, error) from error
        if last is None or last.finish_reason is None:
            raise EngineError(f"worker {self.endpoint.worker} at {url} ended the stream in the middle of a turn")

    async def prefill(self, request: GenerateRequest) -> KvHandle:
        return await self._request_answer("POST", "/prefill", request, kind=KvHandle, limit_s=None)

    async def abort(self, request_id: str) -> None:
        await self._request_answer(
            "POST", "/abort", _AbortRequest(request_id=request_id), kind=_EmptyAnswer, limit_s=SHORT_TIMEOUT_S
        )

    async def load_figures(self) -> LoadFigures:
        return await self._request_answer("GET", "/load", None, kind=LoadFigures, limit_s=SHORT_TIMEOUT_S)

    async def _request_answer(
        self, method: str, path: str, body: msgspec.Struct | None, *, kind: type[T], limit_s: float | None
    ) -> T:
        data = None if body is None else msgspec.json.encode(body)
        timeout = aiohttp.ClientTimeout(total=limit_s, sock_connect=SHORT_TIMEOUT_S)
        url = self.endpoint.url + path
        try:
            async with self._session.request(method, url, data=data, headers=self._headers, timeout=timeout) as http:
                answer = await http.read()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise self.make_silence(url, error) from error
        if http.status >= 400:
            raise self.make_error(url, http.status, _read_error(answer).error)
        return self._decode_answer(answer, kind=kind, url=url)

    def make_silence(self, url: str, error: BaseException) -> EngineError:
        """Return the error of a server that did not answer."""
        if isinstance(error, UnprovedServerError):
            return EngineError(f"worker {self.endpoint.worker} at {url}: {error}")
        return EngineError(f"worker {self.endpoint.worker} at {url} did not answer: {error!r}")

    def make_error(self, url: str, status: int, why: str) -> EngineError:
        """Return the error that a server answered with."""
        kinds = {STATUS_FULL: EngineRefusedError, 429: EngineRefusedError}
        if status == STATUS_UNFIT:  # it is the request's fault, whichever worker answers, and programs read this
            return EngineRequestError(why)
        why = f"worker {self.endpoint.worker} at {url} answered {status}: {why}"
        return kinds.get(status, EngineError)(why)

    def _decode_answer(self, answer: bytes, *, kind: type[T], url: str) -> T:
        try:
            return msgspec.json.decode(answer, type=kind)
        except msgspec.DecodeError as error:
            found = _read_error(answer)
            if found.status == STATUS_UNFIT:
                raise self.make_error(url, found.status, found.error) from None
            raise EngineError(
                f"worker {self.endpoint.worker} at {url} sent an invalid answer: {error}: {found.error}"
            ) from error


async def _read_lines(content: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """Yield lines of any length: the `readline` of a stream refuses one with many tokens."""
    rest = b""
    async for chunk in content.iter_any():
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            yield line


def _read_error(answer: bytes) -> _ErrorAnswer:
    try:
        return msgspec.json.decode(answer, type=_ErrorAnswer)
    except msgspec.DecodeError:
        return _ErrorAnswer(error=answer[:200].decode(errors="replace"))


def make_kv_fetcher(session: aiohttp.ClientSession, *, max_bytes: int = 1 << 30) -> FetchKv:
    """Return a function that fetches the KV of a handle, by HTTP(S) only and at most `max_bytes` of it."""

    async def fetch(handle: KvHandle) -> bytes:
        async with _open_kv(session, handle.url, token=handle.token) as content:
            return b"".join([data async for data in _limit_content(content, max_bytes)])

    return fetch


async def fetch_kv_file(session: aiohttp.ClientSession, url: str, path: Path, *, token: str, max_bytes: int) -> None:
    """Fetch KV into a file, which appears complete, by HTTP(S) only and at most `max_bytes` of it."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        async with _open_kv(session, url, token=token) as content:
            with temporary.open("wb") as file:
                async for data in _limit_content(content, max_bytes):
                    await asyncio.to_thread(file.write, data)
        temporary.rename(path)
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


@contextlib.asynccontextmanager
async def _open_kv(session: aiohttp.ClientSession, url: str, *, token: str) -> AsyncIterator[aiohttp.StreamReader]:
    """Yield the content at a URL; whatever fails in the block is an EngineError that names the URL."""
    if not url.startswith(("http://", "https://")):
        raise EngineError(f"handed-over KV has the URL {url!r}: only http and https are fetched")
    headers, timeout = {"Authorization": f"Bearer {token}"}, aiohttp.ClientTimeout(total=KV_FETCH_TIMEOUT_S)
    try:
        async with session.get(url, headers=headers, timeout=timeout, allow_redirects=False) as http:
            if http.status != 200:
                raise EngineError(f"handed-over KV at {url}: answered {http.status}")
            yield http.content
    except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
        raise EngineError(f"handed-over KV at {url} was not received: {error!r}") from error


async def _limit_content(content: aiohttp.StreamReader, max_bytes: int) -> AsyncIterator[bytes]:
    """Yield the content as it is received, at most `max_bytes` of it."""
    received = 0
    async for data in content.iter_any():
        received += len(data)
        if received > max_bytes:
            raise EngineError(f"handed-over KV is larger than {max_bytes} bytes")
        yield data
