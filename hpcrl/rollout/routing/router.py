"""Which engines serve a turn: a library in every env host, no process in between.

    Router    the endpoints known now, their loads, and `generate`: prefill, hand over, decode, or elsewhere

The choice itself is in hpcrl.rollout.routing.decision. Loads are requested in batches every `refresh_s` and corrected
by what was sent since. A worker is chosen once it has reported its load; one that fails is left out for a while that
doubles, and then until it reports its load again. One that refuses is full, not broken: the turn is offered to the
next.
Prefill is an offer: if it is absent, late, full or failing, the decode worker computes the prompt itself.
"""

import asyncio
import contextlib
import random
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Container, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Self

import msgspec

from hpcrl.campaign_dir.endpoints import Endpoint, listed
from hpcrl.campaign_dir.events import TurnRouted
from hpcrl.config.recipe import Routing
from hpcrl.engines.base import Completion, Engine, GenerateRequest, KvHandle, Part, joined
from hpcrl.errors import EngineError, EngineRefusedError
from hpcrl.hardware.cost_model import Pace
from hpcrl.rollout.routing.decision import Ask, Decision, Known, decide, must_yield
from hpcrl.rollout.routing.engines import Patience, Worker, reckon, sorted_out
from hpcrl.rollout.routing.role_switch import Flips
from hpcrl.rollout.routing.room_queue import HeldBack
from hpcrl.rollout.routing.trajectories import HELD_OUT_LEVEL, Course, Courses
from hpcrl.spool.ids import is_held_out, strip_held_out

Connect = Callable[[Endpoint], Engine]
Hear = Callable[[Part], None]
DEFAULT_PATIENCE = Patience()
DEFAULT_RULES = Routing()


def _no_pace(_: Endpoint) -> Pace | None:
    return None


