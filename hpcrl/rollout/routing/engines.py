"""The engine workers as one env host knows them: who may be chosen, how loaded they are, who rests after failing.

Patience   how long the router waits, and how often it tries again
Worker     one endpoint: its load, its pace, its failures
Pools      those that may be chosen now, by role and kind of hardware
reckon     what the trajectories of other hosts hold at each worker
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from hpcrl.campaign_dir.endpoints import Endpoint
from hpcrl.engines.base import Engine, LoadFigures
from hpcrl.hardware.cost_model import Pace
from hpcrl.hardware.gpus import GPUS, Gpu

USUAL_PLACES = 32
"""Of an engine that does not tell."""
ROOM = 0.9
"""Of an engine's KV, what trajectories should hold: the rest is for replies, and for KV that nobody needs any more."""
RECENT = 0.1
"""Weight of the newest refresh in running means."""


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
    """How long a turn waits for a decode worker to appear, or to have room."""
    max_attempts: int = 4
    """How many decode workers may fail at one turn."""


@dataclass(eq=False)
class Worker:
    """One endpoint as this host knows it."""

    endpoint: Endpoint
    engine: Engine
    pace: Pace | None
    """None: nothing is known of its hardware."""
    role: str
    """What it does now; a flip changes it."""
    told: int = 0
    """Requests that it told it had at the last refresh."""
    places: int = USUAL_PLACES
    """Requests that it serves at once."""
    version: int = -1
    """Of the weights, at the last refresh, or what acted since."""
    ours_then: int = 0
    """How many of the requests told were ours."""
    usual_told: float = 0.0
    """The same as a running mean over refreshes, and those of them that were ours."""
    usual_ours: float = 0.0
    usual_running: float = 0.0
    """Running means of the requests that it was serving, and of the KV that these had, as it told."""
    usual_tokens: float = 0.0
    others_held: float = 0.0
    """Tokens of KV that the trajectories of other hosts have there, as far as can be reckoned."""
    ours: int = 0
    """Ours that are there now."""
    ours_s: float = 0.0
    """What they take it, all of them."""
    ours_held: int = 0
    """Tokens of KV that our trajectories have there or will, also those whose environments are at work."""
    ours_holding: int = 0
    """How many trajectories that is."""
    answers: bool = False
    """May be chosen: it told its load, and has not failed since."""
    failures: int = 0
    """In a row."""
    rests_until: float = 0.0

    @property
    def name(self) -> str:
        return self.endpoint.worker

    @property
    def kind(self) -> str:
        return self.endpoint.gpu or ""

    @property
    def load(self) -> float:
        """Requests there, as far as we know."""
        return max(0, self.told - self.ours_then) + self.ours

    def wait_s(self, each_s: float) -> float:
        """Work that lies before it, if the requests of others take `each_s` each."""
        return self.ours_s + max(0, self.told - self.ours_then) * each_s

    def fullness(self, *, num_held: float) -> float:
        """With one request more: of its places, or of the KV that it has room for, if trajectories hold `num_held`."""
        return max((self.load + 1) / self.places, self.kv_fullness(num_held=num_held))

    def kv_fullness(self, *, num_held: float) -> float:
        return num_held / (ROOM * self.pace.kv_tokens) if self.pace and self.pace.kv_tokens else 0.0

    def heard(self, figures: LoadFigures) -> None:
        self.told = figures.num_running + figures.num_waiting
        self.version = figures.version
        self.places = figures.num_places or USUAL_PLACES
        self.ours_then = self.ours
        self.usual_told += RECENT * (self.told - self.usual_told)
        self.usual_ours += RECENT * (self.ours - self.usual_ours)
        self.usual_running += RECENT * (figures.num_running - self.usual_running)
        self.usual_tokens += RECENT * (figures.running_tokens - self.usual_tokens)
        self.answers = True

    def failed(self, *, now: float, patience: Patience) -> None:
        self.answers = False
        if now >= self.rests_until:  # requests that fail together are one failure
            self.failures += 1
            doublings = min(self.failures - 1, 16)
            self.rests_until = now + min(patience.rest_s * 2**doublings, patience.longest_rest_s)


@dataclass
class Pools:
    """Workers that may be chosen, by role and kind; sorted out once per change and not per turn."""

    by_role: dict[str, dict[str, list[Worker]]] = field(default_factory=dict)
    gpus: dict[str, dict[str, Gpu]] = field(default_factory=dict)
    """The kinds of each role that the catalogue knows."""

    def of(self, role: str) -> dict[str, list[Worker]]:
        return self.by_role.get(role, {})


def sorted_out(workers: Iterable[Worker]) -> Pools:
    """The pools of those that answer."""
    pools = Pools()
    for worker in workers:
        if worker.answers:
            pools.by_role.setdefault(worker.role, {}).setdefault(worker.kind, []).append(worker)
    for role, kinds in pools.by_role.items():
        pools.gpus[role] = {kind: GPUS[kind] for kind in kinds if kind in GPUS}
    return pools


def reckon(workers: Sequence[Worker]) -> None:
    """Reckon what the trajectories of other hosts hold at each of these workers.

    A worker tells how many requests it has and how much KV those have that run. What lies there of trajectories whose
    environments are at work no engine knows: of other hosts' there are as many, for each request, as of this host's.
    """
    requests, holding = sum(worker.ours for worker in workers), sum(worker.ours_holding for worker in workers)
    between_turns = max(1.0, holding / requests) if requests else 1.0
    usual = sum(worker.ours_held for worker in workers) / max(1, holding)
    for worker in workers:
        others = max(0.0, worker.usual_told - worker.usual_ours)
        each = worker.usual_tokens / worker.usual_running if worker.usual_tokens else usual
        worker.others_held = others * each * between_turns


def mean_load(workers: Sequence[Worker]) -> float:
    """Requests a worker."""
    return sum(worker.load for worker in workers) / len(workers) if workers else 0.0
