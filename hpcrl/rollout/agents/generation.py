"""Generate the answer to one call of an agent program: all of its choices, whole or streamed, each recorded.

CompletionCall     a request with its prompt and the form of its answers
merge_choices      streams the parts of all choices as they arrive
gather_or_cancel   awaits several calls; if one fails, the others are cancelled
PartialAnswer      one choice so far: turns token ids into text, cut at the client's stop strings
stream_answer      generates a turn into a PartialAnswer; closing it ends the request in the engine

Text that may be the start of a stop string is withheld until that is certain.
"""

import asyncio
import contextlib
import secrets
from collections.abc import AsyncGenerator, Callable, Collection, Mapping, Sequence
from functools import cached_property
from types import MappingProxyType
from typing import Any

import msgspec

from hpcrl.engines.base import (
    Completion,
    CompletionChunk,
    GenerateRequest,
    OutputStructure,
    convert_to_chunk,
    join_chunks,
)
from hpcrl.models.chat_template import ChatTemplate
from hpcrl.rollout.agents.answer_parser import AnswerParser
from hpcrl.rollout.agents.answers import (
    AnswerDelta,
    ModelAnswer,
    ModelPiece,
    NamedCall,
    TokenUsage,
    join_pieces,
    name_calls,
)
from hpcrl.rollout.agents.recording import TurnPrompt
from hpcrl.rollout.agents.requests import ModelCall
from hpcrl.rollout.agents.session import ProgramSession
from hpcrl.rollout.agents.structures import find_free_tokens, list_free_bounds
from hpcrl.rollout.agents.tool_parsers import TextReader
from hpcrl.rollout.episode import loop_time
from hpcrl.rollout.turn import StreamingGenerator, generate_turn, stream_turn
from hpcrl.spool.routed_experts import cut_spans


class PartialAnswer:
    """One choice of an answer while it is generated."""

    def __init__(
        self,
        template: ChatTemplate,
        *,
        stops: Sequence[str],
        hidden_ids: Collection[int],
        mark_texts: Mapping[int, str] = MappingProxyType({}),
    ) -> None:
        self.text = ""
        """The text of the answer so far that the client may see."""
        self.finish_reason: str | None = None
        self.stop_text: str | None = None
        """The stop that ended the answer."""
        self._template = template
        self._mark_texts = mark_texts
        """The special tokens that are part of the text."""
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
        if self.finish_reason != "stop" or completion.finish_reason == "stop":
            return completion
        return msgspec.structs.replace(completion, finish_reason="stop")

    @property
    def hidden_text(self) -> str:
        """The end of the generated text that the client does not receive: a stop, and what its last token has besides.

        A token at which the client asked to stop is hidden, too; special tokens have no text here.
        """
        last = next((chunk.token_ids[-1:] for chunk in reversed(self.chunks) if chunk.token_ids), [])
        hidden = self._template.decode(last) if self._hidden_ids.intersection(last) else ""
        return self._decoded[len(self.text) :] + hidden

    def add_completion(self, completion: Completion) -> None:
        """Add a whole answer that needs no search for stops, and decode it at once."""
        self.chunks.append(convert_to_chunk(completion))
        self.text = self._decoded = self._decode_all(completion.token_ids)
        self.finish_reason = "stop" if completion.finish_reason == "stop" else "length"

    def add_chunk(self, chunk: CompletionChunk) -> CompletionChunk:
        """Add the next chunk, return it cut at the first stop, and extend `text` by what is certain now."""
        for position, token in enumerate(chunk.token_ids):
            self._decoded += self._mark_texts.get(token) or self._decode_next(self._visible_ids([token]))
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
        decoded = self._decode_all(join_chunks(self.chunks).token_ids)
        self.text = self._decoded = decoded if decoded.startswith(self._decoded) else self._decoded
        if (end := self._find_stop()) is not None:
            self.text, self.finish_reason = self._decoded[:end], "stop"

    def _decode_all(self, token_ids: Sequence[int]) -> str:
        texts, start = [], 0
        for position, token in enumerate(token_ids) if self._mark_texts else ():
            if token in self._mark_texts:
                texts += [self._template.decode(self._visible_ids(token_ids[start:position])), self._mark_texts[token]]
                start = position + 1
        return "".join([*texts, self._template.decode(self._visible_ids(token_ids[start:]))])

    def _visible_ids(self, token_ids: Sequence[int]) -> list[int]:
        return [token for token in token_ids if token not in self._hidden_ids] if self._hidden_ids else list(token_ids)

    def _find_stop(self) -> int | None:
        """Return where the first stop starts, or None if none was generated."""
        found = [(self._decoded.find(stop, max(0, self._num_searched - len(stop))), stop) for stop in self.stops]
        self._num_searched = len(self._decoded)
        end, stop = min(((position, stop) for position, stop in found if position >= 0), default=(None, None))
        self.stop_text = stop
        return end

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
        experts=cut_spans(chunk.experts, len(chunk.token_ids) - num),
        finish_reason="stop",
    )


