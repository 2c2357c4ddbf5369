"""Conversations to imitate: the template's ids, the assistant's mask, and rows that are refused."""

import msgspec
import numpy as np
import pytest

from hpcrl.config.recipe import ModelConfig, TinyModel
from hpcrl.errors import ConfigError
from hpcrl.models.chat_layout import load_chat_template
from hpcrl.models.conversation_data import parse_conversation
from hpcrl.models.tiny import make_tiny_model
from hpcrl.roles.warmup import tokenize_conversation
from hpcrl.spool.record import attach_columns, pack_trajectory, parse_facts
from hpcrl.spool.rows import expand_row
from hpcrl.testing.model_templates import FAMILIES, save_family

TOOL = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object"}}}
CHAT = [
    {"role": "user", "content": "Add 1 and 2."},
    {"role": "assistant", "content": "It is 3."},
    {"role": "user", "content": "And 4?"},
    {"role": "assistant", "content": "Now 7 <eos>."},
]
PLAIN = [*CHAT[:3], {"role": "assistant", "content": "Now 7."}]
CALLING = [
    {"role": "user", "content": "Add 1 and 2."},
    {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "add", "arguments": '{"x": 1}'}}]},
    {"role": "tool", "name": "add", "content": "3"},
    {"role": "assistant", "content": "It is 3."},
]
THOUGHTLESS = {"Qwen3-2507 thinking", "Qwen3.5", "DeepSeek-R1"}
"""Families whose prompt opens a thought, which these conversations do not have."""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    make_tiny_model(directory := tmp_path_factory.mktemp("tiny") / "model", TinyModel(), seed=0)
    return load_chat_template(directory)


def tokenized(template, messages, **more):
    row = parse_conversation({"messages": messages, **more})
    return tokenize_conversation(row, template=template, name="warmup/0", domain="warmup")


def shown_rows(template, made):
    """Return for each row its text, and the texts of its trained parts."""
    found = []
    for number in range(max(len(made.rows), 1)):
        row = expand_row(made, number)
        edges = np.flatnonzero(np.diff(np.concatenate([[0], row.loss_mask.astype(int), [0]])))
        spans = edges.reshape(-1, 2).tolist()
        text = template.decode_all(row.token_ids.tolist())
        found.append((text, [template.decode_all(row.token_ids[start:end].tolist()) for start, end in spans]))
    return found


def test_ids_are_those_of_the_whole_conversation_and_only_answers_are_trained(tiny):
    made = tokenized(tiny, CHAT)
    assert made.token_ids.tolist() == tiny.encode(tiny.render(CHAT, opens_answer=False))
    assert shown_rows(tiny, made) == [
        (
            "<user>Add 1 and 2.<agent>It is 3.<eos><user>And 4?<agent>Now 7 <eos>.<eos>",
            ["It is 3.<eos>", "Now 7 <eos>.<eos>"],
        )
    ]
    eos = tiny.mark_ids["<eos>"]
    assert (made.token_ids == eos).sum() == 2  # the one that the answer wrote is five ordinary characters


def test_an_answer_with_weight_0_is_shown_and_not_trained(tiny):
    made = tokenized(tiny, [CHAT[0], {**CHAT[1], "weight": 0}, *CHAT[2:]])
    assert shown_rows(tiny, made)[0][1] == ["Now 7 <eos>.<eos>"]
    assert made.token_ids.tolist() == tokenized(tiny, CHAT).token_ids.tolist()


def test_the_record_can_be_stored(tiny):
    packed = pack_trajectory(tokenized(tiny, CHAT))
    again = attach_columns(parse_facts(packed.facts), packed.columns)
    assert again.turns == tokenized(tiny, CHAT).turns


