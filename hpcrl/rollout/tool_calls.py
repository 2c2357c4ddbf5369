"""Tool calls in what a model says, in the form that Hermes and Qwen models use: JSON between two tags. Pure.

parse        the text before the first call, and the calls
certain      how much of a growing text can be told already, as it will not turn out to be a call
"""

import json
from dataclasses import dataclass
from typing import Any, Protocol

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
        calls = [_call(piece.partition(CLOSE)[0]) for piece in pieces]
        good = [call for call in calls if call is not None]
        return (before.rstrip(), good) if pieces and len(good) == len(calls) else (text, [])

    def certain(self, text: str) -> int:
        if OPEN in text:
            text = text[: text.index(OPEN)]
        held = next((size for size in range(len(OPEN) - 1, 0, -1) if text.endswith(OPEN[:size])), 0)
        return len(text[: len(text) - held].rstrip())


HERMES = Hermes()


def _call(text: str) -> ToolCall | None:
    try:
        call = json.loads(text)
        name, arguments = call["name"], call.get("arguments", {})
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None
    return ToolCall(name, arguments) if isinstance(name, str) and isinstance(arguments, dict) else None
