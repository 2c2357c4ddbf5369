"""Answers in OpenAI's form: whole, and as the chunks of a stream. Pure.

ChatForm, TextForm     the two kinds of request: what an answer, a chunk and log-probabilities look like in each

Tool calls in what a model says, in the form that Hermes and Qwen models use: JSON between two tags. Pure.

parse        the text before the first call, and the calls
certain      how much of a growing text can be told already, as it will not turn out to be a call
"""

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from hpcrl.engines.base import Part
from hpcrl.models.chat_template import Template
from hpcrl.rollout.agents.requests import ChatRequest, TextRequest

OPEN, CLOSE = "<tool_call>", "</tool_call>"


@dataclass(frozen=True)
class ToolCall:
    """A call of a function by its name."""

    name: str
    arguments: dict[str, Any]


class ToolFormat(Protocol):
    """How a model writes its calls; a model that does it otherwise needs another of these."""

    def parse(self, text: str) -> tuple[str, list[ToolCall]]: ...

    def certain(self, text: str) -> int: ...


class Hermes:
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, as often as needed, after any text."""

    def parse(self, text: str) -> tuple[str, list[ToolCall]]:
        """A call that is not well formed makes the whole answer text: the agent is shown what the model said."""
        before, *pieces = text.split(OPEN)
        calls = [_call_tool_calls(piece.partition(CLOSE)[0]) for piece in pieces]
        good = [call for call in calls if call is not None]
        return (before.rstrip(), good) if pieces and len(good) == len(calls) else (text, [])

    def certain(self, text: str) -> int:
        if OPEN in text:
            text = text[: text.index(OPEN)]
        held = next((size for size in range(len(OPEN) - 1, 0, -1) if text.endswith(OPEN[:size])), 0)
        return len(text[: len(text) - held].rstrip())


HERMES = Hermes()


def _call_tool_calls(text: str) -> ToolCall | None:
    try:
        call = json.loads(text)
        name, arguments = call["name"], call.get("arguments", {})
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None
    return ToolCall(name, arguments) if isinstance(name, str) and isinstance(arguments, dict) else None


Json = dict[str, Any]


class Form(Protocol):
    """One kind of request and how it is answered."""

    kind: str

    def choice(self, index: int, *, text: str, finish_reason: str, parts: Sequence[Part], name: str) -> Json:
        """A whole choice; `name` begins the ids of its tool calls."""

    def opening(self, index: int) -> list[Json]:
        """What a stream begins a choice with."""

    def chunk(self, index: int, *, text: str, told: int, part: Part) -> Json:
        """A piece of a choice: its text from `told` on, as far as it is certain."""

    def closing(self, index: int, *, text: str, told: int, finish_reason: str, part: Part, name: str) -> list[Json]:
        """The last pieces of a choice."""

    def certain(self, text: str) -> int:
        """How much of a growing text may be told."""


class ChatForm:
    """Of POST /v1/chat/completions."""

    kind = "chat.completion"

    def __init__(self, asked: ChatRequest, *, template: Template, tools: ToolFormat) -> None:
        self._tells_logprobs = bool(asked.logprobs)
        self._tools = tools if asked.tools and asked.tool_choice != "none" else None
        self._template = template

    def certain(self, text: str) -> int:
        return len(text) if self._tools is None else self._tools.certain(text)

    def choice(self, index: int, *, text: str, finish_reason: str, parts: Sequence[Part], name: str) -> Json:
        content, calls = self._calls(text)
        message: Json = {"role": "assistant", "content": content, "refusal": None}
        if calls:
            message |= {"content": content or None, "tool_calls": [_call(c, n, name=name) for n, c in enumerate(calls)]}
        return {
            "index": index,
            "message": message,
            "logprobs": self._logprobs(parts),
            "finish_reason": "tool_calls" if calls else finish_reason,
        }

    def opening(self, index: int) -> list[Json]:
        return [_delta(index, {"role": "assistant", "content": ""})]

    def chunk(self, index: int, *, text: str, told: int, part: Part) -> Json:
        return _delta(index, {"content": text[told : self.certain(text)]}, logprobs=self._logprobs([part]))

    def closing(self, index: int, *, text: str, told: int, finish_reason: str, part: Part, name: str) -> list[Json]:
        content, calls = self._calls(text)
        delta: Json = {"content": content[told:]}
        if calls:
            delta["tool_calls"] = [{"index": n, **_call(call, n, name=name)} for n, call in enumerate(calls)]
        last = _delta(index, {}, finish_reason="tool_calls" if calls else finish_reason)
        return [_delta(index, delta, logprobs=self._logprobs([part])), last]

    def _calls(self, text: str) -> tuple[str, list[ToolCall]]:
        return (text, []) if self._tools is None else self._tools.parse(text)

    def _logprobs(self, parts: Sequence[Part]) -> Json | None:
        if not self._tells_logprobs:
            return None
        return {"content": [entry for part in parts for entry in self._entries(part)], "refusal": None}

    def _entries(self, part: Part) -> list[Json]:
        tops = part.top or [{}] * len(part.token_ids)
        return [
            {
                **self._entry(token, logprob),
                "top_logprobs": [self._entry(other, likely) for other, likely in top.items()],
            }
            for token, logprob, top in zip(part.token_ids, part.logprobs, tops, strict=True)
        ]

    def _entry(self, token: int, logprob: float) -> Json:
        text = self._template.token(token)
        return {"token": text, "logprob": logprob, "bytes": list(text.encode())}


class TextForm:
    """Of POST /v1/completions."""

    kind = "text_completion"

    def __init__(self, asked: TextRequest, *, template: Template) -> None:
        self._tells_logprobs = asked.logprobs is not None
        self._template = template

    def certain(self, text: str) -> int:
        return len(text)

    def choice(self, index: int, *, text: str, finish_reason: str, parts: Sequence[Part], name: str) -> Json:
        return {"index": index, "text": text, "logprobs": self._logprobs(parts), "finish_reason": finish_reason}

    def opening(self, index: int) -> list[Json]:
        return []

    def chunk(self, index: int, *, text: str, told: int, part: Part) -> Json:
        return {"index": index, "text": text[told:], "logprobs": self._logprobs([part]), "finish_reason": None}

    def closing(self, index: int, *, text: str, told: int, finish_reason: str, part: Part, name: str) -> list[Json]:
        return [{**self.chunk(index, text=text, told=told, part=part), "finish_reason": finish_reason}]

    def _logprobs(self, parts: Sequence[Part]) -> Json | None:
        if not self._tells_logprobs:
            return None
        spell = self._template.token
        ids = [token for part in parts for token in part.token_ids]
        offsets, place = [], 0
        for token in ids:
            offsets.append(place)
            place += len(spell(token))
        return {
            "tokens": [spell(token) for token in ids],
            "token_logprobs": [logprob for part in parts for logprob in part.logprobs],
            "top_logprobs": [{spell(t): p for t, p in top.items()} for part in parts for top in part.top] or None,
            "text_offset": offsets,
        }


def head(kind: str, *, name: str, model: str) -> Json:
    """What every answer begins with."""
    return {"id": name, "object": kind, "created": int(time.time()), "model": model}


def usage(*, num_prompt: int, num_said: int) -> Json:
    """What an answer cost."""
    return {"prompt_tokens": num_prompt, "completion_tokens": num_said, "total_tokens": num_prompt + num_said}


def answer_message(choice: Json) -> Json | None:
    """The answer as a client will send it back; None if it is no message."""
    message = choice.get("message")
    return message and {name: message[name] for name in ("role", "content", "tool_calls") if name in message}


def _delta(index: int, delta: Json, *, logprobs: Json | None = None, finish_reason: str | None = None) -> Json:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}


def _call(call: ToolCall, number: int, *, name: str) -> Json:
    arguments = json.dumps(call.arguments, ensure_ascii=False)
    return {"id": f"call_{name}_{number}", "type": "function", "function": {"name": call.name, "arguments": arguments}}
