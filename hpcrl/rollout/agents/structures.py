"""The text that a model must generate for `tool_choice` and `response_format`, by family of models. Pure.

    make_structure  the structure of the answer to a call, or None if it is free
    list_free_bounds, find_free_tokens  the tokens of an answer that its structure leaves free
    CALL_WRITERS    how each family writes a call (CallWriter), by the names of AnswerParser.call_format

An answer that must be a call has one or more calls of the allowed tools and nothing else but thoughts before them. One
that must be JSON is that, or calls if the model may choose. Where a family writes its answer in a channel, as gpt-oss
does, the value is in the final one.
"""

import json
import keyword
import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from hpcrl.engines.base import ExactText, FreeText, JsonValue, OutputPart, OutputStructure, PartChoice
from hpcrl.rollout.agents.answer_parser import AnswerParser
from hpcrl.rollout.agents.reasoning_parsers import MAX_HEADER_CHARS, HarmonyParser, ReasoningParser, ThinkParser
from hpcrl.rollout.agents.recording import TurnPrompt
from hpcrl.rollout.agents.requests import ApiError, JsonObject, ModelCall
from hpcrl.rollout.agents.tool_families import GEMMA_CALLS, deepseek_mark, list_types

CallWrite = Callable[[str, JsonObject], list[OutputPart]]
FreeBounds = Sequence[tuple[str, str]]


@dataclass(frozen=True, kw_only=True)
class CallWriter:
    """The way a family writes calls."""

    write: CallWrite
    """Return the parts of one call, by the tool's name and the schema of its arguments."""
    before: str = ""
    """The text before the first call."""
    after: str = ""
    separator: str = ""
    may_repeat: bool = True
    has_python_names: bool = False
    """True if the names of tools and arguments must be names in Python."""

    def list_parts(self, tools: list[JsonObject], *, may_repeat: bool) -> list[OutputPart]:
        """Return the parts of an answer that calls one of these tools, or several in turn."""
        calls = [self.write(tool["name"], tool.get("parameters") or {"type": "object"}) for tool in tools]
        repeats = may_repeat and self.may_repeat
        choice = PartChoice(alternatives=calls, may_repeat=repeats, separator=self.separator if repeats else "")
        frames = [[ExactText(text=text)] if text else [] for text in (self.before, self.after)]
        return [*frames[0], choice, *frames[1]]


def make_structure(call: ModelCall, prompt: TurnPrompt, parser: AnswerParser) -> OutputStructure | None:
    """Return what the answer must be for this model, whose thoughts come before it; None if it is free."""
    schema = call.output_schema
    if schema is None and not call.must_call:
        return None
    tool_format = parser.call_format
    thoughts = _list_thoughts(prompt, parser.reasoning)
    if schema is None or call.must_call:
        return OutputStructure(parts=[*thoughts, *_list_calls(call, tool_format, names=call.must_call)])
    value: list[OutputPart] = [JsonValue(schema=schema)]
    if isinstance(parser.reasoning, HarmonyParser):
        value = [ExactText(text="<|channel|>final<|message|>"), *value]
    if not call.tools:
        return OutputStructure(parts=[*thoughts, *value])
    names = tuple(tool["function"]["name"] for tool in call.tools)
    choice = PartChoice(alternatives=[_list_calls(call, tool_format, names=names), value])
    return OutputStructure(parts=[*thoughts, choice])


def find_free_tokens(bounds: FreeBounds, texts: Sequence[str]) -> list[bool]:
    """Return for each token of an answer, given its text, whether it is in a free part.

    What ends such a part is one of its tokens: the model chose to end it there.
    """
    free, ends = [False] * len(texts), list(accumulate(map(len, texts)))
    if not bounds:
        return free
    openings = [re.escape(before) if before else r"\A" for before, _ in bounds]
    parts = [rf"{opening}(.*?(?:{re.escape(until)}|\Z))" for opening, (_, until) in zip(openings, bounds, strict=True)]
    for found in re.finditer("|".join(parts), "".join(texts), re.DOTALL):
        start = found.start(found.lastindex or 0) if found.start() else 0  # to open thoughts is a choice
        first, last = bisect_right(ends, start), bisect_left(ends, found.end())
        free[first : last + 1] = [True] * len(free[first : last + 1])
    return free


def list_free_bounds(parts: Sequence[OutputPart]) -> FreeBounds:
    """Return the texts before and after the free parts, each pair once; "" stands for the start of the answer."""
    return sorted(set(_walk_free_bounds(parts)))


