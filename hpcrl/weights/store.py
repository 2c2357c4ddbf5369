"""Versions of the weights: published once, complete or absent, never going back.

    WeightStore   what trainers and engines see
    FileStore     on a filesystem that both see; survives kill -9, garbage and a full disk
    MemoryStore   in one process

Who only wants to know which versions there are asks hpcrl.weights.versions, which imports nothing heavy.
"""

import os
import time
from pathlib import Path
from typing import Protocol

import msgspec
import torch
import xxhash
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from hpcrl.errors import WeightsError
from hpcrl.files import discard, private_dir, publish, staged
from hpcrl.weights.versions import (
    Manifest,
    listed,
    newest_manifest,
    read_manifest,
    tensors_file,
    version_dir,
)

__all__ = ["FileStore", "Manifest", "MemoryStore", "WeightStore"]


class WeightStore(Protocol):
    """Where the trainer leaves new versions and engines find them."""

    def publish(self, tensors: dict[str, torch.Tensor], *, version: int, step: int) -> Manifest:
        """Add a version, which must be newer than all others."""

    def newest(self) -> Manifest | None:
        """The newest complete version; cheap enough to ask many times a second."""

    def load(self, version: int) -> dict[str, torch.Tensor]:
        """The tensors of a version, checked against its manifest; they are read only."""

    def prune(self, *, keep: int) -> None:
        """Drop all but the newest `keep` versions."""


class FileStore:
    """One directory a version (see hpcrl.weights.versions); one process publishes, any number read."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def publish(self, tensors: dict[str, torch.Tensor], *, version: int, step: int) -> Manifest:
        _check_newer(version, than=max(listed(self.directory), default=None))
        on_cpu = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
        manifest = _manifest(on_cpu, version=version, step=step)
        private_dir(self.directory)
        self._drop_torn()
        target = version_dir(self.directory, version)
        try:
            with staged(target) as temporary:
                temporary.mkdir(mode=0o700)
                _save(on_cpu, temporary / tensors_file(self.directory, version).name)
                publish(temporary / "manifest.json", msgspec.json.encode(manifest))
        except (OSError, SafetensorError, RuntimeError) as error:
            size_mib = sum(tensor.nbytes for tensor in on_cpu.values()) / 2**20
            raise WeightsError(
                f"version {version} ({size_mib:.1f} MiB) cannot be written to {self.directory}: {error}; "
                "the versions before it are untouched"
            ) from error
        return manifest

    def newest(self) -> Manifest | None:
        return newest_manifest(self.directory)

    def load(self, version: int) -> dict[str, torch.Tensor]:
        manifest = read_manifest(self.directory, version)
        path = tensors_file(self.directory, version)
        try:
            tensors: dict[str, torch.Tensor] = load_file(path)
        except (OSError, SafetensorError) as error:
            raise WeightsError(f"{path} cannot be read ({error}): remove {path.parent}, or take the newest") from error
        _verify(tensors, manifest, where=str(path))
        return tensors

    def prune(self, *, keep: int) -> None:
        for version in listed(self.directory)[: -max(keep, 1)]:
            discard(version_dir(self.directory, version))

    def _drop_torn(self) -> None:
        """Remove what a publisher left that was killed: only one publishes at a time, so nobody is writing it."""
        for path in self.directory.glob(".v*.tmp"):
            discard(path)


class MemoryStore:
    """Versions in one process, for tests and for a trainer and an engine that share it."""

    def __init__(self) -> None:
        self._versions: dict[int, tuple[Manifest, dict[str, torch.Tensor]]] = {}

    def publish(self, tensors: dict[str, torch.Tensor], *, version: int, step: int) -> Manifest:
        _check_newer(version, than=max(self._versions, default=None))
        copies = {name: tensor.detach().cpu().clone() for name, tensor in tensors.items()}
        manifest = _manifest(copies, version=version, step=step)
        self._versions[version] = (manifest, copies)
        return manifest

    def newest(self) -> Manifest | None:
        return self._versions[max(self._versions)][0] if self._versions else None

    def load(self, version: int) -> dict[str, torch.Tensor]:
        if version not in self._versions:
            there = ", ".join(map(str, sorted(self._versions))) or "none"
            raise WeightsError(f"version {version} is not in memory (there: {there}): take the newest")
        manifest, tensors = self._versions[version]
        _verify(tensors, manifest, where="memory")
        return dict(tensors)

    def prune(self, *, keep: int) -> None:
        for version in sorted(self._versions)[: -max(keep, 1)]:
            del self._versions[version]


def _check_newer(version: int, *, than: int | None) -> None:
    if version < 0 or (than is not None and version <= than):
        raise WeightsError(f"version {version} cannot be published: {than} is the newest, and versions never go back")


def _manifest(tensors: dict[str, torch.Tensor], *, version: int, step: int) -> Manifest:
    checksums = {name: _checksum(tensor) for name, tensor in tensors.items()}
    return Manifest(version=version, step=step, checksums=checksums, created=time.time())


def _checksum(tensor: torch.Tensor) -> str:
    flat = tensor.contiguous().reshape(-1).view(torch.uint8)
    return xxhash.xxh3_128_hexdigest(flat.numpy().data)


def _save(tensors: dict[str, torch.Tensor], path: Path) -> None:
    save_file(tensors, path)
    path.chmod(0o600)
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _verify(tensors: dict[str, torch.Tensor], manifest: Manifest, *, where: str) -> None:
    if odd := sorted(tensors.keys() ^ manifest.checksums.keys()):
        raise WeightsError(f"{where}: tensor {odd[0]!r} is in the file or in the manifest, but not in both")
    for name, tensor in tensors.items():
        if (seen := _checksum(tensor)) != manifest.checksums[name]:
            raise WeightsError(
                f"{where}: tensor {name!r} has checksum {seen}, its manifest says {manifest.checksums[name]}: "
                "the file is damaged; take another version"
            )
