"""One call of an agent program being answered: all of its choices, whole or piece by piece, each recorded.

Call      a request, its prompt and the form of its answers
merged    the chunks of all choices as they come
all_of    what several do at once; if one fails the others are ended

An answer in the making: pieces of text that are certain, cut at the texts that a client wants it to stop at.

Draft     takes ids as they come, gives text; what may be the beginning of a stop is held back
pieces    says a turn and gives a Draft its pieces; closing it ends the request in the engine
"""

import asyncio
import contextlib
import secrets
from collections.abc import AsyncGenerator, Callable, Collection, Sequence
from functools import cached_property
from typing import Any

import msgspec

from hpcrl.engines.base import Completion, GenerateRequest, Part, as_part, joined
from hpcrl.models.chat_template import Template
from hpcrl.rollout.agents.recording import Prompt
from hpcrl.rollout.agents.requests import ChatRequest, TextRequest, plain_messages
from hpcrl.rollout.agents.responses import Form, answer_message, head, usage
from hpcrl.rollout.agents.session import Session
from hpcrl.rollout.episode import now
from hpcrl.rollout.turn import Policy, say, tell


class Draft:
    """One choice of an answer."""

    def __init__(self, template: Template, *, stops: Sequence[str], silent_ids: Collection[int]) -> None:
        self.text = ""
        """All that the client is to see of the answer so far."""
        self.finish_reason: str | None = None
        self._template = template
        self.stops = stops
        self._silent_ids = frozenset(silent_ids)
        self.parts: list[Part] = []
        self._spelled = ""
        self._searched = 0

    @cached_property
    def _spell(self) -> Callable[[Sequence[int]], str]:
        return self._template.spell()

    @property
    def completion(self) -> Completion:
        """What was said, up to and with the token that completed a stop."""
        completion = joined(self.parts)
        finish = "stop" if self.finish_reason == "stop" else completion.finish_reason
        return msgspec.structs.replace(completion, finish_reason=finish)

    def take_whole(self, completion: Completion) -> None:
        """A whole answer that nothing has to be looked for in: spelled at once."""
        self.parts.append(as_part(completion))
        self.text = self._spelled = self._template.decode(self._audible(completion.token_ids))
        self.finish_reason = "stop" if completion.finish_reason == "stop" else "length"

    def take(self, part: Part) -> Part:
        """The next piece, cut if a stop was said in it; `text` has grown by what is certain now."""
        for place, token in enumerate(part.token_ids):
            self._spelled += self._spell(self._audible([token]))
            if (end := self._stop_at()) is not None:
                part = _head(part, place + 1)
                self.parts.append(part)
                self.text, self.finish_reason = self._spelled[:end], "stop"
                return part
        self.parts.append(part)
        if part.finish_reason is not None:
            self.finish_reason = "stop" if part.finish_reason == "stop" else "length"
            self._spell_the_end()
        else:
            self.text = self._spelled[: len(self._spelled) - self._held_back()]
        return part

    def _spell_the_end(self) -> None:
        """All of it, also half a character; an answer cut in one is told as a whole decoder would."""
        whole = self._template.decode(self._audible(joined(self.parts).token_ids))
        self.text = self._spelled = whole if whole.startswith(self._spelled) else self._spelled
        if (end := self._stop_at()) is not None:
            self.text, self.finish_reason = self._spelled[:end], "stop"

    def _audible(self, token_ids: Sequence[int]) -> list[int]:
        return [token for token in token_ids if token not in self._silent_ids]

    def _stop_at(self) -> int | None:
        """Where the first stop begins, if one has been said."""
        found = [self._spelled.find(stop, max(0, self._searched - len(stop))) for stop in self.stops]
        self._searched = len(self._spelled)
        return min((place for place in found if place >= 0), default=None)

    def _held_back(self) -> int:
        return max((_overlap(self._spelled, stop) for stop in self.stops), default=0)


async def pieces(policy: Policy, request: GenerateRequest, draft: Draft) -> AsyncGenerator[Part, None]:
    """Say the turn into the draft; gives the pieces that belong to the answer."""
    async with contextlib.aclosing(tell(policy, request)) as told:
        async for part in told:
            yield draft.take(part)
            if draft.finish_reason is not None:
                return


def _overlap(text: str, stop: str) -> int:
    """The length of the longest end of the text that may begin the stop."""
    return next((size for size in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:size])), 0)


