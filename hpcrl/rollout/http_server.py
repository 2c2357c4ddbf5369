"""Serve a handler over HTTP on a separate port, without a framework's routing.

start_server     serves until its runner's cleanup()
RequestHandler   what is served
"""

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from hpcrl.engines.http import MAX_BODY_BYTES
from hpcrl.system.tls import name_scheme, open_server_tls

RequestHandler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]


async def start_server(
    handle: RequestHandler, *, host: str, max_body_bytes: int = MAX_BODY_BYTES, certificate: Path | None = None
) -> tuple[str, web.ServerRunner]:
    """Serve on `host` until the runner's cleanup(); return the URL. A client that leaves cancels its request."""
    make_request = partial(web.BaseRequest, loop=asyncio.get_running_loop(), client_max_size=max_body_bytes)
    server = web.Server(
        handle, request_factory=make_request, handler_cancellation=True, access_log=None, logger=_make_quiet_logger()
    )
    runner = web.ServerRunner(server, shutdown_timeout=1.0)
    await runner.setup()
    listening = socket.create_server((host, 0), backlog=1024)
    await web.SockSite(runner, listening, ssl_context=open_server_tls(certificate)).start()
    return f"{name_scheme(certificate)}://{host}:{listening.getsockname()[1]}", runner


def _make_quiet_logger() -> logging.Logger:
    """Return the logger of a server: requests that are not HTTP, answered 400, are not logged; bugs in handlers are."""
    logger = logging.getLogger("hpcrl.http")
    logger.addFilter(_may_be_logged)
    return logger


def _may_be_logged(record: logging.LogRecord) -> bool:
    error = record.exc_info[1] if record.exc_info else None
    return not isinstance(error, HttpProcessingError | web.RequestPayloadError)
