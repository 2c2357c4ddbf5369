"""The protocols of stores of weight versions; a version is published once, complete or absent, and never goes back.

    WeightSource  the interface for engines
    WeightStore   the interface for trainers, which also publish
    NewestSource  a source that reads from several
    view_tensors  the tensors in a slot of a window
    copy_values   copy values into a tensor, perhaps of fewer bits
    iterate_bytes  tensors as they are published, one by one
    check_tensors  whether tensors fit a layout
    Tensors       tensors by name

The stores are `file_store`, `window_store` and `sharded_store`. torch is imported with the first tensor: processes that
only follow versions, such as those of vLLM servers and of simulated engines, do without it.
"""

import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from hpcrl.errors import WeightsError
from hpcrl.system.files import sync_file
from hpcrl.weights.checksum import hash_bytes, start_hash
from hpcrl.weights.layout import TensorLayout, TensorSlot, check_shard, make_whole_shard
from hpcrl.weights.versions import VersionManifest, WeightVersion
from hpcrl.weights.window.file import process_tensors

if TYPE_CHECKING:
    import torch

Tensors = Mapping[str, "torch.Tensor"]
ROUNDING_CHUNK_BYTES = 512 << 10
"""Bytes copied, then hashed: what was written is still in a core's cache when it is read again."""
ROUNDED_PART_BYTES = 64 << 20
"""Bytes of a tensor on a GPU that are rounded there at a time."""
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


def check_tensors(tensors: Tensors, layout: TensorLayout) -> None:
    """Raise WeightsError, naming the tensor, unless these are the tensors of a layout, or may be rounded to them."""
    slots = layout.tensors_by_name()
    if unmatched := sorted(tensors.keys() ^ slots.keys()):
        raise WeightsError(
            f"tensor {unmatched[0]!r} is in the trainer or in the layout of its versions, not in both: is it the same "
            "model?"
        )
    for name, tensor in tensors.items():
        dtype, shape = str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)
        check_shard(make_whole_shard(slots[name]), slots, dtype=dtype, shape=shape)


def copy_values(source: "torch.Tensor", target: "torch.Tensor") -> None:
    """Copy values into a tensor on the CPU; a GPU rounds them to its type itself, and transfers only what is kept."""
    if source.dtype == target.dtype or source.device.type == "cpu":
        target.copy_(source)
    else:
        _copy_rounded(source, target)


def _copy_rounded(source: "torch.Tensor", target: "torch.Tensor") -> None:
    """Round values on their own device, and copy them; a large tensor in parts, which need little memory there."""
    if not source.ndim:
        target.copy_(source.to(target.dtype))
        return
    num_rows = max(1, ROUNDED_PART_BYTES * len(source) // max(1, source.nbytes))
    for start in range(0, len(source), num_rows):
        target[start : start + num_rows].copy_(source[start : start + num_rows].to(target.dtype))


def iterate_bytes(tensors: Tensors, layout: TensorLayout) -> Iterator[memoryview]:
    """Yield the bytes of all tensors in a layout's order and types; at most one is copied at a time."""
    import torch

    check_tensors(tensors, layout)
    for slot in layout.tensors:
        source = tensors[slot.name].detach()
        dtype = getattr(torch, slot.dtype)
        if source.dtype != dtype or source.device.type != "cpu" or not source.is_contiguous():
            copy = torch.empty(slot.shape, dtype=dtype)
            copy_values(source, copy)
            source = copy
        yield source.reshape(-1).view(torch.uint8).numpy().data


def copy_tensors(tensors: Tensors, slot: memoryview, layout: TensorLayout) -> list[bytes]:
    """Copy all tensors into a slot on a few threads; return the checksums of the copies."""
    sums = [b""] * len(layout.tensors)
    targets = view_tensors(slot, layout)

    def copy(index: int, slot: TensorSlot) -> None:
        source, target = tensors[slot.name].detach(), targets[slot.name]
        if source.device.type == "cpu" and source.is_contiguous():
            sums[index] = _copy_and_hash(source.reshape(-1), target.reshape(-1))
        else:
            copy_values(source, target)
            sums[index] = hash_bytes(_view_bytes(target))

    process_tensors(layout, copy)
    return sums


def _copy_and_hash(source: "torch.Tensor", target: "torch.Tensor") -> bytes:
    """Copy values; return the checksum of the copy, computed chunk by chunk while the cache holds it."""
    import numpy as np

    hasher, num_values, size = start_hash(), ROUNDING_CHUNK_BYTES // source.itemsize, target.itemsize
    copied: Any = np.asarray(_view_bytes(target))
    given = np.asarray(_view_bytes(source)) if source.dtype == target.dtype else None
    for start in range(0, len(source), num_values):
        end = min(start + num_values, len(source))
        chunk = copied[start * size : end * size]
        if given is None:
            target[start:end].copy_(source[start:end])
        else:
            np.copyto(chunk, given[start * size : end * size])
        hasher.update(chunk)
    return hasher.digest()


def _view_bytes(tensor: "torch.Tensor") -> memoryview:
    import torch

    data: memoryview = tensor.reshape(-1).view(torch.uint8).numpy().data
    return data


def make_manifest(weight_version: WeightVersion, checksums: dict[str, str]) -> VersionManifest:
    return VersionManifest(
        version=weight_version.version, step=weight_version.step, checksums=checksums, created=time.time()
    )


def compute_checksums(tensors: Tensors) -> dict[str, str]:
    return {name: _hash_tensor(tensor) for name, tensor in tensors.items()}


def _hash_tensor(tensor: "torch.Tensor") -> str:
    import torch

    flat = tensor.contiguous().reshape(-1).view(torch.uint8)
    return hash_bytes(flat.numpy().data).hex()


def save_tensors(tensors: Tensors, path: Path) -> None:
    from safetensors.torch import save_file

    save_file(tensors, path)
    path.chmod(0o600)
    sync_file(path)


def verify_tensors(tensors: Tensors, manifest: VersionManifest, *, where: str) -> None:
    if unmatched := sorted(tensors.keys() ^ manifest.checksums.keys()):
        raise WeightsError(f"{where}: tensor {unmatched[0]!r} is in the file or in the manifest, but not in both")
    for name, tensor in tensors.items():
        if (actual := _hash_tensor(tensor)) != manifest.checksums[name]:
            raise WeightsError(
                f"{where}: tensor {name!r} has checksum {actual}, its manifest has {manifest.checksums[name]}: "
                "the file is damaged; load another version"
            )
