"""The model as an env host's episodes ask it: through the router, and counted; turns of evaluations are not."""

import contextlib
from collections.abc import AsyncGenerator, Callable

from hpcrl.engines.base import Completion, GenerateRequest, Part
from hpcrl.rollout.routing.trajectories import whose
from hpcrl.rollout.turn import Policy
from hpcrl.spool.ids import is_held_out


class Counted:
    """A policy, and what it has said for training so far."""

    def __init__(self, policy: Policy, *, acted: Callable[[str, Completion], None]) -> None:
        """`acted(episode, completion)` is told of every whole turn of training."""
        self._policy = policy
        self._acted = acted
        self.num_turns = 0
        self.num_tokens = 0
        self.num_remote_prefills = 0

    async def generate(self, request: GenerateRequest) -> Completion:
        """One turn."""
        whole = whose(request)
        completion = await self._policy.generate(whole)
        if not is_held_out(whole.domain):
            self.num_turns += 1
            self.num_tokens += len(completion.token_ids)
            self.num_remote_prefills += completion.remote_prefill
            self._acted(whole.trajectory, completion)
        return completion

    async def stream(self, request: GenerateRequest) -> AsyncGenerator[Part, None]:
        """The same, told while it is said."""
        whole = whose(request)
        counted = not is_held_out(whole.domain)
        self.num_turns += counted
        async with contextlib.aclosing(self._policy.stream(whole)) as pieces:
            async for piece in pieces:
                self.num_tokens += len(piece.token_ids) * counted
                yield piece
