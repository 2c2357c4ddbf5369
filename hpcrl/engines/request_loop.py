"""The requests of an engine that goes step by step: they wait, are stepped, are told while they grow, end or are ended.

    Turns          what such an engine does about its requests, whatever a step of it is
    Turns.finish   puts a row through the batch; a caller that goes away takes it out
    Turns.told     the same in pieces, as they are said

Everything that changes the batch happens between two steps, in one task. What a step does, what dropping rows takes,
and whether there is anything to step are the engine's own: EmbeddedEngine computes, SimEngine lets time pass.
"""

import asyncio
import heapq
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from hpcrl.engines.base import GenerateRequest, Part
from hpcrl.engines.request_checks import check
from hpcrl.errors import EngineError


class Ending(Protocol):
    """A row as far as its life goes."""

    failure: str

    @property
    def is_done(self) -> bool: ...


R = TypeVar("R", bound=Ending)
Prepare = Callable[[], Awaitable[None]]
"""What is to be done for a row before it waits for a place, such as fetching its KV."""


@dataclass(frozen=True, kw_only=True)
class Steps(Generic[R]):
    """How an engine goes on."""

    can_step: Callable[[], bool]
    """Is there anything to do, unless paused?"""
    step: Callable[[], Awaitable[Iterable[R]]]
    """Let rows in that wait (`Turns.next_waiting`), go one step; the rows that are done then."""
    drop: Callable[[Collection[R]], Awaitable[None]]
    """Take rows out before they are done."""


class Turns(Generic[R]):
    """Of one engine, from `start` to `stop`."""

    def __init__(self, steps: Steps[R]) -> None:
        self.between_steps = asyncio.Lock()
        """Whoever holds it has the batch to himself."""
        self._steps = steps
        self._rows: dict[str, R] = {}
        self._answers: dict[R, asyncio.Future[None]] = {}
        self._waiting: list[tuple[int, int, R]] = []
        self._num_come = 0
        self._unwanted: dict[R, None] = {}
        self._paused = False
        self._wake = asyncio.Event()
        self._stepped = asyncio.Event()
        """Set and replaced after every step, for those who tell a turn while it is said."""
        self._loop_task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._loop_task = asyncio.create_task(self._run(), name="engine steps")

    async def stop(self) -> None:
        assert self._loop_task is not None
        self._loop_task.cancel()
        await asyncio.wait({self._loop_task})
        self._fail_all("the engine was stopped")

    async def failed(self) -> None:
        """Wait until the engine cannot go on, and raise why; a worker ends with it, to be started anew."""
        assert self._loop_task is not None
        await asyncio.shield(self._loop_task)

    # ---- the life of a request

    def admit(self, request: GenerateRequest, *, max_new_tokens: int, context_length: int, vocabulary: int) -> None:
        """EngineError, with what is wrong, unless the request can be served here."""
        if self._loop_task is None or self._loop_task.done():
            raise EngineError("the engine is not running: its worker has to be started anew")
        if request.request_id in self._rows:
            raise EngineError(f"request_id {request.request_id!r} is being served already: give each turn its own")
        check(request, max_new_tokens=max_new_tokens, context_length=context_length, vocabulary=vocabulary)

    async def finish(self, row: R, request: GenerateRequest, *, prepare: Prepare | None = None) -> None:
        """Put a row through the batch once it is prepared. EngineError if it fails."""
        answer: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._rows[request.request_id], self._answers[row] = row, answer
        try:
            if prepare is not None:
                await prepare()
            if not row.is_done:
                self._num_come += 1
                heapq.heappush(self._waiting, (request.priority, self._num_come, row))  # equals keep their order
                self.wake()
            await answer
        finally:
            del self._rows[request.request_id], self._answers[row]
            if not row.is_done:
                self._drop_soon(row)
        if row.failure:
            raise EngineError(f"request {request.request_id!r}: {row.failure}")

    async def told(
        self,
        row: R,
        request: GenerateRequest,
        *,
        num_said: Callable[[R], int],
        part: Callable[[R, int, int], Part],
        prepare: Prepare | None = None,
    ) -> AsyncGenerator[Part, None]:
        """The pieces of a row, each from a token to another; the last one when it is done."""
        finish = asyncio.create_task(self.finish(row, request, prepare=prepare), name=request.request_id)
        told = 0
        try:
            while not finish.done():
                stepped = asyncio.create_task(self._stepped.wait())
                await asyncio.wait({finish, stepped}, return_when=asyncio.FIRST_COMPLETED)
                stepped.cancel()
                known = num_said(row)
                if known > told and not row.is_done:
                    yield part(row, told, known)
                    told = known
            finish.result()
            yield part(row, told, num_said(row))
        finally:
            finish.cancel()
            await asyncio.wait({finish})

    async def abort(self, request_id: str) -> None:
        """End a request between two steps, if there is such a one."""
        row = self._rows.get(request_id)
        if row is not None:
            self._drop_soon(row)
            await asyncio.wait([self._answers[row]])

    # ---- who waits

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def next_waiting(self) -> R | None:
        """The row whose turn it is to join."""
        return self._waiting[0][2] if self._waiting else None

    def take_waiting(self) -> R:
        """The same, which waits no longer."""
        return heapq.heappop(self._waiting)[2]

    # ---- steps

    async def pause(self) -> None:
        """Stop between two steps and keep the requests."""
        self._paused = True
        async with self.between_steps:
            pass

    def resume(self) -> None:
        self._paused = False
        self.wake()

    def wake(self) -> None:
        """There may be something to do."""
        self._wake.set()

    async def _run(self) -> None:
        try:
            while True:
                await self._wake.wait()
                self._wake.clear()
                while self._unwanted or (not self._paused and self._steps.can_step()):
                    async with self.between_steps:
                        await self._go_on()
        except Exception as error:
            self._fail_all(f"the engine failed with {type(error).__name__}: {error}")
            raise

    async def _go_on(self) -> None:
        """Drop what nobody wants any more, then, unless paused, one step."""
        if self._unwanted:
            dropped, self._unwanted = self._unwanted, {}
            self._waiting = [entry for entry in self._waiting if entry[2] not in dropped]
            heapq.heapify(self._waiting)
            await self._steps.drop(dropped)
            self._answer(dropped)
        if not self._paused and self._steps.can_step():
            done = await self._steps.step()
            self._stepped.set()
            self._stepped = asyncio.Event()
            self._answer(done)

    def _drop_soon(self, row: R) -> None:
        self._unwanted[row] = None
        self.wake()

    def _answer(self, rows: Iterable[R]) -> None:
        for row in rows:
            answer = self._answers.get(row)
            if answer is not None and not answer.done():
                answer.set_result(None)

    def _fail_all(self, why: str) -> None:
        for row in self._answers:
            row.failure = row.failure or why
        self._answer(list(self._answers))
