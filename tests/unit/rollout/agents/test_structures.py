"""The text that a family is made to write for a required call is read as that call."""

import itertools
import json
from array import array

import pytest

from hpcrl.config.recipe import EngineConfig, ModelConfig
from hpcrl.engines.base import ExactText, FreeText, GenerateRequest, JsonValue, OutputStructure
from hpcrl.engines.embedded.grammar import GrammarCompiler
from hpcrl.engines.structure import check_structure
from hpcrl.models.chat_layout import load_chat_template
from hpcrl.rollout.agents.answer_parser import AnswerParser, choose_parsers
from hpcrl.rollout.agents.reasoning_parsers import REASONING_PARSERS
from hpcrl.rollout.agents.recording import TurnPrompt
from hpcrl.rollout.agents.requests import ApiError, ModelCall
from hpcrl.rollout.agents.shared_sequence import SharedSequence
from hpcrl.rollout.agents.structures import CALL_WRITERS, find_free_tokens, list_free_bounds, make_structure
from hpcrl.rollout.agents.tool_families import GEMMA_CALLS, TOOL_PARSERS
from hpcrl.rollout.agents.tool_parsers import ToolCall, parse_answer
from hpcrl.testing.model_templates import FAMILIES, save_family

REASONING = {"gpt-oss": "gpt-oss", "deepseek": "think", "glm": "think"}
PARAMETERS = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "string"}},
    "required": ["a"],
    "additionalProperties": False,
}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": PARAMETERS}} for name in ("add", "look_up")]
ARGUMENTS = {"a": 1, "b": 'x "y"\n<z>'}


def make_prompt(rendered):
    return TurnPrompt(parent=None, ids=SharedSequence(array("i")), text=SharedSequence(rendered))


def make_value(schema, *, tool):
    """Make a value of a schema: arguments, a whole call, or one argument."""
    match schema:
        case {"anyOf": [*calls]}:
            return make_value(next(call for call in calls if tool in str(call)), tool=tool)
        case {"properties": {"name": _, "parameters": _}}:
            return {"name": tool, "parameters": ARGUMENTS}
        case _:
            return ARGUMENTS if schema == PARAMETERS else ARGUMENTS["b" if schema.get("type") == "string" else "a"]


def write(parts, *, tool):
    """Write a text that the parts allow: the call of one tool, with every argument, after a thought."""
    text = ""
    for part in parts:
        match part:
            case ExactText(text=exact):
                text += exact
            case JsonValue(schema=schema):
                text += json.dumps(make_value(schema, tool=tool))
            case FreeText(until=until):
                text += ("Hm." if until in ("</think>", "<|end|>") else ARGUMENTS["b"]) + until
            case _:
                fitting = [parts for parts in part.alternatives if parts and tool in str(parts)]
                text += write((fitting or part.alternatives)[0], tool=tool)
    return text


@pytest.mark.parametrize("prompt", ["<|assistant|>", "<|assistant|><think>\n"])
@pytest.mark.parametrize("tool", ["add", "look_up"])
@pytest.mark.parametrize("family", CALL_WRITERS)
def test_a_required_call_that_is_written_is_read(family, tool, prompt):
    name, _, mark = family.partition(" ")
    reasoning = REASONING_PARSERS[REASONING.get(family, "none")]
    parser = AnswerParser(tools=TOOL_PARSERS[name], reasoning=reasoning, call_mark=mark)
    call = ModelCall(model="hpcrl", tools=TOOLS, must_call=("add", "look_up"))
    turn = make_prompt(prompt)
    structure = make_structure(call, turn, parser)
    check_structure(structure)
    text = write(structure.parts, tool=tool)
    content, _, calls = parse_answer(parser.make_reader(call, turn), text)
    assert (content, calls) == ("", [ToolCall(tool, ARGUMENTS)])


