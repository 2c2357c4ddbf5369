"""How an env host and an environment in a process of its own talk: msgpack messages, each after its length.

    Make, Reset, Act, Close            what the host asks
    EnvAnswer                          what it is told: an observation, or what went wrong
    encode_message, read_size, decode  the frames; send and receive do both on a plain socket

No pickle: whatever the other side sends is data of these few forms, or refused.
"""

import socket
import struct
from typing import Any

import msgspec

MAX_MESSAGE_BYTES = 16 << 20
"""Bytes; an observation that does not fit is no observation for a model."""
_LENGTH_FORMAT = struct.Struct("!I")
HEADER_BYTES = _LENGTH_FORMAT.size


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


EnvRequest = Make | Reset | Act | Close


class EnvAnswer(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What follows from a request."""

    observation: str = ""
    reward: float = 0.0
    done: bool = False
    error: str | None = None


_encoder = msgspec.msgpack.Encoder()
_request_decoder: msgspec.msgpack.Decoder[EnvRequest] = msgspec.msgpack.Decoder(EnvRequest)
_answer_decoder = msgspec.msgpack.Decoder(EnvAnswer)


def encode_message(message: EnvRequest | EnvAnswer) -> bytes:
    """A whole frame."""
    body = _encoder.encode(message)
    if len(body) > MAX_MESSAGE_BYTES:
        raise ValueError(f"a message of {len(body)} bytes: {MAX_MESSAGE_BYTES} at most")
    return _LENGTH_FORMAT.pack(len(body)) + body


def read_size(header: bytes) -> int:
    """How many bytes follow a header."""
    (size,) = _LENGTH_FORMAT.unpack(header)
    if size > MAX_MESSAGE_BYTES:
        raise ValueError(f"a message of {size} bytes: {MAX_MESSAGE_BYTES} at most")
    return int(size)


def decode_answer(body: bytes) -> EnvAnswer:
    """The answer in a frame's body; msgspec.MsgspecError for anything else."""
    return _answer_decoder.decode(body)


def receive_request(connection: socket.socket) -> EnvRequest | None:
    """The next request; None once the host has gone."""
    header = _receive_exactly(connection, HEADER_BYTES)
    body = _receive_exactly(connection, read_size(header)) if header is not None else None
    return _request_decoder.decode(body) if body is not None else None


def _receive_exactly(connection: socket.socket, size: int) -> bytes | None:
    data = bytearray()
    while len(data) < size:
        chunk = connection.recv(size - len(data))
        if not chunk:
            return None
        data += chunk
    return bytes(data)