def _walk_free_bounds(parts: Sequence[OutputPart]) -> Iterator[tuple[str, str]]:
    before = ""
    for part in parts:
        if isinstance(part, FreeText):
            yield before, part.until
        elif isinstance(part, PartChoice):
            for alternative in part.alternatives:
                yield from _walk_free_bounds(alternative)
        before = part.text if isinstance(part, ExactText) else ""


def _list_thoughts(prompt: TurnPrompt, parser: ReasoningParser) -> list[OutputPart]:
    """Return the parts of an answer that are its thoughts, which the model may leave out unless they are open."""
    match parser:
        case ThinkParser():
            thoughts: list[OutputPart] = [FreeText(until=parser.closing), _BLANK_LINES]
            if parser.opens_thoughts(prompt.read_end(MAX_HEADER_CHARS)):
                return thoughts
            thoughts = [ExactText(text=parser.opening), *thoughts]
        case HarmonyParser():
            opening, following = ExactText(text="<|channel|>analysis<|message|>"), ExactText(text="<|start|>assistant")
            thoughts = [opening, FreeText(until="<|end|>"), following]
        case _:
            return []
    return [PartChoice(alternatives=[thoughts, []])]


_BLANK_LINES = PartChoice(alternatives=[[ExactText(text="\n\n")], [ExactText(text="\n")], []])
"""The space between thoughts and an answer, which families write differently."""


def _list_calls(call: ModelCall, tool_format: str, *, names: tuple[str, ...]) -> list[OutputPart]:
    writer = CALL_WRITERS.get(tool_format)
    if writer is None:
        known = ", ".join(CALL_WRITERS)
        why = f"a required call cannot be written in the form {tool_format!r} of this model, only in: {known}"
        raise ApiError(400, why, param="tool_choice", code="unsupported_parameter")
    tools = [tool["function"] for tool in call.tools or [] if tool["function"]["name"] in names]
    if writer.has_python_names and (wrong := _find_other_name(tools)):
        why = f"a required call in the form {tool_format!r} of this model is Python, in which {wrong!r} is not a name"
        raise ApiError(400, why, param="tool_choice", code="unsupported_parameter")
    return writer.list_parts(tools, may_repeat=call.may_call_several)


def _find_other_name(tools: list[JsonObject]) -> str | None:
    """Return a name of a tool or an argument that Python does not allow."""
    names = [part for tool in tools for part in tool["name"].split(".")]
    names += [key for tool in tools for key in _list_properties(tool.get("parameters") or {})]
    return next((name for name in names if not name.isidentifier() or keyword.iskeyword(name)), None)


# ---- the families


def _write_json(before: str, after: str) -> CallWrite:
    """Return a writer of JSON arguments; NAME stands for the tool's name."""

    def write(name: str, schema: JsonObject) -> list[OutputPart]:
        named = before.replace('"NAME"', json.dumps(name, ensure_ascii=False)).replace("NAME", name)
        return [ExactText(text=named), JsonValue(schema=schema), *([ExactText(text=after)] if after else [])]

    return write


def _write_object(name: str, schema: JsonObject) -> list[OutputPart]:
    """Write a call that is JSON as a whole: an answer that is other JSON may be an alternative to it."""
    shared = _pick_definitions(schema)
    arguments = {key: value for key, value in schema.items() if key not in shared}
    call = {
        "type": "object",
        "properties": {"name": {"const": name}, "parameters": arguments},
        "required": ["name", "parameters"],
        "additionalProperties": False,
    }
    return [JsonValue(schema=call | shared)]


def _write_tagged(before: str, argument: tuple[str, str], after: str) -> CallWrite:
    """Return a writer of arguments between tags; NAME and KEY stand for the names; optional ones may be left out."""

    def write(name: str, schema: JsonObject) -> list[OutputPart]:
        parts: list[OutputPart] = [ExactText(text=before.replace("NAME", name))]
        for key, value in _list_properties(schema).items():
            one: list[OutputPart] = [ExactText(text=argument[0].replace("KEY", key)), *_list_value(value, argument[1])]
            parts += one if key in (schema.get("required") or ()) else [PartChoice(alternatives=[one, []])]
        return [*parts, ExactText(text=after)]

    return write


WriteValue = Callable[[JsonObject], list[OutputPart]]


