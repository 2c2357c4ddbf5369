"""Router of turns to engines: a library in every env worker, with no process in between.

    Router                           the current endpoints, their loads, and `generate`: prefill, hand over, decode
    ConnectEngine, OnChunk           types of functions given to it
    DEFAULT_TIMEOUTS, DEFAULT_RULES  its default settings

The choice itself is in hpcrl.rollout.routing.decision. Loads are requested every `refresh_interval_s` and corrected by
what was sent since. A worker is chosen only after it has reported its load; one that fails is left out for a pause that
doubles with each failure, and then until it reports its load again. One that refuses a turn is full, not broken: the
turn is offered to the next. A turn that no engine can serve is refused at once, and counts against no worker.
Remote prefill is optional: if it is absent, late, full or failing, the decode worker computes the prompt itself.
"""

import asyncio
import contextlib
import random
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Container, Iterator, Sequence
from dataclasses import asdict
from typing import Self

import msgspec

from hpcrl.campaign_dir.endpoints import EndpointReader, EngineEndpoint
from hpcrl.campaign_dir.events import TurnRouted
from hpcrl.config.recipe import RouterConfig
from hpcrl.engines.base import Completion, CompletionChunk, GenerateRequest, InferenceEngine, KvHandle, join_chunks
from hpcrl.engines.version_gate import MAX_VERSION_WAIT_S
from hpcrl.errors import EngineError, EngineRefusedError, EngineRequestError
from hpcrl.hardware.cost_model import WorkerSpeed
from hpcrl.hardware.gpus import GPU_CATALOGUE, GpuModel
from hpcrl.rollout.routing.decision import RoutingDecision, RoutingView, TurnFacts, choose_workers, should_release_kv
from hpcrl.rollout.routing.engines import EngineState, RouterTimeouts, build_pools, estimate_foreign_kv
from hpcrl.rollout.routing.role_switch import RoleSwitcher
from hpcrl.rollout.routing.room_queue import RoomQueue
from hpcrl.rollout.routing.trajectories import HELD_OUT_LEVEL, TrajectoryState, TrajectoryTable
from hpcrl.spool.ids import is_held_out, strip_held_out

ConnectEngine = Callable[[EngineEndpoint], InferenceEngine]
OnChunk = Callable[[CompletionChunk], None]
DEFAULT_TIMEOUTS = RouterTimeouts()
DEFAULT_RULES = RouterConfig()


def _return_no_speed(_: EngineEndpoint) -> WorkerSpeed | None:
    return None


