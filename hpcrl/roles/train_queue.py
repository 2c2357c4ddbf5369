"""The trainer's queue of trajectories: read them, choose whole groups, settle them and retire their segments.

    TrainQueue       the trajectories of "scored" as the trainer sees them
    find_reward_patience  how long a step waits for the rewards of a segment
    MAX_HOLD_PAUSE_S  the longest time between two looks at the holds of env workers

A trajectory is settled once it neither waits nor is being trained on: it was used, dropped, or was a duplicate. Env
workers read how many are settled (hpcrl.rollout.flow_control).
"""

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from hpcrl.campaign_dir.checkpoints import parse_commit_number
from hpcrl.campaign_dir.events import FaultReported, SegmentsRetired
from hpcrl.config.recipe import Recipe
from hpcrl.errors import SpoolError
from hpcrl.learn.advantage import is_flat_group
from hpcrl.learn.consumed import ConsumedTrajectories
from hpcrl.learn.group_choice import GroupChoice, choose_groups
from hpcrl.learn.rewards import find_overlong
from hpcrl.roles.context import WorkerContext
from hpcrl.rollout.flow_control import HoldWatch, RewardWatch, SettledCount, SettledWriter, should_await_rewards
from hpcrl.spool.listing import count_trajectories, quarantine_segment
from hpcrl.spool.reader import DiskSpoolReader
from hpcrl.spool.record import Trajectory
from hpcrl.spool.retention import (
    SettledSegments,
    SpoolDirs,
    choose_retirable,
    prune_archive,
    recover_retirement,
    retire_segments,
)
from hpcrl.system.file_watch import PollPace
from hpcrl.system.processes import do_nothing
from hpcrl.trainers import checkpoint

MAX_HOLD_PAUSE_S = 0.5


