"""One turn of the model said to its end, though engines give it up half said: what was said goes on elsewhere.

Speaker     whatever generates: a Router, or an engine in the same process
Policy      one that can also tell a turn while it is said
say, tell   the turn as a whole, and piece by piece
"""

import contextlib
from collections.abc import AsyncGenerator
from typing import Protocol

import msgspec

from hpcrl.engines.base import Completion, CompletionChunk, GenerateRequest, convert_to_chunk, join_chunks
from hpcrl.errors import EngineError
from hpcrl.rollout.tasks import stable_hash
from hpcrl.spool.ids import make_request_id

MAX_INTERRUPTIONS = 8
"""How often one turn is continued after an engine gave it up half said."""


class TurnGenerator(Protocol):
    """Whatever generates a turn; a caller that is cancelled takes its request with it."""

    async def generate(self, request: GenerateRequest) -> Completion: ...


class StreamingGenerator(TurnGenerator, Protocol):
    """One that can also tell a turn while it is said."""

    def stream(self, request: GenerateRequest) -> AsyncGenerator[CompletionChunk, None]: ...


async def generate_turn(policy: TurnGenerator, request: GenerateRequest) -> Completion:
    """The whole turn; EngineError if no engine can say it. Being cancelled hangs up, which ends the request there."""
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
    """The turn in pieces, the last of which has a finish_reason. An engine lost on the way is an interruption."""
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
        except EngineError:
            if len(chunks) == num_before:
                raise
    raise _interruption_error(request)


def _remaining_request(request: GenerateRequest, chunks: list[CompletionChunk], *, attempt: int) -> GenerateRequest:
    """What is still to be said."""
    generated = [token for chunk in chunks for token in chunk.token_ids]
    return msgspec.structs.replace(
        request,
        request_id=make_request_id(request.request_id, attempt),
        token_ids=[*request.token_ids, *generated],
        max_new_tokens=request.max_new_tokens - len(generated),
        seed=stable_hash(request.seed, attempt, bits=63),
    )


def _count_tokens(chunks: list[CompletionChunk]) -> int:
    return sum(len(chunk.token_ids) for chunk in chunks)


def _interruption_error(request: GenerateRequest) -> EngineError:
    return EngineError(
        f"{request.request_id}: engines gave this turn up {MAX_INTERRUPTIONS + 1} times: see their events"
    )
