"""The router of an env worker, on simulated engines: its decisions are those of `hpcrl.rollout.routing`.

TurnRouter        decides where turns go, and counts what is there
count_tokens      a prompt of which only the length is known
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import cast

from hpcrl.campaign_dir.endpoints import EndpointReader, EngineEndpoint
from hpcrl.config.recipe import RouterConfig
from hpcrl.engines.base import Completion, GenerateRequest, InferenceEngine
from hpcrl.hardware.cost_model import WorkerSpeed
from hpcrl.hardware.gpus import GpuModel
from hpcrl.rollout.routing.decision import RoutingDecision
from hpcrl.rollout.routing.engines import estimate_foreign_kv
from hpcrl.rollout.routing.router import DEFAULT_TIMEOUTS, Router
from hpcrl.rollout.routing.trajectories import TrajectoryState
from hpcrl.simulation.engine import FluidEngine


def count_tokens(num: int) -> list[int]:
    """Return a list of tokens of which only the length may be read."""
    return cast("list[int]", range(num))


class TurnRouter(Router):
    """A router whose turns are events and not coroutines."""

    def __init__(
        self,
        engines: Mapping[str, FluidEngine],
        endpoints: list[EngineEndpoint],
        *,
        seed: int,
        rules: RouterConfig,
        weights: dict[str, float],
        speed_of: Callable[[EngineEndpoint], WorkerSpeed | None],
        find_gpu: Callable[[str], GpuModel | None],
    ) -> None:
        super().__init__(
            EndpointReader(Path(), job=0),
            connect=lambda _: cast("InferenceEngine", None),
            seed=seed,
            rules=rules,
            weights=weights,
            speed_of=speed_of,
            find_gpu=find_gpu,
        )
        self._engines = engines
        self._update_workers(endpoints)

    def refresh_loads(self, *, now: float) -> None:
        """Read the load of each engine that is up, as a refresh of the router does."""
        self._refreshed_at = now
        for name, worker in self._workers.items():
            engine = self._engines[name]
            if engine.is_up and worker.paused_until <= now:
                worker.update_load(engine.figures(), now=now)
            else:
                worker.is_available = False
        estimate_foreign_kv(list(self._workers.values()))
        self._rebuild_view()

    def refresh_awaited_loads(self, *, now: float) -> None:
        """Read the loads, unless that was done just now."""
        if now - self._refreshed_at >= DEFAULT_TIMEOUTS.least_refresh_interval_s:
            self.refresh_loads(now=now)

    def record_failure(self, name: str, *, now: float) -> None:
        """Leave an engine out that has failed."""
        self._workers[name].record_failure(now=now, timeouts=DEFAULT_TIMEOUTS)
        self._rebuild_view()

    def place_turn(self, request: GenerateRequest, state: TrajectoryState) -> RoutingDecision:
        """Decide where a turn goes, and hold room for its KV there; without room, no worker is named."""
        decision = self.decide(request, state)
        self.reasons[decision.reason] += 1
        if decision.decode is not None:
            self._hold_kv(state, decision.decode, num_tokens=self._expected_kv_tokens(request, state))
        return decision

    def find_priority(self, request: GenerateRequest, state: TrajectoryState) -> int:
        """Return the level of a turn in the queues of engines."""
        return self._with_priority(request, state).priority

    def track_request(self, name: str, *, seconds: float) -> AbstractContextManager[None]:
        """Return what counts a request as this env worker's while an engine has it."""
        return self._track_request(self._workers[name], seconds=seconds)

    def find_speed(self, name: str) -> WorkerSpeed | None:
        """Return the speed of an engine."""
        return self._workers[name].speed

    def end_turn(
        self, request: GenerateRequest, state: TrajectoryState, *, num_reply: int, version: int, seconds: float, at: str
    ) -> None:
        """Account for a turn that an engine has finished."""
        completion = Completion(token_ids=count_tokens(num_reply), logprobs=[], versions=[], finish_reason="stop")
        self.trajectories.end_turn(state, request, completion, seconds=seconds)
        state.home = at
        state.num_cached = len(request.token_ids) + num_reply - 1
        state.version = version
        worker = self._workers[at]
        worker.version = max(worker.version, version)
