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

    Ask        what is to be known of the turn
    Known      what is known of the workers
    decide     where the turn goes, and why
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

from hpcrl.config.recipe import Routing
from hpcrl.hardware.cost_model import Pace
from hpcrl.hardware.gpus import Gpu
from hpcrl.rollout.routing.engines import Pools, Worker
from hpcrl.rollout.routing.trajectories import Course

T = TypeVar("T")
Kind = Literal["compute", "bandwidth"]
BATCH = 32.0
"""Sequences decoded together, for sharing out what a step costs whatever their number."""
STEEPNESS = 8
"""At 0.8 of the places an engine's time is dearer by a sixth, at 1.0 twice and at 1.2 five times as dear."""
RELIEF = 100.0
"""A home whose time is so many times dearer is left, whatever work that makes: about 1.8 times its places."""
LINK_BYTES_PER_S = 25e9
"""Of one 200 Gbit/s port, over which KV is handed over."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """An engine that a turn may go to."""

    worker: str
    serve_s: float
    """What the turn would take of it; without a cost model everything takes 1."""
    price: float = 1.0
    wait_s: float = 0.0
    """Work that is sure to be done before it."""
    suits: bool = True
    """Its hardware is what the turn's domain asks for."""
    is_home: bool = False
    """It has the trajectory's KV."""

    @property
    def cost(self) -> float:
        return (self.wait_s + self.serve_s) * self.price


def cheapest(candidates: Sequence[Candidate], *, reluctance: float = 1.0, stay: float = 1.0) -> Candidate | None:
    """Where the turn costs least.

    Hardware that does not suit must be `reluctance` times cheaper to be taken, and `stay` times cheaper than the home:
    queues even out by themselves, while a prompt that is computed twice is work that nobody gets back.
    """
    best, least = None, float("inf")
    for candidate in candidates:
        cost = candidate.cost
        if not candidate.suits:
            cost *= reluctance
        if candidate.is_home:
            cost /= stay
        if cost < least:
            best, least = candidate, cost
    return best


def pays_to_leave(home: Candidate, there: Candidate, *, stay: float) -> bool:
    """Whether a turn takes `stay` times less work there, its whole prompt included: what a tool has printed may be so
    long that hardware which computes it so much faster makes up for that.

    That the home is fuller at the moment is no reason: queues even out, and a trajectory that they drive back and forth
    computes its prompt anew each time, for the most part on hardware that is slow at it.
    """
    return there.serve_s * stay <= home.serve_s or there.cost * RELIEF < home.cost


def price(fullness: float) -> float:
    """How dear an engine's time is when so much of its places or of its KV is taken.

    An engine with free places decodes one sequence more in nearly the same step, so that hardware decides; one without
    makes everybody wait. A steep power of the load is what keeps online assignment to unlike machines near the best
    (Awerbuch et al., FOCS 1995): each kind gets the turns that it is relatively best at, and all of them fill up.
    """
    return 1.0 + fullness**STEEPNESS


def two_of(workers: Sequence[T], *, draw: random.Random) -> Sequence[T]:
    """Two at random, or as many as there are.

    The least loaded of all would draw every host at once to the worker that looked idle at the last refresh.
    """
    num = len(workers)
    if num <= 2:
        return workers
    first, second = int(draw.random() * num), int(draw.random() * (num - 1))
    return workers[first], workers[second + (second >= first)]


def kind_for(affinity: Kind, kinds: Mapping[str, Gpu]) -> str | None:
    """The kind with the most FLOP/s, or with the most bandwidth; None if the catalogue knows none of them."""

    def merit(name: str) -> float:
        gpu = kinds[name]
        return gpu.bf16_tflops if affinity == "compute" else gpu.memory_tb_per_s

    return max(sorted(kinds), key=merit, default=None)


def serve_s(pace: Pace | None, *, num_prompt: int, num_known: int, num_new: float) -> float:
    """What a turn takes of a worker: the missing part of its prompt, and its share of the steps that say the reply."""
    if pace is None:
        return 1.0
    missing = max(0, num_prompt - num_known)
    prefill = pace.prefill_s(missing, num_known=num_prompt - missing)
    return prefill + pace.reply_s(num_new, num_context=num_prompt, batch=BATCH)