@pytest.mark.parametrize("family", ["pythonic", "gemma", *(f"gemma {opening}" for opening, _, _ in GEMMA_CALLS)])
@pytest.mark.parametrize("num_required", [0, 1, 3])
def test_arguments_between_commas_may_be_left_out(family, num_required):
    keys = ["a", "b", "c"]
    schema = {
        "type": "object",
        "properties": {key: {"type": "integer"} for key in keys},
        "required": keys[:num_required],
    }
    writer = CALL_WRITERS[family]
    structure = OutputStructure(parts=writer.list_parts([{"name": "add", "parameters": schema}], may_repeat=True))
    check_structure(structure)

    def write_all(parts):
        """Return all texts that the parts allow, with 1 for each value, and without a second call."""
        texts = [""]
        for part in parts:
            match part:
                case ExactText(text=exact):
                    more = [exact]
                case JsonValue():
                    more = ["1"]
                case _:
                    more = [text for alternative in part.alternatives for text in write_all(alternative)]
            texts = [text + end for text in texts for end in more]
        return texts

    calls = [
        parse_answer(TOOL_PARSERS[family.partition(" ")[0]].make_reader(()), text)
        for text in write_all(structure.parts)
    ]
    left = keys[num_required:]
    wanted = [
        keys[:num_required] + list(more) for n in range(len(left) + 1) for more in itertools.combinations(left, n)
    ]
    assert sorted(sorted(call.arguments) for _, _, (call,) in calls) == sorted(wanted)


@pytest.mark.parametrize("tool", ["look-up", "class"])
def test_a_name_that_python_does_not_have_is_refused(tool):
    parser = AnswerParser(tools=TOOL_PARSERS["pythonic"])
    call = ModelCall(model="hpcrl", tools=[{"type": "function", "function": {"name": tool}}], must_call=(tool,))
    with pytest.raises(ApiError, match=tool):
        make_structure(call, make_prompt(""), parser)


@pytest.mark.parametrize(("family", "form"), [("Qwen3", "hermes"), ("Llama-3.1, 3.3", "llama"), ("Gemma-3", "gemma")])
def test_calls_that_vllm_reads_are_written_as_the_template_shows(tmp_path, monkeypatch, family, form):
    monkeypatch.setattr("hpcrl.rollout.agents.answer_parser.load_tool_parser", lambda *_: None)
    template = load_chat_template(save_family(tmp_path, FAMILIES[family]))
    choice = choose_parsers(template.text, EngineConfig(tool_parser="vllm:some"))
    assert AnswerParser.from_choice(choice, template, tmp_path).call_format == form


def test_gemma_reads_keys_without_quotes_only_outside_texts():
    text = '<|tool_call>call:add{a:{"x": "one, two: three"},b:<|"|>four, five: "six"<|"|>}<tool_call|>'
    _, _, calls = parse_answer(TOOL_PARSERS["gemma"].make_reader(()), text)
    assert calls == [ToolCall("add", {"a": {"x": "one, two: three"}, "b": 'four, five: "six"'})]


WRITTEN = {
    ("gpt-oss", "value"): [
        "<|channel|>final<|message|>{}<|return|>",
        "<|channel|>analysis<|message|>Hm.\n<|end|><|start|>assistant<|channel|>final<|message|>{}<|return|>",
    ],
    ("gpt-oss", "call"): [
        "<|channel|>commentary to=functions.add <|constrain|>json<|message|>{}<|call|>",
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
        "<|channel|>commentary to=functions.add <|constrain|>json<|message|>{}<|call|>",
    ],
    ("Qwen3", "value"): ["{}<|im_end|>", "<think>\nHm.\n</think>\n\n{}<|im_end|>"],
    ("Qwen3", "call"): [
        '<tool_call>\n{{"name": "add", "arguments": {}}}\n</tool_call><|im_end|>',
        '<think>\nHm.\n</think>\n\n<tool_call>\n{{"name": "add", "arguments": {}}}\n</tool_call><|im_end|>',
    ],
    ("Gemma-3", "call"): [
        "```tool_code\nadd(a=1)\n```<end_of_turn>",
        '```tool_code\nadd(a=1, b="x")\nadd(a=2)\n```<end_of_turn>',
    ],
    ("Qwen3-2507 thinking", "value"): ["Hm.\n</think>\n\n{}<|im_end|>", "Hm.\n</think>\n{}<|im_end|>"],
    ("Qwen3-2507 thinking", "call"): [
        'Hm.\n</think>\n\n<tool_call>\n{{"name": "add", "arguments": {}}}\n</tool_call><|im_end|>',
    ],
}
NOT_WRITTEN = {
    ("gpt-oss", "value"): ["{}<|return|>", "<|channel|>analysis<|message|>{}<|return|>"],
    ("gpt-oss", "call"): ["<|channel|>analysis<|message|>Hm.<|return|>"],
    ("Qwen3", "value"): ["<think>\nHm.<|im_end|>", "Hm. {}<|im_end|>"],
    ("Qwen3", "call"): ["{}<|im_end|>"],
    ("Gemma-3", "call"): ["{}<end_of_turn>", '```tool_code\nadd(b="x")\n```<end_of_turn>', "```tool_code\nadd()\n```"],
    ("Qwen3-2507 thinking", "value"): ["Hm.<|im_end|>"],
    ("Qwen3-2507 thinking", "call"): ["Hm.\n</think>\n\n{}<|im_end|>"],
}


