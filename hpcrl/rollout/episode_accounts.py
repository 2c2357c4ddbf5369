"""Accounts of an env worker's episodes, kept in step: groups, start versions, and the journal of tasks.

    EpisodeAccounts   the accounts of one env worker
    MAX_TASK_STARTS   how often the group of a task is started before it is abandoned

An episode is started and ended here once, and every account follows: the group that it counts for, the versions that
the worker's hold depends on, and the journal that the next run reads. A task ends when its group was trained on. Until
then it is started again: after its group was cancelled, after too many of its episodes were lost, after the worker was
killed or its job ended, and after the trainer dropped it as too old. One that was started MAX_TASK_STARTS times is
abandoned and reported.
"""

from collections.abc import Callable, Collection, Container, Iterable
from typing import Protocol

from hpcrl.campaign_dir.events import CampaignEvent, TaskFailed, TasksRestarted
from hpcrl.rollout.flow_control import InFlightVersions
from hpcrl.rollout.groups import EpisodeGroups, GroupOutcome
from hpcrl.rollout.journal import TaskJournal
from hpcrl.rollout.tasks import AgentTask
from hpcrl.spool.ids import get_group
from hpcrl.spool.outcome import OUTCOME_UNPLAYED
from hpcrl.spool.record import Trajectory

MAX_TASK_STARTS = 4


class TaskReturn(Protocol):
    """Takes a task that is to be started again; `lost` if too many of its episodes were."""

    def __call__(self, task: AgentTask, *, lost: bool) -> None: ...


