"""The data-parallel copies of a rank's part of a model: each updates, saves and publishes a share of its tensors.

    ModelCopies      the copies of a rank's tensors, and what they exchange in a step
    choose_copies    the copy that updates each tensor

The moments of a tensor exist only in the copy that updates it. The others send it their gradients and receive the new
weights: the traffic is that of a sum over all copies. A tensor is never divided, so that an update may look at the
whole of it.
"""

from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from hpcrl.trainers.megatron.weight_names import ParallelRank

_EXPERT_MARK = ".local_experts."


class ModelCopies:
    """The copies of this rank's tensors. An expert has copies of its own: other ranks hold the same ones."""

    def __init__(self, tensors: Mapping[str, Tensor], rank: ParallelRank) -> None:
        self._rank = rank
        sizes = {name: tensor.numel() for name, tensor in tensors.items()}
        self.num: int = parallel_state.get_data_parallel_world_size()
        experts = {name: size for name, size in sizes.items() if _is_expert(name)}
        others = {name: size for name, size in sizes.items() if not _is_expert(name)}
        num_expert_copies = parallel_state.get_expert_data_parallel_world_size()
        self._copies = choose_copies(others, num=self.num) | choose_copies(experts, num=num_expert_copies)

    def is_own(self, name: str) -> bool:
        """Return whether this rank is the one that updates a tensor."""
        return self._copies[name] == (self._rank.expert_copy if _is_expert(name) else self._rank.copy)

    def collect_gradients(self, parameters: Mapping[str, Tensor]) -> None:
        """Sum the gradient of every parameter over its copies, in the one that updates it."""
        _wait_for_all(
            dist.reduce(parameter.grad, group_dst=self._copies[name], group=group, async_op=True)
            for name, parameter in parameters.items()
            if parameter.grad is not None and (group := _find_group(name)).size() > 1
        )

    def send_weights(self, parameters: Mapping[str, Tensor]) -> None:
        """Send every parameter from the copy that has updated it to the others."""
        _wait_for_all(
            dist.broadcast(parameter.detach(), group_src=self._copies[name], group=group, async_op=True)
            for name, parameter in parameters.items()
            if (group := _find_group(name)).size() > 1
        )


def choose_copies(sizes: Mapping[str, int], *, num: int) -> dict[str, int]:
    """Choose the copy that updates each tensor, the largest first, so that all have about the same number of values."""
    loads, found = [0] * num, {}
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        found[name] = loads.index(min(loads))
        loads[found[name]] += sizes[name]
    return found


def _is_expert(name: str) -> bool:
    return _EXPERT_MARK in name


def _find_group(name: str) -> Any:
    if _is_expert(name):
        return parallel_state.get_expert_data_parallel_group()
    return parallel_state.get_data_parallel_group()


def _wait_for_all(works: Any) -> None:
    for work in list(works):
        work.wait()
