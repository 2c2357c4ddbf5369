"""Versions of the weights: published once, complete or absent, never going back.

    WeightSource  what engines see
    WeightStore   what trainers see besides
    FileStore     on a filesystem that both see; survives kill -9, garbage and a full disk
    WindowStore   in the shared memory of a node (hpcrl.weights.window.window); two versions, no copies for readers
    MemoryStore   in one process
    NewestSource  a source that asks several

Who only wants to know which versions there are asks hpcrl.weights.versions, which imports nothing heavy.
"""

import time
import warnings
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from safetensors.torch import save_file

from hpcrl.errors import WeightsError
from hpcrl.system.files import sync_file
from hpcrl.weights.checksum import hash_bytes, start_hash
from hpcrl.weights.layout import TensorLayout, TensorSlot
from hpcrl.weights.versions import VersionManifest, WeightVersion
from hpcrl.weights.window.file import process_tensors

Tensors = dict[str, torch.Tensor]
CHUNK_BYTES = 512 << 10
"""Copied and hashed: what was written is still in a core's cache when it is read again."""
warnings.filterwarnings("ignore", message="The given buffer is not writable")  # nor is anything written to it


class WeightSource(Protocol):
    """Where engines find versions."""

    def newest(self) -> VersionManifest | None:
        """The newest complete version; cheap enough to ask many times a second."""

    def load(self, version: int) -> Tensors:
        """The tensors of a version, checked against its manifest; they are read only, and stay."""

    def read_version(self, version: int) -> AbstractContextManager[Tensors]:
        """The same for the length of a block, without a copy where there need be none.

        WeightsError on the way out: what was read may be of another version, so read the newest again.
        """

    def is_intact(self, version: int) -> bool:
        """In the block of `read_version`: is it whole at this moment, so that what was read is right?"""


class WeightStore(WeightSource, Protocol):
    """Where the trainer leaves new versions."""

    def publish(self, tensors: Tensors, weight_version: WeightVersion) -> VersionManifest:
        """Add a version, which must be newer than all others."""

    def prune(self, *, keep: int) -> None:
        """Drop all but the newest `keep` versions."""


class NewestSource:
    """Asks several sources, the fastest first; a version is read from the first that has it."""

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

    def _find_source(self, version: int) -> WeightSource:
        for source in self._sources[:-1]:
            if (manifest := source.newest()) is not None and manifest.version == version:
                return source
        return self._sources[-1]


def view_tensors(slot: memoryview, layout: TensorLayout) -> Tensors:
    """The tensors in a slot, without a copy; they are valid as long as the slot is."""
    flat = torch.frombuffer(slot, dtype=torch.uint8) if layout.nbytes else torch.empty(0, dtype=torch.uint8)
    return {
        tensor.name: flat[tensor.offset : tensor.offset + tensor.nbytes]
        .view(getattr(torch, tensor.dtype))
        .view(tensor.shape)
        for tensor in layout.tensors
    }


def _copy_tensors(tensors: Tensors, slot: memoryview, layout: TensorLayout) -> list[bytes]:
    """Copy all tensors into a slot on a few threads; the checksums of what lies there now."""
    sums = [b""] * len(layout.tensors)
    flat = torch.frombuffer(slot, dtype=torch.uint8) if layout.nbytes else torch.empty(0, dtype=torch.uint8)

    def copy(index: int, placed: TensorSlot) -> None:
        target = flat[placed.offset : placed.offset + placed.nbytes]
        source = tensors[placed.name].detach()
        if source.device.type == "cpu" and source.is_contiguous():
            sums[index] = _copy_and_hash(source.reshape(-1).view(torch.uint8).numpy(), target.numpy())
        else:
            target.view(source.dtype).view(source.shape).copy_(source)
            sums[index] = hash_bytes(target.numpy().data)

    process_tensors(layout, copy)
    return sums


def _copy_and_hash(source: Any, target: Any) -> bytes:
    """Copy bytes; the checksum of what is there now, taken piece by piece while the cache holds it."""
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


def _hash_tensor(tensor: torch.Tensor) -> str:
    flat = tensor.contiguous().reshape(-1).view(torch.uint8)
    return hash_bytes(flat.numpy().data).hex()


def _save_tensors(tensors: Tensors, path: Path) -> None:
    save_file(tensors, path)
    path.chmod(0o600)
    sync_file(path)


def _verify_tensors(tensors: Tensors, manifest: VersionManifest, *, where: str) -> None:
    if unmatched := sorted(tensors.keys() ^ manifest.checksums.keys()):
        raise WeightsError(f"{where}: tensor {unmatched[0]!r} is in the file or in the manifest, but not in both")
    for name, tensor in tensors.items():
        if (actual := _hash_tensor(tensor)) != manifest.checksums[name]:
            raise WeightsError(
                f"{where}: tensor {name!r} has checksum {actual}, its manifest says {manifest.checksums[name]}: "
                "the file is damaged; take another version"
            )