class Router:
    """Used as `async with Router(...) as router`, which keeps endpoints and loads fresh meanwhile.

    `directory` is where the campaign's endpoints are announced; `connect` makes the engine behind one; `pace_of` says
    how fast it is, as far as that is known; `on_route` is told of a sample of the decisions.
    """

    def __init__(
        self,
        directory: Path,
        *,
        connect: Connect,
        seed: int,
        patience: Patience = DEFAULT_PATIENCE,
        rules: Routing = DEFAULT_RULES,
        weights: dict[str, float] | None = None,
        pace_of: Callable[[Endpoint], Pace | None] = _no_pace,
        flips: Flips | None = None,
        on_route: Callable[[TurnRouted], None] | None = None,
    ) -> None:
        self.reasons: Counter[str] = Counter()
        """Turns by how they were routed, and failures by role."""
        self.courses = Courses(weights=weights or {})
        self._directory = directory
        self._connect = connect
        self._patience = patience
        self._rules = rules
        self._pace_of = pace_of
        self._flips = flips
        self._on_route = on_route
        self._draw = random.Random(seed)
        self._workers: dict[str, Worker] = {}
        self._held_back = HeldBack[Decision]()
        self._sort_out()
        self._refreshing: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        await self.refresh()
        self._refreshing = asyncio.create_task(self._keep_fresh(), name="router")
        self._refreshing.add_done_callback(self._no_longer_fresh)
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._refreshing is not None:
            self._refreshing.cancel()
            await asyncio.wait({self._refreshing})

    async def generate(self, request: GenerateRequest, *, hear: Hear | None = None) -> Completion:
        """Serve one turn; EngineError if no decode worker appears, or every attempt failed.

        `hear` is given its pieces as they come; a turn that an engine did not end is then `aborted`.
        """
        began = _now()
        course = self.courses.begin_turn(request, now=began)
        completion = None
        try:
            completion = await self._served(request, course, hear=hear)
        finally:
            course.ended_at = _now()
            self.courses.end_turn(course, request, completion, seconds=course.ended_at - began)
            if not request.trajectory:
                self._let_go(course)
        course.num_kept = len(request.token_ids) + len(completion.token_ids) - 1
        course.version = completion.versions[-1] if completion.versions else course.version
        return completion

    async def stream(self, request: GenerateRequest) -> AsyncGenerator[Part, None]:
        """The same, told while it is said; closing it early ends the request."""
        told: asyncio.Queue[Part | None] = asyncio.Queue()
        turn = asyncio.create_task(self.generate(request, hear=told.put_nowait), name=request.request_id)
        turn.add_done_callback(lambda _: told.put_nowait(None))
        try:
            while (piece := await told.get()) is not None:
                yield piece
            turn.result()
        finally:
            turn.cancel()
            await asyncio.wait({turn})

    def forget(self, trajectory: str) -> None:
        """A trajectory has ended."""
        if (course := self.courses.forget(trajectory)) is not None:
            self._let_go(course)

    async def refresh(self) -> None:
        """Read the announced endpoints and ask each that is not resting for its load."""
        try:
            self._take(await asyncio.to_thread(listed, self._directory))
        except (OSError, msgspec.DecodeError):  # go on with those known: the file system may answer again soon
            self.reasons["endpoints unreadable"] += 1
        now = _now()
        awake = [worker for worker in self._workers.values() if worker.rests_until <= now]
        await asyncio.gather(*(self._ask_load(worker) for worker in awake))
        if self._flips is not None:
            await self._flips.refresh(self._workers.values(), usual_turn=self.courses.usual_turn(), now=_now())
        reckon(list(self._workers.values()))
        self._sort_out()
        self._held_back.wake()

    def versions(self) -> list[int]:
        """Of the weights that each decode worker serves, as far as was told."""
        return [worker.version for kind in self._known.pools.of("decode").values() for worker in kind]

    def decide(self, request: GenerateRequest, course: Course, *, refused: Container[str] = ()) -> Decision:
        """Where a turn would go now."""
        num_new, num_held = self.courses.reply_tokens(request), self._num_held(request, course)
        ask = Ask(strip_held_out(request.domain), len(request.token_ids), num_new, course, num_held)
        if must_yield(ask, self._known):
            self.reasons["KV given up"] += 1
            self._let_go(course)
            course.num_kept = 0
        return decide(ask, self._known, draw=self._draw, refused=refused)

    # ---- endpoints and loads

    def _take(self, endpoints: Sequence[Endpoint]) -> None:
        """Know these endpoints and no others; one that was announced anew is another worker."""
        known = self._workers
        self._workers = {
            endpoint.worker: known[endpoint.worker]
            if endpoint.worker in known and known[endpoint.worker].endpoint == endpoint
            else Worker(endpoint, self._connect(endpoint), self._pace_of(endpoint), endpoint.role)
            for endpoint in endpoints
        }

    async def _ask_load(self, worker: Worker) -> None:
        try:
            async with asyncio.timeout(self._patience.load_s):
                worker.heard(await worker.engine.load_figures())
        except (EngineError, TimeoutError):
            self._failed(worker)

    async def _keep_fresh(self) -> None:
        while True:
            await asyncio.sleep(self._patience.refresh_s)
            await self.refresh()

    def _no_longer_fresh(self, refreshing: "asyncio.Task[None]") -> None:
        if not refreshing.cancelled() and (error := refreshing.exception()) is not None:
            self._held_back.fail(error)

    def _sort_out(self) -> None:
        self._known = Known(sorted_out(self._workers.values()), self._workers, self._rules)

    # ---- a turn

    async def _served(self, request: GenerateRequest, course: Course, *, hear: Hear | None) -> Completion:
        failures: list[str] = []
        refused: set[str] = set()
        deadline = _now() + self._patience.no_decode_s
        while len(failures) < self._patience.max_attempts:
            decision = await self._decision(request, course, refused=refused, deadline=deadline)
            self._note(request, decision)
            self._hold(course, decision.decode, num_tokens=self._num_held(request, course))
            ready = self._ranked(request, course)
            kv = await self._prefill(decision, ready, course) if decision.prefill else None
            worker = self._workers.get(decision.decode or "")
            if worker is None:
                failures.append(f"{decision.decode} was withdrawn")
                continue
            try:
                completion = await self._decode(worker, self._with_kv(ready, worker, kv), decision, hear=hear)
            except EngineRefusedError:
                refused.add(worker.name)
                self.reasons["decode refused"] += 1
            except EngineError as error:
                failures.append(str(error))
            else:
                course.home = worker.name
                return completion
        raise EngineError(
            f"{request.request_id}: {self._patience.max_attempts} attempts to generate failed: "
            f"{'; '.join(failures)}: see the logs of these workers"
        )

    async def _decision(
        self, request: GenerateRequest, course: Course, *, refused: set[str], deadline: float
    ) -> Decision:
        """A decision with a decode worker in it, waiting for one to appear, or to have room, if need be."""
        while True:
            decision = self.decide(request, course, refused=refused)
            if decision.decode is not None:
                return decision
            if self._refreshing is not None and self._refreshing.done():
                self._refreshing.result()  # a router that does not refresh would wait for nothing
            if decision.reason == "no room for KV":  # the others go on, and end some time
                self.reasons["held back"] += 1
                decision = await self._held_back.wait(lambda: self._placed(request, course, refused=refused))
                if decision.decode is not None:
                    return decision
            if _now() > deadline:
                full = f", {len(refused)} of them full" if refused else ""
                raise EngineError(
                    f"no decode worker in {self._directory} that answers{full}, for {self._patience.no_decode_s:g} s: "
                    "see the logs of role decode"
                )
            await asyncio.sleep(min(0.1, self._patience.refresh_s))
            refused.clear()

    def _placed(self, request: GenerateRequest, course: Course, *, refused: set[str]) -> Decision | None:
        """A decision whose room is taken already; None: there is none yet."""
        decision = self.decide(request, course, refused=refused)
        if decision.reason == "no room for KV":
            return None
        self._hold(course, decision.decode, num_tokens=self._num_held(request, course))
        return decision

    def _ranked(self, request: GenerateRequest, course: Course) -> GenerateRequest:
        """The request with its place in the queues of engines."""
        if is_held_out(request.domain):
            return msgspec.structs.replace(request, priority=HELD_OUT_LEVEL)
        priority = self.courses.level(course) if self._rules.priority == "least-attained" else 0
        if self._rules.fair_domains:
            priority += self.courses.behind(request.domain)
        return msgspec.structs.replace(request, priority=priority) if priority else request

    def _with_kv(self, request: GenerateRequest, worker: Worker, kv: KvHandle | None) -> GenerateRequest:
        keep_s = 0.0
        if self._rules.keep_kv and worker.pace is not None:
            saving_s = worker.pace.prefill_s(len(request.token_ids))
            keep_s = self.courses.keep_s(request.domain, saving_s=saving_s)
        if kv is None and not keep_s:
            return request
        return msgspec.structs.replace(request, kv=kv, keep_kv_s=keep_s)

    async def _prefill(self, decision: Decision, request: GenerateRequest, course: Course) -> KvHandle | None:
        worker = self._workers.get(decision.prefill or "")
        if worker is None:
            return None
        seconds = worker.pace.prefill_s(len(request.token_ids)) if worker.pace else 1.0
        try:
            async with asyncio.timeout(self._patience.prefill_s):
                with self._sent(worker, seconds=seconds):
                    handle = await worker.engine.prefill(request)
        except EngineRefusedError:
            self.reasons["prefill refused"] += 1
            return None
        except (EngineError, TimeoutError):
            self._failed(worker)
            return None
        course.prefill_home = worker.name
        return handle

    async def _decode(
        self, worker: Worker, request: GenerateRequest, decision: Decision, *, hear: Hear | None
    ) -> Completion:
        try:
            async with asyncio.timeout(self._patience.generate_s):
                with self._sent(worker, seconds=decision.serve_s):
                    if hear is None:
                        completion = await worker.engine.generate(request)
                    else:
                        completion = await self._heard(worker, request, hear)
        except TimeoutError:
            self._failed(worker)
            raise EngineError(f"worker {worker.name} did not finish in {self._patience.generate_s:g} s") from None
        except EngineRefusedError:
            raise
        except EngineError:
            self._failed(worker)
            raise
        worker.version = max([worker.version, *completion.versions[-1:]])
        return completion

    async def _heard(self, worker: Worker, request: GenerateRequest, hear: Hear) -> Completion:
        """A turn told while it is said. What was told cannot be taken back: if the engine fails then, it ends there."""
        parts: list[Part] = []
        try:
            async with contextlib.aclosing(worker.engine.stream(request)) as pieces:
                async for piece in pieces:
                    parts.append(piece)
                    hear(piece)
        except EngineError:
            if not parts:
                raise
            self._failed(worker)
        return joined(parts)

    @contextlib.contextmanager
    def _sent(self, worker: Worker, *, seconds: float) -> Iterator[None]:
        """Count a request as ours for as long as the worker has it."""
        worker.ours += 1
        worker.ours_s += seconds
        try:
            yield
            worker.failures = 0
        finally:
            worker.ours -= 1
            worker.ours_s = worker.ours_s - seconds if worker.ours else 0.0

    def _hold(self, course: Course, name: str | None, *, num_tokens: int) -> None:
        """Count a trajectory's KV at this worker and nowhere else."""
        if (before := self._workers.get(course.held_at or "")) is not None:
            before.ours_held = max(0, before.ours_held - course.held)
            before.ours_holding = max(0, before.ours_holding - 1)
        course.held_at, course.held = name, num_tokens
        if (now := self._workers.get(name or "")) is not None:
            now.ours_held += num_tokens
            now.ours_holding += 1

    def _let_go(self, course: Course) -> None:
        self._hold(course, None, num_tokens=0)
        self._held_back.wake()

    def _num_held(self, request: GenerateRequest, course: Course) -> int:
        return self.courses.room_for(course, num_tokens=len(request.token_ids))

    def _failed(self, worker: Worker) -> None:
        self.reasons[f"{worker.role} failed"] += 1
        worker.failed(now=_now(), patience=self._patience)
        self._sort_out()

    def _note(self, request: GenerateRequest, decision: Decision) -> None:
        self.reasons[decision.reason] += 1
        if self._on_route is not None and self._draw.random() < self._rules.log_share:
            self._on_route(TurnRouted(id=request.request_id, domain=request.domain, **asdict(decision)))


def _now() -> float:
    return asyncio.get_running_loop().time()
