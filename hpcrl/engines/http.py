"""An engine behind an HTTP door, and the other end of it.

    serve          POST /generate /stream /prefill /abort, GET /load /kv/NAME; every request carries the bearer token
    RemoteEngine   a Generator that talks to such a door
    kv_fetcher     gets handed-over KV for an engine that decodes

Bodies are JSON of the structs in hpcrl.engines.base (a stream: one piece a line); KV travels as safetensors. A
request that cannot be read is answered 400 and one that the engine refuses 422, each with {"error": "one line"}. A
client that hangs up takes its request with it.
"""

import contextlib
import hmac
import ipaddress
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Protocol, TypeVar

import aiohttp
import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from hpcrl.campaign_dir.endpoints import Endpoint
from hpcrl.engines.base import (
    LOCAL,
    Completion,
    FetchKv,
    GenerateRequest,
    Generator,
    KvHandle,
    LoadFigures,
    Part,
    Streamer,
)
from hpcrl.errors import EngineError, EngineRefusedError

T = TypeVar("T")
MAX_BODY_BYTES = 64 << 20
"""A prompt of a million tokens is under 10 MB of JSON."""
SHORT_S = 30.0
"""How long anything but a generation may take to answer."""
FULL = 503
"""Answered to a request that may be offered elsewhere."""
KV_FETCH_S = 20.0
"""After this the prompt is computed where it is decoded."""


class ServedEngine(Generator, Streamer, Protocol):
    """What stands behind the door: a Generator that also tells a turn as it is said, and gives out the KV it holds."""

    async def take_kv(self, name: str) -> bytes | None: ...


class _Abort(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    request_id: str


class _Done(msgspec.Struct, frozen=True, kw_only=True):
    """There is nothing more to say."""


class _Refusal(msgspec.Struct, frozen=True, kw_only=True):
    error: str


# ---- the door


async def serve(engine: ServedEngine, *, host: str, token: str, port: int = 0) -> tuple[str, web.AppRunner]:
    """Answer on `host` (port 0: any free one) until the runner's cleanup(); returns the URL that others use."""
    app = web.Application(middlewares=[_bearer(token), _refusals], client_max_size=MAX_BODY_BYTES)
    runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=1.0)
    door = _Door(engine, token=token)
    app.router.add_post("/generate", door.generate)
    app.router.add_post("/stream", door.stream)
    app.router.add_post("/prefill", door.prefill)
    app.router.add_post("/abort", door.abort)
    app.router.add_get("/load", door.load)
    app.router.add_get("/kv/{name}", door.kv)
    await runner.setup()
    try:
        await web.TCPSite(runner, host, port).start()
    except OSError as error:
        await runner.cleanup()
        raise EngineError(f"cannot listen on {host}:{port}: {error.strerror or error}") from error
    door.url = f"http://{_bracketed(host)}:{runner.addresses[0][1]}"
    return door.url, runner


class _Door:
    """The routes of one engine."""

    def __init__(self, engine: ServedEngine, *, token: str) -> None:
        self.url = ""
        self._engine, self._token = engine, token

    async def generate(self, http: web.Request) -> web.Response:
        return _answer(await self._engine.generate(await _body(http, GenerateRequest)))

    async def stream(self, http: web.Request) -> web.StreamResponse:
        pieces = self._engine.stream(await _body(http, GenerateRequest))
        response = web.StreamResponse(headers={"Content-Type": "application/x-ndjson"})
        async with contextlib.aclosing(pieces):
            async for piece in _told(pieces):
                if not response.prepared:  # until here a refusal can have a status of its own
                    await response.prepare(http)
                await response.write(msgspec.json.encode(piece) + b"\n")
        return response

    async def prefill(self, http: web.Request) -> web.Response:
        handle = await self._engine.prefill(await _body(http, GenerateRequest))
        if handle.url.startswith(LOCAL):
            url = f"{self.url}/kv/{handle.url.removeprefix(LOCAL)}"
            handle = msgspec.structs.replace(handle, url=url, token=self._token)
        return _answer(handle)

    async def abort(self, http: web.Request) -> web.Response:
        await self._engine.abort((await _body(http, _Abort)).request_id)
        return _answer(_Done())

    async def load(self, _: web.Request) -> web.Response:
        return _answer(await self._engine.load_figures())

    async def kv(self, http: web.Request) -> web.Response:
        data = await self._engine.take_kv(http.match_info["name"])
        if data is None:
            raise web.HTTPNotFound(text="this KV was fetched before, or has become too old")
        return web.Response(body=data, content_type="application/octet-stream")


async def _told(pieces: AsyncIterator[Part]) -> AsyncIterator[Part | _Refusal]:
    """The pieces; if the engine fails when some are gone, then a refusal as the last line."""
    begun = False
    try:
        async for piece in pieces:
            yield piece
            begun = True
    except EngineError as error:
        if not begun:
            raise
        yield _Refusal(error=str(error))


async def _body(http: web.Request, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(await http.read(), type=kind)
    except msgspec.DecodeError as error:
        raise web.HTTPBadRequest(text=f"the body is no {kind.__name__.strip('_')}: {error}") from None


def _answer(value: msgspec.Struct) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), content_type="application/json")


def _bearer(token: str) -> Middleware:
    """Nobody gets past without the token; comparing takes the same time however much of it is right."""
    wanted = f"Bearer {token}".encode()

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        seen = request.headers.get("Authorization", "").encode("utf-8", "surrogateescape")
        if not hmac.compare_digest(seen, wanted):
            return _refused(401, "this needs `Authorization: Bearer` with the endpoint's token")
        return await handler(request)

    return check


