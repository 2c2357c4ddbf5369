"""Recording of an agent program's calls, exact to the token: a tree of turns in which each leaf is a conversation.

    ConversationRecording               makes prompts, records answers
    TurnPrompt, RecordedTurn            the prompt of a turn, and the turn once answered
    ChatMessage                         a message as clients send it

A request continues a turn if its messages start with that turn's messages and its answer, unchanged, and the chat
template still renders that answer as generated. Then all earlier token ids are reused and only the new messages are
tokenised. Whatever a client changed, dropped or summarised starts a branch at the last turn that it kept; so do
several answers to one request, and templates that leave old thoughts out of the history. A prompt that continues no
turn shares the beginning that it has in common with an earlier one: neither is that tokenised again, nor stored. The
record that is made of the tree is built in `hpcrl.rollout.agents.episode_record`.
"""

import hashlib
import itertools
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import msgspec

from hpcrl.engines.base import Completion
from hpcrl.errors import EngineAnswerError
from hpcrl.models.chat_template import ChatTemplate, MarkPlace
from hpcrl.rollout.agents.shared_sequence import SharedSequence, count_common

ChatMessage = dict[str, Any]
_NO_MESSAGES: SharedSequence[tuple[ChatMessage, ...]] = SharedSequence(())


@dataclass(eq=False, frozen=True, kw_only=True)
class TurnPrompt:
    """The prompt of one turn, stored as what it adds to the turn that it continues."""

    parent: "RecordedTurn | None"
    ids: "SharedSequence[array[int]]"
    """The ids of the whole prompt."""
    text: SharedSequence[str]
    """The whole prompt as text, to check whether a later request starts with it; empty if it was given as ids."""
    messages: SharedSequence[tuple[ChatMessage, ...]] = _NO_MESSAGES
    """The messages as rendered: answers of the model that are continued are placeholders."""
    base: "TurnPrompt | None" = None
    """The earlier prompt whose beginning one without a parent shares."""
    marks: Sequence[MarkPlace] = ()
    """The marks in its own text, if it has no parent."""
    excerpt: Sequence[Mapping[str, Any]] = ()
    """A short conversation with the structure of `messages`, if they are long."""
    key: bytes = b""
    """A hash of the client's messages."""
    tools: Sequence[Any] | None = None
    template_kwargs: Mapping[str, Any] | None = None
    """The request's own variables of the template."""

    @property
    def rendered(self) -> str:
        """The whole prompt as text."""
        return "".join(self.text.list_parts())

    @property
    def new_token_ids(self) -> "array[int]":
        """The ids that follow the parent's; all of them if there is none."""
        return _join_ids(self.ids) if self.parent is None else self.ids.own

    def token_ids(self) -> list[int]:
        """Return the ids of the whole prompt."""
        return _join_ids(self.ids).tolist()

    def list_messages(self) -> list[ChatMessage]:
        """Return the messages as rendered."""
        return list(itertools.chain.from_iterable(self.messages.list_parts()))

    def has_variables(self, tools: Sequence[Any] | None, template_kwargs: Mapping[str, Any] | None) -> bool:
        """Return whether it was made with these tools and variables."""
        return (self.tools or None, self.template_kwargs or {}) == (tools or None, template_kwargs or {})

    def path(self) -> "list[RecordedTurn]":
        """Return the earlier turns, from the first one."""
        path, turn = [], self.parent
        while turn is not None:
            path.append(turn)
            turn = turn.prompt.parent
        return path[::-1]


@dataclass(eq=False, frozen=True, kw_only=True)
class RecordedTurn:
    """A turn that was answered and recorded."""

    number: int
    """The position in the order in which turns were answered."""
    prompt: TurnPrompt
    completion: Completion
    text: str
    """The generated text, without special tokens."""
    answer: ChatMessage | None
    """The answer as the client received it; None for one that is not a message."""
    is_trained: bool
    """False if it was not sampled as training assumes."""
    has_form: bool = False
    """True if the request required a form of the answer, so that some tokens had no alternative."""
    started_at: float
    """The time of the request, by the clock of the episode."""
    generate_s: float

    @cached_property
    def depth(self) -> int:
        """The number of turns from the first one to this."""
        return 1 if self.prompt.parent is None else self.prompt.parent.depth + 1

    @cached_property
    def ids(self) -> "SharedSequence[array[int]]":
        """The ids of the prompt and the answer."""
        return self.prompt.ids.extend(array("i", self.completion.token_ids))

    @cached_property
    def whole_text(self) -> SharedSequence[str]:
        """The text of the prompt and the answer."""
        return self.prompt.text.extend(self.text)

    def token_ids(self) -> list[int]:
        """Return the ids of the prompt and the answer."""
        return _join_ids(self.ids).tolist()

    def path(self) -> "list[RecordedTurn]":
        """Return the turns from the first one to this."""
        return [*self.prompt.path(), self]


class _LastRequest(NamedTuple):
    """The messages of the last request and their keys: one pair, as requests may be read in several threads."""

    messages: list[ChatMessage]
    keys: list[bytes]


