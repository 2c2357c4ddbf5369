"""The choice among engines for one turn. Pure.

Candidate        an engine that comes into question: what the turn takes of it, and how dear its time is
cheapest         the one where the turn costs least
pays_to_leave    whether a trajectory may leave its home for another engine
price            how dear an engine's time is
two_of           power of two choices: whom to look at
kind_for         the kind of hardware that an affinity asks for, of those that are there
serve_s          what a turn takes on hardware of a given pace
pays_remote      whether another worker should compute the prompt

The choice of the workers for one turn, from what is known: pure but for the random draw.

    TurnFacts       what is to be known of the turn
    RoutingView     what is known of the workers
    choose_workers  where the turn goes, and why
    must_yield whether its trajectory should rather wait

Two workers of every kind of hardware are drawn, the trajectory's home is added, and the turn goes where it costs
least: what it takes of a worker by the cost model, which knows what of the prompt that worker has already computed,
times a price that rises steeply as the worker's places or its KV become full. A trajectory
leaves its home only for hardware that does its turn with much less work, though it computes the whole prompt anew. A
prompt that is computed elsewhere goes where it is over first. A domain that wants compute is served whole by prefill
workers where these have more of it.
"""

import random
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

from hpcrl.config.recipe import RouterConfig
from hpcrl.hardware.cost_model import WorkerSpeed
from hpcrl.hardware.gpus import GpuModel
from hpcrl.rollout.routing.engines import EngineState, WorkerPools
from hpcrl.rollout.routing.trajectories import TrajectoryState

T = TypeVar("T")
HardwareKind = Literal["compute", "bandwidth"]
ASSUMED_BATCH = 32.0
"""Sequences decoded together, for sharing out what a step costs whatever their number."""
PRICE_EXPONENT = 8
"""At 0.8 of the places an engine's time is dearer by a sixth, at 1.0 twice and at 1.2 five times as dear."""
MAX_COST_RATIO = 100.0
"""A home whose time is so many times dearer is left, whatever work that makes: about 1.8 times its places."""
LINK_BYTES_PER_S = 25e9
"""Of one 200 Gbit/s port, over which KV is handed over."""


@dataclass(frozen=True, slots=True)
class WorkerCandidate:
    """An engine that a turn may go to."""

    worker: str
    serve_s: float
    """What the turn would take of it; without a cost model everything takes 1."""
    price: float = 1.0
    wait_s: float = 0.0
    """Work that is sure to be done before it."""
    is_suited: bool = True
    """Its hardware is what the turn's domain asks for."""
    is_home: bool = False
    """It has the trajectory's KV."""

    @property
    def cost(self) -> float:
        return (self.wait_s + self.serve_s) * self.price


def choose_cheapest(
    candidates: Sequence[WorkerCandidate], *, mismatch_penalty: float = 1.0, migration_factor: float = 1.0
) -> WorkerCandidate | None:
    """Where the turn costs least.

    Hardware that does not suit must be `mismatch_penalty` times cheaper to be taken, and `migration_factor` times cheaper than the home:
    queues even out by themselves, while a prompt that is computed twice is work that nobody gets back.
    """
    best, lowest_cost = None, float("inf")
    for candidate in candidates:
        cost = candidate.cost
        if not candidate.is_suited:
            cost *= mismatch_penalty
        if candidate.is_home:
            cost /= migration_factor
        if cost < lowest_cost:
            best, lowest_cost = candidate, cost
    return best


def should_migrate(home: WorkerCandidate, candidate: WorkerCandidate, *, migration_factor: float) -> bool:
    """Whether a turn takes `migration_factor` times less work there, its whole prompt included: what a tool has printed may be so
    long that hardware which computes it so much faster makes up for that.

    That the home is fuller at the moment is no reason: queues even out, and a trajectory that they drive back and forth
    computes its prompt anew each time, for the most part on hardware that is slow at it.
    """
    return candidate.serve_s * migration_factor <= home.serve_s or candidate.cost * MAX_COST_RATIO < home.cost


