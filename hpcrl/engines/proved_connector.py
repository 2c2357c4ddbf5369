"""Connections on which a bearer token is sent only after the server has proved, on this very connection, to have it.

    ProvedConnector       the connections of a client session
    UnprovedServerError   another program listens where the server is expected
    PROOF_TIMEOUT_S       the time for the proof

An engine that has died leaves its port to whatever listens there next: a proof of yesterday, or of another connection,
shows nothing.
"""

import asyncio
import ssl
import weakref
from typing import TYPE_CHECKING

import aiohttp
from aiohttp.client_proto import ResponseHandler

from hpcrl.campaign_dir.endpoints import HELLO_PATH, NONCE_HEADER, is_proof, make_nonce

if TYPE_CHECKING:
    from aiohttp import ClientRequest, ClientTimeout
    from aiohttp.connector import Connection
    from aiohttp.tracing import Trace

PROOF_TIMEOUT_S = 30.0
"""A server that is busy answers late; one that never answers is not waited for."""


class UnprovedServerError(aiohttp.ClientError):
    """A server did not prove that it has the token that a request to it carries."""

    def __init__(self) -> None:
        super().__init__(
            "the server did not prove that it has the endpoint's token: another program listens there, or a proxy is "
            "in between (set no_proxy)"
        )


class ProvedConnector(aiohttp.TCPConnector):
    """TCP connections; one is used for a request with a bearer token once its server has proved that it has this."""

    def __init__(self, tls: ssl.SSLContext | None = None) -> None:
        """Allow any number of connections."""
        super().__init__(limit=0, ssl=True if tls is None else tls)
        self._proved: weakref.WeakKeyDictionary[ResponseHandler, str] = weakref.WeakKeyDictionary()
        """The token that was proved on each connection."""

    async def connect(self, req: "ClientRequest", traces: "list[Trace]", timeout: "ClientTimeout") -> "Connection":
        """Return a connection for the request; raise UnprovedServerError if its server has not the token."""
        connection = await super().connect(req, traces, timeout)
        scheme, _, token = req.headers.get("Authorization", "").partition(" ")
        protocol = connection.protocol
        if scheme != "Bearer" or protocol is None or self._proved.get(protocol) == token:
            return connection
        try:
            async with asyncio.timeout(PROOF_TIMEOUT_S):
                await _demand_proof(protocol, host=req.headers.get("Host", ""), token=token)
        except BaseException:
            connection.close()
            raise
        self._proved[protocol] = token
        return connection


async def _demand_proof(protocol: ResponseHandler, *, host: str, token: str) -> None:
    """Send a nonce on a connection and check that the answer is signed with the token."""
    if protocol.transport is None:
        raise aiohttp.ServerDisconnectedError
    nonce = make_nonce()
    protocol.set_response_params()
    protocol.transport.write(f"GET {HELLO_PATH} HTTP/1.1\r\nHost: {host}\r\n{NONCE_HEADER}: {nonce}\r\n\r\n".encode())
    answer, content = await protocol.read()
    if not is_proof(answer.headers, token=token, nonce=nonce):
        raise UnprovedServerError
    await content.read()  # the request follows on the same connection
