"""Translate POST /v1/chat/completions, OpenAI's form that most agents use. Pure.

ChatRequest     the body
StreamOptions   its part about the stream
ChatForm        one request, and the responses to it
CommonFields    the fields that it shares with plain completions
read_stops, read_schema, is_named, make_usage  how they are translated
"""

import contextlib
import json
import time
from collections.abc import Iterable, Sequence
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from hpcrl.models.chat_template import ChatTemplate
from hpcrl.rollout.agents.answers import AnswerDelta, LogprobEntries, ModelAnswer, NamedCall, TokenUsage, make_id
from hpcrl.rollout.agents.requests import (
    MAX_STOPS,
    ApiError,
    JsonObject,
    MessageMemory,
    ModelCall,
    NumChoices,
    NumTops,
    SamplingFields,
    StopTexts,
    TokenLimit,
    choose_tools,
    list_unknown_fields,
    make_tool,
    normalise_message,
    parse_body,
    refuse_fields,
    split_tools,
)
from hpcrl.rollout.agents.tool_parsers import ContentText, ReasoningText

IGNORED_FIELDS = frozenset(
    {
        "user",
        "metadata",
        "store",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "prediction",
        "verbosity",
        "modalities",
    }
)
"""Fields that programs may send and that change no answer here."""
REFUSED_FIELDS = (
    "audio",
    "web_search_options",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
    "continue_final_message",
)
"""Fields without which an answer would mean something else."""


FORM_FIELDS = ("response_format", "structured_outputs", "guided_json")
"""Fields that ask for a form of the answer: OpenAI's, and vLLM's names for it."""


class StreamOptions(msgspec.Struct, frozen=True):
    """The options of a request about its stream."""

    include_usage: bool | None = None


