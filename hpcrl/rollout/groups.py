"""Groups of episodes: which are kept, aborted or replaced, and a ledger in which each episode ends once. Pure.

    EpisodeGroups                       the groups of one env worker
    GroupOutcome                        the consequences of one episode's end
    EpisodeLedger                       which episodes run, which ended and how
    format_start_line, format_end_line  lines of the journal
    replay_journal                      the episodes that a journal shows as started and not ended

A group starts with `episodes_per_group` episodes and keeps the first `group_size` that finish. One that can no longer
fill starts others of the same task, `replacements` at most, before it is lost: one fault does not waste the work of
the other members. A kept trajectory that has meanwhile grown older than `max_lag` is evicted, so that nothing stale is
released. A group closes when it is full (its trajectories are released) or lost (they are dropped, and admission
starts another); episodes that still run then are aborted.
Only full groups are released: a group with holes would shift the baseline that its members are compared to.

Each episode that is started ends in the ledger exactly once, under one of six statuses; a second end changes nothing.
A retry is not an end: the episode continues to run. Episodes that ran when a worker was killed are recorded by its next
run as infrastructure faults, since the agent had no part in it.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hpcrl.spool.ids import get_index, make_episode_id
from hpcrl.spool.record import TRAINABLE, Trajectory
from hpcrl.spool.status import EpisodeStatus


class EpisodeLedger:
    """The running and ended episodes of one env worker."""

    def __init__(self) -> None:
        self.running: set[str] = set()
        """Episodes that have not ended, including those being aborted: they keep their place until they have."""
        self.endings: Counter[EpisodeStatus] = Counter()
        """Ended episodes by status."""
        self.num_started = 0

    @property
    def is_balanced(self) -> bool:
        """The ledger's invariant: every started episode runs or has ended once."""
        return self.num_started == len(self.running) + self.endings.total()

    def record_start(self, episodes: Iterable[str]) -> None:
        """Record the start of episodes."""
        new = set(episodes)
        assert not new & self.running, f"episodes started twice: {sorted(new & self.running)}"
        self.running |= new
        self.num_started += len(new)

    def record_end(self, episode: str, status: EpisodeStatus) -> bool:
        """Record the end of an episode; return False, and change nothing, for one that is not running."""
        if episode not in self.running:
            return False
        self.running.remove(episode)
        self.endings[status] += 1
        return True

    def record_lost(self, episodes: Iterable[str]) -> int:
        """Record as faults the episodes that a killed worker was running; return their number."""
        lost = set(episodes)
        self.record_start(lost)
        for episode in lost:
            self.record_end(episode, "env-fault")
        return len(lost)


def format_start_line(episodes: Iterable[str]) -> dict[str, Any]:
    """Return the journal's line for episodes that start."""
    return {"begin": list(episodes)}


def format_end_line(episode: str) -> dict[str, Any]:
    """Return the journal's line for an episode that has ended."""
    return {"end": episode}


def replay_journal(lines: Iterable[Mapping[str, Any]]) -> set[str]:
    """Return the episodes that the journal shows as started and not ended; a torn last line is ignored."""
    running: set[str] = set()
    for line in lines:
        running.update(line.get("begin", ()))
        running.discard(line.get("end", ""))
    return running


@dataclass(frozen=True)
class GroupOutcome:
    """The consequences of one episode's end."""

    status: EpisodeStatus
    """The status recorded in the ledger: `aborted-redundant` for an episode no longer needed, however it ended."""
    released: Sequence[Trajectory] = ()
    """The trajectories of a group that is now full, by index."""
    abort: Sequence[str] = ()
    """Episodes of the same group that are not needed any more."""
    start: Sequence[int] = ()
    """Indices of the episodes of the same group to be started in place of lost ones."""
    is_lost: bool = False
    """The group can no longer fill."""
    dropped: Sequence[str] = ()
    """Kept episodes of the same group that are not used: they grew too old, or the group is lost."""


@dataclass
class _GroupState:
    """One group that is open or has episodes still running."""

    running: set[str]
    num_started: int
    kept: list[Trajectory] = field(default_factory=list)
    is_closed: bool = False


