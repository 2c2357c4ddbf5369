"""Send a request on to another server, and its response back, as it is received.

relay_request      sends one on; raises EngineError without a response
make_error         a response with an error in the form of OpenAI's API
is_allowed         whether a request has the bearer token
CONNECT_TIMEOUT_S, STATUS_GONE, EVENT_STREAM   a limit, a status and a type
"""

import asyncio
import hmac
from collections.abc import Mapping

import aiohttp
import msgspec
import yarl
from aiohttp import web

from hpcrl.errors import EngineError

CONNECT_TIMEOUT_S = 10.0
STATUS_GONE = 502
"""The status of a judge's address whose engine does not respond."""
EVENT_STREAM = "text/event-stream"
_REQUEST_HEADERS = frozenset({"accept", "content-type", "user-agent"})
_RESPONSE_HEADERS = frozenset({"content-type", "cache-control", "retry-after", "x-request-id"})


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


def make_error(status: int, message: str, *, code: str) -> web.Response:
    """Return a response with an error, in the form of OpenAI's API."""
    kind = "server_error" if status >= 500 else "invalid_request_error"
    body = {"error": {"message": message, "type": kind, "code": code, "param": None}}
    return web.Response(status=status, body=msgspec.json.encode(body), headers={"Content-Type": "application/json"})


def is_allowed(http: web.BaseRequest, token: str) -> bool:
    """Return whether a request has the bearer token, compared in constant time."""
    seen = http.headers.get("Authorization", "").encode("utf-8", "surrogateescape")
    return hmac.compare_digest(seen, f"Bearer {token}".encode())
