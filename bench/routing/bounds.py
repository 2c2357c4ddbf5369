"""Lower bounds that no policy can beat, on the same engines and by the same cost model.

    lower_bound_s    max(work / capacity per pool, the longest trajectory)
    free_bound_s     the same if KV were everywhere at once
    turns_s          the least time that each turn of a script takes on each kind of GPU
    crowded_s        the longest trajectory in full batches
    assign_hardware  the hardware of each trajectory, if everything were known in advance

**Why `lower_bound_s` is a bound.** Let a schedule end after M seconds, and W_k be the work that it gives to the n_k
workers of kind k: W_k <= n_k M. So M >= sum(p_k W_k) for any prices p_k >= 0 with sum(n_k p_k) = 1. W_k is a sum over
trajectories, and the turns of each went to kinds in some order: their price is at least that of the cheapest order,
found for each trajectory alone (`_cheapest`). On a kind, a turn takes no less than: computing the tokens of its prompt
that no worker of that kind can have KV of, as if KV were never dropped and were shared by all workers of a kind (it is
of the trajectory's last turn there, for no worker hands KV over: these fleets have none for prefill); its share of full
batches, though many are not full and KV may have no room for them; and reading its own KV. So any prices give a bound;
the best ones are searched for.
"""

from collections import Counter
from dataclasses import replace

from bench.routing.fleet import WorkerFleet, crowded_time_s
from bench.routing.workload import Script
from hpcrl.hardware.cost_model import WorkerSpeed

NUM_SEARCHED = 30
"""Steps of the search for prices; each leaves two thirds of the range."""


def lower_bound_s(scripts: list[Script], fleet: WorkerFleet) -> float:
    """Return the bound for every policy that hands no KV over between engines."""
    shares = [1.0] if len(fleet.workers) == 1 else _best_shares(scripts, fleet)
    return max(_priced_s(scripts, fleet, shares), _longest_s(scripts, fleet))


def free_bound_s(scripts: list[Script], fleet: WorkerFleet) -> float:
    """Return the bound for any policy: each turn where it is cheapest, without computing KV twice for that."""
    pieces = [piece for script in scripts for piece in turns_s(script, fleet)]
    return max(_shared_out_s(pieces, fleet), _longest_s(scripts, fleet))


def turns_s(script: Script, fleet: WorkerFleet) -> list[list[float]]:
    """Return the least time that each turn takes on each kind of GPU, with the KV of all earlier turns present."""
    paces = [fleet.pace(gpu) for gpu in fleet.workers]
    return [
        [_turn_s(one, call.num_prompt, fresh, call.num_new, fleet.max_batch) for one in paces]
        for call, fresh in zip(script.calls, script.num_fresh(), strict=True)
    ]


def crowded_s(scripts: list[Script], fleet: WorkerFleet) -> float:
    """Return the time of the longest trajectory if it starts at once on the best worker, in full batches.

    `lower_bound_s` assumes such batches for the others: no schedule has both.
    """
    paces = [fleet.pace(gpu) for gpu in fleet.workers]
    return max(min(crowded_time_s(script, one, batch=fleet.max_batch) for one in paces) for script in scripts)


def assign_hardware(scripts: list[Script], fleet: WorkerFleet) -> list[Script]:
    """Return the scripts with a domain that names the hardware each belongs to as a whole, all being known ahead."""
    compute, bandwidth = fleet.workers.values()
    times = {script: [sum(turn[kind] for turn in turns_s(script, fleet)) for kind in (0, 1)] for script in set(scripts)}
    order = sorted(range(len(scripts)), key=lambda number: times[scripts[number]][0] / times[scripts[number]][1])
    first, second = 0.0, sum(times[script][1] for script in scripts)
    assigned = list(scripts)
    for number in order:
        here, there = times[scripts[number]]
        goes = first / compute < second / bandwidth
        assigned[number] = replace(scripts[number], domain="compute" if goes else "bandwidth")
        if goes:
            first, second = first + here, second - there
    return assigned


# ---- two kinds of GPU that have prices


def _best_shares(scripts: list[Script], fleet: WorkerFleet) -> list[float]:
    """Return the price of each kind, all its workers together, where the bound is highest: it is concave in the
    first's."""
    assert len(fleet.workers) == 2, f"prices are searched for two kinds, not for {len(fleet.workers)}"
    low, high = 0.0, 1.0
    for _ in range(NUM_SEARCHED):
        left, right = low + (high - low) / 3, high - (high - low) / 3
        if _priced_s(scripts, fleet, [left, 1 - left]) < _priced_s(scripts, fleet, [right, 1 - right]):
            low = left
        else:
            high = right
    return [low, 1 - low]


def _priced_s(scripts: list[Script], fleet: WorkerFleet, shares: list[float]) -> float:
    prices = [share / num for share, num in zip(shares, fleet.workers.values(), strict=True)]
    paces = [fleet.pace(gpu) for gpu in fleet.workers]
    counted = Counter(scripts).items()
    return sum(num * _cheapest(script, paces, prices, batch=fleet.max_batch) for script, num in counted)


def _cheapest(script: Script, paces: list[WorkerSpeed], prices: list[float], *, batch: int) -> float:
    """Return the least price of a trajectory, over all ways to move between two kinds.

    A state is the kind of the turn before, and the part of the conversation whose KV the other kind has.
    """
    states: dict[tuple[int, int], float] = {(kind, 0): 0.0 for kind in range(len(paces))}
    num_before = 0
    for call, fresh in zip(script.calls, script.num_fresh(), strict=True):
        after: dict[tuple[int, int], float] = {}
        for (kind, elsewhere), spent in states.items():
            for next_kind, (one, each) in enumerate(zip(paces, prices, strict=True)):
                stays = next_kind == kind
                missing = fresh if stays else max(1, call.num_prompt - (0 if script.forgets else elsewhere))
                state = next_kind, elsewhere if stays else num_before
                cost = spent + each * _turn_s(one, call.num_prompt, missing, call.num_new, batch)
                after[state] = min(cost, after.get(state, cost))
        states, num_before = after, call.num_prompt + call.num_new
    return min(states.values())


def _shared_out_s(pieces: list[list[float]], fleet: WorkerFleet) -> float:
    """Return the end of work whose pieces, or fractions of them, are split between two pools that end together."""
    sizes = list(fleet.workers.values())
    if len(sizes) == 1:
        return sum(piece[0] for piece in pieces) / sizes[0]
    pieces = sorted(pieces, key=lambda piece: piece[0] / piece[1])
    first, second = 0.0, sum(piece[1] for piece in pieces) / sizes[1]
    for here, there in pieces:
        if first + here / sizes[0] >= second - there / sizes[1]:
            share = (second - first) / (here / sizes[0] + there / sizes[1])
            return first + share * here / sizes[0]
        first, second = first + here / sizes[0], second - there / sizes[1]
    return first


# ---- one turn, one trajectory


def _turn_s(one: WorkerSpeed, num_prompt: int, fresh: int, num_new: int, batch: int) -> float:
    return one.prefill_s(fresh - 1, num_known=num_prompt - fresh) + one.reply_s(
        num_new, num_context=num_prompt, batch=batch
    )


def _longest_s(scripts: list[Script], fleet: WorkerFleet) -> float:
    """Return the time of the longest trajectory if every turn has the best worker to itself."""
    alone = replace(fleet, max_batch=1)
    return max(
        sum(call.pause_s + min(turn) for call, turn in zip(script.calls, turns_s(script, alone), strict=True))
        for script in set(scripts)
    )