class Router:
    """The router, used as `async with Router(...) as router`, which keeps endpoints and loads up to date meanwhile.

    `endpoints` are those announced in this job; `connect` makes the engine of one; `speed_of` returns its
    speed, or None if that is unknown; `on_route` is called with a sample of the decisions.
    """

    def __init__(
        self,
        endpoints: EndpointReader,
        *,
        connect: ConnectEngine,
        seed: int,
        timeouts: RouterTimeouts = DEFAULT_TIMEOUTS,
        rules: RouterConfig = DEFAULT_RULES,
        weights: dict[str, float] | None = None,
        speed_of: Callable[[EngineEndpoint], WorkerSpeed | None] = _return_no_speed,
        switcher: RoleSwitcher | None = None,
        on_route: Callable[[TurnRouted], None] | None = None,
        find_gpu: Callable[[str], GpuModel | None] = GPU_CATALOGUE.get,
    ) -> None:
        self.reasons: Counter[str] = Counter()
        """Turns by how they were routed, and failures by role."""
        self.trajectories = TrajectoryTable(weights=weights or {})
        self._endpoints = endpoints
        self._refreshed_at = float("-inf")
        self._connect = connect
        self._timeouts = timeouts
        self._rules = rules
        self._speed_of = speed_of
        self._switcher = switcher
        self._on_route = on_route
        self._find_gpu = find_gpu
        self._draw = random.Random(seed)
        self._workers: dict[str, EngineState] = {}
        self._room_queue = RoomQueue[RoutingDecision]()
        self._rebuild_view()
        self._refreshing: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        await self.refresh()
        self._refreshing = asyncio.create_task(self._refresh_forever(), name="router")
        self._refreshing.add_done_callback(self._on_refresh_end)
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._refreshing is not None:
            self._refreshing.cancel()
            await asyncio.wait({self._refreshing})

    async def generate(self, request: GenerateRequest, *, on_chunk: OnChunk | None = None) -> Completion:
        """Serve one turn; raise EngineError if no decode worker appears, or every attempt failed.

        `on_chunk` is called with its chunks as they arrive; a turn that an engine did not finish is then `aborted`.
        """
        started_at = _loop_time()
        state = self.trajectories.start_turn(request, now=started_at)
        completion = None
        try:
            completion = await self._serve_turn(request, state, on_chunk=on_chunk)
        finally:
            state.ended_at = _loop_time()
            self.trajectories.end_turn(state, request, completion, seconds=state.ended_at - started_at)
            if not request.trajectory:
                self._release_kv(state)
        state.num_cached = len(request.token_ids) + len(completion.token_ids) - 1
        state.version = completion.versions[-1] if completion.versions else state.version
        return completion

    async def stream(self, request: GenerateRequest) -> AsyncGenerator[CompletionChunk, None]:
        """Serve one turn and stream its chunks; closing the stream early ends the request."""
        chunks: asyncio.Queue[CompletionChunk | None] = asyncio.Queue()
        turn = asyncio.create_task(self.generate(request, on_chunk=chunks.put_nowait), name=request.request_id)
        turn.add_done_callback(lambda _: chunks.put_nowait(None))
        try:
            while (chunk := await chunks.get()) is not None:
                yield chunk
            turn.result()
        finally:
            turn.cancel()
            await asyncio.wait({turn})

    def forget(self, trajectory: str) -> None:
        """Forget a trajectory that has ended, and release its KV."""
        if (state := self.trajectories.forget(trajectory)) is not None:
            self._release_kv(state)

    async def refresh(self) -> None:
        """Read the announced endpoints and request the load of each that is not paused."""
        try:
            self._update_workers(await asyncio.to_thread(self._endpoints.poll))
        except (OSError, msgspec.DecodeError):  # keep the known ones: the file system may recover soon
            self.reasons["endpoints unreadable"] += 1
        self._refreshed_at = now = _loop_time()
        awake = [worker for worker in self._workers.values() if worker.paused_until <= now]
        await asyncio.gather(*(self._read_load(worker) for worker in awake))
        if self._switcher is not None:
            await self._switcher.refresh(
                self._workers.values(), mean_turn=self.trajectories.mean_turn(), now=_loop_time()
            )
        estimate_foreign_kv(list(self._workers.values()))
        self._rebuild_view()
        self._room_queue.wake()

    async def refresh_soon(self) -> None:
        """Refresh, unless that was done within the time that one engine can be asked again."""
        if _loop_time() - self._refreshed_at >= self._timeouts.least_refresh_interval_s:
            self._refreshed_at = _loop_time()  # others that ask meanwhile need not
            await self.refresh()

    def expect_engine(self) -> None:
        """Let `refresh_soon` look for announced engines at its next call."""
        self._endpoints.expect_change()
        self._refreshed_at = float("-inf")

    def versions(self) -> list[int]:
        """Return the versions of the weights that the decode workers serve, as last reported."""
        return [worker.version for kind in self._view.pools.of_role("decode").values() for worker in kind]

    def decide(
        self, request: GenerateRequest, state: TrajectoryState, *, refused: Container[str] = ()
    ) -> RoutingDecision:
        """Decide where a turn would go now."""
        num_new, num_held = self.trajectories.reply_tokens(request), self._expected_kv_tokens(request, state)
        domain, num_prompt = strip_held_out(request.domain), len(request.token_ids)
        turn = TurnFacts(domain, num_prompt, num_new, state, num_held, min_version=request.min_version)
        if should_release_kv(turn, self._view):
            self.reasons["KV abandoned"] += 1
            self._release_kv(state)
            state.num_cached = 0
        return choose_workers(turn, self._view, draw=self._draw, refused=refused)

    # ---- endpoints and loads

    def _update_workers(self, endpoints: Sequence[EngineEndpoint]) -> None:
        """Replace the known endpoints by these; one whose announcement changed counts as another worker."""
        known = self._workers
        self._workers = {
            endpoint.worker: known[endpoint.worker]
            if endpoint.worker in known and known[endpoint.worker].endpoint == endpoint
            else EngineState(endpoint, self._connect(endpoint), self._speed_of(endpoint), endpoint.role)
            for endpoint in endpoints
        }

    async def _read_load(self, worker: EngineState) -> None:
        try:
            async with asyncio.timeout(self._timeouts.load_timeout_s):
                worker.update_load(await worker.engine.load_figures(), now=_loop_time())
        except (EngineError, TimeoutError):
            self._record_failure(worker)

    async def _refresh_forever(self) -> None:
        while True:
            await asyncio.sleep(self._timeouts.refresh_interval_s)
            await self.refresh()

    def _on_refresh_end(self, refreshing: "asyncio.Task[None]") -> None:
        if not refreshing.cancelled() and (error := refreshing.exception()) is not None:
            self._room_queue.fail(error)

    def _rebuild_view(self) -> None:
        self._view = RoutingView(
            build_pools(self._workers.values(), find_gpu=self._find_gpu), self._workers, self._rules
        )

    # ---- a turn

    async def _serve_turn(
        self, request: GenerateRequest, state: TrajectoryState, *, on_chunk: OnChunk | None
    ) -> Completion:
        failures: list[str] = []
        refused: set[str] = set()
        deadline = _loop_time() + self._timeouts.no_decode_timeout_s
        while len(failures) < self._timeouts.max_attempts:
            decision = await self._await_decision(request, state, refused=refused, deadline=deadline)
            self._log_decision(request, decision)
            self._hold_kv(state, decision.decode, num_tokens=self._expected_kv_tokens(request, state))
            prioritised = self._with_priority(request, state)
            kv = await self._prefill(decision, prioritised, state) if decision.prefill else None
            worker = self._workers.get(decision.decode or "")
            if worker is None:
                failures.append(f"{decision.decode} was withdrawn")
                continue
            try:
                completion = await self._decode(
                    worker, self._with_kv(prioritised, worker, kv), decision, on_chunk=on_chunk
                )
            except EngineRefusedError:
                refused.add(worker.name)
                self.reasons["decode refused"] += 1
            except EngineRequestError:
                self.reasons["request refused"] += 1
                raise
            except EngineError as error:
                failures.append(str(error))
            else:
                state.home = worker.name
                return completion
        raise EngineError(
            f"{request.request_id}: {self._timeouts.max_attempts} attempts to generate failed: "
            f"{'; '.join(failures)}: see the logs of these workers"
        )

    async def _await_decision(
        self, request: GenerateRequest, state: TrajectoryState, *, refused: set[str], deadline: float
    ) -> RoutingDecision:
        """Return a decision that has a decode worker; if need be, wait for one to appear, or to have room."""
        while True:
            decision = self.decide(request, state, refused=refused)
            if decision.decode is not None:
                return decision
            if self._refreshing is not None and self._refreshing.done():
                self._refreshing.result()  # raise its error: without refreshes the wait would not end
            if decision.reason == "no room for KV":  # other trajectories continue, and end some time
                self.reasons["held back"] += 1
                decision = await self._room_queue.wait(lambda: self._try_place(request, state, refused=refused))
                if decision.decode is not None:
                    return decision
            if _loop_time() > deadline:
                full = f" ({len(refused)} were full)" if refused else ""
                raise EngineError(
                    f"no decode worker was available{full} for "
                    f"{self._timeouts.no_decode_timeout_s:g} s: see the logs of role decode"
                )
            await asyncio.sleep(min(0.1, self._timeouts.refresh_interval_s))
            await self.refresh_soon()
            refused.clear()

    def _try_place(
        self, request: GenerateRequest, state: TrajectoryState, *, refused: set[str]
    ) -> RoutingDecision | None:
        """Return a decision whose room is already reserved; None until there is room."""
        decision = self.decide(request, state, refused=refused)
        if decision.reason == "no room for KV":
            return None
        self._hold_kv(state, decision.decode, num_tokens=self._expected_kv_tokens(request, state))
        return decision

    def _with_priority(self, request: GenerateRequest, state: TrajectoryState) -> GenerateRequest:
        """Return the request with its priority in the queues of engines."""
        if is_held_out(request.domain):
            return msgspec.structs.replace(request, priority=HELD_OUT_LEVEL)
        priority = self.trajectories.queue_level(state) if self._rules.priority == "least-attained" else 0
        if self._rules.fair_domains:
            priority += self.trajectories.credit_penalty(request.domain)
        return msgspec.structs.replace(request, priority=priority) if priority else request

    def _with_kv(self, request: GenerateRequest, worker: EngineState, kv: KvHandle | None) -> GenerateRequest:
        keep_s = 0.0
        if self._rules.keep_kv and worker.speed is not None:
            saving_s = worker.speed.prefill_s(len(request.token_ids))
            keep_s = self.trajectories.kv_keep_s(request.domain, saving_s=saving_s)
        if kv is None and not keep_s:
            return request
        return msgspec.structs.replace(request, kv=kv, keep_kv_s=keep_s)

    async def _prefill(
        self, decision: RoutingDecision, request: GenerateRequest, state: TrajectoryState
    ) -> KvHandle | None:
        worker = self._workers.get(decision.prefill or "")
        if worker is None:
            return None
        seconds = worker.speed.prefill_s(len(request.token_ids)) if worker.speed else 1.0
        wait_s = MAX_VERSION_WAIT_S if request.min_version > worker.version else 0.0
        try:
            async with asyncio.timeout(self._timeouts.prefill_timeout_s + wait_s) as limit:
                with self._track_request(worker, seconds=seconds), worker.limit_prefill(limit):
                    handle = await worker.engine.prefill(msgspec.structs.replace(request, num_held=decision.num_cached))
        except EngineRefusedError:
            self.reasons["prefill refused"] += 1
            return None
        except EngineRequestError:  # the decode worker refuses it too, with the reason
            return None
        except (EngineError, TimeoutError) as error:
            if isinstance(error, TimeoutError) and worker.is_asleep:
                self.reasons["prefill asleep"] += 1
            else:
                self._record_failure(worker)
            return None
        state.prefill_home = worker.name
        return handle

    async def _decode(
        self, worker: EngineState, request: GenerateRequest, decision: RoutingDecision, *, on_chunk: OnChunk | None
    ) -> Completion:
        started_at = _loop_time()
        try:
            async with self._limit_turn(worker, request):
                with self._track_request(worker, seconds=decision.serve_s):
                    if on_chunk is None:
                        completion = await worker.engine.generate(request)
                    else:
                        completion = await self._stream_chunks(worker, request, on_chunk)
        except TimeoutError:
            self._record_failure(worker)
            raise EngineError(
                f"worker {worker.name} did not finish {request.max_new_tokens} tokens in "
                f"{_loop_time() - started_at:.0f} s, and generated its last token of any turn "
                f"{_loop_time() - max(started_at, worker.progressed_at):.0f} s ago"
            ) from None
        except (EngineRefusedError, EngineRequestError):
            raise
        except EngineError:
            self._record_failure(worker)
            raise
        worker.version = max([worker.version, *completion.versions[-1:]])
        return completion

    @contextlib.asynccontextmanager
    async def _limit_turn(self, worker: EngineState, request: GenerateRequest) -> AsyncGenerator[None]:
        """Raise TimeoutError in the body at its deadline, which moves as long as the worker generates, or sleeps."""
        loop, started_at, asleep_s = asyncio.get_running_loop(), _loop_time(), worker.asleep_s

        def find_deadline() -> float:
            awake_at = started_at + worker.asleep_s - asleep_s
            return worker.find_deadline(awake_at, num_new=request.max_new_tokens, timeouts=self._timeouts)

        timer = loop.call_at(find_deadline(), lambda: check_deadline())

        def check_deadline() -> None:
            nonlocal timer
            if (deadline := find_deadline()) > loop.time():
                timer = loop.call_at(deadline, check_deadline)
            else:
                limit.reschedule(deadline)

        try:
            async with asyncio.timeout(None) as limit:
                yield
        finally:
            timer.cancel()

    async def _stream_chunks(self, worker: EngineState, request: GenerateRequest, on_chunk: OnChunk) -> Completion:
        """Stream a turn; if the engine fails after a chunk was sent, which cannot be withdrawn, the turn ends there."""
        chunks: list[CompletionChunk] = []
        try:
            async with contextlib.aclosing(worker.engine.stream(request)) as stream:
                async for chunk in stream:
                    chunks.append(chunk)
                    on_chunk(chunk)
        except EngineRequestError:
            raise
        except EngineError:
            if not chunks:
                raise
            self._record_failure(worker)
        return join_chunks(chunks)

    @contextlib.contextmanager
    def _track_request(self, worker: EngineState, *, seconds: float) -> Iterator[None]:
        """Count a request as own for as long as the worker has it."""
        worker.own_requests += 1
        worker.own_work_s += seconds
        try:
            yield
            worker.failures = 0
        finally:
            worker.own_requests -= 1
            worker.own_work_s = worker.own_work_s - seconds if worker.own_requests else 0.0

    def _hold_kv(self, state: TrajectoryState, name: str | None, *, num_tokens: int) -> None:
        """Count a trajectory's KV at this worker and nowhere else."""
        if (old_worker := self._workers.get(state.held_at or "")) is not None:
            old_worker.own_kv_tokens = max(0, old_worker.own_kv_tokens - state.held_tokens)
            old_worker.num_own_trajectories = max(0, old_worker.num_own_trajectories - 1)
        state.held_at, state.held_tokens = name, num_tokens
        if (new_worker := self._workers.get(name or "")) is not None:
            new_worker.own_kv_tokens += num_tokens
            new_worker.num_own_trajectories += 1

    def _release_kv(self, state: TrajectoryState) -> None:
        self._hold_kv(state, None, num_tokens=0)
        self._room_queue.wake()

    def _expected_kv_tokens(self, request: GenerateRequest, state: TrajectoryState) -> int:
        return self.trajectories.expected_kv_tokens(state, num_tokens=len(request.token_ids))

    def _record_failure(self, worker: EngineState) -> None:
        self.reasons[f"{worker.role} failed"] += 1
        worker.record_failure(now=_loop_time(), timeouts=self._timeouts)
        self._rebuild_view()

    def _log_decision(self, request: GenerateRequest, decision: RoutingDecision) -> None:
        self.reasons[decision.reason] += 1
        if self._on_route is not None and self._draw.random() < self._rules.log_share:
            self._on_route(TurnRouted(id=request.request_id, domain=request.domain, **asdict(decision)))


def _loop_time() -> float:
    return asyncio.get_running_loop().time()
