"""Separate the model's thoughts from the rest of a generated text, whole or while it grows: REASONING_PARSERS, by name.

"think"      <think>...</think>, also if the prompt opened it   Qwen3, QwQ, DeepSeek-R1, GLM-4.5, Phi-4-reasoning
"magistral"  [THINK]...[/THINK]                                 Magistral
"gemma"      <|channel>thought ...<channel|>                    Gemma-4
"gpt-oss"    messages of the channel analysis                   gpt-oss
"none"       no thoughts: all text is content

ReasoningParser  the protocol of a family: makes a reader for each answer
ThinkParser      the families that write their thoughts between two marks, before anything else
HarmonyParser    the thoughts of gpt-oss
PlainParser      no thoughts
HARMONY_ENDS, HARMONY_MARKS  the special tokens of gpt-oss that end a message, and all of them
count_held       counts the characters at the end of a text that may start a mark

Readers are those of hpcrl.rollout.agents.tool_parsers; what they return as content may still contain tool calls.
Thoughts that were cut off at the length limit are thoughts.
"""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Protocol

from hpcrl.rollout.agents.tool_parsers import AnswerPiece, ContentText, PlainReader, ReasoningText, TextReader

MAX_HEADER_CHARS = 256
"""The longest header of a message of gpt-oss, a longer one is content; and the end of a prompt that is looked at."""


class ReasoningParser(Protocol):
    """A protocol for the thoughts of a family of models."""

    @property
    def marks(self) -> Collection[str]:
        """The special tokens that a reader must see in the text."""

    def make_reader(self, prompt: str) -> TextReader:
        """Make a reader for one answer to a rendered prompt, whose end may have opened the thoughts."""


@dataclass(frozen=True, kw_only=True)
class ThinkParser:
    """The form of a family whose answer starts with its thoughts, between two marks."""

    opening: str
    closing: str
    marks: Collection[str] = ()

    def make_reader(self, prompt: str) -> TextReader:
        return _ThinkReader(self, is_open=self.opens_thoughts(prompt))

    def opens_thoughts(self, prompt: str) -> bool:
        """Return whether the end of a prompt has opened the thoughts."""
        return prompt[-MAX_HEADER_CHARS:].rstrip().endswith(self.opening)


class _ThinkReader:
    """The reader of a ThinkParser: first the opening mark, then thoughts, then content."""

    def __init__(self, parser: ThinkParser, *, is_open: bool) -> None:
        self._opening, self._closing = parser.opening, parser.closing
        self._read = self._read_thoughts if is_open else self._read_start
        self._tail = ""
        """The end of the text so far, which may be the start of a mark."""
        self._space: list[str] = []
        """The space at the start of the answer, or at the end of the thoughts so far."""
        self._has_thoughts = self._has_content = False

    def feed(self, text: str) -> list[AnswerPiece]:
        text, self._tail = self._tail + text, ""
        return self._read(text)

    def _read_start(self, text: str) -> list[AnswerPiece]:
        stripped = text.lstrip()
        self._space.append(text[: len(text) - len(stripped)])
        if stripped.startswith(self._opening):
            self._space, self._read = [], self._read_thoughts
            return self._read(stripped[len(self._opening) :])
        if self._opening.startswith(stripped):
            self._tail = stripped
            return []
        text, self._space = "".join([*self._space, stripped]), []
        self._has_content, self._read = True, self._read_content
        return self._read(text)

    def _read_thoughts(self, text: str) -> list[AnswerPiece]:
        end = text.find(self._closing)
        if end >= 0:
            self._read = self._read_content
            return [*self._add_thoughts(text[:end]), *self._read(text[end + len(self._closing) :])]
        held = count_held(text, self._closing)
        self._tail = text[len(text) - held :]
        return self._add_thoughts(text[: len(text) - held])

    def _add_thoughts(self, text: str) -> list[AnswerPiece]:
        """Return thoughts without the space around them."""
        text = text if self._has_thoughts else text.lstrip()
        stripped = text.rstrip()
        if not stripped:
            self._space.append(text)
            return []
        shown = "".join([*self._space, stripped])
        self._space, self._has_thoughts = [text[len(stripped) :]], True
        return [ReasoningText(shown)]

    def _read_content(self, text: str) -> list[AnswerPiece]:
        text = text if self._has_content else text.lstrip()
        self._has_content = self._has_content or bool(text)
        return [ContentText(text)] if text else []

    def finish(self) -> list[AnswerPiece]:
        if self._read == self._read_thoughts:
            return self._add_thoughts(self._tail)
        rest = "".join([*self._space, self._tail]) if self._read == self._read_start else self._tail
        return [ContentText(rest)] if rest else []


