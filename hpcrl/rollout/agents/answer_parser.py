"""How the text of a model is read into thoughts, content and tool calls, and what text it may be made to generate.

AnswerParser    the parsers of a model: makes a reader for each answer
PlainReader     reads a text in which nothing is found
"""

from collections.abc import Collection
from dataclasses import dataclass

from hpcrl.rollout.agents.recording import TurnPrompt
from hpcrl.rollout.agents.requests import ModelCall
from hpcrl.rollout.agents.tool_parsers import HERMES, AnswerPiece, ContentText, TextReader, ToolParser


class PlainReader:
    """A reader of a text in which nothing is found."""

    def feed(self, text: str) -> list[AnswerPiece]:
        return [ContentText(text)] if text else []

    def finish(self) -> list[AnswerPiece]:
        return []


@dataclass(frozen=True, kw_only=True)
class AnswerParser:
    """The parsers of a model."""

    tools: ToolParser = HERMES

    @property
    def marks(self) -> Collection[str]:
        """The special tokens that readers must see in the text."""
        return self.tools.marks

    def make_reader(self, call: ModelCall, prompt: TurnPrompt) -> TextReader:
        """Make a reader for one answer to this call."""
        if call.text is not None or not call.tools:
            return PlainReader()
        return self.tools.make_reader(call.tools)
