"""Groups of episodes: what is kept, what is aborted, what is begun in place of what was lost. Pure.

A group begins with `episodes_per_group` episodes and keeps the first `group_size` that finish. One that can no
longer fill begins others of the same task, `replacements` at most, before it is given up: what its members have done so
far is not thrown away for one fault. What was kept and has grown older than `max_lag` meanwhile is put out of the
group again, so that nothing stale leaves. A group closes when it is full (its trajectories are released) or given up
(they are dropped, and admission begins another); what still runs then is aborted.
Only trajectories of full groups leave: a group with holes would shift the baseline that its members are compared to.

The books of episodes: each one that is begun ends in them exactly once, under one of six headings. Pure.

Accounts    what runs, what ended and how; a second ending of the same episode is no ending
replay      the accounts that lines of a journal lead to, so that a new life of a host knows what the last one left

A retry is not an ending: the episode goes on running. What ran when a host died is booked by its next life, as an
infrastructure fault: the agent had no part in it.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hpcrl.spool.ids import get_index, make_episode_id
from hpcrl.spool.record import TRAINABLE, Trajectory
from hpcrl.spool.status import EpisodeStatus


class EpisodeLedger:
    """The books of one env host."""

    def __init__(self) -> None:
        self.running: set[str] = set()
        """Episodes that have not ended, those being aborted included: they hold their place until they have."""
        self.endings: Counter[EpisodeStatus] = Counter()
        """Episodes that ended, by how."""
        self.num_started = 0

    @property
    def is_balanced(self) -> bool:
        """Whether every episode that was begun runs or has ended once."""
        return self.num_started == len(self.running) + self.endings.total()

    def record_start(self, episodes: Iterable[str]) -> None:
        """Book the beginning of episodes."""
        new = set(episodes)
        assert not new & self.running, f"episodes begun twice: {sorted(new & self.running)}"
        self.running |= new
        self.num_started += len(new)

    def record_end(self, episode: str, status: EpisodeStatus) -> bool:
        """Book the end of an episode; False for one that is not running, which changes nothing."""
        if episode not in self.running:
            return False
        self.running.remove(episode)
        self.endings[status] += 1
        return True

    def record_lost(self, episodes: Iterable[str]) -> int:
        """Book what a dead host was running; returns how many there were."""
        lost = set(episodes)
        self.record_start(lost)
        for episode in lost:
            self.record_end(episode, "env-fault")
        return len(lost)


def format_start_line(episodes: Iterable[str]) -> dict[str, Any]:
    """The journal's line for episodes that begin."""
    return {"begin": list(episodes)}


def format_end_line(episode: str) -> dict[str, Any]:
    """The journal's line for an episode that was booked."""
    return {"end": episode}


def replay_journal(lines: Iterable[Mapping[str, Any]]) -> set[str]:
    """The episodes that were begun and never booked, by the journal; a torn last line is as good as none."""
    running: set[str] = set()
    for line in lines:
        running.update(line.get("begin", ()))
        running.discard(line.get("end", ""))
    return running


@dataclass(frozen=True)
class GroupOutcome:
    """What follows from the end of one episode."""

    status: EpisodeStatus
    """As booked: an episode that nobody needs any more is `aborted-redundant`, however it ended."""
    released: Sequence[Trajectory] = ()
    """The group is full: its trajectories, by index."""
    abort: Sequence[str] = ()
    """Episodes of the same group that nobody needs any more."""
    start: Sequence[int] = ()
    """Indices of the episodes of the same group that are begun in place of lost ones."""
    is_lost: bool = False
    """The group is given up."""
    dropped: Sequence[str] = ()
    """Episodes of the same group that had been kept, in vain: grown too old, or the group is given up."""


@dataclass
class _GroupState:
    """One group that is open or has episodes still running."""

    running: set[str]
    num_started: int
    kept: list[Trajectory] = field(default_factory=list)
    is_closed: bool = False


class EpisodeGroups:
    """The groups of one env host."""

    def __init__(
        self, *, group_size: int, episodes_per_group: int, replacements: int = 0, max_lag: int | None = None
    ) -> None:
        """`max_lag`: how old what is kept may grow; None: as old as it likes."""
        self._group_size = group_size
        self._num_initial = episodes_per_group
        self._max_episodes = episodes_per_group + replacements
        self._max_lag = max_lag
        self._groups: dict[str, _GroupState] = {}
        self.ledger = EpisodeLedger()
        self.num_open = 0
        """Groups that may still be released."""
        self.num_lost = 0
        """Groups that were given up."""
        self.num_replaced = 0
        """Episodes begun in place of lost ones."""
        self.num_evicted = 0
        """Trajectories that were kept and then grew too old before their group was full."""

    @property
    def num_running(self) -> int:
        """Episodes that have not ended, those being aborted included."""
        return len(self.ledger.running)

    @property
    def endings(self) -> Counter[EpisodeStatus]:
        """Episodes that ended, by the status they were booked with."""
        return self.ledger.endings

    def start(self, group: str) -> list[str]:
        """Begin a group; returns the ids of its episodes."""
        assert group not in self._groups, f"group {group} has begun already"
        episodes = [make_episode_id(group, index) for index in range(self._num_initial)]
        self._groups[group] = _GroupState(running=set(episodes), num_started=self._num_initial)
        self.ledger.record_start(episodes)
        self.num_open += 1
        return episodes

    def end(self, trajectory: Trajectory, *, newest: int = 0) -> GroupOutcome | None:
        """Book the end of an episode; None for a late duplicate or one that never began here, which change nothing.

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
        """Book an episode that was cancelled; it leaves no trajectory, and its group, if still open, is given up."""
        members = self._groups[group]
        members.running.remove(episode)
        self.ledger.record_end(episode, "aborted-redundant")
        if not members.is_closed and len(members.kept) + len(members.running) < self._group_size:
            self.num_lost += 1
            self._close(members)
        if not members.running:
            del self._groups[group]

    def close_all(self) -> tuple[list[str], list[str]]:
        """Close every group that is open: nobody needs it; returns the episodes to abort and those kept in vain."""
        still_open = [group for group in self._groups.values() if not group.is_closed]
        dropped = [kept.id for group in still_open for kept in group.kept]
        return [episode for group in still_open for episode in self._close(group)], dropped

    def _booked_status(self, group: _GroupState, trajectory: Trajectory, *, newest: int) -> EpisodeStatus:
        """Under what an ending is booked: too late for its group, too old for training, or as it says itself."""
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
        """Begin `missing` more episodes of a group, under numbers that were never used in it."""
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
        """Close a group and let go of its trajectories; returns the episodes to abort."""
        group.is_closed = True
        group.kept = []
        self.num_open -= 1
        return sorted(group.running, key=get_index)