def load_price(fullness: float) -> float:
    """How dear an engine's time is when so much of its places or of its KV is taken.

    An engine with free places decodes one sequence more in nearly the same step, so that hardware decides; one without
    makes everybody wait. A steep power of the load is what keeps online assignment to unlike machines near the best
    (Awerbuch et al., FOCS 1995): each kind gets the turns that it is relatively best at, and all of them fill up.
    """
    return 1.0 + fullness**PRICE_EXPONENT


def sample_two(workers: Sequence[T], *, draw: random.Random) -> Sequence[T]:
    """Two at random, or as many as there are.

    The least loaded of all would draw every host at once to the worker that looked idle at the last refresh.
    """
    num = len(workers)
    if num <= 2:
        return workers
    first, second = int(draw.random() * num), int(draw.random() * (num - 1))
    return workers[first], workers[second + (second >= first)]


def choose_kind(affinity: HardwareKind, kinds: Mapping[str, GpuModel]) -> str | None:
    """The kind with the most FLOP/s, or with the most bandwidth; None if the catalogue knows none of them."""

    def merit(name: str) -> float:
        gpu = kinds[name]
        return gpu.bf16_tflops if affinity == "compute" else gpu.memory_tb_per_s

    return max(sorted(kinds), key=merit, default=None)


def estimate_serve_s(speed: WorkerSpeed | None, *, num_prompt: int, num_cached: int, num_new: float) -> float:
    """What a turn takes of a worker: the missing part of its prompt, and its share of the steps that say the reply."""
    if speed is None:
        return 1.0
    missing = max(0, num_prompt - num_cached)
    prefill = speed.prefill_s(missing, num_known=num_prompt - missing)
    return prefill + speed.reply_s(num_new, num_context=num_prompt, batch=ASSUMED_BATCH)


def remote_prefill_is_faster(
    *,
    decode_speed: WorkerSpeed | None,
    prefill_speed: WorkerSpeed | None,
    wait_s: float,
    num_prompt: int,
    num_cached: int,
) -> bool:
    """Whether a prompt is sooner there by remote prefill than computed where it is decoded; without a model, always.

    There it takes a step of its own, which reads all weights; here it rides along in a step that is done anyway.
    """
    if decode_speed is None or prefill_speed is None:
        return True
    missing = max(0, num_prompt - num_cached)
    local = decode_speed.prefill_s(missing, num_known=num_prompt - missing)
    hand_over = num_prompt * decode_speed.shape.kv_bytes_per_token / LINK_BYTES_PER_S
    return wait_s + prefill_speed.base_step_s(num_prompt) + prefill_speed.prefill_s(num_prompt) + hand_over < local


RoutingReason = Literal[
    "remote prefill", "no prefill endpoint", "prefill stays", "no decode endpoint", "no room for KV"
]

ADMIT_BELOW_KV_SHARE = 0.8
"""Trajectories come in while an engine's KV is less full than this, and give way when it overflows; between the two
those that are there grow."""


@dataclass(frozen=True, slots=True)
class TurnFacts:
    """What a decision needs to know of a turn."""

    domain: str
    num_prompt: int
    num_new: float
    """How long the reply will likely be."""
    state: TrajectoryState
    num_held: int
    """Tokens of KV that its trajectory is counted as."""


@dataclass(frozen=True, slots=True)
class RoutingView:
    """What a decision needs to know of the workers."""

    pools: WorkerPools
    workers: Mapping[str, EngineState]
    rules: RouterConfig

    def home(self, name: str | None) -> EngineState | None:
        """The worker of that name, if trajectories go back to theirs."""
        return self.workers.get(name) if name and self.rules.prefix_affinity else None


@dataclass(frozen=True, slots=True)
class RoutingDecision:
    """Where one turn goes, by worker name, and why."""

    prefill: str | None
    decode: str | None
    reason: RoutingReason
    wait_s: float = 0.0
    """Work of this host that lies before it there."""
    serve_s: float = 0.0
    """What it is thought to take the decode worker; 1 without a cost model."""
    is_home: bool = False


