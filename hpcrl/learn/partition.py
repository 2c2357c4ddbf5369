"""Equal numbers of rows for every rank, and as nearly equal work as can be had.

The largest differencing method of Karmarkar and Karp, for many sets of equal size: the rows are grouped, largest
first, into tuples with one row for each rank; the two tuples that are most uneven are joined so that the heaviest
part of one meets the lightest of the other, until one tuple is left. Rows that do not fill the last tuple leave
some ranks with one row less. Then rows change places between the heaviest and the lightest part while that helps:
with few rows of very unequal weight, differencing alone may stay a tenth above the best.
"""

import bisect
import heapq
from collections.abc import Sequence

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


def naive(num: int, *, num_parts: int) -> Parts:
    """Every so-manieth row, whatever it weighs: what balance is compared with."""
    return [list(range(start, num, num_parts)) for start in range(num_parts)]


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
