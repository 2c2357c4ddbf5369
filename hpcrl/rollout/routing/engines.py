"""State of the engine workers in the view of one env worker: their loads, and which are paused after a failure.

RouterTimeouts       how long the router waits, and how often it retries
EngineState          one endpoint: its load, its speed, its failures
WorkerPools          the workers that may be chosen now, by role and kind of hardware
build_pools          sorts the available workers into pools
estimate_foreign_kv  estimates the KV that trajectories of other env workers hold at each engine worker
mean_load            requests per worker
"""

import asyncio
import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from hpcrl.campaign_dir.endpoints import EngineEndpoint
from hpcrl.engines.base import InferenceEngine, LoadFigures
from hpcrl.hardware.cost_model import WorkerSpeed
from hpcrl.hardware.gpus import GPU_CATALOGUE, GpuModel

DEFAULT_PLACES = 32
"""The places of an engine that does not report them."""
MAX_KV_SHARE = 0.9
"""The share of an engine's KV that trajectories should hold; the rest is for replies, and for KV no longer needed."""
RECENT_WEIGHT = 0.1
"""The weight of the newest refresh in running means."""
MAX_PACE_RATIO = 4.0
"""A turn may take this much longer on a worker than its mean pace allows."""


@dataclass(frozen=True, kw_only=True)
class RouterTimeouts:
    """Timeouts, pauses and attempts of the router."""

    refresh_interval_s: float = 0.5
    least_refresh_interval_s: float = 0.1
    """The same where a refresh is waited for."""
    first_pause_s: float = 1.0
    """The first pause of a failed worker; it doubles with every further failure."""
    max_pause_s: float = 30.0
    load_timeout_s: float = 5.0
    """The time that a worker may take to report its load."""
    prefill_timeout_s: float = 20.0
    """The time after which a turn continues without remote prefill; longer where it waits for a version first."""
    stall_timeout_s: float = 600.0
    """The time in which a worker that has a turn must generate a token, of any turn."""
    min_tokens_per_s: float = 1.0
    """The pace at which a turn is generated at least, unless all turns of the worker are slower."""
    no_decode_timeout_s: float = 300.0
    """The time that a turn waits for a decode worker to appear, or to have room; longer where engines may start longer
    (`engine.start_timeout_s`)."""
    max_attempts: int = 4
    """The number of decode workers that may fail at one turn."""


