"""What an agent program said through the proxy, exact to the token: a tree of turns, each leaf a conversation.

    Recording.chat, .text   the prompt of a request: what was recorded, as it came, and the ids of what is new
    Recording.said          records an answer; it can be gone on from
    Recording.trajectory    the trained conversation, with the others in it as branches
    branches_of             the other conversations of a trajectory, each as a trajectory of its own

A request goes on from a turn if its messages begin with that turn's messages and its answer, unchanged, and the chat
template still shows that answer as it was said. Then the ids of all that was before are used again and only the new
messages are tokenised. Whatever a client changed, dropped or summarised begins a branch at the last turn that it
kept; so do several answers to one request, and templates that leave old thoughts out of the history.
"""

import hashlib
import itertools
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec
import numpy as np

from hpcrl.engines.base import Completion
from hpcrl.errors import ConfigError, EngineAnswerError
from hpcrl.models.chat_template import Template
from hpcrl.spool.record import Trajectory, Turn
from hpcrl.spool.status import EpisodeStatus

Message = dict[str, Any]
Choice = Literal["longest", "last"]
"""Which conversation is trained: that in which the model said most (of equals the later), or the one gone on with last.

One and not several, since the turns that they share would count twice.
"""


@dataclass(eq=False, frozen=True, kw_only=True)
class Prompt:
    """What the model is shown in one turn."""

    parent: "Said | None"
    shown: list[int]
    """The ids that come after the parent's."""
    rendered: str
    """All of it as text, to see whether a later request begins with it."""
    messages: list[Message] = field(default_factory=list)
    """As rendered: answers of the model are the text that it said."""
    key: bytes = b""
    """Stands for the client's messages."""

    def token_ids(self) -> list[int]:
        """All of it."""
        before = [ids for said in self.path() for ids in (said.prompt.shown, said.completion.token_ids)]
        return [*itertools.chain.from_iterable(before), *self.shown]

    def path(self) -> "list[Said]":
        """The turns before it, from the first one."""
        path, said = [], self.parent
        while said is not None:
            path.append(said)
            said = said.prompt.parent
        return path[::-1]


@dataclass(eq=False, frozen=True, kw_only=True)
class Said:
    """A recorded turn."""

    number: int
    """Turns in the order in which they were answered."""
    prompt: Prompt
    completion: Completion
    text: str
    """All that was said, without marks."""
    trained: bool
    """False if it was sampled otherwise than training assumes."""
    began: float
    """When it was asked for, by the clock of the episode."""
    generate_s: float

    def token_ids(self) -> list[int]:
        """The prompt and the answer."""
        return [*self.prompt.token_ids(), *self.completion.token_ids]

    def path(self) -> "list[Said]":
        """The turns from the first one to this."""
        return [*self.prompt.path(), self]


class Branch(msgspec.Struct, frozen=True, kw_only=True):
    """A conversation that was not trained, without what it has in common with the one that was."""

    shares: int
    """How many tokens, from the first, are those of the trajectory."""
    token_ids: list[int]
    """The others."""
    logprobs: list[float]
    versions: list[int]
    loss_mask: list[bool]
    turns: list[Turn]
    """Its own; places count from the first token of the whole."""