@web.middleware
async def _refusals(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except EngineRefusedError as error:
        return _refused(FULL, str(error))
    except EngineError as error:
        return _refused(422, str(error))
    except web.HTTPClientError as error:
        return _refused(error.status, error.text or error.reason)


def _refused(status: int, why: str) -> web.Response:
    body = msgspec.json.encode(_Refusal(error=" ".join(why.split())))
    return web.Response(status=status, body=body, content_type="application/json")


def _bracketed(host: str) -> str:
    try:
        return f"[{host}]" if ipaddress.ip_address(host).version == 6 else host
    except ValueError:
        return host


# ---- the other end


def client_session() -> aiohttp.ClientSession:
    """A session with as many kept-alive connections as there are requests in flight."""
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))


class RemoteEngine:
    """The engine behind an endpoint; whatever goes wrong on the way is an EngineError that names the worker."""

    def __init__(self, endpoint: Endpoint, session: aiohttp.ClientSession) -> None:
        self.endpoint = endpoint
        self._session = session
        self._headers = {"Authorization": f"Bearer {endpoint.token}"}

    async def generate(self, request: GenerateRequest) -> Completion:
        # How long a turn may take is the caller's business: cancelling it hangs up, which aborts it over there.
        return await self._ask("POST", "/generate", request, kind=Completion, limit_s=None)

    async def stream(self, request: GenerateRequest) -> AsyncGenerator[Part, None]:
        url = self.endpoint.url + "/stream"
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=SHORT_S)
        data = msgspec.json.encode(request)
        last: Part | None = None
        try:
            async with self._session.post(url, data=data, headers=self._headers, timeout=timeout) as http:
                if http.status >= 400:
                    raise self._answered(url, http.status, await http.read())
                async for line in _lines(http.content):
                    last = self._understood(line, kind=Part, url=url)
                    yield last
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise EngineError(f"worker {self.endpoint.worker} at {url} did not answer: {error!r}") from error
        if last is None or last.finish_reason is None:
            raise EngineError(f"worker {self.endpoint.worker} at {url} fell silent in the middle of a turn")

    async def prefill(self, request: GenerateRequest) -> KvHandle:
        return await self._ask("POST", "/prefill", request, kind=KvHandle, limit_s=None)

    async def abort(self, request_id: str) -> None:
        await self._ask("POST", "/abort", _Abort(request_id=request_id), kind=_Done, limit_s=SHORT_S)

    async def load_figures(self) -> LoadFigures:
        return await self._ask("GET", "/load", None, kind=LoadFigures, limit_s=SHORT_S)

    async def _ask(
        self, method: str, path: str, body: msgspec.Struct | None, *, kind: type[T], limit_s: float | None
    ) -> T:
        data = None if body is None else msgspec.json.encode(body)
        timeout = aiohttp.ClientTimeout(total=limit_s, sock_connect=SHORT_S)
        url = self.endpoint.url + path
        try:
            async with self._session.request(method, url, data=data, headers=self._headers, timeout=timeout) as http:
                answer = await http.read()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise EngineError(f"worker {self.endpoint.worker} at {url} did not answer: {error!r}") from error
        if http.status >= 400:
            raise self._answered(url, http.status, answer)
        return self._understood(answer, kind=kind, url=url)

    def _answered(self, url: str, status: int, answer: bytes) -> EngineError:
        kind = EngineRefusedError if status in (FULL, 429) else EngineError
        return kind(f"worker {self.endpoint.worker} at {url} answered {status}: {_reason(answer)}")

    def _understood(self, answer: bytes, *, kind: type[T], url: str) -> T:
        try:
            return msgspec.json.decode(answer, type=kind)
        except msgspec.DecodeError as error:
            why = _reason(answer)
            raise EngineError(f"worker {self.endpoint.worker} at {url} is not understood: {error}: {why}") from error


async def _lines(content: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """Line by line, however long: a stream's own `readline` refuses one of many tokens."""
    begun = b""
    async for chunk in content.iter_any():
        *whole, begun = (begun + chunk).split(b"\n")
        for line in whole:
            yield line


def _reason(answer: bytes) -> str:
    try:
        return msgspec.json.decode(answer, type=_Refusal).error
    except msgspec.DecodeError:
        return answer[:200].decode(errors="replace")


def kv_fetcher(session: aiohttp.ClientSession, *, max_bytes: int = 1 << 30) -> FetchKv:
    """Fetches the KV that handles point to, over HTTP and nothing else, and not more than `max_bytes` of it."""

    async def fetch(handle: KvHandle) -> bytes:
        if not handle.url.startswith(("http://", "https://")):
            raise EngineError(f"handed-over KV has the URL {handle.url!r}: only http and https are fetched")
        headers = {"Authorization": f"Bearer {handle.token}"}
        timeout = aiohttp.ClientTimeout(total=KV_FETCH_S)
        try:
            async with session.get(handle.url, headers=headers, timeout=timeout, allow_redirects=False) as http:
                if http.status != 200:
                    raise EngineError(f"handed-over KV at {handle.url}: answered {http.status}")
                return await _read_at_most(http.content, max_bytes)
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            raise EngineError(f"handed-over KV at {handle.url} did not come: {error!r}") from error

    return fetch


async def _read_at_most(content: aiohttp.StreamReader, max_bytes: int) -> bytes:
    data = bytearray()
    async for chunk in content.iter_any():
        data += chunk
        if len(data) > max_bytes:
            raise EngineError(f"handed-over KV is larger than {max_bytes} bytes")
    return bytes(data)
