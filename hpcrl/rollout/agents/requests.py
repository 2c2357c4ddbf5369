"""Requests of the OpenAI API that are supported, and the errors for those that are not. Pure.

ChatRequest, TextRequest, RewardRequest   the bodies; an unknown field is rejected by name
StreamOptions, ResponseFormat             parts of them
parse_body                                decodes a body, or raises an ApiError that names the bad field
normalise_messages                        messages as a chat template needs them
ApiError                                  an error in OpenAI's form, with its status
"""

import json
import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta

from hpcrl.engines.base import MAX_TOP_LOGPROBS

MAX_CHOICES = 128
MAX_STOPS = 16
Probability = Annotated[float, Meta(gt=0, le=1)]
Zero = Annotated[float, Meta(ge=0, le=0)]
NumChoices = Annotated[int, Meta(ge=1, le=MAX_CHOICES)]


class ApiError(Exception):
    """An error response in OpenAI's form; clients retry only after status 408, 409, 429 and 5xx."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        kind: str = "invalid_request_error",
    ) -> None:
        super().__init__(message)
        self.status = status
        self.error = {"message": message, "type": kind, "param": param, "code": code}

    @property
    def body(self) -> bytes:
        return msgspec.json.encode({"error": self.error})


class StreamOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class ResponseFormat(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    type: Literal["text"]


class _SamplingRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The fields that both kinds have in common. OpenAI's clients send null for a field that is not set."""

    model: str
    max_tokens: Annotated[int, Meta(ge=1)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Probability | None = None
    top_k: Annotated[int, Meta(ge=-1)] | None = None
    """An extension that most open servers support; OpenAI's API lacks it."""
    seed: int | None = None
    n: NumChoices | None = None
    stop: str | Annotated[list[str], Meta(max_length=MAX_STOPS)] | None = None
    stop_token_ids: Annotated[list[int], Meta(max_length=MAX_STOPS)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    presence_penalty: Zero | None = None
    frequency_penalty: Zero | None = None
    logit_bias: Annotated[dict[str, float], Meta(max_length=0)] | None = None
    user: Any = None
    """Ignored, like the fields below: they do not affect the answer."""
    metadata: Any = None
    store: Any = None
    service_tier: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None

    @property
    def stops(self) -> tuple[str, ...]:
        """The strings that end an answer."""
        given = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return tuple(text for text in given if text)


class ChatRequest(_SamplingRequest, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of POST /v1/chat/completions."""

    messages: Annotated[list[dict[str, Any]], Meta(min_length=1)]
    max_completion_tokens: Annotated[int, Meta(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Literal["auto", "none"] | None = None
    parallel_tool_calls: Any = None
    response_format: ResponseFormat | None = None


class TextRequest(_SamplingRequest, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of POST /v1/completions, for one prompt."""

    prompt: str | list[int]
    logprobs: Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    echo: Literal[False] | None = None
    best_of: Annotated[int, Meta(ge=1, le=1)] | None = None


class RewardRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of POST /v1/hpcrl/reward."""

    reward: float


R = TypeVar("R", ChatRequest, TextRequest, RewardRequest)
_UNKNOWN_FIELD = re.compile(r"unknown field `(?P<name>[^`]+)`")
_INVALID_FIELD = re.compile(r"at `\$\.(?P<name>[A-Za-z_]+)")
_MISSING_FIELD = re.compile(r"required field `(?P<name>[^`]+)`")


def parse_body(body: bytes, kind: type[R]) -> R:
    """Decode a request; raise an ApiError that names what is wrong with it."""
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        raise _make_refusal(str(error)) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ApiError(400, f"the request body is not valid JSON: {error}", code="invalid_json") from None


def _make_refusal(why: str) -> ApiError:
    if (unknown := _UNKNOWN_FIELD.search(why)) is not None:
        name = unknown["name"]
        return ApiError(400, f"{name!r} is not supported: leave it out", code="unsupported_parameter", param=name)
    place = _MISSING_FIELD.search(why) or _INVALID_FIELD.search(why)
    return ApiError(400, why, code="invalid_value", param=place["name"] if place else None)


_ROLES = ("system", "developer", "user", "assistant", "tool")


def normalise_messages(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return messages in a form to render and compare: contents as text, arguments as objects, no nulls."""
    return [_normalise_message(message, place=f"messages[{index}]") for index, message in enumerate(messages)]


def _normalise_message(message: dict[str, Any], *, place: str) -> dict[str, Any]:
    role = message.get("role")
    if role not in _ROLES:
        raise ApiError(400, f"{place}.role is {role!r}: it must be one of {', '.join(_ROLES)}", param="messages")
    plain: dict[str, Any] = {"role": role, "content": _join_text(message.get("content"), place=place)}
    if message.get("tool_calls"):
        plain["tool_calls"] = [_normalise_call(call, place=place) for call in message["tool_calls"]]
    plain |= {name: str(message[name]) for name in ("name", "tool_call_id") if message.get(name) is not None}
    return plain


def _join_text(content: Any, *, place: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    parts = content if isinstance(content, list) else [content]
    if any(not isinstance(part, Mapping) or not isinstance(part.get("text"), str) for part in parts):
        raise ApiError(400, f"{place}.content has a part that is not text: this model reads text", param="messages")
    return "".join(part["text"] for part in parts)


def _normalise_call(call: Any, *, place: str) -> dict[str, Any]:
    try:
        function = call["function"]
        name, arguments = str(function["name"]), function.get("arguments") or {}
        arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ApiError(
            400, f"{place}.tool_calls has one that is not a function call: {error!r}", param="messages"
        ) from None
    return {"id": str(call.get("id", "")), "type": "function", "function": {"name": name, "arguments": arguments}}
