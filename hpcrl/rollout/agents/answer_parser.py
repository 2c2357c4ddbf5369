"""Read the text of a model into thoughts, content and tool calls, and find what text it may be made to generate.

AnswerParser    the parsers of a model: makes a reader for each answer
VllmToolParser, VllmReasoningParser  parsers of vLLM, which read an answer once it is whole
ChainedReader, WholeReader  their readers: piece by piece, or all at once
choose_parsers, ParserChoice  the names of the parsers, by the chat template, unless the recipe names them
add_call_form   a chat template with the form of calls that the chosen parser reads
find_mark_texts  the special tokens that parsers must see
make_answer_reader  a reader that only finds thoughts, for answers to environments

The marks that a template writes are those that its model generates, by which families differ.
"""

import itertools
import logging
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple, Self

import msgspec

from hpcrl.config.recipe import AUTO_PARSER, VLLM_PARSER_PREFIX, EngineConfig
from hpcrl.engines.base import Completion
from hpcrl.engines.vllm.parsers import ExtractCalls, ExtractThoughts, load_reasoning_parser, load_tool_parser
from hpcrl.models.chat_template import ChatTemplate
from hpcrl.rollout.agents.reasoning_parsers import MAX_HEADER_CHARS, REASONING_PARSERS, ReasoningParser
from hpcrl.rollout.agents.recording import TurnPrompt
from hpcrl.rollout.agents.requests import ModelCall
from hpcrl.rollout.agents.tool_families import CALL_FORMS, CALL_START, GEMMA_CALLS, TOOL_PARSERS
from hpcrl.rollout.agents.tool_parsers import (
    AnswerPiece,
    ContentText,
    PlainReader,
    ReasoningText,
    TextReader,
    ToolParser,
    ToolSchemas,
    decode_json,
    make_call,
)
from hpcrl.rollout.thoughts import NUM_OPENING_IDS, AnswerReader, AnswerText

