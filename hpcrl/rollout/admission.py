"""Admission of new episodes, limited by how many can run at once and by how stale their data may become. Pure.

AdmissionControl        decides how many groups an env worker may start now, in every mode
count_needed_groups     how many groups of one of several env workers training needs
LateWorkers             which env workers are late with theirs
count_groups_with_room  how many whole groups one of several env workers has room for
get_mode_lag            how far ahead of training a mode lets episodes start
completes_batch         whether trajectories that become durable now complete a batch
limit_to_batch          a whole batch or nothing, for the mode that waits for the last episode of each
add_spare_groups        a batch with spare groups, so that the slowest are not waited for
compute_share           one worker's part of a whole; the parts sum to the whole
subtract_counts         how many trajectories of each worker wait for training
MIN_PATIENCE_S, PATIENCE_FACTOR   when a part that is missing is late
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from functools import partial

from hpcrl.campaign_dir.paths import parse_index
from hpcrl.campaign_dir.workers import EnvWorkerId
from hpcrl.config.recipe import Recipe, RolloutMode
from hpcrl.rollout.groups import EpisodeGroups

MIN_PATIENCE_S = 30.0
PATIENCE_FACTOR = 2.0
"""A part that is missing is late after this factor times the longest group of a worker that waits for it; one that has
played none since it was started waits for half of `job.stall_timeout_min`."""


def count_needed_groups(
    worker: EnvWorkerId, *, running_groups: int, max_groups: int, waiting: Mapping[int, int], late: Collection[int] = ()
) -> int:
    """Return how many more groups an env worker may start, of the `max_groups` that would stay fresh.

    This is the formula of RollArt and AReaL, (max_lag + version + 1) * groups_per_step - (accepted + running), for the
    worker's own part: that of one that finishes first must not grow by what others still play, or more episodes start
    than stay fresh. Groups that wait for training count for the worker that played them (`waiting`, by index); those of
    workers that were removed count for all. What `late` workers lack is divided among the others.
    """
    known = range(worker.count)
    shared = max(0, max_groups - sum(num for index, num in waiting.items() if index not in known))
    parts = {index: compute_share(shared, EnvWorkerId(index, worker.count)) for index in {worker.index, *late}}
    lacking = sum(max(0, parts[index] - waiting.get(index, 0)) for index in late)
    present = [index for index in known if index not in late or index == worker.index]
    part = parts[worker.index] + compute_share(lacking, EnvWorkerId(present.index(worker.index), len(present)))
    return max(0, part - waiting.get(worker.index, 0) - running_groups)


class LateWorkers:
    """Which of several env workers are late with their part of what training needs.

    Training may need the part of a worker that is gone. Once this worker has nothing to do, and nothing has become
    durable or was settled for long, those whose part is missing count as late, until something of theirs becomes
    durable. As long as it still plays its own part, the others may as well.
    """

    def __init__(self, worker: EnvWorkerId) -> None:
        self._worker = worker
        self._seen: tuple[Mapping[int, int], Mapping[int, int]] | None = None
        self._changed_at = 0.0
        self._late: dict[int, int] = {}
        """The indices, with what was durable then."""

    def find(
        self,
        sealed: Mapping[int, int],
        waiting: Mapping[int, int],
        *,
        is_idle: bool,
        part: int,
        now: float,
        patience_s: float,
    ) -> Collection[int]:
        """Return the indices; a worker lacks something if fewer than `part` of its groups wait.

        `is_idle` means that this worker's own part is durable.
        """
        if not is_idle or (dict(sealed), dict(waiting)) != self._seen:
            self._seen, self._changed_at = (dict(sealed), dict(waiting)), now
            self._late = {index: num for index, num in self._late.items() if sealed.get(index, 0) == num}
        elif now - self._changed_at > patience_s:
            others = (index for index in range(self._worker.count) if index != self._worker.index)
            self._late |= {index: sealed.get(index, 0) for index in others if waiting.get(index, 0) < part}
        return self._late


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


def subtract_counts(sealed: Mapping[str, int], settled: Mapping[str, int]) -> dict[str, int]:
    """Return how many durable trajectories of each worker wait for training."""
    return {worker: max(0, num - settled.get(worker, 0)) for worker, num in sealed.items()}


def _count_groups(trajectories: Mapping[str, int], *, group_size: int) -> Mapping[int, int]:
    """Return the number of groups by the index of the worker."""
    groups: Counter[int] = Counter()
    for worker, num in trajectories.items():
        groups[parse_index(worker)] += num // group_size
    return groups


class AdmissionControl:
    """Decides how many groups one env worker may start."""

    def __init__(self, recipe: Recipe, worker: EnvWorkerId) -> None:
        rollout = recipe.rollout
        self.is_batched = rollout.mode != "async"
        """Start whole batches: each once nothing of the last is in flight, and all of it with the newest version."""
        self._rollout = rollout
        self._groups_per_step = recipe.train.groups_per_step
        self._stall_s = recipe.job.stall_timeout_min * 60
        self._worker = worker
        self._late_workers = LateWorkers(worker)
        self._num_needed = 0
        """Groups that training needs from this worker besides those in flight, however many may run at once."""
        self._num_pending = 0
        """Groups of the batch that are not released."""
        self._num_ahead = 0
        """Groups of all workers that training has not settled, without those that start now; an estimate."""

    def num_admitted(
        self,
        groups: EpisodeGroups,
        *,
        num_unsealed: int,
        sealed: Mapping[str, int],
        settled: Mapping[str, int],
        now: float,
    ) -> int:
        """Return how many groups may start now.

        `num_unsealed` are trajectories that this worker released and that are not durable yet, `sealed` those of each
        worker that are durable, `settled` those of them that the trainer has settled.
        """
        rollout = self._rollout
        num_in_flight = groups.num_open + num_unsealed // rollout.group_size
        # No count includes what the trainer consumed: the version of the formula is 0, each step starts from there.
        max_groups = (get_mode_lag(rollout.mode, max_lag=rollout.max_lag) + 1) * self._groups_per_step
        durable = _count_groups(sealed, group_size=rollout.group_size)
        waiting = _count_groups(subtract_counts(sealed, settled), group_size=rollout.group_size)
        self._num_ahead = self._estimate_ahead(num_in_flight, num_waiting=sum(waiting.values()), max_groups=max_groups)
        count_needed = partial(
            count_needed_groups, self._worker, running_groups=num_in_flight, max_groups=max_groups, waiting=waiting
        )
        late = self._late_workers.find(
            durable,
            waiting,
            is_idle=not num_in_flight and not count_needed(),
            part=max_groups // self._worker.count,
            now=now,
            patience_s=max(MIN_PATIENCE_S, PATIENCE_FACTOR * groups.longest_s or self._stall_s / 2),
        )
        self._num_needed = count_needed(late=late)
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

    def find_needed_version(self, newest: int) -> int:
        """Return the version that an episode starting now needs, so as not to be too old when its turn comes.

        Training makes one version from each batch that is ahead of it.
        """
        rollout = self._rollout
        max_lag = get_mode_lag(rollout.mode, max_lag=rollout.max_lag)
        return max(0, newest - max(0, max_lag - self._num_ahead // self._groups_per_step))

    def find_oldest_start(self, versions: Sequence[int], *, newest: int) -> int:
        """Return the oldest version with which an episode may start now, at engines that have these versions."""
        return max(self.find_needed_version(newest), min(versions, default=0))

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

    def _estimate_ahead(self, num_in_flight: int, *, num_waiting: int, max_groups: int) -> int:
        """Return how many groups of all workers are ahead of one that starts now.

        What the others run is not known here: they are taken to run all groups that stay fresh. Where `max_running`
        allows fewer, some run nevertheless: a group is open until its last episode ends, and others start before.
        """
        running = max(0, max_groups - num_waiting)
        return num_waiting + num_in_flight + running - self._own_share(running)

    def _count_room(self, groups: EpisodeGroups) -> int:
        return count_groups_with_room(
            self._worker,
            max_running=self._rollout.max_running,
            episodes_per_group=self._rollout.episodes_per_group,
            running_episodes=groups.num_running,
        )

    def _own_share(self, total: int) -> int:
        return compute_share(total, self._worker)
