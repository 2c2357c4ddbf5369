"""The engine workers as one env host knows them: who may be chosen, how loaded they are, who rests after failing.

Patience   how long the router waits, and how often it tries again
Worker     one endpoint: its load, its pace, its failures
Pools      those that may be chosen now, by role and kind of hardware
reckon     what the trajectories of other hosts hold at each worker
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from hpcrl.campaign_dir.endpoints import EngineEndpoint
from hpcrl.engines.base import InferenceEngine, LoadFigures
from hpcrl.hardware.cost_model import WorkerSpeed
from hpcrl.hardware.gpus import GPU_CATALOGUE, GpuModel

DEFAULT_PLACES = 32
"""Of an engine that does not tell."""
MAX_KV_SHARE = 0.9
"""Of an engine's KV, what trajectories should hold: the rest is for replies, and for KV that nobody needs any more."""
RECENT_WEIGHT = 0.1
"""Weight of the newest refresh in running means."""


@dataclass(frozen=True, kw_only=True)
class RouterTimeouts:
    """How long the router waits, and how often it tries again."""

    refresh_interval_s: float = 0.5
    first_pause_s: float = 1.0
    """How long a worker that failed is left out; doubles with every failure that follows."""
    max_pause_s: float = 30.0
    load_timeout_s: float = 5.0
    """How long a worker may take to tell its load."""
    prefill_timeout_s: float = 20.0
    """After this a turn goes on without remote prefill."""
    generate_timeout_s: float = 600.0
    """How long one attempt to generate may take."""
    no_decode_timeout_s: float = 300.0
    """How long a turn waits for a decode worker to appear, or to have room."""
    max_attempts: int = 4
    """How many decode workers may fail at one turn."""


@dataclass(eq=False)
class EngineState:
    """One endpoint as this host knows it."""

    endpoint: EngineEndpoint
    engine: InferenceEngine
    speed: WorkerSpeed | None
    """None: nothing is known of its hardware."""
    role: str
    """What it does now; a flip changes it."""
    reported_requests: int = 0
    """Requests that it told it had at the last refresh."""
    places: int = DEFAULT_PLACES
    """Requests that it serves at once."""
    version: int = -1
    """Of the weights, at the last refresh, or what acted since."""
    own_at_report: int = 0
    """How many of the requests told were ours."""
    mean_reported: float = 0.0
    """The same as a running mean over refreshes, and those of them that were ours."""
    mean_own: float = 0.0
    mean_running: float = 0.0
    """Running means of the requests that it was serving, and of the KV that these had, as it told."""
    mean_tokens: float = 0.0
    foreign_kv_tokens: float = 0.0
    """Tokens of KV that the trajectories of other hosts have there, as far as can be reckoned."""
    own_requests: int = 0
    """Ours that are there now."""
    own_work_s: float = 0.0
    """What they take it, all of them."""
    own_kv_tokens: int = 0
    """Tokens of KV that our trajectories have there or will, also those whose environments are at work."""
    num_own_trajectories: int = 0
    """How many trajectories that is."""
    is_available: bool = False
    """May be chosen: it told its load, and has not failed since."""
    failures: int = 0
    """In a row."""
    paused_until: float = 0.0

    @property
    def name(self) -> str:
        return self.endpoint.worker

    @property
    def kind(self) -> str:
        return self.endpoint.gpu or ""

    @property
    def load(self) -> float:
        """Requests there, as far as we know."""
        return max(0, self.reported_requests - self.own_at_report) + self.own_requests

    def wait_s(self, each_s: float) -> float:
        """Work that lies before it, if the requests of others take `each_s` each."""
        return self.own_work_s + max(0, self.reported_requests - self.own_at_report) * each_s

    def fullness(self, *, num_held: float) -> float:
        """With one request more: of its places, or of the KV that it has room for, if trajectories hold `num_held`."""
        return max((self.load + 1) / self.places, self.kv_fullness(num_held=num_held))

    def kv_fullness(self, *, num_held: float) -> float:
        return num_held / (MAX_KV_SHARE * self.speed.kv_tokens) if self.speed and self.speed.kv_tokens else 0.0

    def update_load(self, figures: LoadFigures) -> None:
        self.reported_requests = figures.num_running + figures.num_waiting
        self.version = figures.version
        self.places = figures.num_places or DEFAULT_PLACES
        self.own_at_report = self.own_requests
        self.mean_reported += RECENT_WEIGHT * (self.reported_requests - self.mean_reported)
        self.mean_own += RECENT_WEIGHT * (self.own_requests - self.mean_own)
        self.mean_running += RECENT_WEIGHT * (figures.num_running - self.mean_running)
        self.mean_tokens += RECENT_WEIGHT * (figures.running_tokens - self.mean_tokens)
        self.is_available = True

    def record_failure(self, *, now: float, timeouts: RouterTimeouts) -> None:
        self.is_available = False
        if now >= self.paused_until:  # requests that fail together are one failure
            self.failures += 1
            doublings = min(self.failures - 1, 16)
            self.paused_until = now + min(timeouts.first_pause_s * 2**doublings, timeouts.max_pause_s)


@dataclass
class WorkerPools:
    """Workers that may be chosen, by role and kind; sorted out once per change and not per turn."""

    by_role: dict[str, dict[str, list[EngineState]]] = field(default_factory=dict)
    gpus: dict[str, dict[str, GpuModel]] = field(default_factory=dict)
    """The kinds of each role that the catalogue knows."""

    def of_role(self, role: str) -> dict[str, list[EngineState]]:
        return self.by_role.get(role, {})


def build_pools(workers: Iterable[EngineState]) -> WorkerPools:
    """The pools of those that answer."""
    pools = WorkerPools()
    for worker in workers:
        if worker.is_available:
            pools.by_role.setdefault(worker.role, {}).setdefault(worker.kind, []).append(worker)
    for role, kinds in pools.by_role.items():
        pools.gpus[role] = {kind: GPU_CATALOGUE[kind] for kind in kinds if kind in GPU_CATALOGUE}
    return pools


def estimate_foreign_kv(workers: Sequence[EngineState]) -> None:
    """Reckon what the trajectories of other hosts hold at each of these workers.

    A worker tells how many requests it has and how much KV those have that run. What lies there of trajectories whose
    environments are at work no engine knows: of other hosts' there are as many, for each request, as of this host's.
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
    """Requests a worker."""
    return sum(worker.load for worker in workers) / len(workers) if workers else 0.0
