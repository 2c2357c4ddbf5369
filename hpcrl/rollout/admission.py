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
from hpcrl.rollout.groups import Groups


def admitted_groups(
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
    most = share(max_running // episodes_per_group, worker) * episodes_per_group
    fresh = (max_lag + version + 1) * groups_per_step - accepted_groups
    mine = share(max(0, fresh), worker)
    return max(0, min((most - running_episodes) // episodes_per_group, mine - running_groups))


def lag_of(mode: RolloutMode, *, max_lag: int) -> int:
    """Steps that episodes may begin ahead of training: "sync" begins none before the step made of the last batch."""
    match mode:
        case "sync":
            return 0
        case "one-step-off":
            return 1
        case "async":
            return max_lag


def in_batches(admitted: int, *, under_way: int, batch: int) -> int:
    """One host's batch once nothing of the last one is under way: its slowest episode holds up all that follow."""
    return 0 if under_way else min(admitted, batch)


def with_spare(admitted: int, *, under_way: int, spare: int, room: int) -> int:
    """A batch, with as many groups more as there is room for; later ones only stand in for what was lost of it."""
    return admitted if under_way or not admitted else max(admitted, min(admitted + spare, room))


def share(whole: int, worker: EnvWorkerId) -> int:
    """One env worker's part of `whole`; the parts differ by one at most and sum to it exactly."""
    return whole // worker.count + (worker.index < whole % worker.count)


class Gate:
    """What one env host lets begin."""

    def __init__(self, recipe: Recipe, worker: EnvWorkerId) -> None:
        rollout = recipe.rollout
        self.waits = rollout.mode != "async"
        """Whole batches: one begins when nothing of the last is under way, and all of it with the newest version."""
        self._rollout = rollout
        self._groups_per_step = recipe.train.groups_per_step
        self._worker = worker
        self._num_wanted = 0

    def admitted(self, groups: Groups, *, num_unsealed: int, num_waiting: int) -> int:
        """How many groups may begin now.

        `num_unsealed` are trajectories that this host released and that are not durable yet, `num_waiting` those of
        all hosts that are durable and not settled by the trainer.
        """
        rollout = self._rollout
        under_way = groups.num_open + num_unsealed // rollout.group_size
        admitted = admitted_groups(
            self._worker,
            max_running=rollout.max_running,
            episodes_per_group=rollout.episodes_per_group,
            running_episodes=groups.num_running,
            running_groups=under_way,
            max_lag=lag_of(rollout.mode, max_lag=rollout.max_lag),
            version=0,  # what the trainer consumed is in neither count, so that both begin anew at every step
            groups_per_step=self._groups_per_step,
            accepted_groups=max(num_waiting, 0) // rollout.group_size,
        )
        if rollout.mode != "one-step-off":
            return admitted
        return in_batches(admitted, under_way=under_way, batch=self._share(self._groups_per_step))

    def is_served(self, versions: Sequence[int], *, newest: int) -> bool:
        """The engines, which have these `versions`, have weights that a group may begin with.

        A batch begins with the newest, all of it; else some engine has to have what is not too old with its first turn.
        """
        if self.waits:
            return min(versions, default=-1) >= newest
        return max(versions, default=-1) >= newest - self._rollout.max_lag

    def opened(self, admitted: int, groups: Groups) -> int:
        """How many of a batch begin, those to spare included; `released` says when it has what it needs."""
        if not self.waits or not admitted:
            return admitted
        if not groups.num_open:
            self._num_wanted = admitted
        each = self._rollout.episodes_per_group
        room = self._share(self._rollout.max_running // each) - groups.num_running // each
        spare = self._share(self._rollout.spare_groups)
        return with_spare(admitted, under_way=groups.num_open, spare=spare, room=room)

    def released(self) -> bool:
        """A group was released; True if nothing else of its batch is needed."""
        self._num_wanted -= 1
        return self.waits and self._num_wanted <= 0

    def _share(self, whole: int) -> int:
        return share(whole, self._worker)
