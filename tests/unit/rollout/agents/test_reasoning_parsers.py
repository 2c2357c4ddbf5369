"""The readers of thoughts, by family, alone and before a reader of tool calls."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpcrl.rollout.agents.answer_parser import ChainedReader
from hpcrl.rollout.agents.reasoning_parsers import REASONING_PARSERS
from hpcrl.rollout.agents.tool_families import TOOL_PARSERS
from hpcrl.rollout.agents.tool_parsers import ContentText, ReasoningText, ToolCall, parse_answer

QWEN_PROMPT = "<|im_start|>assistant\n"
CALL = '{"name": "add", "arguments": {"a": 1}}'
ADD = ToolCall("add", {"a": 1})
HARMONY_CALL = '<|start|>assistant<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 1}<|call|>'
ANALYSIS = "<|channel|>analysis<|message|>Hm.<|end|>"

TABLE = [
    ("think", QWEN_PROMPT, "<think>\nHm.\n\nSo.\n</think>\n\n2\n", "Hm.\n\nSo.", "2\n"),
    ("think", QWEN_PROMPT, "\n <think></think>2", "", "2"),
    ("think", QWEN_PROMPT + "<think>\n", "Hm.\n</think>\n\n2", "Hm.", "2"),
    ("think", QWEN_PROMPT + "<think>\n\n</think>\n\n", "2", "", "2"),
    ("think", QWEN_PROMPT, "2 <think>x</think>", "", "2 <think>x</think>"),
    ("think", QWEN_PROMPT, " 2", "", " 2"),
    ("think", QWEN_PROMPT, "<thin", "", "<thin"),
    ("think", QWEN_PROMPT, "<think>cut of", "cut of", ""),
    ("think", QWEN_PROMPT + "<think>", "cut </th", "cut </th", ""),
    ("think", QWEN_PROMPT, f"<think>{CALL}</think>x", CALL, "x"),
    ("magistral", "[/INST]", "[THINK]Hm.[/THINK]2", "Hm.", "2"),
    ("gemma", "<|turn>model\n", "<|channel>thought\nHm.\n<channel|>2", "Hm.", "2"),
    ("gpt-oss", "", f"{ANALYSIS}<|start|>assistant<|channel|>final<|message|>2<|return|>", "Hm.", "2"),
    ("gpt-oss", "", f"{ANALYSIS}<|start|>assistant{ANALYSIS}", "Hm.\nHm.", ""),
    ("gpt-oss", "", "<|channel|>analysis<|message|>Hm", "Hm", ""),
    ("gpt-oss", "", "<|channel|>commentary<|message|>Look.<|end|><|start|>assistant<|channel|>final<|message|>2", "",
     "Look.\n2"),
    ("gpt-oss", "", "<|channel|>analysis<|message|>Hm.<|channel|>final<|message|>2<|return|>", "Hm.", "2"),
    ("gpt-oss", "", "plain text", "", "plain text"),
    ("gpt-oss", "", "plain " * 100, "", "plain " * 100),
    ("gpt-oss", "", f"{ANALYSIS}<|start|>assistant<|chan", "Hm.", ""),
    ("none", QWEN_PROMPT, "<think>x</think>2", "", "<think>x</think>2"),
]  # fmt: skip
CHAINED = [
    ("think", "hermes", f"<think>Hm.</think>\n\nSo\n<tool_call>{CALL}</tool_call>", "Hm.", "So", [ADD]),
    ("think", "hermes", f"<think><tool_call>{CALL}</tool_call>", f"<tool_call>{CALL}</tool_call>", "", []),
    ("gpt-oss", "gpt-oss", f"{ANALYSIS}{HARMONY_CALL}", "Hm.", "", [ADD]),
    ("gpt-oss", "gpt-oss", f"<|channel|>commentary<|message|>Look.<|end|>{HARMONY_CALL}", "", "Look.", [ADD]),
    ("gpt-oss", "gpt-oss", ' to=functions.add<|channel|>commentary json<|message|>{"a": 1}', "", "", [ADD]),
    ("gpt-oss", "gpt-oss", f"{ANALYSIS}{HARMONY_CALL[:-9]}", "Hm.", HARMONY_CALL[:-9], []),
    ("magistral", "mistral", '[THINK]Hm.[/THINK][TOOL_CALLS]add[ARGS]{"a": 1}', "Hm.", "", [ADD]),
]


def read(reader, chunks):
    pieces = [piece for chunk in chunks for piece in reader.feed(chunk)] + reader.finish()
    content = "".join(piece.text for piece in pieces if isinstance(piece, ContentText))
    return content, "".join(piece.text for piece in pieces if isinstance(piece, ReasoningText))


@pytest.mark.parametrize("size", [1, 1000])
@pytest.mark.parametrize(("family", "prompt", "text", "reasoning", "content"), TABLE)
def test_thoughts_are_separated_from_content(family, prompt, text, reasoning, content, size):
    chunks = [text[start : start + size] for start in range(0, len(text), size)]
    assert read(REASONING_PARSERS[family].make_reader(prompt), chunks) == (content, reasoning)


@pytest.mark.parametrize(("family", "tool_family", "text", "reasoning", "content", "calls"), CHAINED)
def test_calls_are_found_after_thoughts(family, tool_family, text, reasoning, content, calls):
    reader = ChainedReader(REASONING_PARSERS[family].make_reader(""), TOOL_PARSERS[tool_family].make_reader([]))
    assert parse_answer(reader, text) == (content, reasoning, calls)


def test_every_family_is_in_the_table():
    assert {family for family, *_ in TABLE} == set(REASONING_PARSERS)


MARKS = [mark for parser in REASONING_PARSERS.values() for mark in parser.marks]
FRAGMENTS = st.sampled_from(
    [*MARKS, *(row[2] for row in TABLE), "\n", " ", "<", "analysis", " to=functions.add", "x" * 300]
)


@pytest.mark.parametrize("is_open", [True, False])
@pytest.mark.parametrize("family", REASONING_PARSERS)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_any_text_in_any_chunks_is_read_as_the_whole_text(family, is_open, data):
    text = data.draw(st.lists(st.one_of(FRAGMENTS, st.text(max_size=8)), max_size=8).map("".join))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    chunks = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    parser = REASONING_PARSERS[family]
    prompt = parser.opening if is_open and family in ("think", "magistral", "gemma") else ""
    whole = read(parser.make_reader(prompt), [text])
    assert read(parser.make_reader(prompt), chunks) == read(parser.make_reader(prompt), text) == whole
    assert sum(map(len, whole)) <= len(text) + 9 * text.count("<|message|>")  # <|start|>, where it was in the prompt


@pytest.mark.parametrize("family", REASONING_PARSERS)
def test_a_megabyte_of_marks_is_read_in_chunks(family):
    unit = "".join(MARKS)
    reader = REASONING_PARSERS[family].make_reader("")
    for _ in range((1 << 20) // len(unit)):
        reader.feed(unit)
        assert len(getattr(reader, "_tail", "")) < 32
    reader.finish()