def choose_workers(
    turn: TurnFacts, view: RoutingView, *, draw: random.Random, refused: Container[str] = ()
) -> RoutingDecision:
    """Choose among the workers of both roles; those in `refused` had no room."""
    home = view.home(turn.state.home)
    chosen = _choose_worker(turn, "decode", view, home=home, draw=draw, refused=refused)
    if chosen is None:
        kinds = _find_kinds(_preferred_kind(turn.domain, "decode", view), "decode", view)
        has_workers = any(worker.name not in refused for kind in kinds.values() for worker in kind)
        return RoutingDecision(None, None, reason="no room for KV" if has_workers else "no decode endpoint")
    decode = view.workers[chosen.worker]
    prefill, reason = _choose_prefill(turn, decode, view, draw=draw)
    is_home = chosen.worker == turn.state.home
    return RoutingDecision(
        prefill, chosen.worker, reason, wait_s=decode.own_work_s, serve_s=chosen.serve_s, is_home=is_home
    )


def _choose_worker(
    turn: TurnFacts,
    role: str,
    view: RoutingView,
    *,
    home: EngineState | None,
    draw: random.Random,
    refused: Container[str],
) -> WorkerCandidate | None:
    """The best of two of each kind and the home."""
    preferred_kind = _preferred_kind(turn.domain, role, view)
    kinds = _find_kinds(preferred_kind, role, view)
    drawn = [worker for kind in kinds.values() for worker in sample_two(kind, draw=draw)]
    if home is not None and home.is_available and _is_eligible(home, role, kinds, view) and home.name not in refused:
        drawn.append(home)
    else:
        home = None
    candidates = _find_candidates(drawn, turn, role, view, home=home, preferred_kind=preferred_kind, refused=refused)
    if not candidates:  # bad luck with the draw: look at all
        all_workers = (worker for kind in kinds.values() for worker in kind)
        candidates = _find_candidates(
            all_workers, turn, role, view, home=home, preferred_kind=preferred_kind, refused=refused
        )
    migration_factor = view.rules.migration_factor if role == "prefill" else 1.0  # prompts wait for each other there
    return choose_cheapest(candidates, mismatch_penalty=view.rules.mismatch_penalty, migration_factor=migration_factor)


def _find_candidates(
    workers: Iterable[EngineState],
    turn: TurnFacts,
    role: str,
    view: RoutingView,
    *,
    home: EngineState | None,
    preferred_kind: str | None,
    refused: Container[str],
) -> list[WorkerCandidate]:
    """Those that may have the turn: they have room, and the trajectory may leave its home for them."""
    roomy = (worker for worker in workers if worker.name not in refused)
    if role == "decode":
        roomy = (worker for worker in roomy if _has_room(turn, worker, view, home=home))
    candidates = [
        _make_candidate(turn, worker, role, is_suited=preferred_kind in (None, worker.kind), is_home=worker is home)
        for worker in roomy
    ]
    if home is None or role == "prefill":
        return candidates
    at_home = _make_candidate(turn, home, role, is_suited=True, is_home=True)
    migration_factor = view.rules.migration_factor if _count_cached_tokens(turn, home) else 1.0
    return [one for one in candidates if one.is_home or should_migrate(at_home, one, migration_factor=migration_factor)]


def _make_candidate(
    turn: TurnFacts, worker: EngineState, role: str, *, is_suited: bool, is_home: bool
) -> WorkerCandidate:
    """Decoding is shared by a batch, of which this is one more; prompts are computed one after the other."""
    num_cached = _count_cached_tokens(turn, worker)
    seconds = estimate_serve_s(worker.speed, num_prompt=turn.num_prompt, num_cached=num_cached, num_new=turn.num_new)
    if worker.speed is None and num_cached:  # nothing to reckon with: the KV is worth half a request
        seconds /= 2
    if role == "prefill":
        return WorkerCandidate(
            worker.name, seconds, wait_s=worker.wait_s(seconds), is_suited=is_suited, is_home=is_home
        )
    fullness = worker.fullness(num_held=_count_held_tokens(turn, worker))
    return WorkerCandidate(worker.name, seconds, price=load_price(fullness), is_suited=is_suited, is_home=is_home)