class CompletionCall:
    """One request being answered, with all of its choices."""

    def __init__(
        self,
        *,
        session: ProgramSession,
        call: ModelCall,
        prompt: TurnPrompt,
        structure: OutputStructure | None,
        policy: StreamingGenerator,
        template: ChatTemplate,
        parser: AnswerParser,
        mark_texts: Mapping[int, str],
    ) -> None:
        self.session = session
        self._call, self._prompt = call, prompt
        self._policy, self._template, self._parser, self._mark_texts = policy, template, parser, mark_texts
        self._requests = session.make_requests(
            call,
            prompt,
            stop_token_ids=template.stop_token_ids,
            structure=structure,
        )
        self._num_generated = 0
        self._name = secrets.token_hex(12)

    @property
    def num_choices(self) -> int:
        return len(self._requests)

    @property
    def usage(self) -> TokenUsage:
        """The token counts so far."""
        return TokenUsage(num_prompt=len(self._requests[0].token_ids), num_generated=self._num_generated)

    async def complete(self, index: int) -> ModelAnswer:
        """Generate one choice as a whole and record it."""
        request, partial, started_at = self._requests[index], self._new_answer(), loop_time()
        try:
            if partial.stops:
                async for _ in stream_answer(self._policy, request, partial):
                    pass
            else:
                partial.add_completion(await generate_turn(self._policy, request))
        finally:
            reader = self._new_reader()
            found = [*reader.feed(partial.text), *reader.finish()]
            pieces = name_calls(found, choice_id=self._choice_id(index), num_before=0)
            answer = _make_answer(index, partial, pieces)
            self._record_answer(request, partial, answer, started_at=started_at)
        return answer

    async def stream(self, index: int) -> AsyncGenerator[AnswerDelta | ModelAnswer, None]:
        """Stream the parts of one choice, which is recorded before its last part is sent, and then the whole.

        A choice that the client leaves early, or that fails on the way, is recorded as far as it was generated.
        """
        request, partial, started_at = self._requests[index], self._new_answer(), loop_time()
        reader, num_read, pieces, num_calls = self._new_reader(), 0, list[ModelPiece](), 0
        answer: ModelAnswer | None = None
        try:
            async with contextlib.aclosing(stream_answer(self._policy, request, partial)) as parts:
                async for part in parts:
                    found = reader.feed(partial.text[num_read:])
                    num_read = len(partial.text)
                    found += reader.finish() if partial.finish_reason is not None else []
                    named = name_calls(found, choice_id=self._choice_id(index), num_before=num_calls)
                    num_calls += sum(isinstance(piece, NamedCall) for piece in named)
                    pieces += named
                    if partial.finish_reason is not None:
                        answer = _make_answer(index, partial, pieces)
                        self._record_answer(request, partial, answer, started_at=started_at)
                    yield AnswerDelta(index=index, pieces=named, part=part)
        finally:
            if answer is None:
                self._record_answer(request, partial, _make_answer(index, partial, pieces), started_at=started_at)
        assert answer is not None, "the last part has a finish reason"
        yield answer

    def _record_answer(
        self, request: GenerateRequest, partial: PartialAnswer, answer: ModelAnswer, *, started_at: float
    ) -> None:
        """Record what was generated, if anything was."""
        if not partial.chunks:
            return
        completion = partial.completion
        self.session.recording.record_answer(
            self._prompt,
            completion,
            answer=answer.message if self._call.text is None else None,
            is_trained=self.session.can_train(request),
            hidden_text=partial.hidden_text,
            find_free=self._make_free_finder(request.structure, completion),
            started_at=started_at,
            generate_s=loop_time() - started_at,
        )
        self.session.note_answer()
        self._num_generated += len(completion.token_ids)

    def _make_free_finder(
        self, structure: OutputStructure | None, completion: Completion
    ) -> Callable[[], list[bool]] | None:
        """Make what finds the tokens that the structure left free: later, as that decodes each token by itself."""
        if structure is None:
            return None
        template, mark_texts, bounds = self._template, self._mark_texts, list_free_bounds(structure.parts)

        def find_free() -> list[bool]:
            decode_next = template.make_decoder()
            texts = [mark_texts.get(token) or decode_next([token]) for token in completion.token_ids]
            return find_free_tokens(bounds, texts)

        return find_free

    def _new_reader(self) -> TextReader:
        return self._parser.make_reader(self._call, self._prompt)

    def _new_answer(self) -> PartialAnswer:
        call = self._call
        return PartialAnswer(
            self._template,
            stops=call.stops,
            hidden_ids=call.stop_token_ids,
            mark_texts=self._mark_texts if call.text is None else {},
        )

    def _choice_id(self, index: int) -> str:
        return f"{self._name}/{index}"


def _make_answer(index: int, partial: PartialAnswer, pieces: Sequence[ModelPiece]) -> ModelAnswer:
    return ModelAnswer(
        index=index,
        pieces=join_pieces(pieces),
        finish_reason=partial.finish_reason or "length",
        stop_text=partial.stop_text,
        parts=partial.chunks,
    )


async def merge_choices(call: CompletionCall) -> AsyncGenerator[AnswerDelta | ModelAnswer, None]:
    """Stream the parts of all choices as they arrive."""
    if call.num_choices == 1:
        async with contextlib.aclosing(call.stream(0)) as chunks:
            async for chunk in chunks:
                yield chunk
        return
    queue: asyncio.Queue[AnswerDelta | ModelAnswer | None] = asyncio.Queue()

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