def _write_listed(before: str, key: str, value: WriteValue, after: str, *, comma: str) -> CallWrite:
    """Return a writer of arguments between commas, the required ones first; NAME and KEY stand for the names."""

    def write(name: str, schema: JsonObject) -> list[OutputPart]:
        wanted = schema.get("required") or ()
        first: list[OutputPart] = []
        others: list[list[OutputPart]] = []
        for known, described in _list_properties(schema).items():
            one: list[OutputPart] = [ExactText(text=key.replace("KEY", known)), *value(described)]
            if known in wanted:
                first += [*([ExactText(text=comma)] if first else []), *one]
            else:
                others.append(one)
        follow = [_make_optional([ExactText(text=comma), *one]) for one in others]
        if first:
            arguments = [*first, *follow]
        else:
            starts = [[*one, *follow[place + 1 :]] for place, one in enumerate(others)]
            arguments = [PartChoice(alternatives=[*starts, []])] if starts else []
        return [ExactText(text=before.replace("NAME", name)), *arguments, ExactText(text=after)]

    return write


def _make_optional(parts: list[OutputPart]) -> OutputPart:
    return PartChoice(alternatives=[parts, []])


def _list_properties(schema: JsonObject) -> dict[str, JsonObject]:
    """Return the schema of each argument, with the definitions that it may refer to."""
    shared, properties = _pick_definitions(schema), schema.get("properties") or {}
    return {key: {**given, **shared} if isinstance(given, dict) else {} for key, given in properties.items()}


def _pick_definitions(schema: JsonObject) -> JsonObject:
    return {key: schema[key] for key in ("$defs", "definitions") if key in schema}


def _write_json_value(schema: JsonObject) -> list[OutputPart]:
    return [JsonValue(schema=schema)]


def _write_quoted(quote: str) -> WriteValue:
    """Return a writer of a value that is a string between these marks, or other JSON."""

    def write(schema: JsonObject) -> list[OutputPart]:
        if list_types(schema) == {"string"} and "enum" not in schema:
            return [ExactText(text=quote), FreeText(until=quote)]
        return [JsonValue(schema=schema)]

    return write


def _list_value(schema: Any, after: str) -> list[OutputPart]:
    """Return the parts of an argument between tags: a string as it is, another value as JSON."""
    kinds = list_types(schema)
    if not kinds or "string" in kinds:
        return [FreeText(until=after)]
    return [JsonValue(schema=schema), ExactText(text=after)]


CALL_WRITERS: Mapping[str, CallWriter] = {
    "hermes": CallWriter(
        write=_write_json('<tool_call>\n{"name": "NAME", "arguments": ', "}\n</tool_call>"), separator="\n"
    ),
    "llama": CallWriter(write=_write_object, may_repeat=False),
    "mistral": CallWriter(
        write=_write_json('{"name": "NAME", "arguments": ', "}"),
        before="[TOOL_CALLS][",
        after="]",
        separator=", ",
    ),
    "phi": CallWriter(
        write=_write_json('{"name": "NAME", "arguments": ', "}"),
        before="<|tool_call|>[",
        after="]<|/tool_call|>",
        separator=", ",
    ),
    "deepseek": CallWriter(
        write=_write_json(
            f"{deepseek_mark('tool call begin')}NAME{deepseek_mark('tool sep')}", deepseek_mark("tool call end")
        ),
        before=deepseek_mark("tool calls begin"),
        after=deepseek_mark("tool calls end"),
    ),
    "gpt-oss": CallWriter(
        write=_write_json("<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>", ""), may_repeat=False
    ),
    "qwen3-coder": CallWriter(
        write=_write_tagged(
            "<tool_call>\n<function=NAME>\n",
            ("<parameter=KEY>\n", "\n</parameter>\n"),
            "</function>\n</tool_call>",
        ),
        separator="\n",
    ),
    "glm": CallWriter(
        write=_write_tagged(
            "<tool_call>NAME\n",
            ("<arg_key>KEY</arg_key>\n<arg_value>", "</arg_value>\n"),
            "</tool_call>",
        ),
        separator="\n",
    ),
    "pythonic": CallWriter(
        write=_write_listed("NAME(", "KEY=", _write_json_value, ")", comma=", "),
        before="[",
        after="]",
        separator=", ",
        has_python_names=True,
    ),
    "gemma": CallWriter(
        write=_write_listed("NAME(", "KEY=", _write_json_value, ")", comma=", "),
        before="```tool_code\n",
        after="\n```",
        separator="\n",
        has_python_names=True,
    ),
    **{
        f"gemma {opening}": CallWriter(
            write=_write_listed(f"{opening}call:NAME{{", "KEY:", _write_quoted(quote), f"}}{closing}", comma=",")
        )
        for opening, closing, quote in GEMMA_CALLS
    },
}
"""The way each family writes a call that it must make."""