def _head(part: Part, num: int) -> Part:
    """The first `num` tokens of a piece, as the last piece of an answer that was stopped."""
    return msgspec.structs.replace(
        part,
        token_ids=part.token_ids[:num],
        logprobs=part.logprobs[:num],
        versions=part.versions[:num],
        top=part.top[:num],
        finish_reason="stop",
    )


class Call:
    """One request being answered, for all of its choices."""

    def __init__(
        self,
        *,
        session: Session,
        asked: ChatRequest | TextRequest,
        prompt: Prompt,
        form: Form,
        policy: Policy,
        template: Template,
    ) -> None:
        self.session, self.asked = session, asked
        self._form = form
        self._prompt = prompt
        self._policy, self._template = policy, template
        self._requests = session.requests(asked, prompt, stop_token_ids=template.stop_token_ids)
        self._num_said = 0
        self.name = f"{form.kind.partition('.')[0]}-{secrets.token_hex(12)}"
        self.head = head(form.kind, name=self.name, model=asked.model)

    @property
    def num_choices(self) -> int:
        return len(self._requests)

    @property
    def chunk_kind(self) -> str:
        return f"{self._form.kind}.chunk" if isinstance(self.asked, ChatRequest) else self._form.kind

    def usage(self) -> dict[str, Any]:
        return usage(num_prompt=len(self._requests[0].token_ids), num_said=self._num_said)

    async def whole(self, index: int) -> dict[str, Any]:
        """One choice, recorded."""
        request, draft, began = self._requests[index], self._draft(), now()
        if draft.stops:
            async for _ in pieces(self._policy, request, draft):
                pass
        else:
            draft.take_whole(await say(self._policy, request))
        return self._recorded(request, index, draft, began=began)

    async def told(self, index: int) -> AsyncGenerator[dict[str, Any], None]:
        """The chunks of one choice, recorded before the last is told."""
        request, draft, began, told = self._requests[index], self._draft(), now(), 0
        opening = self._form.opening(index)
        async with contextlib.aclosing(pieces(self._policy, request, draft)) as parts:
            async for part in parts:
                for chunk in opening:
                    yield chunk
                opening = []
                if draft.finish_reason is None:
                    yield self._form.chunk(index, text=draft.text, told=told, part=part)
                    told = max(told, self._form.certain(draft.text))
                    continue
                self._recorded(request, index, draft, began=began)
                for chunk in self._form.closing(
                    index,
                    text=draft.text,
                    told=told,
                    finish_reason=draft.finish_reason,
                    part=part,
                    name=self._id(index),
                ):
                    yield chunk

    def _recorded(self, request: GenerateRequest, index: int, draft: Draft, *, began: float) -> dict[str, Any]:
        completion = draft.completion
        choice = self._form.choice(
            index,
            text=draft.text,
            finish_reason=draft.finish_reason or "length",
            parts=draft.parts,
            name=self._id(index),
        )
        message = answer_message(choice)
        self.session.recording.said(
            self._prompt,
            completion,
            answer=plain_messages([message])[0] if message else None,
            trained=self.session.may_train(request),
            began=began,
            generate_s=now() - began,
        )
        self.session.fault = ""
        self._num_said += len(completion.token_ids)
        return choice

    def _draft(self) -> Draft:
        return Draft(self._template, stops=self.asked.stops, silent_ids=self.asked.stop_token_ids or ())

    def _id(self, index: int) -> str:
        return f"{self.name.rpartition('-')[2]}_{index}"


async def merged(call: Call) -> AsyncGenerator[dict[str, Any], None]:
    """The chunks of all choices as they come."""
    if call.num_choices == 1:
        async with contextlib.aclosing(call.told(0)) as chunks:
            async for chunk in chunks:
                yield chunk
        return
    queue: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()

    async def fill(index: int) -> None:
        async with contextlib.aclosing(call.told(index)) as chunks:
            async for chunk in chunks:
                queue.put_nowait(chunk)

    async def fill_all() -> None:
        try:
            await all_of([fill(index) for index in range(call.num_choices)])
        finally:
            queue.put_nowait(None)

    filling = asyncio.create_task(fill_all())
    try:
        while (one := await queue.get()) is not None:
            yield one
        await filling
    finally:
        filling.cancel()
        await asyncio.wait({filling})


async def all_of(calls: list[Any]) -> list[Any]:
    """What all of them return; if one fails the others are ended."""
    if len(calls) == 1:
        return [await calls[0]]
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
