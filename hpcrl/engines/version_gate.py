"""First turns that wait until an engine has the version of the weights that they need.

    VersionGate              the gate of one engine
    make_aborted_completion  the answer of a turn that was aborted there
    MAX_VERSION_WAIT_S       constant

When the trainer has made a version, env workers start episodes at once, and engines load it at the same time. An
episode whose first tokens were still of the old version would be too old when its turn in training comes, and training
would wait for its end.
"""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable

from hpcrl.engines.base import Completion, CompletionChunk, GenerateRequest, convert_to_chunk

MAX_VERSION_WAIT_S = 300.0
"""The time after which a turn starts with whatever version there is: an engine that cannot load one continues.

Half a terabyte is on its way for 20 s over fast links and for minutes through files. What starts with an older version
meanwhile is too old once it could be trained on.
"""


class VersionGate:
    """The gate of one engine, which opens for a version once that is loaded."""

    def __init__(self, version: int) -> None:
        self._version = version
        self._waiting: dict[asyncio.Future[bool], GenerateRequest] = {}
        """Turns that wait now; the result is whether they may start."""

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def open_for(self, version: int) -> None:
        """Let turns pass that need this version, or an older one."""
        self._version = version
        self._end_waits(lambda request: request.min_version <= version, may_start=True)

    def abort(self, request_id: str) -> None:
        """End the wait of a turn, if it is here; it is not to start."""
        self._end_waits(lambda request: request.request_id == request_id, may_start=False)

    async def pass_through(self, request: GenerateRequest) -> bool:
        """Wait until the engine has a turn's version, MAX_VERSION_WAIT_S at most; return False if it was aborted."""
        if request.min_version <= self._version:
            return True
        may_start: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._waiting[may_start] = request
        try:
            async with asyncio.timeout(MAX_VERSION_WAIT_S):
                return await may_start
        except TimeoutError:
            return True
        finally:
            del self._waiting[may_start]

    async def stream(
        self, request: GenerateRequest, open_stream: Callable[[GenerateRequest], AsyncGenerator[CompletionChunk, None]]
    ) -> AsyncGenerator[CompletionChunk, None]:
        """Wait like `pass_through`, then yield the chunks of the turn."""
        if not await self.pass_through(request):
            yield convert_to_chunk(make_aborted_completion())
            return
        async with contextlib.aclosing(open_stream(request)) as chunks:
            async for chunk in chunks:
                yield chunk

    def _end_waits(self, is_over: Callable[[GenerateRequest], bool], *, may_start: bool) -> None:
        for waiting, request in self._waiting.items():
            if is_over(request) and not waiting.done():
                waiting.set_result(may_start)


def make_aborted_completion() -> Completion:
    """Return the answer of a turn that was aborted before it started."""
    return Completion(token_ids=[], logprobs=[], versions=[], finish_reason="aborted")
