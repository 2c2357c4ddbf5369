"""Recording of an agent program's calls, exact to the token: a tree of turns in which each leaf is a conversation.

    ConversationRecording               makes prompts, records answers, builds the trajectory
    TurnPrompt, RecordedTurn            the prompt of a turn, and the turn once answered
    ConversationBranch                  a conversation that is not trained on, stored inside the trajectory
    branches_of                         restores those conversations as separate trajectories
    EpisodeFacts                        the fields of the record that the episode supplies
    ConversationChoice, ChatMessage     which conversation is trained on; a message as clients send it

A request continues a turn if its messages start with that turn's messages and its answer, unchanged, and the chat
template still renders that answer as generated. Then all earlier token ids are reused and only the new messages are
tokenised. Whatever a client changed, dropped or summarised starts a branch at the last turn that it kept; so do
several answers to one request, and templates that leave old thoughts out of the history.
"""

import hashlib
import itertools
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec
import numpy as np

from hpcrl.engines.base import Completion
from hpcrl.errors import EngineAnswerError
from hpcrl.models.chat_template import ChatTemplate
from hpcrl.spool.record import EpisodeTurn, Trajectory
from hpcrl.spool.status import EpisodeStatus

ChatMessage = dict[str, Any]
ConversationChoice = Literal["longest", "last"]
"""The conversation to train on: the one with the most generated tokens (the later of equals), or the last continued.

Only one is trained on, since turns that several share would count twice.
"""


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
    key: bytes = b""
    """A hash of the client's messages."""

    def token_ids(self) -> list[int]:
        """Return the ids of the whole prompt."""
        before = [ids for turn in self.path() for ids in (turn.prompt.new_token_ids, turn.completion.token_ids)]
        return [*itertools.chain.from_iterable(before), *self.new_token_ids]

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
    """The answer as the client received it; None for one that is no message."""
    is_trained: bool
    """False if it was not sampled as training assumes."""
    started_at: float
    """The time of the request, by the clock of the episode."""
    generate_s: float

    def token_ids(self) -> list[int]:
        """Return the ids of the prompt and the answer."""
        return [*self.prompt.token_ids(), *self.completion.token_ids]

    def path(self) -> "list[RecordedTurn]":
        """Return the turns from the first one to this."""
        return [*self.prompt.path(), self]


class ConversationBranch(msgspec.Struct, frozen=True, kw_only=True):
    """A conversation that is not trained on, without the tokens that it shares with the one that is."""

    shares: int
    """The number of leading tokens that are those of the trajectory."""
    token_ids: list[int]
    """The others."""
    logprobs: list[float]
    versions: list[int]
    loss_mask: list[bool]
    turns: list[EpisodeTurn]
    """The turns of the branch; positions count from the first token of the whole conversation."""


