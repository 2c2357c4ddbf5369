"""The parts of a megatron-core decoder layer that are hpcrl's: the same code on GPUs and on CPUs.

    make_block_spec       the layers of a rank's stage
    replicate_downward    compressed attention whose compressing layers every rank has whole
    CausalAttention       PyTorch's attention, which has flash kernels on GPUs and never a matrix of all pairs of tokens
    PlainNorm             RMSNorm that also serves sequence parallelism
    ReplicatedLinear      a linear layer that every rank has whole

Legend: S positions, B rows, H heads of this rank, K key and value heads of this rank, D size of a head
"""

from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from torch import Tensor

from hpcrl.trainers.megatron.weight_names import ModelDims

if find_spec("transformer_engine") is None:  # Megatron 0.16.1 looks for its own module with parts of that name
    multi_latent_attention.HAVE_TE = False
    moe_utils.te_general_gemm = None


class CausalAttention(torch.nn.Module):
    """The core of attention: every position attends to itself and to those before it."""

    def __init__(self, *, softmax_scale: float | None = None, **_: Any) -> None:
        super().__init__()
        self.softmax_scale = softmax_scale

    def forward(self, query_SBHD: Tensor, key_SBKD: Tensor, value_SBKD: Tensor, *_: Any, **__: Any) -> Tensor:
        found_BHSD = torch.nn.functional.scaled_dot_product_attention(
            query_SBHD.permute(1, 2, 0, 3),
            key_SBKD.permute(1, 2, 0, 3),
            value_SBKD.permute(1, 2, 0, 3),
            is_causal=True,
            scale=self.softmax_scale,
            enable_gqa=query_SBHD.shape[2] != key_SBKD.shape[2],
        )
        return found_BHSD.permute(2, 0, 1, 3).flatten(2)


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


def make_block_spec(dims: ModelDims, layers: list[int]) -> TransformerBlockSubmodules:
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


def replicate_downward(module: Any) -> None:
    """Replace the layers that compress by whole ones.

    Megatron's local layers divide them by rows, and then lose the gradient that other ranks' heads have for the part of
    a key that all heads share.
    """
    for attention in list_attentions(module):
        for name in ("linear_q_down_proj", "linear_kv_down_proj"):
            divided = getattr(attention, name, None)
            if divided is not None:
                setattr(attention, name, ReplicatedLinear(divided.input_size, divided.output_size, bias=False))


def list_attentions(module: Any) -> Iterator[Any]:
    """Yield the attention of every layer of a rank's stage."""
    return (layer.self_attention for layer in module.decoder.layers)