class CommonFields(SamplingFields, frozen=True, kw_only=True):
    """The fields that chat and plain completions share. OpenAI's clients send null for a field that is not set."""

    model: str
    max_tokens: TokenLimit | None = None
    n: NumChoices | None = None
    stop: StopTexts | None = None
    stop_token_ids: Annotated[list[int], Meta(max_length=MAX_STOPS)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    @property
    def sends_usage(self) -> bool:
        """True if the last chunk of a stream has the token counts."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)


class ChatRequest(CommonFields, frozen=True, kw_only=True):
    """The body."""

    messages: Annotated[list[msgspec.Raw], Meta(min_length=1)]
    max_completion_tokens: TokenLimit | None = None
    logprobs: bool | None = None
    top_logprobs: NumTops | None = None
    tools: list[JsonObject] | None = None
    tool_choice: str | JsonObject | None = None
    functions: list[JsonObject] | None = None
    """The tools of an older form of the API, as is `function_call`."""
    function_call: str | JsonObject | None = None
    response_format: JsonObject | None = None
    structured_outputs: JsonObject | None = None
    guided_json: str | JsonObject | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    chat_template_kwargs: JsonObject | None = None


class ChatForm:
    """One request, and the responses to it."""

    stream_end = b"data: [DONE]\n\n"

    def __init__(self, body: bytes, *, template: ChatTemplate, memory: MessageMemory) -> None:
        request, sent = parse_body(body, ChatRequest)
        refuse_fields(sent, REFUSED_FIELDS)
        messages = memory.read(request.messages, normalise_message)
        self.call = _make_call(request, messages, ignored=list_unknown_fields(sent, known=IGNORED_FIELDS))
        self._entries = LogprobEntries(template) if request.logprobs else None
        self._sends_usage = request.sends_usage
        self._is_legacy = bool(request.functions)
        self._opened: set[int] = set()
        self._header = {"id": make_id("chatcmpl-"), "created": int(time.time()), "model": request.model}

    def make_response(self, answers: Sequence[ModelAnswer], usage: TokenUsage) -> JsonObject:
        choices = [self._make_choice(answer) for answer in answers]
        return {**self._header, "object": "chat.completion", "choices": choices, "usage": make_usage(usage)}

    def open_events(self, usage: TokenUsage) -> Iterable[JsonObject]:
        return ()

    def delta_events(self, delta: AnswerDelta) -> Iterable[JsonObject]:
        if delta.index not in self._opened:
            self._opened.add(delta.index)
            yield self._make_chunk(delta.index, {"role": "assistant", "content": ""})
        changed = self._make_delta(delta)
        if changed or self._entries is not None:
            yield self._make_chunk(delta.index, changed or {"content": ""}, logprobs=self._make_logprobs([delta.part]))

    def end_events(self, answer: ModelAnswer) -> Iterable[JsonObject]:
        yield self._make_chunk(answer.index, {}, finish_reason=self._finish_reason(answer))

    def close_events(self, answers: Sequence[ModelAnswer], usage: TokenUsage) -> Iterable[JsonObject]:
        if self._sends_usage:
            yield {
                **self._header,
                "object": "chat.completion.chunk",
                "choices": [],
                "usage": make_usage(usage),
            }

    def error_event(self, error: ApiError) -> JsonObject:
        return {"error": error.error}

    def _make_choice(self, answer: ModelAnswer) -> JsonObject:
        message: JsonObject = {"role": "assistant", "content": answer.content, "refusal": None}
        if answer.reasoning:
            message["reasoning_content"] = answer.reasoning
        if answer.calls:
            message["content"] = answer.content or None
            if self._is_legacy:
                message["function_call"] = _encode_function(answer.calls[0])
            else:
                message["tool_calls"] = [_encode_call(call) for call in answer.calls]
        return {
            "index": answer.index,
            "message": message,
            "logprobs": self._make_logprobs(answer.parts),
            "finish_reason": self._finish_reason(answer),
        }

    def _finish_reason(self, answer: ModelAnswer) -> str:
        if not answer.calls:
            return answer.finish_reason
        return "function_call" if self._is_legacy else "tool_calls"

    def _make_delta(self, delta: AnswerDelta) -> JsonObject:
        changed: JsonObject = {}
        for name, kind in (("content", ContentText), ("reasoning_content", ReasoningText)):
            if text := "".join(piece.text for piece in delta.pieces if isinstance(piece, kind)):
                changed[name] = text
        calls = [piece for piece in delta.pieces if isinstance(piece, NamedCall)]
        if calls and self._is_legacy:
            changed["function_call"] = _encode_function(calls[0])
        elif calls:
            changed["tool_calls"] = [{"index": call.number, **_encode_call(call)} for call in calls]
        return changed

    def _make_chunk(
        self, index: int, delta: JsonObject, *, logprobs: JsonObject | None = None, finish_reason: str | None = None
    ) -> JsonObject:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
        return {**self._header, "object": "chat.completion.chunk", "choices": [choice]}

    def _make_logprobs(self, parts: Sequence[Any]) -> JsonObject | None:
        return None if self._entries is None else {"content": self._entries.list_entries(parts), "refusal": None}


def _make_call(request: ChatRequest, messages: list[JsonObject], *, ignored: tuple[str, ...]) -> ModelCall:
    if request.top_logprobs and not request.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs = true", param="top_logprobs", code="invalid_value")
    given, left_out = split_tools(request.tools, known=("function",))
    tools, must_call = _read_tools(request, given)
    kwargs = dict(request.chat_template_kwargs or {})
    if request.reasoning_effort is not None:
        kwargs.setdefault("reasoning_effort", request.reasoning_effort)
    return ModelCall(
        model=request.model,
        messages=messages,
        tools=tools,
        must_call=must_call,
        may_call_several=request.parallel_tool_calls is not False and not is_named(request.tool_choice),
        output_schema=_read_output_schema(request),
        template_kwargs=kwargs,
        max_tokens=request.max_completion_tokens or request.max_tokens,
        sampling=request,
        num_choices=request.n or 1,
        stops=read_stops(request.stop),
        stop_token_ids=tuple(request.stop_token_ids or ()),
        top_logprobs=request.top_logprobs or 0,
        stream=bool(request.stream),
        ignored_fields=(*ignored, *left_out),
    )


def _read_tools(request: ChatRequest, given: Sequence[JsonObject]) -> tuple[list[JsonObject] | None, tuple[str, ...]]:
    """Return the tools that the model sees, and those of which it must call one."""
    choice = request.tool_choice if request.functions is None else request.function_call
    tools = [make_tool(tool.get("function"), place="tools") for tool in given]
    tools += [make_tool(function, place="functions") for function in request.functions or []]
    match choice:
        case None | "auto":
            return choose_tools(tools, "auto")
        case "none" | "required":
            return choose_tools(tools, choice)
        case {"type": "function", "function": {"name": str(name)}} | {"name": str(name)}:
            return choose_tools(tools, "required", named=[name])
        case {"type": "allowed_tools", "allowed_tools": {"mode": "auto" | "required" as mode, "tools": list(listed)}}:
            return choose_tools(tools, mode, named=[_read_tool_name(tool) for tool in listed])
    why = f'tool_choice is {choice!r}: it must be "auto", "none", "required" or name a function'
    raise ApiError(400, why, param="tool_choice", code="invalid_value")


def is_named(choice: str | JsonObject | None) -> bool:
    """Return whether the choice is one function, which is called once."""
    return isinstance(choice, dict) and choice.get("type") == "function"


def _read_tool_name(tool: Any) -> str:
    match tool:
        case {"function": {"name": str(name)}} | {"name": str(name)}:
            return name
    raise ApiError(400, "tool_choice allows a tool without a name", param="tool_choice", code="invalid_value")


def _read_output_schema(request: ChatRequest) -> JsonObject | None:
    """Return the JSON schema that an answer must obey, from the one field that has it, OpenAI's or vLLM's."""
    schemas = (
        read_schema(request.response_format, param="response_format"),
        _read_structured_outputs(request.structured_outputs or {}),
        _load_schema(request.guided_json, param="guided_json"),
    )
    given = {param: schema for param, schema in zip(FORM_FIELDS, schemas, strict=True) if schema is not None}
    if len(given) > 1:
        why = f"{' and '.join(given)} each ask for a form of the answer: send one of them"
        raise ApiError(400, why, param=next(iter(given)), code="invalid_value")
    return next(iter(given.values()), None)


def _read_structured_outputs(form: JsonObject) -> JsonObject | None:
    """Return the JSON schema in vLLM's form; other forms are refused."""
    asked = {key: value for key, value in form.items() if value is not None and value is not False}
    if asked == {"json_object": True}:
        return {"type": "object"}
    if asked.keys() <= {"json"}:
        return _load_schema(asked.get("json"), param="structured_outputs.json")
    why = f"structured_outputs has {', '.join(asked):.200}: only json or json_object is supported"
    raise ApiError(400, why, param="structured_outputs", code="unsupported_parameter")


def _load_schema(schema: Any, *, param: str) -> JsonObject | None:
    """Return a JSON schema that is an object, or one in a text."""
    if isinstance(schema, str):
        with contextlib.suppress(ValueError, RecursionError):
            schema = json.loads(schema)
    if schema is None or isinstance(schema, dict):
        return schema
    raise ApiError(400, f"{param} is {schema!r:.100}: it must be a JSON schema", param=param, code="invalid_value")


def read_schema(form: JsonObject | None, *, param: str) -> JsonObject | None:
    """Return the JSON schema that an answer must obey, if the client sends one."""
    match form:
        case None | {"type": "text"}:
            return None
        case {"type": "json_object"}:
            return {"type": "object"}
        case {"type": "json_schema", "json_schema": {"schema": dict(schema)}}:
            return schema
        case {"type": "json_schema", "schema": dict(schema)}:
            return schema
    kind = form.get("type")
    why = f'{param} has the type {kind!r}: it must be "text", "json_object", or "json_schema" with a schema'
    raise ApiError(400, why, param=param, code="invalid_value")


def read_stops(stop: str | list[str] | None) -> tuple[str, ...]:
    """Return the texts that end an answer."""
    return tuple(text for text in ([stop] if isinstance(stop, str) else stop or []) if text)


def make_usage(usage: TokenUsage) -> JsonObject:
    """Return the token counts as these forms have them."""
    return {
        "prompt_tokens": usage.num_prompt,
        "completion_tokens": usage.num_generated,
        "total_tokens": usage.num_prompt + usage.num_generated,
    }


def _encode_function(call: NamedCall) -> JsonObject:
    return {"name": call.name, "arguments": call.encoded_arguments}


def _encode_call(call: NamedCall) -> JsonObject:
    return {"id": call.id, "type": "function", "function": _encode_function(call)}
