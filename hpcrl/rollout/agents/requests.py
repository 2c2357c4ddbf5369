"""One internal form of a call of the model, into which every form of request is translated. Pure.

ModelCall             a call, whichever form it came in
SamplingFields        the sampling that the program asks for
parse_body            decodes a body, or raises an ApiError that names the bad field
MessageMemory         the messages that earlier requests of an episode had, which are not decoded again
list_unknown_fields   the names in a body that a form does not have
refuse_fields         refuses the fields that this model cannot obey
normalise_message     a message as a chat template needs it
read_text             the text of a content, given as text or as parts
read_thought          the text of a part that is a thought
read_call             one tool call in that form
make_tool             a tool as a chat template needs it
split_tools           the program's own tools, and those of a provider, which are left out
choose_tools          the tools that may be called, and those of which one must be
ApiError              an error with its status; each form of API has its own body for it
"""

import contextlib
import functools
import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta

from hpcrl.engines.base import MAX_TOP_LOGPROBS
from hpcrl.models.conversation_data import MESSAGE_ROLES
from hpcrl.rollout.agents.shared_sequence import RecentLists, count_equal

MAX_CHOICES = 128
MAX_STOPS = 128
MAX_REMEMBERED_BYTES = 1 << 20
"""The bytes of earlier messages that are remembered besides those of the last requests."""
JsonObject = dict[str, Any]
"""A decoded JSON object."""
TokenLimit = int
"""The most tokens of an answer; some clients send 0 or -1 for no limit of theirs."""
NumChoices = Annotated[int, Meta(ge=1, le=MAX_CHOICES)]
NumTops = Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)]
StopTexts = str | Annotated[list[str], Meta(max_length=MAX_STOPS)]


class ApiError(Exception):
    """An error response; clients retry only after status 408, 409, 429 and 5xx."""

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


class SamplingFields(msgspec.Struct, frozen=True, kw_only=True):
    """The sampling that a program asks for; a client sends null for what it does not set."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: float | None = None
    """A whole number; some clients send it as 40.0."""
    seed: int | None = None
    min_p: float | None = None
    """Ignored with the recipe's sampling, like the fields below; engines cannot do them."""
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None

    def check_ranges(self) -> None:
        """Raise an ApiError if a field has a value that no engine can sample with; ignored fields may have any."""
        for name, (least, most) in _SAMPLING_RANGES.items():
            value = getattr(self, name)
            if value is not None and not (least <= value <= most and (name != "top_k" or value == int(value))):
                kind = "a whole number" if name == "top_k" else "a number"
                why = f"{name} = {value}: it must be {kind} from {least} to {most}"
                raise ApiError(400, why, code="invalid_value", param=name)

    def unsupported_fields(self) -> list[str]:
        """Return the names of the fields that would change the distribution in a way that engines cannot."""
        neutral = {"min_p": 0, "repetition_penalty": 1, "presence_penalty": 0, "frequency_penalty": 0, "logit_bias": {}}
        return [name for name, value in neutral.items() if getattr(self, name) not in (None, value)]


