"""Admission of new episodes, limited by how many can run at once and by how stale their data may become. Pure.

AdmissionControl        decides how many groups an env worker may start now, in every mode
count_needed_groups     how many groups of one of several env workers training needs
count_groups_with_room  how many whole groups one of several env workers has room for
get_mode_lag            how far ahead of training a mode lets episodes start
completes_batch         whether trajectories that become durable now complete a batch
limit_to_batch          a whole batch or nothing, for the mode that waits for the last episode of each
add_spare_groups        a batch with spare groups, so that the slowest are not waited for
compute_share           one worker's part of a whole; the parts sum to the whole
"""

from collections.abc import Sequence

from hpcrl.campaign_dir.workers import EnvWorkerId
from hpcrl.config.recipe import Recipe, RolloutMode
from hpcrl.rollout.groups import EpisodeGroups


def count_needed_groups(
    worker: EnvWorkerId,
    *,
    running_groups: int,
    max_lag: int,
    version: int,
    groups_per_step: int,
    accepted_groups: int,
) -> int:
    """Return how many more groups of an env worker would stay fresh, of those that training needs.

    This is the formula of RollArt and AReaL, (max_lag + version + 1) * groups_per_step - (accepted + running).

    Only `running_groups` are the worker's own; `accepted_groups` is the campaign's, so the other workers make up for
    one that is slow or dead.
    """
    fresh = (max_lag + version + 1) * groups_per_step - accepted_groups
    return max(0, compute_share(max(0, fresh), worker) - running_groups)


def count_groups_with_room(
    worker: EnvWorkerId, *, max_running: int, episodes_per_group: int, running_episodes: int
) -> int:
    """Return how many whole groups an env worker has room for beside its running episodes.

    A `max_running` below `episodes_per_group` leaves room for none, on any worker.
    """
    max_episodes = compute_share(max_running // episodes_per_group, worker) * episodes_per_group
    return max(0, (max_episodes - running_episodes) // episodes_per_group)


def get_mode_lag(mode: RolloutMode, *, max_lag: int) -> int:
    """Return how many steps ahead of training episodes may start; "sync" waits for the step on the last batch."""
    match mode:
        case "sync":
            return 0
        case "one-step-off":
            return 1
        case "async":
            return max_lag


def limit_to_batch(admitted: int, *, num_in_flight: int, batch: int) -> int:
    """Return one worker's batch, or 0 while any group of the previous batch is in flight."""
    return 0 if num_in_flight else min(admitted, batch)


def add_spare_groups(admitted: int, *, num_in_flight: int, spare: int, room: int) -> int:
    """Return a batch plus the spare groups that fit; groups added to a running batch only replace lost ones."""
    return admitted if num_in_flight or not admitted else max(admitted, min(admitted + spare, room))


def completes_batch(num_more: int, *, num_waiting: int, batch: int) -> bool:
    """Return whether `num_more` trajectories complete a batch, with those that wait or are being trained on."""
    return (num_waiting + num_more) // batch > max(num_waiting, 0) // batch


def compute_share(total: int, worker: EnvWorkerId) -> int:
    """Return one env worker's part of `total`; the parts differ by one at most and sum to it exactly."""
    return total // worker.count + (worker.index < total % worker.count)


class AdmissionControl:
    """Decides how many groups one env worker may start."""

    def __init__(self, recipe: Recipe, worker: EnvWorkerId) -> None:
        rollout = recipe.rollout
        self.is_batched = rollout.mode != "async"
        """Start whole batches: each once nothing of the last is in flight, and all of it with the newest version."""
        self._rollout = rollout
        self._groups_per_step = recipe.train.groups_per_step
        self._worker = worker
        self._num_needed = 0
        """Groups that training needs from this worker besides those in flight, however many may run at once."""
        self._num_pending = 0
        """Groups of the batch that are not released."""

    def num_admitted(self, groups: EpisodeGroups, *, num_unsealed: int, num_waiting: int) -> int:
        """Return how many groups may start now.

        `num_unsealed` are trajectories that this worker released and that are not durable yet, `num_waiting` those of
        all workers that are durable and not settled by the trainer.
        """
        rollout = self._rollout
        num_in_flight = groups.num_open + num_unsealed // rollout.group_size
        self._num_needed = count_needed_groups(
            self._worker,
            running_groups=num_in_flight,
            max_lag=get_mode_lag(rollout.mode, max_lag=rollout.max_lag),
            version=0,  # neither count includes what the trainer consumed, so both restart from zero at every step
            groups_per_step=self._groups_per_step,
            accepted_groups=max(num_waiting, 0) // rollout.group_size,
        )
        if rollout.mode == "one-step-off":
            batch = self._own_share(self._groups_per_step)
            self._num_needed = limit_to_batch(self._num_needed, num_in_flight=num_in_flight, batch=batch)
        return min(self._num_needed, self._count_room(groups))

    def has_fresh_weights(self, versions: Sequence[int], *, newest: int) -> bool:
        """Return whether the engines, which have these `versions`, have weights that a group may start with.

        A batch needs the newest version on all engines; otherwise one engine with a version that is not already too
        old is enough. Without an engine that has weights there are none.
        """
        if self.is_batched:
            return min(versions, default=-1) >= newest
        return max(versions, default=-1) >= max(0, newest - self._rollout.max_lag)

    def should_seal(self, groups: EpisodeGroups, *, num_open: int, num_unsealed: int, num_waiting: int) -> bool:
        """Return whether released trajectories should become durable now, though they are few and young.

        `num_open` of the unsealed ones are not even being written. They should if they complete a batch, or this
        worker's part of one, or if no group runs whose trajectories could go into the same segment.
        """
        if not num_open:
            return False
        batch = self._groups_per_step * self._rollout.group_size
        on_the_way = num_waiting + num_unsealed - num_open
        own_part = self._own_share(self._groups_per_step) * self._rollout.group_size
        return (
            completes_batch(num_open, num_waiting=on_the_way, batch=batch)
            or num_open >= max(own_part, self._rollout.group_size)
            or not groups.num_open
        )

    def num_to_start(self, num_groups: int, groups: EpisodeGroups) -> int:
        """Return how many groups to start, spare ones included; `record_release` reports when a batch is complete.

        A batch that is larger than `max_running` allows at once starts in parts, and is complete with the last.
        """
        if not self.is_batched or not num_groups:
            return num_groups
        if not groups.num_open:
            self._num_pending = max(num_groups, self._num_needed)
        spare = self._own_share(self._rollout.spare_groups)
        return add_spare_groups(num_groups, num_in_flight=groups.num_open, spare=spare, room=self._count_room(groups))

    def record_release(self) -> bool:
        """Record that a group was released; return True if its batch needs no other."""
        self._num_pending -= 1
        return self.is_batched and self._num_pending <= 0

    def _count_room(self, groups: EpisodeGroups) -> int:
        return count_groups_with_room(
            self._worker,
            max_running=self._rollout.max_running,
            episodes_per_group=self._rollout.episodes_per_group,
            running_episodes=groups.num_running,
        )

    def _own_share(self, total: int) -> int:
        return compute_share(total, self._worker)
