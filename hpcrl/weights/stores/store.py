"""The protocols of stores of weight versions; a version is published once, complete or absent, and never goes back.

    WeightSource  the interface for engines
    WeightStore   the interface for trainers, which also publish
    NewestSource  a source that reads from several
    view_tensors  the tensors in a slot of a window
    Tensors       tensors by name

The stores are `file_store`, `window_store` and `sharded_store`. torch is imported with the first tensor: processes that
only follow versions, such as those of vLLM servers and of simulated engines, do without it.
"""

import time
import warnings
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from hpcrl.errors import WeightsError
from hpcrl.system.files import sync_file
from hpcrl.weights.checksum import hash_bytes, start_hash
from hpcrl.weights.layout import TensorLayout, TensorSlot
from hpcrl.weights.versions import VersionManifest, WeightVersion
from hpcrl.weights.window.file import process_tensors

if TYPE_CHECKING:
    import torch

Tensors = dict[str, "torch.Tensor"]
CHUNK_BYTES = 512 << 10
"""Bytes copied, then hashed: what was written is still in a core's cache when it is read again."""
warnings.filterwarnings("ignore", message="The given buffer is not writable")  # nothing is written to it


class WeightSource(Protocol):
    """The interface through which engines read versions."""

    def newest(self) -> VersionManifest | None:
        """Return the newest complete version; cheap enough to call many times a second."""

    def load(self, version: int) -> Tensors:
        """Load the tensors of a version, checked against its manifest; they are read-only, and stay valid."""

    def read_version(self, version: int) -> AbstractContextManager[Tensors]:
        """Load the tensors for the length of a block, without a copy if possible.

        WeightsError at the end of the block: what was read may be of another version, so read the newest again.
        """

    def is_intact(self, version: int) -> bool:
        """Return True, inside a block of `read_version`, if the version is still whole, and what was read right."""

    def check_version(self, version: int) -> None:
        """Raise WeightsError unless the version can be read: for engines without a model."""


class WeightStore(WeightSource, Protocol):
    """The interface through which the trainer publishes versions."""

    def publish(self, tensors: Tensors, weight_version: WeightVersion) -> VersionManifest:
        """Publish a version, which must be newer than all others."""

    def prune(self, *, keep: int) -> None:
        """Remove all but the newest `keep` versions."""


class NewestSource:
    """A source that reads each version from the first of several sources, the fastest first, that has it."""

    def __init__(self, *sources: WeightSource) -> None:
        self._sources = sources
        self._current_source = sources[-1]

    def newest(self) -> VersionManifest | None:
        found = [manifest for source in self._sources if (manifest := source.newest()) is not None]
        return max(found, key=lambda manifest: manifest.version, default=None)

    def load(self, version: int) -> Tensors:
        return self._find_source(version).load(version)

    def read_version(self, version: int) -> AbstractContextManager[Tensors]:
        self._current_source = self._find_source(version)
        return self._current_source.read_version(version)

    def is_intact(self, version: int) -> bool:
        return self._current_source.is_intact(version)

    def check_version(self, version: int) -> None:
        self._find_source(version).check_version(version)

    def _find_source(self, version: int) -> WeightSource:
        for source in self._sources[:-1]:
            if (manifest := source.newest()) is not None and manifest.version == version:
                return source
        return self._sources[-1]


def view_tensors(slot: memoryview, layout: TensorLayout) -> Tensors:
    """Return the tensors in a slot without a copy; they are valid as long as the slot is."""
    import torch

    flat = torch.frombuffer(slot, dtype=torch.uint8) if layout.nbytes else torch.empty(0, dtype=torch.uint8)
    return {
        tensor.name: flat[tensor.offset : tensor.offset + tensor.nbytes]
        .view(getattr(torch, tensor.dtype))
        .view(tensor.shape)
        for tensor in layout.tensors
    }


def _copy_tensors(tensors: Tensors, slot: memoryview, layout: TensorLayout) -> list[bytes]:
    """Copy all tensors into a slot on a few threads; return the checksums of the copies."""
    import torch

    sums = [b""] * len(layout.tensors)
    flat = torch.frombuffer(slot, dtype=torch.uint8) if layout.nbytes else torch.empty(0, dtype=torch.uint8)

    def copy(index: int, slot: TensorSlot) -> None:
        target = flat[slot.offset : slot.offset + slot.nbytes]
        source = tensors[slot.name].detach()
        if source.device.type == "cpu" and source.is_contiguous():
            sums[index] = _copy_and_hash(source.reshape(-1).view(torch.uint8).numpy(), target.numpy())
        else:
            target.view(source.dtype).view(source.shape).copy_(source)
            sums[index] = hash_bytes(target.numpy().data)

    process_tensors(layout, copy)
    return sums


def _copy_and_hash(source: Any, target: Any) -> bytes:
    """Copy bytes; return the checksum of the copy, computed chunk by chunk while the cache holds it."""
    import numpy as np

    hasher = start_hash()
    for start in range(0, len(source), CHUNK_BYTES):
        chunk = target[start : start + CHUNK_BYTES]
        np.copyto(chunk, source[start : start + CHUNK_BYTES])
        hasher.update(chunk)
    return hasher.digest()


def _make_manifest(weight_version: WeightVersion, checksums: dict[str, str]) -> VersionManifest:
    return VersionManifest(
        version=weight_version.version, step=weight_version.step, checksums=checksums, created=time.time()
    )


def _checksums(tensors: Tensors) -> dict[str, str]:
    return {name: _hash_tensor(tensor) for name, tensor in tensors.items()}


def _hash_tensor(tensor: "torch.Tensor") -> str:
    import torch

    flat = tensor.contiguous().reshape(-1).view(torch.uint8)
    return hash_bytes(flat.numpy().data).hex()


def _save_tensors(tensors: Tensors, path: Path) -> None:
    from safetensors.torch import save_file

    save_file(tensors, path)
    path.chmod(0o600)
    sync_file(path)


def _verify_tensors(tensors: Tensors, manifest: VersionManifest, *, where: str) -> None:
    if unmatched := sorted(tensors.keys() ^ manifest.checksums.keys()):
        raise WeightsError(f"{where}: tensor {unmatched[0]!r} is in the file or in the manifest, but not in both")
    for name, tensor in tensors.items():
        if (actual := _hash_tensor(tensor)) != manifest.checksums[name]:
            raise WeightsError(
                f"{where}: tensor {name!r} has checksum {actual}, its manifest has {manifest.checksums[name]}: "
                "the file is damaged; load another version"
            )
