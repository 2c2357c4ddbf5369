"""A row of training data: a conversation in the form of OpenAI's messages, checked without any model.

    parse_conversation    a row -> a conversation; ConfigError if it is not one
    TrainingConversation  its messages and tools
    MESSAGE_ROLES         the roles that a message may have

A row is an object with `messages`, and `tools` where the model is given any. The content of a message is text, or a
list of text parts. An assistant message with `weight` = 0 is shown to the model and not trained.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from hpcrl.errors import ConfigError
from hpcrl.system.json_records import decode_record

MESSAGE_ROLES = ("system", "developer", "user", "assistant", "tool", "function")


class TrainingConversation(NamedTuple):
    """A conversation to imitate."""

    messages: list[dict[str, Any]]
    tools: list[Any]

    @staticmethod
    def is_trained(message: Mapping[str, Any]) -> bool:
        """Return whether a message is one of the assistant's that is trained."""
        return message["role"] == "assistant" and bool(message.get("weight", 1))


def parse_conversation(row: Mapping[str, Any]) -> TrainingConversation:
    """Return the conversation of a row; raises ConfigError that names what is wrong with it."""
    messages = row.get("messages")
    if messages is None and "messages" in row:
        raise ConfigError("`messages` is null: remove the row")
    if messages is None:
        raise ConfigError(f"it has no `messages`, only {', '.join(sorted(row)) or 'nothing'}: rename the field")
    if not isinstance(messages, list):
        raise ConfigError(f"`messages` is {_show(messages)}, not a list of messages")
    conversation = TrainingConversation(
        [_parse_message(message, f"messages[{number}]") for number, message in enumerate(messages)],
        _parse_tools(row.get("tools")),
    )
    if not any(map(conversation.is_trained, conversation.messages)):
        raise ConfigError(f"none of its {len(messages)} messages is an assistant's to train on: remove the row")
    return conversation


def _parse_message(given: Any, place: str) -> dict[str, Any]:
    if not isinstance(given, dict):
        raise ConfigError(f"{place} is {_show(given)}, not an object with role and content")
    message = {name: value for name, value in given.items() if value is not None}  # Parquet has every field everywhere
    if message.get("role") not in MESSAGE_ROLES:
        raise ConfigError(f"{place}.role is {_show(given.get('role'))}, not one of {', '.join(MESSAGE_ROLES)}")
    content = message.get("content", "")
    if isinstance(content, list):
        content = "".join(_parse_part(part, f"{place}.content[{number}]") for number, part in enumerate(content))
    if not isinstance(content, str):
        raise ConfigError(f"{place}.content is {_show(content)}, not text")
    if message.get("weight", 1) not in (0, 1):
        raise ConfigError(f"{place}.weight is {_show(message['weight'])}: it is 0 (not trained) or 1")
    calls = message.pop("tool_calls", None) or []
    if not isinstance(calls, Sequence) or isinstance(calls, str):
        raise ConfigError(f"{place}.tool_calls is {_show(calls)}, not a list of calls")
    parsed = [_parse_call(call, f"{place}.tool_calls[{number}]") for number, call in enumerate(calls)]
    if message["role"] == "assistant" and not (content or parsed):
        raise ConfigError(f"{place} is an assistant's with neither content nor tool_calls")
    return {**message, "content": content} | ({"tool_calls": parsed} if parsed else {})


def _parse_part(part: Any, place: str) -> str:
    if isinstance(part, dict) and isinstance(part.get("text"), str):
        return str(part["text"])
    raise ConfigError(f"{place} is {_show(part)}: only parts of text are trained on")


def _parse_call(call: Any, place: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ConfigError(f"{place} is {_show(call)}: a call has a function with a name and arguments")
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        arguments = _decode_json(arguments or "{}", f"{place}.function.arguments")
    if not isinstance(arguments, dict):
        raise ConfigError(f"{place}.function.arguments is {_show(arguments)}, not an object")
    return {**call, "type": "function", "function": {**function, "arguments": arguments}}


def _parse_tools(tools: Any) -> list[Any]:
    """Return the tools; text is JSON, since the columns of Parquet cannot have a schema for each tool."""
    if isinstance(tools, str):
        tools = _decode_json(tools or "[]", "tools")
    if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        raise ConfigError(f"`tools` is {_show(tools)}, not a list of objects")
    return tools or []


def _decode_json(text: str, place: str) -> Any:
    try:
        return decode_record(text)
    except msgspec.DecodeError as error:
        raise ConfigError(f"{place} is not JSON ({error}): {text[:40]!r}") from error


def _show(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