class ConversationRecording:
    """The turns of one attempt at an episode."""

    def __init__(self, template: ChatTemplate) -> None:
        self.turns: list[RecordedTurn] = []
        self._template = template
        self._answers: dict[bytes, list[RecordedTurn]] = {}

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
        keys = list(_chain_keys(messages))
        for count in range(len(messages), 0, -1):
            if turns := self._answers.get(keys[count - 1]):
                new = messages[count:]
                prompt = self._continue_turn(turns[-1], new, tools=tools, template_kwargs=template_kwargs, key=keys[-1])
                if prompt is not None:
                    return prompt
                break  # what the template changes of this turn it changes of earlier ones too
        rendered = self._template.render(messages, tools=tools, template_kwargs=template_kwargs)
        new_token_ids = self._template.encode(rendered)
        return TurnPrompt(
            parent=None, new_token_ids=new_token_ids, rendered=rendered, messages=list(messages), key=keys[-1]
        )

    def text_prompt(self, prompt: str | list[int]) -> TurnPrompt:
        """Make the prompt of a plain completion, given as text or as ids."""
        if not isinstance(prompt, str):
            return self._prompt_from_ids(prompt)
        for turn in reversed(self.turns):
            before = turn.prompt.rendered + turn.text
            if not turn.prompt.messages and turn.prompt.rendered and prompt.startswith(before):
                new_token_ids = self._template.encode_text(prompt[len(before) :])
                return TurnPrompt(parent=turn, new_token_ids=new_token_ids, rendered=prompt)
        return TurnPrompt(parent=None, new_token_ids=self._template.encode_text(prompt), rendered=prompt)

    def _prompt_from_ids(self, prompt: list[int]) -> TurnPrompt:
        for turn in reversed(self.turns):
            before = turn.token_ids()
            if prompt[: len(before)] == before:
                return TurnPrompt(parent=turn, new_token_ids=prompt[len(before) :], rendered="")
        return TurnPrompt(parent=None, new_token_ids=prompt, rendered="")

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
        )
        if kept is None:
            return None
        new_token_ids = self._template.drop_closing(self._template.encode(kept.rendered[kept.end :]), generated)
        return TurnPrompt(
            parent=turn, new_token_ids=new_token_ids, rendered=kept.rendered, messages=kept.messages, key=key
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

    # ---- results

    def leaves(self) -> list[RecordedTurn]:
        """Return the last turns of all conversations."""
        continued = {turn.prompt.parent for turn in self.turns}
        return [turn for turn in self.turns if turn not in continued]

    def trained_leaf(self, choice: ConversationChoice) -> RecordedTurn | None:
        """Return the last turn of the conversation to train on."""
        leaves = self.leaves()
        if choice == "last":
            return leaves[-1] if leaves else None
        return max(leaves, key=lambda leaf: (_count_trained_tokens(leaf), leaf.number), default=None)

    def trajectory(self, facts: "EpisodeFacts", *, reward: float, choice: ConversationChoice) -> Trajectory:
        """Build the record of the episode; the last turn receives the reward."""
        leaf = self.trained_leaf(choice)
        path = leaf.path() if leaf else []
        columns, turns = _make_columns(path), list(_make_turns(path, ended_at=facts.ended_at))
        if turns:
            turns[-1] = msgspec.structs.replace(turns[-1], reward=reward)
        others = [
            _make_branch(other.path(), path, ended_at=facts.ended_at) for other in self.leaves() if other is not leaf
        ]
        extra = dict(facts.extra)
        if others:
            extra["branches"] = msgspec.to_builtins(others)
        reply_versions = [version for turn in path for version in turn.completion.versions]
        return Trajectory(
            id=facts.id,
            group=facts.group,
            domain=facts.domain,
            seed=facts.seed,
            status=facts.status,
            producer=facts.producer,
            created=time.time(),
            start_version=min([facts.start_version, *reply_versions]),
            end_version=reply_versions[-1] if reply_versions else facts.start_version,
            turns=turns,
            reset_s=max(0.0, path[0].started_at - facts.started_at) if path else 0.0,
            extra=extra,
            **columns,
        )


class EpisodeFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of the record that the episode supplies."""

    id: str
    group: str
    domain: str
    seed: int
    status: EpisodeStatus
    producer: str
    start_version: int
    started_at: float
    """The start of its program; `reset_s` is the time from then to the first request."""
    ended_at: float
    extra: dict[str, Any] = {}


def branches_of(trajectory: Trajectory) -> list[Trajectory]:
    """Return the conversations of the episode that are not trained on; `ID~1` is the first."""
    branches = msgspec.convert(trajectory.extra.get("branches", []), list[ConversationBranch])
    return [_restore_branch(trajectory, branch, number=number) for number, branch in enumerate(branches, start=1)]


def _restore_branch(trajectory: Trajectory, branch: ConversationBranch, *, number: int) -> Trajectory:
    def column(name: str) -> Any:
        shared = getattr(trajectory, name)[: branch.shares]
        return np.concatenate([shared, np.array(getattr(branch, name), dtype=shared.dtype)])

    return msgspec.structs.replace(
        trajectory,
        id=f"{trajectory.id}~{number}",
        turns=[*(turn for turn in trajectory.turns if turn.end <= branch.shares), *branch.turns],
        extra={"branch_of": trajectory.id, "shares": branch.shares},
        token_ids=column("token_ids"),
        logprobs=column("logprobs"),
        versions=column("versions"),
        loss_mask=column("loss_mask"),
    )


def _make_branch(path: list[RecordedTurn], trained_path: list[RecordedTurn], *, ended_at: float) -> ConversationBranch:
    num_common = sum(1 for mine, theirs in zip(path, trained_path, strict=False) if mine is theirs)
    common = sum(_count_tokens(turn) for turn in path[:num_common])
    if num_common < len(path) and num_common < len(trained_path):
        common += _count_common_ids(
            path[num_common].prompt.new_token_ids, trained_path[num_common].prompt.new_token_ids
        )
    own = {name: column[common:].tolist() for name, column in _make_columns(path).items()}
    turns = [turn for turn in _make_turns(path, ended_at=ended_at) if turn.start >= common]
    return ConversationBranch(shares=common, turns=turns, **own)


def _count_common_ids(mine: list[int], theirs: list[int]) -> int:
    return next((n for n, (a, b) in enumerate(zip(mine, theirs, strict=False)) if a != b), min(len(mine), len(theirs)))


def _make_columns(path: list[RecordedTurn]) -> dict[str, Any]:
    """Build the per-token columns of a conversation."""
    ids: list[int] = []
    logprobs: list[float] = []
    versions: list[int] = []
    mask: list[bool] = []
    for turn in path:
        num_new, completion = len(turn.prompt.new_token_ids), turn.completion
        ids += [*turn.prompt.new_token_ids, *completion.token_ids]
        logprobs += [*([0.0] * num_new), *completion.logprobs]
        versions += [*([0] * num_new), *completion.versions]
        mask += [*([False] * num_new), *([turn.is_trained] * len(completion.token_ids))]
    return {
        "token_ids": np.array(ids, np.int32),
        "logprobs": np.array(logprobs, np.float32),
        "versions": np.array(versions, np.int32),
        "loss_mask": np.array(mask, np.bool_),
    }


def _make_turns(path: list[RecordedTurn], *, ended_at: float) -> Iterator[EpisodeTurn]:
    """Yield the turns' records; the time from an answer to the program's next request is the step of that turn."""
    position = 0
    next_starts = [*(turn.started_at for turn in path[1:]), ended_at]
    for turn, next_started_at in zip(path, next_starts, strict=False):
        start = position + len(turn.prompt.new_token_ids)
        position = start + len(turn.completion.token_ids)
        prefilled = turn.completion.remote_prefill
        step_s = max(0.0, next_started_at - turn.started_at - turn.generate_s)
        yield EpisodeTurn(
            start=start, end=position, generate_s=turn.generate_s, step_s=step_s, remote_prefill=prefilled
        )


def _count_tokens(turn: RecordedTurn) -> int:
    return len(turn.prompt.new_token_ids) + len(turn.completion.token_ids)


def _count_trained_tokens(leaf: RecordedTurn) -> int:
    return sum(len(turn.completion.token_ids) for turn in leaf.path() if turn.is_trained)


def _chain_keys(messages: Sequence[ChatMessage]) -> Iterator[bytes]:
    """Yield for each message a hash of the conversation up to it."""
    key = b""
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
