"""Translate POST /v1/completions, OpenAI's form for plain text, and /tokenize and /detokenize of vLLM's server. Pure.

TextRequest      the body of a completion
TextForm         one request, and the responses to it
tokenize, detokenize  a text or a conversation to ids, and back
TokenizeRequest, DetokenizeRequest  their bodies
list_prompt_ids  the ids of a call's prompt, which is not recorded
check_count      refuses a prompt that has surely more tokens than the context
"""

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from hpcrl.engines.base import CompletionChunk
from hpcrl.errors import ConfigError
from hpcrl.models.chat_template import ChatTemplate
from hpcrl.rollout.agents.answers import AnswerDelta, ModelAnswer, TokenUsage, make_id
from hpcrl.rollout.agents.chat_form import (
    FORM_FIELDS,
    IGNORED_FIELDS,
    REFUSED_FIELDS,
    CommonFields,
    make_usage,
    read_stops,
)
from hpcrl.rollout.agents.requests import (
    ApiError,
    JsonObject,
    ModelCall,
    NumTops,
    list_unknown_fields,
    make_tool,
    normalise_message,
    parse_body,
    refuse_fields,
)


class TextRequest(CommonFields, frozen=True, kw_only=True):
    """The body, for one prompt."""

    prompt: str | list[Any]
    logprobs: NumTops | None = None
    best_of: Annotated[int, Meta(ge=1, le=1)] | None = None


class TextForm:
    """One request, and the responses to it."""

    stream_end = b"data: [DONE]\n\n"

    def __init__(self, body: bytes, *, template: ChatTemplate) -> None:
        request, sent = parse_body(body, TextRequest)
        refuse_fields(sent, [*REFUSED_FIELDS, *FORM_FIELDS, "suffix", "echo"])
        self.call = ModelCall(
            model=request.model,
            text=_read_prompt(request.prompt, vocabulary_size=template.vocabulary_size),
            max_tokens=request.max_tokens,
            sampling=request,
            num_choices=request.n or 1,
            stops=read_stops(request.stop),
            stop_token_ids=tuple(request.stop_token_ids or ()),
            top_logprobs=request.logprobs or 0,
            stream=bool(request.stream),
            ignored_fields=list_unknown_fields(sent, known=[*IGNORED_FIELDS, "echo"]),
        )
        self._sends_logprobs = request.logprobs is not None
        self._sends_usage = request.sends_usage
        self._template = template
        self._header = {
            "id": make_id("cmpl-"),
            "object": "text_completion",
            "created": int(time.time()),
            "model": request.model,
        }

    def make_response(self, answers: Sequence[ModelAnswer], usage: TokenUsage) -> JsonObject:
        choices = [
            self._make_choice(answer.index, answer.content, parts=answer.parts, finish_reason=answer.finish_reason)
            for answer in answers
        ]
        return {**self._header, "choices": choices, "usage": make_usage(usage)}

    def open_events(self, usage: TokenUsage) -> Iterable[JsonObject]:
        return ()

    def delta_events(self, delta: AnswerDelta) -> Iterable[JsonObject]:
        text = "".join(getattr(piece, "text", "") for piece in delta.pieces)
        yield {**self._header, "choices": [self._make_choice(delta.index, text, parts=[delta.part])]}

    def end_events(self, answer: ModelAnswer) -> Iterable[JsonObject]:
        yield {
            **self._header,
            "choices": [self._make_choice(answer.index, "", parts=(), finish_reason=answer.finish_reason)],
        }

    def close_events(self, answers: Sequence[ModelAnswer], usage: TokenUsage) -> Iterable[JsonObject]:
        if self._sends_usage:
            yield {**self._header, "choices": [], "usage": make_usage(usage)}

    def error_event(self, error: ApiError) -> JsonObject:
        return {"error": error.error}

    def _make_choice(
        self, index: int, text: str, *, parts: Sequence[CompletionChunk], finish_reason: str | None = None
    ) -> JsonObject:
        return {"index": index, "text": text, "logprobs": self._make_logprobs(parts), "finish_reason": finish_reason}

    def _make_logprobs(self, parts: Sequence[CompletionChunk]) -> JsonObject | None:
        if not self._sends_logprobs:
            return None
        decode_token = self._template.decode_token
        tokens = [decode_token(token) for part in parts for token in part.token_ids]
        offsets, offset = [], 0
        for token in tokens:
            offsets.append(offset)
            offset += len(token)
        return {
            "tokens": tokens,
            "token_logprobs": [logprob for part in parts for logprob in part.logprobs],
            "top_logprobs": [{decode_token(t): p for t, p in top.items()} for part in parts for top in part.top]
            or None,
            "text_offset": offsets,
        }


