"""Distribute a training step over ranks: ids and credits, never tokens.

    distribute_step       run the nodes of rank 0: trajectories -> for every rank, the rows of its minibatches, by id
    assign_credits        the node `advantage` (or `rewards`, with a critic)
    distribute_rows       the node `deal`
    DEAL_NODES            these nodes
    DealWork              what they need beside their inputs
    StepShares            a distributed step
    RankShare, ShareItem  one rank's part of it; one trajectory there
    find_row_limit        the longest row that is trained on
    load_share_rows       a rank's ids -> its rows, which it reads itself
    split_minibatches     the rows of each optimizer step
    balance_parts         parts of equal length and nearly equal weight
    compute_imbalance     the heaviest part over the mean
    IndexLists            indices by part

In every minibatch the ranks' numbers of rows differ by at most one, and their tokens are nearly equal. This is the
largest differencing method of Karmarkar and Karp, for many sets of equal size: the rows are grouped, largest first,
into tuples with one row for each rank; the two most uneven tuples are merged, the heaviest part of one with the
lightest of the other, until one tuple is left. Rows that do not fill the last tuple leave some ranks with one row
less. Then the heaviest and the lightest part swap rows while that helps: with few rows of very unequal weight,
differencing alone may stay a tenth above the best.
"""

import bisect
import heapq
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from hpcrl.config.recipe import TrainConfig
from hpcrl.learn.advantage import FloatArray
from hpcrl.learn.batch import (
    TrainingRow,
    compute_row_lengths,
    count_row_tokens,
    credit_last_token,
    divide_credits,
    divide_rewards,
    make_chosen_rows,
    spread_credit,
)
from hpcrl.learn.pipeline import (
    NodeFunction,
    NodeWork,
    PipelineExecutor,
    check_credits,
    check_trajectories,
    compute_credits,
)
from hpcrl.learn.rewards import find_overlong
from hpcrl.spool.record import Trajectory

IndexLists = list[list[int]]

OVERLONG_REASON = (
    'no row has trainable tokens that train.overlong = "filter" keeps: raise train.response_budget or '
    'rollout.max_new_tokens, or set train.flat_groups = "drop"'
)
"""The reason to skip a step whose episodes all ended for lack of room."""
MAX_SWAPS = 200
MIN_GAIN = 1e-6
"""The least share of the gap that a swap must close, so that rounding does not keep the swaps going."""


def balance_parts(weights: Sequence[float], *, num_parts: int) -> IndexLists:
    """Divide the indices of the weights into `num_parts` lists whose lengths differ by at most one.

    The result depends on nothing but the input; each list is in rising order.
    """
    if num_parts < 1:
        raise ValueError(f"num_parts is {num_parts}: it must be at least 1")
    parts = _merge_by_differencing(weights, num_parts)
    for _ in range(MAX_SWAPS):
        if not _swap_rows(parts, weights):
            break
    return [sorted(part) for part in parts]


def compute_imbalance(weights: Sequence[float], parts: IndexLists) -> float:
    """Return the weight of the heaviest part over the mean: 1 is perfect."""
    sums = [sum(weights[index] for index in part) for part in parts]
    mean = sum(sums) / len(sums)
    return max(sums) / mean if mean else 1.0


def _merge_by_differencing(weights: Sequence[float], num_parts: int) -> IndexLists:
    """Merge the two most uneven tuples of parts until one is left."""
    by_weight = sorted(range(len(weights)), key=lambda index: (-weights[index], index))
    heap = []
    for order, start in enumerate(range(0, len(by_weight), num_parts)):
        rows: list[list[int]] = [[index] for index in by_weight[start : start + num_parts]]
        rows += [[] for _ in range(num_parts - len(rows))]
        heap.append(_make_heap_entry([(_sum_weights(part, weights), part) for part in rows], order))
    heapq.heapify(heap)
    order = len(heap)
    while len(heap) > 1:
        _, _, first = heapq.heappop(heap)
        _, _, second = heapq.heappop(heap)
        heapq.heappush(heap, _make_heap_entry(_merge_crosswise(first, second), order))
        order += 1
    return [part for _, part in heap[0][2]] if heap else [[] for _ in range(num_parts)]


_WeightedParts = list[tuple[float, list[int]]]


