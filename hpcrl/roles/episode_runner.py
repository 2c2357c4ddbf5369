"""The running episodes of an env worker: how they start and end, and what that means for their groups.

EpisodeRunner   starts, ends and aborts the episodes of one worker

A group that is full goes to the spool, which aborts what runs of it still; an episode that is lost is replaced; a batch
that is complete aborts the groups that it does not need.
"""

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial

from hpcrl.engines.base import Completion
from hpcrl.roles.episode_player import EpisodePlayer
from hpcrl.rollout.admission import AdmissionControl
from hpcrl.rollout.episode import loop_time
from hpcrl.rollout.episode_accounts import EpisodeAccounts
from hpcrl.rollout.flow_control import TrainerProgress
from hpcrl.rollout.groups import GroupOutcome
from hpcrl.rollout.quick_rewards import QuickScorer
from hpcrl.rollout.reporting import EpisodeReporter
from hpcrl.rollout.rollout_spool import RolloutSpool
from hpcrl.rollout.task_queue import TaskQueue
from hpcrl.rollout.tasks import AgentTask
from hpcrl.spool.record import Trajectory
from hpcrl.system.pulse import note_work


@dataclass(frozen=True, kw_only=True)
class EpisodeRunner:
    """Starts, ends and aborts the episodes of one env worker; each runs on its own timeline."""

    player: EpisodePlayer
    progress: TrainerProgress
    task_queue: TaskQueue
    accounts: EpisodeAccounts
    admission: AdmissionControl
    quick_scorer: QuickScorer
    rollouts: RolloutSpool
    reporter: EpisodeReporter
    forget: Callable[[str], None]
    """Called with each episode that has ended."""
    on_release: Callable[[], None]
    """Called when a group was released."""
    running: "dict[str, asyncio.Task[None]]" = field(default_factory=dict)
    """The episodes that run, by name."""

    def start_group(self, task: AgentTask) -> None:
        """Start a group; from here on its episodes run independently."""
        indices = self.accounts.start_group(task, newest=self.progress.newest_version, now=loop_time())
        self._start_episodes(task, indices)

    def end_late_groups(self) -> None:
        """Release the groups whose last members are late."""
        newest = self.progress.newest_version
        for task, outcome in self.accounts.end_late(newest=newest, now=loop_time()):
            self._apply_outcome(task, outcome)

    def record_turn(self, episode: str, completion: Completion) -> None:
        """Record a turn of an episode, and the oldest version that generated it."""
        note_work()
        version = min(completion.versions, default=self.progress.newest_version)
        self.accounts.in_flight.record_version(episode, version=version)
        self.reporter.record_turn(episode, len(completion.token_ids))

    async def abort_all(self) -> None:
        """Abort every episode that runs."""
        for running in self.running.values():
            running.cancel()
        await asyncio.gather(*self.running.values(), return_exceptions=True)

    def _start_episodes(self, task: AgentTask, indices: Iterable[int]) -> None:
        for index in indices:
            episode = task.episode(index)
            running = asyncio.create_task(self._run_episode(task, index), name=episode)
            self.running[episode] = running
            running.add_done_callback(partial(self._abort_unstarted, task, index))

    async def _run_episode(self, task: AgentTask, index: int) -> None:
        episode = task.episode(index)
        try:
            trajectory = await self.player.play_training(task, index)
            await self.rollouts.wait_for_room()
        except asyncio.CancelledError:
            self._abort_episode(task, index)
            return
        finally:
            del self.running[episode]
            self.forget(episode)
        self._record_result(task, trajectory)

    def _abort_episode(self, task: AgentTask, index: int) -> None:
        self.reporter.count_endings(self.accounts.abort_episode(task, index).booked)
        self.reporter.abort_episode(task.episode(index))
        self.task_queue.end_task(task)

    def _abort_unstarted(self, task: AgentTask, index: int, ended: "asyncio.Task[None]") -> None:
        """Abort an episode that was cancelled before its first step, of which its coroutine has seen nothing.

        Its group would wait for it for ever, and the trainer for the group.
        """
        episode = task.episode(index)
        if self.running.get(episode) is ended:
            del self.running[episode]
            self._abort_episode(task, index)

    def _record_result(self, task: AgentTask, trajectory: Trajectory) -> None:
        """Do what the end of an episode means for its group: release it, abort the rest of it, or replace a member."""
        note_work()
        now = loop_time()
        outcome = self.accounts.end_episode(task, trajectory, newest=self.progress.newest_version, now=now)
        if outcome is None:
            return
        self.reporter.end_episode(trajectory, now=now)
        self._apply_outcome(task, outcome)

    def _apply_outcome(self, task: AgentTask, outcome: GroupOutcome) -> None:
        self.reporter.count_endings(outcome.booked)
        if outcome.released:
            self.rollouts.release(self.quick_scorer.score(outcome.released))
            self.on_release()
        unneeded = [*outcome.abort]
        if outcome.released and self.admission.record_release():
            closed = self.accounts.close_groups()
            self.reporter.count_endings(closed.booked)
            unneeded += closed.abort
        for episode in unneeded:
            self.running[episode].cancel()
        self._start_episodes(task, outcome.start)
        if outcome.released or outcome.is_lost:
            self.task_queue.end_task(task)