def _read_prompt(prompt: str | list[Any], *, vocabulary_size: int) -> str | list[int]:
    """Return the text or the ids; a list of one prompt is that prompt."""
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if isinstance(prompt, str) and prompt:
        return prompt
    if isinstance(prompt, list) and prompt and all(type(token) is int for token in prompt):
        if 0 <= min(prompt) <= max(prompt) < vocabulary_size:
            return prompt
        why = f"the prompt has token ids outside of 0..{vocabulary_size - 1}"
    else:
        why = "prompt must be one text or one list of token ids, and not empty"
    raise ApiError(400, why, param="prompt", code="invalid_value")


# ---- tokens


class TokenizeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The body of POST /tokenize: a text, or a conversation."""

    prompt: str | None = None
    messages: list[JsonObject] | None = None
    tools: list[JsonObject] | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The body of POST /detokenize."""

    tokens: list[int]


def list_prompt_ids(
    call: ModelCall, template: ChatTemplate, *, check_chars: Callable[[int], None] = lambda _: None
) -> list[int]:
    """Return the ids of a call's prompt; `check_chars` may refuse the length of its text."""
    if call.text is not None:
        return template.encode(call.text) if isinstance(call.text, str) else call.text
    try:
        rendered = template.render(call.messages, tools=call.tools, template_kwargs=call.template_kwargs)
    except ConfigError as error:
        raise ApiError(400, str(error), param="messages", code="invalid_value") from None
    check_chars(len(rendered))
    return template.encode(rendered)


def tokenize(
    body: bytes, template: ChatTemplate, *, list_ids: Callable[[ModelCall], list[int]], context_length: int
) -> JsonObject:
    """Return the ids of a text or of a conversation, which `list_ids` makes."""
    request, _ = parse_body(body, TokenizeRequest)
    if request.messages:
        tools = [make_tool(tool.get("function"), place="tools") for tool in request.tools or []]
        messages = [normalise_message(one, f"messages[{index}]") for index, one in enumerate(request.messages)]
        ids = list_ids(ModelCall(model="", messages=messages, tools=tools or None))
    elif request.prompt is not None:
        ids = list_ids(ModelCall(model="", text=request.prompt))
    else:
        raise ApiError(400, "prompt is missing: give a string, or messages", param="prompt", code="invalid_value")
    found: dict[str, Any] = {"count": len(ids), "max_model_len": context_length, "tokens": ids}
    if request.return_token_strs:
        found["token_strs"] = [template.decode_token(token) for token in ids]
    return found


def check_count(num_tokens: int, call: ModelCall, *, context_length: int) -> None:
    """Refuse to count the tokens of a prompt that surely has this number of them, if that cannot fit."""
    if num_tokens > context_length:
        why = f"the prompt has at least {num_tokens} tokens, the maximum context length is {context_length}: send less"
        raise ApiError(400, why, param=call.prompt_field, code="context_length_exceeded")


def detokenize(body: bytes, template: ChatTemplate) -> JsonObject:
    """Return the text of ids."""
    request, _ = parse_body(body, DetokenizeRequest)
    if not all(0 <= token < template.vocabulary_size for token in request.tokens):
        why = f"tokens has ids outside of 0..{template.vocabulary_size - 1}"
        raise ApiError(400, why, param="tokens", code="invalid_value")
    return {"prompt": str(template.tokenizer.decode(request.tokens, skip_special_tokens=False))}