def _make_heap_entry(parts: _WeightedParts, order: int) -> tuple[float, int, _WeightedParts]:
    """Make a heap entry; the most uneven tuple comes first."""
    heaviest_first = sorted(parts, key=lambda part: (-part[0], part[1]))
    return heaviest_first[-1][0] - heaviest_first[0][0], order, heaviest_first


def _merge_crosswise(first: _WeightedParts, second: _WeightedParts) -> _WeightedParts:
    """Merge the heaviest part of one tuple with the lightest of the other, and so on."""
    pairs = zip(first, reversed(second), strict=True)
    return [
        (first_weight + second_weight, first_rows + second_rows)
        for (first_weight, first_rows), (second_weight, second_rows) in pairs
    ]


def _swap_rows(parts: IndexLists, weights: Sequence[float]) -> bool:
    """Swap the two rows that bring the heaviest and the lightest part closest; False if no swap helps."""
    by_sum = sorted(range(len(parts)), key=lambda number: (_sum_weights(parts[number], weights), number))
    light, heavy = parts[by_sum[0]], parts[by_sum[-1]]
    gap = _sum_weights(heavy, weights) - _sum_weights(light, weights)
    offered = sorted(light, key=lambda index: (weights[index], index))
    values = [weights[index] for index in offered]
    best = (gap, -1, -1)
    for heavy_row in heavy:
        position = bisect.bisect(values, weights[heavy_row] - gap / 2)  # ideally half the gap moves over
        for light_row in offered[max(position - 1, 0) : position + 1]:
            remaining_gap = abs(gap - 2 * (weights[heavy_row] - weights[light_row]))
            best = min(best, (remaining_gap, heavy_row, light_row))
    if best[1] < 0 or best[0] > gap * (1 - MIN_GAIN):
        return False
    heavy.remove(best[1])
    light.remove(best[2])
    heavy.append(best[2])
    light.append(best[1])
    return True


def _sum_weights(part: list[int], weights: Sequence[float]) -> float:
    return sum(weights[index] for index in part)