@dataclass(eq=False)
class EngineState:
    """One endpoint in the view of this env worker; "own" is this env worker's, "foreign" that of others."""

    endpoint: EngineEndpoint
    engine: InferenceEngine
    speed: WorkerSpeed | None
    """None if its hardware is unknown."""
    role: str
    """The role that it has now; the RoleSwitcher may change it."""
    reported_requests: int = 0
    """Requests that it reported at the last refresh."""
    places: int = DEFAULT_PLACES
    """Requests that it serves at once."""
    version: int = -1
    """The version of its weights, at the last refresh or in a later completion."""
    own_at_report: int = 0
    """Own requests among those reported."""
    mean_reported: float = 0.0
    """The running mean of `reported_requests` over refreshes; `mean_own` is that of the own ones."""
    mean_own: float = 0.0
    mean_running: float = 0.0
    """The running mean of the requests reported as being served; `mean_tokens` is that of the KV they had."""
    mean_tokens: float = 0.0
    foreign_kv_tokens: float = 0.0
    """Estimated tokens of KV that trajectories of other env workers have there."""
    own_requests: int = 0
    """Own requests that are there now."""
    own_work_s: float = 0.0
    """The time that all of these need."""
    own_kv_tokens: int = 0
    """Tokens of KV that own trajectories have there or will have, including those whose environments are at work."""
    num_own_trajectories: int = 0
    """The number of these trajectories."""
    is_available: bool = False
    """True if it may be chosen: it has reported its load, and has not failed since."""
    num_generated: int = -1
    """The tokens that it had generated at the last refresh."""
    progressed_at: float = float("-inf")
    """The time of the last refresh at which it had generated more."""
    refreshed_at: float = float("-inf")
    is_asleep: bool = False
    """The trainer had its GPUs at the last refresh."""
    asleep_s: float = 0.0
    """The time that it was asleep in all."""
    prefills: set[asyncio.Timeout] = field(default_factory=set)
    """The limits of the prefills that it has to do; none is waited for while it is asleep."""
    token_s: float = 0.0
    """The mean time between two tokens of a turn that it generates; 0: not known."""
    failures: int = 0
    """Failures in a row."""
    paused_until: float = 0.0

    @property
    def name(self) -> str:
        return self.endpoint.worker

    @property
    def kind(self) -> str:
        return self.endpoint.gpu or ""

    @property
    def load(self) -> float:
        """The estimated number of requests there."""
        return max(0, self.reported_requests - self.own_at_report) + self.own_requests

    def wait_s(self, each_s: float) -> float:
        """Return the time of the work ahead there, if each foreign request takes `each_s`."""
        return self.own_work_s + max(0, self.reported_requests - self.own_at_report) * each_s

    def fullness(self, *, num_held: float) -> float:
        """Return the larger share in use with one more request: of its places, or of its KV with `num_held` tokens."""
        return max((self.load + 1) / self.places, self.kv_fullness(num_held=num_held))

    def kv_fullness(self, *, num_held: float) -> float:
        return num_held / (MAX_KV_SHARE * self.speed.kv_tokens) if self.speed and self.speed.kv_tokens else 0.0

    def find_deadline(self, started_at: float, *, num_new: int, timeouts: RouterTimeouts) -> float:
        """Return the time at which a turn of up to `num_new` tokens that started there at `started_at` has failed.

        It fails when the worker no longer generates, or has forgotten the turn; a long answer does not.
        """
        token_s = max(1 / timeouts.min_tokens_per_s, MAX_PACE_RATIO * self.token_s)
        latest = started_at + timeouts.stall_timeout_s + num_new * token_s
        return min(latest, max(started_at, self.progressed_at) + timeouts.stall_timeout_s)

    def update_load(self, figures: LoadFigures, *, now: float) -> None:
        self._update_pace(figures, now=now)
        self.reported_requests = figures.num_running + figures.num_waiting
        self.version = figures.version
        self.places = figures.num_places or DEFAULT_PLACES
        self.own_at_report = self.own_requests
        self.mean_reported += RECENT_WEIGHT * (self.reported_requests - self.mean_reported)
        self.mean_own += RECENT_WEIGHT * (self.own_requests - self.mean_own)
        self.mean_running += RECENT_WEIGHT * (figures.num_running - self.mean_running)
        self.mean_tokens += RECENT_WEIGHT * (figures.running_tokens - self.mean_tokens)
        self.is_available, self.is_asleep = True, figures.is_asleep
        if self.is_asleep:
            for limit in self.prefills:
                if not limit.expired():
                    limit.reschedule(now)

    def _update_pace(self, figures: LoadFigures, *, now: float) -> None:
        num_more, elapsed_s = figures.num_generated_tokens - self.num_generated, now - self.refreshed_at
        if num_more or figures.is_asleep:  # fewer than before: its server has restarted
            self.progressed_at = now
        if figures.is_asleep and self.num_generated >= 0:
            self.asleep_s += elapsed_s
        if num_more > 0 and self.num_generated >= 0 and figures.num_running:
            token_s = elapsed_s * figures.num_running / num_more
            self.token_s += (RECENT_WEIGHT if self.token_s else 1.0) * (token_s - self.token_s)
        self.num_generated, self.refreshed_at = figures.num_generated_tokens, now

    @contextlib.contextmanager
    def limit_prefill(self, limit: asyncio.Timeout) -> Iterator[None]:
        """End the body at its limit, or when this worker falls asleep."""
        self.prefills.add(limit)
        try:
            yield
        finally:
            self.prefills.remove(limit)

    def record_failure(self, *, now: float, timeouts: RouterTimeouts) -> None:
        self.is_available = False
        if now >= self.paused_until:  # requests that fail together are one failure
            self.failures += 1
            doublings = min(self.failures - 1, 16)
            self.paused_until = now + min(timeouts.first_pause_s * 2**doublings, timeouts.max_pause_s)


@dataclass
class WorkerPools:
    """Workers that may be chosen, by role and kind; built once per change and not per turn."""

    by_role: dict[str, dict[str, list[EngineState]]] = field(default_factory=dict)
    gpus: dict[str, dict[str, GpuModel]] = field(default_factory=dict)
    """The kinds of each role of which the speed is known."""

    def of_role(self, role: str) -> dict[str, list[EngineState]]:
        return self.by_role.get(role, {})


def build_pools(
    workers: Iterable[EngineState], *, find_gpu: Callable[[str], GpuModel | None] = GPU_CATALOGUE.get
) -> WorkerPools:
    """Return the pools of the available workers."""
    pools = WorkerPools()
    for worker in workers:
        if worker.is_available and not (worker.is_asleep and worker.role == "prefill"):  # a decode worker prefills too
            pools.by_role.setdefault(worker.role, {}).setdefault(worker.kind, []).append(worker)
    for role, kinds in pools.by_role.items():
        known = {kind: gpu for kind in kinds if (gpu := find_gpu(kind)) is not None}
        pools.gpus[role] = {kind: gpu for kind, gpu in known.items() if gpu.has_speed}
    return pools


def estimate_foreign_kv(workers: Sequence[EngineState]) -> None:
    """Estimate the KV that trajectories of other env workers hold at each of these engine workers.

    An engine worker reports its number of requests and the KV of those that run. It cannot report the KV of
    trajectories whose environments are at work: other env workers are assumed to have the same number of them per
    request as this one.
    """
    requests, holding = (
        sum(worker.own_requests for worker in workers),
        sum(worker.num_own_trajectories for worker in workers),
    )
    between_turns = max(1.0, holding / requests) if requests else 1.0
    usual = sum(worker.own_kv_tokens for worker in workers) / max(1, holding)
    for worker in workers:
        others = max(0.0, worker.mean_reported - worker.mean_own)
        each = worker.mean_tokens / worker.mean_running if worker.mean_tokens else usual
        worker.foreign_kv_tokens = others * each * between_turns


def mean_load(workers: Sequence[EngineState]) -> float:
    """Return the mean number of requests per worker."""
    return sum(worker.load for worker in workers) / len(workers) if workers else 0.0
