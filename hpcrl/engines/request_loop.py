"""The request loop of an engine that generates step by step: rows are queued, stepped, streamed, finished or dropped.

    LoopRequest         a row, as far as the loop uses it
    LoopHooks           the engine's own part: step the batch, drop rows, report whether there is work
    RequestLoop         the loop
    RequestLoop.finish  run a row until it is done; if the caller is cancelled, the row is dropped
    RequestLoop.stream  the same, with chunks as they are generated
    PrepareHook         a coroutine that runs before a row is queued

Everything that changes the batch happens between two steps, in one task. The hooks differ: EmbeddedEngine computes,
SimEngine lets time pass.
"""

import asyncio
import heapq
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from hpcrl.engines.base import CompletionChunk, GenerateRequest
from hpcrl.engines.request_checks import check_request
from hpcrl.errors import EngineError


class LoopRequest(Protocol):
    """A row, as far as the loop uses it."""

    failure: EngineError | None
    """The reason why it ended without an answer."""

    @property
    def is_done(self) -> bool: ...


R = TypeVar("R", bound=LoopRequest)
PrepareHook = Callable[[], Awaitable[None]]
"""Prepare a row before it is queued, such as by fetching its KV."""


@dataclass(frozen=True, kw_only=True)
class LoopHooks(Generic[R]):
    """The operations of an engine that the loop calls."""

    can_step: Callable[[], bool]
    """Return whether there is work."""
    step: Callable[[], Awaitable[Iterable[R]]]
    """Admit waiting rows (`RequestLoop.next_waiting`) and run one step; returns the rows that are done."""
    drop: Callable[[Collection[R]], Awaitable[None]]
    """Remove rows that are not done."""


class RequestLoop(Generic[R]):
    """The requests of one engine, from `start` to `stop`."""

    def __init__(self, hooks: LoopHooks[R]) -> None:
        self.between_steps = asyncio.Lock()
        """Its holder has exclusive use of the batch."""
        self._hooks = hooks
        self._rows: dict[str, R] = {}
        self._futures: dict[R, asyncio.Future[None]] = {}
        self._waiting: list[tuple[int, int, R]] = []
        self._num_queued = 0
        self._to_drop: dict[R, None] = {}
        self._wake_event = asyncio.Event()
        self._step_event = asyncio.Event()
        """Set and replaced after every step, to wake the streams."""
        self._loop_task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._loop_task = asyncio.create_task(self._run(), name="engine steps")

    async def stop(self) -> None:
        assert self._loop_task is not None
        self._loop_task.cancel()
        await asyncio.wait({self._loop_task})
        self._fail_all("the engine was stopped")

    async def wait_until_failed(self) -> None:
        """Wait until the engine fails, and raise the error; its worker exits with it and is restarted."""
        assert self._loop_task is not None
        await asyncio.shield(self._loop_task)

    # ---- requests

    def admit(self, request: GenerateRequest, *, max_new_tokens: int, context_length: int, vocabulary: int) -> None:
        """Raise EngineError, with the reason, unless the request can be served here."""
        if self._loop_task is None or self._loop_task.done():
            raise EngineError("the engine is not running: restart its worker")
        if request.request_id in self._rows:
            raise EngineError(f"request_id {request.request_id!r} is being served already: use a new id for each turn")
        check_request(request, max_new_tokens=max_new_tokens, context_length=context_length, vocabulary=vocabulary)

    async def finish(self, row: R, request: GenerateRequest, *, prepare: PrepareHook | None = None) -> None:
        """Prepare a row, queue it and wait until it is done; raises EngineError if it fails."""
        answer: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._rows[request.request_id], self._futures[row] = row, answer
        try:
            if prepare is not None:
                await prepare()
            if not row.is_done:
                self._num_queued += 1
                heapq.heappush(self._waiting, (request.priority, self._num_queued, row))  # equals keep their order
                self.wake()
            await answer
        finally:
            del self._rows[request.request_id], self._futures[row]
            if not row.is_done:
                self._drop_soon(row)
        if row.failure is not None:
            raise type(row.failure)(f"request {request.request_id!r}: {row.failure}")

    async def stream(
        self,
        row: R,
        request: GenerateRequest,
        *,
        count_generated: Callable[[R], int],
        make_chunk: Callable[[R, int, int], CompletionChunk],
        prepare: PrepareHook | None = None,
    ) -> AsyncGenerator[CompletionChunk, None]:
        """Run a row and yield its chunks as they are generated; the last one when it is done."""
        finish = asyncio.create_task(self.finish(row, request, prepare=prepare), name=request.request_id)
        num_streamed = 0
        try:
            while not finish.done():
                stepped = asyncio.create_task(self._step_event.wait())
                await asyncio.wait({finish, stepped}, return_when=asyncio.FIRST_COMPLETED)
                stepped.cancel()
                num_generated = count_generated(row)
                if num_generated > num_streamed and not row.is_done:
                    yield make_chunk(row, num_streamed, num_generated)
                    num_streamed = num_generated
            finish.result()
            yield make_chunk(row, num_streamed, count_generated(row))
        finally:
            finish.cancel()
            await asyncio.wait({finish})

    async def abort(self, request_id: str) -> None:
        """End a request between two steps, if it is here."""
        row = self._rows.get(request_id)
        if row is not None:
            self._drop_soon(row)
            await asyncio.wait([self._futures[row]])

    # ---- the queue

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def next_waiting(self) -> R | None:
        """Return the first row of the queue."""
        return self._waiting[0][2] if self._waiting else None

    def take_waiting(self) -> R:
        """Remove and return the first row of the queue."""
        return heapq.heappop(self._waiting)[2]

    # ---- steps

    def wake(self) -> None:
        """Wake the loop: there may be work."""
        self._wake_event.set()

    async def _run(self) -> None:
        try:
            while True:
                await self._wake_event.wait()
                self._wake_event.clear()
                while self._to_drop or self._hooks.can_step():
                    async with self.between_steps:
                        await self._run_step()
        except Exception as error:
            self._fail_all(f"the engine failed with {type(error).__name__}: {error}")
            raise

    async def _run_step(self) -> None:
        """Drop the rows that were cancelled, then run one step if there is work."""
        if self._to_drop:
            dropped, self._to_drop = self._to_drop, {}
            self._waiting = [entry for entry in self._waiting if entry[2] not in dropped]
            heapq.heapify(self._waiting)
            await self._hooks.drop(dropped)
            self._resolve_futures(dropped)
        if self._hooks.can_step():
            done = await self._hooks.step()
            self._step_event.set()
            self._step_event = asyncio.Event()
            self._resolve_futures(done)

    def _drop_soon(self, row: R) -> None:
        self._to_drop[row] = None
        self.wake()

    def _resolve_futures(self, rows: Iterable[R]) -> None:
        for row in rows:
            answer = self._futures.get(row)
            if answer is not None and not answer.done():
                answer.set_result(None)

    def _fail_all(self, why: str) -> None:
        for row in self._futures:
            row.failure = row.failure or EngineError(why)
        self._resolve_futures(list(self._futures))
