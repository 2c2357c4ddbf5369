"""The accounts of groups and their episodes: what is kept, what is aborted, what it cost. Pure.

A group begins with `group_size + redundancy` episodes and keeps the first `group_size` that finish. It closes when
it is full (its trajectories are released) or when it can no longer fill (they are dropped, and admission
begins another in its place); what still runs then is aborted. Every episode begun ends in the accounts exactly once.
Only trajectories of full groups leave: a group with holes would shift the baseline that its members are compared to.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from hpcrl.spool.record import TRAINABLE, Status, Trajectory


@dataclass(frozen=True)
class Ending:
    """What follows from the end of one episode."""

    status: Status
    """As booked: an episode that nobody needs any more is `aborted-redundant`, however it ended."""
    released: Sequence[Trajectory] = ()
    """The group is full: its trajectories, by index."""
    abort: Sequence[str] = ()
    """Episodes of the same group that nobody needs any more."""
    lost: bool = False
    """The group can no longer fill."""


@dataclass
class _Group:
    """One group that is open or has episodes still running."""

    running: set[str]
    kept: list[Trajectory] = field(default_factory=list)
    closed: bool = False


class Groups:
    """The groups of one env host."""

    def __init__(self, *, group_size: int, redundancy: int) -> None:
        self._group_size = group_size
        self._num_begun = group_size + redundancy
        self._groups: dict[str, _Group] = {}
        self.num_running = 0
        """Episodes that have not ended, those being aborted included: they hold their place until they have."""
        self.num_open = 0
        """Groups that may still be released."""
        self.endings: Counter[Status] = Counter()
        """Episodes that ended, by the status they were booked with."""
        self.num_released = 0
        """Groups whose trajectories were handed on."""
        self.num_lost = 0
        """Groups that could no longer fill."""

    def begin(self, group: str) -> list[str]:
        """Begin a group; returns the ids of its episodes."""
        assert group not in self._groups, f"group {group} has begun already"
        episodes = [f"{group}/{index}" for index in range(self._num_begun)]
        self._groups[group] = _Group(running=set(episodes))
        self.num_running += len(episodes)
        self.num_open += 1
        return episodes

    def end(self, trajectory: Trajectory) -> Ending | None:
        """Book the end of an episode; None for a late duplicate or one that never began here, which change nothing."""
        group = self._groups.get(trajectory.group)
        if group is None or trajectory.id not in group.running:
            return None
        group.running.remove(trajectory.id)
        self.num_running -= 1
        ending = self._settle(group, trajectory)
        self.endings[ending.status] += 1
        if not group.running:
            del self._groups[trajectory.group]
        return ending

    def aborted(self, group: str, episode: str) -> None:
        """Book an episode that was cancelled; it leaves no trajectory, and its group, if still open, is given up."""
        members = self._groups[group]
        members.running.remove(episode)
        self.num_running -= 1
        self.endings["aborted-redundant"] += 1
        if not members.closed and len(members.kept) + len(members.running) < self._group_size:
            self.num_lost += 1
            self._close(members)
        if not members.running:
            del self._groups[group]

    def _settle(self, group: _Group, trajectory: Trajectory) -> Ending:
        if group.closed:
            faulted = trajectory.status in ("env-fault", "policy-fault")
            return Ending(status=trajectory.status if faulted else "aborted-redundant")
        if trajectory.status in TRAINABLE:
            group.kept.append(trajectory)
            if len(group.kept) == self._group_size:
                self.num_released += 1
                released = sorted(group.kept, key=lambda kept: _index(kept.id))
                return Ending(status=trajectory.status, released=released, abort=self._close(group))
        elif len(group.kept) + len(group.running) < self._group_size:
            self.num_lost += 1
            return Ending(status=trajectory.status, abort=self._close(group), lost=True)
        return Ending(status=trajectory.status)

    def _close(self, group: _Group) -> list[str]:
        """Close a group and let go of its trajectories; returns the episodes to abort."""
        group.closed = True
        group.kept.clear()
        self.num_open -= 1
        return sorted(group.running, key=_index)


def _index(episode: str) -> int:
    return int(episode.rpartition("/")[2])