def pays_remote(*, here: Pace | None, there: Pace | None, wait_s: float, num_prompt: int, num_known: int) -> bool:
    """Whether a prompt is sooner there by remote prefill than computed where it is decoded; without a model, always.

    There it takes a step of its own, which reads all weights; here it rides along in a step that is done anyway.
    """
    if here is None or there is None:
        return True
    missing = max(0, num_prompt - num_known)
    local = here.prefill_s(missing, num_known=num_prompt - missing)
    hand_over = num_prompt * here.shape.kv_bytes_per_token / LINK_BYTES_PER_S
    return wait_s + there.standing_s(num_prompt) + there.prefill_s(num_prompt) + hand_over < local


Reason = Literal["remote prefill", "no prefill endpoint", "prefill stays", "no decode endpoint", "no room for KV"]

COME_IN = 0.8
"""Trajectories come in while an engine's KV is less full than this, and give way when it overflows; between the two
those that are there grow."""


@dataclass(frozen=True, slots=True)
class Ask:
    """What a decision needs to know of a turn."""

    domain: str
    num_prompt: int
    num_new: float
    """How long the reply will likely be."""
    course: Course
    num_held: int
    """Tokens of KV that its trajectory is counted as."""


@dataclass(frozen=True, slots=True)
class Known:
    """What a decision needs to know of the workers."""

    pools: Pools
    workers: Mapping[str, Worker]
    rules: Routing

    def home(self, name: str | None) -> Worker | None:
        """The worker of that name, if trajectories go back to theirs."""
        return self.workers.get(name) if name and self.rules.prefix_affinity else None


@dataclass(frozen=True, slots=True)
class Decision:
    """Where one turn goes, by worker name, and why."""

    prefill: str | None
    decode: str | None
    reason: Reason
    wait_s: float = 0.0
    """Work of this host that lies before it there."""
    serve_s: float = 0.0
    """What it is thought to take the decode worker; 1 without a cost model."""
    is_home: bool = False


def decide(ask: Ask, known: Known, *, draw: random.Random, refused: Container[str] = ()) -> Decision:
    """Choose among the workers of both roles; those in `refused` had no room."""
    home = known.home(ask.course.home)
    chosen = _choice(ask, "decode", known, home=home, draw=draw, refused=refused)
    if chosen is None:
        kinds = _kinds(_wanted_kind(ask.domain, "decode", known), "decode", known)
        there = any(worker.name not in refused for kind in kinds.values() for worker in kind)
        return Decision(None, None, reason="no room for KV" if there else "no decode endpoint")
    decode = known.workers[chosen.worker]
    ahead, reason = _prefill(ask, decode, known, draw=draw)
    is_home = chosen.worker == ask.course.home
    return Decision(ahead, chosen.worker, reason, wait_s=decode.ours_s, serve_s=chosen.serve_s, is_home=is_home)


def _choice(
    ask: Ask, role: str, known: Known, *, home: Worker | None, draw: random.Random, refused: Container[str]
) -> Candidate | None:
    """The best of two of each kind and the home."""
    wanted = _wanted_kind(ask.domain, role, known)
    kinds = _kinds(wanted, role, known)
    drawn = [worker for kind in kinds.values() for worker in two_of(kind, draw=draw)]
    if home is not None and home.answers and _may(home, role, kinds, known) and home.name not in refused:
        drawn.append(home)
    else:
        home = None
    fit = _fit(drawn, ask, role, known, home=home, wanted=wanted, refused=refused)
    if not fit:  # bad luck with the draw: look at all
        everyone = (worker for kind in kinds.values() for worker in kind)
        fit = _fit(everyone, ask, role, known, home=home, wanted=wanted, refused=refused)
    stay = known.rules.migration_factor if role == "prefill" else 1.0  # prompts wait for each other there
    return cheapest(fit, reluctance=known.rules.mismatch_penalty, stay=stay)


def _fit(
    workers: Iterable[Worker],
    ask: Ask,
    role: str,
    known: Known,
    *,
    home: Worker | None,
    wanted: str | None,
    refused: Container[str],
) -> list[Candidate]:
    """Those that may have the turn: they have room, and the trajectory may leave its home for them."""
    roomy = (worker for worker in workers if worker.name not in refused)
    if role == "decode":
        roomy = (worker for worker in roomy if _has_room(ask, worker, known, home=home))
    candidates = [
        _candidate(ask, worker, role, suits=wanted in (None, worker.kind), is_home=worker is home) for worker in roomy
    ]
    if home is None or role == "prefill":
        return candidates
    at_home = _candidate(ask, home, role, suits=True, is_home=True)
    stay = known.rules.migration_factor if _num_known(ask, home) else 1.0
    return [one for one in candidates if one.is_home or pays_to_leave(at_home, one, stay=stay)]


