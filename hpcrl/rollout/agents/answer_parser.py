"""How the text of a model is read into thoughts, content and tool calls, and what text it may be made to generate.

AnswerParser    the parsers of a model: makes a reader for each answer
"""

from collections.abc import Collection
from dataclasses import dataclass

from hpcrl.rollout.agents.reasoning_parsers import REASONING_PARSERS, ReasoningParser
from hpcrl.rollout.agents.recording import TurnPrompt
from hpcrl.rollout.agents.requests import ModelCall
from hpcrl.rollout.agents.tool_families import TOOL_PARSERS
from hpcrl.rollout.agents.tool_parsers import AnswerPiece, ContentText, PlainReader, TextReader, ToolParser


@dataclass(frozen=True, kw_only=True)
class AnswerParser:
    """The parsers of a model."""

    tools: ToolParser = TOOL_PARSERS["hermes"]
    reasoning: ReasoningParser = REASONING_PARSERS["none"]

    @property
    def marks(self) -> Collection[str]:
        """The special tokens that readers must see in the text."""
        return {*self.tools.marks, *self.reasoning.marks}

    def make_reader(self, call: ModelCall, prompt: TurnPrompt) -> TextReader:
        """Make a reader for one answer to this call."""
        if call.text is not None:
            return PlainReader()
        tools = self.tools.make_reader(call.tools) if call.tools else PlainReader()
        return ChainedReader(self.reasoning.make_reader(prompt.rendered), tools)


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