class ConversationRecording:
    """The turns of one attempt at an episode."""

    def __init__(self, template: ChatTemplate) -> None:
        self.turns: list[RecordedTurn] = []
        self._template = template
        self._answers: dict[bytes, list[RecordedTurn]] = {}
        self._openings: list[TurnPrompt] = []
        """The answered prompts that continue no turn."""
        self._last = _LastRequest([], [])

    # ---- prompts

    def chat_prompt(
        self,
        messages: Sequence[ChatMessage],
        *,
        tools: Sequence[Any] | None,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> TurnPrompt:
        """Make the prompt of a conversation; raise ConfigError if the template cannot render it.

        `template_kwargs` are the request's own variables of the template.
        """
        keys = self._find_keys(messages)
        for count in range(len(messages), 0, -1):
            if turns := self._answers.get(keys[count - 1]):
                new, sent = messages[count:], messages[count - 1]
                turn = max(
                    reversed(turns), key=lambda turn: turn.answer == sent
                )  # last, unless another was sent unchanged
                prompt = self._continue_turn(turn, new, tools=tools, template_kwargs=template_kwargs, key=keys[-1])
                if prompt is not None:
                    return prompt
                break  # what the template changes of this turn it changes of earlier ones too
        rendered = self._template.render(messages, tools=tools, template_kwargs=template_kwargs)
        return self._open_text(
            rendered, messages=tuple(messages), key=keys[-1], tools=tools, template_kwargs=template_kwargs
        )

    def _find_keys(self, messages: Sequence[ChatMessage]) -> list[bytes]:
        """Return the hash of the conversation up to each message; most are known from the request before."""
        last = self._last
        pairs = enumerate(zip(messages, last.messages, strict=False))
        num_known = next(
            (n for n, (now, before) in pairs if now is not before and now != before),
            min(len(messages), len(last.keys)),
        )
        known = last.keys[:num_known]
        keys = [*known, *_chain_keys(messages[num_known:], key=known[-1] if known else b"")]
        self._last = _LastRequest(list(messages), keys)
        return keys

    def _open_text(self, rendered: str, *, messages: tuple[ChatMessage, ...] = (), **more: Any) -> TurnPrompt:
        """Make a prompt that continues no turn; what it has in common with an earlier one is not tokenised again."""
        known: dict[SharedSequence[str], int] = {}
        common, base = self._find_base([(count_common(p.text, rendered, known), p) for p in list(self._openings)])
        start, num_ids = _find_mark(base, common)
        ids, marks = self._template.encode_marks(rendered[start:])
        if base is None or not start:
            texts, all_ids, base = SharedSequence(rendered), SharedSequence(ids), None
        else:
            texts, all_ids = SharedSequence(rendered[start:], base.text, start), SharedSequence(ids, base.ids, num_ids)
        sequence = SharedSequence(messages)
        if base is not None:
            same = count_common(base.messages, messages, {})
            sequence = SharedSequence(messages[same:], base.messages, same)
        return TurnPrompt(
            parent=None,
            ids=all_ids,
            text=texts,
            messages=sequence,
            base=base,
            marks=[MarkPlace(place.start + start, place.end + start, place.num_ids + num_ids) for place in marks],
            **more,
        )

    def _find_base(self, found: list[tuple[int, TurnPrompt]]) -> tuple[int, TurnPrompt | None]:
        """Return the prompt that has the most in common, the last of equals, and how much."""
        common, base = max(reversed(found), key=lambda pair: pair[0], default=(0, None))
        return (common, base) if common else (0, None)

    def text_prompt(self, prompt: str | list[int]) -> TurnPrompt:
        """Make the prompt of a plain completion, given as text or as ids; marks in the text count."""
        if not isinstance(prompt, str):
            return self._prompt_from_ids(array("i", prompt))
        known: dict[SharedSequence[str], int] = {}
        before = [turn for turn in list(self.turns) if not len(turn.prompt.messages) and len(turn.prompt.text)]
        ends = [(len(turn.whole_text), turn) for turn in before]
        kept = [(end, turn) for end, turn in ends if count_common(turn.whole_text, prompt, known) == end]
        if not kept:
            return self._open_text(prompt)
        end, turn = max(reversed(kept), key=lambda pair: pair[0])
        new_token_ids, _ = self._template.encode_marks(prompt[end:])
        if self._template.mark_pattern.match(prompt, end):
            generated = turn.completion.token_ids
            new_token_ids = array("i", self._template.drop_closing(new_token_ids, generated))
        return TurnPrompt(
            parent=turn,
            ids=turn.ids.extend(new_token_ids),
            text=turn.whole_text.extend(prompt[end:]),
        )

    def _prompt_from_ids(self, prompt: "array[int]") -> TurnPrompt:
        known: dict[SharedSequence[array[int]], int] = {}
        kept = [turn for turn in list(self.turns) if count_common(turn.ids, prompt, known) == len(turn.ids)]
        if kept:
            turn = max(reversed(kept), key=lambda turn: len(turn.ids))
            ids = turn.ids.extend(prompt[len(turn.ids) :])
            return TurnPrompt(parent=turn, ids=ids, text=SharedSequence(""))
        common, base = self._find_base([(count_common(p.ids, prompt, known), p) for p in list(self._openings)])
        ids = SharedSequence(prompt[common:], base.ids if base else None, common)
        return TurnPrompt(parent=None, ids=ids, text=SharedSequence(""), base=base)

    def _continue_turn(
        self,
        turn: RecordedTurn,
        new: Sequence[ChatMessage],
        *,
        tools: Sequence[Any] | None,
        template_kwargs: Mapping[str, Any] | None,
        key: bytes,
    ) -> TurnPrompt | None:
        """Return the prompt that continues a turn, or None if the template renders that turn differently."""
        assert turn.answer is not None, "it was found by its answer"
        generated, prompt = turn.completion.token_ids, turn.prompt
        has_same_variables = prompt.has_variables(tools, template_kwargs)
        if has_same_variables:
            tools, template_kwargs = prompt.tools, prompt.template_kwargs  # they are stored once
        kept = self._template.render_after(
            lambda: (prompt.rendered, prompt.list_messages()),
            num_messages=len(prompt.messages),
            answer=turn.answer,
            answer_text=self._template.decode_all(generated),
            new=new,
            tools=tools,
            template_kwargs=template_kwargs,
            excerpt=prompt.excerpt,
            has_same_variables=has_same_variables,
            is_checked=turn.depth & (turn.depth - 1) == 0,  # powers of two: all checks together cost as much as one
        )
        if kept is None:
            return None
        after, _ = self._template.encode_marks(kept.text[kept.end :])
        return TurnPrompt(
            parent=turn,
            ids=turn.ids.extend(array("i", self._template.drop_closing(after, generated))),
            text=prompt.text.extend(kept.text),
            messages=prompt.messages.extend((kept.stub, *new)),
            excerpt=kept.excerpt,
            key=key,
            tools=tools,
            template_kwargs=template_kwargs,
        )

    # ---- answers

    def record_answer(
        self,
        prompt: TurnPrompt,
        completion: Completion,
        *,
        answer: ChatMessage | None,
        is_trained: bool,
        started_at: float,
        generate_s: float,
        has_form: bool = False,
    ) -> RecordedTurn:
        """Record an answer, which the client received as the message `answer`."""
        if not len(completion.token_ids) == len(completion.logprobs) == len(completion.versions):
            raise EngineAnswerError(
                f"the engine sent {len(completion.token_ids)} tokens, {len(completion.logprobs)} log-probabilities and "
                f"{len(completion.versions)} versions: one of each per token is needed"
            )
        turn = RecordedTurn(
            number=len(self.turns),
            prompt=prompt,
            completion=msgspec.structs.replace(completion, top=[]),
            text=self._template.decode(completion.token_ids),
            answer=answer,
            is_trained=is_trained,
            has_form=has_form,
            started_at=started_at,
            generate_s=generate_s,
        )
        self.turns.append(turn)
        if prompt.parent is None:
            self._openings.append(prompt)
        if answer is not None:
            self._answers.setdefault(_extend_key(prompt.key, answer), []).append(turn)
        return turn


def _join_ids(ids: "SharedSequence[array[int]]") -> "array[int]":
    joined = array("i")
    for part in ids.list_parts():
        joined.extend(part)
    return joined


def _find_mark(prompt: TurnPrompt | None, end: int) -> tuple[int, int]:
    """Return the start of the last mark in the first `end` characters of a prompt without a parent, and the ids before.

    The tokens before a mark do not depend on what follows.
    """
    while prompt is not None:
        for place in reversed(prompt.marks):
            if place.end <= end:
                return place.start, place.num_ids
        end = min(end, prompt.text.num_shared)
        prompt = prompt.base
    return 0, 0


def _chain_keys(messages: Sequence[ChatMessage], *, key: bytes) -> Iterator[bytes]:
    """Yield for each message a hash of the conversation up to it; `key` is that of what comes before."""
    for message in messages:
        key = _extend_key(key, message)
        yield key


def _extend_key(before: bytes, message: ChatMessage) -> bytes:
    known = msgspec.json.encode(_identify_message(message), order="deterministic")
    return hashlib.blake2b(before + known, digest_size=16).digest()


def _identify_message(message: ChatMessage) -> ChatMessage:
    """Return what every client keeps of a message: some leave out thoughts, trim texts or rename tool calls."""
    kept = {name: value for name, value in message.items() if name not in ("reasoning_content", "tool_call_id")}
    if message["role"] == "assistant":
        kept["content"] = message["content"].strip()
    if "tool_calls" in message:
        calls = [call["function"] for call in message["tool_calls"]]
        kept["tool_calls"] = [[call["name"], _unify_numbers(call["arguments"])] for call in calls]
    return kept


def _unify_numbers(value: Any) -> Any:
    """Return a JSON value in which 1.0 is 1, as JavaScript writes it."""
    match value:
        case float() if value.is_integer():
            return int(value)
        case list():
            return [_unify_numbers(item) for item in value]
        case dict():
            return {name: _unify_numbers(item) for name, item in value.items()}
        case _:
            return value
