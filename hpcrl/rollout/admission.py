"""How many new episodes may begin: bounded by what can run at once and by how stale their data may become. Pure.

admitted_groups  how many whole groups one of several env hosts may begin
lag_of           how far ahead of training a mode lets episodes begin
in_batches       a whole batch or nothing, for the mode that waits for the last episode of each
with_spare       the same with groups to spare, of which the slowest are not waited for
share            one host's part of a whole; the parts sum to the whole

How many groups an env host may begin now, in every mode. Pure: what there is comes from the caller.
"""

from collections.abc import Sequence

from hpcrl.campaign_dir.workers import EnvWorkerId
from hpcrl.config.recipe import Recipe, RolloutMode
from hpcrl.rollout.groups import EpisodeGroups


def count_admitted_groups(
    worker: EnvWorkerId,
    *,
    max_running: int,
    episodes_per_group: int,
    running_episodes: int,
    running_groups: int,
    max_lag: int,
    version: int,
    groups_per_step: int,
    accepted_groups: int,
) -> int:
    """How many whole groups an env worker may begin now, so that no group ever waits half begun.

    This is the formula of RollArt and AReaL: the lesser of what may run at once and of what stays fresh,
    (max_lag + version + 1) * groups_per_step - (accepted + running).

    Only `running_episodes` and `running_groups` are the worker's own; `accepted_groups` is the campaign's, so that what
    a slow or dead host does not produce falls to the others.
    A `max_running` below `episodes_per_group` admits nothing, on any host.
    """
    max_episodes = compute_share(max_running // episodes_per_group, worker) * episodes_per_group
    fresh = (max_lag + version + 1) * groups_per_step - accepted_groups
    own_groups = compute_share(max(0, fresh), worker)
    return max(0, min((max_episodes - running_episodes) // episodes_per_group, own_groups - running_groups))


def get_mode_lag(mode: RolloutMode, *, max_lag: int) -> int:
    """Steps that episodes may begin ahead of training: "sync" begins none before the step made of the last batch."""
    match mode:
        case "sync":
            return 0
        case "one-step-off":
            return 1
        case "async":
            return max_lag


def limit_to_batch(admitted: int, *, num_in_flight: int, batch: int) -> int:
    """One host's batch once nothing of the last one is under way: its slowest episode holds up all that follow."""
    return 0 if num_in_flight else min(admitted, batch)


def add_spare_groups(admitted: int, *, num_in_flight: int, spare: int, room: int) -> int:
    """A batch, with as many groups more as there is room for; later ones only stand in for what was lost of it."""
    return admitted if num_in_flight or not admitted else max(admitted, min(admitted + spare, room))


def compute_share(total: int, worker: EnvWorkerId) -> int:
    """One env worker's part of `total`; the parts differ by one at most and sum to it exactly."""
    return total // worker.count + (worker.index < total % worker.count)


class AdmissionControl:
    """What one env host lets begin."""

    def __init__(self, recipe: Recipe, worker: EnvWorkerId) -> None:
        rollout = recipe.rollout
        self.is_batched = rollout.mode != "async"
        """Whole batches: one begins when nothing of the last is under way, and all of it with the newest version."""
        self._rollout = rollout
        self._groups_per_step = recipe.train.groups_per_step
        self._worker = worker
        self._num_pending = 0

    def num_admitted(self, groups: EpisodeGroups, *, num_unsealed: int, num_waiting: int) -> int:
        """How many groups may begin now.

        `num_unsealed` are trajectories that this host released and that are not durable yet, `num_waiting` those of
        all hosts that are durable and not settled by the trainer.
        """
        rollout = self._rollout
        num_in_flight = groups.num_open + num_unsealed // rollout.group_size
        num_groups = count_admitted_groups(
            self._worker,
            max_running=rollout.max_running,
            episodes_per_group=rollout.episodes_per_group,
            running_episodes=groups.num_running,
            running_groups=num_in_flight,
            max_lag=get_mode_lag(rollout.mode, max_lag=rollout.max_lag),
            version=0,  # what the trainer consumed is in neither count, so that both begin anew at every step
            groups_per_step=self._groups_per_step,
            accepted_groups=max(num_waiting, 0) // rollout.group_size,
        )
        if rollout.mode != "one-step-off":
            return num_groups
        return limit_to_batch(num_groups, num_in_flight=num_in_flight, batch=self._own_share(self._groups_per_step))

    def has_fresh_weights(self, versions: Sequence[int], *, newest: int) -> bool:
        """The engines, which have these `versions`, have weights that a group may begin with.

        A batch begins with the newest, all of it; else some engine has to have what is not too old with its first turn.
        """
        if self.is_batched:
            return min(versions, default=-1) >= newest
        return max(versions, default=-1) >= newest - self._rollout.max_lag

    def num_to_start(self, num_groups: int, groups: EpisodeGroups) -> int:
        """How many of a batch begin, those to spare included; `record_release` says when it has what it needs."""
        if not self.is_batched or not num_groups:
            return num_groups
        if not groups.num_open:
            self._num_pending = num_groups
        each = self._rollout.episodes_per_group
        room = self._own_share(self._rollout.max_running // each) - groups.num_running // each
        spare = self._own_share(self._rollout.spare_groups)
        return add_spare_groups(num_groups, num_in_flight=groups.num_open, spare=spare, room=room)

    def record_release(self) -> bool:
        """A group was released; True if nothing else of its batch is needed."""
        self._num_pending -= 1
        return self.is_batched and self._num_pending <= 0

    def _own_share(self, total: int) -> int:
        return compute_share(total, self._worker)
