"""Choose the engine workers for one turn. Pure except for the random draw.

    TurnFacts                 the turn, as far as the decision needs it
    RoutingView               the workers, as far as the decision needs them
    choose_workers            where the turn goes, and why
    RoutingDecision           its result, with a RoutingReason
    should_release_kv         whether the trajectory should release its KV and wait
    WorkerCandidate           a worker that may serve the turn, with the turn's time and price there
    choose_cheapest           the candidate where the turn costs least
    should_migrate            whether a trajectory may leave its home for another engine
    load_price                how expensive an engine's time is
    sample_two                power of two choices: the workers to compare
    choose_kind               the kind of hardware that an affinity (HardwareKind) asks for
    estimate_serve_s          how long a turn takes on hardware of a given speed
    remote_prefill_is_faster  whether another worker should compute the prompt

Two workers of every kind of hardware are drawn, the trajectory's home is added, and the turn goes where it costs
least: the time it takes there by the cost model, which accounts for the part of the prompt already computed there,
times a price that rises steeply as the worker's places or its KV fill up. A trajectory leaves its home only for
hardware that serves its turn with much less work, although the whole prompt must be computed again. Its first turn
prefers workers that have the version of the weights which it would wait for elsewhere. A remote prefill
goes where it finishes first. A domain with affinity for compute is also decoded by prefill workers if these have more
of it.
"""

import random
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

from hpcrl.config.recipe import HardwareKind, RouterConfig
from hpcrl.hardware.cost_model import LINK_BYTES_PER_S, WorkerSpeed
from hpcrl.hardware.gpus import GpuModel
from hpcrl.rollout.routing.engines import EngineState, WorkerPools
from hpcrl.rollout.routing.trajectories import TrajectoryState

T = TypeVar("T")
ASSUMED_BATCH = 32.0
"""The number of sequences decoded together, which share the fixed cost of a step."""
MIN_REMOTE_TOKENS = 256
"""The tokens that remote prefill must compute where no cost model shows whether it pays: CPUs take milliseconds for a
short prompt, and as long to hand its KV over."""
PRICE_EXPONENT = 8
"""The steepness of the price: at 0.8 of the places it is a sixth above that of an idle engine, at 1.0 it is twice and
at 1.2 five times that."""
MAX_COST_RATIO = 100.0
"""The cost ratio at which a trajectory leaves its home whatever work that makes: at about 1.8 times its places."""


@dataclass(frozen=True, slots=True)
class WorkerCandidate:
    """An engine that a turn may go to."""

    worker: str
    serve_s: float
    """The time that the turn would take there; 1 for every turn without a cost model."""
    price: float = 1.0
    wait_s: float = 0.0
    """The time of work that is certain to be done first."""
    is_suited: bool = True
    """True if its hardware is of the kind that the turn's domain prefers."""
    is_home: bool = False
    """True if it has the trajectory's KV."""

    @property
    def cost(self) -> float:
        return (self.wait_s + self.serve_s) * self.price


