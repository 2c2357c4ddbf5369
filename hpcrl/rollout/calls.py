"""One call of an agent program being answered: all of its choices, whole or piece by piece, each recorded.

Call      a request, its prompt and the form of its answers
merged    the chunks of all choices as they come
all_of    what several do at once; if one fails the others are ended
"""

import asyncio
import contextlib
import secrets
from collections.abc import AsyncGenerator
from typing import Any

from hpcrl.engines.base import GenerateRequest
from hpcrl.engines.template import Template
from hpcrl.rollout.answering import Draft, pieces
from hpcrl.rollout.answers import Form, answer_message, head, usage
from hpcrl.rollout.episode import now
from hpcrl.rollout.openai_api import ChatRequest, TextRequest, plain_messages
from hpcrl.rollout.recording import Prompt
from hpcrl.rollout.saying import Policy, say
from hpcrl.rollout.session import Session


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
