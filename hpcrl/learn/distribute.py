"""How rank 0 deals out a training step: ids and credits, never tokens.

    deal        trajectories -> for every rank, the ids of each of its minibatches
    rows_of     a rank's ids -> its rows, read by itself

Every minibatch has as many rows on each rank, give or take one, and nearly as many tokens (Karmarkar-Karp).

Equal numbers of rows for every rank, and as nearly equal work as can be had.

The largest differencing method of Karmarkar and Karp, for many sets of equal size: the rows are grouped, largest
first, into tuples with one row for each rank; the two tuples that are most uneven are joined so that the heaviest
part of one meets the lightest of the other, until one tuple is left. Rows that do not fill the last tuple leave
some ranks with one row less. Then rows change places between the heaviest and the lightest part while that helps:
with few rows of very unequal weight, differencing alone may stay a tenth above the best.
"""

import bisect
import heapq
import random
from collections.abc import Callable, Sequence

import msgspec
import numpy as np

from hpcrl.config.recipe import Train
from hpcrl.learn.advantage import Rewards, indices_by_group
from hpcrl.learn.batch import Row, at_the_end, make_rows, row_length, spread
from hpcrl.learn.pipeline import credited, reworked
from hpcrl.spool.record import Trajectory

Parts = list[list[int]]

MAX_SWAPS = 200
SMALLEST_GAIN = 1e-6
"""Share of the gap that an exchange must close: rounding must not keep it going."""


def balanced(weights: Sequence[float], *, num_parts: int) -> Parts:
    """Indices of the weights in `num_parts` lists whose lengths differ by at most one; the same input, the same lists.

    Each list is in rising order of its indices.
    """
    if num_parts < 1:
        raise ValueError(f"num_parts is {num_parts}: at least 1")
    parts = _joined(weights, num_parts)
    for _ in range(MAX_SWAPS):
        if not _swap(parts, weights):
            break
    return [sorted(part) for part in parts]


def imbalance(weights: Sequence[float], parts: Parts) -> float:
    """The heaviest part over the mean: 1 is perfect."""
    sums = [sum(weights[index] for index in part) for part in parts]
    mean = sum(sums) / len(sums)
    return max(sums) / mean if mean else 1.0


def _joined(weights: Sequence[float], num_parts: int) -> Parts:
    """Tuples of parts, the most uneven two joined, until one is left."""
    by_weight = sorted(range(len(weights)), key=lambda index: (-weights[index], index))
    heap = []
    for order, start in enumerate(range(0, len(by_weight), num_parts)):
        rows: list[list[int]] = [[index] for index in by_weight[start : start + num_parts]]
        rows += [[] for _ in range(num_parts - len(rows))]
        heap.append(_entry([(_weight(part, weights), part) for part in rows], order))
    heapq.heapify(heap)
    order = len(heap)
    while len(heap) > 1:
        _, _, first = heapq.heappop(heap)
        _, _, second = heapq.heappop(heap)
        heapq.heappush(heap, _entry(_crossed(first, second), order))
        order += 1
    return [part for _, part in heap[0][2]] if heap else [[] for _ in range(num_parts)]


_Weighed = list[tuple[float, list[int]]]


def _entry(parts: _Weighed, order: int) -> tuple[float, int, _Weighed]:
    """For the heap: the most uneven first."""
    heaviest_first = sorted(parts, key=lambda part: (-part[0], part[1]))
    return heaviest_first[-1][0] - heaviest_first[0][0], order, heaviest_first


def _crossed(first: _Weighed, second: _Weighed) -> _Weighed:
    """The heaviest of one with the lightest of the other."""
    pairs = zip(first, reversed(second), strict=True)
    return [(mine + theirs, ours + its) for (mine, ours), (theirs, its) in pairs]


def _swap(parts: Parts, weights: Sequence[float]) -> bool:
    """Let the heaviest and the lightest part exchange the rows that bring them closest; False if none does."""
    by_sum = sorted(range(len(parts)), key=lambda number: (_weight(parts[number], weights), number))
    light, heavy = parts[by_sum[0]], parts[by_sum[-1]]
    gap = _weight(heavy, weights) - _weight(light, weights)
    offered = sorted(light, key=lambda index: (weights[index], index))
    values = [weights[index] for index in offered]
    best = (gap, -1, -1)
    for mine in heavy:
        place = bisect.bisect(values, weights[mine] - gap / 2)  # half the gap is what should move over
        for its in offered[max(place - 1, 0) : place + 1]:
            left = abs(gap - 2 * (weights[mine] - weights[its]))
            best = min(best, (left, mine, its))
    if best[1] < 0 or best[0] > gap * (1 - SMALLEST_GAIN):
        return False
    heavy.remove(best[1])
    light.remove(best[2])
    heavy.append(best[2])
    light.append(best[1])
    return True


