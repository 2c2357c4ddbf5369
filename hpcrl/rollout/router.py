"""Which engines serve a turn: a library in every env host, no process in between.

    choose, decide   the choice, from cached loads: the less loaded of two drawn at random. Pure
    Router           the endpoints known now, their loads, and `generate`: prefill, hand over, decode, or elsewhere

Loads are asked for in batches every `refresh_s` and corrected by what was sent since. A worker is chosen once it has
told its load; one that fails is left out for a while that doubles, and then until it tells its load again, so that
a dead one costs each turn one attempt, and a broken one that looks idle cannot swallow every turn.
Prefill is an offer: if it is absent, late or failing, the decode worker computes the prompt itself.
"""

import asyncio
import contextlib
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Self

import msgspec

from hpcrl.endpoints import Endpoint, listed
from hpcrl.engines.base import Completion, GenerateRequest, Generator, KvHandle, LoadFigures
from hpcrl.errors import EngineError

Connect = Callable[[Endpoint], Generator]
Reason = Literal["remote prefill", "no prefill endpoint", "no decode endpoint"]


@dataclass(frozen=True)
class Decision:
    """Where one turn goes, by worker name, and why."""

    prefill: str | None
    decode: str | None
    reason: Reason


def decide(*, prefill: Mapping[str, float], decode: Mapping[str, float], draw: random.Random) -> Decision:
    """Choose among the workers of both roles, given their loads."""
    chosen = choose(decode, draw=draw)
    if chosen is None:
        return Decision(prefill=None, decode=None, reason="no decode endpoint")
    ahead = choose(prefill, draw=draw)
    reason: Reason = "no prefill endpoint" if ahead is None else "remote prefill"
    return Decision(prefill=ahead, decode=chosen, reason=reason)


def choose(loads: Mapping[str, float], *, draw: random.Random) -> str | None:
    """The less loaded of two workers drawn at random (power of two choices); None if there are none.

    The least loaded of all would draw every host at once to the worker that looked idle at the last refresh.
    """
    if len(loads) < 2:
        return next(iter(loads), None)
    first, second = draw.sample(sorted(loads), 2)
    return first if loads[first] <= loads[second] else second


@dataclass(frozen=True, kw_only=True)
class Patience:
    """How long the router waits, and how often it tries again."""

    refresh_s: float = 0.5
    rest_s: float = 1.0
    """How long a worker that failed is left out; doubles with every failure that follows."""
    longest_rest_s: float = 30.0
    load_s: float = 5.0
    """How long a worker may take to tell its load."""
    prefill_s: float = 20.0
    """After this a turn goes on without remote prefill."""
    generate_s: float = 600.0
    """How long one attempt to generate may take."""
    no_decode_s: float = 300.0
    """How long a turn waits for a decode worker to appear."""
    max_attempts: int = 4
    """How many decode workers one turn may be offered to."""


DEFAULT_PATIENCE = Patience()


@dataclass
class _Worker:
    """One endpoint as this host knows it."""

    endpoint: Endpoint
    engine: Generator
    told: int = 0
    """Requests that it told it had at the last refresh."""
    ours_then: int = 0
    """How many of them were ours."""
    ours: int = 0
    """Ours that are there now."""
    answers: bool = False
    """May be chosen: it told its load, and has not failed since."""
    failures: int = 0
    """In a row."""
    rests_until: float = 0.0

    @property
    def load(self) -> float:
        return max(0, self.told - self.ours_then) + self.ours

    def heard(self, figures: LoadFigures) -> None:
        self.told = figures.num_running + figures.num_waiting
        self.ours_then = self.ours
        self.answers = True

    def failed(self, *, now: float, patience: Patience) -> None:
        self.answers = False
        if now >= self.rests_until:  # requests that fail together are one failure
            self.failures += 1
            doublings = min(self.failures - 1, 16)
            self.rests_until = now + min(patience.rest_s * 2**doublings, patience.longest_rest_s)


