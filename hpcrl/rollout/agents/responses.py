"""Responses in OpenAI's form, whole and as chunks of a stream, with the tool calls found in generated text. Pure.

AnswerForm, ChatForm, TextForm  the form of answers, chunks and log-probabilities for the two kinds of request
make_header, make_usage         the fields that every response has
extract_message                 the answer as a client will send it back
JsonObject                      a decoded JSON object
"""

import itertools
import json
import time
from collections.abc import Sequence
from typing import Any, Protocol

from hpcrl.engines.base import CompletionChunk
from hpcrl.models.chat_template import ChatTemplate
from hpcrl.rollout.agents.requests import ChatRequest, TextRequest
from hpcrl.rollout.agents.tool_parsers import ContentText, ToolCall, ToolParser, parse_answer

JsonObject = dict[str, Any]


class AnswerForm(Protocol):
    """A protocol for answering one kind of request."""

    kind: str

    def choice(
        self, index: int, *, text: str, finish_reason: str, parts: Sequence[CompletionChunk], name: str
    ) -> JsonObject:
        """Make a whole choice; the ids of its tool calls start with `name`."""

    def opening_chunks(self, index: int) -> list[JsonObject]:
        """Make the chunks that open a choice in a stream."""

    def chunk(self, index: int, *, text: str, num_sent: int, part: CompletionChunk) -> JsonObject:
        """Make a chunk of a choice: its text from `num_sent` on, as far as it is certain."""

    def closing_chunks(
        self, index: int, *, text: str, num_sent: int, finish_reason: str, part: CompletionChunk, name: str
    ) -> list[JsonObject]:
        """Make the last chunks of a choice."""

    def stable_length(self, text: str) -> int:
        """Return how much of a growing text may be sent."""


class ChatForm:
    """The answers to POST /v1/chat/completions."""

    kind = "chat.completion"

    def __init__(self, api_request: ChatRequest, *, template: ChatTemplate, tools: ToolParser) -> None:
        self._sends_logprobs = bool(api_request.logprobs)
        self._parser = tools
        self._tools = (api_request.tools or []) if api_request.tool_choice != "none" else []
        self._template = template

    def stable_length(self, text: str) -> int:
        if not self._tools:
            return len(text)
        pieces = self._parser.make_reader(self._tools).feed(text)
        before_calls = itertools.takewhile(lambda piece: isinstance(piece, ContentText), pieces)
        return sum(len(piece.text) for piece in before_calls if isinstance(piece, ContentText))

    def choice(
        self, index: int, *, text: str, finish_reason: str, parts: Sequence[CompletionChunk], name: str
    ) -> JsonObject:
        content, calls = self._parse_calls(text)
        message: JsonObject = {"role": "assistant", "content": content, "refusal": None}
        if calls:
            message |= {
                "content": content or None,
                "tool_calls": [_make_call(c, n, name=name) for n, c in enumerate(calls)],
            }
        return {
            "index": index,
            "message": message,
            "logprobs": self._logprobs(parts),
            "finish_reason": "tool_calls" if calls else finish_reason,
        }

    def opening_chunks(self, index: int) -> list[JsonObject]:
        return [_make_delta(index, {"role": "assistant", "content": ""})]

    def chunk(self, index: int, *, text: str, num_sent: int, part: CompletionChunk) -> JsonObject:
        return _make_delta(
            index, {"content": text[num_sent : self.stable_length(text)]}, logprobs=self._logprobs([part])
        )

    def closing_chunks(
        self, index: int, *, text: str, num_sent: int, finish_reason: str, part: CompletionChunk, name: str
    ) -> list[JsonObject]:
        content, calls = self._parse_calls(text)
        delta: JsonObject = {"content": content[num_sent:]}
        if calls:
            delta["tool_calls"] = [{"index": n, **_make_call(call, n, name=name)} for n, call in enumerate(calls)]
        last = _make_delta(index, {}, finish_reason="tool_calls" if calls else finish_reason)
        return [_make_delta(index, delta, logprobs=self._logprobs([part])), last]

    def _parse_calls(self, text: str) -> tuple[str, list[ToolCall]]:
        if not self._tools:
            return text, []
        content, _, calls = parse_answer(self._parser.make_reader(self._tools), text)
        return content, calls

    def _logprobs(self, parts: Sequence[CompletionChunk]) -> JsonObject | None:
        if not self._sends_logprobs:
            return None
        return {"content": [entry for part in parts for entry in self._entries(part)], "refusal": None}

    def _entries(self, part: CompletionChunk) -> list[JsonObject]:
        tops = part.top or [{}] * len(part.token_ids)
        return [
            {
                **self._entry(token, logprob),
                "top_logprobs": [self._entry(other, likely) for other, likely in top.items()],
            }
            for token, logprob, top in zip(part.token_ids, part.logprobs, tops, strict=True)
        ]

    def _entry(self, token: int, logprob: float) -> JsonObject:
        text = self._template.decode_token(token)
        return {"token": text, "logprob": logprob, "bytes": list(text.encode())}


