"""Turns over a Unix socket, for clients on the node of their engine: many at once on one connection, without HTTP.

    serve_over_socket   the server, beside the one for HTTP
    NearEngine          the client: a RemoteEngine whose turns take the socket
    EngineConnections   the connections of a process to all engines
    CONNECT_TIMEOUT_S, MAX_ANSWER_BYTES   limits

A frame is a length in four bytes, and then its bytes. The client sends a nonce, the server the proof that it has the
token, the client the token; then each sends msgpack, requests and answers by number. What the socket cannot do goes by
HTTP: streams, prefill, turns whose socket does not exist in this container or has been closed.
"""

import asyncio
import contextlib
import hmac
import shutil
import struct
import tempfile
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import aiohttp
import msgspec

from hpcrl.campaign_dir.endpoints import EngineEndpoint, make_nonce, make_proof
from hpcrl.engines.base import Completion, GenerateRequest, InferenceEngine, TokenGenerator
from hpcrl.engines.http import MAX_BODY_BYTES, RemoteEngine, choose_status, make_client_session
from hpcrl.errors import EngineError
from hpcrl.system.network import current_node

CONNECT_TIMEOUT_S = 5.0
"""The time until a turn goes by HTTP, which waits for as long as it takes."""
MAX_ANSWER_BYTES = 1 << 30
"""The largest answer; with the experts of a prompt of 128,000 tokens it has 120 MB for DeepSeek-V3."""
_LENGTH = struct.Struct("!I")
_MAX_HELLO_BYTES = 1024


class _TurnFrame(msgspec.Struct, frozen=True, array_like=True):
    """A client's frame: a request, or the end of one."""

    number: int
    request: GenerateRequest | None
    """None ends the request of this number."""


class _AnswerFrame(msgspec.Struct, frozen=True, array_like=True):
    """A server's frame: a completion, or an error with the status that it would have in HTTP."""

    number: int
    completion: Completion | None
    error: str = ""
    status: int = 500


_encoder = msgspec.msgpack.Encoder()
_turn_decoder = msgspec.msgpack.Decoder(_TurnFrame)
_answer_decoder = msgspec.msgpack.Decoder(_AnswerFrame)


class _FrameProtocol(asyncio.Protocol, ABC):
    """A connection of frames; one that is not understood closes it."""

    transport: asyncio.Transport
    max_frame_bytes = MAX_BODY_BYTES
    """The largest frame that is received from the other side, once it has shown that it has the token."""

    def __init__(self) -> None:
        self.is_proved = False
        """True once each side has shown the other that it has the token."""
        self._received = bytearray()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self._received += data
        start = 0
        while len(self._received) >= start + _LENGTH.size and not self.transport.is_closing():
            (length,) = _LENGTH.unpack_from(self._received, start)
            end = start + _LENGTH.size + length
            if length > (self.max_frame_bytes if self.is_proved else _MAX_HELLO_BYTES):
                self.transport.abort()
            if len(self._received) < end:
                break
            frame = bytes(self._received[start + _LENGTH.size : end])
            start = end
            try:
                self.receive_frame(frame)
            except (msgspec.DecodeError, UnicodeError, RecursionError):
                self.transport.abort()
        del self._received[:start]

    @abstractmethod
    def receive_frame(self, frame: bytes) -> None:
        """Handle a frame; a DecodeError or UnicodeError closes the connection."""

    def send_frame(self, data: bytes) -> None:
        self.transport.write(_LENGTH.pack(len(data)) + data)


# ---- server


class _ServedConnection(_FrameProtocol):
    """A client's connection, at the server."""

    def __init__(self, engine: TokenGenerator, *, token: str, connections: "set[_ServedConnection]") -> None:
        super().__init__()
        self._engine, self._token, self._connections = engine, token, connections
        self._turns: dict[int, asyncio.Task[None]] = {}
        self._has_greeted = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._connections.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._connections.discard(self)
        for turn in self._turns.values():
            turn.cancel()

    def receive_frame(self, frame: bytes) -> None:
        if not self._has_greeted:
            self._has_greeted = True
            self.send_frame(make_proof(self._token, frame.decode()).encode())
        elif not self.is_proved:
            self.is_proved = hmac.compare_digest(frame, self._token.encode())
            if not self.is_proved:
                self.transport.abort()
        else:
            self._receive_turn(_turn_decoder.decode(frame))

    def _receive_turn(self, turn: _TurnFrame) -> None:
        if turn.request is not None:
            task = asyncio.create_task(self._answer(turn.number, turn.request), name=turn.request.request_id)
            self._turns[turn.number] = task
        elif (running := self._turns.get(turn.number)) is not None:
            running.cancel()

    async def _answer(self, number: int, request: GenerateRequest) -> None:
        try:
            answer = _AnswerFrame(number, await self._engine.generate(request))
        except EngineError as error:
            answer = _AnswerFrame(number, None, " ".join(str(error).split()), choose_status(error))
        except Exception as error:
            why = f"the engine failed with {type(error).__name__}: see its log"
            self.send_frame(_encoder.encode(_AnswerFrame(number, None, why)))
            raise  # to the log
        finally:
            self._turns.pop(number, None)
        self.send_frame(_encoder.encode(answer))


