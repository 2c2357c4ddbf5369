"""vLLM's own parsers of tool calls and thoughts, used in place of ours."""

import pytest

from hpcrl.config.recipe import EngineConfig
from hpcrl.errors import ConfigError
from hpcrl.models.chat_layout import load_chat_template
from hpcrl.rollout.agents.answer_parser import AnswerParser, ChainedReader, choose_parsers
from hpcrl.rollout.agents.tool_parsers import ToolCall, parse_answer
from hpcrl.testing.model_templates import FAMILIES, save_family

pytestmark = pytest.mark.vllm
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]


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


@pytest.mark.parametrize("setting", ["tool_parser", "reasoning_parser"])
def test_a_name_that_vllm_does_not_know_is_refused_with_the_list(qwen, setting):
    with pytest.raises(ConfigError, match=f"engine.{setting} = 'vllm:x' is not known to this vLLM: .*it has .*deep"):
        load_parser(qwen, **{setting: "vllm:x"})
