"""Recording of an agent program's calls, exact to the token: a tree of turns in which each leaf is a conversation.

    ConversationRecording               makes prompts, records answers
    TurnPrompt, RecordedTurn            the prompt of a turn, and the turn once answered
    ChatMessage                         a message as clients send it

A request continues a turn if its messages start with that turn's messages and its answer, unchanged, and the chat
template still renders that answer as generated. Then all earlier token ids are reused and only the new messages are
tokenised. Whatever a client changed, dropped or summarised starts a branch at the last turn that it kept; so do
several answers to one request, and templates that leave old thoughts out of the history. The record that is made of the
tree is built in `hpcrl.rollout.agents.episode_record`.
"""

import hashlib
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import msgspec

from hpcrl.engines.base import Completion
from hpcrl.errors import EngineAnswerError
from hpcrl.models.chat_template import ChatTemplate

ChatMessage = dict[str, Any]


@dataclass(eq=False, frozen=True, kw_only=True)
class TurnPrompt:
    """The prompt of one turn."""

    parent: "RecordedTurn | None"
    new_token_ids: list[int]
    """The ids that follow the parent's."""
    rendered: str
    """The whole prompt as text, to check whether a later request starts with it."""
    messages: Sequence[Mapping[str, Any]] = ()
    """The messages as rendered: answers of the model that are continued are placeholders."""
    excerpt: Sequence[Mapping[str, Any]] = ()
    """A short conversation with the structure of `messages`, if they are long."""
    key: bytes = b""
    """A hash of the client's messages."""
    tools: Sequence[Any] | None = None
    template_kwargs: Mapping[str, Any] | None = None
    """The request's own variables of the template."""

    def token_ids(self) -> list[int]:
        """Return the ids of the whole prompt."""
        before = [ids for turn in self.path() for ids in (turn.prompt.new_token_ids, turn.completion.token_ids)]
        return [*itertools.chain.from_iterable(before), *self.new_token_ids]

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
    started_at: float
    """The time of the request, by the clock of the episode."""
    generate_s: float

    @cached_property
    def depth(self) -> int:
        """The number of turns from the first one to this."""
        return 1 if self.prompt.parent is None else self.prompt.parent.depth + 1

    def token_ids(self) -> list[int]:
        """Return the ids of the prompt and the answer."""
        return [*self.prompt.token_ids(), *self.completion.token_ids]

    def path(self) -> "list[RecordedTurn]":
        """Return the turns from the first one to this."""
        return [*self.prompt.path(), self]


class ConversationRecording:
    """The turns of one attempt at an episode."""

    def __init__(self, template: ChatTemplate) -> None:
        self.turns: list[RecordedTurn] = []
        self._template = template
        self._answers: dict[bytes, list[RecordedTurn]] = {}
        self._last: tuple[Sequence[ChatMessage], Sequence[bytes]] = (), ()
        """The messages of the last request and their keys: one pair, as requests may be read in several threads."""

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
        new_token_ids = self._template.encode(rendered)
        return TurnPrompt(
            parent=None,
            new_token_ids=new_token_ids,
            rendered=rendered,
            messages=list(messages),
            key=keys[-1],
            tools=tools,
            template_kwargs=template_kwargs,
        )

    def _find_keys(self, messages: Sequence[ChatMessage]) -> list[bytes]:
        """Return the hash of the conversation up to each message; most are known from the request before."""
        last_messages, last_keys = self._last
        pairs = enumerate(zip(messages, last_messages, strict=False))
        num_known = next((n for n, (now, before) in pairs if now != before), min(len(messages), len(last_keys)))
        known = last_keys[:num_known]
        keys = [*known, *_chain_keys(messages[num_known:], key=known[-1] if known else b"")]
        self._last = list(messages), keys
        return keys

    def text_prompt(self, prompt: str | list[int]) -> TurnPrompt:
        """Make the prompt of a plain completion, given as text or as ids; marks in the text count."""
        if not isinstance(prompt, str):
            return self._prompt_from_ids(prompt)
        for turn in reversed(self.turns):
            before, generated = turn.prompt.rendered, turn.completion.token_ids
            end = len(before) + len(turn.text)
            if turn.prompt.messages or not before or not prompt.startswith(before):
                continue
            if prompt.startswith(turn.text, len(before)):
                new_token_ids = self._template.encode(prompt[end:])
                if self._template.mark_pattern.match(prompt, end):
                    new_token_ids = self._template.drop_closing(new_token_ids, generated)
                return TurnPrompt(parent=turn, new_token_ids=new_token_ids, rendered=prompt)
        return TurnPrompt(parent=None, new_token_ids=self._template.encode(prompt), rendered=prompt)

    def _prompt_from_ids(self, prompt: list[int]) -> TurnPrompt:
        ends: dict[RecordedTurn | None, int] = {None: 0}
        """Where the turns end that the prompt starts with: what turns have in common is compared once."""
        for turn in self.turns:
            end = ends.get(turn.prompt.parent)
            if end is not None and (end := _match_ids(prompt, turn, start=end)) is not None:
                ends[turn] = end
        last, end = list(ends.items())[-1]
        return TurnPrompt(parent=last, new_token_ids=prompt[end:], rendered="")

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
        generated = turn.completion.token_ids
        kept = self._template.render_after(
            turn.prompt.rendered,
            turn.prompt.messages,
            answer=turn.answer,
            answer_text=self._template.decode_all(generated),
            new=new,
            tools=tools,
            template_kwargs=template_kwargs,
            excerpt=turn.prompt.excerpt,
            has_same_variables=turn.prompt.has_variables(tools, template_kwargs),
            is_checked=turn.depth & (turn.depth - 1) == 0,  # powers of two: all checks together cost as much as one
        )
        if kept is None:
            return None
        new_token_ids = self._template.drop_closing(self._template.encode(kept.rendered[kept.end :]), generated)
        return TurnPrompt(
            parent=turn,
            new_token_ids=new_token_ids,
            rendered=kept.rendered,
            messages=kept.messages,
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
            completion=completion,
            text=self._template.decode(completion.token_ids),
            answer=answer,
            is_trained=is_trained,
            started_at=started_at,
            generate_s=generate_s,
        )
        self.turns.append(turn)
        if answer is not None:
            self._answers.setdefault(_extend_key(prompt.key, answer), []).append(turn)
        return turn


def _match_ids(prompt: list[int], turn: RecordedTurn, *, start: int) -> int | None:
    """Return where a turn ends in the prompt, if that has the turn's ids from `start` on."""
    middle = start + len(turn.prompt.new_token_ids)
    end = middle + len(turn.completion.token_ids)
    has_turn = prompt[start:middle] == turn.prompt.new_token_ids and prompt[middle:end] == turn.completion.token_ids
    return end if has_turn else None


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
