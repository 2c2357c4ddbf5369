"""Translate POST /v1/messages, Anthropic's form. Pure.

MessagesRequest      the body
MessagesForm         one request, and the responses to it
read_conversation    its messages in the internal form
encode_error         an error in this form
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated, Any, NamedTuple

import msgspec
from msgspec import Meta

from hpcrl.rollout.agents.answers import AnswerDelta, ModelAnswer, ModelPiece, NamedCall, TokenUsage, make_id
from hpcrl.rollout.agents.chat_form import read_schema
from hpcrl.rollout.agents.requests import (
    MAX_STOPS,
    ApiError,
    JsonObject,
    MessageMemory,
    ModelCall,
    SamplingFields,
    TokenLimit,
    choose_tools,
    list_unknown_fields,
    make_tool,
    parse_body,
    read_call,
    read_text,
    read_thought,
    refuse_fields,
    split_tools,
)
from hpcrl.rollout.agents.tool_parsers import ContentText, ReasoningText

IGNORED_FIELDS = frozenset({"metadata", "service_tier", "inference_geo", "cache_control", "speed"})
"""Fields that programs may send and that change no answer here."""
REFUSED_FIELDS = ("mcp_servers", "container")
"""Fields that give the model tools which a provider runs."""
_KNOWN_FIELDS = IGNORED_FIELDS | set(REFUSED_FIELDS)
_READ_BLOCKS = ("image", "document", "search_result")
"""Blocks of an answer that are read or refused; others come from a provider's tools and are left out."""
_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens"}
_ERROR_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    502: "api_error",
    503: "overloaded_error",
}


class OutputConfig(msgspec.Struct, frozen=True):
    """The required form of the answer."""

    format: JsonObject | None = None
    effort: str | None = None


class MessagesRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The body."""

    model: str
    messages: Annotated[list[msgspec.Raw], Meta(min_length=1)]
    max_tokens: TokenLimit | None = None
    system: str | list[JsonObject] | None = None
    tools: list[JsonObject] | None = None
    tool_choice: JsonObject | None = None
    stop_sequences: Annotated[list[str], Meta(max_length=MAX_STOPS)] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: float | None = None
    thinking: JsonObject | None = None
    output_config: OutputConfig | None = None
    output_format: JsonObject | None = None
    stream: bool | None = None
    chat_template_kwargs: JsonObject | None = None


class MessagesForm:
    """One request, and the responses to it."""

    stream_end = b""

    def __init__(self, body: bytes, *, memory: MessageMemory) -> None:
        request, sent = parse_body(body, MessagesRequest)
        refuse_fields(sent, REFUSED_FIELDS)
        messages, left_out = read_conversation(request, memory)
        ignored = (*list_unknown_fields(sent, known=_KNOWN_FIELDS), *left_out)
        self.call = _make_call(request, messages, ignored=ignored)
        self._shows_reasoning = (request.thinking or {}).get("type") in ("enabled", "adaptive")
        self._header = {"id": make_id("msg_"), "type": "message", "role": "assistant", "model": request.model}
        self._block: type[ModelPiece] | None = None
        """The kind of the open block of a stream."""
        self._num_blocks = 0

    def make_response(self, answers: Sequence[ModelAnswer], usage: TokenUsage) -> JsonObject:
        (answer,) = answers
        return {
            **self._header,
            "content": [self._make_block(piece) for piece in answer.pieces if self._is_shown(piece)],
            **_make_ending(answer),
            "usage": _make_usage(usage),
        }

    def open_events(self, usage: TokenUsage) -> Iterable[JsonObject]:
        started: JsonObject = {"content": [], "stop_reason": None, "stop_sequence": None, "usage": _make_usage(usage)}
        yield {"type": "message_start", "message": {**self._header, **started}}
        yield {"type": "ping"}

    def delta_events(self, delta: AnswerDelta) -> Iterable[JsonObject]:
        for piece in delta.pieces:
            if self._is_shown(piece):
                yield from self._add_piece(piece)

    def _add_piece(self, piece: ModelPiece) -> Iterator[JsonObject]:
        """Yield the events for a piece, which opens a block unless it continues one."""
        if type(piece) is not self._block or isinstance(piece, NamedCall):
            yield from self._close_block()
            self._block = type(piece)
            empty = _empty_block(piece)
            yield {"type": "content_block_start", "index": self._num_blocks, "content_block": empty}
        match piece:
            case ContentText(text):
                change = {"type": "text_delta", "text": text}
            case ReasoningText(text):
                change = {"type": "thinking_delta", "thinking": text}
            case NamedCall():
                change = {"type": "input_json_delta", "partial_json": piece.encoded_arguments}
        yield {"type": "content_block_delta", "index": self._num_blocks, "delta": change}

    def _close_block(self) -> Iterator[JsonObject]:
        if self._block is not None:
            yield {"type": "content_block_stop", "index": self._num_blocks}
            self._num_blocks += 1
            self._block = None

    def end_events(self, answer: ModelAnswer) -> Iterable[JsonObject]:
        yield from self._close_block()

    def close_events(self, answers: Sequence[ModelAnswer], usage: TokenUsage) -> Iterable[JsonObject]:
        (answer,) = answers
        yield {"type": "message_delta", "delta": _make_ending(answer), "usage": _make_usage(usage)}
        yield {"type": "message_stop"}

    def error_event(self, error: ApiError) -> JsonObject:
        return encode_error(error)

    def _is_shown(self, piece: ModelPiece) -> bool:
        return self._shows_reasoning or not isinstance(piece, ReasoningText)

    def _make_block(self, piece: ModelPiece) -> JsonObject:
        match piece:
            case ContentText(text):
                return {**_empty_block(piece), "text": text}
            case ReasoningText(text):
                return {**_empty_block(piece), "thinking": text}
            case NamedCall():
                return {**_empty_block(piece), "input": piece.arguments}


def _empty_block(piece: ModelPiece) -> JsonObject:
    match piece:
        case ContentText():
            return {"type": "text", "text": ""}
        case ReasoningText():
            return {"type": "thinking", "thinking": "", "signature": ""}
        case NamedCall():
            return {"type": "tool_use", "id": piece.id, "name": piece.name, "input": {}}


def _make_ending(answer: ModelAnswer) -> JsonObject:
    if answer.stop_text is not None:
        return {"stop_reason": "stop_sequence", "stop_sequence": answer.stop_text}
    reason = "tool_use" if answer.calls else _STOP_REASONS[answer.finish_reason]
    return {"stop_reason": reason, "stop_sequence": None}


def _make_usage(usage: TokenUsage) -> JsonObject:
    cached = {"cache_creation_input_tokens": 0, "cache_read_input_tokens": 0}
    return {"input_tokens": usage.num_prompt, "output_tokens": usage.num_generated, **cached}


def encode_error(error: ApiError) -> JsonObject:
    """Return an error as this form has it."""
    kind = _ERROR_KINDS.get(error.status, "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": error.error["message"]}}


# ---- requests


def _make_call(request: MessagesRequest, messages: list[JsonObject], *, ignored: tuple[str, ...]) -> ModelCall:
    given, left_out = split_tools(request.tools, known=("custom",))
    tools, must_call = _read_tools(request, given)
    config, choice = request.output_config or OutputConfig(), request.tool_choice or {}
    kwargs = dict(request.chat_template_kwargs or {})
    if config.effort is not None:
        kwargs.setdefault("reasoning_effort", config.effort)
    return ModelCall(
        model=request.model,
        messages=messages,
        tools=tools,
        must_call=must_call,
        may_call_several=not choice.get("disable_parallel_tool_use") and choice.get("type") != "tool",
        output_schema=read_schema(config.format or request.output_format, param="output_config"),
        template_kwargs=kwargs,
        max_tokens=request.max_tokens,
        sampling=SamplingFields(temperature=request.temperature, top_p=request.top_p, top_k=request.top_k),
        stops=tuple(text for text in request.stop_sequences or () if text),
        stream=bool(request.stream),
        ignored_fields=(*ignored, *left_out),
    )


def _read_tools(
    request: MessagesRequest, given: Sequence[JsonObject]
) -> tuple[list[JsonObject] | None, tuple[str, ...]]:
    """Return the tools that the model sees, and those of which it must call one."""
    tools = [_read_tool(tool) for tool in given]
    match request.tool_choice:
        case None | {"type": "auto"}:
            return choose_tools(tools, "auto")
        case {"type": "none"}:
            return choose_tools(tools, "none")
        case {"type": "any"}:
            return choose_tools(tools, "required")
        case {"type": "tool", "name": str(name)}:
            return choose_tools(tools, "required", named=[name])
    why = f'tool_choice is {request.tool_choice!r}: its type must be "auto", "any", "none", or "tool" with a name'
    raise ApiError(400, why, param="tool_choice", code="invalid_value")


def _read_tool(tool: JsonObject) -> JsonObject:
    function = {
        "name": tool.get("name"),
        "description": tool.get("description"),
        "parameters": tool.get("input_schema"),
    }
    return make_tool(function, place="tools")


class TranslatedMessage(NamedTuple):
    """A message in the internal form, in which each tool result is a message, and the kinds of what is left out."""

    messages: Sequence[JsonObject]
    left_out: Sequence[str] = ()


def read_conversation(request: MessagesRequest, memory: MessageMemory) -> tuple[list[JsonObject], tuple[str, ...]]:
    """Return the messages in the internal form, and the kinds of blocks that are left out of them."""
    messages: list[JsonObject] = []
    left_out: dict[str, None] = {}
    if request.system:
        messages.append({"role": "system", "content": _read_system(request.system)})
    for read in memory.read(request.messages, _read_message):
        messages += read.messages
        left_out |= dict.fromkeys(read.left_out)
    if messages[-1]["role"] == "assistant":
        why = "the last message is the assistant's: this model does not continue an answer"
        raise ApiError(400, why, param="messages")
    return messages, tuple(left_out)


def _read_message(message: JsonObject, place: str) -> TranslatedMessage:
    role, content = message.get("role"), message.get("content")
    blocks = content if isinstance(content, list) else [{"type": "text", "text": content or ""}]
    match role:
        case "user":
            return TranslatedMessage(list(_read_user_blocks(blocks, place=place)))
        case "assistant":
            return _read_answer_blocks(blocks, place=place)
        case "system":
            return TranslatedMessage([{"role": "system", "content": read_text(content, place=place)}])
    raise ApiError(400, f"{place}.role is {role!r}: it must be user or assistant", param="messages")


def _read_system(system: str | list[JsonObject]) -> str:
    return system if isinstance(system, str) else "\n\n".join(read_text([block], place="system") for block in system)


def _read_user_blocks(blocks: Sequence[Any], *, place: str) -> Iterator[JsonObject]:
    """Yield tool results in their places, and the text between them as messages of the user."""
    texts: list[str] = []
    num_results = 0
    for block in blocks:
        match block:
            case {"type": "tool_result", "tool_use_id": str(call_id)}:
                if texts:
                    yield {"role": "user", "content": "".join(texts)}
                    texts = []
                num_results += 1
                result = read_text(block.get("content"), place=place)
                yield {"role": "tool", "content": result, "tool_call_id": call_id}
            case _:
                texts.append(read_text([block], place=place))
    if texts or not num_results:
        yield {"role": "user", "content": "".join(texts)}


def _read_answer_blocks(blocks: Sequence[Any], *, place: str) -> TranslatedMessage:
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[JsonObject] = []
    left_out: list[str] = []
    for block in blocks:
        match block:
            case {"type": "thinking" | "redacted_thinking"}:
                thoughts.append(read_thought(block, place=place))
            case {"type": "tool_use"}:
                calls.append(read_call(block.get("name"), block.get("input"), call_id=block.get("id"), place=place))
            case {"type": str(kind)} if kind not in _READ_BLOCKS and "text" not in block:
                left_out.append(f"blocks of type {kind}")
            case _:
                texts.append(read_text([block], place=place))
    message: JsonObject = {"role": "assistant", "content": "".join(texts)}
    if thought := "".join(thoughts):
        message["reasoning_content"] = thought
    if calls:
        message["tool_calls"] = calls
    return TranslatedMessage([message], left_out)
