"""Attention without a matrix of all pairs of tokens, whatever the sizes of its heads: both trainers call it.

    attend_causally   every position attends to itself and to those before it

PyTorch's flash kernels, on GPUs and on CPUs, want values as large as keys. Compressed attention (MLA) has smaller ones:
on a GPU only the memory-efficient kernel takes them, which is slower, and on a CPU none does: the whole matrix is made.
Values with zeros behind them give the same output with zeros behind it.

Legend: B rows, T positions, H heads of queries, K heads of keys and values, D size of a key, V size of a value
"""

from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention


def attend_causally(
    query_BHTD: Tensor, key_BKTD: Tensor, value_BKTV: Tensor, *, scale: float | None, mask_TT: Tensor | None = None
) -> Tensor:
    """Compute attention, as BHTV; a mask selects pairs, in place of all earlier positions."""
    size, missing = value_BKTV.shape[-1], key_BKTD.shape[-1] - value_BKTV.shape[-1]
    found_BHTD = scaled_dot_product_attention(
        query_BHTD,
        key_BKTD,
        pad(value_BKTV, (0, missing)) if missing > 0 else value_BKTV,
        attn_mask=mask_TT,
        is_causal=mask_TT is None,
        scale=scale,
        enable_gqa=query_BHTD.shape[1] != key_BKTD.shape[1],
    )
    return found_BHTD[..., :size]