def choose_cheapest(
    candidates: Sequence[WorkerCandidate], *, mismatch_penalty: float = 1.0, migration_factor: float = 1.0
) -> WorkerCandidate | None:
    """Return the candidate where the turn costs least.

    Unsuited hardware is chosen only if it is `mismatch_penalty` times cheaper, and a worker other than the home only
    if it is `migration_factor` times cheaper: queues even out by themselves, but computing a prompt twice is wasteful.
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
    """Return whether a turn takes `migration_factor` times less work there, including its whole prompt.

    That happens when a tool's output is so long that faster hardware makes up for computing the rest again. A home
    that is merely fuller at the moment is not left: queues even out, and a trajectory that moved back and forth would
    compute its prompt again each time, mostly on hardware that is slow at it.
    """
    return candidate.serve_s * migration_factor <= home.serve_s or candidate.cost * MAX_COST_RATIO < home.cost


def load_price(fullness: float) -> float:
    """Return the price of an engine's time when this share of its places or of its KV is used.

    An engine with free places decodes one more sequence in nearly the same step, so hardware decides; on a full one all
    requests wait. A steep power of the load keeps online assignment to unlike machines near the optimum (Awerbuch et
    al., FOCS 1995): each kind gets the turns that it is relatively best at, and all kinds fill up.
    """
    return 1.0 + fullness**PRICE_EXPONENT


def sample_two(workers: Sequence[T], *, draw: random.Random) -> Sequence[T]:
    """Return two workers at random, or all if there are fewer.

    Choosing the least loaded of all would send every env worker to the engine that looked idle at the last refresh.
    """
    num = len(workers)
    if num <= 2:
        return workers
    first, second = int(draw.random() * num), int(draw.random() * (num - 1))
    return workers[first], workers[second + (second >= first)]


def choose_kind(affinity: HardwareKind, kinds: Mapping[str, GpuModel]) -> str | None:
    """Return the kind with the most FLOP/s or the most bandwidth; None if there are none."""

    def merit(name: str) -> float:
        gpu = kinds[name]
        return (gpu.bf16_tflops if affinity == "compute" else gpu.memory_tb_per_s) or 0.0

    return max(sorted(kinds), key=merit, default=None)


def estimate_serve_s(speed: WorkerSpeed | None, *, num_prompt: int, num_cached: int, num_new: float) -> float:
    """Return the time that a turn takes on a worker: the missing part of its prompt, and its share of decode steps."""
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
    """Return whether remote prefill is faster than computing the prompt where it is decoded.

    Remote prefill takes a separate step, which reads all weights; a local one shares a step that is done anyway.
    Without a cost model it is assumed to be faster for prompts that are not short.
    """
    missing = max(0, num_prompt - num_cached)
    if decode_speed is None or prefill_speed is None:
        return missing >= MIN_REMOTE_TOKENS
    local = decode_speed.prefill_s(missing, num_known=num_prompt - missing)
    hand_over = num_prompt * decode_speed.shape.kv_bytes_per_token / LINK_BYTES_PER_S
    return wait_s + prefill_speed.base_step_s(num_prompt) + prefill_speed.prefill_s(num_prompt) + hand_over < local


RoutingReason = Literal[
    "remote prefill", "no prefill endpoint", "prefill stays", "no decode endpoint", "no room for KV"
]

ADMIT_BELOW_KV_SHARE = 0.8
"""Trajectories are admitted while an engine's KV is less full than this, and release theirs when it overflows; the
range in between is left for admitted ones to grow."""


@dataclass(frozen=True, slots=True)
class TurnFacts:
    """The facts about a turn that a decision needs."""

    domain: str
    num_prompt: int
    num_new: float
    """The expected length of the reply in tokens."""
    state: TrajectoryState
    num_held: int
    """The tokens of KV that its trajectory is expected to need."""
    min_version: int = 0
    """The version of the weights that it waits for at its engines, for a while."""


@dataclass(frozen=True, slots=True)
class RoutingView:
    """The state of the workers that a decision needs."""

    pools: WorkerPools
    workers: Mapping[str, EngineState]
    rules: RouterConfig

    def home(self, name: str | None) -> EngineState | None:
        """Return the worker of that name if the rules let trajectories return to their home."""
        return self.workers.get(name) if name and self.rules.prefix_affinity else None


@dataclass(frozen=True, slots=True)
class RoutingDecision:
    """The workers for one turn, by name, and the reason."""

    prefill: str | None
    decode: str | None
    reason: RoutingReason
    wait_s: float = 0.0
    """The time of this env worker's requests that are ahead of it there."""
    serve_s: float = 0.0
    """The time that the decode worker is expected to need; 1 without a cost model."""
    is_home: bool = False
    num_cached: int = 0
    """The prompt tokens whose KV the decode worker should have."""


def choose_workers(
    turn: TurnFacts, view: RoutingView, *, draw: random.Random, refused: Container[str] = ()
) -> RoutingDecision:
    """Choose among the workers of both roles, without those in `refused`, which had no room."""
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
        prefill,
        chosen.worker,
        reason,
        wait_s=decode.own_work_s,
        serve_s=chosen.serve_s,
        is_home=is_home,
        num_cached=_count_cached_tokens(turn, decode),
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
    """Choose the best of two workers of each kind and the home."""
    preferred_kind = _preferred_kind(turn.domain, role, view)
    kinds = _find_kinds(preferred_kind, role, view)
    if not kinds:
        return None
    drawn = [worker for kind in kinds.values() for worker in sample_two(kind, draw=draw)]
    if home is not None and home.is_available and _is_eligible(home, role, kinds, view) and home.name not in refused:
        drawn.append(home)
    else:
        home = None
    candidates = _find_candidates(drawn, turn, role, view, home=home, preferred_kind=preferred_kind, refused=refused)
    if not candidates:  # an unlucky draw: consider all
        all_workers = (worker for kind in kinds.values() for worker in kind)
        candidates = _find_candidates(
            all_workers, turn, role, view, home=home, preferred_kind=preferred_kind, refused=refused
        )
    if turn.min_version:
        candidates = _prefer_current(candidates, turn, view) or candidates
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
    """Return the workers that have room and for which the trajectory may leave its home."""
    roomy = (worker for worker in workers if worker.name not in refused)
    if role == "decode":
        roomy = (worker for worker in roomy if _has_room(turn, worker, view, home=home))
    candidates = [
        _make_candidate(turn, worker, role, is_suited=preferred_kind in (None, worker.kind), is_home=worker is home)
        for worker in roomy
    ]
    if home is None or role == "prefill" or all(one.is_home for one in candidates):
        return candidates
    at_home = next((one for one in candidates if one.is_home), None)
    if at_home is None:
        at_home = _make_candidate(turn, home, role, is_suited=True, is_home=True)
    migration_factor = view.rules.migration_factor if _count_cached_tokens(turn, home) else 1.0
    return [one for one in candidates if one.is_home or should_migrate(at_home, one, migration_factor=migration_factor)]