def count_held(text: str, mark: str) -> int:
    """Count the characters at the end of a text that may be the start of a mark."""
    sizes = range(min(len(mark) - 1, len(text)), 0, -1)
    return next((size for size in sizes if mark.startswith(text[len(text) - size :])), 0)


HARMONY_ENDS = ("<|end|>", "<|call|>", "<|return|>")
HARMONY_MARKS = ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", *HARMONY_ENDS)


@dataclass(frozen=True)
class HarmonyParser:
    """The form of gpt-oss: messages, each with a header that names its channel and perhaps its recipient.

    Messages with a recipient are left as they are for the tool parser; of the others only the text is kept.
    """

    marks: Collection[str] = HARMONY_MARKS

    def make_reader(self, _: str) -> TextReader:
        return _HarmonyReader()


class _HarmonyReader:
    """The reader of HarmonyParser."""

    _MARK = re.compile("|".join(map(re.escape, HARMONY_MARKS)))

    def __init__(self) -> None:
        self._tail = ""
        self._header: list[str] | None = []
        """The header so far, None in a message's text."""
        self._is_marked = False
        """True if the header is certainly one."""
        self._kind: type[ContentText | ReasoningText] | None = ContentText
        """The kind of the message's text, None if it goes to a recipient."""
        self._seen: set[type[ContentText | ReasoningText]] = set()
        self._starts_message = False

    def feed(self, text: str) -> list[AnswerPiece]:
        text, position = self._tail + text, 0
        pieces: list[AnswerPiece] = []
        for found in self._MARK.finditer(text):
            pieces += self._add_text(text[position : found.start()])
            pieces += self._add_mark(found[0])
            position = found.end()
        rest = text[position:]
        held = max(count_held(rest, mark) for mark in HARMONY_MARKS)
        self._tail = rest[len(rest) - held :]
        return [*pieces, *self._add_text(rest[: len(rest) - held])]

    def finish(self) -> list[AnswerPiece]:
        pieces, self._tail = self._add_text(self._tail), ""
        return [*pieces, *self._drop_header()]

    def _add_text(self, text: str) -> list[AnswerPiece]:
        if not text:
            return []
        if self._header is None:
            return self._show(text)
        self._header.append(text)
        if sum(map(len, self._header)) <= MAX_HEADER_CHARS:
            return []
        shown, self._header, self._kind = "".join(self._header), None, ContentText
        return self._show(shown)

    def _show(self, text: str) -> list[AnswerPiece]:
        if self._kind is None:
            return [ContentText(text)]
        if self._starts_message and self._kind in self._seen:
            text = "\n" + text
        self._starts_message = False
        self._seen.add(self._kind)
        return [self._kind(text)]

    def _add_mark(self, mark: str) -> list[AnswerPiece]:
        if self._header is None:
            return self._end_message(mark) if mark not in ("<|message|>", "<|constrain|>") else self._show(mark)
        if mark == "<|message|>":
            return self._start_message("".join(self._header))
        if mark in ("<|channel|>", "<|constrain|>"):
            self._header.append(mark)
            self._is_marked = True
            return []
        pieces = self._drop_header()
        self._header, self._is_marked = [], mark == "<|start|>"
        return pieces

    def _start_message(self, header: str) -> list[AnswerPiece]:
        self._header, self._starts_message = None, True
        if " to=" in header:
            self._kind = None
            return self._show(f"<|start|>{header}<|message|>")
        self._kind = ReasoningText if "<|channel|>analysis" in header else ContentText
        return []

    def _end_message(self, mark: str) -> list[AnswerPiece]:
        pieces = self._show(mark) if self._kind is None and mark in HARMONY_ENDS else []
        self._header, self._is_marked = ["<|channel|>"] if mark == "<|channel|>" else [], mark not in HARMONY_ENDS
        return pieces

    def _drop_header(self) -> list[AnswerPiece]:
        """Drop a header without a message; text that nothing marked as a header is content."""
        header, self._header = "".join(self._header or ()), None
        self._kind = ContentText
        return self._show(header) if header and not self._is_marked else []


@dataclass(frozen=True)
class PlainParser:
    """The parser of models without thoughts."""

    marks: Collection[str] = ()

    def make_reader(self, _: str) -> TextReader:
        return PlainReader()


REASONING_PARSERS: Mapping[str, ReasoningParser] = {
    "think": ThinkParser(opening="<think>", closing="</think>", marks=("<think>", "</think>")),
    "magistral": ThinkParser(opening="[THINK]", closing="[/THINK]", marks=("[THINK]", "[/THINK]")),
    "gemma": ThinkParser(opening="<|channel>thought", closing="<channel|>", marks=("<|channel>", "<channel|>")),
    "gpt-oss": HarmonyParser(),
    "none": PlainParser(),
}