def _weight(part: list[int], weights: Sequence[float]) -> float:
    return sum(weights[index] for index in part)


class Item(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One trajectory of a rank's share."""

    id: str
    credit: list[float]
    """The advantage of each turn; with a critic, its reward."""
    segment: str = ""
    """The file of the spool that holds it."""


Share = list[list[Item]]
"""One rank's part of a step: the items of each of its minibatches."""


class Deal(msgspec.Struct, frozen=True, kw_only=True):
    """One training step, dealt out: a few bytes a trajectory."""

    shares: list[Share]
    """By rank."""
    skipped: str | None
    """Why no rank shall train."""
    num_too_long: int
    imbalance: float
    """Tokens of the busiest rank over the mean, the worst of the minibatches."""


def deal(
    trajectories: Sequence[Trajectory],
    *,
    train: Train,
    num_ranks: int,
    seed: int,
    step: int,
    max_length: int,
    segment_of: Callable[[Trajectory], str] = lambda _: "",
) -> Deal:
    """Who trains on what; minibatches are drawn from (seed, step), so equal input gives equal shares."""
    trajectories, values = credited(trajectories, train)
    if not all(np.isfinite(credit).all() for credit in values):
        return _nobody(num_ranks, "a reward is not finite")
    lengths = [row_length(trajectory) for trajectory in trajectories]
    dropped = _flat(trajectories) if train.flat_groups == "drop" else set()
    kept = [index for index, length in enumerate(lengths) if 0 < length <= max_length and index not in dropped]
    parts = minibatches(kept, num=train.num_minibatches, seed=seed, step=step)
    worst, shares = 1.0, [[] for _ in range(num_ranks)]  # type: float, list[Share]
    for part in parts:
        weights = [float(lengths[index]) for index in part]
        split = balanced(weights, num_parts=num_ranks)
        worst = max(worst, imbalance(weights, split))
        for share, places in zip(shares, split, strict=True):
            mine = [part[place] for place in places]
            share.append([_item(trajectories[index], values[index], segment_of) for index in mine])
    too_long = sum(length > max_length for length in lengths)
    return Deal(shares=shares, skipped=None, num_too_long=too_long, imbalance=round(worst, 4))


def minibatches(kept: Sequence[int], *, num: int, seed: int, step: int) -> list[list[int]]:
    """The rows of each optimizer step; several minibatches get a shuffled share each."""
    num_parts = min(num, len(kept))
    order = list(kept)
    if num_parts > 1:
        order = random.Random(f"{seed}/{step}").sample(order, len(order))
    return [order[start::num_parts] for start in range(num_parts)]


def rows_of(
    share: Share, *, fetch: Callable[[Sequence[Item]], Sequence[Trajectory]], train: Train, max_length: int
) -> list[list[Row]]:
    """The rows of each minibatch of a share; `fetch` brings the trajectories of these items, in their order."""
    place = at_the_end if train.advantage == "gae" else spread
    parts = []
    for items in share:
        credit = [item.credit for item in items]
        rows, _ = make_rows(fetch(items), credits=credit, max_length=max_length, place=place)
        parts.append(reworked(rows, train))
    return parts


def _flat(trajectories: Sequence[Trajectory]) -> set[int]:
    """Where the trajectories of groups stand in which no episode was better than another (DAPO leaves them out)."""
    members = indices_by_group([trajectory.group for trajectory in trajectories]).values()
    flat = [group for group in members if len({trajectories[index].reward for index in group}) == 1]
    return {index for group in flat for index in group}


def _item(trajectory: Trajectory, credit: Rewards, segment_of: Callable[[Trajectory], str]) -> Item:
    return Item(id=trajectory.id, credit=credit.tolist(), segment=segment_of(trajectory))


def _nobody(num_ranks: int, why: str) -> Deal:
    return Deal(shares=[[] for _ in range(num_ranks)], skipped=f"{why}", num_too_long=0, imbalance=1.0)
