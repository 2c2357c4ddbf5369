"""The parts of a megatron-core decoder that are hpcrl's: the same code on GPUs and on CPUs.

    make_block_spec           the layers of a part of the model
    list_layers, list_attentions    what a rank has of them, and their attention
    replicate_downward        compressed attention whose compressing layers every rank has whole
    skip_output_layer         let a GPTModel return its hidden states
    compute_token_logprobs    log-probs and entropies at the model tokens of a micro-batch, on every rank
    CausalAttention           PyTorch's attention, with flash kernels on GPUs and never a matrix of all pairs of tokens
    PlainNorm                 RMSNorm that also serves sequence parallelism
    ReplicatedLinear          a linear layer that every rank has whole

Log-probs come from the last hidden states, so that the logits of a micro-batch exist by chunks only. With tensor or
context parallelism each rank has its own positions of the hidden states, and with the first its own rows of the output
layer. The rows are gathered, in the precision of the product, and each rank computes its own positions: no product is
made twice, and hpcrl/learn/token_head.py serves as it does for trainer "torch".

With context parallelism ranks divide the positions of rows also within the layers, and swap them for heads around the
core of attention (hpcrl/trainers/context_group.py).

Legend of attention: S positions of this rank, B rows, H heads of this rank, K key and value heads of this rank, D size
of a head
Legend of log-probs: B rows, T positions, S those of this rank, N model tokens, H hidden size, V vocabulary
"""

from collections.abc import Iterable, Iterator
from importlib.util import find_spec
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel.mappings import (
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from torch import Tensor

from hpcrl.learn.batch import MicroBatch
from hpcrl.learn.token_head import HeadForm, compute_from_hidden
from hpcrl.system.pulse import note_work
from hpcrl.trainers.context_group import WHOLE_CONTEXT, ContextGroup, attend_whole_rows
from hpcrl.trainers.megatron.weight_names import ModelDims

if find_spec("transformer_engine") is None:  # Megatron 0.16.1 looks for its own module with parts of that name
    multi_latent_attention.HAVE_TE = False
    moe_utils.te_general_gemm = None


class CausalAttention(torch.nn.Module):
    """The core of attention: every position attends to itself and to those before it."""

    def __init__(self, *, softmax_scale: float | None = None, **_: Any) -> None:
        super().__init__()
        self.softmax_scale = softmax_scale
        self.context = WHOLE_CONTEXT
        self.turned = slice(None)
        """The part of a head that positions turn."""
        self.turned_factor = 1.0
        """The factor of the products of these parts."""

    def forward(self, query_SBHD: Tensor, key_SBKD: Tensor, value_SBKD: Tensor, *_: Any, **__: Any) -> Tensor:
        if self.turned_factor != 1:
            query_SBHD = query_SBHD.clone()
            query_SBHD[..., self.turned] *= self.turned_factor
        found_BSHD = attend_whole_rows(
            *(each.permute(1, 2, 0, 3) for each in (query_SBHD, key_SBKD, value_SBKD)),
            context=self.context,
            scaling=self.softmax_scale,
        )
        return found_BSHD.transpose(0, 1).flatten(2)


class PlainNorm(torch.nn.RMSNorm):
    """PyTorch's RMSNorm, made as Megatron makes norms."""

    def __init__(self, *, hidden_size: int, eps: float, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps)

    def forward(self, x: Tensor) -> Tensor:
        """Return the norm in autocast's precision: Megatron sums the gradients of products in that of their inputs."""
        device, found = x.device.type, super().forward(x)
        return found.to(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else found


class ReplicatedLinear(torch.nn.Linear):
    """A linear layer that returns a bias as Megatron's layers do."""

    def forward(self, input: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return super().forward(input), None


def make_block_spec(dims: ModelDims, layers: Iterable[int]) -> TransformerBlockSubmodules:
    """Return the specification of these layers and of the last norm."""
    return TransformerBlockSubmodules(
        layer_specs=[_make_layer_spec(dims, has_experts=dims.has_experts(layer)) for layer in layers],
        layer_norm=PlainNorm,
    )


def _make_layer_spec(dims: ModelDims, *, has_experts: bool) -> ModuleSpec:
    is_compressed = bool(dims.shape.kv_rank)
    has_norm = dims.shape.has_query_norm or is_compressed
    spec = get_gpt_layer_local_spec(
        num_experts=dims.shape.num_experts if has_experts else None,
        qk_layernorm=has_norm,
        multi_latent_attention=is_compressed,
        normalization="RMSNorm",
    )
    parts, attention = spec.submodules, spec.submodules.self_attention.submodules
    parts.input_layernorm = parts.pre_mlp_layernorm = PlainNorm
    attention.core_attention = CausalAttention
    if has_norm:
        attention.q_layernorm = PlainNorm
        setattr(attention, "kv_layernorm" if is_compressed else "k_layernorm", PlainNorm)
    return spec


def replicate_downward(chunks: Iterable[Any]) -> None:
    """Replace the layers that compress by whole ones.

    Megatron's local layers divide them by rows, and then lose the gradient that other ranks' heads have for the part of
    a key that all heads share.
    """
    for attention in list_attentions(chunks):
        for name in ("linear_q_down_proj", "linear_kv_down_proj"):
            divided = getattr(attention, name, None)
            if divided is not None:
                setattr(attention, name, ReplicatedLinear(divided.input_size, divided.output_size, bias=False))


def list_layers(chunks: Iterable[Any]) -> Iterator[Any]:
    """Yield every layer of a rank."""
    return (layer for chunk in chunks for layer in chunk.decoder.layers)


def list_attentions(chunks: Iterable[Any]) -> Iterator[Any]:
    """Yield the attention of every layer of a rank."""
    return (layer.self_attention for layer in list_layers(chunks))


def skip_output_layer(chunk: Any) -> None:
    """Let the output layer pass on what it is given; its weight stays where it is."""
    if chunk.post_process:
        chunk.output_layer.forward = lambda hidden, **_: (hidden, None)


def compute_token_logprobs(
    chunk: Any,
    micro: MicroBatch,
    hidden_BSH: Tensor,
    *,
    positions: ContextGroup,
    vocabulary_size: int,
    temperature: float,
    has_entropy_bonus: bool = False,
) -> tuple[Tensor, Tensor]:
    """Compute the log-probs of the micro-batch's model tokens, and the entropies of their distributions.

    The last part of the model, `chunk`, has the output layer. The ranks of `positions` divide the hidden states.
    """
    note_work()
    weight_VH = chunk.output_layer.weight
    if weight_VH is None:  # the embedding's
        weight_VH = chunk.shared_embedding_or_output_weight()
    own_BS = positions.take(micro.mask_BT)
    numbers_BT = micro.mask_BT.flatten().cumsum(0).view_as(micro.mask_BT) - 1
    own_N = positions.take(numbers_BT)[own_BS]
    if parallel_state.get_tensor_model_parallel_world_size() > 1:
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
    if positions.size == 1:
        return found
    logprobs_N, entropy_N = (
        reduce_from_tensor_model_parallel_region(
            each.new_zeros(len(micro.targets_N)).index_put((own_N,), each), group=positions.group
        )
        for each in found
    )
    return logprobs_N, entropy_N
