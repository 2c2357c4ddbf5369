"""Find the tool calls in generated text, whole or while it grows; how they are written depends on the model's family.

    ToolParser       the protocol of a family: makes a reader for each answer
    TextReader       reads one answer: text in, pieces out that are certain; chunks of any size give the same pieces
    ToolCall         a call that is complete and well-formed
    AnswerPiece      what a reader yields: content, a thought or a call
    ContentText, ReasoningText  the two kinds of text
    parse_answer     reads a whole text
    BlockParser      the families that write each call between two marks
    PlainReader      all text is content
    ContentSpacer    content without the space around calls
    make_call, make_json_call  a call of decoded values, or of JSON, if it is one
    decode_json      decodes JSON that a model wrote

A malformed call is content, exactly as it was generated; other calls of the same answer are still calls. Reading is
linear in the text, and never raises.
"""

import json
import re
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True)
class ToolCall:
    """A tool call: a function's name with arguments."""

    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True)
class ContentText:
    """A part of the answer's content."""

    text: str


@dataclass(frozen=True)
class ReasoningText:
    """A part of the model's thoughts."""

    text: str


AnswerPiece = ContentText | ReasoningText | ToolCall
ToolSchemas = Sequence[dict[str, Any]]
"""The tools of a request, as an OpenAI client sends them."""


class TextReader(Protocol):
    """A protocol for reading one answer."""

    def feed(self, text: str) -> list[AnswerPiece]:
        """Take the next part of the answer; return what is certain by now."""

    def finish(self) -> list[AnswerPiece]:
        """Return the rest, once the answer has ended."""


class ToolParser(Protocol):
    """A protocol for the tool calls of a family of models."""

    @property
    def marks(self) -> Collection[str]:
        """The special tokens that a reader must see in the text; all others are left out before."""

    def make_reader(self, tools: ToolSchemas) -> TextReader:
        """Make a reader for one answer to a request with these tools."""


def parse_answer(reader: TextReader, text: str) -> tuple[str, str, list[ToolCall]]:
    """Return the content, the reasoning and the calls of a whole answer."""
    pieces = [*reader.feed(text), *reader.finish()]
    content = "".join(piece.text for piece in pieces if isinstance(piece, ContentText))
    reasoning = "".join(piece.text for piece in pieces if isinstance(piece, ReasoningText))
    return content, reasoning, [piece for piece in pieces if isinstance(piece, ToolCall)]


ParseBlock = Callable[[str, ToolSchemas], list[ToolCall] | None]
"""Return the calls of a block, its marks included, or None if it is malformed."""


@dataclass(frozen=True, kw_only=True)
class BlockParser:
    """The form of a family that writes its calls in blocks: from an opening mark to a closing one, in any text.

    A block also ends where the text ends, and before an opening that is not listed after its own.
    """

    openings: tuple[str, ...]
    closings: tuple[str, ...] = ()
    frames: tuple[str, ...] = ()
    """Marks around all calls, which belong to no text."""
    parse_block: ParseBlock
    marks: Collection[str] = ()

    def make_reader(self, tools: ToolSchemas) -> TextReader:
        return _BlockReader(self, tools)


class _BlockReader:
    """The reader of a BlockParser. Between two chunks it keeps the open block, and of content less than a mark."""

    def __init__(self, parser: BlockParser, tools: ToolSchemas) -> None:
        self._parser, self._tools = parser, tools
        outside = [*parser.openings, *parser.frames]
        self._opening = _match_any(outside)
        self._endings = {
            mark: _match_any([*parser.openings[: number + 1], *parser.frames, *parser.closings])
            for number, mark in enumerate(parser.openings)
        }
        self._ending = self._opening
        self._prefixes = {mark[:size] for mark in outside for size in range(1, len(mark))}
        self._overlap = max(map(len, [*outside, *parser.closings])) - 1
        self._tail = ""
        """The end of the text so far, which may be the start of a mark."""
        self._block: list[str] | None = None
        """The open block, without the tail."""
        self._content = ContentSpacer()

    def feed(self, text: str) -> list[AnswerPiece]:
        pieces: list[AnswerPiece] = []
        text, start, position = self._tail + text, 0, 0
        while True:
            if self._block is None:
                found = self._opening.search(text, position)
                if found is None:
                    end = len(text) - self._count_held(text, start)
                    pieces += self._content.add(text[start:end])
                    self._tail = text[end:]
                    return pieces
                pieces += self._content.add(text[start : found.start()])
                if found[0] in self._parser.frames:
                    start = position = found.end()
                else:
                    self._ending = self._endings[found[0]]
                    self._block, start, position = [], found.start(), found.end()
            else:
                found = self._ending.search(text, position)
                if found is None:
                    end = max(position, len(text) - self._overlap)
                    self._block.append(text[start:end])
                    self._tail = text[end:]
                    return pieces
                end = found.end() if found[0] in self._parser.closings else found.start()
                pieces += self._close_block(text[start:end])
                start = position = end

    def finish(self) -> list[AnswerPiece]:
        pieces = self._content.add(self._tail) if self._block is None else self._close_block(self._tail)
        self._tail = ""
        return [*pieces, *self._content.finish()]

    def _close_block(self, rest: str) -> list[AnswerPiece]:
        block, self._block = "".join([*(self._block or ()), rest]), None
        calls = self._parser.parse_block(block, self._tools)
        if calls is None:
            return self._content.add(block)
        self._content.skip_space()
        return list(calls)

    def _count_held(self, text: str, start: int) -> int:
        """Count the characters at the end that may be the start of an opening mark."""
        sizes = range(min(self._overlap, len(text) - start), 0, -1)
        return next((size for size in sizes if text[len(text) - size :] in self._prefixes), 0)


class ContentSpacer:
    """The content of an answer, without the space around its calls."""

    def __init__(self) -> None:
        self._space: list[str] = []
        self._has_calls = False
        self.follows_call = False
        """True after a call, until there is more content."""

    def add(self, text: str) -> list[AnswerPiece]:
        stripped = text.rstrip()
        if not stripped:
            self._space += [text] if text else []
            return []
        shown = "".join([*self._space, stripped])
        self._space, self.follows_call = [text[len(stripped) :]], False
        return [ContentText(shown)]

    def skip_space(self) -> None:
        """Leave out the space before a call."""
        self._space, self._has_calls, self.follows_call = [], True, True

    def finish(self) -> list[AnswerPiece]:
        space = "".join(self._space)
        return [ContentText(space)] if space and not self._has_calls else []


class PlainReader:
    """The reader of answers in which all text is content."""

    def feed(self, text: str) -> list[AnswerPiece]:
        return [ContentText(text)] if text else []

    def finish(self) -> list[AnswerPiece]:
        return []


def _match_any(marks: Iterable[str]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, sorted(marks, key=len, reverse=True))))


def decode_json(text: str) -> Any:
    """Return a decoded value, or None if it is not valid JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def make_call(name: Any, arguments: Any) -> ToolCall | None:
    """Return the call with this name and these arguments, or None if a client could not be sent it."""
    if not isinstance(name, str) or not name.strip() or not isinstance(arguments, dict):
        return None
    try:
        json.dumps([name, arguments], ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError):  # not a number, half a surrogate pair, an integer too long to print
        return None
    return ToolCall(name.strip(), arguments)


def make_json_call(value: Any) -> ToolCall | None:
    """Return the call that a decoded object is, or None; its arguments may be called parameters, as in a schema."""
    if not isinstance(value, dict):
        return None
    arguments = value.get("arguments", value.get("parameters"))
    return make_call(value.get("name"), {} if arguments is None else arguments)