def _prefer_current(candidates: Sequence[WorkerCandidate], turn: TurnFacts, view: RoutingView) -> list[WorkerCandidate]:
    """Return the candidates with a free place that have the version which the turn would wait for elsewhere."""
    return [
        one
        for one in candidates
        if view.workers[one.worker].version >= turn.min_version and one.price < load_price(1.0)
    ]


def _make_candidate(
    turn: TurnFacts, worker: EngineState, role: str, *, is_suited: bool, is_home: bool
) -> WorkerCandidate:
    """Make the candidate: decoding is priced by how full the batch is, a prompt waits for those before it."""
    num_cached = _count_cached_tokens(turn, worker)
    seconds = estimate_serve_s(worker.speed, num_prompt=turn.num_prompt, num_cached=num_cached, num_new=turn.num_new)
    if worker.speed is None and num_cached:  # without a cost model, cached KV counts as half a request
        seconds /= 2
    if role == "prefill":
        return WorkerCandidate(
            worker.name, seconds, wait_s=worker.wait_s(seconds), is_suited=is_suited, is_home=is_home
        )
    fullness = worker.fullness(num_held=_count_held_tokens(turn, worker))
    return WorkerCandidate(worker.name, seconds, price=load_price(fullness), is_suited=is_suited, is_home=is_home)


def _has_room(turn: TurnFacts, worker: EngineState, view: RoutingView, *, home: EngineState | None) -> bool:
    """Return whether the trajectory fits; one that starts, or could stay at home, must not make others lose their KV.

    It always fits where no trajectory holds KV, and anywhere if its home is gone.
    """
    if not view.rules.kv_admission:
        return True
    if turn.state.held_at is not None and (home is None or turn.state.held_at == worker.name):
        return True
    return (
        not worker.own_kv_tokens
        or worker.kv_fullness(num_held=_count_held_tokens(turn, worker)) <= ADMIT_BELOW_KV_SHARE
    )


def should_release_kv(turn: TurnFacts, view: RoutingView) -> bool:
    """Return whether a trajectory should release its KV between two turns, and wait until there is room.

    When the running trajectories outgrow an engine's KV, it drops what was used longest ago, which is what is needed
    next: nearly every prompt is then computed again. Therefore some wait: the smaller ones, which lose least. They
    return to where they were, or to hardware that computes their prompts at least as fast.
    """
    worker = view.workers.get(turn.state.held_at or "")
    if worker is None or not view.rules.kv_admission or worker.num_own_trajectories < 2:
        return False
    is_small = turn.state.held_tokens * worker.num_own_trajectories <= worker.own_kv_tokens
    return is_small and worker.kv_fullness(num_held=_count_held_tokens(turn, worker)) > 1


def _count_held_tokens(turn: TurnFacts, worker: EngineState) -> float:
    """Return the tokens of KV that would be held there."""
    own_tokens = worker.own_kv_tokens - (turn.state.held_tokens if worker.name == turn.state.held_at else 0)
    return own_tokens + worker.foreign_kv_tokens + turn.num_held


def _count_cached_tokens(turn: TurnFacts, worker: EngineState) -> int:
    """Return the number of prompt tokens whose KV the worker should have, computed with weights it still serves."""
    state = turn.state
    if worker.name not in (state.home, state.prefill_home) or worker.version > state.version:
        return 0
    return min(state.num_cached, turn.num_prompt - 1)


def _find_kinds(preferred_kind: str | None, role: str, view: RoutingView) -> Mapping[str, list[EngineState]]:
    """Return the workers of a role by kind, and prefill workers too if only they are of the preferred kind."""
    own = view.pools.of_role(role)
    return (
        own
        if preferred_kind is None or preferred_kind in own
        else {**own, preferred_kind: view.pools.of_role("prefill")[preferred_kind]}
    )


def _is_eligible(worker: EngineState, role: str, kinds: Mapping[str, list[EngineState]], view: RoutingView) -> bool:
    """Return whether a worker is among these kinds."""
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
    """Choose the worker that computes the prompt; None if the decode worker should."""
    choice = view.rules.remote_prefill
    if choice == "never" or decode.role == "prefill":
        return None, "prefill stays"
    home = view.home(turn.state.prefill_home)
    chosen = _choose_worker(turn, "prefill", view, home=home, draw=draw, refused=())
    if chosen is None:
        return None, "no prefill endpoint"
    if view.workers[chosen.worker].version < turn.min_version <= decode.version:
        return None, "prefill stays"  # the turn would wait for weights there, and the KV of older ones is of no use
    if choice == "auto" and not remote_prefill_is_faster(
        decode_speed=decode.speed,
        prefill_speed=view.workers[chosen.worker].speed,
        wait_s=chosen.wait_s,
        num_prompt=turn.num_prompt,
        num_cached=_count_cached_tokens(turn, decode),
    ):
        return None, "prefill stays"
    return chosen.worker, "remote prefill"
