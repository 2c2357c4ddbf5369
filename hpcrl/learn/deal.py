"""How rank 0 deals out a training step: ids and credits, never tokens.

    deal        trajectories -> for every rank, the ids of each of its minibatches
    rows_of     a rank's ids -> its rows, read by itself

Every minibatch has as many rows on each rank, give or take one, and nearly as many tokens (Karmarkar-Karp).
"""

import random
from collections.abc import Callable, Sequence

import msgspec
import numpy as np

from hpcrl.learn.advantage import Rewards, indices_by_group
from hpcrl.learn.batch import Row, at_the_end, make_rows, row_length, spread
from hpcrl.learn.partition import balanced, imbalance
from hpcrl.learn.pipeline import credited, reworked
from hpcrl.recipe import Train
from hpcrl.spool.record import Trajectory


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
