"""The protocol between an env worker and an environment in another process: msgpack messages, each after its length.

    EnvRequest: one of
    Make, Reset, Act, Close        requests of the env worker
    EnvAnswer                      the answer: an observation, or an error
    encode_message                 the frame of a message
    read_size, decode_answer       its parts, as the env worker reads them
    receive_request                the same on a plain socket, for the environment
    MAX_MESSAGE_BYTES, HEADER_BYTES  sizes

It has no pickle: the other side can only send data of these few forms, or is refused.
"""

import socket
import struct
from typing import Any

import msgspec

from hpcrl.envs.base import TaskPrompt

MAX_MESSAGE_BYTES = 16 << 20
"""A larger observation would not be useful to a model."""
_LENGTH_FORMAT = struct.Struct("!I")
HEADER_BYTES = _LENGTH_FORMAT.size


class Make(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Make the environment, within these limits."""

    env: str
    options: dict[str, Any]
    memory_bytes: int
    cpu_s: int
    has_tasks: bool = False
    """It will be given rows of a task set, and is refused if it does not accept them."""


class Reset(msgspec.Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    seed: int
    task: dict[str, Any] | None = None
    """The fields of a row of the domain's task set, if it has one."""


class Act(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    action: str


class Close(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Close the environment."""


EnvRequest = Make | Reset | Act | Close


class EnvAnswer(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The answer to a request."""

    observation: str = ""
    prompt: TaskPrompt | None = None
    """The start of a task, if it is more than an observation."""
    reward: float = 0.0
    done: bool = False
    error: str | None = None


_encoder = msgspec.msgpack.Encoder()
_request_decoder: msgspec.msgpack.Decoder[EnvRequest] = msgspec.msgpack.Decoder(EnvRequest)
_answer_decoder = msgspec.msgpack.Decoder(EnvAnswer)


def encode_message(message: EnvRequest | EnvAnswer) -> bytes:
    """Return the frame of a message."""
    body = _encoder.encode(message)
    if len(body) > MAX_MESSAGE_BYTES:
        raise ValueError(f"a message has {len(body)} bytes: at most {MAX_MESSAGE_BYTES} are allowed")
    return _LENGTH_FORMAT.pack(len(body)) + body


def read_size(header: bytes) -> int:
    """Return how many bytes follow a header."""
    (size,) = _LENGTH_FORMAT.unpack(header)
    if size > MAX_MESSAGE_BYTES:
        raise ValueError(f"a message has {size} bytes: at most {MAX_MESSAGE_BYTES} are allowed")
    return int(size)


def decode_answer(body: bytes) -> EnvAnswer:
    """Decode the body of a frame; raises msgspec.MsgspecError for anything but an answer."""
    return _answer_decoder.decode(body)


def receive_request(connection: socket.socket) -> EnvRequest | None:
    """Receive the next request; None once the env worker has closed the connection."""
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