class TextForm:
    """The answers to POST /v1/completions."""

    kind = "text_completion"

    def __init__(self, api_request: TextRequest, *, template: ChatTemplate) -> None:
        self._sends_logprobs = api_request.logprobs is not None
        self._template = template

    def stable_length(self, text: str) -> int:
        return len(text)

    def choice(
        self, index: int, *, text: str, finish_reason: str, parts: Sequence[CompletionChunk], name: str
    ) -> JsonObject:
        return {"index": index, "text": text, "logprobs": self._logprobs(parts), "finish_reason": finish_reason}

    def opening_chunks(self, index: int) -> list[JsonObject]:
        return []

    def chunk(self, index: int, *, text: str, num_sent: int, part: CompletionChunk) -> JsonObject:
        return {"index": index, "text": text[num_sent:], "logprobs": self._logprobs([part]), "finish_reason": None}

    def closing_chunks(
        self, index: int, *, text: str, num_sent: int, finish_reason: str, part: CompletionChunk, name: str
    ) -> list[JsonObject]:
        return [{**self.chunk(index, text=text, num_sent=num_sent, part=part), "finish_reason": finish_reason}]

    def _logprobs(self, parts: Sequence[CompletionChunk]) -> JsonObject | None:
        if not self._sends_logprobs:
            return None
        decode_token = self._template.decode_token
        ids = [token for part in parts for token in part.token_ids]
        offsets, offset = [], 0
        for token in ids:
            offsets.append(offset)
            offset += len(decode_token(token))
        return {
            "tokens": [decode_token(token) for token in ids],
            "token_logprobs": [logprob for part in parts for logprob in part.logprobs],
            "top_logprobs": [{decode_token(t): p for t, p in top.items()} for part in parts for top in part.top]
            or None,
            "text_offset": offsets,
        }


def make_header(kind: str, *, name: str, model: str) -> JsonObject:
    """Return the fields at the start of every response."""
    return {"id": name, "object": kind, "created": int(time.time()), "model": model}


def make_usage(*, num_prompt: int, num_generated: int) -> JsonObject:
    """Return the token counts of a response."""
    return {"prompt_tokens": num_prompt, "completion_tokens": num_generated, "total_tokens": num_prompt + num_generated}


def extract_message(choice: JsonObject) -> JsonObject | None:
    """Return the answer as a client will send it back, or None if it is not a message."""
    message = choice.get("message")
    return message and {name: message[name] for name in ("role", "content", "tool_calls") if name in message}


def _make_delta(
    index: int, delta: JsonObject, *, logprobs: JsonObject | None = None, finish_reason: str | None = None
) -> JsonObject:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}


def _make_call(call: ToolCall, number: int, *, name: str) -> JsonObject:
    arguments = json.dumps(call.arguments, ensure_ascii=False)
    return {"id": f"call_{name}_{number}", "type": "function", "function": {"name": call.name, "arguments": arguments}}