class EpisodeGroups:
    """The groups of one env worker."""

    def __init__(
        self, *, group_size: int, episodes_per_group: int, replacements: int = 0, max_lag: int | None = None
    ) -> None:
        """Set the sizes of groups and `max_lag`, the age in versions up to which trajectories are kept; None: any."""
        self._group_size = group_size
        self._num_initial = episodes_per_group
        self._max_episodes = episodes_per_group + replacements
        self._max_lag = max_lag
        self._groups: dict[str, _GroupState] = {}
        self.ledger = EpisodeLedger()
        self.num_open = 0
        """Groups that may still be released."""
        self.num_lost = 0
        """Groups that could not be filled."""
        self.num_replaced = 0
        """Episodes started in place of lost ones."""
        self.num_evicted = 0
        """Trajectories that were kept and then grew too old before their group was full."""

    @property
    def num_running(self) -> int:
        """Episodes that have not ended, including those being aborted."""
        return len(self.ledger.running)

    @property
    def endings(self) -> Counter[EpisodeStatus]:
        """Ended episodes by recorded status."""
        return self.ledger.endings

    def is_running(self, group: str) -> bool:
        """Return whether a group has episodes that have not ended."""
        return group in self._groups

    def start(self, group: str) -> list[str]:
        """Start a group; return the ids of its episodes."""
        assert group not in self._groups, f"group {group} has been started already"
        episodes = [make_episode_id(group, index) for index in range(self._num_initial)]
        self._groups[group] = _GroupState(running=set(episodes), num_started=self._num_initial)
        self.ledger.record_start(episodes)
        self.num_open += 1
        return episodes

    def end(self, trajectory: Trajectory, *, newest: int = 0) -> GroupOutcome | None:
        """Record the end of an episode; return None, and change nothing, for a late duplicate or an unknown one.

        `newest` is the newest version of the weights.
        """
        group = self._groups.get(trajectory.group)
        if group is None or trajectory.id not in group.running:
            return None
        group.running.remove(trajectory.id)
        status = self._booked_status(group, trajectory, newest=newest)
        self.ledger.record_end(trajectory.id, status)
        if not group.is_closed and status in TRAINABLE:
            group.kept.append(trajectory)
        outcome = self._make_outcome(trajectory.group, group, status, newest=newest)
        if not group.running:
            del self._groups[trajectory.group]
        return outcome

    def record_abort(self, group: str, episode: str) -> None:
        """Record a cancelled episode, which leaves no trajectory; an open group that can no longer fill is lost."""
        members = self._groups[group]
        members.running.remove(episode)
        self.ledger.record_end(episode, "aborted-redundant")
        if not members.is_closed and len(members.kept) + len(members.running) < self._group_size:
            self.num_lost += 1
            self._close(members)
        if not members.running:
            del self._groups[group]

    def close_all(self) -> tuple[list[str], list[str]]:
        """Close every open group as not needed; return the episodes to abort and the kept ones that are dropped."""
        still_open = [group for group in self._groups.values() if not group.is_closed]
        dropped = [kept.id for group in still_open for kept in group.kept]
        return [episode for group in still_open for episode in self._close(group)], dropped

    def _booked_status(self, group: _GroupState, trajectory: Trajectory, *, newest: int) -> EpisodeStatus:
        """Return the status to record: too late for its group, too old for training, or the trajectory's own."""
        status = trajectory.status
        if status in TRAINABLE and group.is_closed:
            return "aborted-redundant"
        if status in TRAINABLE and self._is_stale(trajectory, newest=newest):
            return "aborted-stale"
        if status == "aborted-stale" and group.is_closed:
            return "aborted-redundant"
        return status

    def _make_outcome(self, name: str, group: _GroupState, status: EpisodeStatus, *, newest: int) -> GroupOutcome:
        if group.is_closed:
            return GroupOutcome(status=status)
        fresh = [kept for kept in group.kept if not self._is_stale(kept, newest=newest)]
        evicted = [kept.id for kept in group.kept if self._is_stale(kept, newest=newest)]
        self.num_evicted += len(evicted)
        group.kept = fresh
        missing = self._group_size - len(fresh) - len(group.running)
        if len(fresh) == self._group_size:
            released = sorted(fresh, key=lambda kept: get_index(kept.id))
            return GroupOutcome(status=status, released=released, abort=self._close(group), dropped=evicted)
        if missing <= 0:
            return GroupOutcome(status=status, dropped=evicted)
        if group.num_started + missing > self._max_episodes:
            self.num_lost += 1
            dropped = [*evicted, *(kept.id for kept in fresh)]
            return GroupOutcome(status=status, abort=self._close(group), is_lost=True, dropped=dropped)
        return GroupOutcome(status=status, start=self._start_replacements(name, group, missing), dropped=evicted)

    def _start_replacements(self, name: str, group: _GroupState, missing: int) -> list[int]:
        """Start `missing` more episodes of a group, with indices that were never used in it."""
        indices = list(range(group.num_started, group.num_started + missing))
        episodes = [make_episode_id(name, index) for index in indices]
        group.num_started += missing
        group.running.update(episodes)
        self.ledger.record_start(episodes)
        self.num_replaced += missing
        return indices

    def _is_stale(self, trajectory: Trajectory, *, newest: int) -> bool:
        return self._max_lag is not None and newest - trajectory.start_version > self._max_lag

    def _close(self, group: _GroupState) -> list[str]:
        """Close a group and release its trajectories; return the episodes to abort."""
        group.is_closed = True
        group.kept = []
        self.num_open -= 1
        return sorted(group.running, key=get_index)