class Recording:
    """The turns of one attempt at an episode."""

    def __init__(self, template: Template) -> None:
        self.turns: list[Said] = []
        self._template = template
        self._answers: dict[bytes, list[Said]] = {}

    # ---- prompts

    def chat(self, messages: Sequence[Message], *, tools: Sequence[Any] | None) -> Prompt:
        """The prompt of a conversation. ConfigError if the template does not take it."""
        keys = list(_keys(messages))
        for count in range(len(messages), 0, -1):
            for said in reversed(self._answers.get(keys[count - 1], ())):
                if (prompt := self._going_on(said, messages[count:], tools=tools, key=keys[-1])) is not None:
                    return prompt
        rendered = self._template.render(messages, tools=tools)
        shown = self._template.encode(rendered)
        return Prompt(parent=None, shown=shown, rendered=rendered, messages=list(messages), key=keys[-1])

    def text(self, prompt: str | list[int]) -> Prompt:
        """The prompt of a plain completion, given as text or as ids."""
        if not isinstance(prompt, str):
            return self._ids(prompt)
        for said in reversed(self.turns):
            before = said.prompt.rendered + said.text
            if not said.prompt.messages and said.prompt.rendered and prompt.startswith(before):
                shown = self._template.encode_text(prompt[len(before) :])
                return Prompt(parent=said, shown=shown, rendered=prompt)
        return Prompt(parent=None, shown=self._template.encode_text(prompt), rendered=prompt)

    def _ids(self, prompt: list[int]) -> Prompt:
        for said in reversed(self.turns):
            before = said.token_ids()
            if prompt[: len(before)] == before:
                return Prompt(parent=said, shown=prompt[len(before) :], rendered="")
        return Prompt(parent=None, shown=prompt, rendered="")

    def _going_on(
        self, said: Said, new: Sequence[Message], *, tools: Sequence[Any] | None, key: bytes
    ) -> Prompt | None:
        """The prompt that goes on from a turn, if the template shows that turn as it was."""
        template = self._template
        messages = [*said.prompt.messages, {"role": "assistant", "content": said.text}, *new]
        try:
            rendered = template.render(messages, tools=tools)
        except ConfigError:  # it may take the client's own form of the answer
            return None
        before = said.prompt.rendered + template.guard(said.text)
        if not rendered.startswith(before):
            return None
        shown = template.encode(rendered[len(before) :])
        if shown[:1] == [template.close] and said.completion.token_ids[-1:] == [template.close]:
            shown = shown[1:]
        return Prompt(parent=said, shown=shown, rendered=rendered, messages=messages, key=key)

    # ---- answers

    def said(
        self,
        prompt: Prompt,
        completion: Completion,
        *,
        answer: Message | None,
        trained: bool,
        began: float,
        generate_s: float,
    ) -> Said:
        """Record an answer, which the client knows as the message `answer`."""
        if not len(completion.token_ids) == len(completion.logprobs) == len(completion.versions):
            raise EngineAnswerError(
                f"the engine gave {len(completion.token_ids)} tokens, {len(completion.logprobs)} log-probabilities and "
                f"{len(completion.versions)} versions: one of each per token is needed"
            )
        said = Said(
            number=len(self.turns),
            prompt=prompt,
            completion=completion,
            text=self._template.decode(completion.token_ids),
            trained=trained,
            began=began,
            generate_s=generate_s,
        )
        self.turns.append(said)
        if answer is not None:
            self._answers.setdefault(_key(prompt.key, answer), []).append(said)
        return said

    # ---- the way out

    def leaves(self) -> list[Said]:
        """The last turns of all conversations."""
        gone_on = {turn.prompt.parent for turn in self.turns}
        return [turn for turn in self.turns if turn not in gone_on]

    def trained(self, choice: Choice) -> Said | None:
        """The last turn of the conversation to train on."""
        leaves = self.leaves()
        if choice == "last":
            return leaves[-1] if leaves else None
        return max(leaves, key=lambda leaf: (_num_said(leaf), leaf.number), default=None)

    def trajectory(self, facts: "EpisodeFacts", *, reward: float, choice: Choice) -> Trajectory:
        """The record of the episode. Its reward is given to the last turn."""
        leaf = self.trained(choice)
        path = leaf.path() if leaf else []
        columns, turns = _columns(path), list(_turns(path, ended=facts.ended))
        if turns:
            turns[-1] = msgspec.structs.replace(turns[-1], reward=reward)
        others = [_branch(other.path(), path, ended=facts.ended) for other in self.leaves() if other is not leaf]
        extra = dict(facts.extra)
        if others:
            extra["branches"] = msgspec.to_builtins(others)
        said = [version for turn in path for version in turn.completion.versions]
        return Trajectory(
            id=facts.id,
            group=facts.group,
            domain=facts.domain,
            seed=facts.seed,
            status=facts.status,
            producer=facts.producer,
            created=time.time(),
            start_version=min([facts.start_version, *said]),
            end_version=said[-1] if said else facts.start_version,
            turns=turns,
            reset_s=max(0.0, path[0].began - facts.began) if path else 0.0,
            extra=extra,
            **columns,
        )


class EpisodeFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What the episode itself knows of its record."""

    id: str
    group: str
    domain: str
    seed: int
    status: EpisodeStatus
    producer: str
    start_version: int
    began: float
    """When its program was started, and when it ended: `reset_s` is the time until it asked for the first time."""
    ended: float
    extra: dict[str, Any] = {}


def branches_of(trajectory: Trajectory) -> list[Trajectory]:
    """The conversations of the episode that were not trained; `ID~1` is the first."""
    listed = msgspec.convert(trajectory.extra.get("branches", []), list[Branch])
    return [_whole(trajectory, branch, number=number) for number, branch in enumerate(listed, start=1)]


def _whole(trajectory: Trajectory, branch: Branch, *, number: int) -> Trajectory:
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


def _branch(path: list[Said], trained: list[Said], *, ended: float) -> Branch:
    num_common = sum(1 for mine, theirs in zip(path, trained, strict=False) if mine is theirs)
    common = sum(_num_tokens(turn) for turn in path[:num_common])
    if num_common < len(path) and num_common < len(trained):
        common += _num_alike(path[num_common].prompt.shown, trained[num_common].prompt.shown)
    own = {name: column[common:].tolist() for name, column in _columns(path).items()}
    turns = [turn for turn in _turns(path, ended=ended) if turn.start >= common]
    return Branch(shares=common, turns=turns, **own)


def _num_alike(mine: list[int], theirs: list[int]) -> int:
    return next((n for n, (a, b) in enumerate(zip(mine, theirs, strict=False)) if a != b), min(len(mine), len(theirs)))


def _columns(path: list[Said]) -> dict[str, Any]:
    """The per-token columns of a conversation."""
    ids: list[int] = []
    logprobs: list[float] = []
    versions: list[int] = []
    mask: list[bool] = []
    for turn in path:
        num_shown, said = len(turn.prompt.shown), turn.completion
        ids += [*turn.prompt.shown, *said.token_ids]
        logprobs += [*([0.0] * num_shown), *said.logprobs]
        versions += [*([0] * num_shown), *said.versions]
        mask += [*([False] * num_shown), *([turn.trained] * len(said.token_ids))]
    return {
        "token_ids": np.array(ids, np.int32),
        "logprobs": np.array(logprobs, np.float32),
        "versions": np.array(versions, np.int32),
        "loss_mask": np.array(mask, np.bool_),
    }


def _turns(path: list[Said], *, ended: float) -> Iterator[Turn]:
    """What the program did between an answer and its next question is the step of that turn."""
    place = 0
    asked_next = [*(turn.began for turn in path[1:]), ended]
    for turn, then in zip(path, asked_next, strict=False):
        start = place + len(turn.prompt.shown)
        place = start + len(turn.completion.token_ids)
        prefilled = turn.completion.remote_prefill
        step_s = max(0.0, then - turn.began - turn.generate_s)
        yield Turn(start=start, end=place, generate_s=turn.generate_s, step_s=step_s, remote_prefill=prefilled)


def _num_tokens(turn: Said) -> int:
    return len(turn.prompt.shown) + len(turn.completion.token_ids)


def _num_said(leaf: Said) -> int:
    return sum(len(turn.completion.token_ids) for turn in leaf.path() if turn.trained)


def _keys(messages: Sequence[Message]) -> Iterator[bytes]:
    """For each message: what stands for the conversation up to it."""
    key = b""
    for message in messages:
        key = _key(key, message)
        yield key


def _key(before: bytes, message: Message) -> bytes:
    return hashlib.blake2b(before + msgspec.json.encode(message, order="deterministic"), digest_size=16).digest()
