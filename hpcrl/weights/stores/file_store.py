"""The store of weight versions as safetensors files on a shared filesystem.

It survives kill -9, garbage and a full disk.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
from safetensors import SafetensorError

from hpcrl.errors import WeightsError
from hpcrl.system.file_watch import WatchedValue
from hpcrl.system.files import make_private_dir, publish_file, remove_path, staged_path
from hpcrl.weights import tensor_file
from hpcrl.weights.layout import TensorLayout
from hpcrl.weights.stores.store import Tensors, compute_checksums, make_manifest, save_tensors, verify_tensors
from hpcrl.weights.versions import (
    VersionManifest,
    WeightVersion,
    check_newer,
    find_newest_manifest,
    list_versions,
    read_manifest,
    tensors_file,
    version_dir,
)


class FileStore:
    """A directory per version (see `hpcrl.weights.versions`); one process publishes, any number read."""

    def __init__(self, directory: Path, *, watch_s: float | None = None) -> None:
        """Read the newest version each time, or for a follower after a change, seen within `watch_s`."""
        self.directory = directory
        self._newest: WatchedValue[VersionManifest | None] | None = None
        if watch_s is not None:
            self._newest = WatchedValue(directory, lambda: find_newest_manifest(directory), longest_s=watch_s)

    def publish(self, tensors: Tensors, weight_version: WeightVersion) -> VersionManifest:
        version = weight_version.version
        check_newer(version, newest=max(list_versions(self.directory), default=None))
        on_cpu = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
        manifest = make_manifest(weight_version, compute_checksums(on_cpu))
        with self._make_version(version, nbytes=sum(tensor.nbytes for tensor in on_cpu.values())) as temporary:
            save_tensors(on_cpu, temporary / tensors_file(self.directory, version).name)
            publish_file(temporary / "manifest.json", msgspec.json.encode(manifest))
        return manifest

    def publish_each(
        self, layout: TensorLayout, tensors: Iterable[memoryview], weight_version: WeightVersion
    ) -> VersionManifest:
        """Publish tensors that arrive one by one, in the layout's order: at most one is in memory."""
        version = weight_version.version
        check_newer(version, newest=max(list_versions(self.directory), default=None))
        with self._make_version(version, nbytes=layout.nbytes) as temporary:
            path = temporary / tensors_file(self.directory, version).name
            checksums = tensor_file.write_tensors(layout, tensors, path)
            manifest = make_manifest(weight_version, checksums)
            publish_file(temporary / "manifest.json", msgspec.json.encode(manifest))
        return manifest

    def newest(self) -> VersionManifest | None:
        return self._newest.poll() if self._newest is not None else find_newest_manifest(self.directory)

    def load(self, version: int) -> Tensors:
        from safetensors.torch import load_file

        manifest = read_manifest(self.directory, version)
        path = tensors_file(self.directory, version)
        try:
            tensors: Tensors = load_file(path)
        except (OSError, SafetensorError) as error:
            raise WeightsError(f"{path} cannot be read ({error}): remove {path.parent}, or load the newest") from error
        verify_tensors(tensors, manifest, where=str(path))
        return tensors

    @contextmanager
    def read_version(self, version: int) -> Iterator[Tensors]:
        yield self.load(version)

    def is_intact(self, version: int) -> bool:
        return True  # the tensors were copied out of the file

    def check_version(self, version: int) -> None:
        self.load(version)

    def prune(self, *, keep: int) -> None:
        for version in list_versions(self.directory)[: -max(keep, 1)]:
            remove_path(version_dir(self.directory, version))

    @contextmanager
    def _make_version(self, version: int, *, nbytes: int) -> Iterator[Path]:
        """Yield a directory that becomes the version's when the block ends without an error."""
        make_private_dir(self.directory)
        self._remove_unfinished()
        try:
            with staged_path(version_dir(self.directory, version)) as temporary:
                temporary.mkdir(mode=0o700)
                yield temporary
        except (OSError, SafetensorError, RuntimeError) as error:
            raise WeightsError(
                f"version {version} ({nbytes / 2**20:.1f} MiB) cannot be written to {self.directory}: {error}; "
                "the versions before it are untouched"
            ) from error

    def _remove_unfinished(self) -> None:
        """Remove what a killed publisher left: only one publishes at a time, so no process is writing it."""
        for path in self.directory.glob(".v*.tmp"):
            remove_path(path)
