"""How an env host and an environment in a process of its own talk: msgpack messages, each after its length.

    Make, Reset, Act, Close    what the host asks
    Answer                     what it is told: an observation, or what went wrong
    encode, size_of, decode    the frames; send and receive do both on a plain socket

No pickle: whatever the other side sends is data of these few forms, or refused.
"""

import socket
import struct
from typing import Any

import msgspec

MAX_MESSAGE = 16 << 20
"""Bytes; an observation that does not fit is no observation for a model."""
_LENGTH = struct.Struct("!I")
HEADER = _LENGTH.size


class Make(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Make the environment, within these limits."""

    env: str
    options: dict[str, Any]
    memory_bytes: int
    cpu_s: int


class Reset(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    seed: int


class Act(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    action: str


class Close(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """End well."""


Request = Make | Reset | Act | Close


class Answer(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What follows from a request."""

    observation: str = ""
    reward: float = 0.0
    done: bool = False
    error: str | None = None


_encoder = msgspec.msgpack.Encoder()
_requests: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(Request)
_answers = msgspec.msgpack.Decoder(Answer)


def encode(message: Request | Answer) -> bytes:
    """A whole frame."""
    body = _encoder.encode(message)
    if len(body) > MAX_MESSAGE:
        raise ValueError(f"a message of {len(body)} bytes: {MAX_MESSAGE} at most")
    return _LENGTH.pack(len(body)) + body


def size_of(header: bytes) -> int:
    """How many bytes follow a header."""
    (size,) = _LENGTH.unpack(header)
    if size > MAX_MESSAGE:
        raise ValueError(f"a message of {size} bytes: {MAX_MESSAGE} at most")
    return int(size)


def decode_answer(body: bytes) -> Answer:
    """The answer in a frame's body; msgspec.MsgspecError for anything else."""
    return _answers.decode(body)


def receive_request(connection: socket.socket) -> Request | None:
    """The next request; None once the host has gone."""
    header = _exactly(connection, HEADER)
    body = _exactly(connection, size_of(header)) if header is not None else None
    return _requests.decode(body) if body is not None else None


def _exactly(connection: socket.socket, size: int) -> bytes | None:
    parts = bytearray()
    while len(parts) < size:
        part = connection.recv(size - len(parts))
        if not part:
            return None
        parts += part
    return bytes(parts)
