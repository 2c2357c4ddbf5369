"""Tensors of a layout, with values that depend on the version."""

import torch

from hpcrl.weights.layout import TensorLayout


def make_tensors(layout: TensorLayout, version: int) -> dict[str, torch.Tensor]:
    """Make all tensors of a version, as one rank that held everything would have them."""
    dice = torch.Generator().manual_seed(version)
    return {t.name: torch.randn(t.shape, generator=dice).to(getattr(torch, t.dtype)) for t in layout.tensors}