@pytest.mark.parametrize(("family", "kind"), WRITTEN)
def test_a_model_that_thinks_may_do_so_before_what_it_must_write(tmp_path, family, kind):
    config = ModelConfig(chat_template_kwargs=dict(FAMILIES[family].kwargs))
    template = load_chat_template(save_family(tmp_path, FAMILIES[family]), config)
    parser = AnswerParser.from_choice(choose_parsers(template.text, EngineConfig()), template, tmp_path)
    asked = {"tools": TOOLS, "must_call": ("add",)} if kind == "call" else {"output_schema": PARAMETERS}
    call = ModelCall(model="hpcrl", messages=[{"role": "user", "content": "1 + 1?"}], **asked)
    prompt = make_prompt(template.render(call.messages, tools=call.tools))
    structure = make_structure(call, prompt, parser)
    compiler = GrammarCompiler(tmp_path / "tokenizer.json", vocabulary=template.vocabulary_size)

    def is_allowed(text):
        stops = list(template.stop_token_ids)
        request = GenerateRequest(
            request_id="r", token_ids=[1], max_new_tokens=9, stop_token_ids=stops, structure=structure
        )
        matcher = compiler.compile(request)
        for token in template.encode(text.format(json.dumps(ARGUMENTS))):
            if not matcher.find_allowed()[token]:
                return False
            matcher.accept(token)
        return True

    assert [is_allowed(text) for text in WRITTEN[family, kind]] == [True] * len(WRITTEN[family, kind])
    assert not any(is_allowed(text) for text in NOT_WRITTEN[family, kind])
    for text in WRITTEN[family, kind] if family != "Gemma-3" else ():
        shown = text.format(json.dumps(ARGUMENTS)).removesuffix("<|im_end|>").removesuffix("<|return|>")
        content, _, calls = parse_answer(parser.make_reader(call, prompt), shown)
        assert (content, calls) == (
            ("", [ToolCall("add", ARGUMENTS)]) if kind == "call" else (json.dumps(ARGUMENTS), [])
        )


LISTED = ["<|tool_call>", "call:add{a:", "1", ",b:", '<|"|>', "x", '<|"|>', "}", "<tool_call|>"]
TAGGED = ["<tool_call>\n<function=add>\n<parameter=b>\n", "wo", "rd", "\n</parameter>\n", "</function>"]


@pytest.mark.parametrize(
    ("family", "prompt", "texts", "free"),
    [
        ("hermes", "", ["<think>", "\nHm", ".\n", "</think>", "\n\n", "<tool_call>\n", "add"], range(4)),
        ("hermes", "", ["<tool_call>\n", "add", "<think>Hm</think>"], range(2, 3)),
        ("hermes", "<think>\n", ["Hm", "", "</", "think>\n", "<tool_call>"], range(4)),
        ("hermes", "<think>\n", ["Hm", ", cut", " off", ""], range(3)),
        ("qwen3-coder", "", TAGGED, range(1, 4)),
        ("gemma <|tool_call>", "", LISTED, range(5, 7)),
    ],
)
def test_thoughts_and_texts_of_arguments_are_free_and_the_rest_is_form(family, prompt, texts, free):
    name, _, mark = family.partition(" ")
    reasoning = REASONING_PARSERS["think" if family == "hermes" else "none"]
    parser = AnswerParser(tools=TOOL_PARSERS[name], reasoning=reasoning, call_mark=mark)
    call = ModelCall(model="hpcrl", tools=TOOLS, must_call=("add",))
    structure = make_structure(call, make_prompt(prompt), parser)
    found = find_free_tokens(list_free_bounds(structure.parts), texts)
    assert [place for place, is_free in enumerate(found) if is_free] == list(free)
