"""Choose the parsers of a model by its chat template; the recipe's engine.tool_parser and reasoning_parser override.

choose_parsers       the names, and whether the template decided them
make_answer_parser   the parsers with these names

The marks that a template writes are those that its model generates, so each family is known by one of its own.
"""

from typing import NamedTuple

from hpcrl.config.recipe import AUTO_PARSER, EngineConfig
from hpcrl.rollout.agents.answer_parser import AnswerParser
from hpcrl.rollout.agents.reasoning_parsers import REASONING_PARSERS
from hpcrl.rollout.agents.tool_families import CALL_BEGIN, TOOL_PARSERS

TOOL_MARKS = (
    ("<|channel|>", "gpt-oss"),
    ("<function=", "qwen3-coder"),
    ("<arg_key>", "glm"),
    (CALL_BEGIN, "deepseek"),
    ("[TOOL_CALLS]", "mistral"),
    ("<|tool_call>", "gemma"),
    ("<start_function_call>", "gemma"),
    ("<start_of_turn>", "gemma"),
    ("<|tool_call|>", "phi"),
    ("<|/tool|>", "phi"),
    ("<tool_call>", "hermes"),
    ("<|header_start|>", "pythonic"),
    ("<|python_tag|>", "llama"),
    ("<|start_header_id|>", "llama"),
)
"""A text in a chat template, and the family of tool calls that it belongs to; the first that is found decides."""
REASONING_MARKS = (
    ("<|channel|>", "gpt-oss"),
    ("[THINK]", "magistral"),
    ("<|channel>", "gemma"),
    ("</think>", "think"),
    ("<think>", "think"),
)
"""Likewise for thoughts."""
DEFAULT_TOOL_PARSER = "hermes"
"""The family where no mark is found: the form that most models were taught."""


class ParserChoice(NamedTuple):
    """The names of the parsers of a model, and why: the mark that was found, or the recipe."""

    tool_parser: str
    reasoning_parser: str
    reason: str


def choose_parsers(template: str, engine: EngineConfig) -> ParserChoice:
    """Choose the parsers of a model with this chat template."""
    tool, tool_reason = _choose(engine.tool_parser, template, TOOL_MARKS, default=DEFAULT_TOOL_PARSER)
    reasoning, reasoning_reason = _choose(engine.reasoning_parser, template, REASONING_MARKS, default="none")
    return ParserChoice(tool, reasoning, f"tool calls by {tool_reason}, thoughts by {reasoning_reason}")


def _choose(name: str, template: str, marks: tuple[tuple[str, str], ...], *, default: str) -> tuple[str, str]:
    if name != AUTO_PARSER:
        return name, "the recipe"
    for mark, family in marks:
        if mark in template:
            return family, f"{mark} in the chat template"
    return default, "default: the chat template has no mark of a known family"


def make_answer_parser(choice: ParserChoice) -> AnswerParser:
    """Make the parsers that were chosen."""
    return AnswerParser(tools=TOOL_PARSERS[choice.tool_parser], reasoning=REASONING_PARSERS[choice.reasoning_parser])
