"""Generate the answer to one call of an agent program: all of its choices, whole or streamed, each recorded.

CompletionCall     a request with its prompt and the form of its answers
merge_choices      streams the chunks of all choices as they arrive
gather_or_cancel   awaits several calls; if one fails, the others are cancelled
PartialAnswer      one choice so far: turns token ids into text, cut at the client's stop strings
stream_answer      generates a turn into a PartialAnswer; closing it ends the request in the engine

Text that may be the start of a stop string is withheld until that is certain.
"""

import asyncio
import contextlib
import secrets
from collections.abc import AsyncGenerator, Callable, Collection, Sequence
from functools import cached_property
from typing import Any

import msgspec

from hpcrl.engines.base import Completion, CompletionChunk, GenerateRequest, convert_to_chunk, join_chunks
from hpcrl.models.chat_template import ChatTemplate
from hpcrl.rollout.agents.recording import TurnPrompt
from hpcrl.rollout.agents.requests import ChatRequest, TextRequest, normalise_messages
from hpcrl.rollout.agents.responses import AnswerForm, extract_message, make_header, make_usage
from hpcrl.rollout.agents.session import ProgramSession
from hpcrl.rollout.episode import loop_time
from hpcrl.rollout.turn import StreamingGenerator, generate_turn, stream_turn


class PartialAnswer:
    """One choice of an answer while it is generated."""

    def __init__(self, template: ChatTemplate, *, stops: Sequence[str], hidden_ids: Collection[int]) -> None:
        self.text = ""
        """The text of the answer so far that the client may see."""
        self.finish_reason: str | None = None
        self._template = template
        self.stops = stops
        self._hidden_ids = frozenset(hidden_ids)
        self.chunks: list[CompletionChunk] = []
        self._decoded = ""
        self._num_searched = 0

    @cached_property
    def _decode_next(self) -> Callable[[Sequence[int]], str]:
        return self._template.make_decoder()

    @property
    def completion(self) -> Completion:
        """The generated tokens, up to and including the one that completed a stop."""
        completion = join_chunks(self.chunks)
        finish = "stop" if self.finish_reason == "stop" else completion.finish_reason
        return msgspec.structs.replace(completion, finish_reason=finish)

    def add_completion(self, completion: Completion) -> None:
        """Add a whole answer that needs no search for stops, and decode it at once."""
        self.chunks.append(convert_to_chunk(completion))
        self.text = self._decoded = self._template.decode(self._visible_ids(completion.token_ids))
        self.finish_reason = "stop" if completion.finish_reason == "stop" else "length"

    def add_chunk(self, chunk: CompletionChunk) -> CompletionChunk:
        """Add the next chunk, return it cut at the first stop, and extend `text` by what is certain now."""
        for position, token in enumerate(chunk.token_ids):
            self._decoded += self._decode_next(self._visible_ids([token]))
            if (end := self._find_stop()) is not None:
                chunk = _cut_chunk(chunk, position + 1)
                self.chunks.append(chunk)
                self.text, self.finish_reason = self._decoded[:end], "stop"
                return chunk
        self.chunks.append(chunk)
        if chunk.finish_reason is not None:
            self.finish_reason = "stop" if chunk.finish_reason == "stop" else "length"
            self._finish_text()
        else:
            self.text = self._decoded[: len(self._decoded) - self._num_withheld()]
        return chunk

    def _finish_text(self) -> None:
        """Decode the whole text, which may end in an incomplete character, as a decoder of all tokens would."""
        decoded = self._template.decode(self._visible_ids(join_chunks(self.chunks).token_ids))
        self.text = self._decoded = decoded if decoded.startswith(self._decoded) else self._decoded
        if (end := self._find_stop()) is not None:
            self.text, self.finish_reason = self._decoded[:end], "stop"

    def _visible_ids(self, token_ids: Sequence[int]) -> list[int]:
        return [token for token in token_ids if token not in self._hidden_ids]

    def _find_stop(self) -> int | None:
        """Return where the first stop starts, or None if none was generated."""
        found = [self._decoded.find(stop, max(0, self._num_searched - len(stop))) for stop in self.stops]
        self._num_searched = len(self._decoded)
        return min((position for position in found if position >= 0), default=None)

    def _num_withheld(self) -> int:
        return max((_overlap_length(self._decoded, stop) for stop in self.stops), default=0)


async def stream_answer(
    policy: StreamingGenerator, request: GenerateRequest, answer: PartialAnswer
) -> AsyncGenerator[CompletionChunk, None]:
    """Generate the turn into `answer`; yield the chunks that belong to the answer."""
    async with contextlib.aclosing(stream_turn(policy, request)) as chunks:
        async for chunk in chunks:
            yield answer.add_chunk(chunk)
            if answer.finish_reason is not None:
                return


def _overlap_length(text: str, stop: str) -> int:
    """Return the length of the longest end of the text that may be the start of the stop."""
    return next((size for size in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:size])), 0)


