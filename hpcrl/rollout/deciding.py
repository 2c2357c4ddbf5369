"""The choice of the workers for one turn, from what is known: pure but for the random draw.

    Ask        what is to be known of the turn
    Known      what is known of the workers
    decide     where the turn goes, and why
    must_yield whether its trajectory should rather wait

Two workers of every kind of hardware are drawn, the trajectory's home is added, and the turn goes where it costs
least: what it takes of a worker by the cost model, which knows what of the prompt that worker has already computed,
times a price that rises steeply as the worker's places or its KV become full (hpcrl.rollout.routing). A prompt that
is computed elsewhere goes where it is over first.
"""

import random
from collections.abc import Container, Mapping
from dataclasses import dataclass
from typing import Literal

from hpcrl.recipe import Routing
from hpcrl.rollout.courses import Course
from hpcrl.rollout.routing import Candidate, cheapest, kind_for, pays_remote, price, serve_s, two_of
from hpcrl.rollout.workers import Pools, Worker

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
        return self.workers.get(name) if name and self.rules.home else None


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
        there = any(worker.name not in refused for kind in known.pools.of("decode").values() for worker in kind)
        return Decision(None, None, reason="no room for KV" if there else "no decode endpoint")
    decode = known.workers[chosen.worker]
    ahead, reason = _prefill(ask, decode, known, draw=draw)
    is_home = chosen.worker == ask.course.home
    return Decision(ahead, chosen.worker, reason, wait_s=decode.ours_s, serve_s=chosen.serve_s, is_home=is_home)


def _choice(
    ask: Ask, role: str, known: Known, *, home: Worker | None, draw: random.Random, refused: Container[str]
) -> Candidate | None:
    """The best of two of each kind and the home."""
    kinds = known.pools.of(role)
    wanted = _wanted_kind(ask.domain, role, known)
    drawn = [worker for kind in kinds.values() for worker in two_of(kind, draw=draw)]
    if home is not None and home.answers and home.role == role:
        drawn.append(home)
    fit = [worker for worker in drawn if worker.name not in refused and _has_room(ask, worker, known)]
    if not fit:  # bad luck with the draw: look at all
        everyone = (worker for kind in kinds.values() for worker in kind)
        fit = [worker for worker in everyone if worker.name not in refused and _has_room(ask, worker, known)]
    candidates = [
        _candidate(ask, worker, suits=wanted in (None, worker.kind), is_home=worker is home) for worker in fit
    ]
    return cheapest(candidates, reluctance=known.rules.reluctance, stay=known.rules.stay)


def _candidate(ask: Ask, worker: Worker, *, suits: bool, is_home: bool) -> Candidate:
    """Decoding is shared by a batch, of which this is one more; prompts are computed one after the other."""
    num_known = _num_known(ask, worker)
    seconds = serve_s(worker.pace, num_prompt=ask.num_prompt, num_known=num_known, num_new=ask.num_new)
    if worker.pace is None and num_known:  # nothing to reckon with: the KV is worth half a request
        seconds /= 2
    if worker.role == "prefill":
        return Candidate(worker.name, seconds, wait_s=worker.wait_s(seconds), suits=suits, is_home=is_home)
    fullness = worker.fullness(num_held=_num_held(ask, worker))
    return Candidate(worker.name, seconds, price=price(fullness), suits=suits, is_home=is_home)


def _has_room(ask: Ask, worker: Worker, known: Known) -> bool:
    """A new trajectory had better wait than make others lose their KV; where nobody has any, it may go on."""
    if worker.role == "prefill" or ask.course.held_at is not None or not known.rules.hold_back:
        return True
    return not worker.ours_held or worker.kv_fullness(num_held=_num_held(ask, worker)) <= COME_IN


def must_yield(ask: Ask, known: Known) -> bool:
    """Whether a trajectory should give its KV up between two turns, and come back when there is room.

    Where those that run have outgrown an engine's KV it drops whatever was used longest ago, which is what comes next:
    nearly every prompt is then computed anew. So some wait instead: the smaller ones, which lose least.
    """
    worker = known.workers.get(ask.course.held_at or "")
    if worker is None or not known.rules.hold_back or worker.ours_holding < 2:
        return False
    is_small = ask.course.held * worker.ours_holding <= worker.ours_held
    return is_small and worker.kv_fullness(num_held=_num_held(ask, worker)) > 1


def _num_held(ask: Ask, worker: Worker) -> float:
    """Tokens of KV that would be held there."""
    ours = worker.ours_held - (ask.course.held if worker.name == ask.course.held_at else 0)
    return worker.held(ours=ours, each=ask.num_held) + ask.num_held


def _num_known(ask: Ask, worker: Worker) -> int:
    """Tokens of the prompt whose KV the worker should have, of weights that it still has."""
    course = ask.course
    if worker.name not in (course.home, course.prefill_home) or worker.version > course.version:
        return 0
    return min(course.num_kept, ask.num_prompt - 1)


def _wanted_kind(domain: str, role: str, known: Known) -> str | None:
    rules = known.rules
    if rules.affinity == "auto":
        return None
    affinity = rules.affinity.get(domain) or rules.affinity.get("default")
    return kind_for(affinity, known.pools.gpus.get(role, {})) if affinity else None


def _prefill(ask: Ask, decode: Worker, known: Known, *, draw: random.Random) -> tuple[str | None, Reason]:
    """The worker that computes the prompt, if another than the decode worker should."""
    choice = known.rules.remote_prefill
    if choice == "never":
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