TOOL_MARKS = (
    ("<|channel|>", "gpt-oss"),
    ("<function=", "qwen3-coder"),
    ("<arg_key>", "glm"),
    (CALL_START, "deepseek"),
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
VLLM_TOOL_MARKS = (
    ("<|tool_calls_section_begin|>", "kimi_k2"),
    ("<minimax:tool_call>", "minimax_m2"),
    ("<seed:tool_call>", "seed_oss"),
    ("<longcat_tool_call>", "longcat"),
    ("<|tool_call_start|>", "lfm2"),
    ("<dots_function_call>", "dots"),
    ("<|tools_prefix|>", "apertus"),
    ("<\uff5ctool_calls_begin\uff5c>", "step3"),
)
"""Likewise, and the parser of vLLM that reads such a family: chosen where vLLM is installed."""
REASONING_MARKS = (
    ("<|channel|>", "gpt-oss"),
    ("[THINK]", "magistral"),
    ("<|channel>", "gemma"),
    ("</think>", "think"),
    ("<think>", "think"),
)
"""Likewise for thoughts."""
VLLM_REASONING_MARKS = (("<seed:think>", "seed_oss"),)
DEFAULT_TOOL_PARSER = "hermes"
"""The family where no mark is found: the form that most models were taught."""


class ParserChoice(NamedTuple):
    """The names of the parsers of a model, and why: the mark that was found, or the recipe."""

    tool_parser: str
    reasoning_parser: str
    reason: str


def choose_parsers(template: str, engine: EngineConfig) -> ParserChoice:
    """Choose the parsers of a model with this chat template."""
    tool, tool_reason = _choose(
        engine.tool_parser, template, (*_list_vllm_marks(VLLM_TOOL_MARKS), *TOOL_MARKS), default=DEFAULT_TOOL_PARSER
    )
    reasoning_marks = (*_list_vllm_marks(VLLM_REASONING_MARKS), *REASONING_MARKS)
    reasoning, reasoning_reason = _choose(engine.reasoning_parser, template, reasoning_marks, default="none")
    return ParserChoice(tool, reasoning, f"tool calls by {tool_reason}, thoughts by {reasoning_reason}")


def add_call_form(template: ChatTemplate, engine: EngineConfig) -> ChatTemplate:
    """Return the template with the form in which its model writes calls, where that is known."""
    call_form = CALL_FORMS.get(choose_parsers(template.text, engine).tool_parser)
    other = template.with_tools

    def add(one: ChatTemplate) -> ChatTemplate:
        return replace(one, form=msgspec.structs.replace(one.form, call_form=call_form))

    return replace(add(template), with_tools=other and add(other))


def _list_vllm_marks(marks: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    return [(mark, VLLM_PARSER_PREFIX + name) for mark, name in marks] if find_spec("vllm") else []


def _choose(name: str, template: str, marks: Iterable[tuple[str, str]], *, default: str) -> tuple[str, str]:
    if name != AUTO_PARSER:
        return name, "the recipe"
    for mark, family in marks:
        if mark in template:
            return family, f"{mark} in the chat template"
    return default, "default: the chat template has no mark of a known family"


@dataclass(frozen=True, kw_only=True)
class AnswerParser:
    """The parsers of a model."""

    tools: ToolParser = TOOL_PARSERS["hermes"]
    reasoning: ReasoningParser = REASONING_PARSERS["none"]
    call_mark: str = ""
    """The mark in the chat template by which the family of calls shows, of those in TOOL_MARKS; "" if there is none."""

    @classmethod
    def from_choice(cls, choice: ParserChoice, template: ChatTemplate, model: Path) -> Self:
        """Make the parsers that were chosen for a model; ConfigError if they are vLLM's and cannot be loaded."""
        marks = tuple(mark for mark, token in template.mark_ids.items() if token not in template.stop_token_ids)
        prefix, tool, reasoning = VLLM_PARSER_PREFIX, choice.tool_parser, choice.reasoning_parser
        return cls(
            tools=VllmToolParser(load_tool_parser(tool.removeprefix(prefix), model), marks)
            if tool.startswith(prefix)
            else TOOL_PARSERS[tool],
            reasoning=VllmReasoningParser(load_reasoning_parser(reasoning.removeprefix(prefix), model), marks)
            if reasoning.startswith(prefix)
            else REASONING_PARSERS[reasoning],
            call_mark=next((mark for mark, _ in TOOL_MARKS if mark in template.text), ""),
        )

    @property
    def call_format(self) -> str:
        """The name of the form in which the model is made to write a call; "none" if that is not known.

        With a parser of vLLM it is that of the family which the template shows. Gemma has a form for each opening mark.
        """
        shown = dict(TOOL_MARKS).get(self.call_mark, "none")
        name = next((name for name, tools in TOOL_PARSERS.items() if tools is self.tools), shown)
        is_marked = name == "gemma" and self.call_mark in {opening for opening, _, _ in GEMMA_CALLS}
        return f"gemma {self.call_mark}" if is_marked else name

    @property
    def marks(self) -> Collection[str]:
        """The special tokens that readers must see in the text."""
        return {*self.tools.marks, *self.reasoning.marks}

    def make_reader(self, call: ModelCall, prompt: TurnPrompt) -> TextReader:
        """Make a reader for one answer to this call."""
        if call.text is not None:
            return PlainReader()
        tools = self.tools.make_reader(call.tools) if call.tools else PlainReader()
        return ChainedReader(self.reasoning.make_reader(prompt.read_end(MAX_HEADER_CHARS)), tools)

    def make_record_reader(self, prompt_end: str) -> TextReader:
        """Make a reader for an answer of a record, which has no tools."""
        return ChainedReader(self.reasoning.make_reader(prompt_end), self.tools.make_reader(()))


class ChainedReader:
    """A reader of thoughts, whose content is read for tool calls."""

    def __init__(self, reasoning: TextReader, tools: TextReader) -> None:
        self._reasoning, self._tools = reasoning, tools

    def feed(self, text: str) -> list[AnswerPiece]:
        return self._read(self._reasoning.feed(text))

    def finish(self) -> list[AnswerPiece]:
        return [*self._read(self._reasoning.finish()), *self._tools.finish()]

    def _read(self, pieces: list[AnswerPiece]) -> list[AnswerPiece]:
        found: list[AnswerPiece] = []
        for piece in pieces:
            found += self._tools.feed(piece.text) if isinstance(piece, ContentText) else [piece]
        return found


@dataclass(frozen=True)
class VllmToolParser:
    """A reader of tool calls by a parser of vLLM, from the whole answer: its streaming depends on the server."""

    extract: ExtractCalls
    marks: Collection[str]
    """All special tokens: which of them it looks for is not known."""

    def make_reader(self, tools: ToolSchemas) -> TextReader:
        return WholeReader(lambda text: self._parse(text, tools))

    def _parse(self, text: str, tools: ToolSchemas) -> list[AnswerPiece]:
        content, found = self.extract(text, tools)
        calls = [make_call(name, decode_json(arguments)) for name, arguments in found]
        if None in calls:
            return [ContentText(text)]
        return [*([ContentText(content)] if content else []), *(call for call in calls if call is not None)]


@dataclass(frozen=True)
class VllmReasoningParser:
    """A reader of thoughts by a parser of vLLM."""

    extract: ExtractThoughts
    marks: Collection[str]

    def make_reader(self, _: str) -> TextReader:
        return WholeReader(self._parse)

    def _parse(self, text: str) -> list[AnswerPiece]:
        reasoning, content = self.extract(text)
        return [
            *([ReasoningText(reasoning)] if reasoning else []),
            *([ContentText(content)] if content else []),
        ]


class WholeReader:
    """A reader that returns everything once the answer is whole; what its function cannot parse is content."""

    def __init__(self, parse: Callable[[str], list[AnswerPiece]]) -> None:
        self._parse = parse
        self._texts: list[str] = []

    def feed(self, text: str) -> list[AnswerPiece]:
        self._texts.append(text)
        return []

    def finish(self) -> list[AnswerPiece]:
        text = "".join(self._texts)
        try:
            return self._parse(text) if text else []
        except Exception:  # the parsers of others raise anything
            logging.getLogger(__name__).warning("a parser failed: its answer is content", exc_info=True)
            return [ContentText(text)]


def make_answer_reader(template: ChatTemplate, find_parser: Callable[[], ReasoningParser]) -> AnswerReader:
    """Make a reader for a model; its parser is only loaded when it is needed."""

    def read_answer(completion: Completion, *, prompt_ids: Sequence[int]) -> AnswerText:
        parser = find_parser()
        text = _decode_with_marks(template, completion.token_ids, parser.marks)
        reader = parser.make_reader(template.decode_all(prompt_ids[-NUM_OPENING_IDS:]))
        pieces = [*reader.feed(text), *reader.finish()]
        content = "".join(piece.text for piece in pieces if isinstance(piece, ContentText))
        return AnswerText(content, content != text)

    return read_answer


def find_mark_texts(template: ChatTemplate, marks: Collection[str]) -> dict[int, str]:
    """Return the special tokens, of these marks, that are part of an answer's text."""
    return {template.mark_ids[mark]: mark for mark in marks if mark in template.mark_ids}


def _decode_with_marks(template: ChatTemplate, token_ids: Sequence[int], marks: Collection[str]) -> str:
    """Decode an answer; of the special tokens only these marks are part of the text."""
    shown = find_mark_texts(template, marks)
    parts = itertools.groupby(token_ids, key=shown.get)
    return "".join(template.decode(list(part)) if mark is None else mark * len(list(part)) for mark, part in parts)