@contextlib.asynccontextmanager
async def serve_over_socket(engine: TokenGenerator, *, token: str) -> AsyncIterator[str]:
    """Serve turns until the block ends; yields the socket's path, or "" if there can be none."""
    connections: set[_ServedConnection] = set()
    directory = Path(tempfile.mkdtemp(prefix="engine-"))  # 0700, and so short that most paths of sockets fit
    path, server = directory / "s", None
    try:
        with contextlib.suppress(OSError):
            server = await asyncio.get_running_loop().create_unix_server(
                lambda: _ServedConnection(engine, token=token, connections=connections), path
            )
        yield str(path) if server is not None else ""
    finally:
        if server is not None:
            server.close()
        for connection in list(connections):
            connection.transport.abort()
        shutil.rmtree(directory, ignore_errors=True)


# ---- client


class _ClientConnection(_FrameProtocol):
    """A connection to a server, at its client."""

    max_frame_bytes = MAX_ANSWER_BYTES

    def __init__(self, token: str) -> None:
        super().__init__()
        self.proved: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done once turns may be sent, or with the reason why not."""
        self._token, self._nonce = token, make_nonce()
        self._answers: dict[int, asyncio.Future[_AnswerFrame]] = {}
        self._num_turns = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self.send_frame(self._nonce.encode())

    def connection_lost(self, exc: Exception | None) -> None:
        lost = ConnectionResetError("the socket was closed")
        waiting: list[asyncio.Future[Any]] = [self.proved, *self._answers.values()]
        for future in waiting:
            if not future.done():
                future.set_exception(lost)
        self.proved.exception()  # retrieved: a turn may have been cancelled

    def receive_frame(self, frame: bytes) -> None:
        if not self.is_proved:
            if not hmac.compare_digest(frame, make_proof(self._token, self._nonce).encode()):
                self.transport.abort()
                return
            self.is_proved = True
            self.send_frame(self._token.encode())
            self.proved.set_result(None)
            return
        answer = _answer_decoder.decode(frame)
        waiting = self._answers.get(answer.number)
        if waiting is not None and not waiting.done():
            waiting.set_result(answer)

    async def ask(self, request: GenerateRequest) -> _AnswerFrame | None:
        """Return the answer to a turn; None if the turn is too large. Raises ConnectionError if the server is gone."""
        self._num_turns += 1
        number = self._num_turns
        frame = _encoder.encode(_TurnFrame(number, request))
        if len(frame) > MAX_BODY_BYTES:
            return None
        answer: asyncio.Future[_AnswerFrame] = asyncio.get_running_loop().create_future()
        self._answers[number] = answer
        try:
            self.send_frame(frame)
            return await answer
        except asyncio.CancelledError:
            self.send_frame(_encoder.encode(_TurnFrame(number, None)))
            raise
        finally:
            del self._answers[number]


class NearEngine(RemoteEngine):
    """The engine behind an endpoint of this node: its turns take the socket, all else and large turns go by HTTP."""

    def __init__(self, endpoint: EngineEndpoint, session: aiohttp.ClientSession) -> None:
        super().__init__(endpoint, session)
        self._connecting: asyncio.Task[_ClientConnection | None] | None = None

    async def generate(self, request: GenerateRequest) -> Completion:
        if self._connecting is None:
            self._connecting = asyncio.create_task(self._connect(), name=f"socket of {self.endpoint.worker}")
        connection = await asyncio.shield(self._connecting)
        if connection is None or connection.transport.is_closing():
            return await super().generate(request)
        try:
            answer = await connection.ask(request)
        except ConnectionError as error:
            raise self.make_silence(self.endpoint.socket, error) from error
        if answer is None:
            return await super().generate(request)
        if answer.completion is None:
            raise self.make_error(self.endpoint.socket, answer.status, answer.error)
        return answer.completion

    async def close(self) -> None:
        """Close the connection, which ends its turns."""
        if self._connecting is not None:
            self._connecting.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                if (connection := await self._connecting) is not None:
                    connection.transport.abort()

    async def _connect(self) -> _ClientConnection | None:
        """Return a connection whose server has the token; None if there is none, and turns go by HTTP."""
        loop, connection = asyncio.get_running_loop(), None
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                _, connection = await loop.create_unix_connection(
                    lambda: _ClientConnection(self.endpoint.token), self.endpoint.socket
                )
                await connection.proved
        except (OSError, TimeoutError):
            if connection is not None:
                connection.transport.abort()
            return None
        return connection


class EngineConnections:
    """The connections of a process to engines, used as `async with EngineConnections() as connections`."""

    def __init__(self, certificate: Path | None = None) -> None:
        self._session = make_client_session(certificate)
        self._near: list[NearEngine] = []

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for engine in self._near:
            await engine.close()
        await self._session.close()

    def connect(self, endpoint: EngineEndpoint) -> InferenceEngine:
        """Return the engine of an endpoint, by its socket if it is on this node."""
        if not endpoint.socket or endpoint.node != current_node():
            return RemoteEngine(endpoint, self._session)
        engine = NearEngine(endpoint, self._session)
        self._near.append(engine)
        return engine
