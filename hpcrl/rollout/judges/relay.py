"""Send a request on to another server, and its response back, as it is received.

relay_request      sends one on; raises EngineError if there is no response
start_server       serves a handler over HTTP, without a framework's routing
make_error         a response with an error in the form of OpenAI's API
is_allowed         whether a request has the bearer token
MAX_BODY_BYTES, CONNECT_TIMEOUT_S, STATUS_GONE, EVENT_STREAM   limits, a status and a type
"""

import asyncio
import hmac
import socket
from collections.abc import Awaitable, Callable, Mapping
from functools import partial

import aiohttp
import msgspec
import yarl
from aiohttp import web

from hpcrl.errors import EngineError

MAX_BODY_BYTES = 64 << 20
CONNECT_TIMEOUT_S = 10.0
STATUS_GONE = 502
"""The status of a judge's address whose engine does not respond."""
EVENT_STREAM = "text/event-stream"
_REQUEST_HEADERS = frozenset({"accept", "content-type", "user-agent"})
_RESPONSE_HEADERS = frozenset({"content-type", "cache-control", "retry-after", "x-request-id"})

RequestHandler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]


async def relay_request(
    http: web.BaseRequest, session: aiohttp.ClientSession, *, url: str, headers: Mapping[str, str]
) -> web.StreamResponse:
    """Send a request on and return its response; raise EngineError if the server does not respond.

    Events are passed on as they are received. If they end too early, the connection of the client is closed: it must
    not take what it has for the whole.
    """
    body = await http.read()
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S)
    kept = {name: value for name, value in http.headers.items() if name.lower() in _REQUEST_HEADERS}
    try:
        async with session.request(
            http.method,
            yarl.URL(url, encoded=True),  # the path as it was checked
            data=body or None,
            headers={**kept, **headers},
            timeout=timeout,
            allow_redirects=False,
        ) as answer:
            known = {name: value for name, value in answer.headers.items() if name.lower() in _RESPONSE_HEADERS}
            if not answer.headers.get("Content-Type", "").startswith(EVENT_STREAM):
                return web.Response(status=answer.status, body=await answer.read(), headers=known)
            return await _relay_events(http, answer, web.StreamResponse(status=answer.status, headers=known))
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        if http.transport is None or http.transport.is_closing():
            raise asyncio.CancelledError from error  # it was the client that left
        raise EngineError(f"{url} did not answer: {error!r}") from error


async def _relay_events(
    http: web.BaseRequest, answer: aiohttp.ClientResponse, response: web.StreamResponse
) -> web.StreamResponse:
    await response.prepare(http)
    try:
        async for chunk in answer.content.iter_any():
            await response.write(chunk)
    except (aiohttp.ClientError, OSError):
        if http.transport is not None:
            http.transport.abort()
        raise asyncio.CancelledError from None
    await response.write_eof()
    return response


async def start_server(
    handle: RequestHandler, *, host: str, max_body_bytes: int = MAX_BODY_BYTES
) -> tuple[str, web.ServerRunner]:
    """Serve on `host` until the runner's cleanup(); return the URL. A client that leaves cancels its request."""
    make_request = partial(web.BaseRequest, loop=asyncio.get_running_loop(), client_max_size=max_body_bytes)
    server = web.Server(handle, request_factory=make_request, handler_cancellation=True, access_log=None)
    runner = web.ServerRunner(server, shutdown_timeout=1.0)
    await runner.setup()
    listening = socket.create_server((host, 0), backlog=1024)
    await web.SockSite(runner, listening).start()
    return f"http://{host}:{listening.getsockname()[1]}", runner


def make_error(status: int, message: str, *, code: str) -> web.Response:
    """Return a response with an error, in the form of OpenAI's API."""
    kind = "server_error" if status >= 500 else "invalid_request_error"
    body = {"error": {"message": message, "type": kind, "code": code, "param": None}}
    return web.Response(status=status, body=msgspec.json.encode(body), headers={"Content-Type": "application/json"})


def is_allowed(http: web.BaseRequest, token: str) -> bool:
    """Return whether a request has the bearer token, compared in constant time."""
    seen = http.headers.get("Authorization", "").encode("utf-8", "surrogateescape")
    return hmac.compare_digest(seen, f"Bearer {token}".encode())
