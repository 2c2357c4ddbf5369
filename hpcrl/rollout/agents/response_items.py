"""Translate the items of OpenAI's responses: those that a program sends, and those that it receives. Pure.

ReadItem     an item as it was read, once
read_item    reads one
JoinedItems  items, and the messages that they stand for
join_items   joins them; the model's neighbouring items are one message
OutputItems  the items of one response, made piece by piece with the events of a stream
"""

import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from hpcrl.rollout.agents.answers import ModelPiece, NamedCall, make_id
from hpcrl.rollout.agents.requests import ApiError, JsonObject, normalise_message, read_call, read_text
from hpcrl.rollout.agents.tool_parsers import ContentText, ReasoningText

_NEEDED_KINDS = ("message", "image", "audio", "input_file", "computer_call_output")
"""Words in the kinds of items without which a conversation would mean something else."""


@dataclass(eq=False, slots=True)
class ReadItem:
    """An item as it was read: a part of the model's message, or another message, or one that is left out."""

    part: JsonObject | None = None
    message: JsonObject | None = None
    left_out: str = ""
    """The name of what is left out."""
    joined: tuple[list["ReadItem"], JsonObject] | None = None
    """The items of the model after this one, and the message of all of them, which a program sends again and again."""


def read_item(item: JsonObject, place: str, *, known: Mapping[str, JsonObject]) -> ReadItem:
    """Read an item, which may be a reference to one of the known ones."""
    item = _resolve_item(item, known=known, place=place)
    part = _read_model_item(item, place=place)
    if part is not None:
        return ReadItem(part=part)
    if _is_left_out(item):
        return ReadItem(left_out=f"items of type {item['type']}")
    return ReadItem(message=_read_other_item(item, place=place))


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class JoinedItems:
    """Items, and the messages that they stand for."""

    items: list[ReadItem] = field(default_factory=list)
    messages: list[JsonObject] = field(default_factory=list)
    left_out: tuple[str, ...] = ()
    """The names of what is left out."""
    num_ended: int = 0
    """The first items that stand for the same messages whatever follows them."""
    num_messages: int = 0
    """The messages of these items."""


def join_items(items: list[ReadItem], before: JoinedItems) -> JoinedItems:
    """Return the messages that the items stand for, which are never changed.

    What was joined before, for the request before this one, is kept: a program sends its whole conversation each time.
    """
    num_ended = before.num_ended
    if not num_ended or items[:num_ended] != before.items[:num_ended]:
        before, num_ended = JoinedItems(), 0
    messages = before.messages[: before.num_messages]
    num_messages = len(messages)
    group: list[ReadItem] = []
    has_text = has_call = False
    for number, item in enumerate(items[num_ended:], num_ended + 1):
        if item.left_out:
            continue
        part = item.part
        if part is None or (part.get("content") and has_text and not has_call):
            messages += _join_group(group)
            group, has_text, has_call = [], False, False
        if part is None:
            messages += [item.message] if item.message is not None else []
            num_ended, num_messages = number, len(messages)
        else:
            group.append(item)
            has_text, has_call = has_text or bool(part.get("content")), has_call or "tool_calls" in part
    messages += _join_group(group)
    return JoinedItems(
        items=items,
        messages=messages,
        left_out=tuple(dict.fromkeys(item.left_out for item in items if item.left_out)),
        num_ended=num_ended,
        num_messages=num_messages,
    )


def _join_group(group: list[ReadItem]) -> list[JsonObject]:
    """Return the message of the model that neighbouring items are, if there are any."""
    if not group:
        return []
    first, *others = group
    joined = first.joined
    if joined is None or joined[0] != others:
        answer: JsonObject = {"role": "assistant", "content": ""}
        for name, value in itertools.chain.from_iterable((item.part or {}).items() for item in group):
            answer[name] = answer[name] + value if name in answer else value
        first.joined = joined = others, answer  # several threads may do so: each returns its own
    return [joined[1]]


def _is_left_out(item: JsonObject) -> bool:
    """Return whether an item is of a provider's tools, or of a kind that is not known, and can be missed."""
    match item:
        case {"role": str()} | {"type": "function_call_output" | "custom_tool_call_output"}:
            return False
        case {"type": str(kind)}:
            return not any(word in kind for word in _NEEDED_KINDS)
    return False


def _resolve_item(item: JsonObject, *, known: Mapping[str, JsonObject], place: str) -> JsonObject:
    if item.get("type") != "item_reference":
        return item
    found = known.get(str(item.get("id")))
    if found is None:
        raise ApiError(400, f"{place} refers to {item.get('id')!r}: this episode has had no such item", param="input")
    return found