def _has_room(turn: TurnFacts, worker: EngineState, view: RoutingView, *, home: EngineState | None) -> bool:
    """A trajectory that begins, or could stay at home, shall not make others lose their KV; where nobody has any, or
    where its own home is gone, it may go on."""
    if not view.rules.kv_admission:
        return True
    if turn.state.held_at is not None and (home is None or turn.state.held_at == worker.name):
        return True
    return (
        not worker.own_kv_tokens
        or worker.kv_fullness(num_held=_count_held_tokens(turn, worker)) <= ADMIT_BELOW_KV_SHARE
    )


def should_release_kv(turn: TurnFacts, view: RoutingView) -> bool:
    """Whether a trajectory should give its KV up between two turns, and come back when there is room.

    Where those that run have outgrown an engine's KV it drops whatever was used longest ago, which is what comes next:
    nearly every prompt is then computed anew. So some wait instead: the smaller ones, which lose least. They come back
    to where they were, or to hardware that computes their prompts no more slowly.
    """
    worker = view.workers.get(turn.state.held_at or "")
    if worker is None or not view.rules.kv_admission or worker.num_own_trajectories < 2:
        return False
    is_small = turn.state.held_tokens * worker.num_own_trajectories <= worker.own_kv_tokens
    return is_small and worker.kv_fullness(num_held=_count_held_tokens(turn, worker)) > 1


def _count_held_tokens(turn: TurnFacts, worker: EngineState) -> float:
    """Tokens of KV that would be held there."""
    own_tokens = worker.own_kv_tokens - (turn.state.held_tokens if worker.name == turn.state.held_at else 0)
    return own_tokens + worker.foreign_kv_tokens + turn.num_held


def _count_cached_tokens(turn: TurnFacts, worker: EngineState) -> int:
    """Tokens of the prompt whose KV the worker should have, of weights that it still has."""
    state = turn.state
    if worker.name not in (state.home, state.prefill_home) or worker.version > state.version:
        return 0
    return min(state.num_cached, turn.num_prompt - 1)


def _find_kinds(preferred_kind: str | None, role: str, view: RoutingView) -> Mapping[str, list[EngineState]]:
    """Who may do it. A domain that wants compute, of which prefill workers have most, is decoded by them too."""
    own = view.pools.of_role(role)
    return (
        own
        if preferred_kind is None or preferred_kind in own
        else {**own, preferred_kind: view.pools.of_role("prefill")[preferred_kind]}
    )


def _is_eligible(worker: EngineState, role: str, kinds: Mapping[str, list[EngineState]], view: RoutingView) -> bool:
    """Whether a worker is among these kinds."""
    return worker.role == role or (worker.kind in kinds and worker.kind not in view.pools.of_role(role))


def _preferred_kind(domain: str, role: str, view: RoutingView) -> str | None:
    rules, gpus = view.rules, view.pools.gpus
    if rules.affinity == "auto":
        return None
    affinity = rules.affinity.get(domain) or rules.affinity.get("default")
    gpus_by_kind = gpus.get(role, {}) | (gpus.get("prefill", {}) if affinity == "compute" else {})
    return choose_kind(affinity, gpus_by_kind) if affinity else None


def _choose_prefill(
    turn: TurnFacts, decode: EngineState, view: RoutingView, *, draw: random.Random
) -> tuple[str | None, RoutingReason]:
    """The worker that computes the prompt, if another than the decode worker should."""
    choice = view.rules.remote_prefill
    if choice == "never" or decode.role == "prefill":
        return None, "prefill stays"
    home = view.home(turn.state.prefill_home)
    chosen = _choose_worker(turn, "prefill", view, home=home, draw=draw, refused=())
    if chosen is None:
        return None, "no prefill endpoint"
    if choice == "auto" and not remote_prefill_is_faster(
        decode_speed=decode.speed,
        prefill_speed=view.workers[chosen.worker].speed,
        wait_s=chosen.wait_s,
        num_prompt=turn.num_prompt,
        num_cached=_count_cached_tokens(turn, decode),
    ):
        return None, "prefill stays"
    return chosen.worker, "remote prefill"
