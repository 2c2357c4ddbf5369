"""The readers of tool calls, by family: what a model generated, and what a client gets."""

import json
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpcrl.rollout.agents.tool_families import CALL_FORMS, TOOL_PARSERS
from hpcrl.rollout.agents.tool_parsers import ToolCall, parse_answer

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "parameters": {
                "type": "object",
                "properties": {
                    "a": {"type": "integer"},
                    "b": {"anyOf": [{"type": "number"}, {"type": "null"}]},
                    "note": {"type": "string"},
                    "flags": {"type": "array"},
                    "on": {"type": "boolean"},
                },
            },
        },
    }
]


def mark(words):
    return f"<\uff5c{words}\uff5c>".replace(" ", "\u2581")


START, SEP, END = mark("tool call begin"), mark("tool sep"), mark("tool call end")
ALL_START, ALL_END = mark("tool calls begin"), mark("tool calls end")
ADD = ToolCall("add", {"a": 1})
CODER_CALL = "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>"
GLM_CALL = "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call>"

TABLE = [
    ("hermes", 'So:\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>', "So:", [ADD]),
    ("hermes", '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>\n' * 2, "", [ADD, ADD]),
    ("hermes", '<tool_call>{"name": "add", "arguments": {"a": 1}}', "", [ADD]),
    ("hermes", '<tool_call>{"name": "now"}</tool_call>', "", [ToolCall("now", {})]),
    ("hermes", '<tool_call>{"name": "now", "arguments": null}</tool_call>', "", [ToolCall("now", {})]),
    (
        "hermes",
        '<tool_call>{"name": "add"</tool_call> and <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>',
        '<tool_call>{"name": "add"</tool_call> and',
        [ADD],
    ),
    ("hermes", '<tool_call>{"name": "add", "arguments": {"a', '<tool_call>{"name": "add", "arguments": {"a', []),
    ("qwen3-coder", f"First.\n\n{CODER_CALL}", "First.", [ADD]),
    ("qwen3-coder", f"{CODER_CALL}\n{CODER_CALL}", "", [ADD, ADD]),
    ("qwen3-coder", CODER_CALL.removeprefix("<tool_call>\n"), "", [ADD]),
    (
        "qwen3-coder",
        "<tool_call>\n<function=add>\n<parameter=note>\n\n 1\n<parameter=x>\n</parameter>\n<parameter=on>\nTrue\n"
        "</parameter>\n<parameter=flags>\n[1, {}]\n</parameter>\n</function>\n</tool_call>",
        "",
        [ToolCall("add", {"note": "\n 1\n<parameter=x>", "on": True, "flags": [1, {}]})],
    ),
    ("qwen3-coder", "<tool_call>\n<function=now>\n</function>\n</tool_call>", "", [ToolCall("now", {})]),
    ("qwen3-coder", "<tool_call><function=add><parameter=a>1", "<tool_call><function=add><parameter=a>1", []),
    ("glm", f"\nWell.\n{GLM_CALL}\n{GLM_CALL}", "\nWell.", [ADD, ADD]),
    (
        "glm",
        "<tool_call>add<arg_key>note</arg_key><arg_value>1</arg_value>"
        "<arg_key>b</arg_key><arg_value>null</arg_value></tool_call>",
        "",
        [ToolCall("add", {"note": "1", "b": None})],
    ),
    ("glm", "<tool_call>now</tool_call>", "", [ToolCall("now", {})]),
    ("glm", "<tool_call>add\n<arg_key>a</arg_key>\n<arg_va", "<tool_call>add\n<arg_key>a</arg_key>\n<arg_va", []),
    (
        "deepseek",
        f'Hm.{ALL_START}{START}function{SEP}add\n```json\n{{"a": 1}}\n```{END}\n'
        f'{START}function{SEP}add\n```json\n{{"a": 1}}\n```{END}{ALL_END}',
        "Hm.",
        [ADD, ADD],
    ),
    ("deepseek", f'{ALL_START}{START}add{SEP}{{"a": 1}}{END}{START}add{SEP}{{"a": 1}}{END}{ALL_END}', "", [ADD, ADD]),
    ("deepseek", f"{ALL_START}{START}add{SEP}[1]{END}{ALL_END}", f"{START}add{SEP}[1]{END}", []),
    ("mistral", '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}, "id": "abcdefghi"}]', "", [ADD]),
    ("mistral", '[TOOL_CALLS][{"name": "add", "arguments": {"a": 1}}, {"name": "now", "arguments": {}}]', "",
     [ADD, ToolCall("now", {})]),
    ("mistral", 'Yes[TOOL_CALLS]add[ARGS]{"a": 1}[TOOL_CALLS]add[CALL_ID]abc[ARGS]{"a": 1}', "Yes", [ADD, ADD]),
    ("mistral", '[TOOL_CALLS]add{"a": 1}', "", [ADD]),
    ("mistral", '[TOOL_CALLS]add[ARGS]{"a"', '[TOOL_CALLS]add[ARGS]{"a"', []),
    ("gpt-oss", '<|start|>assistant to=functions.add<|channel|>commentary<|message|>{"a": 1}<|call|>', "", [ADD]),
    ("gpt-oss", "<|start|><|channel|>commentary to=python<|message|>1<|call|>",
     "<|start|><|channel|>commentary to=python<|message|>1<|call|>", []),
    ("llama", '{"name": "add", "parameters": {"a": 1}}', "", [ADD]),
    ("llama", '<|python_tag|>{"name": "add", "parameters": {"a": 1}}; {"name": "add", "parameters": {"a": 1}}', "",
     [ADD, ADD]),
    ("llama", 'I add: {"type": "function", "name": "add", "parameters": {"a": 1}}; \n'
              '{"name": "add", "parameters": {"a": 1}} Done; bye.', "I add: Done; bye.", [ADD, ADD]),
    ("llama", '<|python_tag|>brave_search.call(query="x y")', "", [ToolCall("brave_search", {"query": "x y"})]),
    ("llama", "<|python_tag|>print(1)", "<|python_tag|>print(1)", []),
    ("llama", 'A set {1, 2}; JSON {"names": 1}; {"name": "add', 'A set {1, 2}; JSON {"names": 1}; {"name": "add', []),
    ("llama", '{"name": "w", "parameters": {"text": "a \\"}\\" {"}}', "", [ToolCall("w", {"text": 'a "}" {'})]),
    ("pythonic", '[add(a=1), s.find(text="x", deep=[-1, {"k": None}], ok=true)]', "",
     [ADD, ToolCall("s.find", {"text": "x", "deep": [-1, {"k": None}], "ok": True})]),
    ("pythonic", "<|python_start|>[add(a=1)]<|python_end|>", "", [ADD]),
    ("pythonic", "[add(1)]", "[add(1)]", []),
    ("pythonic", "[add](http://x) is a link", "[add](http://x) is a link", []),
    ("pythonic", "[add(a=__import__('os'))]", "[add(a=__import__('os'))]", []),
    ("gemma", "Let me.\n```tool_code\nprint(add(a=1))\nadd(a=1)\n```", "Let me.", [ADD, ADD]),
    ("gemma", '<|tool_call>call:add{note:<|"|>a {b: "c"}<|"|>,a:1,flags:[{on:true}]}<tool_call|>', "",
     [ToolCall("add", {"note": 'a {b: "c"}', "a": 1, "flags": [{"on": True}]})]),
    ("gemma", "<start_function_call>call:add{note:<escape>1<escape>}<end_function_call>", "",
     [ToolCall("add", {"note": "1"})]),
    ("gemma", "```python\nadd(a=1)\n```", "```python\nadd(a=1)\n```", []),
    ("phi", '<|tool_call|>[{"name": "add", "arguments": {"a": 1}}]<|/tool_call|>', "", [ADD]),
    ("phi", '<|tool_call|>{"name": "add", "arguments": {"a": 1}}<|/tool_call|>', "", [ADD]),
    ("phi", 'functools[{"name": "add", "arguments": {"a": 1}}]', "", [ADD]),
    ("none", '<tool_call>{"name": "add"}</tool_call>', '<tool_call>{"name": "add"}</tool_call>', []),
]  # fmt: skip
SAMPLES = [text for _, text, _, _ in TABLE]
MALFORMED_ARGUMENTS = ["[1]", '"a"', "1", '{"a": NaN}', '{"a": 1e999}', '{"a": "\\ud800"}', "{'a': 1}", '{"a": 1}}']