@pytest.mark.parametrize("name", sorted(FAMILIES.keys() - THOUGHTLESS))
def test_each_answer_follows_its_prompt_and_ends_where_the_model_stops(tmp_path, name):
    family = FAMILIES[name]
    config = ModelConfig(chat_template_kwargs=dict(family.kwargs))
    template = load_chat_template(save_family(tmp_path / "model", family), config)
    made = tokenized(template, PLAIN)
    answers = [(text, part) for text, parts in shown_rows(template, made) for part in parts]
    assert len(answers) == 2
    for (text, part), place in zip(answers, (1, 3), strict=True):
        assert PLAIN[place]["content"] in part
        assert text.partition(part)[0].endswith(template.render(PLAIN[:place])[-12:])
        assert template.encode(part)[-1] in template.stop_token_ids
        assert sum(number in template.stop_token_ids for number in template.encode(part)) == 1


def test_tool_calls_are_rendered_as_the_template_writes_them(tmp_path):
    template = load_chat_template(save_family(tmp_path / "model", FAMILIES["Qwen2.5"]))
    made = tokenized(template, CALLING, tools=msgspec.json.encode([TOOL]).decode())
    ((text, (call, answer)),) = shown_rows(template, made)
    assert call == '<tool_call>\n{"name": "add", "arguments": {"x": 1}}\n</tool_call><|im_end|>'
    assert answer == "It is 3.<|im_end|>"
    adapted = [*CALLING[:1], {**CALLING[1], "tool_calls": [{"function": {"name": "add", "arguments": {"x": 1}}}]}]
    assert text.startswith(template.render(adapted, tools=[TOOL], opens_answer=False).rstrip("\n"))


def test_a_history_that_the_template_changes_continues_in_another_row(tmp_path):
    template = load_chat_template(save_family(tmp_path / "model", FAMILIES["Qwen3"]))
    thoughtful = [{**m, "reasoning_content": f"Thought {n}."} if n % 2 else m for n, m in enumerate(CHAT)]
    first, second = shown_rows(template, tokenized(template, thoughtful))
    assert first[1] == ["<think>\nThought 1.\n</think>\n\nIt is 3.<|im_end|>"]
    assert second[1] == ["<think>\nThought 3.\n</think>\n\nNow 7 <eos>.<|im_end|>"]
    assert "Thought 1." not in second[0]
    assert second[0].startswith(template.render(thoughtful[:3]))


def test_a_missing_thought_is_refused_where_the_prompt_opens_one(tmp_path):
    template = load_chat_template(save_family(tmp_path / "model", FAMILIES["DeepSeek-R1"]))
    with pytest.raises(ConfigError, match="renders message 1 in another way than after a prompt"):
        tokenized(template, CHAT)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({}, "it has no `messages`, only nothing"),
        ({"message": []}, "it has no `messages`, only message: rename"),
        ({"messages": None}, "`messages` is null: remove the row"),
        ({"messages": "hello"}, "`messages` is 'hello', not a list"),
        ({"messages": []}, "none of its 0 messages is an assistant's"),
        ({"messages": CHAT[:1]}, "none of its 1 messages is an assistant's"),
        ({"messages": ["hi"]}, r"messages\[0\] is 'hi', not an object"),
        ({"messages": [{"role": "robot"}]}, r"messages\[0\].role is 'robot', not one of system"),
        ({"messages": [{"role": "user", "content": 3}]}, r"messages\[0\].content is 3, not text"),
        ({"messages": [{"role": "assistant"}]}, "with neither content nor tool_calls"),
        ({"messages": [{**CHAT[1], "weight": 2}]}, r"messages\[0\].weight is 2"),
        ({"messages": [{**CHAT[1], "weight": 0}]}, "is an assistant's to train on"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "only parts of text"),
        ({"messages": CHAT, "tools": "["}, "tools is not JSON"),
        ({"messages": CHAT, "tools": ["add"]}, "`tools` is .*, not a list of objects"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"name": "f"}]}]}, r"tool_calls\[0\] is"),
        ({"messages": [{"role": "assistant", "tool_calls": "f"}]}, "tool_calls is 'f', not a list"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]},
            "arguments is not JSON",
        ),
    ],
)
def test_a_row_that_is_not_a_conversation_is_refused(row, message):
    with pytest.raises(ConfigError, match=message):
        parse_conversation(row)
