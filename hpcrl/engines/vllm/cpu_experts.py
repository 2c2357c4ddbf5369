"""Mixtures of experts that ranks divide among them, on CPUs: two things that vLLM has on GPUs alone.

    enable_divided_experts  replace its functions; for hpcrl.engines.vllm.weight_plugin

Its kernel takes the number of an expert for its place, as if a rank had them all. And copies of the model cannot send
each other tokens for the experts that they divide.

Shapes: N tokens of this copy, M of all copies, T tokens at a layer, K experts of a token.
"""

import functools
from collections.abc import Sequence
from typing import Any

import torch
from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

_apply = CPUUnquantizedExperts.apply


def enable_divided_experts() -> None:
    """Replace vLLM's function that calls the kernel, and those of the exchange that it lacks."""
    CPUUnquantizedExperts.apply = _apply_own_experts
    CpuCommunicator.all_gatherv = _gather_tokens
    CpuCommunicator.reduce_scatterv = _sum_tokens


@functools.wraps(_apply)
def _apply_own_experts(self: Any, *args: Any, **options: Any) -> Any:
    """Call the kernel with the places of experts on this rank; one of another rank counts as the first, times 0."""
    expert_map, ids_TK = options.get("expert_map"), options.get("topk_ids")
    if expert_map is None or ids_TK is None:
        return _apply(self, *args, **options)
    places_TK = expert_map[ids_TK.long()]
    options["topk_ids"] = places_TK.clamp(min=0).to(ids_TK.dtype)
    options["topk_weights"] = options["topk_weights"].masked_fill(places_TK < 0, 0.0)
    found = _apply(self, *args, **options)
    if options["apply_router_weight_on_input"]:  # the kernel does not multiply then, and a token has one expert
        options["output"][places_TK[:, 0] < 0] = 0.0
    return found


def _gather_tokens(self: Any, input_: Any, dim: int = 0, sizes: Sequence[int] | None = None) -> Any:
    """Return the rows of all ranks, which have `sizes` of them, of one tensor or of each in a list."""
    assert dim == 0
    if not isinstance(input_, torch.Tensor):
        return [_gather_tokens(self, each, dim, sizes) for each in input_]
    sizes = sizes or [len(input_)] * self.world_size
    padded_N = input_.new_zeros(max(sizes), *input_.shape[1:])  # gloo gathers equal parts
    padded_N[: len(input_)] = input_
    parts = [torch.empty_like(padded_N) for _ in sizes]
    torch.distributed.all_gather(parts, padded_N, group=self.device_group)
    return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])


def _sum_tokens(self: Any, input_: torch.Tensor, dim: int = -1, sizes: Sequence[int] | None = None) -> torch.Tensor:
    """Return this rank's rows, summed over all ranks."""
    assert dim == 0
    sizes = sizes or [len(input_) // self.world_size] * self.world_size
    summed_M = input_.contiguous().clone()
    torch.distributed.all_reduce(summed_M, group=self.device_group)
    start = sum(sizes[: self.rank_in_group])
    return summed_M[start : start + sizes[self.rank_in_group]]
