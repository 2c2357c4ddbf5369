"""Recording of an agent program's calls, exact to the token: a tree of turns in which each leaf is a conversation.

    ConversationRecording               makes prompts, records answers
    TurnPrompt, RecordedTurn            the prompt of a turn, and the turn once answered
    ChatMessage                         a message as clients send it
    PromptLengthError                   a prompt is not tokenised, as its text is too long

A request continues a turn if its messages start with that turn's messages and its answer, unchanged, and the chat
template still renders that answer as generated. Then all earlier token ids are reused and only the new messages are
tokenised. Whatever a client changed, dropped or summarised starts a branch at the last turn that it kept, and an answer
without the stop text at which it ended one inside that turn, unless the client sends that text back. So do several
answers to one request, and templates that leave old thoughts out of the history. A prompt that continues no
turn shares the start that it has in common with an earlier one: neither is that tokenised again, nor stored. The
record that is made of the tree is built in `hpcrl.rollout.agents.episode_record`.
"""

import hashlib
import itertools
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import msgspec

from hpcrl.engines.base import Completion
from hpcrl.errors import EngineAnswerError
from hpcrl.models.chat_template import AnsweredPrompt, ChatTemplate, MarkPlace
from hpcrl.models.message_form import ConversationExcerpt, make_excerpt
from hpcrl.rollout.agents.shared_sequence import RecentLists, SequenceIndex, SharedSequence, count_equal, join_ids
from hpcrl.spool.routed_experts import find_span_end, place_span

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
    """The earlier prompt whose start one without a parent shares."""
    marks: Sequence[MarkPlace] = ()
    """The marks in its own text, if it has no parent."""
    excerpt: ConversationExcerpt | None = None
    """A short conversation with the structure of `messages`, once it is needed."""
    num_extended: int = 0
    """The number of openings before it that it extends, each the one before."""
    has_placeholders: bool = False
    """True if it has no parent, but an answer of the model, as a placeholder in the text and the messages."""
    key: bytes = b""
    """A hash of the client's messages."""
    tools: Sequence[Any] | None = None
    template_kwargs: Mapping[str, Any] | None = None
    """The request's own variables of the template."""

    @property
    def rendered(self) -> str:
        """The whole prompt as text."""
        return "".join(self.text.list_parts())

    def read_end(self, num_chars: int) -> str:
        """Return the end of the prompt as text, with at most this number of characters."""
        return "".join(self.text.list_parts(max(len(self.text) - num_chars, 0)))[-num_chars:]

    @property
    def new_token_ids(self) -> "array[int]":
        """The ids that follow the parent's; all of them if there is none."""
        return join_ids(self.ids) if self.parent is None else self.ids.own

    def token_ids(self) -> list[int]:
        """Return the ids of the whole prompt."""
        return join_ids(self.ids).tolist()

    def list_messages(self) -> list[ChatMessage]:
        """Return the messages as rendered."""
        return list(itertools.chain.from_iterable(self.messages.list_parts()))

    def has_variables(self, tools: Sequence[Any] | None, template_kwargs: Mapping[str, Any] | None) -> bool:
        """Return whether it was made with these tools and variables."""
        return (self.tools or None, self.template_kwargs or {}) == (tools or None, template_kwargs or {})

    @property
    def num_read(self) -> int:
        """The first tokens of the prompt whose experts earlier turns have reported."""
        turn = self.parent
        while turn is not None:
            if end := find_span_end(turn.completion.experts, 0):
                return end
            turn = turn.prompt.parent
        return 0

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
    """The generated text of a plain completion, without special tokens; "" of a message."""
    answer: ChatMessage | None
    """The answer as the client received it; None for one that is not a message."""
    hidden_text: str = ""
    """The end of the generated text that the client did not receive."""
    is_trained: bool
    """False if it was not sampled as training assumes."""
    find_free: Callable[[], Sequence[bool]] | None = None
    """Return for each token whether the required form of the answer left it free; None if no form was required."""
    started_at: float
    """The time of the request, by the clock of the episode."""
    generate_s: float

    @cached_property
    def forced(self) -> list[bool]:
        """True for each token that had no alternative: where the form holds, its log-probability is exactly 0.

        Engines report the log-probabilities of what the form allows, the trainer computes those of the whole
        vocabulary. A sure token of a free part, such as the thoughts, has log-probability 0 too, in both.
        """
        certain = [logprob == 0 for logprob in self.completion.logprobs]
        if self.find_free is None or not any(certain):
            return [False] * len(certain)
        return [is_certain and not is_free for is_certain, is_free in zip(certain, self.find_free(), strict=True)]

    @cached_property
    def depth(self) -> int:
        """The number of turns from the first one to this, and of the openings that it extends."""
        return 1 + (self.prompt.num_extended if self.prompt.parent is None else self.prompt.parent.depth)

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
        return join_ids(self.ids).tolist()

    def path(self) -> "list[RecordedTurn]":
        """Return the turns from the first one to this."""
        return [*self.prompt.path(), self]