def _read_model_item(item: JsonObject, *, place: str) -> JsonObject | None:
    """Return the part of the model's message that an item is, or None if it is not the model's."""
    match item:
        case {"type": "reasoning"}:
            thought = read_text(item.get("content") or item.get("summary") or None, place=place)
            return {"reasoning_content": thought} if thought else {}
        case {"type": "function_call"}:
            call = read_call(item.get("name"), item.get("arguments"), call_id=item.get("call_id"), place=place)
            return {"tool_calls": [call]}
        case {"type": "custom_tool_call"}:
            arguments = {"input": item.get("input")}
            return {"tool_calls": [read_call(item.get("name"), arguments, call_id=item.get("call_id"), place=place)]}
        case {"role": "assistant"}:
            return {"content": read_text(item.get("content"), place=place)}
    return None


def _read_other_item(item: JsonObject, *, place: str) -> JsonObject:
    match item:
        case {"type": "function_call_output" | "custom_tool_call_output"}:
            result = read_text(item.get("output"), place=place)
            return {"role": "tool", "content": result, "tool_call_id": str(item.get("call_id", ""))}
        case {"role": str()}:
            return normalise_message({"role": item["role"], "content": item.get("content")}, place)
    why = f"{place} has the type {item.get('type')!r}: this model reads messages, reasoning and function calls"
    raise ApiError(400, why, param="input", code="invalid_value")


class OutputItems:
    """The items of one response; each method yields the events of a stream that belong to the change."""

    def __init__(self) -> None:
        self.items: list[JsonObject] = []
        self._kind: type[ModelPiece] | None = None
        """The kind of the last item while it is open."""
        self._texts: list[str] = []

    def add_piece(self, piece: ModelPiece) -> Iterator[JsonObject]:
        """Add what was generated next: it continues the open item, or opens another."""
        if isinstance(piece, NamedCall):
            yield from self.close()
            yield from self._add_call(piece)
            return
        if type(piece) is not self._kind:
            yield from self.close()
            yield from self._open_text(type(piece))
        self._texts.append(piece.text)
        if piece.text:
            yield self._text_event("delta", delta=piece.text)

    def _open_text(self, kind: type[Any]) -> Iterator[JsonObject]:
        self._kind, self._texts = kind, []
        if kind is ReasoningText:
            opened = {"id": make_id("rs_"), "type": "reasoning", "summary": [], "content": [], "status": "in_progress"}
        else:
            opened = {"id": make_id("msg_"), "type": "message", "role": "assistant", "content": []}
            opened["status"] = "in_progress"
        self.items.append(opened)
        yield {"type": "response.output_item.added", "output_index": self._index, "item": dict(opened)}
        yield {"type": "response.content_part.added", **self._place, "part": self._make_part("")}

    def close(self, status: Literal["completed", "incomplete"] = "completed") -> Iterator[JsonObject]:
        """End the open item, if there is one."""
        if self._kind is None:
            return
        text = "".join(self._texts)
        part, item = self._make_part(text), self.items[-1]
        item |= {"content": [part], "status": status}
        yield self._text_event("done", text=text)
        yield {"type": "response.content_part.done", **self._place, "part": part}
        yield {"type": "response.output_item.done", "output_index": self._index, "item": item}
        self._kind = None

    def _add_call(self, call: NamedCall) -> Iterator[JsonObject]:
        item = {"id": make_id("fc_"), "type": "function_call", "call_id": call.id, "name": call.name}
        self.items.append(item)
        place = {"item_id": item["id"], "output_index": self._index}
        opened = {**item, "arguments": "", "status": "in_progress"}
        yield {"type": "response.output_item.added", "output_index": self._index, "item": opened}
        arguments = call.encoded_arguments
        yield {"type": "response.function_call_arguments.delta", **place, "delta": arguments}
        yield {
            "type": "response.function_call_arguments.done",
            **place,
            "name": call.name,
            "arguments": arguments,
        }
        item |= {"arguments": arguments, "status": "completed"}
        yield {"type": "response.output_item.done", "output_index": self._index, "item": item}

    def set_logprobs(self, entries: Iterable[JsonObject]) -> None:
        """Put the log-probabilities of all tokens into the first text."""
        for item in self.items:
            if item["type"] == "message":
                item["content"][0]["logprobs"] = list(entries)
                return

    @property
    def _index(self) -> int:
        return len(self.items) - 1

    @property
    def _place(self) -> JsonObject:
        return {"item_id": self.items[-1]["id"], "output_index": self._index, "content_index": 0}

    def _make_part(self, text: str) -> JsonObject:
        if self._kind is ReasoningText:
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}

    def _text_event(self, step: str, **fields: str) -> JsonObject:
        if self._kind is ContentText:
            return {"type": f"response.output_text.{step}", **self._place, **fields, "logprobs": []}
        return {"type": f"response.reasoning_text.{step}", **self._place, **fields}
