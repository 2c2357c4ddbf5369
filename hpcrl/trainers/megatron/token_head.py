"""Log-probs of tokens from the last hidden states of a stage: the logits of a micro-batch exist by chunks only.

    skip_output_layer      let a GPTModel return its hidden states
    compute_token_logprobs  log-probs and entropies at the model tokens of a micro-batch, on every tensor-parallel rank

With tensor parallelism each rank has its own positions of the hidden states and its own rows of the output layer. The
rows are gathered, in the precision of the product, and each rank computes its own positions: no product is made twice,
and hpcrl/learn/token_head.py serves as it does for trainer "torch".

Legend: B rows of a micro-batch, T positions, S those of this rank, N model tokens, H hidden size, V vocabulary
"""

from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel.mappings import (
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from torch import Tensor

from hpcrl.learn.batch import MicroBatch
from hpcrl.learn.token_head import HeadForm, compute_from_hidden


def skip_output_layer(module: Any) -> None:
    """Let the output layer pass on what it is given; its weight stays where it is."""
    if module.post_process:
        module.output_layer.forward = lambda hidden, **_: (hidden, None)


def compute_token_logprobs(
    module: Any,
    micro: MicroBatch,
    hidden_BSH: Tensor,
    *,
    vocabulary_size: int,
    temperature: float,
    has_entropy_bonus: bool = False,
) -> tuple[Tensor, Tensor]:
    """Compute the log-probs of the micro-batch's model tokens, and the entropies of their distributions."""
    weight_VH = module.output_layer.weight
    if weight_VH is None:  # the embedding's
        weight_VH = module.shared_embedding_or_output_weight()
    num_own, rank = hidden_BSH.shape[1], parallel_state.get_tensor_model_parallel_rank()
    own = slice(rank * num_own, (rank + 1) * num_own)
    own_BS = micro.mask_BT[:, own]
    numbers_BT = micro.mask_BT.flatten().cumsum(0).view_as(micro.mask_BT) - 1
    own_N = numbers_BT[:, own][own_BS]
    is_divided = parallel_state.get_tensor_model_parallel_world_size() > 1
    if is_divided:
        device = hidden_BSH.device.type
        if torch.is_autocast_enabled(device):
            weight_VH = weight_VH.to(torch.get_autocast_dtype(device))
        weight_VH = gather_from_sequence_parallel_region(weight_VH)  # whose gradient is summed and divided again
    found = compute_from_hidden(
        hidden_BSH[own_BS],
        weight_VH[:vocabulary_size],
        micro.targets_N[own_N],
        form=HeadForm(),
        temperature=temperature,
        has_entropy_bonus=has_entropy_bonus,
    )
    if not is_divided:
        return found
    logprobs_N, entropy_N = (
        reduce_from_tensor_model_parallel_region(each.new_zeros(len(micro.targets_N)).index_put((own_N,), each))
        for each in found
    )
    return logprobs_N, entropy_N
