"""The choice among engines for one turn. Pure.

Candidate        an engine that comes into question: what the turn takes of it, and how dear its time is
cheapest         the one where the turn costs least
pays_to_leave    whether a trajectory may leave its home for another engine
price            how dear an engine's time is
two_of           power of two choices: whom to look at
kind_for         the kind of hardware that an affinity asks for, of those that are there
serve_s          what a turn takes on hardware of a given pace
pays_remote      whether another worker should compute the prompt
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

from hpcrl.cost import Pace
from hpcrl.hardware import Gpu

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