def _cut_chunk(chunk: CompletionChunk, num: int) -> CompletionChunk:
    """Return the first `num` tokens of a chunk, as the last chunk of a stopped answer."""
    return msgspec.structs.replace(
        chunk,
        token_ids=chunk.token_ids[:num],
        logprobs=chunk.logprobs[:num],
        versions=chunk.versions[:num],
        top=chunk.top[:num],
        finish_reason="stop",
    )


class CompletionCall:
    """One request being answered, with all of its choices."""

    def __init__(
        self,
        *,
        session: ProgramSession,
        api_request: ChatRequest | TextRequest,
        prompt: TurnPrompt,
        form: AnswerForm,
        policy: StreamingGenerator,
        template: ChatTemplate,
    ) -> None:
        self.session, self.api_request = session, api_request
        self._form = form
        self._prompt = prompt
        self._policy, self._template = policy, template
        self._requests = session.make_requests(api_request, prompt, stop_token_ids=template.stop_token_ids)
        self._num_generated = 0
        self.name = f"{form.kind.partition('.')[0]}-{secrets.token_hex(12)}"
        self.header = make_header(form.kind, name=self.name, model=api_request.model)

    @property
    def num_choices(self) -> int:
        return len(self._requests)

    @property
    def chunk_kind(self) -> str:
        return f"{self._form.kind}.chunk" if isinstance(self.api_request, ChatRequest) else self._form.kind

    def usage(self) -> dict[str, Any]:
        return make_usage(num_prompt=len(self._requests[0].token_ids), num_generated=self._num_generated)

    async def complete(self, index: int) -> dict[str, Any]:
        """Generate one choice as a whole and record it."""
        request, answer, started_at = self._requests[index], self._new_answer(), loop_time()
        if answer.stops:
            async for _ in stream_answer(self._policy, request, answer):
                pass
        else:
            answer.add_completion(await generate_turn(self._policy, request))
        return self._record_choice(request, index, answer, started_at=started_at)

    async def stream(self, index: int) -> AsyncGenerator[dict[str, Any], None]:
        """Stream the chunks of one choice, which is recorded before its last chunk is sent."""
        request, answer, started_at, num_sent = self._requests[index], self._new_answer(), loop_time(), 0
        opening_chunks = self._form.opening_chunks(index)
        async with contextlib.aclosing(stream_answer(self._policy, request, answer)) as parts:
            async for part in parts:
                for chunk in opening_chunks:
                    yield chunk
                opening_chunks = []
                if answer.finish_reason is None:
                    yield self._form.chunk(index, text=answer.text, num_sent=num_sent, part=part)
                    num_sent = max(num_sent, self._form.stable_length(answer.text))
                    continue
                self._record_choice(request, index, answer, started_at=started_at)
                for chunk in self._form.closing_chunks(
                    index,
                    text=answer.text,
                    num_sent=num_sent,
                    finish_reason=answer.finish_reason,
                    part=part,
                    name=self._choice_id(index),
                ):
                    yield chunk

    def _record_choice(
        self, request: GenerateRequest, index: int, partial: PartialAnswer, *, started_at: float
    ) -> dict[str, Any]:
        completion = partial.completion
        choice = self._form.choice(
            index,
            text=partial.text,
            finish_reason=partial.finish_reason or "length",
            parts=partial.chunks,
            name=self._choice_id(index),
        )
        message = extract_message(choice)
        self.session.recording.record_answer(
            self._prompt,
            completion,
            answer=normalise_messages([message])[0] if message else None,
            is_trained=self.session.can_train(request),
            started_at=started_at,
            generate_s=loop_time() - started_at,
        )
        self.session.fault = ""
        self._num_generated += len(completion.token_ids)
        return choice

    def _new_answer(self) -> PartialAnswer:
        return PartialAnswer(
            self._template, stops=self.api_request.stops, hidden_ids=self.api_request.stop_token_ids or ()
        )

    def _choice_id(self, index: int) -> str:
        return f"{self.name.rpartition('-')[2]}_{index}"


async def merge_choices(call: CompletionCall) -> AsyncGenerator[dict[str, Any], None]:
    """Stream the chunks of all choices as they arrive."""
    if call.num_choices == 1:
        async with contextlib.aclosing(call.stream(0)) as chunks:
            async for chunk in chunks:
                yield chunk
        return
    queue: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()

    async def fill(index: int) -> None:
        async with contextlib.aclosing(call.stream(index)) as chunks:
            async for chunk in chunks:
                queue.put_nowait(chunk)

    async def fill_all() -> None:
        try:
            await gather_or_cancel([fill(index) for index in range(call.num_choices)])
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


async def gather_or_cancel(calls: list[Any]) -> list[Any]:
    """Return the results of all calls; if one fails, cancel the others."""
    if len(calls) == 1:
        return [await calls[0]]
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