def _candidate(ask: Ask, worker: Worker, role: str, *, suits: bool, is_home: bool) -> Candidate:
    """Decoding is shared by a batch, of which this is one more; prompts are computed one after the other."""
    num_known = _num_known(ask, worker)
    seconds = serve_s(worker.pace, num_prompt=ask.num_prompt, num_known=num_known, num_new=ask.num_new)
    if worker.pace is None and num_known:  # nothing to reckon with: the KV is worth half a request
        seconds /= 2
    if role == "prefill":
        return Candidate(worker.name, seconds, wait_s=worker.wait_s(seconds), suits=suits, is_home=is_home)
    fullness = worker.fullness(num_held=_num_held(ask, worker))
    return Candidate(worker.name, seconds, price=price(fullness), suits=suits, is_home=is_home)


def _has_room(ask: Ask, worker: Worker, known: Known, *, home: Worker | None) -> bool:
    """A trajectory that begins, or could stay at home, shall not make others lose their KV; where nobody has any, or
    where its own home is gone, it may go on."""
    if not known.rules.kv_admission:
        return True
    if ask.course.held_at is not None and (home is None or ask.course.held_at == worker.name):
        return True
    return not worker.ours_held or worker.kv_fullness(num_held=_num_held(ask, worker)) <= COME_IN


def must_yield(ask: Ask, known: Known) -> bool:
    """Whether a trajectory should give its KV up between two turns, and come back when there is room.

    Where those that run have outgrown an engine's KV it drops whatever was used longest ago, which is what comes next:
    nearly every prompt is then computed anew. So some wait instead: the smaller ones, which lose least. They come back
    to where they were, or to hardware that computes their prompts no more slowly.
    """
    worker = known.workers.get(ask.course.held_at or "")
    if worker is None or not known.rules.kv_admission or worker.ours_holding < 2:
        return False
    is_small = ask.course.held * worker.ours_holding <= worker.ours_held
    return is_small and worker.kv_fullness(num_held=_num_held(ask, worker)) > 1


def _num_held(ask: Ask, worker: Worker) -> float:
    """Tokens of KV that would be held there."""
    ours = worker.ours_held - (ask.course.held if worker.name == ask.course.held_at else 0)
    return ours + worker.others_held + ask.num_held


def _num_known(ask: Ask, worker: Worker) -> int:
    """Tokens of the prompt whose KV the worker should have, of weights that it still has."""
    course = ask.course
    if worker.name not in (course.home, course.prefill_home) or worker.version > course.version:
        return 0
    return min(course.num_kept, ask.num_prompt - 1)


def _kinds(wanted: str | None, role: str, known: Known) -> Mapping[str, list[Worker]]:
    """Who may do it. A domain that wants compute, of which prefill workers have most, is decoded by them too."""
    own = known.pools.of(role)
    return own if wanted is None or wanted in own else {**own, wanted: known.pools.of("prefill")[wanted]}


def _may(worker: Worker, role: str, kinds: Mapping[str, list[Worker]], known: Known) -> bool:
    """Whether a worker is among these kinds."""
    return worker.role == role or (worker.kind in kinds and worker.kind not in known.pools.of(role))


def _wanted_kind(domain: str, role: str, known: Known) -> str | None:
    rules, gpus = known.rules, known.pools.gpus
    if rules.affinity == "auto":
        return None
    affinity = rules.affinity.get(domain) or rules.affinity.get("default")
    there = gpus.get(role, {}) | (gpus.get("prefill", {}) if affinity == "compute" else {})
    return kind_for(affinity, there) if affinity else None


def _prefill(ask: Ask, decode: Worker, known: Known, *, draw: random.Random) -> tuple[str | None, Reason]:
    """The worker that computes the prompt, if another than the decode worker should."""
    choice = known.rules.remote_prefill
    if choice == "never" or decode.role == "prefill":
        return None, "prefill stays"
    home = known.home(ask.course.prefill_home)
    chosen = _choice(ask, "prefill", known, home=home, draw=draw, refused=())
    if chosen is None:
        return None, "no prefill endpoint"
    if choice == "auto" and not pays_remote(
        here=decode.pace,
        there=known.workers[chosen.worker].pace,
        wait_s=chosen.wait_s,
        num_prompt=ask.num_prompt,
        num_known=_num_known(ask, decode),
    ):
        return None, "prefill stays"
    return chosen.worker, "remote prefill"
