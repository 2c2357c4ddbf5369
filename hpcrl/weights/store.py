"""Versions of the weights: published once, complete or absent, never going back."""

from typing import TYPE_CHECKING, Protocol

import msgspec

if TYPE_CHECKING:
    import torch


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """What a version is; published last, so a version without it does not exist."""

    version: int
    step: int
    """The training step that made it; after a crash and a resume, versions go on while steps go back."""
    checksums: dict[str, str]
    """xxh3 of every tensor."""
    created: float


class WeightStore(Protocol):
    """Where the trainer leaves new versions and engines find them."""

    def publish(self, tensors: "dict[str, torch.Tensor]", *, version: int, step: int) -> Manifest: ...

    def newest(self) -> Manifest | None:
        """The newest complete version; cheap enough to ask many times a second."""

    def load(self, version: int) -> "dict[str, torch.Tensor]":
        """The tensors of a version, checked against its manifest."""
