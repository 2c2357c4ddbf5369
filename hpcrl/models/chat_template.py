"""A model's chat template for whole conversations, as an OpenAI client sends them: roles, tools, tool calls.

ChatTemplate                a tokenizer and its template
ChatTemplate.render         the text of a conversation, up to where the model starts to generate
ChatTemplate.render_longer  the text of a conversation that grew, by what changed at its end
ChatTemplate.render_after   the text that follows an answer of the model, if the template keeps that answer
ChatTemplate.encode         the ids of a text; a mark counts only where the template wrote it, not in a message
ChatTemplate.make_decoder   ids to text chunk by chunk, never half a character
AnsweredPrompt              a prompt with its answer, for render_after
RenderedTurn, RenderedOpening  what render_after and render_longer return
MarkPlace                   the place of a mark in a text
tokenize_text               a plain text to ids
describe_error              the text of an error, or its name
GUARD_CHARACTER             put into marks that messages contain
"""

import re
from array import array
from bisect import bisect
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
from tokenizers.decoders import DecodeStream

from hpcrl.errors import ConfigError, TemplateLimitError
from hpcrl.models.jinja_template import render_template
from hpcrl.models.message_form import (
    STUB_TEXT,
    STUB_THOUGHT,
    ConversationExcerpt,
    Message,
    MessageForm,
    describe_message,
    extend_excerpt,
    has_open_thought,
    has_thought,
    make_excerpt,
)

GUARD_CHARACTER = "\ufdd0"
"""The character put into a mark in a message, so that it does not count; Unicode reserves it as a noncharacter."""
MAX_REMEMBERED_CHARS, MAX_REMEMBERED_TEXTS = 16, 1024
"""The longest text whose ids are remembered, and the number of such texts."""


def describe_error(error: Exception) -> str:
    """Return what a program reports of an error; some, such as MemoryError, have no text but their name."""
    return str(error) or type(error).__name__


def tokenize_text(tokenizer: Any, text: str) -> list[int]:
    """Tokenize a text in half the time of the tokenizer's `encode`, which also computes offsets."""
    (encoded,) = tokenizer.encode_batch_fast([text], add_special_tokens=False)
    return list(encoded.ids)


@dataclass(frozen=True, kw_only=True)
class AnsweredPrompt:
    """A prompt with the model's answer, after which a conversation continues."""

    read_prompt: Callable[[], tuple[str, Sequence[Message]]]
    """Return the text up to the answer, and the messages that it is of."""
    num_messages: int
    excerpt: ConversationExcerpt | None = None
    """The excerpt of these messages, if one was made."""
    message: Message
    """The answer."""
    text: str
    """The text that was generated, special tokens included."""


class RenderedTurn(NamedTuple):
    """The parts after a prompt: an answer of the model, and new messages."""

    stub: dict[str, Any]
    """The placeholder of the answer, as rendered."""
    excerpt: ConversationExcerpt
    """The excerpt of the whole conversation."""
    text: str
    """The text after the prompt, with the placeholder."""
    end: int
    """The position in `text` where the placeholder ends, before anything that closes the turn."""


class RenderedOpening(NamedTuple):
    """The text of a longer conversation after a part of the text of a shorter one."""

    excerpt: ConversationExcerpt
    num_dropped: int
    """The characters at the end of the shorter one's text that it does not have."""
    text: str
    """The text in their place."""


