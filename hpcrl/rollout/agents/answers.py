"""One internal form of an answer of the model, from which every form of response is made. Pure.

ModelAnswer, AnswerDelta  one choice as a whole, and a part of it while it is generated
NamedCall                 a tool call with the id that the client will send back
TokenUsage                the token counts of a call
AnswerForm                the protocol of a form: events of a stream, and a whole response
join_pieces               neighbours of one kind become one piece
make_id, make_call_id     names of responses, and of tool calls
name_calls                gives each call of some pieces its id
encode_event              one server-sent event
LogprobEntries            the log-probabilities of tokens, in the form of OpenAI's chat API
"""

import hashlib
import json
import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec

from hpcrl.engines.base import CompletionChunk
from hpcrl.models.chat_template import ChatTemplate
from hpcrl.rollout.agents.requests import ApiError, JsonObject, ModelCall
from hpcrl.rollout.agents.tool_parsers import AnswerPiece, ContentText, ReasoningText, ToolCall

CALL_ID_CHARS = 9
"""The length of the id of a tool call: some chat templates accept nothing else."""


@dataclass(frozen=True, kw_only=True)
class NamedCall:
    """A tool call with the id that the client will send back."""

    id: str
    number: int
    """The position among the calls of the answer."""
    name: str
    arguments: JsonObject

    @property
    def encoded_arguments(self) -> str:
        return json.dumps(self.arguments, ensure_ascii=False)


ModelPiece = ContentText | ReasoningText | NamedCall


@dataclass(frozen=True, kw_only=True)
class AnswerDelta:
    """A part of a choice while it is generated."""

    index: int
    pieces: Sequence[ModelPiece]
    part: CompletionChunk


@dataclass(frozen=True, kw_only=True)
class ModelAnswer:
    """One choice as a whole."""

    index: int
    pieces: Sequence[ModelPiece]
    """The generated parts, in order; neighbours differ in kind, unless they are calls."""
    finish_reason: str
    """stop or length."""
    stop_text: str | None
    """The text that ended it, if the client asked for that."""
    parts: Sequence[CompletionChunk]

    @property
    def content(self) -> str:
        return "".join(piece.text for piece in self.pieces if isinstance(piece, ContentText))

    @property
    def reasoning(self) -> str:
        return "".join(piece.text for piece in self.pieces if isinstance(piece, ReasoningText))

    @property
    def calls(self) -> list[NamedCall]:
        return [piece for piece in self.pieces if isinstance(piece, NamedCall)]

    @property
    def message(self) -> JsonObject:
        """The answer as a message, in the form to render and compare."""
        message: JsonObject = {"role": "assistant", "content": self.content}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.calls:
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in self.calls
            ]
        return message


@dataclass(frozen=True, kw_only=True)
class TokenUsage:
    """The token counts of a call."""

    num_prompt: int
    num_generated: int


class AnswerForm(Protocol):
    """A protocol for one form of the API: a request that was read, and the responses to it."""

    call: ModelCall
    stream_end: bytes
    """The end of a stream, after its last event."""

    def make_response(self, answers: Sequence[ModelAnswer], usage: TokenUsage) -> JsonObject:
        """Make the whole response."""

    def open_events(self, usage: TokenUsage) -> Iterable[JsonObject]:
        """Make the events that open a stream, before anything is generated."""

    def delta_events(self, delta: AnswerDelta) -> Iterable[JsonObject]:
        """Make the events for a part of a choice."""

    def end_events(self, answer: ModelAnswer) -> Iterable[JsonObject]:
        """Make the events that end a choice."""

    def close_events(self, answers: Sequence[ModelAnswer], usage: TokenUsage) -> Iterable[JsonObject]:
        """Make the events that end a stream."""

    def error_event(self, error: ApiError) -> JsonObject:
        """Make the event that ends a stream which failed after its start."""


def join_pieces(pieces: Iterable[ModelPiece]) -> list[ModelPiece]:
    """Return the pieces of an answer with neighbours of one kind of text joined."""
    texts: list[tuple[ModelPiece, list[str]]] = []
    for piece in pieces:
        if not isinstance(piece, NamedCall) and texts and type(texts[-1][0]) is type(piece):
            texts[-1][1].append(piece.text)
        else:
            texts.append((piece, [] if isinstance(piece, NamedCall) else [piece.text]))
    return [piece if isinstance(piece, NamedCall) else type(piece)("".join(text)) for piece, text in texts]


def name_calls(pieces: Iterable[AnswerPiece], *, choice_id: str, num_before: int) -> list[ModelPiece]:
    """Return the pieces with an id for each call; `num_before` calls of the answer came before."""
    named: list[ModelPiece] = []
    for piece in pieces:
        if isinstance(piece, ToolCall):
            call_id = make_call_id(choice_id, num_before)
            named.append(NamedCall(id=call_id, number=num_before, name=piece.name, arguments=piece.arguments))
            num_before += 1
        else:
            named.append(piece)
    return named


def make_id(prefix: str) -> str:
    """Return a new name of a response or of a part of it."""
    return f"{prefix}{secrets.token_hex(12)}"


def make_call_id(choice_id: str, number: int) -> str:
    """Return the id of a tool call: letters and digits that no other call of the episode has."""
    return hashlib.sha256(f"{choice_id}/{number}".encode()).hexdigest()[:CALL_ID_CHARS]


def encode_event(event: JsonObject) -> bytes:
    """Return a server-sent event; one that has a type is named by it."""
    name = event.get("type")
    head = f"event: {name}\n".encode() if isinstance(name, str) else b""
    return head + b"data: " + msgspec.json.encode(event) + b"\n\n"


class LogprobEntries:
    """The log-probabilities of tokens, in the form of OpenAI's chat API."""

    def __init__(self, template: ChatTemplate) -> None:
        self._template = template

    def list_entries(self, parts: Iterable[CompletionChunk]) -> list[JsonObject]:
        """Return an entry for each token, with the likeliest tokens at its place."""
        return [entry for part in parts for entry in self._list_part(part)]

    def _list_part(self, part: CompletionChunk) -> list[JsonObject]:
        tops = part.top or [{}] * len(part.token_ids)
        return [
            {
                **self._make_entry(token, logprob),
                "top_logprobs": [self._make_entry(other, likely) for other, likely in top.items()],
            }
            for token, logprob, top in zip(part.token_ids, part.logprobs, tops, strict=True)
        ]

    def _make_entry(self, token: int, logprob: float) -> JsonObject:
        text = self._template.decode_token(token)
        return {"token": text, "logprob": logprob, "bytes": list(text.encode())}