class Router:
    """Used as `async with Router(...) as router`, which keeps endpoints and loads fresh meanwhile.

    `directory` is where the campaign's endpoints are announced; `connect` makes the engine behind one.
    """

    def __init__(self, directory: Path, *, connect: Connect, seed: int, patience: Patience = DEFAULT_PATIENCE) -> None:
        self.reasons: Counter[str] = Counter()
        """Turns by how they were routed, and failures by role."""
        self._directory = directory
        self._connect = connect
        self._patience = patience
        self._draw = random.Random(seed)
        self._workers: dict[str, _Worker] = {}
        self._serving: dict[str, _Worker] = {}
        self._refreshing: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        await self.refresh()
        self._refreshing = asyncio.create_task(self._keep_fresh(), name="router")
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._refreshing is not None:
            self._refreshing.cancel()
            await asyncio.wait({self._refreshing})

    async def generate(self, request: GenerateRequest) -> Completion:
        """Serve one turn; EngineError if no decode worker appears, or every attempt failed."""
        failures = []
        for _ in range(self._patience.max_attempts):
            decision = await self._decision()
            assert decision.decode is not None
            self.reasons[decision.reason] += 1
            kv = await self._prefill(decision.prefill, request) if decision.prefill else None
            worker = self._workers.get(decision.decode)
            if worker is None:  # withdrawn while prefill ran
                continue
            try:
                return await self._decode(worker, request, kv)
            except EngineError as error:
                failures.append(str(error))
        raise EngineError(
            f"{request.request_id}: {self._patience.max_attempts} attempts to generate failed: "
            f"{'; '.join(failures) or 'every worker chosen was withdrawn'}: see the logs of these workers"
        )

    async def abort(self, request_id: str) -> None:
        """End a request of ours wherever it is being served; one that is not is no error."""
        worker = self._serving.get(request_id)
        if worker is not None:
            await worker.engine.abort(request_id)

    async def refresh(self) -> None:
        """Read the announced endpoints and ask each that is not resting for its load."""
        try:
            self._take(await asyncio.to_thread(listed, self._directory))
        except (OSError, msgspec.DecodeError):  # go on with those known: the file system may answer again soon
            self.reasons["endpoints unreadable"] += 1
        now = time.monotonic()
        awake = [worker for worker in self._workers.values() if worker.rests_until <= now]
        await asyncio.gather(*(self._ask_load(worker) for worker in awake))

    def loads(self, role: str) -> dict[str, float]:
        """The workers of a role that may be chosen now, with their loads."""
        workers = self._workers.items()
        return {name: worker.load for name, worker in workers if worker.answers and worker.endpoint.role == role}

    def _take(self, endpoints: Sequence[Endpoint]) -> None:
        """Know these endpoints and no others; one that was announced anew is another worker."""
        known = self._workers
        self._workers = {
            endpoint.worker: known[endpoint.worker]
            if endpoint.worker in known and known[endpoint.worker].endpoint == endpoint
            else _Worker(endpoint, self._connect(endpoint))
            for endpoint in endpoints
        }

    async def _ask_load(self, worker: _Worker) -> None:
        try:
            async with asyncio.timeout(self._patience.load_s):
                worker.heard(await worker.engine.load_figures())
        except (EngineError, TimeoutError):
            self._failed(worker)

    async def _keep_fresh(self) -> None:
        while True:
            await asyncio.sleep(self._patience.refresh_s)
            await self.refresh()

    async def _decision(self) -> Decision:
        """A decision with a decode worker in it, waiting for one to appear if need be."""
        deadline = time.monotonic() + self._patience.no_decode_s
        while True:
            decision = decide(prefill=self.loads("prefill"), decode=self.loads("decode"), draw=self._draw)
            if decision.decode is not None:
                return decision
            if time.monotonic() > deadline:
                raise EngineError(
                    f"no decode worker in {self._directory} that answers, for {self._patience.no_decode_s:g} s: "
                    "see the logs of role decode"
                )
            if self._refreshing is not None and self._refreshing.done():
                self._refreshing.result()  # a router that does not refresh would wait for nothing
            await asyncio.sleep(min(0.1, self._patience.refresh_s))

    async def _prefill(self, name: str, request: GenerateRequest) -> KvHandle | None:
        worker = self._workers[name]
        try:
            async with asyncio.timeout(self._patience.prefill_s):
                with self._sent(worker, request):
                    return await worker.engine.prefill(request)
        except (EngineError, TimeoutError):
            self._failed(worker)
            return None

    async def _decode(self, worker: _Worker, request: GenerateRequest, kv: KvHandle | None) -> Completion:
        handed = request if kv is None else msgspec.structs.replace(request, kv=kv)
        try:
            async with asyncio.timeout(self._patience.generate_s):
                with self._sent(worker, request):
                    return await worker.engine.generate(handed)
        except TimeoutError:
            self._failed(worker)
            raise EngineError(
                f"worker {worker.endpoint.worker} did not finish in {self._patience.generate_s:g} s"
            ) from None
        except EngineError:
            self._failed(worker)
            raise

    @contextlib.contextmanager
    def _sent(self, worker: _Worker, request: GenerateRequest) -> Iterator[None]:
        """Count a request as ours and remember where it is, for as long as it is there."""
        worker.ours += 1
        self._serving[request.request_id] = worker
        try:
            yield
            worker.failures = 0
        finally:
            worker.ours -= 1
            self._serving.pop(request.request_id, None)

    def _failed(self, worker: _Worker) -> None:
        self.reasons[f"{worker.endpoint.role} failed"] += 1
        worker.failed(now=time.monotonic(), patience=self._patience)