class ShareItem(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A training row in a rank's share."""

    id: str
    """The trajectory's."""
    row: int = 0
    """The number of the conversation in it."""
    credit: list[float]
    """The advantage of each of the row's own turns; with a critic, its reward."""
    segment: str = ""
    """The file of the spool that contains it."""


RankShare = list[list[ShareItem]]
"""A rank's part of a step: the items of each of its minibatches."""


class StepShares(msgspec.Struct, frozen=True, kw_only=True):
    """A training step distributed over ranks: a few bytes per turn."""

    shares: list[RankShare]
    """The share of each rank."""
    skipped: str | None
    """The reason why no rank trains, if any."""
    num_too_long: int
    """The rows that are too long for the model, or for the trainer's memory."""
    too_long_tokens: dict[str, int]
    """The tokens that they would have trained, by domain."""
    imbalance: float
    """The tokens of the busiest rank over the mean, in the worst minibatch."""


@dataclass(kw_only=True)
class DealWork(NodeWork):
    """The step that rank 0 distributes."""

    trajectories: Sequence[Trajectory]
    num_ranks: int
    seed: int
    step: int
    max_length: int
    segment_of: Callable[[Trajectory], str]


def distribute_step(
    trajectories: Sequence[Trajectory],
    *,
    train: TrainConfig,
    num_ranks: int,
    seed: int,
    step: int,
    max_length: int,
    segment_of: Callable[[Trajectory], str] = lambda _: "",
) -> StepShares:
    """Distribute a step; minibatches are drawn from (seed, step), so equal input gives equal shares."""
    work = DealWork(
        train=train,
        executor=PipelineExecutor(train, DEAL_NODES),
        trajectories=trajectories,
        num_ranks=num_ranks,
        seed=seed,
        step=step,
        max_length=max_length,
        segment_of=segment_of,
    )
    results: dict[str, Any] = {"score": trajectories}
    work.executor.run("deal", work=work, results=results)
    shares: StepShares = results["deal"]
    return shares


def assign_credits(work: DealWork, *inputs: Any) -> list[FloatArray]:
    """Give every turn its advantage, or its reward where a critic turns rewards into advantages."""
    return compute_credits(check_trajectories(inputs[0], work.trajectories, work.node.inputs[0]), work.train)


def distribute_rows(work: DealWork, dealt: Any, credits_: Any) -> StepShares:
    """Divide the rows of a step over minibatches and ranks, with the credits of their turns."""
    train, num_ranks, seed, step = work.train, work.num_ranks, work.seed, work.step
    max_length, segment_of = find_row_limit(train, max_length=work.max_length), work.segment_of
    trajectories = check_trajectories(dealt, work.trajectories, work.node.inputs[0])
    values = check_credits(credits_, trajectories, work.node.inputs[1])
    if not all(np.isfinite(credit).all() for credit in values):
        return _skip_step(num_ranks, "a reward is not finite")
    lengths = [
        (index, row, length)
        for index, trajectory in enumerate(trajectories)
        for row, length in enumerate(compute_row_lengths(trajectory))
    ]
    dropped = find_overlong(trajectories, train)
    kept = [
        position
        for position, (index, _, length) in enumerate(lengths)
        if 0 < length <= max_length and index not in dropped
    ]
    if dropped and not kept:
        return _skip_step(num_ranks, OVERLONG_REASON)
    divide = divide_rewards if train.advantage == "gae" else divide_credits
    credits = [divide(trajectory, value) for trajectory, value in zip(trajectories, values, strict=True)]

    def make_item(position: int) -> ShareItem:
        index, row, _ = lengths[position]
        trajectory = trajectories[index]
        return ShareItem(id=trajectory.id, row=row, credit=credits[index][row].tolist(), segment=segment_of(trajectory))

    worst, shares = 1.0, [[] for _ in range(num_ranks)]  # type: float, list[RankShare]
    for minibatch in split_minibatches(kept, num=train.num_minibatches, seed=seed, step=step):
        weights = [float(lengths[position][2]) for position in minibatch]
        split = balance_parts(weights, num_parts=num_ranks)
        worst = max(worst, compute_imbalance(weights, split))
        for share, chosen in zip(shares, split, strict=True):
            share.append([make_item(minibatch[number]) for number in chosen])
    too_long: Counter[str] = Counter()
    for index, row, length in lengths:
        if length > max_length:
            too_long[trajectories[index].domain] += count_row_tokens(trajectories[index])[row]
    return StepShares(
        shares=shares,
        skipped=None,
        num_too_long=sum(length > max_length for _, _, length in lengths),
        too_long_tokens=dict(too_long),
        imbalance=round(worst, 4),
    )


DEAL_NODES: dict[str, NodeFunction] = {
    "advantage": assign_credits,
    "rewards": assign_credits,
    "deal": distribute_rows,
}
"""The functions of hpcrl that rank 0 alone runs, by node."""


def find_row_limit(train: TrainConfig, *, max_length: int) -> int:
    """Return the tokens of the longest row that is trained on: the model can read it, and there is memory for it."""
    return max_length if train.max_row_tokens == "auto" else min(max_length, train.max_row_tokens)


def split_minibatches(kept: Sequence[int], *, num: int, seed: int, step: int) -> list[list[int]]:
    """Split rows into the optimizer steps; several minibatches get a shuffled share each."""
    num_parts = min(num, len(kept))
    order = list(kept)
    if num_parts > 1:
        order = random.Random(f"{seed}/{step}").sample(order, len(order))
    return [order[start::num_parts] for start in range(num_parts)]


def load_share_rows(
    share: RankShare, *, fetch: Callable[[Sequence[ShareItem]], Sequence[Trajectory]], train: TrainConfig
) -> list[list[TrainingRow]]:
    """Load the rows of each minibatch of a share; `fetch` returns the trajectories of items, in their order."""
    place_credit = credit_last_token if train.advantage == "gae" else spread_credit
    parts = []
    for items in share:
        by_id: dict[str, list[int]] = {}
        for position, item in enumerate(items):
            by_id.setdefault(item.id, []).append(position)
        rows: dict[int, TrainingRow] = {}
        fetched = fetch(items)
        for positions in by_id.values():
            chosen = [(items[position].row, items[position].credit) for position in positions]
            made = make_chosen_rows(fetched[positions[0]], chosen, place_credit=place_credit)
            rows.update(zip(positions, made, strict=True))
        parts.append([rows[position] for position in range(len(items))])
    return parts


def _skip_step(num_ranks: int, reason: str) -> StepShares:
    return StepShares(
        shares=[[] for _ in range(num_ranks)], skipped=reason, num_too_long=0, too_long_tokens={}, imbalance=1.0
    )
