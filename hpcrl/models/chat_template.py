"""A model's chat template for whole conversations, as an OpenAI client sends them: roles, tools, tool calls.

ChatTemplate               a tokenizer and its template
ChatTemplate.render        the text of a conversation, up to where the model starts to generate
ChatTemplate.encode        its ids; a mark counts only where the template wrote it, not in a message
ChatTemplate.make_decoder  ids to text chunk by chunk, never half a character
tokenize_text              a plain text to ids
GUARD_CHARACTER            put into marks that messages contain
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jinja2
from tokenizers.decoders import DecodeStream

from hpcrl.errors import ConfigError

GUARD_CHARACTER = "\ufdd0"
"""The character put into a mark in a message, so that it does not count; Unicode reserves it as a noncharacter."""
MAX_REMEMBERED_CHARS, MAX_REMEMBERED_TEXTS = 16, 1024
"""The longest text whose ids are remembered, and the number of such texts."""


def tokenize_text(tokenizer: Any, text: str) -> list[int]:
    """Tokenize a text in half the time of the tokenizer's `encode`, which also computes offsets."""
    (encoded,) = tokenizer.encode_batch_fast([text], add_special_tokens=False)
    return list(encoded.ids)


@dataclass(frozen=True, kw_only=True)
class ChatTemplate:
    """A tokenizer and its template; `tokenizer` treats marks in a text as text."""

    tokenizer: Any
    compiled: jinja2.Template
    mark_ids: Mapping[str, int]
    """The special tokens, by their text."""
    mark_pattern: re.Pattern[str]
    """The pattern of a mark, which is its only group."""
    mark_names: Mapping[str, str]
    """The template's names of some marks, such as `eos_token`."""
    close_id: int
    """The token that ends the model's turn."""
    stop_token_ids: tuple[int, ...]
    source: Path
    remembered_ids: dict[str, list[int]] = field(default_factory=dict)
    """The ids of the short texts that the template writes between marks: every conversation has them."""

    def render(self, messages: Sequence[Mapping[str, Any]], *, tools: Sequence[Any] | None = None) -> str:
        """Render a conversation as the model receives it; ConfigError if the template refuses it."""
        guarded, guarded_tools = self._guard_all(list(messages)), self._guard_all(tools)
        try:
            return self.compiled.render(
                messages=guarded, tools=guarded_tools, add_generation_prompt=True, **self.mark_names
            )
        except (jinja2.TemplateError, TypeError, KeyError, AttributeError, ValueError) as error:
            raise ConfigError(f"{self.source}: its chat template refuses this conversation: {error}") from error

    def guard(self, text: str) -> str:
        """Return the text as `render` puts it into a conversation."""
        return self.mark_pattern.sub(lambda found: found[0][0] + GUARD_CHARACTER + found[0][1:], text)

    def encode(self, rendered: str) -> list[int]:
        """Return the ids of a rendered conversation, or of a part of it."""
        ids: list[int] = []
        for piece in self.mark_pattern.split(rendered):
            mark = self.mark_ids.get(piece)
            ids += self._encode_piece(piece) if mark is None else [mark]
        return ids

    def _encode_piece(self, piece: str) -> list[int]:
        if len(piece) > MAX_REMEMBERED_CHARS:
            return self.encode_text(piece.replace(GUARD_CHARACTER, ""))
        known = self.remembered_ids.get(piece)
        if known is None:
            known = self.encode_text(piece.replace(GUARD_CHARACTER, ""))
            if len(self.remembered_ids) < MAX_REMEMBERED_TEXTS:
                self.remembered_ids[piece] = known
        return known

    def encode_text(self, text: str) -> list[int]:
        """Return the ids of a plain text, in which nothing is a mark."""
        return tokenize_text(self.tokenizer, text) if text else []

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of generated ids, without marks."""
        return str(self.tokenizer.decode(list(token_ids), skip_special_tokens=True))

    def decode_token(self, token_id: int) -> str:
        """Return the text of one token, also of a mark."""
        return str(self.tokenizer.decode([token_id], skip_special_tokens=False))

    def make_decoder(self) -> Callable[[Sequence[int]], str]:
        """Make a function from the next ids to the text that is certain by then."""
        stream = DecodeStream(skip_special_tokens=True)
        return lambda token_ids: "".join(stream.step(self.tokenizer, token) or "" for token in token_ids)

    @property
    def vocabulary_size(self) -> int:
        return int(self.tokenizer.get_vocab_size())

    def _guard_all(self, value: Any) -> Any:
        match value:
            case str():
                return self.guard(value)
            case list():
                return [self._guard_all(item) for item in value]
            case dict():
                return {name: self._guard_all(item) for name, item in value.items()}
            case _:
                return value