def read(family, *chunks):
    reader = TOOL_PARSERS[family].make_reader(TOOLS)
    pieces = [piece for chunk in chunks for piece in reader.feed(chunk)] + reader.finish()
    calls = [piece for piece in pieces if isinstance(piece, ToolCall)]
    return "".join(piece.text for piece in pieces if not isinstance(piece, ToolCall)), calls


@pytest.mark.parametrize(("family", "text", "content", "calls"), TABLE)
def test_an_answer_of_a_family_is_read(family, text, content, calls):
    assert parse_answer(TOOL_PARSERS[family].make_reader(TOOLS), text) == (content, "", calls)


@pytest.mark.parametrize(("family", "text", "content", "calls"), TABLE)
def test_an_answer_is_read_the_same_character_by_character(family, text, content, calls):
    assert read(family, *text) == (content, calls)


@pytest.mark.parametrize("family", CALL_FORMS)
def test_a_call_in_the_form_that_models_are_given_is_read(family):
    types = {"x": "integer", "text": "string", "deep": "object", "no": "boolean"}
    tool = {"function": {"name": "add", "parameters": {"properties": {key: {"type": types[key]} for key in types}}}}
    reader, start = TOOL_PARSERS[family].make_reader([tool]), "<|start|>assistant" * (family == "gpt-oss")
    arguments = {"x": 1, "text": 'NAME "KEY" = VALUE, \u00e9', "deep": {"ARGUMENTS": [None]}, "no": False}
    text = CALL_FORMS[family].write("add", arguments)
    assert parse_answer(reader, start + text) == ("", "", [ToolCall("add", arguments)])


