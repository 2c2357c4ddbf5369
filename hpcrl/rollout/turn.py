"""Generate one turn to its end, even if engines interrupt it: the next one continues from the tokens so far.

TurnGenerator       a protocol for whatever generates: a Router, or an engine in the same process
StreamingGenerator  one that can also stream a turn
generate_turn       generates a turn as a whole
stream_turn         generates a turn chunk by chunk
"""

import contextlib
from collections.abc import AsyncGenerator
from typing import Protocol

import msgspec

from hpcrl.engines.base import Completion, CompletionChunk, GenerateRequest, convert_to_chunk, join_chunks
from hpcrl.errors import EngineError, EngineRequestError
from hpcrl.rollout.tasks import stable_hash
from hpcrl.spool.ids import make_request_id
from hpcrl.spool.routed_experts import find_span_end

MAX_INTERRUPTIONS = 8
"""The number of times that one turn is continued after an engine interrupted it."""


class TurnGenerator(Protocol):
    """A protocol for whatever generates a turn; when the caller is cancelled, so is its request."""

    async def generate(self, request: GenerateRequest) -> Completion: ...


class StreamingGenerator(TurnGenerator, Protocol):
    """A generator that can also stream a turn while it is generated."""

    def stream(self, request: GenerateRequest) -> AsyncGenerator[CompletionChunk, None]: ...


async def generate_turn(policy: TurnGenerator, request: GenerateRequest) -> Completion:
    """Generate the whole turn; raise EngineError if no engine can. Cancelling the call also ends the request."""
    chunks: list[CompletionChunk] = []
    for attempt in range(MAX_INTERRUPTIONS + 1):
        completion = await policy.generate(_remaining_request(request, chunks, attempt=attempt))
        if completion.finish_reason != "aborted" and not chunks:
            return completion
        chunks.append(convert_to_chunk(completion))
        if completion.finish_reason != "aborted" or _count_tokens(chunks) >= request.max_new_tokens:
            return join_chunks(chunks)
    raise _interruption_error(request)


async def stream_turn(policy: StreamingGenerator, request: GenerateRequest) -> AsyncGenerator[CompletionChunk, None]:
    """Stream the turn; the last chunk has a finish_reason. An engine lost on the way counts as an interruption."""
    chunks: list[CompletionChunk] = []
    for attempt in range(MAX_INTERRUPTIONS + 1):
        num_before = len(chunks)
        try:
            async with contextlib.aclosing(
                policy.stream(_remaining_request(request, chunks, attempt=attempt))
            ) as stream:
                async for chunk in stream:
                    chunks.append(chunk)
                    is_last = (
                        chunk.finish_reason in ("stop", "length") or _count_tokens(chunks) >= request.max_new_tokens
                    )
                    yield chunk if is_last else msgspec.structs.replace(chunk, finish_reason=None)
                    if is_last:
                        return
        except EngineRequestError:
            raise
        except EngineError:
            if len(chunks) == num_before:
                raise
    raise _interruption_error(request)


def _remaining_request(request: GenerateRequest, chunks: list[CompletionChunk], *, attempt: int) -> GenerateRequest:
    """Return the request for what is still to be generated."""
    generated = [token for chunk in chunks for token in chunk.token_ids]
    return msgspec.structs.replace(
        request,
        request_id=make_request_id(request.request_id, attempt),
        token_ids=[*request.token_ids, *generated] if generated else request.token_ids,
        max_new_tokens=request.max_new_tokens - len(generated),
        seed=stable_hash(request.seed, attempt, bits=63),
        num_answered=request.num_answered + len(generated),
        experts_from=find_span_end([span for chunk in chunks for span in chunk.experts], request.experts_from),
    )


def _count_tokens(chunks: list[CompletionChunk]) -> int:
    return sum(len(chunk.token_ids) for chunk in chunks)


def _interruption_error(request: GenerateRequest) -> EngineError:
    return EngineError(
        f"{request.request_id}: engines interrupted this turn {MAX_INTERRUPTIONS + 1} times: see their events"
    )