class TrainQueue:
    """The trajectories of "scored" as the trainer sees them."""

    def __init__(
        self, context: WorkerContext, *, consumed: ConsumedTrajectories, on_settled: Callable[[], object] = do_nothing
    ) -> None:
        """Read what is scored; `on_settled` is called when another number of trajectories is settled."""
        spool = context.campaign.spool
        self._context = context
        self._consumed = consumed
        self._spool_dirs = SpoolDirs(rollouts=spool("rollouts"), scored=spool("scored"), archive=spool("archive"))
        self._reader = DiskSpoolReader(self._spool_dirs.scored, on_damage=self._handle_damage, consumed=consumed)
        self._waiting: list[Trajectory] = []
        self._training: list[Trajectory] = []
        self._version = 0
        self._holds = HoldWatch()
        self._rewards = RewardWatch(
            self._spool_dirs.rollouts,
            self._spool_dirs.scored,
            patience_s=find_reward_patience(context.recipe),
        )
        self._hold_pace = PollPace(longest_s=MAX_HOLD_PAUSE_S)
        self._refused_version: int | None = None
        self._settled_writer = SettledWriter(context.campaign.settled, on_change=on_settled)
        self._settled = SettledSegments(grace_s=context.recipe.spool.retire_after_s)
        self._times_damaged: Counter[str] = Counter()
        self._lock = threading.Lock()
        """Held while the state above is read or changed: segments are retired in a thread."""
        self._retiring: threading.Thread | None = None
        self._is_closing = False

    def recover(self) -> None:
        """Finish a retirement that a crash interrupted. Until the next count nothing is settled, which is safe."""
        recover_retirement(
            self._spool_dirs,
            lower_settled=lambda _: self._settled_writer.write(SettledCount()),
            compression=self._context.recipe.spool.compression,
        )

    def expect_change(self) -> None:
        """Look at holds and rewards with the next choice: another worker has changed something."""
        self._hold_pace.note_change()

    def choose(self, *, version: int) -> GroupChoice:
        """Choose the trajectories of the next step, if there are enough; `mark_trained` must follow."""
        with self._lock:
            available = [*self._waiting, *self._reader.poll()]
            choice = self._choose_from(available, version=version)
            if choice.chosen and not self._may_train(choice.chosen, version=version):
                choice = choice._replace(chosen=[], rest=[*choice.chosen, *choice.rest])
            elif choice.chosen and (scored := self._reader.poll()):  # a hold, or a wait, may have ended with these
                choice = self._choose_from([*available, *scored], version=version)
            self._version, self._waiting, self._training = version, choice.rest, choice.chosen
            self._publish_settled()
        return choice

    def _may_train(self, chosen: list[Trajectory], *, version: int) -> bool:
        """Return whether no episodes of env workers, and no rewards, should be awaited first.

        A step that was refused waits for a moment.
        """
        if version != self._refused_version:
            self._hold_pace.note_change()
        if not self._hold_pace.is_due():
            return False
        campaign, recipe = self._context.campaign, self._context.recipe
        is_allowed = self._holds.may_publish(campaign.holds(), version=version + 1)
        if is_allowed:
            unscored = self._rewards.list_versions(consumed=self._consumed)
            is_allowed = not should_await_rewards(unscored, chosen, version=version, max_lag=recipe.rollout.max_lag)
        self._refused_version = None if is_allowed else version
        return is_allowed

    def gather(self) -> None:
        """Read new trajectories while a step runs in another thread; nothing is chosen yet."""
        with self._lock:
            self._waiting = [*self._waiting, *self._reader.poll()]

    def preview_choice(self, version: int) -> list[Trajectory]:
        """Return what `choose` would choose for this version if nothing more arrived; it never waits for `gather`."""
        return self._choose_from(self._waiting, version=version).chosen

    def _choose_from(self, available: list[Trajectory], *, version: int) -> GroupChoice:
        recipe = self._context.recipe
        return choose_groups(
            available,
            groups_per_step=recipe.train.groups_per_step,
            group_size=recipe.rollout.group_size,
            version=version,
            max_lag=recipe.rollout.max_lag,
            consumed=self._consumed,
            is_flat_group=self._is_dropped,
        )

    def _is_dropped(self, members: Sequence[Trajectory]) -> bool:
        """Return whether nothing can be learned from a group, and the recipe drops such ones."""
        train = self._context.recipe.train
        return train.flat_groups == "drop" and (
            is_flat_group(members, train) or len(find_overlong(members, train)) == len(members)
        )

    def segment_of(self, trajectory: Trajectory) -> str:
        """Return the segment of "scored" that has a chosen trajectory."""
        name = self._reader.segment_of(trajectory)
        assert name is not None, "a trajectory that waits to be trained on is never retired"
        return name

    def mark_trained(self, *, version: int) -> None:
        """Settle the trajectories of a step that is done; its version is being published."""
        with self._lock:
            self._version, self._training = version, []
            self._publish_settled()

    def note_settled(self) -> None:
        """Note which segments are settled now: the checkpoint about to be saved covers them."""
        with self._lock:
            self._settled.note(self._reader.finished_segments(self._waiting))

    def mark_covered(self, saved: Path) -> None:
        """Mark the noted segments as covered by a checkpoint that is now durable."""
        with self._lock:
            self._settled.cover(parse_commit_number(saved))

    def retire(self, *, version: int) -> None:
        """Retire segments that no kept checkpoint needs, in a thread: training does not wait for it."""
        recipe = self._context.recipe
        oldest = checkpoint.find_oldest_number(self._context.campaign.checkpoints, keep=recipe.train.keep_checkpoints)
        if oldest is None or (self._retiring is not None and self._retiring.is_alive()):
            return
        if chosen := self._choose_retirable(oldest):
            self._retiring = threading.Thread(target=self._retire_due, args=(chosen, version, oldest), name="retire")
            self._retiring.start()

    def _choose_retirable(self, oldest: int) -> list[str]:
        """Return the segments to retire next; none if too few are due by the oldest checkpoint."""
        with self._lock:
            due = self._settled.due(oldest_checkpoint=oldest)
        max_bytes = self._context.recipe.spool.max_segment_mib << 20
        return choose_retirable(due, self._spool_dirs.scored, max_bytes=max_bytes)

    def _retire_due(self, segments: list[str], version: int, oldest: int) -> None:
        """Retire one archive's worth of segments after the other: thousands may become due with one checkpoint."""
        while segments and not self._is_closing and self._retire_segments(segments, version):
            segments = self._choose_retirable(oldest)

    def close(self) -> None:
        """Wait for a retirement in the background; what else is due waits for the next job."""
        self._is_closing = True
        if self._retiring is not None:
            self._retiring.join()

    def _retire_segments(self, segments: list[str], version: int) -> bool:
        """Retire these segments; return False if that failed."""
        spool, emit = self._context.recipe.spool, self._context.events.emit
        try:
            intent = retire_segments(
                self._spool_dirs,
                segments,
                keep=spool.keep != "none",
                lower_settled=self._lower_settled,
                compression=spool.compression,
            )
            if spool.keep == "versions":
                prune_archive(self._spool_dirs.archive, oldest_version=version - spool.archive_versions)
        except (OSError, SpoolError) as error:  # it is retried later; training does not depend on it
            emit(FaultReported(what="spool", detail=f"segments could not be retired: {error}"))
            return False
        with self._lock:
            self._settled.drop(intent.segments)
        emit(SegmentsRetired(num=count_trajectories(intent.segments), archive=intent.archive))
        return len(intent.segments) == len(segments)  # damaged ones were not retired: look again at the next step

    def _lower_settled(self, segments: list[str]) -> None:
        with self._lock:
            self._reader.forget(segments)
            self._publish_settled()

    def _publish_settled(self) -> None:
        settled = self._reader.passed.copy()
        settled.subtract(self._reader.count_by_worker([*self._waiting, *self._training]))
        workers = {worker: num for worker, num in settled.items() if num}
        self._settled_writer.write(SettledCount(num=settled.total(), version=self._version, workers=workers))

    def _handle_damage(self, path: Path, reason: str) -> None:
        """Report a damaged segment, which the reader has quarantined, so it is scored again; after the second time
        quarantine its source instead.
        """
        self._context.events.emit(FaultReported(what="spool", detail=f"{path}: {reason}"))
        self._times_damaged[path.name] += 1
        if self._times_damaged[path.name] > 1 and not path.exists():
            detail = quarantine_segment(
                self._spool_dirs.rollouts / path.name, f"its scored twin was damaged more than once: {reason}"
            )
            self._context.events.emit(FaultReported(what="spool", detail=detail))


def find_reward_patience(recipe: Recipe) -> float:
    """Return how long a step waits for the rewards of a segment: as long as one may take, if no job stalls by then."""
    longest_s = max((one.reward_timeout_s for one in recipe.domains.values()), default=0.0)
    return min(longest_s, recipe.job.stall_timeout_min * 60 / 2)
