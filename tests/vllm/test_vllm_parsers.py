"""vLLM's own parsers of tool calls and thoughts, used in place of ours."""

import re
from dataclasses import replace

import pytest

from hpcrl.config.recipe import EngineConfig
from hpcrl.envs import check
from hpcrl.errors import ConfigError
from hpcrl.models.chat_layout import load_chat_template
from hpcrl.rollout.agents.answer_parser import AnswerParser, ChainedReader, choose_parsers
from hpcrl.rollout.agents.tool_parsers import ToolCall, parse_answer
from hpcrl.testing.model_templates import FAMILIES, save_family
from tests.support.plans import make_recipe

pytestmark = pytest.mark.vllm
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}}}
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": PARAMETERS}}]


@pytest.fixture(scope="module")
def qwen(tmp_path_factory):
    return save_family(tmp_path_factory.mktemp("qwen"), FAMILIES["Qwen3"])


def load_parser(model, **engine):
    template = load_chat_template(model)
    return AnswerParser.from_choice(choose_parsers(template.text, EngineConfig(**engine)), template, model)


def read(parser, text):
    return parse_answer(ChainedReader(parser.reasoning.make_reader(""), parser.tools.make_reader(TOOLS)), text)


def test_a_parser_of_vllm_reads_calls_after_our_thoughts(qwen):
    parser = load_parser(qwen, tool_parser="vllm:hermes")
    assert read(parser, f"<think>Hm.</think>\n\nSo\n{CALL}") == ("So\n", "Hm.", [ToolCall("add", {"a": 1})])
    assert read(parser, "<tool_call>{") == ("<tool_call>{", "", [])


def test_thoughts_may_be_read_by_a_parser_of_vllm(qwen):
    content, reasoning, calls = read(load_parser(qwen, reasoning_parser="vllm:deepseek_r1"), f"Hm.</think>{CALL}")
    assert (content, reasoning, calls) == ("", "Hm.", [ToolCall("add", {"a": 1})])


CHOSEN = {
    "kimi_k2": (
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.add:0<|tool_call_argument_begin|>"
        '{"a": 1}<|tool_call_end|><|tool_calls_section_end|>'
    ),
    "minimax_m2": (
        '<minimax:tool_call><invoke name="add"><parameter name="a">1</parameter></invoke></minimax:tool_call>'
    ),
    "seed_oss": "<seed:tool_call><function=add><parameter=a>1</parameter></function></seed:tool_call>",
    "longcat": '<longcat_tool_call>{"name": "add", "arguments": {"a": 1}}</longcat_tool_call>',
    "lfm2": "<|tool_call_start|>[add(a=1)]<|tool_call_end|>",
    "dots": '<dots_function_call>{"name": "add", "arguments": {"a": 1}}</dots_function_call>',
    "apertus": '<|tools_prefix|>[{"add": {"a": 1}}]<|tools_suffix|>',
    "step3": (
        '<|tool_calls_begin|><|tool_call_begin|>function<|tool_sep|><steptml:invoke name="add">'
        '<steptml:parameter name="a">1</steptml:parameter></steptml:invoke><|tool_call_end|><|tool_calls_end|>'
    ).replace("|", "\uff5c"),
}
"""An answer of each family whose calls a parser of vLLM reads unless the recipe names another."""


@pytest.mark.parametrize(("name", "call"), CHOSEN.items())
def test_a_mark_of_the_template_chooses_a_parser_of_vllm(tmp_path, name, call):
    marks = sorted(set(re.findall(r"<[^<>\s]+>", call)) - {"<parameter=a>", "<function=add>"})
    base = FAMILIES["Qwen2.5"]
    family = replace(base, template=f"{{# {call} #}}{base.template}", plain=(*base.plain, *marks))
    assert f"vllm:{name}" == choose_parsers(family.template, EngineConfig()).tool_parser
    content, _, calls = read(load_parser(save_family(tmp_path, family)), call)
    assert (content.strip(), calls) == ("", [ToolCall("add", {"a": 1})])


@pytest.mark.parametrize("setting", ["tool_parser", "reasoning_parser"])
def test_a_name_that_vllm_does_not_know_is_refused_with_the_list(qwen, setting):
    with pytest.raises(ConfigError, match=f"engine.{setting} = 'vllm:x' is not known to this vLLM: .*it has .*deep"):
        load_parser(qwen, **{setting: "vllm:x"})


def test_a_parser_that_vllm_does_not_have_is_refused_with_its_list():
    """The settings of `[engine]` differ only in their prefix."""
    parsers_of_judge = ('engine.tool_parser="vllm:hermez"', 'engine.reasoning_parser="vllm:qwen3"')
    recipe = make_recipe("judge.grader.path=/m", *(f"judge.grader.{setting}" for setting in parsers_of_judge))
    refusal = r"^judge.grader.engine.tool_parser = 'vllm:hermez' is not known .*did you mean 'hermes'"
    with pytest.raises(ConfigError, match=refusal):
        check.check_packages(recipe)
