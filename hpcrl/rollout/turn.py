"""One turn of the model said to its end, though engines give it up half said: what was said goes on elsewhere.

Speaker     whatever generates: a Router, or an engine in the same process
Policy      one that can also tell a turn while it is said
say, tell   the turn as a whole, and piece by piece
"""

import contextlib
from collections.abc import AsyncGenerator
from typing import Protocol

import msgspec

from hpcrl.engines.base import Completion, GenerateRequest, Part, as_part, joined
from hpcrl.errors import EngineError
from hpcrl.rollout.tasks import stable_hash
from hpcrl.spool.ids import make_request_id

MAX_INTERRUPTIONS = 8
"""How often one turn is continued after an engine gave it up half said."""


class Speaker(Protocol):
    """Whatever generates a turn; a caller that is cancelled takes its request with it."""

    async def generate(self, request: GenerateRequest) -> Completion: ...


class Policy(Speaker, Protocol):
    """One that can also tell a turn while it is said."""

    def stream(self, request: GenerateRequest) -> AsyncGenerator[Part, None]: ...


async def say(policy: Speaker, request: GenerateRequest) -> Completion:
    """The whole turn; EngineError if no engine can say it. Being cancelled hangs up, which ends the request there."""
    said: list[Part] = []
    for part in range(MAX_INTERRUPTIONS + 1):
        completion = await policy.generate(_rest(request, said, part=part))
        if completion.finish_reason != "aborted" and not said:
            return completion
        said.append(as_part(completion))
        if completion.finish_reason != "aborted" or _num(said) >= request.max_new_tokens:
            return joined(said)
    raise _gave_up(request)


async def tell(policy: Policy, request: GenerateRequest) -> AsyncGenerator[Part, None]:
    """The turn in pieces, the last of which has a finish_reason. An engine lost on the way is an interruption."""
    said: list[Part] = []
    for part in range(MAX_INTERRUPTIONS + 1):
        begun = len(said)
        try:
            async with contextlib.aclosing(policy.stream(_rest(request, said, part=part))) as pieces:
                async for piece in pieces:
                    said.append(piece)
                    over = piece.finish_reason in ("stop", "length") or _num(said) >= request.max_new_tokens
                    yield piece if over else msgspec.structs.replace(piece, finish_reason=None)
                    if over:
                        return
        except EngineError:
            if len(said) == begun:
                raise
    raise _gave_up(request)


def _rest(request: GenerateRequest, said: list[Part], *, part: int) -> GenerateRequest:
    """What is still to be said."""
    words = [token for piece in said for token in piece.token_ids]
    return msgspec.structs.replace(
        request,
        request_id=make_request_id(request.request_id, part),
        token_ids=[*request.token_ids, *words],
        max_new_tokens=request.max_new_tokens - len(words),
        seed=stable_hash(request.seed, part, bits=63),
    )


def _num(said: list[Part]) -> int:
    return sum(len(piece.token_ids) for piece in said)


def _gave_up(request: GenerateRequest) -> EngineError:
    return EngineError(
        f"{request.request_id}: engines gave this turn up {MAX_INTERRUPTIONS + 1} times: see their events"
    )