class PromptLengthError(Exception):
    """The text of a prompt is so long that it cannot fit into the context."""

    def __init__(self, num_chars: int) -> None:
        super().__init__(f"the prompt has {num_chars} characters")
        self.num_chars = num_chars


class ConversationRecording:
    """The turns of one attempt at an episode."""

    def __init__(self, template: ChatTemplate, *, max_chars: int | None = None) -> None:
        self.turns: list[RecordedTurn] = []
        self._max_chars = max_chars
        """The longest text of a prompt; a longer one is not tokenised."""
        self._template = template
        self._answers: dict[bytes, list[RecordedTurn]] = {}
        self._openings: SequenceIndex[str, TurnPrompt] = SequenceIndex(lambda prompt: prompt.text)
        """The answered prompts that continue no turn, by their text."""
        self._openings_by_key: dict[bytes, TurnPrompt] = {}
        self._id_openings: SequenceIndex[array[int], TurnPrompt] = SequenceIndex(lambda prompt: prompt.ids)
        self._text_turns: SequenceIndex[str, RecordedTurn] = SequenceIndex(lambda turn: turn.whole_text)
        """The turns of plain texts that are not empty, by prompt and answer."""
        self._id_turns: SequenceIndex[array[int], RecordedTurn] = SequenceIndex(lambda turn: turn.ids)
        self._requests: RecentLists[ChatMessage, list[bytes]] = RecentLists()
        """The messages of the last requests, with their keys."""

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
                prompt = self._continue_turn(
                    turn, new, sent=sent, tools=tools, template_kwargs=template_kwargs, key=keys[-1]
                )
                if prompt is not None:
                    return prompt
                break  # what the template changes of this turn it changes of earlier ones too
        variables: dict[str, Any] = {"tools": tools, "template_kwargs": template_kwargs}
        longer = self._extend_opening(messages, keys, **variables)
        if longer is not None:
            return longer
        rendered = self._template.render(messages, **variables)
        return self._open_text(rendered, messages=tuple(messages), key=keys[-1], **variables)

    def _extend_opening(
        self, messages: Sequence[ChatMessage], keys: Sequence[bytes], **variables: Any
    ) -> TurnPrompt | None:
        """Return the prompt of a conversation that extends an opening, unless it has to be rendered as a whole.

        Templates that leave old thoughts out change the last turns whenever the user asks again, but none before them.
        """
        opening = next(
            (self._openings_by_key[key] for key in reversed(keys[:-1]) if key in self._openings_by_key), None
        )
        if opening is None or not opening.has_variables(**variables):
            return None
        num_before = len(opening.messages)
        before, new = opening.list_messages(), messages[num_before:]
        if count_equal(before, messages[:num_before]) < num_before:
            return None
        number = opening.num_extended + 1
        longer = self._template.render_longer(
            opening.excerpt or make_excerpt(before),
            new,
            read_end=opening.read_end,
            read_texts=lambda: (opening.rendered, self._template.render(messages, **variables)),
            is_checked=number & (number - 1) == 0,
            **variables,
        )
        if longer is None:
            return None
        common = len(opening.text) - longer.num_dropped
        start, _ = mark = _find_mark(opening, common)
        kept = opening.read_end(len(opening.text) - start)[: common - start]
        prompt = self._share_start(opening, mark, kept + longer.text, excerpt=longer.excerpt, key=keys[-1])
        return replace(
            prompt,
            messages=opening.messages.extend(tuple(new)),
            num_extended=number,
            tools=opening.tools,
            template_kwargs=opening.template_kwargs,
        )

    def _find_keys(self, messages: Sequence[ChatMessage]) -> list[bytes]:
        """Return the hash of the conversation up to each message; most are known from an earlier request."""
        messages = list(messages)
        last = self._requests.find(messages)
        known = [] if last is None else last.value[: count_equal(messages, last.items)]
        keys = [*known, *_chain_keys(messages[len(known) :], key=known[-1] if known else b"")]
        self._requests.add(messages, keys)
        return keys

    def _open_text(self, rendered: str, *, messages: tuple[ChatMessage, ...] = (), **more: Any) -> TurnPrompt:
        """Make a prompt that continues no turn; what it has in common with an earlier one is not tokenised again."""
        common, base = self._openings.find_common(rendered)
        mark = _find_mark(base, common)
        base = base if mark[0] else None
        same = count_equal(base.list_messages(), list(messages)) if base else 0
        sequence = SharedSequence(messages[same:], base.messages if base else None, same)
        return self._share_start(base, mark, rendered[mark[0] :], messages=sequence, **more)

    def _share_start(self, base: TurnPrompt | None, mark: tuple[int, int], text: str, **more: Any) -> TurnPrompt:
        """Make a prompt that continues no turn, with the text of `base` before a place, and this text from there."""
        start, num_ids = mark
        self._check_chars(start + len(text))
        ids, marks = self._template.encode_marks(text)
        return TurnPrompt(
            parent=None,
            ids=SharedSequence(ids, base.ids if base else None, num_ids),
            text=SharedSequence(text, base.text if base else None, start),
            base=base,
            marks=[MarkPlace(place.start + start, place.end + start, place.num_ids + num_ids) for place in marks],
            **more,
        )

    def _check_chars(self, num_chars: int) -> None:
        if self._max_chars is not None and num_chars > self._max_chars:
            raise PromptLengthError(num_chars)

    def text_prompt(self, prompt: str | list[int]) -> TurnPrompt:
        """Make the prompt of a plain completion, given as text or as ids; marks in the text count."""
        if not isinstance(prompt, str):
            return self._prompt_from_ids(array("i", prompt))
        turn = self._text_turns.find_start(prompt)
        return self._open_text(prompt) if turn is None else self._continue_text(turn, prompt)

    def _continue_text(self, turn: RecordedTurn, prompt: str) -> TurnPrompt:
        """Make a prompt that starts with a turn's text.

        The program saw no special tokens. A last one, at which most answers end, stays if it sends that mark. Else the
        prompt shares the ids before, and the turn ends another conversation, in which that token is trained.
        """
        generated, text = turn.completion.token_ids, turn.whole_text
        self._check_chars(len(prompt))
        after, _ = self._template.encode_marks(prompt[len(text) :])
        num_shown = next((place for place, token in enumerate(generated) if token in self._template.special_ids), None)
        if num_shown is not None and list(after[:1]) == list(generated[num_shown:]):
            after, num_shown = after[1:], None
        if num_shown is None:
            return TurnPrompt(parent=turn, ids=turn.ids.extend(after), text=text.extend(prompt[len(text) :]))
        shown = self._template.decode(generated[:num_shown])
        if not turn.text.startswith(shown):
            return self._open_text(prompt)
        mark = len(turn.prompt.text) + len(shown), len(turn.prompt.ids) + num_shown
        base = TurnPrompt(parent=None, ids=turn.ids, text=text, base=turn.prompt)
        return self._share_start(base, mark, prompt[mark[0] :])

    def _prompt_from_ids(self, prompt: "array[int]") -> TurnPrompt:
        turn = self._id_turns.find_start(prompt)
        if turn is not None:
            ids = turn.ids.extend(prompt[len(turn.ids) :])
            return TurnPrompt(parent=turn, ids=ids, text=SharedSequence(""))
        common, base = self._id_openings.find_common(prompt)
        ids = SharedSequence(prompt[common:], base.ids if base else None, common)
        return TurnPrompt(parent=None, ids=ids, text=SharedSequence(""), base=base)

    def _continue_turn(
        self,
        turn: RecordedTurn,
        new: Sequence[ChatMessage],
        *,
        sent: ChatMessage,
        tools: Sequence[Any] | None,
        template_kwargs: Mapping[str, Any] | None,
        key: bytes,
    ) -> TurnPrompt | None:
        """Return the prompt that continues a turn, or None if the template renders that turn differently.

        `sent` is its answer as the client sent it, without what was hidden from it or with that.
        """
        assert turn.answer is not None, "it was found by its answer"
        generated, prompt = turn.completion.token_ids, turn.prompt
        if not self._template.keeps_stop(generated):
            return None
        has_same_variables = prompt.has_variables(tools, template_kwargs)
        if has_same_variables:
            tools, template_kwargs = prompt.tools, prompt.template_kwargs  # they are stored once
        answered = AnsweredPrompt(
            read_prompt=lambda: (prompt.rendered, prompt.list_messages()),
            num_messages=len(prompt.messages),
            excerpt=prompt.excerpt,
            message=turn.answer,
            text=self._template.decode_all(generated),
        )
        kept = self._template.render_after(
            answered,
            new,
            tools=tools,
            template_kwargs=template_kwargs,
            has_same_variables=has_same_variables,
            is_checked=turn.depth & (turn.depth - 1) == 0,  # powers of two: all checks together cost as much as one
        )
        if kept is None:
            return None
        self._check_chars(len(prompt.text) + len(kept.text))
        is_cut = bool(turn.hidden_text.strip()) and sent["content"].strip() == turn.answer["content"].strip()
        num_shown, rest = self._find_cut(turn) if is_cut else (len(generated), "")
        after, _ = self._template.encode_marks(self._template.guard(rest) + kept.text[kept.end :])
        own = after if is_cut else array("i", self._template.drop_closing(after, generated))
        return TurnPrompt(
            parent=None if is_cut else turn,
            ids=SharedSequence(own, turn.ids, len(prompt.ids) + num_shown),
            text=prompt.text.extend(kept.text),
            messages=prompt.messages.extend((kept.stub, *new)),
            excerpt=kept.excerpt,
            num_extended=turn.depth if is_cut else 0,
            has_placeholders=is_cut,
            key=key,
            tools=tools,
            template_kwargs=template_kwargs,
        )

    def _find_cut(self, turn: RecordedTurn) -> tuple[int, str]:
        """Return how many tokens of an answer the client received as a whole, and the text of the rest that it has."""
        generated = turn.completion.token_ids
        shown = self._template.decode_all(generated).removesuffix(turn.hidden_text)
        starts = ((num, self._template.decode_all(generated[:num])) for num in range(len(generated), -1, -1))
        num, start = next((num, start) for num, start in starts if shown.startswith(start))
        return num, shown[len(start) :]

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
        hidden_text: str = "",
        find_free: Callable[[], Sequence[bool]] | None = None,
    ) -> RecordedTurn:
        """Record an answer, which the client received as the message `answer`, without the end `hidden_text`."""
        if not len(completion.token_ids) == len(completion.logprobs) == len(completion.versions):
            raise EngineAnswerError(
                f"the engine sent {len(completion.token_ids)} tokens, {len(completion.logprobs)} log-probabilities and "
                f"{len(completion.versions)} versions: one of each per token is needed"
            )
        for span in completion.experts:
            place_span(span, range(len(prompt.ids) + len(completion.token_ids)))  # raises if it does not fit
        turn = RecordedTurn(
            number=len(self.turns),
            prompt=prompt,
            completion=msgspec.structs.replace(completion, top=[]) if completion.top else completion,
            text="" if len(prompt.messages) else self._template.decode(completion.token_ids),
            answer=answer,
            hidden_text=hidden_text,
            is_trained=is_trained,
            find_free=find_free,
            started_at=started_at,
            generate_s=generate_s,
        )
        self.turns.append(turn)
        self._id_turns.add(turn)
        if turn.text and len(prompt.text):
            self._text_turns.add(turn)
        if prompt.parent is None:
            self._id_openings.add(prompt)
        if prompt.parent is None and not prompt.has_placeholders:
            self._openings.add(prompt)
            if len(prompt.messages):
                self._openings_by_key[prompt.key] = prompt
        for form in () if answer is None else _list_forms(answer, hidden_text):
            self._answers.setdefault(_extend_key(prompt.key, form), []).append(turn)
        return turn


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


def _list_forms(answer: ChatMessage, hidden_text: str) -> list[ChatMessage]:
    """Return an answer as a client may send it: without what was hidden from it, or with that."""
    if not hidden_text.strip() or not answer["content"] or answer.get("tool_calls"):
        return [answer]
    return [answer, {**answer, "content": answer["content"] + hidden_text}]


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
