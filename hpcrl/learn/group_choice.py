"""The choice of the groups that a training step trains on. Pure, and without torch.

choose_groups        the trajectories of the next step, those that are never used, and the rest
GroupChoice          its result
count_groups         how many groups trajectories belong to, by domain
"""

import math
from collections import Counter
from collections.abc import Callable, Container, Iterable, Sequence
from typing import NamedTuple

from hpcrl.spool.outcome import is_too_old
from hpcrl.spool.record import TRAINABLE, Trajectory


class GroupChoice(NamedTuple):
    """The result of a choice: each available trajectory is in one of four lists, unless consumed or a duplicate."""

    chosen: list[Trajectory]
    """The members of exactly `groups_per_step` whole groups, group by group, or nothing."""
    stale: list[Trajectory]
    """The members never trained on: too far behind, not trainable, or more than the chosen group needs."""
    flat: list[Trajectory]
    """The members of whole groups that have nothing to learn from; others take their place."""
    rest: list[Trajectory]
    """The ones to offer again."""


def choose_groups(
    available: Iterable[Trajectory],
    *,
    groups_per_step: int,
    group_size: int,
    version: int,
    max_lag: int,
    consumed: Container[str],
    is_flat_group: Callable[[Sequence[Trajectory]], bool] = lambda _: False,
) -> GroupChoice:
    """Choose the oldest complete groups, once there are enough; the order of `available` does not matter.

    Groups that `is_flat_group` finds flat are not trained on, and do not count.

    Groups arrive with exactly `group_size` members, so one with an unusable member is dropped as a whole: no other
    member will be made, and the rest of the group would count as work that training still has to do.
    """

    def is_old(trajectory: Trajectory) -> bool:
        return is_too_old(trajectory.start_version, newest=version, max_lag=max_lag)

    groups: dict[str, list[Trajectory]] = {}
    lost: dict[str, list[Trajectory]] = {}
    rest: list[Trajectory] = []
    for trajectory in _sort_unconsumed(available, consumed=consumed):
        if is_old(trajectory) or not _is_usable(trajectory):
            lost.setdefault(trajectory.group, []).append(trajectory)
        elif trajectory.reward is None:
            rest.append(trajectory)
        else:
            groups.setdefault(trajectory.group, []).append(trajectory)
    stale: list[Trajectory] = []
    for name, members in lost.items():
        if len(members) + len(groups.get(name, ())) >= group_size > len(groups.get(name, ())):
            stale += [*members, *groups.pop(name, ())]
            continue
        for trajectory in members:  # a failed one stays until its group has arrived: it marks the group as lost
            (stale if is_old(trajectory) else rest).append(trajectory)
    complete = [name for name, members in groups.items() if len(members) >= group_size]
    flat_names = [name for name in complete if is_flat_group(groups[name][:group_size])]
    flat = [trajectory for name in flat_names for trajectory in groups.pop(name)]
    complete = [name for name in complete if name in groups][:groups_per_step]
    chosen = []
    if len(complete) == groups_per_step:
        for name in complete:
            members = groups.pop(name)
            chosen += members[:group_size]
            stale += members[group_size:]
    rest += [trajectory for members in groups.values() for trajectory in members]
    return GroupChoice(chosen, stale, flat, rest)


def count_groups(trajectories: Iterable[Trajectory]) -> Counter[str]:
    """Count the groups that trajectories belong to, by domain."""
    return Counter({trajectory.group: trajectory.domain for trajectory in trajectories}.values())


def _sort_unconsumed(available: Iterable[Trajectory], *, consumed: Container[str]) -> list[Trajectory]:
    """Return the first trajectory of each id that is not consumed, oldest first."""
    oldest_first = sorted(
        available, key=lambda trajectory: (trajectory.start_version, trajectory.created, trajectory.id)
    )
    by_id: dict[str, Trajectory] = {}
    for trajectory in oldest_first:
        if trajectory.id not in consumed:
            by_id.setdefault(trajectory.id, trajectory)
    return list(by_id.values())


def _is_usable(trajectory: Trajectory) -> bool:
    """Return whether an episode ended normally; a reward that is NaN or infinite would spoil its whole group."""
    return trajectory.status in TRAINABLE and (trajectory.reward is None or math.isfinite(trajectory.reward))
