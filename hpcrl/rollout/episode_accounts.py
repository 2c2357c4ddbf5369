"""Accounts of an env worker's episodes, kept in step: groups, start versions, the journal on disk, and rows.

An episode is started and ended here once, and every account follows: the group that it counts for, the versions that
the worker's hold depends on, the journal that a restarted worker reads, and the row of its task. A row is used up when
its whole group is durable or lost, and used again once after its group was cancelled.
"""

from collections.abc import Collection

from hpcrl.rollout.flow_control import InFlightVersions
from hpcrl.rollout.groups import EpisodeGroups, GroupOutcome
from hpcrl.rollout.journal import EpisodeJournal
from hpcrl.rollout.task_sets import TaskSets
from hpcrl.rollout.tasks import AgentTask
from hpcrl.spool.record import Trajectory


class EpisodeAccounts:
    """The accounts of one env worker; `recover` before anything else."""

    def __init__(self, groups: EpisodeGroups, *, journal: EpisodeJournal, task_sets: TaskSets) -> None:
        self.groups = groups
        self.in_flight = InFlightVersions()
        self._journal = journal
        self._task_sets = task_sets

    def recover(self) -> int:
        """Record as lost the episodes that a killed run of the worker left; return their number."""
        return self.groups.ledger.record_lost(self._journal.open())

    def start_group(self, task: AgentTask, *, version: int) -> int:
        """Record the start of a task's group; return its number of episodes."""
        episodes = self.groups.start(task.group)
        self._record_start(episodes, version=version)
        return len(episodes)

    def end_episode(self, task: AgentTask, trajectory: Trajectory, *, newest: int) -> GroupOutcome | None:
        """Record the end of an episode, and the start of those that the outcome names; None for an unknown one."""
        outcome = self.groups.end(trajectory, newest=newest)
        self.in_flight.end(trajectory.id, outcome)
        if outcome is None:
            return None
        self._journal.record_end(trajectory.id, running=self.groups.ledger.running)
        if outcome.start:
            self._record_start([task.episode(index) for index in outcome.start], version=newest)
        if outcome.released:
            self._task_sets.release_task(task, [kept.id for kept in outcome.released])
        if outcome.is_lost:
            self._task_sets.finish_task(task)
        self._return_row(task)
        return outcome

    def abort_episode(self, task: AgentTask, index: int) -> None:
        """Record the end of a cancelled episode, which leaves no trajectory."""
        episode = task.episode(index)
        self.in_flight.drop(episode)
        self.groups.record_abort(task.group, episode)
        self._return_row(task)
        self._journal.record_end(episode, running=self.groups.ledger.running)

    def close_groups(self) -> list[str]:
        """Close every open group as not needed; return the episodes to abort."""
        aborted, dropped = self.groups.close_all()
        for episode in dropped:
            self.in_flight.drop(episode)
        return aborted

    def record_sealed(self, episodes: Collection[str]) -> None:
        """Record that the trajectories of these episodes are durable."""
        self._task_sets.record_sealed(episodes)
        for episode in episodes:
            self.in_flight.drop(episode)

    def close(self) -> None:
        """Write the progress in rows, and close the journal."""
        self._task_sets.save()
        self._journal.close()

    def _record_start(self, episodes: list[str], *, version: int) -> None:
        self._journal.record_start(episodes)
        for episode in episodes:
            self.in_flight.start(episode, version=version)

    def _return_row(self, task: AgentTask) -> None:
        """Use the row of a group again that was cancelled, once its last episode has ended."""
        if not self.groups.is_running(task.group):
            self._task_sets.return_task(task)
