"""Translate POST /v1/responses, OpenAI's newer form, in which a program may refer to earlier responses. Pure.

ResponsesRequest  the body
TextOptions, ReasoningOptions  its parts
ResponsesForm     one request, and the responses to it
ResponseMemory    what the earlier responses of an episode contained
"""

import itertools
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec

from hpcrl.models.chat_template import ChatTemplate
from hpcrl.rollout.agents import chat_form
from hpcrl.rollout.agents.answers import AnswerDelta, LogprobEntries, ModelAnswer, TokenUsage, make_id
from hpcrl.rollout.agents.chat_form import is_named, read_schema
from hpcrl.rollout.agents.requests import (
    ApiError,
    JsonObject,
    MessageMemory,
    ModelCall,
    NumTops,
    SamplingFields,
    TokenLimit,
    choose_tools,
    list_unknown_fields,
    make_tool,
    parse_body,
    refuse_fields,
    split_tools,
)
from hpcrl.rollout.agents.response_items import JoinedItems, OutputItems, ReadItem, join_items, read_item
from hpcrl.rollout.agents.shared_sequence import RecentLists, SharedSequence, count_equal
from hpcrl.rollout.agents.tool_parsers import ContentText

IGNORED_FIELDS = chat_form.IGNORED_FIELDS | {"truncation", "max_tool_calls", "stream_options", "context_management"}
"""Fields that programs may send and that change no answer here."""
REFUSED_FIELDS = ("background", "conversation", "prompt")
_KNOWN_FIELDS = IGNORED_FIELDS | set(REFUSED_FIELDS)
_LOGPROBS = "message.output_text.logprobs"


class TextOptions(msgspec.Struct, frozen=True):
    """The required form of the answer's text."""

    format: JsonObject | None = None
    verbosity: str | None = None


class ReasoningOptions(msgspec.Struct, frozen=True):
    """The amount of thought that the client wants."""

    effort: str | None = None


class ResponsesRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The body."""

    model: str
    input: str | list[msgspec.Raw] | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    tools: list[JsonObject] | None = None
    tool_choice: str | JsonObject | None = None
    max_output_tokens: TokenLimit | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_logprobs: NumTops | None = None
    include: list[str] | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    stream: bool | None = None
    metadata: JsonObject | None = None
    store: bool | None = None
    """False if the client does not read the response again; the episode remembers it in any case."""
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: JsonObject | None = None


@dataclass(kw_only=True)
class ResponseMemory:
    """The contents of the earlier responses of an episode."""

    conversations: dict[str, SharedSequence[tuple[JsonObject, ...]]] = field(default_factory=dict)
    """The messages up to and including each response, by its id; instructions hold for one call only."""
    items: dict[str, JsonObject] = field(default_factory=dict)
    """The items of all responses, by their ids."""
    sent: MessageMemory = field(default_factory=MessageMemory)
    _joined: RecentLists[ReadItem, JoinedItems] = field(default_factory=RecentLists)
    """The items of the last requests."""
    _requests: dict[tuple[int, int], SharedSequence[tuple[JsonObject, ...]]] = field(default_factory=dict)
    """The messages of each request, by their number and the identity of the last one."""
    _last: RecentLists[JsonObject, SharedSequence[tuple[JsonObject, ...]]] = field(default_factory=RecentLists)
    """The messages of the last requests, in both forms."""

    def __post_init__(self) -> None:
        self._read_item = partial(read_item, known=self.items)  # one function: what it made is found by it

    def read_items(self, items: Sequence[msgspec.Raw]) -> tuple[list[JsonObject], tuple[str, ...]]:
        """Return the messages that items stand for, and the names of what is left out."""
        read = self.sent.read(items, self._read_item, name="input")
        before = self._joined.find(read)
        joined = join_items(read, before.value if before else JoinedItems())
        self._joined.add(read, joined, num_bytes=sum(map(len, items)))
        return joined.messages, joined.left_out

    def add_response(self, name: str, messages: list[JsonObject], answer: JsonObject) -> None:
        """Store the messages up to a response, as what follows those of an earlier request."""
        sent, num_shared = self._find_shared(messages)
        if sent is None or num_shared < len(messages):
            sent = SharedSequence(tuple(messages[num_shared:]), sent, num_shared)
            self._requests[len(messages), id(messages[-1])] = sent
        self._last.add(messages, sent)
        self.conversations[name] = sent.extend((answer,))

    def _find_shared(self, messages: list[JsonObject]) -> tuple[SharedSequence[tuple[JsonObject, ...]] | None, int]:
        """Return an earlier request that starts as these messages do, mostly the last one, and how many it shares."""
        last = self._last.find(messages)
        if last is not None and (num_shared := count_equal(messages, last.items)) == len(last.items):
            return last.value, num_shared
        places = ((num, id(messages[num - 1])) for num in range(len(messages), 0, -1))
        found = next((self._requests[place] for place in places if place in self._requests), None)
        return found, 0 if found is None else count_equal(_list_messages(found), messages)


def _list_messages(sequence: SharedSequence[tuple[JsonObject, ...]]) -> list[JsonObject]:
    return list(itertools.chain.from_iterable(sequence.list_parts()))


class ResponsesForm:
    """One request, and the responses to it."""

    stream_end = b""

    def __init__(self, body: bytes, *, template: ChatTemplate, memory: ResponseMemory) -> None:
        request, sent = parse_body(body, ResponsesRequest)
        refuse_fields(sent, REFUSED_FIELDS)
        self._request, self._memory = request, memory
        self._messages, left_out = _read_conversation(request, memory)
        ignored = (*list_unknown_fields(sent, known=_KNOWN_FIELDS), *left_out)
        self.call = _make_call(request, self._messages, ignored=ignored)
        self._entries = LogprobEntries(template) if _LOGPROBS in (request.include or ()) else None
        self._id = make_id("resp_")
        self._created_at = int(time.time())
        self._output = OutputItems()
        self._num_events = 0

    def make_response(self, answers: Sequence[ModelAnswer], usage: TokenUsage) -> JsonObject:
        (answer,) = answers
        for piece in answer.pieces:
            list(self._output.add_piece(piece))
        list(self.end_events(answer))
        return self._describe(answer=answer, usage=usage)

    def open_events(self, usage: TokenUsage) -> Iterable[JsonObject]:
        opened = self._describe(answer=None, usage=None)
        return self._number([{"type": f"response.{step}", "response": opened} for step in ("created", "in_progress")])

    def delta_events(self, delta: AnswerDelta) -> Iterable[JsonObject]:
        return self._number(event for piece in delta.pieces for event in self._output.add_piece(piece))

    def end_events(self, answer: ModelAnswer) -> Iterable[JsonObject]:
        if not answer.calls and not answer.content:  # what is sent back must contain a message
            yield from self._number(self._output.add_piece(ContentText("")))
        yield from self._number(self._output.close("incomplete" if answer.finish_reason == "length" else "completed"))
        if self._entries is not None:
            self._output.set_logprobs(self._entries.list_entries(answer.parts))
        self._memory.add_response(self._id, self._messages, answer.message)
        self._memory.items |= {item["id"]: item for item in self._output.items}

    def close_events(self, answers: Sequence[ModelAnswer], usage: TokenUsage) -> Iterable[JsonObject]:
        (answer,) = answers
        response = self._describe(answer=answer, usage=usage)
        return self._number([{"type": f"response.{response['status']}", "response": response}])

    def error_event(self, error: ApiError) -> JsonObject:
        why = {"code": error.error["code"], "message": error.error["message"], "param": error.error["param"]}
        return {"type": "error", **why, "sequence_number": self._num_events}

    def _number(self, events: Iterable[JsonObject]) -> Iterable[JsonObject]:
        for event in events:
            yield {**event, "sequence_number": self._num_events}
            self._num_events += 1

    def _describe(self, *, answer: ModelAnswer | None, usage: TokenUsage | None) -> JsonObject:
        """Return the response as it is now."""
        request = self._request
        is_cut = answer is not None and answer.finish_reason == "length"
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created_at,
            "status": "in_progress" if answer is None else "incomplete" if is_cut else "completed",
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "metadata": request.metadata or {},
            "model": request.model,
            "output": [] if answer is None else self._output.items,
            "parallel_tool_calls": request.parallel_tool_calls is not False,
            "previous_response_id": request.previous_response_id,
            "reasoning": {"effort": request.reasoning and request.reasoning.effort, "summary": None},
            "store": request.store is not False,
            "temperature": request.temperature,
            "text": {"format": (request.text and request.text.format) or {"type": "text"}},
            "tool_choice": request.tool_choice or "auto",
            "tools": request.tools or [],
            "top_p": request.top_p,
            "truncation": "disabled",
            "usage": usage and _make_usage(usage, num_reasoning=0),
        }


def _read_conversation(request: ResponsesRequest, memory: ResponseMemory) -> tuple[list[JsonObject], tuple[str, ...]]:
    """Return the messages of the request and of the response that it continues, and what is left out of them."""
    before: list[JsonObject] = []
    if (name := request.previous_response_id) is not None:
        if name not in memory.conversations:
            why = f"previous_response_id is {name!r}: this episode has had no such response"
            raise ApiError(400, why, param="previous_response_id", code="previous_response_not_found")
        before = _list_messages(memory.conversations[name])
    if isinstance(request.input, str):
        return [*before, {"role": "user", "content": request.input}], ()
    new, left_out = memory.read_items(request.input or ())
    messages = [*before, *new]
    if not messages:
        raise ApiError(400, "input is missing: give a string or items", param="input", code="invalid_value")
    return messages, left_out


def _make_call(request: ResponsesRequest, messages: list[JsonObject], *, ignored: tuple[str, ...]) -> ModelCall:
    given, left_out = split_tools(request.tools, known=("function",))
    tools, must_call = _read_tools(request, given)
    kwargs = dict(request.chat_template_kwargs or {})
    if request.reasoning is not None and request.reasoning.effort is not None:
        kwargs.setdefault("reasoning_effort", request.reasoning.effort)
    system = [{"role": "system", "content": request.instructions}] if request.instructions else []
    return ModelCall(
        model=request.model,
        messages=[*system, *messages],
        tools=tools,
        must_call=must_call,
        may_call_several=request.parallel_tool_calls is not False and not is_named(request.tool_choice),
        output_schema=read_schema(request.text.format if request.text else None, param="text.format"),
        template_kwargs=kwargs,
        max_tokens=request.max_output_tokens,
        sampling=SamplingFields(temperature=request.temperature, top_p=request.top_p),
        top_logprobs=request.top_logprobs or 0,
        stream=bool(request.stream),
        ignored_fields=(*ignored, *left_out),
    )


def _read_tools(
    request: ResponsesRequest, given: Sequence[JsonObject]
) -> tuple[list[JsonObject] | None, tuple[str, ...]]:
    """Return the tools that the model sees, and those of which it must call one."""
    tools = [_read_tool(tool) for tool in given]
    match request.tool_choice:
        case None | "auto":
            return choose_tools(tools, "auto")
        case "none" | "required" as mode:
            return choose_tools(tools, mode)
        case {"type": "function", "name": str(name)}:
            return choose_tools(tools, "required", named=[name])
        case {"type": "allowed_tools", "mode": "auto" | "required" as mode, "tools": list(listed)}:
            return choose_tools(tools, mode, named=[str(tool.get("name")) for tool in listed])
    why = f'tool_choice is {request.tool_choice!r}: it must be "auto", "none", "required" or name a function'
    raise ApiError(400, why, param="tool_choice", code="invalid_value")


def _read_tool(tool: JsonObject) -> JsonObject:
    function: Any = {name: tool.get(name) for name in ("name", "description", "parameters", "strict")}
    return make_tool(function, place="tools")


def _make_usage(usage: TokenUsage, *, num_reasoning: int) -> JsonObject:
    return {
        "input_tokens": usage.num_prompt,
        "input_tokens_details": {"cached_tokens": 0},
        "output_tokens": usage.num_generated,
        "output_tokens_details": {"reasoning_tokens": num_reasoning},
        "total_tokens": usage.num_prompt + usage.num_generated,
    }
