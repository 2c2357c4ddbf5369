"""How many groups an env host may begin now, in every mode. Pure: what there is comes from the caller."""

from collections.abc import Sequence

from hpcrl.recipe import Recipe
from hpcrl.rollout.admission import admitted_groups, in_batches, lag_of, share, with_spare
from hpcrl.rollout.group import Groups


class Gate:
    """What one env host lets begin."""

    def __init__(self, recipe: Recipe, *, host: int, num_hosts: int) -> None:
        rollout = recipe.rollout
        self.waits = rollout.mode != "async"
        """Whole batches: one begins when nothing of the last is under way, and all of it with the newest version."""
        self._rollout = rollout
        self._groups_per_step = recipe.train.groups_per_step
        self._host = host
        self._num_hosts = num_hosts
        self._each = rollout.group_size + rollout.redundancy
        self._num_wanted = 0

    def admitted(self, groups: Groups, *, num_unsealed: int, num_waiting: int) -> int:
        """How many groups may begin now.

        `num_unsealed` are trajectories that this host released and that are not durable yet, `num_waiting` those of
        all hosts that are durable and not settled by the trainer.
        """
        rollout = self._rollout
        under_way = groups.num_open + num_unsealed // rollout.group_size
        admitted = admitted_groups(
            host=self._host,
            num_hosts=self._num_hosts,
            max_running=rollout.max_running,
            episodes_per_group=self._each,
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
        room = self._share(self._rollout.max_running // self._each) - groups.num_running // self._each
        spare = self._share(self._rollout.spare_groups)
        return with_spare(admitted, under_way=groups.num_open, spare=spare, room=room)

    def released(self) -> bool:
        """A group was released; True if nothing else of its batch is needed."""
        self._num_wanted -= 1
        return self.waits and self._num_wanted <= 0

    def _share(self, whole: int) -> int:
        return share(whole, host=self._host, num_hosts=self._num_hosts)