class MarkPlace(NamedTuple):
    """The place of a mark in a text."""

    start: int
    end: int
    num_ids: int
    """The number of ids before it."""


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
    source: Path
    text: str = ""
    """The template itself, and after it the one of conversations with tools."""
    close_id: int | None = None
    """The token that ends the model's turn in the history; None if it is not a special token."""
    close_ids: frozenset[int] = frozenset()
    """The generated tokens after which a turn is closed already: gpt-oss generates another than its history has."""
    stop_token_ids: tuple[int, ...] = ()
    form: MessageForm = field(default_factory=MessageForm)
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Variables of the template that the recipe sets."""
    system: str | None = None
    """The system message of conversations that have none."""
    with_tools: "ChatTemplate | None" = None
    """The template of conversations with tools, if the model has another for them."""
    known_excerpts: dict[Hashable, bool] = field(default_factory=dict)
    """True if a short conversation of this structure had the text of the whole one; not tried: no entry."""
    remembered_ids: dict[str, list[int]] = field(default_factory=dict)
    """The ids of the short texts that the template writes between marks: every conversation has them."""

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Any] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        opens_answer: bool = True,
    ) -> str:
        """Render a conversation as the model receives it; ConfigError if the template refuses it.

        `template_kwargs` are variables of the template for this conversation; they override those of the recipe. Tools
        that the template does not describe are described in the system message. Without `opens_answer` the text ends
        with the last message.
        """
        if tools and self.with_tools:
            return self.with_tools.render(
                messages, tools=tools, template_kwargs=template_kwargs, opens_answer=opens_answer
            )
        if self.system is not None and not any(m.get("role") in ("system", "developer") for m in messages):
            messages = [{"role": "system", "content": self.system}, *messages]
        if tools and not self.form.has_tools:
            messages, tools = self.form.add_tools(messages, self._guard_all(list(tools))), None
        elif tools:
            tools = self.form.adapt_tools(tools)
        return self.render_adapted(
            self.form.adapt(messages), tools=tools, template_kwargs=template_kwargs, opens_answer=opens_answer
        )

    def choose_form(self, tools: Sequence[Any] | None) -> MessageForm:
        """Return the form of messages in conversations with these tools."""
        return self.with_tools.form if tools and self.with_tools else self.form

    def render_adapted(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Any] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        opens_answer: bool = True,
    ) -> str:
        """Render messages that have the template's form already."""
        variables = {**self.mark_names, **self.kwargs, **(template_kwargs or {})}
        variables |= {"messages": self._guard_all(list(messages)), "tools": self._guard_all(tools) or None}
        try:
            return render_template(self.compiled, {**variables, "add_generation_prompt": opens_answer})
        except TemplateLimitError as error:
            why = f"{self.source}: its chat template {error}: set model.chat_template to another"
            raise TemplateLimitError(why) from error
        except Exception as error:  # a template is a program, and may raise anything
            raise ConfigError(
                f"{self.source}: its chat template refuses this conversation: {describe_error(error)}"
            ) from error

    def render_after(
        self,
        answered: AnsweredPrompt,
        new: Sequence[Message],
        *,
        tools: Sequence[Any] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        has_same_variables: bool = True,
        is_checked: bool = True,
    ) -> RenderedTurn | None:
        """Render a prompt, its answer, and new messages; None unless the template keeps all of it as it was.

        Without `is_checked`, only a short conversation of the same structure is rendered, if its text after an answer
        was once found to be that of the whole conversation. Everything is rendered unless `has_same_variables`, which
        means that the prompt was rendered with these tools and variables.

        What the template writes around the answer is what counts: the answer is rendered as a placeholder, so that the
        result never depends on a newline that the model chose.
        """
        variables: dict[str, Any] = {"tools": tools, "template_kwargs": template_kwargs}
        if tools and self.with_tools:
            return self.with_tools.render_after(
                answered, new, **variables, has_same_variables=has_same_variables, is_checked=is_checked
            )
        is_joined = self.form.alternates and new and new[0].get("role") == "assistant"
        if is_joined or has_open_thought(answered.text):
            return None
        answer = answered.message
        forms = [*([answer] if self.form.keeps_calls(answer) else []), {**answer, "tool_calls": None}]
        excerpt = answered.excerpt or make_excerpt(answered.read_prompt()[1])
        if not has_same_variables:
            excerpt = replace(excerpt, rendered=None)
        is_short = has_same_variables and len(excerpt.messages) < answered.num_messages
        for form in forms:
            stub = self.form.stub(form, has_thought=has_thought(answered.text))
            turn = self._render_turn(
                answered, stub, new, variables, excerpt=excerpt, is_short=is_short, is_checked=is_checked
            )
            if turn is not None:
                return turn
        return None

    def _render_turn(
        self,
        answered: AnsweredPrompt,
        stub: dict[str, Any],
        new: Sequence[Message],
        variables: Mapping[str, Any],
        *,
        excerpt: ConversationExcerpt,
        is_short: bool,
        is_checked: bool,
    ) -> RenderedTurn | None:
        """Render with this placeholder of the answer, in short if `is_short` and that is known to give the same."""
        structure = tuple(map(describe_message, [stub, *new]))
        following = extend_excerpt(excerpt, [stub, *new], structure)
        known = (
            "answer",
            *excerpt.structure,
            *structure,
            bool(variables["tools"]),
            *sorted(variables["template_kwargs"] or {}),
        )
        is_tried = is_short and self.known_excerpts.get(known, True)
        in_short = None
        if is_tried and (before := self._render_excerpt(excerpt, **variables)) is not None:
            in_short = self._render_stub(before, excerpt.messages, stub, new, answer_text=answered.text, **variables)
        if is_tried and known in self.known_excerpts:
            if in_short is None:
                return None  # the caller renders the whole conversation
            if not is_checked:
                return RenderedTurn(stub, following, *in_short)
        before, messages = answered.read_prompt()
        whole = self._render_stub(before, messages, stub, new, answer_text=answered.text, **variables)
        if is_tried:
            self._remember_excerpt(known, is_right=whole == in_short)
        return None if whole is None else RenderedTurn(stub, following, *whole)

    def render_longer(
        self,
        excerpt: ConversationExcerpt,
        new: Sequence[Message],
        *,
        read_end: Callable[[int], str],
        read_texts: Callable[[], tuple[str, str]],
        tools: Sequence[Any] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        is_checked: bool = True,
    ) -> RenderedOpening | None:
        """Render a conversation that grew by `new` messages, by what they change in a short one.

        `excerpt` has the structure of the conversation without them, rendered with the same variables; `read_end`
        returns the end of its text. None where that is known not to give the text of the whole conversation, or cannot.
        Whether it does is found out by `read_texts`, the whole texts without and with `new`, when a structure is first
        seen and, with `is_checked`, again.
        """
        variables: dict[str, Any] = {"tools": tools, "template_kwargs": template_kwargs}
        structure = tuple(map(describe_message, new))
        known = ("opening", *excerpt.structure, *structure, bool(tools), *sorted(template_kwargs or {}))
        before = self._render_excerpt(excerpt, **variables) if self.known_excerpts.get(known, True) else None
        if before is None:
            return None
        try:
            after = self.render([*excerpt.messages, *new], **variables)
        except ConfigError:
            return None
        num_common = bisect(range(1, len(before) + 1), 0, key=lambda num: not after.startswith(before[:num]))
        num_dropped = len(before) - num_common
        if not num_common or read_end(num_dropped + 1) != before[num_common - 1 :]:
            return None
        longer = RenderedOpening(extend_excerpt(excerpt, new, structure), num_dropped, after[num_common:])
        if is_checked or known not in self.known_excerpts:
            shorter, whole = read_texts()
            self._remember_excerpt(known, is_right=shorter[: len(shorter) - num_dropped] + longer.text == whole)
            return longer if self.known_excerpts.get(known) else None
        return longer

    def _render_excerpt(self, excerpt: ConversationExcerpt, **variables: Any) -> str | None:
        """Return the text of a short conversation, which is rendered once; None if the template refuses it."""
        if excerpt.rendered is None:
            try:
                excerpt.rendered = self.render(excerpt.messages, **variables)
            except ConfigError:
                return None
        return excerpt.rendered

    def _remember_excerpt(self, known: Hashable, *, is_right: bool) -> None:
        if len(self.known_excerpts) < MAX_REMEMBERED_TEXTS:
            self.known_excerpts[known] = is_right

    def _render_stub(
        self,
        before: str,
        messages: Sequence[Message],
        stub: Message,
        new: Sequence[Message],
        *,
        answer_text: str,
        **variables: Any,
    ) -> tuple[str, int] | None:
        """Return the text after `before`, with a placeholder, and where that ends; None if `before` is not kept."""
        try:
            rendered = self.render([*messages, stub, *new], **variables)
        except ConfigError:  # it may accept the client's own form of the answer
            return None
        end = self._find_answer_end(
            rendered, before, stub, answer_text=answer_text, has_thought=has_thought(answer_text)
        )
        return None if end is None else (rendered[len(before) :], end - len(before))

    def _find_answer_end(
        self, rendered: str, before: str, stub: Message, *, answer_text: str, has_thought: bool
    ) -> int | None:
        """Return where the placeholder ends; None if the text before it changed or its thought was left out."""
        if not rendered.startswith(before):
            return None
        start = len(before)
        if stub.get("tool_calls"):
            ends = [place for mark in self._stop_marks if (place := rendered.find(mark, start)) >= 0]
            end = min(ends, default=-1)
        else:
            end = rendered.find(STUB_TEXT, start)
        if end < 0 or (has_thought and rendered.find(STUB_THOUGHT, start, end) < 0):
            return None
        if stub.get("tool_calls"):
            return end
        opening = rendered[start:end].partition(STUB_THOUGHT)[0].strip()
        return end + len(STUB_TEXT) if answer_text.lstrip().startswith(opening) else None

    @cached_property
    def _stop_marks(self) -> tuple[str, ...]:
        return tuple(text for text, number in self.mark_ids.items() if number in self.stop_token_ids)

    @cached_property
    def special_ids(self) -> frozenset[int]:
        return frozenset(self.mark_ids.values())

    def guard(self, text: str) -> str:
        """Return the text as `render` puts it into a conversation."""
        return self.mark_pattern.sub(_insert_guard, text)

    def encode(self, rendered: str) -> list[int]:
        """Return the ids of a rendered conversation, or of a part of it."""
        return self.encode_marks(rendered)[0].tolist()

    def encode_marks(self, rendered: str) -> "tuple[array[int], list[MarkPlace]]":
        """Return the ids of a rendered conversation, or of a part of it, and the places of its marks."""
        ids, places, start = array("i"), list[MarkPlace](), 0
        for piece in self.mark_pattern.split(rendered):
            mark = self.mark_ids.get(piece)
            if mark is None:
                ids.extend(self._encode_piece(piece))
            else:
                places.append(MarkPlace(start, start + len(piece), len(ids)))
                ids.append(mark)
            start += len(piece)
        return ids, places

    def _encode_piece(self, piece: str) -> list[int]:
        if len(piece) > MAX_REMEMBERED_CHARS:
            return self.encode_text(piece.replace(GUARD_CHARACTER, ""))
        known = self.remembered_ids.get(piece)
        if known is None:
            known = self.encode_text(piece.replace(GUARD_CHARACTER, ""))
            if len(self.remembered_ids) < MAX_REMEMBERED_TEXTS:
                self.remembered_ids[piece] = known
        return known

    def keeps_stop(self, generated: Sequence[int]) -> bool:
        """Return whether the history has the token at which the model stopped: that of gpt-oss has another."""
        return not generated or generated[-1] not in self.close_ids or generated[-1] == self.close_id

    def drop_closing(self, after: Sequence[int], generated: Sequence[int]) -> list[int]:
        """Return the ids that follow an answer without those that close it, if its last generated token did."""
        ends = {*self.stop_token_ids, self.close_id}
        place = next((place for place, token in enumerate(after) if token in ends), None)
        if place is None or not generated or generated[-1] not in self.stop_token_ids:
            return list(after)
        is_closed = after[place] == generated[-1] or (after[place] == self.close_id and generated[-1] in self.close_ids)
        return list(after[place + 1 :] if is_closed else after)

    def encode_text(self, text: str) -> list[int]:
        """Return the ids of a plain text, in which nothing is a mark."""
        return tokenize_text(self.tokenizer, text) if text else []

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of generated ids, without marks."""
        return str(self.tokenizer.decode(list(token_ids), skip_special_tokens=True))

    def decode_all(self, token_ids: Sequence[int]) -> str:
        """Return the text of generated ids, with marks."""
        return str(self.tokenizer.decode(list(token_ids), skip_special_tokens=False))

    def decode_token(self, token_id: int) -> str:
        """Return the text of one token, also of a mark."""
        return self.decode_all([token_id])

    def make_decoder(self) -> Callable[[Sequence[int]], str]:
        """Make a function from the next ids to the text that is certain by then."""
        stream = DecodeStream(skip_special_tokens=True)
        return lambda token_ids: "".join(stream.step(self.tokenizer, token) or "" for token in token_ids)

    @property
    def vocabulary_size(self) -> int:
        return int(self.tokenizer.get_vocab_size())

    def _guard_all(self, value: Any) -> Any:
        """Guard all texts in a value; every message of a prompt comes through here, so that the cases are plain."""
        if isinstance(value, str):
            return self.mark_pattern.sub(_insert_guard, value)
        if isinstance(value, dict):
            return {name: self._guard_all(item) for name, item in value.items()}
        if isinstance(value, list):
            return [self._guard_all(item) for item in value]
        return value


def _insert_guard(found: re.Match[str]) -> str:
    return found[0][0] + GUARD_CHARACTER + found[0][1:]