class ModelCall(msgspec.Struct, frozen=True, kw_only=True):
    """A call of the model, whichever form it came in."""

    model: str
    messages: list[JsonObject] = []
    """A conversation, as a chat template needs it."""
    text: str | list[int] | None = None
    """A plain text or its ids, instead of a conversation."""
    tools: list[JsonObject] | None = None
    """Function tools, in the form of OpenAI's chat API, which chat templates expect."""
    must_call: tuple[str, ...] = ()
    """The answer must be a call of one of these tools; none: the model decides."""
    may_call_several: bool = True
    """False: at most one call, as far as the answer must be one."""
    output_schema: JsonObject | None = None
    """A JSON schema that the text of the answer must obey."""
    template_kwargs: JsonObject = {}
    """Variables that the program passes to the chat template, such as `enable_thinking`."""
    max_tokens: int | None = None
    sampling: SamplingFields = SamplingFields()
    num_choices: int = 1
    stops: tuple[str, ...] = ()
    """The texts that end an answer."""
    stop_token_ids: tuple[int, ...] = ()
    top_logprobs: int = 0
    stream: bool = False
    ignored_fields: tuple[str, ...] = ()
    """The fields of the request, and the kinds of its tools and items, that no form of the API here has."""

    @property
    def is_unheld_to_one(self) -> bool:
        """Return whether at most one call was asked for, and an answer may have several none the less."""
        return bool(self.tools) and not self.may_call_several and not self.must_call

    @property
    def prompt_field(self) -> str:
        """The name of the field that the prompt is in; the Responses API has another for a conversation."""
        return "messages" if self.text is None else "prompt"

    def count_tokens_at_least(self, *, longest_token: int) -> int:
        """Count tokens that the prompt will surely have, without rendering it; tools are in every prompt.

        A message is at least a token; the text of a tool may be shorter than its JSON, and an answer lose its thoughts.
        """
        if self.text is not None:
            return len(self.text) // longest_token + 1 if isinstance(self.text, str) else len(self.text)
        texts: list[str] = [message["content"] for message in self.messages]
        thoughts = (text.rfind("</think>") + len("</think>") for text in texts if "</think>" in text)
        num_chars = sum(map(len, texts)) - sum(thoughts)
        if self.tools:
            num_chars += len(msgspec.json.encode(self.tools)) // 8
        return max(num_chars // longest_token + 1, len(self.messages))


_SAMPLING_RANGES: Mapping[str, tuple[int, int]] = {"temperature": (0, 2), "top_p": (0, 1), "top_k": (-1, 1 << 31)}
R = TypeVar("R", bound=msgspec.Struct)
T = TypeVar("T")
_INVALID_FIELD = re.compile(r"at `\$\.(?P<name>[A-Za-z_]+)")
_MISSING_FIELD = re.compile(r"required field `(?P<name>[^`]+)`")
_ESCAPE = re.compile(
    rb"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F]|(?P<lone>\\u[dD][89a-fA-F][0-9a-fA-F]{2})|\\.", re.DOTALL
)
"""An escape in JSON; `lone` is a surrogate that is not the first of a pair."""


SentFields = Mapping[str, msgspec.Raw]
"""Fields of a request as they were sent."""


def parse_body(body: bytes, kind: type[R]) -> tuple[R, SentFields]:
    """Decode a request; return it with the fields that its form does not have, or raise an ApiError that names a field.

    Most requests have no such field: they are decoded once.
    """
    with contextlib.suppress(msgspec.MsgspecError, UnicodeDecodeError):
        return _make_strict_decoder(kind).decode(body), {}
    sent = _decode_json(body, dict[str, msgspec.Raw])
    return _decode_json(body, kind), {name: value for name, value in sent.items() if name not in _list_names(kind)}


@functools.cache
def _make_strict_decoder(kind: type[R]) -> "msgspec.json.Decoder[R]":
    """Make a decoder that refuses fields which the form does not have."""
    strict = msgspec.StructMeta(kind.__name__, (kind,), {"__module__": kind.__module__}, forbid_unknown_fields=True)
    return msgspec.json.Decoder(strict)


def _decode_json(body: bytes | msgspec.Raw, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        place = _MISSING_FIELD.search(str(error)) or _INVALID_FIELD.search(str(error))
        raise ApiError(400, str(error), code="invalid_value", param=place["name"] if place else None) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        lone = next((found["lone"] for found in _ESCAPE.finditer(body) if found["lone"]), None)
        why = str(error) if lone is None else f"{lone.decode()} is half of a surrogate pair: leave it out or send both"
        raise ApiError(400, f"the request body is not valid JSON: {why}", code="invalid_json") from None


class MessageMemory:
    """The messages of an episode's requests: one that was sent before is neither decoded nor translated again.

    A conversation is sent whole with each call, so that all of its messages but the last ones are known.
    """

    def __init__(self) -> None:
        self._known: dict[Callable[[JsonObject, str], Any], _KnownMessages] = {}
        """The messages by what translated them."""

    def read(
        self, sent: Sequence[msgspec.Raw], translate: Callable[[JsonObject, str], T], *, name: str = "messages"
    ) -> list[T]:
        """Return the messages as `translate` makes them of an object and its place; they are never changed."""
        known = self._known.setdefault(translate, _KnownMessages())
        keys = list(map(bytes, sent))
        last = known.requests.find(keys)
        num_same = 0 if last is None else count_equal(keys, last.items)
        keys[:num_same] = last.items[:num_same] if last else []  # stored once
        read = [*(last.value[:num_same] if last else []), *map(known.by_key.get, keys[num_same:])]
        for index, key in enumerate(keys[num_same:], num_same):
            if read[index] is None:
                place = f"{name}[{index}]"
                read[index] = known.by_key[key] = translate(_decode_object(sent[index], place=place), place)
                known.num_bytes += len(key)
        known.requests.add(keys, read, num_bytes=sum(map(len, keys)))
        if known.num_bytes > MAX_REMEMBERED_BYTES:
            known.forget()
        return read


@dataclass(eq=False)
class _KnownMessages:
    """The messages that one function has translated."""

    by_key: dict[bytes, Any] = field(default_factory=dict)
    """The messages by what was sent."""
    requests: RecentLists[bytes, list[Any]] = field(default_factory=RecentLists)
    """The messages of the last requests: most of the next one are of one of these, without looking them up."""
    num_bytes: int = 0
    """The bytes of what was sent since the last time that something was forgotten."""

    def forget(self) -> None:
        """Forget the messages that none of the last requests had."""
        self.by_key = {key: message for one in self.requests for key, message in zip(one.items, one.value, strict=True)}
        self.num_bytes = 0


def _decode_object(sent: msgspec.Raw, *, place: str) -> JsonObject:
    found = _decode_json(sent, Any)
    if not isinstance(found, dict):
        why = f"{place} is of the type {type(found).__name__}: it must be an object"
        raise ApiError(400, why, code="invalid_value", param=place.partition("[")[0])
    return found


@functools.cache
def _list_names(kind: type[msgspec.Struct]) -> frozenset[str]:
    return frozenset(field.encode_name for field in msgspec.structs.fields(kind))


def list_unknown_fields(sent: SentFields, *, known: Collection[str]) -> tuple[str, ...]:
    """Return the names of the fields with a value that are not known to change no answer."""
    unknown = [name for name in sent if name not in known]
    return tuple(name for name in unknown if bytes(sent[name]) != b"null")


def refuse_fields(sent: SentFields, names: Collection[str]) -> None:
    """Refuse a request in which one of these fields has a value: without it, the answer would mean something else."""
    for name in names:
        if name in sent and bytes(sent[name]) not in (b"null", b"false", b"[]"):
            raise ApiError(400, f"{name!r} is not supported: leave it out", code="unsupported_parameter", param=name)


# ---- messages

_THOUGHT_PARTS = ("thinking", "reasoning", "redacted_thinking")


def normalise_message(message: JsonObject, place: str) -> JsonObject:
    """Return a message in a form to render and compare: content as text, arguments as objects, no nulls."""
    role = message.get("role")
    if role not in MESSAGE_ROLES:
        raise ApiError(400, f"{place}.role is {role!r}: it must be one of {', '.join(MESSAGE_ROLES)}", param="messages")
    content = message.get("content")
    thoughts: list[Any] = []
    if role == "assistant" and isinstance(content, list):
        thoughts = [part for part in content if isinstance(part, Mapping) and part.get("type") in _THOUGHT_PARTS]
        content = [part for part in content if part not in thoughts]
    plain: JsonObject = {"role": "tool" if role == "function" else role, "content": read_text(content, place=place)}
    if thought := "".join(read_thought(part, place=place) for part in thoughts):
        plain["reasoning_content"] = thought
    if role == "assistant":
        plain |= _normalise_answer(message, place=place)
    plain |= {name: str(message[name]) for name in ("name", "tool_call_id") if message.get(name) is not None}
    return plain


def read_thought(part: Mapping[str, Any], *, place: str) -> str:
    """Return the text of a part that is a thought of the model; one that is encrypted has none."""
    given = next(
        (part[name] for name in ("thinking", "reasoning", "text", "content", "summary") if part.get(name)), None
    )
    return read_text(given, place=place)


def _normalise_answer(message: JsonObject, *, place: str) -> JsonObject:
    """Return the parts that only the model's messages have."""
    plain: JsonObject = {}
    reasoning = message.get("reasoning_content") or message.get("reasoning")
    if isinstance(reasoning, str) and reasoning:
        plain["reasoning_content"] = reasoning
    if isinstance(refusal := message.get("refusal"), str) and not message.get("content"):
        plain["content"] = refusal
    calls = message.get("tool_calls") or []
    if not isinstance(calls, list):
        raise ApiError(400, f"{place}.tool_calls is not a list", param="messages", code="invalid_value")
    if message.get("function_call"):
        calls = [{"function": message["function_call"]}]
    if calls:
        plain["tool_calls"] = [_normalise_call(call, place=f"{place}.tool_calls") for call in calls]
    return plain


def read_text(content: Any, *, place: str) -> str:
    """Return the text of a content, which is a text or a list of parts; refuse a part that is not text."""
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(_read_part(part, place=place) for part in (content if isinstance(content, list) else [content]))


def _read_part(part: Any, *, place: str) -> str:
    match part:
        case str(text) | {"text": str(text)} | {"refusal": str(text)}:
            return text
        case {"type": "search_result"}:
            return _join_document(part.get("title"), part.get("source"), read_text(part.get("content"), place=place))
        case {"type": "document", "source": {"type": "text", "data": str(text)} | {"type": "content", "content": text}}:
            return _join_document(part.get("title"), part.get("context"), read_text(text, place=place))
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    why = f"{place}.content has a part of type {kind!r}: this model reads text"
    raise ApiError(400, why, param=place.partition("[")[0], code="invalid_value")


def _join_document(*texts: Any) -> str:
    """Return a document after its title and the like; an empty line separates it from what follows."""
    return "".join(f"{text}\n\n" for text in texts if isinstance(text, str) and text)


def _normalise_call(call: Any, *, place: str) -> JsonObject:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        raise ApiError(400, f"{place} has one that is not a function call", param="messages", code="invalid_value")
    return read_call(function.get("name"), function.get("arguments"), call_id=call.get("id"), place=place)


def read_call(name: Any, arguments: Any, *, call_id: Any, place: str) -> JsonObject:
    """Return a tool call with its arguments as an object, which clients send as JSON."""
    try:
        decoded = json.loads(arguments or "{}") if isinstance(arguments, str | None) else arguments
    except ValueError:
        decoded = arguments  # it was generated, and the model sees what it wrote
    if not isinstance(name, str) or not isinstance(decoded, dict | list | str | int | float | None):
        why = f"{place} has one that is not a function call: it needs a name and arguments"
        raise ApiError(400, why, param=place.partition("[")[0], code="invalid_value")
    return {"id": str(call_id or ""), "type": "function", "function": {"name": name, "arguments": decoded}}


# ---- tools

ToolMode = Literal["auto", "none", "required"]


def split_tools(
    tools: Sequence[JsonObject] | None, *, known: Collection[str]
) -> tuple[list[JsonObject], tuple[str, ...]]:
    """Return the tools of the program, of these types, and what the others are called: a provider would run them."""
    kept, others = [], []
    for tool in tools or ():
        kind = tool.get("type")
        if isinstance(kind, str) and kind not in known:
            others.append(f"tools of type {kind}")
        else:
            kept.append(tool)
    return kept, tuple(others)


def choose_tools(
    tools: Sequence[JsonObject] | None, mode: ToolMode, *, named: Collection[str] | None = None
) -> tuple[list[JsonObject] | None, tuple[str, ...]]:
    """Return the tools that the model sees, and those of which it must call one; `named` are the only ones allowed."""
    names = [tool["function"]["name"] for tool in tools or []]
    for name in named or ():
        if name not in names:
            known = ", ".join(names) or "none"
            raise ApiError(400, f"tool_choice names {name!r}, the tools are: {known}", param="tool_choice")
    if mode == "required" and not names:
        raise ApiError(400, 'tool_choice = "required" needs tools', param="tool_choice", code="invalid_value")
    if mode == "none" or not tools:
        return None, ()
    if mode == "required":
        return list(tools), tuple(name for name in names if named is None or name in named)
    return [tool for tool in tools if named is None or tool["function"]["name"] in named], ()


def make_tool(function: Any, *, place: str) -> JsonObject:
    """Return a function tool as chat templates expect it."""
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str) or not name:
        raise ApiError(400, f"{place} has one without a name: only function tools can be called", param="tools")
    parameters = function.get("parameters")
    if not isinstance(parameters, dict | None):
        raise ApiError(400, f"{place}: the parameters of {function['name']!r} are not a JSON schema", param="tools")
    kept = {name: value for name, value in function.items() if value is not None}
    return {"type": "function", "function": kept}