class EpisodeAccounts:
    """The accounts of one env worker; `recover` before anything else."""

    def __init__(
        self,
        groups: EpisodeGroups,
        *,
        journal: TaskJournal,
        return_task: TaskReturn,
        emit: Callable[[CampaignEvent], None],
        find_oldest_start: Callable[[int], int],
    ) -> None:
        """Keep accounts of `groups`.

        `find_oldest_start` returns the oldest version with which an episode may start while a version is the newest.
        """
        self.groups = groups
        self.in_flight = InFlightVersions()
        self._journal = journal
        self._return_task = return_task
        self._emit = emit
        self._find_oldest_start = find_oldest_start
        self._tasks: dict[str, AgentTask] = {}
        """The tasks of groups that were started and have not ended, by group."""
        self._unneeded: set[str] = set()
        """The groups of them that were closed because the batch has enough."""
        self._losses: dict[str, str] = {}
        """The last faults of those that were closed because too many of their episodes were lost."""
        self._unsealed: dict[str, set[str]] = {}
        """The trajectories of released groups that are not durable yet, by group."""

    @property
    def can_start(self) -> bool:
        """Return whether the journal can be written: a group must be in it before its episodes run."""
        return self._journal.flush() and not self._journal.is_replaced

    def list_released(self) -> list[str]:
        """Return the groups that an earlier run released, and perhaps made durable."""
        known = self._journal.state.open.items()
        return [group for group, one in known if one.released_at and not one.is_durable]

    def recover(self, *, durable: Container[str]) -> None:
        """Return the tasks that an earlier run of the worker left; the groups `durable` are complete."""
        num_restarted = 0
        for left in list(self._journal.state.open.values()):
            if left.is_durable:
                continue
            if left.task.group in durable:
                self._journal.record_durable(left.task)
            elif left.num_starts >= MAX_TASK_STARTS:
                self._abandon_task(left.task, "its env worker or job ended before it")
            else:
                self._journal.record_return(left.task, counts=True)
                self._return_task(left.task, lost=False)
                num_restarted += left.num_starts > 0
        if num_restarted:
            self._emit(TasksRestarted(num=num_restarted))

    def start_group(self, task: AgentTask, *, newest: int, now: float = 0.0) -> list[int]:
        """Record the start of a task's group; return the indices of its episodes."""
        num_earlier = self._journal.record_start(task) - 1
        self._tasks[task.group] = task
        first_index = num_earlier * self.groups.max_episodes  # episodes of an earlier start may be durable
        episodes = self.groups.start(task.group, first_index=first_index, now=now)
        self._record_start(episodes, newest=newest)
        return list(range(first_index, first_index + len(episodes)))

    def end_episode(
        self, task: AgentTask, trajectory: Trajectory, *, newest: int, now: float = 0.0
    ) -> GroupOutcome | None:
        """Record the end of an episode, and the start of those that the outcome names; None for an unknown one."""
        outcome = self.groups.end(trajectory, newest=newest, now=now)
        self.in_flight.end(trajectory.id, is_kept=outcome is not None and outcome.is_kept)
        if outcome is None:
            return None
        self._apply(task, outcome, newest=newest)
        if outcome.is_lost:
            self._losses[task.group] = str(trajectory.extra.get("fault") or trajectory.status)
            if trajectory.outcome == OUTCOME_UNPLAYED:  # nothing failed: it is not a task to play
                self._end_task(task)
        self._settle(task, why=f"its last episode: {trajectory.extra.get('fault') or trajectory.status}")
        return outcome

    def end_late(self, *, newest: int, now: float) -> list[tuple[AgentTask, GroupOutcome]]:
        """Record the groups whose last members are late now; return what follows for each."""
        outcomes = []
        for group, outcome in self.groups.end_late(newest=newest, now=now):
            task = self._tasks[group]
            self._apply(task, outcome, newest=newest)
            outcomes.append((task, outcome))
        return outcomes

    def abort_episode(self, task: AgentTask, index: int) -> GroupOutcome:
        """Record the end of a cancelled episode, which leaves no trajectory."""
        episode = task.episode(index)
        self.in_flight.drop(episode)
        outcome = self.groups.record_abort(task.group, episode)
        for dropped in outcome.dropped:
            self.in_flight.drop(dropped)
        self._settle(task, why="its episodes were cancelled")
        return outcome

    def close_groups(self) -> GroupOutcome:
        """Close every open group as not needed; they start again later."""
        outcome = self.groups.close_all()
        self._unneeded.update(map(get_group, outcome.abort))
        for episode in outcome.dropped:
            self.in_flight.drop(episode)
        return outcome

    def record_sealed(self, episodes: Collection[str]) -> None:
        """Record that the trajectories of these episodes are durable."""
        for episode in episodes:
            self.in_flight.drop(episode)
            group = get_group(episode)
            missing = self._unsealed.get(group, set())
            missing.discard(episode)
            if group in self._unsealed and not missing:
                del self._unsealed[group]
                self._journal.record_durable(self._tasks.pop(group))

    def record_dropped(self, groups: Iterable[str], *, at: float) -> None:
        """Start groups again that the trainer dropped at this time as too old; first their cancelled episodes end."""
        for group in groups:
            known = self._journal.state.open.get(group)
            if known is None or not 0 < known.released_at <= at:
                continue
            self._unsealed.pop(group, None)  # it was read, so it is durable, whether that was reported or not
            self._tasks[group] = known.task
            self._settle(known.task, why="its trajectories were too old when they could be trained on")

    def record_trained(self, groups: Container[str]) -> None:
        """End the tasks whose groups are among those that were trained on."""
        trained = [known.task for group, known in self._journal.state.open.items() if group in groups]
        for task in trained:
            self._end_task(task)

    def close(self) -> None:
        """Close the journal. What is open in it is started again by the next run."""
        self._journal.close()

    def _record_start(self, episodes: list[str], *, newest: int) -> None:
        oldest = self._find_oldest_start(newest)
        for episode in episodes:
            self.in_flight.start(episode, version=oldest)

    def _apply(self, task: AgentTask, outcome: GroupOutcome, *, newest: int) -> None:
        self.in_flight.apply(outcome)
        self._record_start([task.episode(index) for index in outcome.start], newest=newest)
        if outcome.released:
            self._journal.record_release(task)
            self._unsealed[task.group] = {kept.id for kept in outcome.released}

    def _settle(self, task: AgentTask, *, why: str) -> None:
        """After the last episode of a group that is not on its way into the spool, start it again or abandon it."""
        group = task.group
        if self.groups.is_running(group) or group in self._unsealed or group not in self._tasks:
            return
        is_needed = group not in self._unneeded
        self._unneeded.discard(group)
        del self._tasks[group]
        loss = self._losses.pop(group, "")
        num_starts = self._journal.record_return(task, counts=is_needed)
        if num_starts >= MAX_TASK_STARTS:
            self._abandon_task(task, loss or why)
        else:
            self._return_task(task, lost=bool(loss))

    def _abandon_task(self, task: AgentTask, why: str) -> None:
        self._emit(TaskFailed(id=task.group, domain=task.domain, seed=task.seed, place=task.place, reason=why))
        self._end_task(task)

    def _end_task(self, task: AgentTask) -> None:
        self._tasks.pop(task.group, None)
        self._losses.pop(task.group, None)
        self._unsealed.pop(task.group, None)  # the trainer may have read a group before its batch is reported durable
        self._journal.record_end(task)