def test_every_family_has_a_form_of_calls_to_describe():
    assert set(CALL_FORMS) == set(TOOL_PARSERS) - {"none"}


def test_every_family_is_in_the_table():
    assert {family for family, *_ in TABLE} == set(TOOL_PARSERS)


@pytest.mark.parametrize("arguments", MALFORMED_ARGUMENTS)
def test_arguments_that_are_not_a_json_object_leave_the_call_as_content(arguments):
    text = f'<tool_call>{{"name": "add", "arguments": {arguments}}}</tool_call>'
    assert read("hermes", text) == (text, [])


def test_a_call_is_sent_as_soon_as_it_is_complete():
    reader = TOOL_PARSERS["hermes"].make_reader(TOOLS)
    assert reader.feed('<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_ca') == []
    assert reader.feed("ll>") == [ADD]


FRAGMENTS = st.sampled_from(
    [*SAMPLES, "<tool_call>", "</tool_call>", "<function=", "add(", '{"name"', *'{}[]"\\; \n<|`']
    + [mark for parser in TOOL_PARSERS.values() for mark in parser.marks]
)  # fmt: skip
TEXTS = st.lists(st.one_of(FRAGMENTS, st.text(max_size=8)), max_size=8).map("".join)


@pytest.mark.parametrize("family", TOOL_PARSERS)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_any_text_in_any_chunks_is_read_as_the_whole_text(family, data):
    text = data.draw(TEXTS)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    chunks = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    content, calls = read(family, *chunks)
    assert (content, calls) == read(family, text) == read(family, *text)
    json.dumps([content, [[call.name, call.arguments] for call in calls]], ensure_ascii=False, allow_nan=False)
    assert calls or content == text or family == "deepseek"  # whose frames belong to no text


@pytest.mark.parametrize("schema", [5, [], None, {"type": 5}, {"anyOf": 5}, {"type": [5]}, {"enum": 5}, {"$ref": "x"}])
def test_an_odd_schema_of_a_tool_is_not_a_failure(schema):
    tools = [5, {"function": {"name": "add", "parameters": {"properties": {"a": schema}}}}]
    for family, text in (("qwen3-coder", CODER_CALL), ("glm", GLM_CALL)):
        _, _, (call,) = parse_answer(TOOL_PARSERS[family].make_reader(tools), text)
        assert call.name == "add"


ENDLESS = ["<tool_call>", "{", '{"name"', '{"name":"', "<", " ", "[TOOL_CALLS]", START, "functools[", "[f(", ";", "a",
           "<parameter=", "```tool_code\n", "<|tool_call>call:a{b", "\\", "<|start|>", "<|python_tag|>"]  # fmt: skip


def count_steps(family, text, size):
    """Count the calls of functions while a text is read in chunks of this size."""
    chunks = [text[start : start + size] for start in range(0, len(text), size)]
    num_steps = 0

    def step(_, event, __):
        nonlocal num_steps
        num_steps += event in ("call", "c_call")

    sys.setprofile(step)
    try:
        read(family, *chunks)
    finally:
        sys.setprofile(None)
    return num_steps


@pytest.mark.parametrize("family", TOOL_PARSERS)
def test_the_work_for_a_chunk_does_not_grow_with_the_text(family):
    for unit in ENDLESS:
        short, long = (count_steps(family, unit * count, 16) for count in (100, 400))
        assert long <= 5 * short + 100, unit


@pytest.mark.parametrize("family", TOOL_PARSERS)
def test_what_is_searched_again_with_each_chunk_is_less_than_a_mark(family):
    reader = TOOL_PARSERS[family].make_reader(TOOLS)
    for _ in range(200):
        reader.feed("<tool_call>{[TOOL_CALLS] <|python_tag|>x functools[ <fun")
        assert len(getattr(reader, "_tail", "")) < 128


@pytest.mark.parametrize("family", TOOL_PARSERS)
def test_a_megabyte_of_marks_is_content(family):
    text = "".join(ENDLESS) * ((1 << 20) // len("".join(ENDLESS)))
    content, calls = read(family, text)
    assert not calls
    assert content == text or family == "deepseek"
