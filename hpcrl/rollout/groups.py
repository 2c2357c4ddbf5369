"""Groups of episodes: which are kept, aborted or replaced, and a ledger in which each episode ends once. Pure.

    EpisodeGroups   the groups of one env worker
    GroupOutcome    what follows for a group from the end of an episode, or from the time
    EpisodeLedger   which episodes run, which ended and how

A group starts with `episodes_per_group` episodes and is full when `group_size` members have finished. The members are
chosen by index, whichever finish first: an extra episode takes the place of one that failed, and of one that is late
if the recipe defines that. Choosing those that finish first would prefer short episodes (docs/learning.md).
A group that can no longer fill starts others of the same task, `replacements` at most, before it is lost: one fault
does not waste the work of the other members. A kept trajectory that has meanwhile grown older than `max_lag` is
evicted, so that nothing stale is released. A group closes when it is full (its trajectories are released) or lost (they
are dropped); episodes that still run then are aborted.
Only full groups are released: a group with holes would shift the baseline that its members are compared to.

Each episode that is started ends in the ledger exactly once, under one of six statuses; a second end changes nothing.
One that finishes before it is known whether it is needed is kept until then. A retry is not an end: the episode
continues to run.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from hpcrl.spool.ids import get_index, make_episode_id
from hpcrl.spool.outcome import is_too_old
from hpcrl.spool.record import TRAINABLE, Trajectory
from hpcrl.spool.status import EpisodeStatus


class EpisodeLedger:
    """The running and ended episodes of one env worker."""

    def __init__(self) -> None:
        self.running: set[str] = set()
        """Episodes that have not ended, including those being aborted: they keep their place until they have."""
        self.kept: set[str] = set()
        """Episodes that have finished; whether they are needed is known when their group closes."""
        self.endings: Counter[EpisodeStatus] = Counter()
        """Ended episodes by status."""
        self.num_started = 0

    def record_start(self, episodes: Iterable[str]) -> None:
        """Record the start of episodes."""
        new = set(episodes)
        assert not new & self.running, f"episodes started twice: {sorted(new & self.running)}"
        self.running |= new
        self.num_started += len(new)

    def keep(self, episode: str) -> None:
        """Record that an episode has finished; `record_end` follows."""
        self.running.remove(episode)
        self.kept.add(episode)

    def record_end(self, episode: str, status: EpisodeStatus) -> bool:
        """Record the end of an episode; return False, and change nothing, for one that neither runs nor is kept."""
        if episode not in self.running and episode not in self.kept:
            return False
        self.running.discard(episode)
        self.kept.discard(episode)
        self.endings[status] += 1
        return True


@dataclass(frozen=True)
class GroupOutcome:
    """The consequences for a group."""

    is_kept: bool = False
    """The episode that ended waits for others of its group, or is released with them."""
    booked: Sequence[tuple[Trajectory, EpisodeStatus]] = ()
    """The endings recorded in the ledger: that of the episode unless it is kept, and those of others that were. The
    status is `aborted-redundant` for an episode that is not needed, however it ended."""
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
    started_at: float
    next_index: int
    num_left: int
    """Replacements that may still be started."""
    kept: list[Trajectory] = field(default_factory=list)
    is_closed: bool = False


class EpisodeGroups:
    """The groups of one env worker."""

    def __init__(
        self,
        *,
        group_size: int,
        episodes_per_group: int,
        replacements: int = 0,
        max_lag: int | None = None,
        late_after_s: float | None = None,
    ) -> None:
        """Set the sizes of groups, and the limits of age.

        `max_lag` is the age in versions up to which trajectories are kept, `late_after_s` the age of a group from which
        any that have finished are its members; None sets no limit.
        """
        self._group_size = group_size
        self._episodes_per_group = episodes_per_group
        self._replacements = replacements
        self._max_lag = max_lag
        self._late_after_s = late_after_s
        self._groups: dict[str, _GroupState] = {}
        self.ledger = EpisodeLedger()
        self.num_open = 0
        """Groups that may still be released."""
        self.longest_s = 0.0
        """The longest time from the start of a group until it was released."""

    @property
    def max_episodes(self) -> int:
        """The most episodes that one start of a group may have."""
        return self._episodes_per_group + self._replacements

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

    def start(self, group: str, *, first_index: int = 0, now: float = 0.0) -> list[str]:
        """Start a group; return the ids of its episodes, whose indices start at `first_index`."""
        assert group not in self._groups, f"group {group} has been started already"
        next_index = first_index + self._episodes_per_group
        episodes = [make_episode_id(group, index) for index in range(first_index, next_index)]
        self._groups[group] = _GroupState(
            running=set(episodes), started_at=now, next_index=next_index, num_left=self._replacements
        )
        self.ledger.record_start(episodes)
        self.num_open += 1
        return episodes

    def end(self, trajectory: Trajectory, *, newest: int = 0, now: float = 0.0) -> GroupOutcome | None:
        """Record the end of an episode; return None, and change nothing, for a late duplicate or an unknown one.

        `newest` is the newest version of the weights.
        """
        group = self._groups.get(trajectory.group)
        if group is None or trajectory.id not in group.running:
            return None
        group.running.remove(trajectory.id)
        status = self._booked_status(group, trajectory, newest=newest)
        is_kept = status in TRAINABLE and not group.is_closed
        if is_kept:
            group.kept.append(trajectory)
            self.ledger.keep(trajectory.id)
        else:
            self.ledger.record_end(trajectory.id, status)
        outcome = self._update_group(trajectory.group, group, newest=newest, now=now)
        if not group.running:
            del self._groups[trajectory.group]
        if is_kept:
            return replace(outcome, is_kept=True)
        return replace(outcome, booked=[(trajectory, status), *outcome.booked])

    def end_late(self, *, newest: int, now: float) -> list[tuple[str, GroupOutcome]]:
        """Return what follows for the groups in which enough episodes have finished, and the others are late now."""
        if self._late_after_s is None:
            return []
        due = [
            (name, group)
            for name, group in self._groups.items()
            if not group.is_closed and len(group.kept) >= self._group_size and self._is_late(group, now=now)
        ]
        return [(name, self._update_group(name, group, newest=newest, now=now)) for name, group in due]

    def record_abort(self, group: str, episode: str) -> GroupOutcome:
        """Record a cancelled episode, which leaves no trajectory; an open group that can no longer fill is lost."""
        members = self._groups[group]
        members.running.remove(episode)
        self.ledger.record_end(episode, "aborted-redundant")
        outcome = GroupOutcome()
        if not members.is_closed and len(members.kept) + len(members.running) < self._group_size:
            outcome = self._close_group(members)
        if not members.running:
            del self._groups[group]
        return outcome

    def close_all(self) -> GroupOutcome:
        """Close every open group as not needed."""
        outcomes = [self._close_group(group) for group in self._groups.values() if not group.is_closed]
        return GroupOutcome(
            abort=[episode for outcome in outcomes for episode in outcome.abort],
            dropped=[episode for outcome in outcomes for episode in outcome.dropped],
            booked=[booked for outcome in outcomes for booked in outcome.booked],
        )

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

    def _update_group(self, name: str, group: _GroupState, *, newest: int, now: float) -> GroupOutcome:
        """Evict what is too old; release the group, replace lost members, or abandon it."""
        if group.is_closed:
            return GroupOutcome()
        evicted = [kept for kept in group.kept if self._is_stale(kept, newest=newest)]
        group.kept = sorted(
            (kept for kept in group.kept if not self._is_stale(kept, newest=newest)),
            key=lambda kept: get_index(kept.id),
        )
        booked = self._book(evicted, "aborted-stale")
        members = self._find_members(group, now=now)
        missing = self._group_size - len(group.kept) - len(group.running)
        if members:
            self.longest_s = max(self.longest_s, now - group.started_at)
            outcome = self._close_group(group, members)
        elif missing > group.num_left:
            outcome = replace(self._close_group(group), is_lost=True)
        else:
            outcome = GroupOutcome(start=self._start_replacements(name, group, max(missing, 0)))
        dropped = [*(kept.id for kept in evicted), *outcome.dropped]
        return replace(outcome, dropped=dropped, booked=[*booked, *outcome.booked])

    def _find_members(self, group: _GroupState, *, now: float) -> list[Trajectory]:
        """Return the members of a group that is full, or nothing while one of them runs that is not late."""
        num_finished = len(group.kept)
        if num_finished < self._group_size:
            return []
        first_running = min(map(get_index, group.running), default=None)
        last = group.kept[self._group_size - 1]
        is_decided = first_running is None or get_index(last.id) < first_running
        return group.kept[: self._group_size] if is_decided or self._is_late(group, now=now) else []

    def _start_replacements(self, name: str, group: _GroupState, missing: int) -> list[int]:
        """Start `missing` more episodes of a group, with indices that were never used in it."""
        indices = list(range(group.next_index, group.next_index + missing))
        episodes = [make_episode_id(name, index) for index in indices]
        group.next_index += missing
        group.num_left -= missing
        group.running.update(episodes)
        self.ledger.record_start(episodes)
        return indices

    def _is_late(self, group: _GroupState, *, now: float) -> bool:
        return self._late_after_s is not None and now - group.started_at >= self._late_after_s

    def _is_stale(self, trajectory: Trajectory, *, newest: int) -> bool:
        return self._max_lag is not None and is_too_old(trajectory.start_version, newest=newest, max_lag=self._max_lag)

    def _close_group(self, group: _GroupState, members: Sequence[Trajectory] = ()) -> GroupOutcome:
        """Close a group and release its members, or drop all that it kept; abort the episodes that still run."""
        released = {member.id for member in members}
        unneeded = [kept for kept in group.kept if kept.id not in released]
        group.is_closed = True
        group.kept = []
        self.num_open -= 1
        return GroupOutcome(
            released=members,
            abort=sorted(group.running, key=get_index),
            dropped=[kept.id for kept in unneeded],
            booked=[*self._book(members), *self._book(unneeded, "aborted-redundant")],
        )

    def _book(
        self, trajectories: Iterable[Trajectory], status: EpisodeStatus | None = None
    ) -> list[tuple[Trajectory, EpisodeStatus]]:
        """Record the endings of kept episodes, by default with their own status."""
        booked = [(trajectory, status or trajectory.status) for trajectory in trajectories]
        for trajectory, recorded in booked:
            self.ledger.record_end(trajectory.id, recorded)
        return booked
